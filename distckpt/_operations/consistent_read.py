"""Reading a checkpoint that other programs may overwrite or remove meanwhile."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from distckpt._base.errors import CheckpointingException, CheckpointNotFoundError, CorruptCheckpointError
from distckpt._foreign import opening
from distckpt._format.marker import read_marker
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io import background
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations

logger = logging.getLogger(__name__)

MAX_READS = 20
"""A checkpoint that is overwritten so often while it is read is not read once more."""

_Result = TypeVar("_Result")


def find_checkpoint(
    ranks: Ranks, location: str, marker: dict[str, Any] | None, verify: str
) -> tuple[dict[str, Any], StoredCheckpoint | None]:
    """Return the marker of a checkpoint, or the fields that another format's marker would need, and open it.

    Collective operation: all ranks must call it. `marker` is what rank 0 has found there, if anything; on local paths
    the others check that they see the same checkpoint. What a strategy of the caller has written is not opened.
    """

    def read() -> bytes:
        fields = opening.identify(location, marker)
        with noticing_removal(ranks, location):
            format_of = (fields["sharded_backend"], fields.get("sharded_backend_version", 1))
            is_ours = format_of == (opening.BACKEND, opening.VERSION)
            data = opening.manifest_bytes(location, fields) if is_ours else b""
        return json.dumps(fields).encode() + b"\n" + data

    text, _, data = ranks.decide("find the checkpoint", read).partition(b"\n")
    with ranks.phase("open the checkpoint"):
        fields = json.loads(text)
        manifest = fields.get("manifest")
        if ranks.size > 1:
            expected = manifest.get("checksum") if isinstance(manifest, dict) else None
            opening.check_is_same(ranks.rank, location, expected)
        return fields, opening.decode_manifest(location, data, verify) if data else None


@contextlib.contextmanager
def noticing_removal(ranks: Ranks, location: str) -> Iterator[None]:
    """Report that a checkpoint was removed while it was read, instead of reporting it as damaged."""
    try:
        yield
    except (CorruptCheckpointError, OSError) as error:
        if ranks.is_known_to_all(error) or locations.exists(location):
            raise
        raise CheckpointNotFoundError(
            f"{location!r} was removed while it was being loaded, by whatever limits how many checkpoints are kept, "
            "perhaps. What was loaded so far is incomplete: load another checkpoint."
        ) from error


def read_unchanged(
    ranks: Ranks, checkpoint_dir: str | os.PathLike[str], read: Callable[[dict[str, Any] | None], _Result]
) -> _Result:
    """Read a checkpoint; read it again when it was overwritten meanwhile, so that nothing comes from two of them.

    Collective operation: all ranks must call it. Waits first for this process to finish writing there. `read` is called
    on all ranks, several times perhaps, with the marker on rank 0 if there is one. Two checkpoints with the same marker
    have the same content: it holds the checksum of the manifest, which holds those of all data.
    """
    location = locations.normalize(checkpoint_dir)
    background.wait_for_location(location)
    for _ in range(MAX_READS):
        before = marker_of(location) if ranks.is_coordinator else None
        error, result = None, None
        try:
            result = read(before)
        except BaseException as caught:
            if not ranks.are_in_step_after(caught):
                raise
            error = caught
        may_repeat = error is None or isinstance(error, CheckpointingException | OSError)
        if ranks.is_coordinator:
            after = marker_of(location)
            # Without a marker nothing has replaced it; that it was removed is reported where it was noticed.
            may_repeat = may_repeat and before != after is not None
        if not ranks.all_gather_numbers([may_repeat]).all():
            try:
                if error is not None:
                    raise error
            finally:
                # It refers to this frame: a reference cycle would keep all that was loaded.
                del error
            return cast(_Result, result)
        if ranks.is_coordinator:
            logger.warning("%s was overwritten while it was read: reading the new one", location)
    raise CheckpointingException(
        f"{location!r} was overwritten {MAX_READS} times, each time before it was read. Load it when it is left alone."
    )


def marker_of(location: str) -> dict[str, Any] | None:
    """Return the marker, to compare it with another; None when there is none that can be read."""
    try:
        return read_marker(location)
    except (CheckpointingException, OSError):
        return None

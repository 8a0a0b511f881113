"""What a load finds out besides reading: whether requests fit the checkpoint, and if that was replaced or removed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from distckpt import validation
from distckpt._base.errors import CheckpointingException, CheckpointNotFoundError, CorruptCheckpointError
from distckpt._commit import posix
from distckpt._foreign import sources
from distckpt._format.marker import read_marker
from distckpt._io import background
from distckpt._ranks.collectives import Ranks
from distckpt._state.common_state import COMMON_KEY
from distckpt._state.shards import ShardTable, merge_tables
from distckpt._storage import locations
from distckpt.strategies.base import LoadShardedStrategy
from distckpt.validation import StrictHandling, handle_mismatch

logger = logging.getLogger(__name__)

MAX_READS = 20
"""A checkpoint that is overwritten so often while it is read is not read once more."""

_Result = TypeVar("_Result")


def find_checkpoint(
    ranks: Ranks, checkpoint_dir: str | os.PathLike[str], marker: dict[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """Find a checkpoint, after waiting for this process to finish writing it.

    Collective: every rank calls.

    Args:
        ranks: that look for it.
        checkpoint_dir: where it is.
        marker: what rank 0 has found there, if anything; others do not look.

    Returns:
        Its location and its marker; for one that others wrote, the fields that a marker would need.

    Raises:
        CheckpointNotFoundError: nothing that can be read is there.
        CorruptCheckpointError: the marker is damaged or of a newer version.
    """
    location = locations.normalize(checkpoint_dir)
    background.wait_for_location(posix.resolve(location))
    with ranks.phase("find the checkpoint", decision=True):
        if ranks.is_coordinator:
            marker = sources.identify(location, marker)
    return location, json.loads(ranks.broadcast(json.dumps(marker).encode()))


def stored_keys(ranks: Ranks, strategy: LoadShardedStrategy, location: str) -> set[str]:
    """Return the keys of the tensors and objects in a checkpoint, common state aside.

    Collective: every rank calls; rank 0 reads.
    """
    names = b""
    with ranks.phase("read the keys of the checkpoint", decision=True):
        if ranks.is_coordinator:
            stored = {shard.key for shard in strategy.load_sharded_metadata(location).values()} - {COMMON_KEY}
            names = json.dumps(sorted(stored)).encode()
    return set(json.loads(ranks.broadcast(names)))


def compare_requests(ranks: Ranks, table: ShardTable) -> None:
    """Check that the main replicas of all ranks cover each requested tensor exactly once.

    Collective: every rank calls. One process alone may ask for any part.
    """
    if ranks.size == 1:
        return
    tables = ranks.gather(table.to_bytes())
    with ranks.phase("check the requested shards", decision=True):
        if ranks.is_coordinator:
            validation.validate_shards(merge_tables(ShardTable.all_from_bytes(tables)))


def compare_keys(
    ranks: Ranks, mode: StrictHandling, asked: set[str], strategy: LoadShardedStrategy, location: str
) -> tuple[set[str], set[str]]:
    """Find missing keys (the same on all ranks) and this rank's unexpected keys, and do what the mode says."""
    if not StrictHandling.requires_explicit_ckpt_mismatch_check(mode):
        return set(), set()
    known = stored_keys(ranks, strategy, location)
    asked_by_all = [set(json.loads(text)) for text in ranks.all_gather(json.dumps(sorted(asked)).encode())]
    unexpected = asked - known
    missing = known.difference(*asked_by_all) if StrictHandling.requires_global_app_metadata(mode) else set()
    # Every rank judges the keys of all, so that all raise the same error.
    unexpected_of_all = set().union(*asked_by_all) - known
    handle_mismatch(mode, missing, unexpected_of_all, known, location, is_speaker=ranks.is_coordinator)
    return missing, unexpected


@contextlib.contextmanager
def noticing_removal(ranks: Ranks, location: str) -> Iterator[None]:
    """Say that a checkpoint was removed while it was read, instead of calling it damaged."""
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

    Two checkpoints with the same marker have the same content: it holds the checksum of the manifest, which holds
    those of all data.

    Collective: every rank calls.

    Args:
        ranks: that read together.
        checkpoint_dir: what they read.
        read: what all ranks do, given the marker on rank 0 if there is one; may be called several times.

    Raises:
        CheckpointingException: it was overwritten too often. Otherwise what `read` raises.
    """
    location = locations.normalize(checkpoint_dir)
    background.wait_for_location(posix.resolve(location))
    for _ in range(MAX_READS):
        before = _marker_of(location) if ranks.is_coordinator else None
        error, result = None, None
        try:
            result = read(before)
        except BaseException as caught:
            # Only after an error that they have exchanged are ranks in step.
            if ranks.size > 1 and (not ranks.is_known_to_all(caught) or getattr(caught, "is_lost_contact", False)):
                raise
            error = caught
        may_repeat = error is None or isinstance(error, CheckpointingException | OSError)
        if ranks.is_coordinator:
            after = _marker_of(location)
            # Without a marker nothing has been put in its place; that it was removed is said by what found out.
            may_repeat = may_repeat and before != after is not None
        if not ranks.all_gather_numbers([may_repeat]).all():
            try:
                if error is not None:
                    raise error
            finally:
                # It refers to this frame: a circle would keep all that was loaded.
                del error
            return cast(_Result, result)
        if ranks.is_coordinator:
            logger.warning("%s was overwritten while it was read: reading the new one", location)
    raise CheckpointingException(
        f"{location!r} was overwritten {MAX_READS} times, each time before it was read. Load it when it is left alone."
    )


def _marker_of(location: str) -> dict[str, Any] | None:
    """Return the marker to compare it with another; None when there is none that can be read."""
    try:
        return read_marker(location)
    except (CheckpointingException, OSError):
        return None

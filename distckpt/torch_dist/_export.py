"""The export of a checkpoint to `torch_dist`, by any number of ranks."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from distckpt._base.errors import CheckpointingException
from distckpt._base.options import Progress
from distckpt._checkpoint.consistent_read import reading
from distckpt._checkpoint.opening import check_is_unchanged, open_undisturbed
from distckpt._commit import posix
from distckpt._commit.output import OutputSettings, new_output
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._ranks.collectives import Ranks, collective
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage import locations
from distckpt.torch_dist._write import (
    common_state_to_write,
    write_chunks,
    write_metadata,
)


@collective()
def export(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    process_group: Any = None,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint as Megatron Core's `torch_dist`.

    `torch.distributed.checkpoint.load` reads it as well.

        torch_dist.export("checkpoints/iter_0001000", "megatron/iter_0001000")

    Tensors, objects and common state (as `common.pt`) keep their names, and each stored chunk
    becomes one of the result. Takes any number of ranks: each reads its share, one chunk at a time,
    and writes one file. Neither Megatron nor `torch.distributed.checkpoint` is used. The directory
    appears when it is complete.

    Collective operation: all ranks of the process group must call it.

    Args:
        checkpoint_dir: a path or URL of any checkpoint that `distckpt.load` reads.
        output_dir: a path; it must hold no checkpoint.
        overwrite: replace a checkpoint that is there.
        process_group: the ranks that export together; None for the default group, or for this
            process alone.
        progress: called with the bytes of tensors this rank has written so far and those it will
            have written.

    Raises:
        CheckpointingException: `output_dir` is a URL.
        CorruptCheckpointError: the checkpoint is damaged.
        UnsupportedObjectError: an object, or a value in the common state, has no form in files of
            torch; the message names its path and class.
        RankFailedError: raised on all ranks when any rank failed; nothing is left then.
    """
    ranks = Ranks(process_group)
    with ranks.phase("check the arguments", decision=True):
        location = locations.normalize(checkpoint_dir)
        target = posix.resolve(output_dir)
        check_place(location, target)
        if ranks.is_coordinator:
            posix.check_target(target, overwrite, os.fspath(output_dir))
    stored = open_undisturbed(ranks, location)
    with reading(ranks, [stored]):
        _write(ranks, stored, target, overwrite, progress)


def _write(
    ranks: Ranks,
    stored: StoredCheckpoint,
    target: str,
    overwrite: bool,
    progress: Progress | None,
) -> None:
    with ranks.phase("read the common state", decision=True):
        common = {}
        if ranks.is_coordinator:
            common = common_state_to_write(stored)
    chunks = _chunks_of_rank(stored, ranks.rank, ranks.size)
    num_bytes = sum(int(stored.manifest.num_bytes[chunk]) for _, chunk in chunks)
    settings = OutputSettings(num_bytes=num_bytes, overwrite=overwrite)
    with new_output(ranks, target, settings) as output, output.being_written():
        with ranks.telling("write the export") as messages:
            output.check_is_seen()
            name = f"__{ranks.rank}_0.distcp"
            written = write_chunks(stored, chunks, output.location, name, progress)
            messages.payload = json.dumps(written).encode()
        with ranks.answering(messages, "commit the export"):
            if ranks.is_coordinator:
                entries_of_ranks = [json.loads(entries) for entries in messages.payloads]
                write_metadata(stored, common, entries_of_ranks, output.location)
                if not stored.manifest.has_checksums:
                    check_is_unchanged(stored)
                output.commit(None)


def check_place(location: str, target: str) -> None:
    """Refuse a target that is a URL, or the source."""
    if not locations.is_local(target):
        raise CheckpointingException(
            f"{target!r} is a URL: export to a local path, and copy the directory."
        )
    if target == posix.resolve(location):
        raise CheckpointingException(f"The export cannot replace its own source {location!r}.")


def chunks_to_write(stored: StoredCheckpoint) -> list[tuple[str, int]]:
    """Return the keys and chunks of tensors and objects."""
    chunks = []
    for key in stored.manifest.key_index:
        if key != COMMON_KEY:
            for chunk in stored.chunks_of(key):
                chunks.append((key, chunk))
    return chunks


def _chunks_of_rank(
    stored: StoredCheckpoint,
    rank: int,
    num_ranks: int,
) -> list[tuple[str, int]]:
    """Return the keys and chunks of one rank.

    They are a run with an equal share of the bytes.
    """
    chunks = chunks_to_write(stored)
    ends = np.cumsum([int(stored.manifest.num_bytes[chunk]) + 1 for _, chunk in chunks])
    shares = (ends - 1) * num_ranks // max(1, int(ends[-1]) if chunks else 1)
    chunks_of_rank = []
    for pair, share in zip(chunks, shares.tolist(), strict=True):
        if share == rank:
            chunks_of_rank.append(pair)
    return chunks_of_rank

"""Checkpoints of torch.distributed.checkpoint, as PyTorch writes them and as Megatron Core does
(`torch_dist`).

`distckpt.load` and `distckpt.consolidate` read such directories as they are, whatever number of
ranks wrote them:

    state = distckpt.load({"model": model.sharded_state_dict()}, "megatron/iter_0001000")
    distckpt.consolidate("fsdp/step_1000", "exported")

Nothing in their pickles is ever run: see `docs/migrating-from-megatron.md`. `convert` makes
distckpt checkpoints of them, which have checksums and open faster; `export` is the way back.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._base.interrupts import operation
from distckpt._base.memory import Bytes
from distckpt._checkpoint import opening
from distckpt._checkpoint.stored_values import load_common_state, load_objects
from distckpt._commit import posix
from distckpt._commit.staging import choose_staging, make_staging
from distckpt._foreign.torch_dist.write import write_chunks, write_metadata
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.read import read_chunks
from distckpt._mapping.wrappers import CommonStateDict, ShardedObject, ShardedTensor
from distckpt._operations.save import save
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.report import SaveReport, counting
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage import locations

__all__ = ["convert", "export"]


@operation
def convert(
    source_dir: str | os.PathLike[str],
    checkpoint_dir: str | os.PathLike[str],
    *,
    common_state: CommonStateDict | None = None,
    overwrite: bool = False,
    process_group: Any = None,
    progress: Callable[[int, int], object] | None = None,
) -> SaveReport:
    """Make a distckpt checkpoint of one that PyTorch or Megatron Core wrote: tensors, objects and
    common state.

    Takes any number of ranks; each converts a share. Tensors go from file to file: a local source
    is mapped, so that a window of it at a time is copied (`max_inflight_bytes` of `save`) and the
    system may drop what was read; of a remote one (a URL) each rank holds its whole share. The
    objects of its share, and common state, are in memory whole. Each stored chunk becomes a chunk.

    Collective operation: all ranks of the process group must call it.

    Args:
        source_dir: a path or URL of what `distckpt.load` can read.
        checkpoint_dir: of the new checkpoint.
        common_state: stored in the place of the source's, for sources whose common state is
            refused.
        overwrite: replace a checkpoint that is there.
        process_group: the ranks that convert together; None for the default group, or for this
            process alone.
        progress: called with the bytes this rank has written so far and the bytes it will have, now
            and then, from one thread at a time.

    Returns:
        What was saved and how long it took.

    Raises:
        CheckpointingException: the source is a checkpoint of distckpt already.
        CorruptCheckpointError: the source is damaged.
        UnsupportedObjectError: an object, or common state, needs a class that is not read from
            pickles.
        RankFailedError: raised on all ranks when any rank failed.
    """
    ranks = Ranks(process_group)
    with ranks.phase("check the arguments"):
        location = locations.normalize(source_dir)
    data = ranks.decide(
        "open the source", lambda: opening.manifest_bytes(location, opening.identify(location))
    )
    with ranks.phase("prepare to convert"):
        stored = opening.decode_manifest(location, data, "none")
        if stored.manifest.has_checksums:
            raise CheckpointingException(
                f"{location!r} is a checkpoint of distckpt already: copy it."
            )
        if common_state is None:
            common_state = load_common_state(stored)
            if not isinstance(common_state, dict):
                kind = type(common_state).__name__
                raise CorruptCheckpointError(
                    f"The common state of {location!r} is a {kind}, not a dict."
                )
        shards = _share(stored, ranks.rank, ranks.size)
    # Under a name that no common state has; an empty list would be common state itself.
    state = {**common_state, **({uuid.uuid4().hex: shards} if shards else {})}
    tensors = [
        shard.data
        for shard in shards
        if isinstance(shard, ShardedTensor) and shard.data is not None
    ]
    count = counting(progress, sum(tensor.nbytes for tensor in tensors))
    reports: list[SaveReport] = []
    save(
        state, checkpoint_dir, overwrite=overwrite, process_group=process_group, progress=count,
        on_report=reports.append,
    )  # fmt: skip
    return reports[0]


@operation
def export(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    process_group: Any = None,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Write a checkpoint as Megatron Core's `torch_dist`, which `torch.distributed.checkpoint.load`
    reads as well.

        torch_dist.export("checkpoints/iter_0001000", "megatron/iter_0001000")

    Tensors, objects and common state (as `common.pt`) keep their names, and each stored chunk
    becomes one of the
    result. Takes any number of ranks: each reads its share, one chunk at a time, and writes one
    file. Neither Megatron nor `torch.distributed.checkpoint` is used. The directory appears when it
    is complete.

    Collective operation: all ranks of the process group must call it.

    Args:
        checkpoint_dir: a path or URL of what `distckpt.load` can read.
        output_dir: a path; it must hold no checkpoint.
        overwrite: replace a checkpoint that is there.
        process_group: the ranks that export together; None for the default group, or for this
            process alone.
        progress: called with the bytes of tensors this rank has written so far and those it will
            have written.

    Raises:
        CheckpointingException: `output_dir` is a URL.
        CorruptCheckpointError: the checkpoint is damaged.
        UnsupportedObjectError: an object, or common state, has no form in files of torch.
        RankFailedError: raised on all ranks when any rank failed; nothing is left then.
    """
    ranks = Ranks(process_group)
    with ranks.phase("check the arguments"):
        location, target = locations.normalize(checkpoint_dir), posix.resolve(os.fspath(output_dir))

    def check_and_read() -> bytes:
        if not locations.is_local(target):
            raise CheckpointingException(
                f"{target!r} is a URL: export to a local path, and copy the directory."
            )
        if target == posix.resolve(location):
            raise CheckpointingException(f"The export cannot replace its own source {location!r}.")
        posix.check_target(target, overwrite, os.fspath(output_dir))
        return opening.manifest_bytes(location, opening.identify(location))

    data = ranks.decide("open the checkpoint", check_and_read)
    with ranks.phase("open the checkpoint"):
        stored = opening.decode_manifest(location, data, "full")
        mine = _chunks_of_rank(stored, ranks.rank, ranks.size)
    num_bytes = sum(int(stored.manifest.num_bytes[chunk]) for _, chunk in mine)
    place, held = choose_staging(ranks, target, num_bytes), contextlib.ExitStack()
    try:
        make_staging(ranks, place, held, names=())
        with ranks.phase("write the export"):
            written = write_chunks(
                stored, mine, place.location, f"__{ranks.rank}_0.distcp", progress
            )
        gathered = ranks.gather(json.dumps(written).encode())
        with ranks.phase("commit the export", decision=True):
            if ranks.is_coordinator:
                write_metadata(
                    stored, [json.loads(entries) for entries in gathered], place.location
                )
                posix.commit(place.location, target, overwrite)
    except BaseException:
        if ranks.is_coordinator:
            posix.abandon(place.location)
        raise
    finally:
        held.close()


def _chunks_of_rank(stored: StoredCheckpoint, rank: int, num_ranks: int) -> list[tuple[str, int]]:
    """Return the keys and chunks of one rank: a run of about as many bytes as the others have."""
    manifest = stored.manifest
    chunks = [
        (key, chunk)
        for key in manifest.key_index
        if key != COMMON_KEY
        for chunk in stored.chunks_of(key)
    ]
    ends = np.cumsum([int(manifest.num_bytes[chunk]) + 1 for _, chunk in chunks])
    shares = (ends - 1) * num_ranks // max(1, int(ends[-1]) if chunks else 1)
    return [pair for pair, share in zip(chunks, shares.tolist(), strict=True) if share == rank]


def _share(
    stored: StoredCheckpoint, rank: int, num_ranks: int
) -> list[ShardedTensor | ShardedObject]:
    """Return the chunks that one rank converts."""
    manifest = stored.manifest
    mine = _chunks_of_rank(stored, rank, num_ranks)
    contents = _tensor_contents(stored, [chunk for key, chunk in mine if not stored.is_object(key)])
    tensors: list[ShardedTensor] = []
    objects: list[ShardedObject] = []
    for key, chunk in mine:
        region, shape = manifest.chunk_region(chunk), stored.global_shape(key)
        if stored.is_object(key):
            objects.append(ShardedObject(key, None, shape, region.offset))
        else:
            dtype = stored.dtype_of(chunk)
            data = torch.from_numpy(contents[chunk]).view(dtype).reshape(region.shape)
            tensors.append(
                ShardedTensor(key, data, dtype, region.shape, shape, region.offset, None)
            )
    values = load_objects(stored, objects)
    return [
        *tensors,
        *(replace(shard, data=value) for shard, value in zip(objects, values, strict=True)),
    ]


def _tensor_contents(stored: StoredCheckpoint, chunks: list[int]) -> Mapping[int, Bytes]:
    """Return the bytes of chunks: parts of mapped files, of which nothing is read yet, or all of
    them from a URL.
    """
    if not locations.is_local(stored.location):
        blobs = read_chunks(stored, chunks)
        return {
            chunk: np.frombuffer(bytearray(blob), np.uint8)
            for chunk, blob in zip(chunks, blobs, strict=True)
        }
    manifest = stored.manifest
    # Private, as torch requires memory that it may write to.
    files = {
        path: np.memmap(path, np.uint8, mode="c")
        for path in sorted({stored.path_of(chunk) for chunk in chunks})
    }
    contents = {}
    for chunk in chunks:
        first = int(manifest.first_bytes[chunk])
        contents[chunk] = files[stored.path_of(chunk)][
            first : first + int(manifest.num_bytes[chunk])
        ]
    return contents

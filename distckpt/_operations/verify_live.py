"""Comparing a checkpoint with the tensors that the ranks of a job have in memory."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from distckpt._base.dtypes import FROM_NAME, TO_NAME
from distckpt._base.options import Progress
from distckpt._base.threads import ProgressCounter, run_threads
from distckpt._checkpoint.consistent_read import read_attempts
from distckpt._checkpoint.opening import open_checkpoint
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._geometry.units import cut_region
from distckpt._io.read import num_threads_at, read_copies
from distckpt._mapping.sharded_tensor import ShardedTensor
from distckpt._mapping.wrappers import ShardedStateDict
from distckpt._operations.planned_save import SaveRequest
from distckpt._operations.save import describe_shards
from distckpt._operations.verify import Problem, VerifyReport
from distckpt._operations.windows import WINDOW_ELEMENTS
from distckpt._plan.load import Request, plan_load
from distckpt._quantization.numbers import scratch
from distckpt._ranks.collectives import Ranks, collective
from distckpt._state.shards import region_view, shard_regions


class _Window(NamedTuple):
    """A region of a tensor that is in memory, and its values there."""

    key: str
    region: Region
    values: torch.Tensor


@collective()
def compare_with_memory(
    location: str,
    live: ShardedStateDict,
    *,
    process_group: Any = None,
    num_threads: int | None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compare what each rank holds with a checkpoint, see `verify`.

    Collective operation: all ranks must call it.
    """
    started = time.perf_counter()
    ranks = Ranks(process_group)
    request = SaveRequest(
        path=location, process_group=process_group, has_target=False, verb="verify"
    )
    shards, _ = describe_shards(ranks, live, request)
    held = [shard for shard in shards if isinstance(shard, ShardedTensor)]
    for attempt in read_attempts(ranks, location):
        with attempt:
            stored = open_checkpoint(ranks, location, marker=attempt.marker)
            with ranks.phase("compare with memory"):
                problems, num_bytes = _compare(ranks, stored, held, num_threads, progress)
    keys, of_all, num_read = _of_all_ranks(ranks, held, problems, num_bytes)
    if not keys:
        raise ValueError(
            "`live` holds no tensor that could be compared on any rank: plain tensors are common "
            "state. Give it the module itself, such as {'model': model}."
        )
    manifest = stored.manifest
    return VerifyReport(
        location,
        "live",
        problems=tuple(of_all),
        has_checksums=manifest.has_checksums,
        num_keys=len(keys),
        num_files=len(manifest.files),
        num_chunks=len(manifest.key_ids),
        num_bytes=num_read,
        seconds=time.perf_counter() - started,
    )


def _of_all_ranks(
    ranks: Ranks, held: Sequence[ShardedTensor], problems: Sequence[Problem], num_bytes: int
) -> tuple[set[str], list[Problem], int]:
    """Return the keys, problems and bytes of all ranks.

    Collective operation: all ranks must call it.
    """
    own = [[shard.key for shard in held], list(map(dataclasses.asdict, problems)), num_bytes]
    told = [json.loads(data) for data in ranks.all_gather(json.dumps(own).encode())]
    keys = {key for of_rank, _, _ in told for key in of_rank}
    found = [Problem(**fields) for _, of_rank, _ in told for fields in of_rank]
    return keys, found, sum(each for _, _, each in told)


def _compare(
    ranks: Ranks,
    stored: StoredCheckpoint,
    held: Sequence[ShardedTensor],
    num_threads: int | None,
    progress: Progress | None,
) -> tuple[list[Problem], int]:
    """Compare the tensors of this rank; return what differs, and the bytes read."""
    problems: list[Problem] = []
    windows: list[_Window] = []
    for shard in held:
        fault = _fault_of(stored, shard)
        if fault is not None:
            problems.append(_problem(ranks, stored, shard.key, fault))
            continue
        windows.extend(_windows_of(shard))
    num_bytes = sum(window.values.nbytes for window in windows)
    counter = ProgressCounter(progress, num_bytes)

    def compare(window: _Window) -> None:
        fault = _difference(stored, window)
        if fault is not None:
            found = _problem(ranks, stored, window.key, fault, str(window.region))
            problems.append(found)
        counter.add(window.values.nbytes)

    run_threads(compare, windows, num_threads or num_threads_at(stored.location))
    return sorted(problems, key=lambda each: (each.key or "", each.region or "")), num_bytes


def _problem(
    ranks: Ranks, stored: StoredCheckpoint, key: str, fault: str, region: str | None = None
) -> Problem:
    return Problem(stored.location, f"{fault} (rank {ranks.rank})", key, region)


def _fault_of(stored: StoredCheckpoint, shard: ShardedTensor) -> str | None:
    """Return why a shard cannot be compared."""
    if shard.key not in stored.manifest.key_index or stored.is_object(shard.key):
        return "the checkpoint has no such tensor"
    shape, dtype = stored.global_shape(shard.key), stored.dtype_name(shard.key)
    in_memory = tuple(shard.global_shape), TO_NAME.get(shard.dtype, str(shard.dtype))
    if in_memory != (shape, dtype):
        kinds = f"{in_memory[1]} of {in_memory[0]} in memory, {dtype} of {shape} in the checkpoint"
        return f"the tensor is {kinds}"
    return None


def _windows_of(shard: ShardedTensor) -> Iterator[_Window]:
    for region in shard_regions(shard):
        values = region_view(shard, region)
        for part in cut_region(region, WINDOW_ELEMENTS):
            local = part.relative_to(region.offset).slices()
            if part.num_elements:
                yield _Window(shard.key, part, values[local] if local else values)


def _difference(stored: StoredCheckpoint, window: _Window) -> str | None:
    """Read a window; return how the values in memory differ from it."""
    dtype = FROM_NAME[stored.dtype_name(window.key)]
    content = scratch("stored window", window.region.shape, dtype)
    request = Request(window.key, stored.global_shape(window.key), window.region)
    read_copies(stored, plan_load(stored, [request]), [content], num_threads=1)
    differs = (_item_bytes(content) != _item_bytes(window.values.cpu())).any(dim=1)
    count = int(differs.sum())
    if not count:
        return None
    first = torch.unravel_index(differs.nonzero()[0, 0], window.region.shape or (1,))
    places = [int(i) + o for i, o in zip(first, window.region.offset, strict=False)]
    size = window.region.num_elements
    return f"{count} of {size} elements differ from those in memory, the first at {places}"


def _item_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of values, of shape (elements, bytes)."""
    plain = values.resolve_conj().resolve_neg()
    if plain.dtype.itemsize == 1:
        plain = plain.view(torch.uint8)
    return plain.contiguous().view(-1, 1).view(torch.uint8)

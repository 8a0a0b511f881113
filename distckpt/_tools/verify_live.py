"""Comparison of a checkpoint with the tensors in ranks' memory."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch

from distckpt._base.dtypes import FROM_NAME, TO_NAME, flat_bytes
from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.options import Progress
from distckpt._base.threads import ProgressCounter, run_threads
from distckpt._base.tree import at, dotted, leaves
from distckpt._checkpoint.consistent_read import read_attempts
from distckpt._checkpoint.opening import open_checkpoint
from distckpt._checkpoint.stored_values import load_common_state
from distckpt._format.marker import names_of_module
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region, intersect, whole
from distckpt._geometry.units import cut_region
from distckpt._io.read import num_threads_at
from distckpt._io.read_values import read_requests
from distckpt._models.whole import coverage_of, left_out_of_all
from distckpt._operations.file_checks import Problem
from distckpt._operations.load_request import absent_ties, may_be_codes
from distckpt._operations.planned_save import SaveRequest
from distckpt._operations.save import LocalSave, describe_shards
from distckpt._operations.shard_source import entries_of
from distckpt._operations.verify import VerifyReport
from distckpt._operations.windows import WINDOW_ELEMENTS
from distckpt._plan.load import Request
from distckpt._quantization.numbers import scratch
from distckpt._ranks.collectives import Ranks, collective
from distckpt._state.shards import find_ties, region_view, shard_regions
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedStateDict

_NOT_STORED = "the checkpoint has no such tensor"


class _Window(NamedTuple):
    """A region of a tensor in memory, and its values."""

    key: str
    region: Region
    values: torch.Tensor


_Extents: TypeAlias = set[tuple[tuple[int, ...], tuple[int, ...]]]
"""Offsets and shapes of regions."""


class _Found(NamedTuple):
    """The results of a comparison on one rank, or on all.

    Attributes:
        held: compared regions by the name of the tensor in memory; empty for plain tensors.
        problems: the differences.
        num_bytes: number of bytes that were read.
    """

    held: dict[str, _Extents]
    problems: list[Problem]
    num_bytes: int


@collective()
def compare_with_memory(
    location: str,
    live: ShardedStateDict,
    *,
    process_group: Any = None,
    num_threads: int | None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compare each rank's tensors with a checkpoint, see `verify`.

    Collective operation: all ranks must call it.
    """
    started = time.perf_counter()
    ranks = Ranks(process_group)
    request = SaveRequest(
        path=location, process_group=process_group, has_target=False, verb="verify"
    )
    described = describe_shards(ranks, live, request)
    for attempt in read_attempts(ranks, location):
        with attempt:
            stored = open_checkpoint(ranks, location, attempt=attempt)
            with ranks.phase("compare with memory"):
                own = _compare(ranks, stored, described, num_threads, progress)
                if own.problems:
                    attempt.check_is_there()
            absent = _absent_in_memory(ranks, stored, described)
    results = _of_all_ranks(ranks, own)
    if not results.held:
        raise ValueError(
            "`live` holds no tensor that could be compared on any rank: the checkpoint has no "
            "plain tensors at their places in the state dict. Give it the module itself, such as "
            "{'model': model}."
        )
    manifest = stored.manifest
    return VerifyReport(
        location,
        "live",
        problems=(*results.problems, *_held_in_part(ranks, stored, results), *absent),
        has_checksums=manifest.has_checksums,
        num_keys=len(results.held),
        num_tensors=len(results.held),
        num_files=len(manifest.files),
        num_chunks=len(manifest.key_ids),
        num_bytes=results.num_bytes,
        seconds=time.perf_counter() - started,
    )


def _of_all_ranks(ranks: Ranks, own: _Found) -> _Found:
    """Collect the results of all ranks.

    Collective operation: all ranks must call it.
    """
    extents = {key: list(regions) for key, regions in own.held.items()}
    sent = [extents, list(map(dataclasses.asdict, own.problems)), own.num_bytes]
    messages = [json.loads(data) for data in ranks.all_gather(json.dumps(sent).encode())]
    united = _Found({}, [], sum(num_read for _, _, num_read in messages))
    for extents, problems, _ in messages:
        for key, regions in extents.items():
            extents_of_key = united.held.setdefault(key, set())
            extents_of_key.update((tuple(offset), tuple(shape)) for offset, shape in regions)
        for fields in problems:
            united.problems.append(Problem(**fields))
    return united


def _held_in_part(ranks: Ranks, stored: StoredCheckpoint, results: _Found) -> list[Problem]:
    """Name tensors of which the ranks together have only a part.

    A single process may have a part.
    """
    if ranks.size == 1:
        return []
    problems = []
    differing = {problem.key for problem in results.problems}
    for key, regions in results.held.items():
        if key in differing or key not in stored.manifest.key_index:
            continue
        # Regions that are not the same rarely overlap.
        count = sum(math.prod(shape) for _, shape in regions)
        size = math.prod(stored.global_shape(key))
        if count < size:
            chunks = map(stored.manifest.chunk_region, stored.chunks_of(key))
            size = sum(region.num_elements for region in chunks)
        if count < size:
            text = f"the ranks hold {count} of {size} elements: the others were not compared"
            problems.append(Problem(stored.location, text, key))
    return problems


def _absent_in_memory(
    ranks: Ranks, stored: StoredCheckpoint, described: LocalSave
) -> list[Problem]:
    """Name the stored tensors of modules and optimizers that no rank has.

    Collective operation: all ranks must call it.
    """
    entries = entries_of(stored)
    tensors = []
    for key, entry in entries.items():
        if entry.dtype is not None:
            tensors.append(key)
    in_memory = {shard.key for shard in described.shards}
    codes = {shard.key for shard in filter(may_be_codes, described.shards)}
    names = names_of_module(stored.marker)
    coverage = coverage_of(described.objects, in_memory, codes, entries, tensors, names, set)
    module_keys, optimizer_keys, _ = left_out_of_all(ranks, coverage, entries)
    text = "no rank has it in memory, as a part of the object that it was saved for"
    return [Problem(stored.location, text, key) for key in (*module_keys, *optimizer_keys)]


def _compare(
    ranks: Ranks,
    stored: StoredCheckpoint,
    described: LocalSave,
    num_threads: int | None,
    progress: Progress | None,
) -> _Found:
    """Compare the tensors of this rank."""
    problems: list[Problem] = []

    def note(text: str | None, key: str, region: Region | None = None) -> None:
        if text is not None:
            problem = Problem(stored.location, f"{text} (rank {ranks.rank})", key)
            if region is not None:
                problem = dataclasses.replace(problem, region=str(region))
            problems.append(problem)

    compared: dict[str, _Extents] = {}
    for name, text in _compare_plain(stored, described.common):
        if text != _NOT_STORED:
            compared[name] = set()
        note(text, name)
    windows: list[_Window] = []
    for shard in _tensors_to_compare(stored, described):
        regions = compared.setdefault(shard.key, set())
        text = _fault_of(stored, shard)
        note(text, shard.key)
        if text is None:
            windows.extend(_windows_of(stored, shard, regions))
    num_bytes = sum(window.values.nbytes for window in windows)
    counter = ProgressCounter(progress, num_bytes)

    def compare(window: _Window) -> None:
        note(_fault_of_window(stored, window), window.key, window.region)
        counter.add(window.values.nbytes)

    run_threads(compare, windows, num_threads or num_threads_at(stored.location))
    problems.sort(key=lambda problem: (problem.key or "", problem.region or ""))
    return _Found(compared, problems, num_bytes)


def _tensors_to_compare(stored: StoredCheckpoint, described: LocalSave) -> Iterator[ShardedTensor]:
    """Yield the tensors without further names of tensors that exports store once."""
    tensors = []
    for shard in described.shards:
        if isinstance(shard, ShardedTensor):
            tensors.append(shard)
    absent = absent_ties(tensors, find_ties(tensors), stored.manifest.key_index)
    for number, shard in enumerate(tensors):
        if number not in absent:
            yield shard


def _compare_plain(stored: StoredCheckpoint, common: Any) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each plain tensor, and how it differs."""
    plain = []
    for pair in leaves(common):
        if isinstance(pair[1], torch.Tensor):
            plain.append(pair)
    stored_common = {}
    if plain:
        stored_common = load_common_state(stored)
    for path, values in plain:
        content = at(stored_common, path)
        text: str | None = _NOT_STORED
        if isinstance(content, torch.Tensor):
            kinds = [(_name_of(tensor.dtype), tuple(tensor.shape)) for tensor in (values, content)]
            text = _difference_of_kinds(*kinds) or _difference(content, values)
        yield dotted(path), text


def _fault_of(stored: StoredCheckpoint, shard: ShardedTensor) -> str | None:
    """Return the reason why a shard cannot be compared, or None."""
    if shard.key not in stored.manifest.key_index or stored.is_object(shard.key):
        return _NOT_STORED
    if shard.data is None:
        return "the tensor has no data in memory"
    shape = stored.global_shape(shard.key)
    in_memory = tuple(shard.global_shape)
    if shard.allow_shape_mismatch and len(shape) == len(in_memory):
        # Elements that only one of the two has are padding.
        in_memory = shape
    kinds = (_name_of(shard.dtype), in_memory), (stored.dtype_name(shard.key), shape)
    return _difference_of_kinds(*kinds)


def _name_of(dtype: torch.dtype) -> str:
    return TO_NAME.get(dtype, str(dtype))


def _difference_of_kinds(
    in_memory: tuple[str, tuple[int, ...]], stored: tuple[str, tuple[int, ...]]
) -> str | None:
    """Compare dtypes and shapes."""
    if in_memory == stored:
        return None
    kinds = f"{in_memory[0]} of {in_memory[1]} in memory, {stored[0]} of {stored[1]}"
    return f"the tensor is {kinds} in the checkpoint"


def _windows_of(
    stored: StoredCheckpoint, shard: ShardedTensor, extents: _Extents
) -> Iterator[_Window]:
    """Cut the stored parts of a shard, and note their extents."""
    shape = stored.global_shape(shard.key)
    if shard.allow_shape_mismatch:
        # It is not checked which ranks have stored values, and which only padding.
        extents.add(((0,) * len(shape), shape))
    for region in shard_regions(shard):
        within = intersect(region, whole(shape))
        if within is None:
            continue
        extents.add((within.offset, within.shape))
        values = region_view(shard, region)
        for part in cut_region(within, WINDOW_ELEMENTS):
            local = part.relative_to(region.offset).slices()
            yield _Window(shard.key, part, values[local] if local else values)


def _fault_of_window(stored: StoredCheckpoint, window: _Window) -> str | None:
    """Read a window, and describe how the values in memory differ."""
    dtype = FROM_NAME[stored.dtype_name(window.key)]
    content = scratch("stored window", window.region.shape, dtype)
    request = Request(window.key, stored.global_shape(window.key), window.region)
    try:
        read_requests(stored, [request], [content])
    except CorruptCheckpointError as error:
        return str(error)
    return _difference(content, window.values, window.region.offset)


def _difference(
    content: torch.Tensor, values: torch.Tensor, offset: tuple[int, ...] | None = None
) -> str | None:
    """Describe how values in memory differ from stored values, or None.

    The values begin at `offset` of their tensor.
    """
    differs = (_item_bytes(content) != _item_bytes(values.detach().cpu())).any(dim=1)
    count = int(differs.sum())
    if not count:
        return None
    first = torch.unravel_index(differs.nonzero()[0, 0], tuple(content.shape) or (1,))
    starts = (0,) * content.dim() if offset is None else offset
    places = [int(i) + start for i, start in zip(first, starts, strict=False)]
    return (
        f"{count} of {values.numel()} elements differ from those in memory, the first at {places}"
    )


def _item_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of values, of shape (elements, bytes)."""
    return flat_bytes(values).view(-1, values.dtype.itemsize)

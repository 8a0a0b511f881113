"""Comparison of a checkpoint with the tensors in ranks' memory."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from distckpt._base.dtypes import FROM_NAME, TO_NAME, flat_bytes
from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.options import Progress
from distckpt._base.threads import ProgressCounter, run_threads
from distckpt._base.tree import at, dotted, is_container, leaves
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
from distckpt._move.assignment import divide
from distckpt._move.record_loader import LoaderTarget
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
_CONVERTED = {"F16", "BF16", "F32", "F64"}
"""Dtypes of values, which a sender converts into each other; codes need their scales."""


@dataclasses.dataclass(frozen=True)
class Difference(Problem):
    """A region of a tensor in memory that differs from the checkpoint.

    Attributes:
        rank: the rank that has it.
        num_differing: number of elements that differ; 0 where they could not be compared.
    """

    rank: int = 0
    num_differing: int = 0


@dataclasses.dataclass(frozen=True)
class LiveReport(VerifyReport):
    """The result of a comparison with memory.

    Attributes:
        not_compared: for recorded weight loaders, each tensor that was not compared, or only in
            part, with the reason: stored tensors, and tensors of the model that hold none. They
            count neither as equal nor as problems.
    """

    not_compared: tuple[Problem, ...] = ()

    def table(self) -> str:
        """Return a line for each tensor that differs or was not compared."""
        groups: dict[str, list[Problem]] = {}
        for problem in self.problems:
            groups.setdefault(problem.key or "", []).append(problem)
        lines = [f"{'differing':>12}  {'ranks':<8}  tensor: first difference"]
        for key, problems in groups.items():
            found = [problem for problem in problems if isinstance(problem, Difference)]
            count = sum(problem.num_differing for problem in found)
            ranks = sorted({problem.rank for problem in found})
            lines.append(f"{count:>12}  {ranks!s:<8}  {key}: {problems[0].message}")
        for problem in self.not_compared:
            lines.append(f"{'?':>12}  {'':<8}  {problem.key}: not compared: {problem.message}")
        return "\n".join(lines)


class _Loaded(NamedTuple):
    """Origin of a shard of a recorded loader.

    Attributes:
        dtype: the dtype that the loader was given.
        place: name of the model's tensor; None in memory that is not the model's.
    """

    dtype: torch.dtype
    place: str | None


class _Window(NamedTuple):
    """A region of a tensor in memory, and its values."""

    key: str
    region: Region
    values: torch.Tensor
    loaded: _Loaded | None


class _Found(NamedTuple):
    """The results of a comparison on one rank, or on all: lists of JSON's values.

    Attributes:
        held: names of compared tensors in memory with offset and shape of a part, or None.
        problems: the fields of the differences.
        num_bytes: number of bytes that were read.
        taken: stored tensors that recorded loaders were given.
        unfilled: the tensors of their models with a number of elements that hold nothing stored.
    """

    held: list[tuple[str, Region | None]]
    problems: list[dict[str, Any]]
    num_bytes: int
    taken: list[str]
    unfilled: list[tuple[str, int]]


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
    described, _ = describe_shards(ranks, live, request)
    objects = leaves(live, functools.partial(is_container, opaque=(LoaderTarget,)))
    targets = [leaf for _, leaf in objects if isinstance(leaf, LoaderTarget)]
    for attempt in read_attempts(ranks, location):
        with attempt:
            stored = open_checkpoint(ranks, location, attempt=attempt)
            with ranks.phase("compare with memory"):
                own = _compare(ranks, stored, described, targets, num_threads, progress)
                if own.problems:
                    attempt.check_is_there()
            absent = _absent_in_memory(ranks, stored, described)
    results = _joined(ranks, own)
    held = _regions_held(results)
    if not held:
        raise ValueError(
            "`live` holds no tensor that could be compared on any rank: the checkpoint has no "
            "plain tensors at their places in the state dict. Give it the module itself, such as "
            "{'model': model}."
        )
    manifest = stored.manifest
    problems: list[Problem] = [Difference(**fields) for fields in results.problems]
    in_part = _held_in_part(stored, held, results)
    not_compared = _not_compared(stored, held, results)
    if ranks.size > 1:
        problems += in_part
    elif results.taken:
        # A single process may have a part.
        not_compared += in_part
    return LiveReport(
        location,
        "live",
        problems=(*problems, *absent),
        has_checksums=manifest.has_checksums,
        num_keys=len(held),
        num_tensors=len(held),
        num_files=len(manifest.files),
        num_chunks=len(manifest.key_ids),
        num_bytes=results.num_bytes,
        seconds=time.perf_counter() - started,
        not_compared=tuple(not_compared),
    )


def _joined(ranks: Ranks, own: _Found) -> _Found:
    """Join the results of all ranks.

    Collective operation: all ranks must call it.
    """
    messages = ranks.all_gather(json.dumps(own).encode())
    columns = zip(*map(json.loads, messages), strict=True)
    return _Found(*(functools.reduce(operator.add, column) for column in columns))


def _regions_held(results: _Found) -> dict[str, set[Region]]:
    """Return the regions of each compared tensor; none for a plain one."""
    held: dict[str, set[Region]] = {}
    for key, region in results.held:
        regions = held.setdefault(key, set())
        if region:
            regions.add(Region(*map(tuple, region)))
    return held


def _held_in_part(
    stored: StoredCheckpoint, held: Mapping[str, Iterable[Region]], results: _Found
) -> list[Problem]:
    """Name tensors of which the ranks together have only a part."""
    problems = []
    differing = {fields["key"] for fields in results.problems}
    for key, regions in held.items():
        if key in differing or key not in stored.manifest.key_index:
            continue
        left = [whole(stored.global_shape(key))]
        for region in sorted(regions):
            _, left = divide(left, region)
        size = 0
        missing = 0
        for chunk in map(stored.manifest.chunk_region, stored.chunks_of(key)) if left else ():
            size += chunk.num_elements
            missing += sum(region.num_elements for region in divide(left, chunk)[0])
        if missing:
            text = (
                f"the ranks hold {size - missing} of {size} elements: the others were not compared"
            )
            problems.append(Problem(stored.location, text, key))
    return problems


def _not_compared(stored: StoredCheckpoint, held: Iterable[str], results: _Found) -> list[Problem]:
    """Name stored tensors and tensors of models that loaders leave out."""
    if not results.taken:
        return []
    aliases = stored.manifest.aliases
    compared = {aliases.get(key, key) for key in held}
    found = []
    for key in sorted({*results.taken, *stored.manifest.key_index}):
        if aliases.get(key, key) in compared:
            continue
        text = "no loader was recorded with it"
        if key in results.taken:
            text = "no loader leaves it in a parameter, buffer or attribute of a model"
        elif stored.is_object(key):
            continue
        found.append(Problem(stored.location, text, key))
    for name, count in sorted({(name, count) for name, count in results.unfilled}):
        text = f"{count} elements of the model's tensor hold nothing that is stored"
        found.append(Problem(stored.location, text, name))
    return found


def _absent_in_memory(
    ranks: Ranks, stored: StoredCheckpoint, described: LocalSave
) -> list[Problem]:
    """Name the stored tensors of modules and optimizers that no rank has.

    Collective operation: all ranks must call it.
    """
    entries = entries_of(stored)
    tensors = [key for key, entry in entries.items() if entry.dtype is not None]
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
    targets: Sequence[LoaderTarget],
    num_threads: int | None,
    progress: Progress | None,
) -> _Found:
    """Compare the tensors of this rank."""
    problems: list[Difference] = []
    rank = ranks.rank

    def note(text: str | None, key: str, region: Region | None = None, count: int = 0) -> None:
        if text is not None:
            place = str(region) if region else None
            text = f"{text} (rank {rank})"
            problems.append(Difference(stored.location, text, key, place, None, None, rank, count))

    found = _Found([], [], 0, [], [])
    for name, text in _compare_plain(stored, described.common):
        if text != _NOT_STORED:
            found.held.append((name, None))
        note(text, name)
    windows: list[_Window] = []
    for shard, origin in _tensors_to_compare(stored, described, targets):
        found.held.append((shard.key, None))
        text = _fault_of(stored, shard, origin)
        note(text, shard.key)
        if text is None:
            windows.extend(_windows_of(stored, shard, found.held, origin))
    num_bytes = sum(window.values.nbytes for window in windows)
    counter = ProgressCounter(progress, num_bytes)

    def compare(window: _Window) -> None:
        note(*_fault_of_window(stored, window))
        counter.add(window.values.nbytes)

    run_threads(compare, windows, num_threads or num_threads_at(stored.location))
    problems.sort(key=lambda problem: (problem.key or "", problem.region or ""))
    found.problems.extend(map(dataclasses.asdict, problems))
    for target in targets:
        found.taken.extend(target.specs)
        found.unfilled.extend(target.unfilled.items())
    return found._replace(num_bytes=num_bytes)


def _tensors_to_compare(
    stored: StoredCheckpoint, described: LocalSave, targets: Iterable[LoaderTarget]
) -> Iterator[tuple[ShardedTensor, _Loaded | None]]:
    """Yield the tensors without further names of tensors that exports store once.

    Memory that a loader has copied through, and that is not its model's, is left out.
    """
    origins = {}
    for target in targets:
        places = target.places()
        for name, shard in target.items():
            origins[id(shard)] = _Loaded(target.specs[shard.key][1], places.get(name))
    tensors = [shard for shard in described.shards if isinstance(shard, ShardedTensor)]
    absent = absent_ties(tensors, find_ties(tensors), stored.manifest.key_index)
    for number, shard in enumerate(tensors):
        origin = origins.get(id(shard))
        if number not in absent and (origin is None or origin.place is not None):
            yield shard, origin


def _compare_plain(stored: StoredCheckpoint, common: Any) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each plain tensor, and how it differs."""
    plain = [pair for pair in leaves(common) if isinstance(pair[1], torch.Tensor)]
    stored_common = {}
    if plain:
        stored_common = load_common_state(stored)
    for path, values in plain:
        content = at(stored_common, path)
        text: str | None = _NOT_STORED
        if isinstance(content, torch.Tensor):
            kinds = [(_name_of(tensor.dtype), tuple(tensor.shape)) for tensor in (values, content)]
            offset = (0,) * values.ndim
            text = _difference_of_kinds(*kinds) or _difference(content, values, offset)[0]
        yield dotted(path), text


def _fault_of(stored: StoredCheckpoint, shard: ShardedTensor, origin: _Loaded | None) -> str | None:
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
    dtype_name = stored.dtype_name(shard.key)
    dtype = shard.dtype
    if origin is not None:
        dtype = origin.dtype
        if {dtype_name, _name_of(dtype)} <= _CONVERTED:
            dtype = FROM_NAME[dtype_name]
    kinds = (_name_of(dtype), in_memory), (dtype_name, shape)
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
    stored: StoredCheckpoint, shard: ShardedTensor, held: list[Any], origin: _Loaded | None
) -> Iterator[_Window]:
    """Cut the stored parts of a shard, and note their regions."""
    shape = stored.global_shape(shard.key)
    if shard.allow_shape_mismatch:
        # It is not checked which ranks have stored values, and which only padding.
        held.append((shard.key, whole(shape)))
    for region in shard_regions(shard):
        within = intersect(region, whole(shape))
        if within is None:
            continue
        held.append((shard.key, within))
        values = region_view(shard, region)
        for part in cut_region(within, WINDOW_ELEMENTS):
            local = part.relative_to(region.offset).slices()
            yield _Window(shard.key, part, values[local] if local else values, origin)


def _fault_of_window(
    stored: StoredCheckpoint, window: _Window
) -> tuple[str | None, str, Region, int]:
    """Describe and count the values of a window that differ."""
    dtype = FROM_NAME[stored.dtype_name(window.key)]
    content = scratch("stored window", window.region.shape, dtype)
    request = Request(window.key, stored.global_shape(window.key), window.region)
    try:
        read_requests(stored, [request], [content])
    except CorruptCheckpointError as error:
        return str(error), window.key, window.region, 0
    origin = window.loaded
    if origin is not None:
        content = content.to(origin.dtype).to(window.values.dtype)
    is_converted = content.dtype != dtype
    text, count = _difference(content, window.values, window.region.offset, is_converted)
    if text is not None and origin is not None and origin.place:
        text += f", in the model's {origin.place!r}"
    return text, window.key, window.region, count


def _difference(
    content: torch.Tensor,
    values: torch.Tensor,
    offset: tuple[int, ...],
    is_converted: bool = False,
) -> tuple[str | None, int]:
    """Describe and count the values in memory that differ from stored values.

    The values begin at `offset` of their tensor. Processors convert the bits of a NaN in different
    ways: in converted values each equals each.
    """
    values = values.detach().cpu()
    bits = (flat_bytes(content) != flat_bytes(values)).view(-1, values.itemsize)
    differs = bits.any(dim=1)
    if is_converted and values.is_floating_point():
        both = content.float().isnan() & values.float().isnan()
        differs &= ~both.flatten()
    count = int(differs.sum())
    if not count:
        return None, 0
    first = torch.unravel_index(differs.nonzero()[0, 0], tuple(content.shape) or (1,))
    places = [int(i) + start for i, start in zip(first, offset, strict=False)]
    text = (
        f"{count} of {values.numel()} elements differ from those in memory, the first at {places}"
    )
    return text, count

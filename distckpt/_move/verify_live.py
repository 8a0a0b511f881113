"""Comparison of a checkpoint with the tensors in ranks' memory."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from distckpt._base.dtypes import FROM_NAME, TO_NAME, flat_bytes
from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.options import Progress
from distckpt._base.threads import ProgressCounter, run_threads
from distckpt._base.tree import at, dotted, leaves, listed
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
        rows: dict[str, tuple[int, set[int], str]] = {}
        for problem in self.problems:
            count, ranks, text = rows.get(problem.key or "", (0, set(), problem.message))
            if isinstance(problem, Difference):
                count += problem.num_differing
                ranks.add(problem.rank)
            rows[problem.key or ""] = (count, ranks, text)
        lines = [f"{'differing':>12}  {'ranks':<8}  tensor: first difference"]
        for key, (count, ranks, text) in rows.items():
            lines.append(f"{count:>12}  {sorted(ranks)!s:<8}  {key}: {text}")
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


_Extents: TypeAlias = set[tuple[tuple[int, ...], tuple[int, ...]]]
"""Offsets and shapes of regions."""


class _Found(NamedTuple):
    """The results of a comparison on one rank, or on all.

    Attributes:
        held: compared regions by the name of the tensor in memory; empty for plain tensors.
        problems: the differences.
        num_bytes: number of bytes that were read.
        taken: stored tensors that recorded loaders were given.
        unfilled: the tensors of their models that hold nothing that is stored, with a text.
    """

    held: dict[str, _Extents]
    problems: list[Difference]
    num_bytes: int
    taken: set[str]
    unfilled: set[tuple[str, str]]


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
    targets = []
    for _, leaf in listed(live, (LoaderTarget,)):
        if isinstance(leaf, LoaderTarget):
            targets.append(leaf)
    for attempt in read_attempts(ranks, location):
        with attempt:
            stored = open_checkpoint(ranks, location, attempt=attempt)
            with ranks.phase("compare with memory"):
                own = _compare(ranks, stored, described, targets, num_threads, progress)
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
    in_part = _held_in_part(stored, results)
    not_compared = []
    if results.taken:
        not_compared = _not_compared(stored, results)
        if ranks.size == 1:
            not_compared += in_part
    if ranks.size == 1:
        # A single process may have a part.
        in_part = []
    return LiveReport(
        location,
        "live",
        problems=(*results.problems, *in_part, *absent),
        has_checksums=manifest.has_checksums,
        num_keys=len(results.held),
        num_tensors=len(results.held),
        num_files=len(manifest.files),
        num_chunks=len(manifest.key_ids),
        num_bytes=results.num_bytes,
        seconds=time.perf_counter() - started,
        not_compared=tuple(not_compared),
    )


def _of_all_ranks(ranks: Ranks, own: _Found) -> _Found:
    """Collect the results of all ranks.

    Collective operation: all ranks must call it.
    """
    extents = {key: list(regions) for key, regions in own.held.items()}
    problems = list(map(dataclasses.asdict, own.problems))
    sent = [extents, problems, own.num_bytes, list(own.taken), list(own.unfilled)]
    messages = [json.loads(data) for data in ranks.all_gather(json.dumps(sent).encode())]
    united = _Found({}, [], sum(message[2] for message in messages), set(), set())
    for extents, problems, _, taken, unfilled in messages:
        for key, regions in extents.items():
            extents_of_key = united.held.setdefault(key, set())
            extents_of_key.update((tuple(offset), tuple(shape)) for offset, shape in regions)
        for fields in problems:
            united.problems.append(Difference(**fields))
        united.taken.update(taken)
        united.unfilled.update(map(tuple, unfilled))
    return united


def _held_in_part(stored: StoredCheckpoint, results: _Found) -> list[Problem]:
    """Name tensors of which the ranks together have only a part."""
    problems = []
    differing = {problem.key for problem in results.problems}
    for key, regions in results.held.items():
        if key in differing or key not in stored.manifest.key_index:
            continue
        left = [whole(stored.global_shape(key))]
        for extent in sorted(regions):
            _, left = divide(left, Region(*extent))
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


def _loaded(targets: Iterable[LoaderTarget]) -> dict[int, _Loaded]:
    """Return the origins of the shards of recorded loaders by `id`."""
    loaded = {}
    for target in targets:
        places = target.places()
        for name, shard in target.items():
            loaded[id(shard)] = _Loaded(target.specs[shard.key][1], places.get(name))
    return loaded


def _not_compared(stored: StoredCheckpoint, results: _Found) -> list[Problem]:
    """Name stored tensors and tensors of models that loaders leave out."""
    aliases = stored.manifest.aliases
    compared = {aliases.get(key, key) for key in results.held}
    found = []
    for key in sorted(results.taken.union(stored.manifest.key_index)):
        if aliases.get(key, key) in compared:
            continue
        text = "no loader was recorded with it"
        if key in results.taken:
            text = "no loader leaves it in a parameter, buffer or attribute of a model"
        elif stored.is_object(key):
            continue
        found.append(Problem(stored.location, text, key))
    for name, text in sorted(results.unfilled):
        found.append(Problem(stored.location, text, name))
    return found


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
    targets: Sequence[LoaderTarget],
    num_threads: int | None,
    progress: Progress | None,
) -> _Found:
    """Compare the tensors of this rank."""
    problems: list[Difference] = []

    def note(
        text: str | None, key: str, region: Region | None = None, num_differing: int = 0
    ) -> None:
        if text is not None:
            place = None
            if region is not None:
                place = str(region)
            problem = Difference(
                stored.location,
                f"{text} (rank {ranks.rank})",
                key,
                place,
                rank=ranks.rank,
                num_differing=num_differing,
            )
            problems.append(problem)

    compared: dict[str, _Extents] = {}
    for name, text in _compare_plain(stored, described.common):
        if text != _NOT_STORED:
            compared[name] = set()
        note(text, name)
    windows: list[_Window] = []
    for shard, origin in _tensors_to_compare(stored, described, _loaded(targets)):
        regions = compared.setdefault(shard.key, set())
        text = _fault_of(stored, shard, origin)
        note(text, shard.key)
        if text is None:
            windows.extend(_windows_of(stored, shard, regions, origin))
    num_bytes = sum(window.values.nbytes for window in windows)
    counter = ProgressCounter(progress, num_bytes)

    def compare(window: _Window) -> None:
        text, count = _fault_of_window(stored, window)
        note(text, window.key, window.region, count)
        counter.add(window.values.nbytes)

    run_threads(compare, windows, num_threads or num_threads_at(stored.location))
    problems.sort(key=lambda problem: (problem.key or "", problem.region or ""))
    return _Found(compared, problems, num_bytes, *_of_loaders(targets))


def _of_loaders(targets: Iterable[LoaderTarget]) -> tuple[set[str], set[tuple[str, str]]]:
    """Return the fields `taken` and `unfilled` of `_Found`."""
    taken: set[str] = set()
    unfilled = set()
    for target in targets:
        taken.update(target.specs)
        for name, count in target.unfilled.items():
            text = f"{count} elements of the model's tensor hold nothing that is stored"
            unfilled.add((name, text))
    return taken, unfilled


def _tensors_to_compare(
    stored: StoredCheckpoint, described: LocalSave, loaded: Mapping[int, _Loaded]
) -> Iterator[tuple[ShardedTensor, _Loaded | None]]:
    """Yield the tensors without further names of tensors that exports store once.

    Memory that a loader has copied through, and that is not its model's, is left out.
    """
    tensors = []
    for shard in described.shards:
        if isinstance(shard, ShardedTensor):
            tensors.append(shard)
    absent = absent_ties(tensors, find_ties(tensors), stored.manifest.key_index)
    for number, shard in enumerate(tensors):
        origin = loaded.get(id(shard))
        if number not in absent and (origin is None or origin.place is not None):
            yield shard, origin


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
            text = _difference_of_kinds(*kinds) or _difference(content, values)[0]
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
    stored: StoredCheckpoint, shard: ShardedTensor, extents: _Extents, origin: _Loaded | None
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
            yield _Window(shard.key, part, values[local] if local else values, origin)


def _fault_of_window(stored: StoredCheckpoint, window: _Window) -> tuple[str | None, int]:
    """Describe and count the values of a window that differ."""
    dtype = FROM_NAME[stored.dtype_name(window.key)]
    content = scratch("stored window", window.region.shape, dtype)
    request = Request(window.key, stored.global_shape(window.key), window.region)
    try:
        read_requests(stored, [request], [content])
    except CorruptCheckpointError as error:
        return str(error), 0
    origin = window.loaded
    if origin is None:
        return _difference(content, window.values, window.region.offset)
    loaded = content.to(origin.dtype).to(window.values.dtype)
    text, count = _difference(
        loaded, window.values, window.region.offset, is_converted=loaded.dtype != dtype
    )
    if text is not None and origin.place:
        text += f", in the model's {origin.place!r}"
    return text, count


def _difference(
    content: torch.Tensor,
    values: torch.Tensor,
    offset: tuple[int, ...] | None = None,
    *,
    is_converted: bool = False,
) -> tuple[str | None, int]:
    """Describe and count the values in memory that differ from stored values.

    The values begin at `offset` of their tensor. Processors convert the bits of a NaN in different
    ways: in converted values each equals each.
    """
    values = values.detach().cpu()
    differs = (_item_bytes(content) != _item_bytes(values)).any(dim=1)
    if is_converted and values.is_floating_point():
        both = content.float().isnan() & values.float().isnan()
        differs &= ~both.flatten()
    count = int(differs.sum())
    if not count:
        return None, 0
    first = torch.unravel_index(differs.nonzero()[0, 0], tuple(content.shape) or (1,))
    starts = (0,) * content.dim() if offset is None else offset
    places = [int(i) + start for i, start in zip(first, starts, strict=False)]
    text = (
        f"{count} of {values.numel()} elements differ from those in memory, the first at {places}"
    )
    return text, count


def _item_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of values, of shape (elements, bytes)."""
    return flat_bytes(values).view(-1, values.dtype.itemsize)

"""Parts of reads: ranges of bytes, their targets and their memory.

Where checksums are compared, parts begin and end between blocks: no byte of an unverified block is
used.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.lazy import torch
from distckpt._base.libc import copy_bytes
from distckpt._base.memory import (
    Bytes,
    Copier,
    addresses,
    blocks_at,
    bounce_buffer,
    memory_at,
)
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import (
    IntArray,
    Region,
    covering_elements,
    flat_range_regions,
    flat_start,
    intersect,
    num_outer_axes,
    run_starts,
    step_over,
)
from distckpt._geometry.units import Span, Unit, cut_region
from distckpt._plan.load import Copy
from distckpt._storage import locations

REQUEST_BYTES = 16 << 20
"""Size of a request to an object store: enough that its answer takes longer than the way there."""
REACH_BYTES = 2 << 20
"""Twice the distance from which on local rows are read separately."""
LONG_RUN_BYTES = 128 << 10
"""Read runs at least this long as parts of their own."""
PITCH_BYTES = 8 << 10
"""Mean distance from which on runs are read one by one. Closer runs take less time with the gaps
between them.
"""
SHORT_RUN_BYTES = 4 << 10
"""Read shorter runs with the gaps, up to `LONG_PITCH_BYTES`: most pages have bytes of some run."""
LONG_PITCH_BYTES = 64 << 10
"""Mean distance from which on runs of any size are alone."""
SMALL_BYTES = 32 << 10
"""Copy smaller pieces through scratch memory: a copy costs less than a buffer of its own."""
LONG_GOAL_BYTES = 256 << 10
"""Read longer runs of a scattered region straight into targets. Shorter ones, copied together out
of scratch memory, take less time: threads hash pieces of blocks by turns.
"""
MIN_RUN_BYTES = 64
"""Copy shorter runs as elements: byte by byte takes longer."""
NOT_PLAIN = -1
"""The `lead` of parts that are not copied as bytes."""


class ReadPart(NamedTuple):
    """Bytes [start, stop) of a chunk, and their target.

    Attributes:
        target: the tensor, or array of bytes, that the part fills.
        lead: the memory of `target` holds the very bytes from `start + lead` on; `NOT_PLAIN` if
            values are converted or scattered. The bytes around those are only needed to verify
            them.
        region: region of the chunk, in the shape of `target`; only parts that are `NOT_PLAIN` have
            it.
        is_sparse: the region is read run by run, without the gaps between its runs.
    """

    chunk: int
    start: int
    stop: int
    target: Any
    lead: int = NOT_PLAIN
    region: Region = Region((), ())
    is_sparse: bool = False


def parts_of(
    stored: StoredCheckpoint,
    copies: Sequence[Copy],
    targets: Sequence[torch.Tensor],
    copier: Copier,
) -> list[ReadPart]:
    """Divide copies into parts.

    `targets` has the tensor of each request.
    """
    return list(itertools.chain.from_iterable(parts_by_copy(stored, copies, targets, copier)))


def parts_by_copy(
    stored: StoredCheckpoint,
    copies: Sequence[Copy],
    targets: Sequence[torch.Tensor],
    copier: Copier,
) -> Iterator[Sequence[ReadPart]]:
    """Yield the parts of each copy, see `parts_of`."""
    manifest = stored.manifest
    chunks = np.array([copy.chunk for copy in copies], np.int64)
    sizes = manifest.num_bytes[chunks].tolist()
    key_ids = manifest.key_ids[chunks].tolist()
    for copy, size, key_id in zip(copies, sizes, key_ids, strict=True):
        goal = targets[copy.request]
        if copy.target.shape != goal.shape:
            goal = goal[copy.target.slices()]
        dtype = FROM_NAME[manifest.dtypes[key_id]]
        if goal.nbytes == size and goal.dtype == dtype and copier.is_plain(goal):
            yield [ReadPart(copy.chunk, 0, size, goal, 0)]
        else:
            yield list(_parts_of_region(stored, copy, goal, copier))


def _parts_of_region(
    stored: StoredCheckpoint, copy: Copy, goal: torch.Tensor, copier: Copier
) -> Iterator[ReadPart]:
    """Yield the parts of a region within a chunk.

    The gaps between its runs are left out if the runs are short and far apart. Otherwise rows are
    only separate if no read would hold two of them.
    """
    shape = stored.manifest.chunk_region(copy.chunk).shape
    dtype = stored.dtype_of(copy.chunk)
    item = dtype.itemsize
    # Blocks are read whole, even if only a part of them is requested: to verify them, the bytes
    # between the runs are needed as well.
    margin = stored.manifest.block_bytes if stored.verifies else 1
    is_local = locations.is_local(stored.root)
    is_sparse = is_local and not stored.verifies and _is_sparse(shape, copy.source.shape, item)
    if is_sparse:
        pieces = cut_region(copy.source, REACH_BYTES // item)
    else:
        reach_bytes = REACH_BYTES if is_local else REQUEST_BYTES
        num_axes = _num_separate_axes(shape, copy.source.shape, item, reach_bytes, margin)
        pieces = step_over(copy.source, num_axes)
    for piece in pieces:
        place = goal
        if piece.shape != copy.source.shape:
            place = goal[piece.relative_to(copy.source.offset).slices()]
        first = flat_start(shape, piece) * item
        last = first + covering_elements(shape, piece) * item
        start = first // margin * margin
        stop = min(-(-last // margin) * margin, int(stored.manifest.num_bytes[copy.chunk]))
        is_run = not is_sparse and num_outer_axes(shape, piece) == 0
        lead = NOT_PLAIN
        if is_run and place.dtype == dtype and copier.is_plain(place):
            lead = first - start
        yield ReadPart(copy.chunk, start, stop, place, lead, piece, is_sparse)


@functools.lru_cache(maxsize=1024)
def _is_sparse(shape: tuple[int, ...], extent: tuple[int, ...], item: int) -> bool:
    """Whether the runs of a region are short and far apart. Such runs are read without the gaps."""
    region = Region((0,) * len(shape), extent)
    outer = num_outer_axes(shape, region)
    num_runs = math.prod(region.shape[:outer])
    run = math.prod(region.shape[outer:]) * item
    if num_runs <= 1 or not 0 < run < REACH_BYTES:
        return False
    first_to_last = covering_elements(shape, region) * item - run
    pitch = LONG_PITCH_BYTES if run < SHORT_RUN_BYTES else PITCH_BYTES
    return first_to_last >= (num_runs - 1) * pitch


@functools.lru_cache(maxsize=1024)
def _num_separate_axes(
    shape: tuple[int, ...], extent: tuple[int, ...], item: int, reach_bytes: int, margin: int
) -> int:
    """Count the leading axes along which each index is read separately.

    These are all axes if runs, each with `margin` more bytes, are long and far apart; else the axes
    whose rows are so far apart that no read would hold two.
    """
    region = Region((0,) * len(shape), extent)
    outer = num_outer_axes(shape, region)
    run = math.prod(region.shape[outer:])
    num_needed = (run + margin // item) * math.prod(region.shape[:outer])
    if run * item >= LONG_RUN_BYTES and covering_elements(shape, region) > 2 * num_needed:
        return outer
    return sum(2 * math.prod(shape[axis + 1 :]) > reach_bytes // item for axis in range(outer))


# --- Memory ---------------------------------------------------------------------------------------


class PartTable(NamedTuple):
    """The parts of a read in file order, with their files and positions.

    `copier` copies values to their targets.
    """

    stored: StoredCheckpoint
    copier: Copier
    parts: list[ReadPart]
    files: IntArray
    positions: IntArray


class _Goal(NamedTuple):
    """Bytes of a unit that a target holds unchanged.

    They begin at `place` in the unit, and at `address` in memory.
    """

    address: int
    place: int
    num_bytes: int


class Content(NamedTuple):
    """The memory that a unit is read into.

    Attributes:
        buffers: memory in the order of the bytes; some buffers are pieces of `scratch`.
        scratch: scratch memory as large as the unit.
        small: bytes in `scratch` that go elsewhere as they are.
        values: spans in `scratch` whose values are converted or scattered, and where they begin.
    """

    buffers: list[Bytes]
    scratch: Bytes
    small: list[_Goal]
    values: list[tuple[Span, int]]


def content_for(table: PartTable, unit: Unit) -> Content:
    """Choose the memory for a unit: large plain targets, and scratch memory."""
    num_bytes = sum(stop - start for _, start, stop in unit)
    scratch = bounce_buffer("read", num_bytes, table.copier.layer)
    goals, values = _goals_of(table, unit)
    content = Content([], scratch, [], values)
    end = 0
    for goal in goals:
        if goal.num_bytes < SMALL_BYTES:
            content.small.append(goal)
            continue
        content.buffers.extend([scratch[end : goal.place], memory_at(*goal[::2])])
        end = goal.place + goal.num_bytes
    content.buffers.append(scratch[end:])
    content.buffers[:] = [buffer for buffer in content.buffers if len(buffer)]
    return content


def _goals_of(table: PartTable, unit: Unit) -> tuple[list[_Goal], list[tuple[Span, int]]]:
    """Return the goals of a unit's plain bytes, and its other spans.

    Values of the other spans are converted or scattered; each span comes with its place in the
    unit. Neighbors that go to neighboring memory are one goal.
    """
    goals: list[_Goal] = []
    values: list[tuple[Span, int]] = []
    begin = after = -1
    end = 0
    for span in unit:
        start = end
        end = end + span.stop - span.start
        part = table.parts[span.chunk]
        if part.lead == NOT_PLAIN:
            runs = _long_runs(table, span, start)
            goals.extend(runs)
            if not runs:
                values.append((span, start))
            continue
        if part.lead == span.start == 0:
            low = 0
            high = min(span.stop, part.target.nbytes)
        else:
            low, high = _bytes_of_target(part, span)
        address = _address(part.target) + low
        place = start + part.lead + low - span.start
        if address == after and place == begin:
            last = goals.pop()
            goals.append(_Goal(last.address, last.place, last.num_bytes + high - low))
        else:
            goals.append(_Goal(address, place, high - low))
        after = address + high - low
        begin = place + high - low
    return goals, values


def _long_runs(table: PartTable, span: Span, place: int) -> list[_Goal]:
    """Return the goals of a scattered region's runs in a span.

    `place` is the beginning of the span in its unit. There are no goals if runs are short or their
    values are converted.
    """
    part = table.parts[span.chunk]
    if part.target.nbytes < LONG_GOAL_BYTES:
        return []
    runs = _runs_of(table, part, LONG_GOAL_BYTES)
    if runs is None:
        return []
    begins = runs.begins + (place - part.start - span.start)
    places = begins.clip(place, place + span.num_bytes)
    sizes = (begins + runs.num_bytes).clip(place, place + span.num_bytes) - places
    rows = np.stack([runs.addresses + places - begins, places, sizes], axis=1)[sizes > 0]
    return [_Goal(*row) for row in rows.tolist()]


class Runs(NamedTuple):
    """Contiguous runs of a scattered part, in the file and in memory.

    They begin at the bytes `begins` of the chunk, and at `addresses`. Each has `num_bytes`.
    """

    begins: IntArray
    addresses: IntArray
    num_bytes: int

    def copy_from(self, content: Bytes, start: int) -> None:
        """Copy from the bytes of the chunk behind `start`; runs are even."""
        begins, addresses, size = self
        stop = start + len(content)
        edges = (start - size + 1, start, stop - size + 1, stop)
        first, low, high, end = begins.searchsorted(edges).tolist()
        high = max(low, high)
        source = content.ctypes.data - start
        # The content has these only in part.
        for number in (*range(first, low), *range(high, end)):
            begin = int(begins[number])
            skipped = max(start - begin, 0)
            address = int(addresses[number]) + skipped
            copy_bytes(address, source + begin + skipped, min(size, stop - begin) - skipped)
        if low < high:
            begin = source + int(begins[low])
            whole = blocks_at(begin, high - low, size, int(begins[1] - begins[0]))
            pitch = int(addresses[1] - addresses[0])
            np.copyto(blocks_at(int(addresses[low]), high - low, size, pitch), whole)


def _runs_of(table: PartTable, part: ReadPart, min_bytes: int) -> Runs | None:
    """Return the runs of a scattered part.

    None if they have fewer bytes, or values are converted.
    """
    target = part.target
    dtype = table.stored.dtype_of(part.chunk)
    if target.dtype != dtype or table.copier.is_away(target):
        return None
    shape = table.stored.manifest.chunk_region(part.chunk).shape
    outer = num_outer_axes(shape, part.region)
    while not table.copier.is_plain(target[(0,) * outer]) and outer < target.dim():
        outer += 1
    num_bytes = math.prod(target.shape[outer:]) * dtype.itemsize
    if num_bytes < min_bytes:
        return None
    begins = run_starts(shape, part.region, outer) * dtype.itemsize
    firsts = target[(...,) + (0,) * (target.dim() - outer)]
    return Runs(begins, addresses(firsts), num_bytes)


def even_runs(table: PartTable, unit: Unit) -> Runs | None:
    """Return the runs of a unit, if short and at equal distances."""
    part = table.parts[unit[0].chunk]
    if len(unit) > 1 or part.lead != NOT_PLAIN:
        return None
    runs = _runs_of(table, part, MIN_RUN_BYTES)
    if runs is None or len(runs.begins) < 2 or runs.num_bytes >= LONG_GOAL_BYTES:
        return None
    is_even = all((np.diff(places, 2) == 0).all() for places in runs[:2])
    return runs if is_even else None


def _address(target: Any) -> int:
    # Bytes are read without torch.
    if isinstance(target, np.ndarray):
        return target.ctypes.data
    address: int = target.data_ptr()
    return address


def _bytes_of_target(part: ReadPart, span: Span) -> tuple[int, int]:
    """Return the range of a plain target's bytes that a span holds."""
    size = part.target.nbytes
    return min(max(span.start - part.lead, 0), size), min(max(span.stop - part.lead, 0), size)


def deliver(table: PartTable, content: Content) -> None:
    """Copy values from scratch memory to the targets."""
    address = content.scratch.ctypes.data
    try:
        for goal in content.small:
            copy_bytes(goal.address, address + goal.place, goal.num_bytes)
        for span, place in content.values:
            _deliver_values(table, span, content.scratch[place : place + span.num_bytes])
    finally:
        # Also after an error: the memory is used again.
        table.copier.wait()


def _deliver_values(table: PartTable, span: Span, content: Bytes) -> None:
    """Copy the values of a span to their targets."""
    part = table.parts[span.chunk]
    shape = table.stored.manifest.chunk_region(part.chunk).shape
    dtype = table.stored.dtype_of(part.chunk)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    values = torch.from_numpy(content).view(dtype)
    first = (part.start + span.start) // dtype.itemsize
    for region in _regions_within(table, span):
        place = region.relative_to(part.region.offset).slices()
        source = values.as_strided(region.shape, strides, flat_start(shape, region) - first)
        table.copier.copy(part.target[place] if shape else part.target, source)


def _regions_within(table: PartTable, span: Span) -> Iterator[Region]:
    """Yield the parts of a requested region that lie in a span."""
    part = table.parts[span.chunk]
    shape = table.stored.manifest.chunk_region(part.chunk).shape
    item = table.stored.dtype_of(part.chunk).itemsize
    start = (part.start + span.start) // item
    stop = (part.start + span.stop) // item
    for run in flat_range_regions(shape, start, stop):
        region = intersect(run, part.region)
        if region is not None:
            yield region


def useful_bytes(table: PartTable, span: Span) -> int:
    """Count the requested bytes of a span."""
    part = table.parts[span.chunk]
    if part.lead != NOT_PLAIN:
        low, high = _bytes_of_target(part, span)
        # Progress counts tensors.
        return 0 if isinstance(part.target, np.ndarray) else high - low
    item = table.stored.dtype_of(part.chunk).itemsize
    if part.is_sparse:
        return part.region.num_elements * item
    return sum(region.num_elements for region in _regions_within(table, span)) * item

"""Dividing what is to be read into parts: which bytes of a chunk one call reads, and where they go.

Where checksums are compared, parts begin and end between blocks: no byte is used of a block that is
not verified.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from distckpt._base.device import Copier
from distckpt._base.memory import Bytes, is_plain_memory, tensor_bytes
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import (
    Region,
    covering_elements,
    cut_region,
    flat_range_regions,
    flat_start,
    intersect,
    num_outer_axes,
    step_over,
)
from distckpt._plan.load import Copy

READ_UNIT_BYTES = 2 << 20
"""One thread reads this much at a time: little enough to be in cache still when its checksum is
computed.
"""
LONG_RUN_BYTES = 128 << 10
"""Runs at least this long are read as parts of their own."""
PITCH_BYTES = 8 << 10
"""Mean distance from the beginning of a run to that of the next. Closer runs take less time with
the gaps between.
"""


class ReadPart(NamedTuple):
    """Bytes [start, stop) of a chunk, and where they go.

    Either straight into `memory`, from the byte `start + lead` on as many as it has; or, where that
    is None, what they hold of `region` (of the chunk) goes to its place in `target` (of the shape
    of the region), through a bounce buffer. The other bytes are only needed to verify those. A
    `sparse` part is all of its region, read run by run, without what lies between.
    """

    chunk: int
    start: int
    stop: int
    memory: Bytes | None = None
    lead: int = 0
    region: Region = Region((), ())
    target: torch.Tensor = torch.empty(0)
    sparse: bool = False


def divide_copy(
    stored: StoredCheckpoint,
    copy: Copy,
    target: torch.Tensor,
    exact: bool,
    copier: Copier,
    unit_bytes: int,
) -> Iterator[ReadPart]:
    """Divide a copy into parts of at most `unit_bytes`, or `READ_UNIT_BYTES` where they can be
    joined again.

    `target` is what the copy's request fills. With `exact` nothing is read that lies between the
    runs of a region when they are long or far apart. `unit_bytes` holds one block at least.
    """
    chunk, block = copy.chunk, stored.manifest.block_bytes
    dtype, size = stored.dtype_of(chunk), int(stored.manifest.num_bytes[chunk])
    item = dtype.itemsize
    # Blocks of which a part is wanted are read whole.
    margin = block if stored.verifies else 1

    def is_direct(memory: torch.Tensor) -> bool:
        return memory.dtype == dtype and is_plain_memory(memory) and not copier.is_away(memory)

    goal = target if copy.target.shape == tuple(target.shape) else target[copy.target.slices()]
    if copy.source.num_elements * item == size and is_direct(goal):
        yield from direct_parts(chunk, 0, tensor_bytes(goal), (0, size), block)
        return
    shape = stored.manifest.chunk_region(chunk).shape
    if exact and _is_sparse(shape, copy.source, item):
        for piece in cut_region(copy.source, READ_UNIT_BYTES // item):
            piece_goal = goal[piece.relative_to(copy.source.offset).slices()]
            span = _byte_range(shape, piece, item)
            yield ReadPart(chunk, *span, region=piece, target=piece_goal, sparse=True)
        return
    for piece in step_over(
        copy.source, _num_separate_axes(shape, copy.source, item, unit_bytes, margin)
    ):
        piece_goal = goal[piece.relative_to(copy.source.offset).slices()] if shape else goal
        first, last = _byte_range(shape, piece, item)
        start, stop = first // margin * margin, min(-(-last // margin) * margin, size)
        if num_outer_axes(shape, piece) == 0 and is_direct(piece_goal):
            yield from direct_parts(chunk, first, tensor_bytes(piece_goal), (start, stop), block)
            continue
        for begin, end in _cut_between_blocks(start, stop, block, unit_bytes):
            yield ReadPart(chunk, begin, end, region=piece, target=piece_goal)


def _is_sparse(shape: tuple[int, ...], region: Region, item: int) -> bool:
    """Tell whether short runs of a region are so far apart that they are read without the gaps."""
    outer = num_outer_axes(shape, region)
    num_runs = math.prod(region.shape[:outer])
    run = math.prod(region.shape[outer:]) * item
    first_to_last = covering_elements(shape, region) * item - run
    return (
        num_runs > 1 and 0 < run < READ_UNIT_BYTES and first_to_last >= (num_runs - 1) * PITCH_BYTES
    )


def direct_parts(
    chunk: int, first: int, memory: Bytes, span: tuple[int, int], block: int
) -> Iterator[ReadPart]:
    """Divide bytes `span` of a chunk, those of which from `first` on go straight into memory of
    their number.
    """
    last = first + len(memory)
    for start, stop in _cut_between_blocks(*span, block, READ_UNIT_BYTES):
        low, high = max(start, first), min(stop, last)
        yield ReadPart(chunk, start, stop, memory[low - first : high - first], low - start)


def _byte_range(shape: tuple[int, ...], region: Region, item: int) -> tuple[int, int]:
    """Return where in a row-major tensor the first element of a region begins and the last one
    ends.
    """
    first = flat_start(shape, region) * item
    return first, first + covering_elements(shape, region) * item


def _cut_between_blocks(
    first: int, last: int, block: int, unit_bytes: int
) -> Iterator[tuple[int, int]]:
    """Cut bytes [first, last) of a chunk into pieces to read, so that each block among them can be
    verified.
    """
    start = first
    while start < last:
        stop = min(last, max((start + unit_bytes) // block, start // block + 1) * block)
        yield start, stop
        start = stop


def _num_separate_axes(
    shape: tuple[int, ...], region: Region, item: int, unit_bytes: int, margin: int
) -> int:
    """Count the leading axes along which each index is read separately, without what lies between.

    All of them where runs, each with `margin` bytes more, are long and far apart, else those whose
    rows are so far apart that no read would hold two.
    """
    outer = num_outer_axes(shape, region)
    run = math.prod(region.shape[outer:])
    is_sparse = covering_elements(shape, region) > 2 * (run + margin // item) * math.prod(
        region.shape[:outer]
    )
    if is_sparse and run * item >= LONG_RUN_BYTES:
        return outer
    return sum(2 * math.prod(shape[axis + 1 :]) > unit_bytes // item for axis in range(outer))


def regions_within(stored: StoredCheckpoint, part: ReadPart) -> Iterator[Region]:
    """Yield what of a part's region lies between its first and its last byte."""
    shape = stored.manifest.chunk_region(part.chunk).shape
    item = stored.dtype_of(part.chunk).itemsize
    for run in flat_range_regions(shape, part.start // item, part.stop // item):
        piece = intersect(run, part.region)
        if piece is not None:
            yield piece

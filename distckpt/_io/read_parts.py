"""Dividing what is to be read into parts: which bytes of a chunk one call reads, and where they go.

Parts end between checksum blocks wherever they can, so that no block is read in two pieces and left unchecked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from distckpt._base.device import Copier
from distckpt._base.dtypes import FROM_NAME
from distckpt._base.memory import Bytes, is_plain_memory, tensor_bytes
from distckpt._format.manifest import Manifest
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
from distckpt._io.sparse_read import is_worthwhile, max_elements
from distckpt._plan.load import Copy

READ_UNIT_BYTES = 2 << 20
"""One thread reads this much at a time: little enough to be in cache still when its checksum is computed."""
LONG_RUN_BYTES = 128 << 10
"""Runs at least this long are read by one call each; shorter ones together with what lies between them."""


class Part(NamedTuple):
    """Bytes [start, stop) of a chunk, and where they go.

    Either straight into `memory`; or what they hold of `region` (of the chunk) goes to its place in `target` (of the
    shape of the region), through a bounce buffer. A `sparse` part is all of its region, read without what lies between.
    """

    chunk: int
    start: int
    stop: int
    memory: Bytes | None = None
    region: Region | None = None
    target: torch.Tensor | None = None
    sparse: bool = False


def divide_copy(
    manifest: Manifest, copy: Copy, target: torch.Tensor, verify: str, exact: bool, copier: Copier, unit_bytes: int
) -> Iterator[Part]:
    """Divide a copy into parts of at most `unit_bytes`, or `READ_UNIT_BYTES` where they can be joined again.

    Args:
        manifest: of the checkpoint.
        copy: to be divided.
        target: what the copy's request fills.
        verify: with "full", reads that go through a bounce buffer are widened to whole blocks.
        exact: read nothing that lies between the runs of a region when they are long or far apart.
        copier: knows which targets are not in host memory.
        unit_bytes: of a part that goes through a bounce buffer; one block at least.
    """
    chunk = copy.chunk
    dtype = FROM_NAME[manifest.dtypes[manifest.key_ids[chunk]]]
    item, block, size = dtype.itemsize, manifest.block_bytes, int(manifest.num_bytes[chunk])
    goal = target if copy.target.shape == tuple(target.shape) else target[copy.target.slices()]
    is_whole = copy.source.num_elements * item == size
    if is_whole and goal.dtype == dtype and is_plain_memory(goal) and not copier.is_away(goal):
        yield from direct_parts(chunk, 0, size, tensor_bytes(goal), block)
        return
    shape = manifest.chunk_region(chunk).shape
    if exact and is_worthwhile(shape, copy.source, item):
        yield from _sparse_parts(chunk, shape, copy.source, item, goal)
        return
    for piece in step_over(copy.source, _num_separate_axes(shape, copy.source, item, exact, unit_bytes)):
        piece_goal = goal[piece.relative_to(copy.source.offset).slices()] if shape else goal
        first = flat_start(shape, piece) * item
        last = first + covering_elements(shape, piece) * item
        is_aligned = first % block == 0 and (last % block == 0 or last == size)
        if (
            num_outer_axes(shape, piece) == 0
            and piece_goal.dtype == dtype
            and is_plain_memory(piece_goal)
            and not copier.is_away(piece_goal)
            and (is_aligned or verify != "full")
        ):
            yield from direct_parts(chunk, first, last, tensor_bytes(piece_goal), block)
            continue
        if verify == "full":
            first, last = first // block * block, min(-(-last // block) * block, size)
        for start, stop in _cut_between_blocks(first, last, block, unit_bytes):
            yield Part(chunk, start, stop, None, piece, piece_goal)


def direct_parts(chunk: int, first: int, last: int, memory: Bytes, block: int) -> Iterator[Part]:
    """Divide bytes [first, last) of a chunk that go straight into memory of their number."""
    for start, stop in _cut_between_blocks(first, last, block, READ_UNIT_BYTES):
        yield Part(chunk, start, stop, memory[start - first : stop - first])


def _cut_between_blocks(first: int, last: int, block: int, unit_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut bytes [first, last) of a chunk into pieces to read, so that each block among them can be verified."""
    start = first
    while start < last:
        stop = min(last, max((start + unit_bytes) // block, start // block + 1) * block)
        yield start, stop
        start = stop


def _num_separate_axes(shape: tuple[int, ...], region: Region, item: int, exact: bool, unit_bytes: int) -> int:
    """Count the leading axes along which each index is read separately, without what lies between.

    All of them where runs are long and far apart (or no gaps are wanted), else those whose rows are so far apart that
    no read would hold two.
    """
    outer = num_outer_axes(shape, region)
    is_sparse = exact or covering_elements(shape, region) > 2 * region.num_elements
    if is_sparse and math.prod(region.shape[outer:]) * item >= LONG_RUN_BYTES:
        return outer
    return sum(2 * math.prod(shape[axis + 1 :]) > unit_bytes // item for axis in range(outer))


def _sparse_parts(chunk: int, shape: tuple[int, ...], region: Region, item: int, goal: torch.Tensor) -> Iterator[Part]:
    for piece in cut_region(region, max_elements(shape, region, item)):
        start = flat_start(shape, piece) * item
        stop = start + covering_elements(shape, piece) * item
        yield Part(chunk, start, stop, None, piece, goal[piece.relative_to(region.offset).slices()], sparse=True)


def with_gaps(part: Part, block: int) -> Iterator[Part]:
    """Divide a sparse part into ones that are read together with what lies between its runs."""
    for start, stop in _cut_between_blocks(part.start, part.stop, block, READ_UNIT_BYTES):
        yield part._replace(start=start, stop=stop, sparse=False)


def regions_within(manifest: Manifest, part: Part) -> Iterator[Region]:
    """Yield what of a part's region lies between its first and its last byte."""
    assert part.region is not None
    shape = manifest.chunk_region(part.chunk).shape
    item = FROM_NAME[manifest.dtypes[manifest.key_ids[part.chunk]]].itemsize
    for run in flat_range_regions(shape, part.start // item, part.stop // item):
        piece = intersect(run, part.region)
        if piece is not None:
            yield piece

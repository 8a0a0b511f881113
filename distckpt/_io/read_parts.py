"""Dividing what is to be read into parts: which bytes of a chunk one call reads, and where they go.

Parts end between checksum blocks wherever they can, so that no block is read in two pieces and left unchecked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from distckpt._base.device import Copier
from distckpt._base.dtypes import FROM_NAME
from distckpt._base.threads import Bytes, is_plain_memory, tensor_bytes
from distckpt._format.manifest import Manifest
from distckpt._geometry.region import (
    Region,
    covering_elements,
    flat_range_regions,
    flat_start,
    intersect,
    num_outer_axes,
    slabs,
    whole,
)
from distckpt._io.sparse_read import is_worthwhile, max_elements
from distckpt._plan.load import Copy

READ_UNIT_BYTES = 2 << 20
"""One thread reads this much at a time: little enough to be in cache still when its checksum is computed."""
LONG_RUN_BYTES = 128 << 10
"""Runs at least this long are read by one call each; shorter ones together with what lies between them."""


class Part(NamedTuple):
    """Bytes [start, stop) of a chunk, and where they go.

    Either straight into `memory`; or what they hold of `box` (of the chunk) goes to its place in `target` (of the
    shape of the box), through a bounce buffer. A `sparse` part is all of its box, read without what lies between.
    """

    chunk: int
    start: int
    stop: int
    memory: Bytes | None = None
    box: Region | None = None
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
        exact: read nothing that lies between the runs of a box when they are long or far apart.
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
    for run in _long_runs(shape, copy.source, item, exact):
        run_goal = goal[run.relative_to(copy.source.offset).slices()] if run.shape else goal
        first = flat_start(shape, run) * item
        last = first + covering_elements(shape, run) * item
        is_aligned = first % block == 0 and (last % block == 0 or last == size)
        if (
            num_outer_axes(shape, run) == 0
            and run_goal.dtype == dtype
            and is_plain_memory(run_goal)
            and not copier.is_away(run_goal)
            and (is_aligned or verify != "full")
        ):
            yield from direct_parts(chunk, first, last, tensor_bytes(run_goal), block)
            continue
        for box in _spans(shape, run, unit_bytes // item):
            box_goal = run_goal[box.relative_to(run.offset).slices()] if box.shape else run_goal
            first = flat_start(shape, box) * item
            last = first + covering_elements(shape, box) * item
            if verify == "full":
                first, last = first // block * block, min(-(-last // block) * block, size)
            for start, stop in _cut_between_blocks(first, last, block, unit_bytes):
                yield Part(chunk, start, stop, None, box, box_goal)


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


def _spans(shape: tuple[int, ...], box: Region, max_elements: int) -> Iterator[Region]:
    """Cut a box where its rows are so far apart that no read would hold two of them and what lies between."""
    axis = next((i for i, n in enumerate(box.shape) if n > 1), 0)
    if num_outer_axes(shape, box) == 0 or 2 * math.prod(shape[axis + 1 :]) <= max_elements:
        yield box
        return
    for index in range(box.offset[axis], box.offset[axis] + box.shape[axis]):
        offset = (*box.offset[:axis], index, *box.offset[axis + 1 :])
        yield from _spans(shape, Region(offset, (*box.shape[:axis], 1, *box.shape[axis + 1 :])), max_elements)


def _sparse_parts(chunk: int, shape: tuple[int, ...], box: Region, item: int, goal: torch.Tensor) -> Iterator[Part]:
    for piece in slabs(box.shape, whole(box.shape), max_elements(shape, box, item)):
        part = Region(tuple(a + b for a, b in zip(piece.offset, box.offset, strict=True)), piece.shape)
        start = flat_start(shape, part) * item
        stop = start + covering_elements(shape, part) * item
        yield Part(chunk, start, stop, None, part, goal[piece.slices()], sparse=True)


def _long_runs(shape: tuple[int, ...], box: Region, item: int, exact: bool) -> Iterator[Region]:
    """Yield the contiguous runs of a box when they are long and far apart (or no gaps are wanted), else the box."""
    outer = num_outer_axes(shape, box)
    run_bytes = math.prod(box.shape[outer:]) * item
    is_sparse = exact or covering_elements(shape, box) > 2 * box.num_elements
    if outer == 0 or run_bytes < LONG_RUN_BYTES or not is_sparse:
        yield box
        return
    for index in itertools.product(*(range(o, o + n) for o, n in zip(box.offset[:outer], box.shape, strict=False))):
        yield Region(index + box.offset[outer:], (1,) * outer + box.shape[outer:])


def with_gaps(part: Part, block: int) -> Iterator[Part]:
    """Divide a sparse part into ones that are read together with what lies between its runs."""
    for start, stop in _cut_between_blocks(part.start, part.stop, block, READ_UNIT_BYTES):
        yield part._replace(start=start, stop=stop, sparse=False)


def boxes_within(manifest: Manifest, part: Part) -> Iterator[Region]:
    """Yield what of a part's box lies between its first and its last byte."""
    assert part.box is not None
    shape = manifest.chunk_region(part.chunk).shape
    item = FROM_NAME[manifest.dtypes[manifest.key_ids[part.chunk]]].itemsize
    for run in flat_range_regions(shape, part.start // item, part.stop // item):
        box = intersect(run, part.box)
        if box is not None:
            yield box

"""Division of reads into parts: ranges of bytes, and their targets.

Where checksums are compared, parts begin and end between blocks: no byte of an unverified block is
used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.lazy import torch
from distckpt._base.memory import Copier
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import (
    Region,
    covering_elements,
    flat_start,
    num_outer_axes,
    step_over,
)
from distckpt._geometry.units import cut_region
from distckpt._plan.load import Copy

REACH_BYTES = 2 << 20
"""Twice the distance from which on local rows are read separately."""
LONG_RUN_BYTES = 128 << 10
"""Read runs at least this long as parts of their own."""
PITCH_BYTES = 8 << 10
"""Mean distance from which on runs are read one by one. Closer runs take less time with the gaps
between them.
"""
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
    *,
    exact: bool,
    reach_bytes: int,
) -> list[ReadPart]:
    """Divide copies into parts.

    `targets` has the tensor of each request. With `exact`, gaps between the runs of a region are
    not read if the runs are long or far apart. Otherwise rows are only separate if no `reach_bytes`
    hold two of them.
    """
    manifest = stored.manifest
    chunks = np.array([copy.chunk for copy in copies], np.int64)
    sizes = manifest.num_bytes[chunks].tolist()
    key_ids = manifest.key_ids[chunks].tolist()
    parts: list[ReadPart] = []
    for copy, size, key_id in zip(copies, sizes, key_ids, strict=True):
        target = targets[copy.request]
        dtype = FROM_NAME[manifest.dtypes[key_id]]
        goal = target
        if copy.target.shape != target.shape:
            goal = target[copy.target.slices()]
        if goal.nbytes == size and goal.dtype == dtype and copier.is_plain(goal):
            parts.append(ReadPart(copy.chunk, 0, size, goal, 0))
            continue
        shape = manifest.chunk_region(copy.chunk).shape
        if exact and _is_sparse(shape, copy.source, dtype.itemsize):
            parts.extend(_sparse_parts(stored, copy, goal))
        else:
            parts.extend(_dense_parts(stored, copy, goal, copier, reach_bytes))
    return parts


def _sparse_parts(
    stored: StoredCheckpoint,
    copy: Copy,
    goal: torch.Tensor,
) -> Iterator[ReadPart]:
    shape = stored.manifest.chunk_region(copy.chunk).shape
    item = stored.dtype_of(copy.chunk).itemsize
    for piece in cut_region(copy.source, REACH_BYTES // item):
        place = goal[piece.relative_to(copy.source.offset).slices()]
        span = _byte_range(shape, piece, item)
        yield ReadPart(copy.chunk, *span, place, region=piece, is_sparse=True)


def _dense_parts(
    stored: StoredCheckpoint, copy: Copy, goal: torch.Tensor, copier: Copier, reach_bytes: int
) -> Iterator[ReadPart]:
    """Yield parts that include the gaps between a region's runs."""
    shape = stored.manifest.chunk_region(copy.chunk).shape
    dtype = stored.dtype_of(copy.chunk)
    size = int(stored.manifest.num_bytes[copy.chunk])
    # Blocks are read whole, even if only a part of them is requested.
    margin = stored.manifest.block_bytes if stored.verifies else 1
    num_axes = _num_separate_axes(shape, copy.source, dtype.itemsize, reach_bytes, margin)
    for piece in step_over(copy.source, num_axes):
        place = goal
        if shape:
            place = goal[piece.relative_to(copy.source.offset).slices()]
        first, last = _byte_range(shape, piece, dtype.itemsize)
        start = first // margin * margin
        stop = min(-(-last // margin) * margin, size)
        is_run = num_outer_axes(shape, piece) == 0 and place.dtype == dtype
        lead = NOT_PLAIN
        if is_run and copier.is_plain(place):
            lead = first - start
        yield ReadPart(copy.chunk, start, stop, place, lead, piece)


def _is_sparse(shape: tuple[int, ...], region: Region, item: int) -> bool:
    """Whether the runs of a region are short and far apart. Such runs are read without the gaps."""
    outer = num_outer_axes(shape, region)
    num_runs = math.prod(region.shape[:outer])
    run = math.prod(region.shape[outer:]) * item
    if num_runs <= 1 or not 0 < run < REACH_BYTES:
        return False
    first_to_last = covering_elements(shape, region) * item - run
    return first_to_last >= (num_runs - 1) * PITCH_BYTES


def _byte_range(shape: tuple[int, ...], region: Region, item: int) -> tuple[int, int]:
    """Return the byte range that covers a region of a row-major tensor."""
    first = flat_start(shape, region) * item
    return first, first + covering_elements(shape, region) * item


def _num_separate_axes(
    shape: tuple[int, ...], region: Region, item: int, reach_bytes: int, margin: int
) -> int:
    """Count the leading axes along which each index is read separately.

    These are all axes if runs, each with `margin` more bytes, are long and far apart; else the axes
    whose rows are so far apart that no read would hold two.
    """
    outer = num_outer_axes(shape, region)
    run = math.prod(region.shape[outer:])
    num_needed = (run + margin // item) * math.prod(region.shape[:outer])
    if run * item >= LONG_RUN_BYTES and covering_elements(shape, region) > 2 * num_needed:
        return outer
    return sum(2 * math.prod(shape[axis + 1 :]) > reach_bytes // item for axis in range(outer))

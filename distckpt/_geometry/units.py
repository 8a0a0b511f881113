"""Units of work: runs of bytes between blocks, and regions of tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from distckpt._geometry.region import Region, flat_start, with_item


class Span(NamedTuple):
    """Bytes [start, stop) of one of several chunks."""

    chunk: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes."""
        return self.stop - self.start


Unit: TypeAlias = list[Span]
"""Consecutive spans that one thread reads or writes at a time."""


def sizes_of(unit: Sequence[Span]) -> list[int]:
    """Return the number of bytes of each span."""
    return [stop - start for _, start, stop in unit]


def units_of(
    sizes: Sequence[int], unit_bytes: int, block_bytes: int, first: int = 0
) -> Iterator[Unit]:
    """Divide consecutive chunks into units of at most `unit_bytes`, or one block.

    Chunks are cut only between their blocks of `block_bytes`; with blocks as large as units, a
    chunk that fits a unit stays whole. The chunks are numbered from `first` on.
    """
    unit_bytes = max(unit_bytes, block_bytes)
    unit: Unit = []
    room = unit_bytes
    for chunk, size in enumerate(sizes, first):
        start = 0
        while start < size:
            stop = size
            if room < size - start:
                stop = start + room // block_bytes * block_bytes
            if stop > start:
                unit.append(Span(chunk, start, stop))
                room -= stop - start
                start = stop
            if start < size or not room:
                yield unit
                unit = []
                room = unit_bytes
    if unit:
        yield unit


def spans_within(sizes: Sequence[int], start: int, stop: int, block_bytes: int = 1) -> Unit:
    """Return the whole blocks of consecutive chunks that meet [start, stop)."""
    spans = []
    begin = 0
    for chunk, size in enumerate(sizes):
        first = max(0, start - begin) // block_bytes * block_bytes
        last = min(size, -(-max(0, stop - begin) // block_bytes) * block_bytes)
        if first < last:
            spans.append(Span(chunk, first, last))
        begin += size
    return spans


def units_of_spans(spans: Unit, unit_bytes: int, block_bytes: int) -> Iterator[Unit]:
    """Divide spans that begin at blocks into units, see `units_of`."""
    for unit in units_of(sizes_of(spans), unit_bytes, block_bytes):
        spans_of_unit = []
        for index, start, stop in unit:
            span = spans[index]
            spans_of_unit.append(Span(span.chunk, span.start + start, span.start + stop))
        yield spans_of_unit


def cut_region(
    region: Region, max_elements: int, *, shape: tuple[int, ...] | None = None, multiple: int = 1
) -> Iterator[Region]:
    """Cut a region across its leading axes into pieces, in row-major order.

    Pieces have at most `max_elements`. They are runs of rows; only rows that are larger than the
    limit are cut along later axes. The edges lie at multiples of a number of rows that depends on
    the shape alone, so that regions which overlap share most of them.

    With `multiple`, a piece begins only where its first element's flat index in the row-major
    tensor of `shape` is a multiple of it. Pieces may then be larger.
    """
    if region.num_elements <= max_elements:
        yield region
        return
    axis = next(i for i, n in enumerate(region.shape) if n > 1)
    first = region.offset[axis]
    end = first + region.shape[axis]
    num_rows = 1
    can_cut = True
    if shape is not None:
        stride = math.prod(shape[axis + 1 :])
        num_rows = math.lcm(stride, multiple) // stride
        can_cut = (flat_start(shape, region) - first * stride) % multiple == 0
    step = max(1, max_elements // (math.prod(region.shape[axis + 1 :]) * num_rows)) * num_rows
    edges = [first, end]
    if can_cut:
        edges[1:1] = range((first // step + 1) * step, end, step)
    for low, high in itertools.pairwise(edges):
        piece = Region(
            with_item(region.offset, axis, low), with_item(region.shape, axis, high - low)
        )
        if high - low == 1:
            yield from cut_region(piece, max_elements, shape=shape, multiple=multiple)
        else:
            yield piece

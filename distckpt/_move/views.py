"""Views as numbers: their elements of a memory, and the boxes of these."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from distckpt._geometry.region import Region


@dataclass(frozen=True)
class Layout:
    """The elements of a view, as offset and strides in memory.

    At `index` lies element `offset + sum(index * strides)`.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Return the layout of a torch tensor."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    def part(self, region: Region) -> Layout:
        """Return a region of the view."""
        first = sum(i * s for i, s in zip(region.offset, self.strides, strict=True))
        return Layout(self.offset + first, region.shape, self.strides)


class Box(NamedTuple):
    """A box of a memory, and the matching view of another memory."""

    region: Region
    partner: Layout


class _Axis(NamedTuple):
    """An axis that two views share: its size, and how far one index goes in each memory."""

    size: int
    step: int
    partner_step: int


_ONE_ELEMENT = _Axis(1, 0, 0)


class _Pair(NamedTuple):
    """Two views of one shape.

    The axes are in descending order of the steps of the first.
    """

    offset: int
    partner_offset: int
    axes: tuple[_Axis, ...]

    def at(self, number: int, start: int, *axes: _Axis) -> _Pair:
        """Begin at an index of an axis, and replace that axis."""
        axis = self.axes[number]
        return _Pair(
            self.offset + start * axis.step,
            self.partner_offset + start * axis.partner_step,
            (*self.axes[:number], *axes, *self.axes[number + 1 :]),
        )


def factored(num_elements: int, strides: Sequence[int]) -> tuple[int, ...]:
    """Return a row-major memory's shape whose rows fit a view's strides.

    A rest that the strides do not divide is taken as one row.
    """
    rows = [1]
    for stride in sorted(set(strides)):
        if stride > rows[-1] and stride % rows[-1] == 0:
            rows.append(stride)
    inner = []
    for small, large in itertools.pairwise(rows):
        inner.append(large // small)
    return (-(-num_elements // rows[-1]), *reversed(inner))


def boxes(shape: tuple[int, ...], own: Layout, partner: Layout) -> Iterator[Box]:
    """Cut a view of a row-major memory of `shape` into boxes. Its partner is cut along with it.

    Elements that the view has several times, as expanded ones do, are in several boxes.
    """
    if 0 in own.shape:
        return
    axes = map(_Axis, own.shape, own.strides, partner.strides)
    ordered = sorted((a for a in axes if a.size > 1), key=lambda axis: -axis.step)
    pair = _Pair(own.offset, partner.offset, _merged(ordered))
    steps = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    yield from _placed(shape, steps, pair)


def _merged(axes: Sequence[_Axis]) -> tuple[_Axis, ...]:
    """Join axes where both views continue into the next one."""
    merged: list[_Axis] = []
    for axis in axes:
        last = None
        if merged:
            last = merged[-1]
        ends = (axis.size * axis.step, axis.size * axis.partner_step)
        if last is not None and (last.step, last.partner_step) == ends:
            merged[-1] = axis._replace(size=last.size * axis.size)
        else:
            merged.append(axis)
    return tuple(merged)


def _placed(shape: tuple[int, ...], steps: tuple[int, ...], pair: _Pair) -> Iterator[Box]:
    """Give each axis of a pair an axis of the memory.

    An axis that fits none is cut until it does.
    """
    start = []
    for size, step in zip(shape, steps, strict=True):
        start.append(pair.offset // step % size)
    places: dict[int, _Axis] = {}
    for number, axis in enumerate(pair.axes):
        place = _place(shape, steps, axis.step)
        if place is None or place in places:
            for index in range(axis.size):
                yield from _placed(shape, steps, pair.at(number, index))
            return
        if start[place] + axis.size > shape[place]:
            for smaller in _cut(pair, number, start[place], shape[place]):
                yield from _placed(shape, steps, smaller)
            return
        places[place] = axis
    axes = []
    for number in range(len(shape)):
        axes.append(places.get(number, _ONE_ELEMENT))
    sizes = tuple(axis.size for axis in axes)
    strides = tuple(axis.partner_step for axis in axes)
    yield Box(Region(tuple(start), sizes), Layout(pair.partner_offset, sizes, strides))


def _place(shape: tuple[int, ...], steps: tuple[int, ...], step: int) -> int | None:
    """Find the axis of a memory whose neighbors lie a step apart."""
    for place, own in enumerate(steps):
        if own == step and shape[place] > 1:
            return place
    return None


def _cut(pair: _Pair, number: int, start: int, size: int) -> list[_Pair]:
    """Cut an axis that crosses rows into whole rows and the remainder."""
    axis = pair.axes[number]
    num_rows, rest = divmod(axis.size, size)
    if start == 0 and rest == 0:
        rows = _Axis(num_rows, axis.step * size, axis.partner_step * size)
        return [pair.at(number, 0, rows, axis._replace(size=size))]
    first = size - start if start else axis.size - rest
    return [
        pair.at(number, 0, axis._replace(size=first)),
        pair.at(number, first, axis._replace(size=axis.size - first)),
    ]


def without(region: Region, hole: Region) -> Iterator[Region]:
    """Yield the part of a region outside a hole that it intersects.

    The results are disjoint regions.
    """
    offset = list(region.offset)
    shape = list(region.shape)
    for axis, (low, num) in enumerate(zip(hole.offset, hole.shape, strict=True)):
        end = offset[axis] + shape[axis]
        for first, last in ((offset[axis], low), (low + num, end)):
            if first < last:
                at = [*offset]
                size = [*shape]
                at[axis] = first
                size[axis] = last - first
                yield Region(tuple(at), tuple(size))
        high = min(end, low + num)
        offset[axis] = max(offset[axis], low)
        shape[axis] = high - offset[axis]

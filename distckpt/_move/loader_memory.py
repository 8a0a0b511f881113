"""The contents of a memory while a loader runs: its stored elements and their places.

Views are numbers: their elements of a memory, and the boxes of these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from distckpt._geometry.region import Region, intersect
from distckpt._move.assignment import divide


class Layout(NamedTuple):
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


def boxes(shape: tuple[int, ...], own: Layout, partner: Layout) -> Iterator[tuple[Region, Layout]]:
    """Cut a view of a row-major memory of `shape` into boxes. Its partner is cut along with it.

    Elements that the view has several times, as expanded ones do, are in several boxes.
    """
    if 0 in own.shape:
        return
    axes = map(_Axis, own.shape, own.strides, partner.strides)
    ordered = sorted((a for a in axes if a.size > 1), key=lambda axis: -axis.step)
    pair = _Pair(own.offset, partner.offset, _merged(ordered))
    yield from _placed(shape, _steps_of(shape), pair)


def _steps_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major memory."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _merged(axes: Sequence[_Axis]) -> tuple[_Axis, ...]:
    """Join axes where both views continue into the next one."""
    merged: list[_Axis] = []
    for axis in axes:
        ends = (axis.size * axis.step, axis.size * axis.partner_step)
        if merged and (merged[-1].step, merged[-1].partner_step) == ends:
            axis = axis._replace(size=merged.pop().size * axis.size)
        merged.append(axis)
    return tuple(merged)


def _placed(
    shape: tuple[int, ...], steps: tuple[int, ...], pair: _Pair
) -> Iterator[tuple[Region, Layout]]:
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
    yield Region(tuple(start), sizes), Layout(pair.partner_offset, sizes, strides)


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


# --- Contents -------------------------------------------------------------------------------------


Step = tuple[str, torch.dtype]
"""A change to elements on their way.

("to", dtype) converts them, ("as", dtype) takes their bits for another dtype.
"""


class Read(NamedTuple):
    """Stored elements that a view has.

    Attributes:
        stored: the memory of a stored tensor; None for values of the loader's own.
        layout: which elements of it.
        steps: the changes to them.
        partner: the matching part of the view's partner, of the same shape as `layout`.
    """

    stored: Memory | None
    layout: Layout
    steps: tuple[Step, ...]
    partner: Layout


class Piece(NamedTuple):
    """A box of a memory, and the values it holds, see `Read`."""

    region: Region
    stored: Memory | None
    layout: Layout
    steps: tuple[Step, ...]


@dataclass(eq=False)
class Memory:
    """A row-major memory: a stored tensor, a copy of such, or a real tensor.

    Attributes:
        shape: the shape of the stored tensor; otherwise one whose rows fit the views.
        dtype: of its elements.
        key: the name of a stored tensor.
        tensor: one tensor of a real memory, whose strides do not matter.
        pieces: everything written, in this order; later ones count where they overlap.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    key: str | None = None
    tensor: torch.Tensor | None = None
    pieces: list[Piece] = field(default_factory=list)
    is_settled: bool = True

    def read(self, view: Layout, partner: Layout) -> Iterator[Read]:
        """Yield the stored elements that a view of this memory has."""
        if self.key is not None:
            yield Read(self, view, (), partner)
            return
        self.settle()
        for region, along in boxes(self.shape, view, partner):
            for piece in self.pieces:
                common = intersect(region, piece.region)
                if common is not None:
                    layout = piece.layout.part(common.relative_to(piece.region.offset))
                    part = along.part(common.relative_to(region.offset))
                    yield Read(piece.stored, layout, piece.steps, part)

    def write(self, reads: Sequence[Read], steps: tuple[Step, ...] = ()) -> None:
        """Put elements into this memory, where their partners are."""
        for stored, layout, before, partner in reads:
            for region, part in boxes(self.shape, partner, layout):
                self.pieces.append(Piece(region, stored, part, before + steps))
        self.is_settled = False

    def fill(self, view: Layout) -> None:
        """Note that a view gets values of the loader's own."""
        self.write([Read(None, Layout(0, view.shape, (0,) * len(view.shape)), (), view)])

    def settle(self) -> None:
        """Cut overwritten elements out of the pieces."""
        if not self.is_settled:
            self.pieces = _last_written(self.pieces)
            self.is_settled = True

    def layout(self, region: Region) -> Layout:
        """Return the layout of a region."""
        return Layout(0, self.shape, _steps_of(self.shape)).part(region)

    def view(self, layout: Layout) -> torch.Tensor:
        """Return elements of a real memory as a tensor."""
        assert self.tensor is not None
        return self.tensor.as_strided(layout.shape, layout.strides, layout.offset)

    def names(self) -> list[str]:
        """Name the stored tensors that have elements here."""
        if self.key is not None:
            return [self.key]
        keys: dict[str, None] = {}
        for piece in self.pieces:
            if piece.stored is not None:
                keys[str(piece.stored.key)] = None
        return list(keys)


def num_elements(reads: Iterable[Read]) -> int:
    """Return the number of elements that are read."""
    return sum(math.prod(read.layout.shape) for read in reads)


def _last_written(pieces: Sequence[Piece]) -> list[Piece]:
    """Return disjoint pieces: the last one written for each element."""
    later: dict[int, list[Region]] = {}
    for first, other in overlaps([piece.region for piece in pieces]):
        later.setdefault(min(first, other), []).append(pieces[max(first, other)].region)
    result: list[Piece] = []
    for number, piece in enumerate(pieces):
        left = [piece.region]
        for hole in later.get(number, ()):
            _, left = divide(left, hole)
        for region in left:
            layout = piece.layout.part(region.relative_to(piece.region.offset))
            result.append(piece._replace(region=region, layout=layout))
    return result


def overlaps(regions: Sequence[Region]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of regions that share elements, along the first axis."""
    spans = []
    for region in regions:
        spans.append(next(zip(*region, strict=True), (0, 1)))
    active: list[int] = []
    for number in sorted(range(len(regions)), key=spans.__getitem__):
        active = [other for other in active if sum(spans[other]) > spans[number][0]]
        for other in active:
            if intersect(regions[number], regions[other]) is not None:
                yield number, other
        active.append(number)

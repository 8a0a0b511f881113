"""The contents of a memory while a loader runs: its stored elements and their places."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from distckpt._geometry.region import Region, intersect
from distckpt._move.views import Layout, boxes, without

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

    def num_written(self, view: Layout) -> int:
        """Count the elements of a view that were written."""
        self.settle()
        regions = []
        for box in boxes(self.shape, view, view):
            regions.append(box.region)
        num_elements = 0
        for piece in self.pieces:
            for region in regions:
                common = intersect(piece.region, region)
                if common is not None:
                    num_elements += common.num_elements
        return num_elements

    def names(self) -> list[str]:
        """Name the stored tensors that have elements here."""
        if self.key is not None:
            return [self.key]
        keys: dict[str, None] = {}
        for piece in self.pieces:
            if piece.stored is not None and piece.stored.key is not None:
                keys[piece.stored.key] = None
        return list(keys)


def _last_written(pieces: Sequence[Piece]) -> list[Piece]:
    """Return disjoint pieces: the last one written for each element."""
    later: dict[int, list[Region]] = {}
    for first, other in overlaps([piece.region for piece in pieces]):
        later.setdefault(min(first, other), []).append(pieces[max(first, other)].region)
    result: list[Piece] = []
    for number, piece in enumerate(pieces):
        left = [piece.region]
        for hole in later.get(number, ()):
            left = list(itertools.chain.from_iterable(_outside(region, hole) for region in left))
        result.extend(_narrowed(piece, region) for region in left)
    return result


def _outside(region: Region, hole: Region) -> list[Region]:
    if intersect(region, hole) is None:
        return [region]
    return list(without(region, hole))


def _narrowed(piece: Piece, region: Region) -> Piece:
    layout = piece.layout.part(region.relative_to(piece.region.offset))
    return piece._replace(region=region, layout=layout)


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

"""Pieces and parts of work, as pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ALIGNMENT = 1 << 20
"""Divide files at multiples of a page, which only one process writes."""
_MIN_PIECE_BYTES = 64 << 20
_MAX_PIECE_BYTES = 1 << 30
_NUM_PIECES = 1024
"""Target number of pieces, as far as the sizes below allow."""


@dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of a named item, such as an output file."""

    name: str
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.stop - self.start


@dataclass(frozen=True)
class Part:
    """The part of some work that a process does: `index` of `count`, from 0."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"There is no part {self}: parts are counted from 0, and the last of {self.count} "
                f"is {self.count - 1}/{self.count}."
            )

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def piece_bytes(total: int) -> int:
    """Return the size of some work's pieces, in multiples of a megabyte."""
    size = min(max(total // _NUM_PIECES, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def cut_files(sizes: Mapping[str, int], *, divides: bool) -> list[Piece]:
    """Return files as pieces; large ones are divided into several."""
    limit = piece_bytes(sum(sizes.values()))
    pieces = []
    for name, size in sizes.items():
        count = 1
        if divides:
            count = max(1, -(-size // limit))
        edges = []
        for i in range(count):
            edges.append(i * size // count // _ALIGNMENT * _ALIGNMENT)
        pieces += [Piece(name, *edge) for edge in itertools.pairwise([*edges, size])]
    return pieces


def runs_of(sizes: Sequence[int]) -> list[range]:
    """Divide a sequence of items into runs of about a piece's size."""
    limit = piece_bytes(sum(sizes))
    runs = []
    first = 0
    filled = 0
    for number, size in enumerate(sizes):
        if filled and filled + size > limit:
            runs.append(range(first, number))
            first = number
            filled = 0
        filled += size
    if sizes:
        return [*runs, range(first, len(sizes))]
    return runs


def share(costs: Sequence[int], part: Part) -> list[int]:
    """Return the numbers of the pieces of a part.

    They are a run with an equal share of the work, given the cost of each piece.
    """
    sizes = [cost + 1 for cost in costs]
    total = sum(sizes)
    end = 0
    numbers = []
    for number, size in enumerate(sizes):
        # By its middle; in halves, so that numbers stay integers.
        owner = (2 * end + size) * part.count // (2 * total)
        end += size
        if owner == part.index:
            numbers.append(number)
    return numbers

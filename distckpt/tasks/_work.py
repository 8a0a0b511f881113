"""Work that is divided into pieces: their division, and the definition of a verb.

A verb defines its pieces, the way to do one, and the way to combine their results. The choice of
the processes that do them, and the record of finished ones, is up to `_run`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from distckpt._checkpoint.consistent_read import reading
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles
from distckpt.tasks._facts import check_sources

_ALIGNMENT = 1 << 20
"""Divide files at multiples of a page, which only one process writes."""
_MIN_PIECE_BYTES = 64 << 20
_MAX_PIECE_BYTES = 1 << 30
_NUM_PIECES = 1024
"""Target number of pieces, as far as the sizes below allow."""

AddBytes: TypeAlias = Callable[[int], None]
"""A function that notes bytes that are done."""


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


class Work(ABC):
    """The work of a verb with some arguments, as pieces.

    Attributes:
        verb: its name.
        place: location next to the journal, which is named after it.
        facts: the facts on which the result depends, by name; another value is other work.
        checkpoints: the checkpoints to read.
        pieces: the same in each process with the same arguments.
    """

    verb: str
    place: str
    facts: Mapping[str, str]
    checkpoints: Sequence[StoredCheckpoint] = ()
    pieces: Sequence[Piece] = ()

    @property
    def sources(self) -> list[str]:
        """Locations of the checkpoints to read."""
        return [stored.location for stored in self.checkpoints]

    @functools.cached_property
    def nonce(self) -> str:
        """A hash of everything that the result depends on."""
        pieces = [[piece.name, piece.start, piece.stop] for piece in self.pieces]
        text = json.dumps({"facts": dict(self.facts), "pieces": pieces})
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def journal(self) -> str:
        """The location of the journal, which need not exist."""
        parent, name = locations.split(self.place)
        return locations.join(parent, f".{name}.parts-{self.nonce}")

    def run(self, assigned: Iterable[int], add_bytes: AddBytes) -> Iterator[tuple[int, Any]]:
        """Do pieces one after the other.

        Yield the number of each and its result, for JSON, when its output is on disk.
        """
        with (
            reading(Ranks.alone(), self.checkpoints),
            OpenFiles.for_many_reads() as files,
        ):
            self.use(files)
            for number in assigned:
                yield number, self.do(number, add_bytes)

    def use(self, files: OpenFiles) -> None:
        """Read through files that stay open until all pieces of a run are done."""
        del files

    @abstractmethod
    def do(self, number: int, add_bytes: AddBytes) -> Any:
        """Do a piece; return its result, for JSON, when its output is on disk."""

    @abstractmethod
    def report(self, results: Sequence[Any], seconds: float) -> Any:
        """Combine the results of all pieces; `seconds` is the sum of their times."""

    def costs(self) -> Sequence[int]:
        """Return the cost of each piece, in bytes of copied output."""
        return [piece.num_bytes for piece in self.pieces]

    # Work that only reads has no output, and needs nothing of the following.

    def files(self) -> list[str]:
        """Return the names of the files of the output."""
        return []

    def damaged(self) -> list[str]:
        """Return the files that differ from the output of the pieces."""
        return []

    def check(self) -> None:
        """Refuse to begin, for example because the target exists."""
        return

    def begin(self, is_new: bool) -> None:
        """Make the files that the pieces are written into."""
        del is_new

    def is_begun(self) -> bool:
        """Whether the files that the pieces are written into exist."""
        return True

    def complete(self, results: Sequence[Any]) -> None:
        """Check the sources and the output of the pieces, and add the rest.

        May be called again.
        """
        del results
        check_sources(self.facts, self.checkpoints)

    def directory(self) -> str:
        """Return the directory of the output before it appears."""
        return self.place

    def proof(self, directory: str) -> Any:
        """Return a proof that identifies the complete output, see `_outputs`.

        None where there is none.
        """
        return {"sizes": []}

    def commit(self, results: Sequence[Any]) -> None:
        """Let the output appear in one step."""
        del results


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

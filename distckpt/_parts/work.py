"""Work that is divided into pieces: pure functions, and what a verb defines.

A verb says what its pieces are, how one is done and how the results of all are put together. Who
does which of them, and what is done already, is up to `run`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_ALIGNMENT = 1 << 20
"""Files are divided at multiples of it, so that no two processes write into one page."""
_MIN_PIECE_BYTES = 64 << 20
_MAX_PIECE_BYTES = 1 << 30
_NUM_PIECES = 1024
"""Work is divided into about so many pieces, as far as these sizes allow."""


@dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of something with a name, such as an output file."""

    name: str
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.stop - self.start


@dataclass(frozen=True)
class Part:
    """Which part of some work a process does: `index` of `count`, counted from 0."""

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


class Attempt(NamedTuple):
    """An attempt at some work: the directory of its journal, and what stands for its facts."""

    journal: str
    nonce: str


class Work(ABC):
    """What a verb does for some arguments, as pieces.

    Attributes:
        verb: its name.
        place: the journal is beside this location, and named after it.
        facts: what the result depends on, by name: another value of one is other work.
        sources: locations of what is read.
        pieces: the same in each process that is given the same arguments.
    """

    verb: str
    place: str
    facts: Mapping[str, str]
    sources: Sequence[str]
    pieces: Sequence[Piece]

    @abstractmethod
    def run(
        self, attempt: Attempt, assigned: Iterable[int], add_bytes: Callable[[int], None]
    ) -> Iterator[tuple[int, Any]]:
        """Do pieces one after the other; yield the number of each and its result, for JSON, when
        what it writes is on disk.
        """

    @abstractmethod
    def report(self, results: Sequence[Any], seconds: float) -> Any:
        """Put the results of all pieces together; `seconds` is the time that all have taken."""

    def costs(self) -> Sequence[int]:
        """Return how much work each piece is, in bytes of output that is copied."""
        return [piece.num_bytes for piece in self.pieces]

    # Work that only reads has no output, and needs nothing of the following.

    def files(self, attempt: Attempt) -> list[str]:
        """Return the names of the files of the output."""
        return []

    def damaged(self, attempt: Attempt) -> list[str]:
        """Return the names of files that are there, and are not those that pieces have written."""
        del attempt
        return []

    def check(self) -> None:
        """Refuse to begin, for example because the target is there."""
        return

    def begin(self, attempt: Attempt, is_new: bool) -> None:
        """Make what the pieces are written into."""
        del attempt, is_new

    def is_begun(self, attempt: Attempt) -> bool:
        """Tell whether what the pieces are written into is there."""
        return True

    def complete(self, attempt: Attempt, results: Sequence[Any]) -> None:
        """Check what the pieces have written, and add what is missing. May be called again."""
        del attempt, results

    def directory(self, attempt: Attempt) -> str:
        """Return where the output is before it appears."""
        return self.place

    def proof(self, attempt: Attempt, directory: str) -> Any:
        """Return what tells the complete output in a directory from any other, see
        `exports.proof_of`; None where there is none.
        """
        return {"sizes": []}

    def commit(self, attempt: Attempt, results: Sequence[Any]) -> None:
        """Let the output appear in one step."""
        del attempt, results


def piece_bytes(total: int) -> int:
    """Return how large the pieces of work of some size are, a multiple of a megabyte."""
    size = min(max(total // _NUM_PIECES, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def cut_files(sizes: Mapping[str, int], *, divides: bool) -> list[Piece]:
    """Return files as pieces, large ones divided into several."""
    limit = piece_bytes(sum(sizes.values()))
    pieces = []
    for name, size in sizes.items():
        count = max(1, -(-size // limit)) if divides else 1
        edges = [i * size // count // _ALIGNMENT * _ALIGNMENT for i in range(count)]
        pieces += [Piece(name, *edge) for edge in itertools.pairwise([*edges, size])]
    return pieces


def share(costs: Sequence[int], part: Part) -> list[int]:
    """Return the numbers of the pieces of a part: a run that is about as much work as the others,
    given how much each piece is.
    """
    sizes = [cost + 1 for cost in costs]
    total, end, numbers = sum(sizes), 0, []
    for number, size in enumerate(sizes):
        # By its middle; of halves, so that numbers stay whole.
        owner = (2 * end + size) * part.count // (2 * total)
        end += size
        if owner == part.index:
            numbers.append(number)
    return numbers

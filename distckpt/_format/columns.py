"""Tables as bytes, in messages and on disk.

They are named numpy columns and one JSON value in a safetensors blob.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from distckpt._geometry.region import IntArray

Column = npt.NDArray[Any]

_JSON = "json"
DELTAS = ".deltas"
COUNTS = ".counts"
INTEGERS = (np.uint8, np.uint16, np.uint32, np.int64)
"""Dtypes of the results of `narrow`."""
_WORD_BYTES = 8


def pack(fields: Any, columns: Mapping[str, Column]) -> bytes:
    """Encode a value of JSON, and arrays; the inverse of `unpack`."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    arrays = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    return safetensors.numpy.save({_JSON: np.frombuffer(text, np.uint8), **arrays})


def stored_integers(columns: Mapping[str, Column], name: str, shape: tuple[int, ...]) -> IntArray:
    """Return a column of integers as int64, see `stored_column`."""
    return stored_column(columns, name, shape).astype(np.int64, copy=False)


def compress(data: bytes) -> bytes:
    """Compress bytes for a message.

    Its numbers have 64 bits, and their high bytes are mostly zeros: bytes of equal weight are put
    next to each other.
    """
    words = np.frombuffer(data + bytes(-len(data) % _WORD_BYTES), np.uint8).reshape(-1, _WORD_BYTES)
    return len(data).to_bytes(_WORD_BYTES, "big") + zlib.compress(words.T.tobytes(), level=1)


def decompress(data: bytes) -> bytes:
    """Undo `compress`.

    Raises:
        ValueError: `compress` did not make them.
    """
    num_bytes = int.from_bytes(data[:_WORD_BYTES], "big")
    try:
        words = zlib.decompress(data[_WORD_BYTES:])
    except zlib.error as error:
        raise ValueError(f"not compressed: {error}") from error
    if len(words) != num_bytes + -num_bytes % _WORD_BYTES:
        raise ValueError(f"not compressed: {num_bytes} bytes were announced, and others came")
    return np.frombuffer(words, np.uint8).reshape(_WORD_BYTES, -1).T.tobytes()[:num_bytes]


def unpack(data: bytes) -> tuple[Any, dict[str, Column]]:
    """Decode a result of `pack`.

    Raises:
        ValueError: `pack` did not make it.
    """
    try:
        columns = safetensors.numpy.load(data)
        text = columns.pop(_JSON)
        return json.loads(text.tobytes()), columns
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a table of columns: {type(error).__name__}: {error}") from error


def pack_table(columns: Mapping[str, Column]) -> bytes:
    """Encode columns of integers with the same number of rows.

    Runs of equal differences are stored where these take less. `lazy_columns` reads them.
    """
    encoded: dict[str, Column] = {}
    for name, column in columns.items():
        deltas, counts = _runs_of(column)
        if deltas.nbytes + counts.nbytes < column.nbytes // 2:
            encoded |= {name + DELTAS: deltas, name + COUNTS: counts}
        else:
            encoded[name] = column
    num_rows = max(map(len, columns.values()), default=0)
    return pack({"rows": num_rows}, encoded)


def _runs_of(column: Column) -> tuple[Column, Column]:
    """Return a column's differences, axis by axis, and their counts.

    A count tells how many equal differences follow one another.
    """
    flat = column.astype(np.int64).T.ravel()
    deltas = np.diff(flat, prepend=0)
    starts = np.flatnonzero(np.append(True, deltas[1:] != deltas[:-1])[: len(deltas)])
    return deltas[starts], np.diff(starts, append=len(deltas))


def narrow(column: Column) -> Column:
    """Return signed integers in the fewest bytes that hold them.

    Other columns are returned as they are.
    """
    if column.dtype.kind != "i" or column.min(initial=0) < 0:
        return column
    largest = column.max(initial=0)
    fitting = (dtype for dtype in INTEGERS if largest <= np.iinfo(dtype).max)
    return column.astype(next(fitting))


def joined_ranges(firsts: IntArray, counts: IntArray) -> IntArray:
    """Return the numbers of several ranges, one range after the other.

    A range has `counts` numbers, from one of `firsts` on.
    """
    before = np.cumsum(counts) - counts
    numbers: IntArray = np.repeat(firsts - before, counts) + np.arange(int(counts.sum()))
    return numbers


def stored_column(
    columns: Mapping[str, Column],
    name: str,
    shape: tuple[int, ...],
    dtypes: Sequence[Any] = INTEGERS,
) -> Column:
    """Return a column of a table that is not trusted.

    Raises:
        ValueError: it is missing, or has another dtype or shape. A column without elements can
            claim any length.
    """
    if name not in columns:
        raise ValueError(f"column {name!r} is missing")
    column = columns[name]
    if column.dtype not in dtypes or column.shape != shape:
        expected = f"{np.dtype(dtypes[-1])} {shape}"
        raise ValueError(f"column {name!r} is {column.dtype} {column.shape}, not {expected}")
    return column


class Runs(NamedTuple):
    """Numbers as runs of equal differences.

    The arrays have an item for each run.

    Attributes:
        ends: count of numbers up to the end of the run.
        befores: the number before the run, 0 before the first one.
        deltas: the differences.
    """

    ends: IntArray
    befores: IntArray
    deltas: IntArray

    @classmethod
    def of(cls, deltas: IntArray, counts: IntArray) -> Runs:
        """Prepare stored runs for lookups."""
        afters = np.cumsum(deltas * counts)
        return cls(np.cumsum(counts), afters - deltas * counts, deltas)

    @property
    def counts(self) -> IntArray:
        """Number of numbers in each run."""
        return np.diff(self.ends, prepend=0)

    def at(self, places: IntArray) -> IntArray:
        """Return the numbers at some places."""
        runs = np.searchsorted(self.ends, places, "right")
        # Counted from the end of the run: 0 for its last number.
        steps = places - self.ends[runs] + 1
        lasts = self.befores[runs] + self.deltas[runs] * self.counts[runs]
        numbers: IntArray = lasts + self.deltas[runs] * steps
        return numbers

    def all(self) -> IntArray:
        """Return all numbers."""
        return np.cumsum(np.repeat(self.deltas, self.counts))

    def up_to(self, num_numbers: int) -> Runs:
        """Return the runs of the first numbers.

        The last run may go on after them.
        """
        stop = int(np.searchsorted(self.ends, num_numbers)) + 1
        return Runs(self.ends[:stop], self.befores[:stop], self.deltas[:stop])

    def places_in(self, are_selected: npt.NDArray[np.bool_]) -> IntArray:
        """Return the places in some of the runs, in ascending order."""
        counts = self.counts[are_selected]
        return joined_ranges(self.ends[are_selected] - counts, counts)

    def largest_in(self, starts: IntArray, stops: IntArray) -> IntArray:
        """Return the largest number of the runs that meet some ranges.

        No range is empty.
        """
        firsts = np.searchsorted(self.ends, starts, "right")
        lasts = np.searchsorted(self.ends, stops)
        # One number more, for ranges that end with the last run.
        largest = np.append(self.befores + np.maximum(self.deltas, self.deltas * self.counts), 0)
        pairs = np.stack([firsts, lasts + 1], axis=1).ravel()
        return np.maximum.reduceat(largest, pairs)[::2]

    def places_of(self, numbers: IntArray) -> IntArray:
        """Return the places of some distinct numbers, in ascending order."""
        counts = self.counts
        starts = self.ends - counts
        is_constant = self.deltas == 0
        places = [self.places_in(is_constant & np.isin(self.befores, numbers))]
        divisors = np.where(is_constant, 1, self.deltas)
        for number in numbers.tolist():
            steps, rests = np.divmod(number - self.befores, divisors)
            has_number = ~is_constant & (rests == 0) & (steps > 0) & (steps <= counts)
            places.append((starts + steps - 1)[has_number])
        return np.sort(np.concatenate(places))

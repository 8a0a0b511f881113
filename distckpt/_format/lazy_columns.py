"""A large chunk table whose numbers are computed and checked on demand.

Parts of the table store regular columns as runs, which take a thousandth of the room, and a rank
needs few rows of many.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt._format.checksum import Checksums
from distckpt._format.chunk_table import (
    MAX_TABLE_NUMBERS,
    NO_CHECKSUMS,
    TABLE_COLUMNS,
    ChunkChecks,
    ChunkTable,
    Files,
    judging_manifest,
)
from distckpt._format.columns import COUNTS, DELTAS, Column, Runs, stored_column, unpack
from distckpt._geometry.region import IntArray


class Segment(NamedTuple):
    """A column in one part of the table.

    Attributes:
        num_rows: number of rows of the part.
        numbers: of shape (rows,) or (rows, axes), as they are stored; or runs, all rows of the
            first axis first.
    """

    num_rows: int
    numbers: Column | Runs

    def at(self, rows: IntArray, num_axes: int | None) -> IntArray:
        """Return the numbers in some rows."""
        if not isinstance(self.numbers, Runs):
            return self.numbers[rows].astype(np.int64)
        if num_axes is None:
            return self.numbers.at(rows)
        return self.numbers.at(rows[:, None] + self.num_rows * np.arange(num_axes))

    def all(self, num_axes: int | None) -> IntArray:
        """Return the numbers in all rows."""
        if not isinstance(self.numbers, Runs):
            return self.numbers.astype(np.int64)
        flat = self.numbers.all()
        if num_axes is None:
            return flat
        return flat.reshape(num_axes, self.num_rows).T

    def runs(self) -> Runs:
        """Return the column, or its first axis, as runs.

        The last run may go on after it.
        """
        if isinstance(self.numbers, Runs):
            return self.numbers.up_to(self.num_rows)
        numbers = self.numbers.reshape(self.num_rows, -1)[:, 0].astype(np.int64)
        deltas = np.diff(numbers, prepend=0)
        return Runs(np.arange(1, self.num_rows + 1), numbers - deltas, deltas)

    def rows_of(self, numbers: IntArray) -> IntArray:
        """Return the rows with some distinct numbers, in ascending order."""
        runs = self.numbers
        if isinstance(runs, Runs) and len(runs.ends) * len(numbers) < self.num_rows:
            return runs.places_of(numbers)
        return np.flatnonzero(np.isin(self.all(None), numbers))


class Part(NamedTuple):
    """A part of the table: its columns as `pack_table` stores them."""

    num_rows: int
    columns: Mapping[str, Column]

    @classmethod
    def from_bytes(cls, data: bytes) -> Part:
        """Decode a result of `pack_table`, and plain columns.

        Raises:
            ValueError: it is something else.
        """
        fields, columns = unpack(data)
        first = columns.get("key_ids")
        num_rows = len(first) if first is not None else int(fields["rows"])
        if num_rows < 0:
            raise ValueError(f"a part has {num_rows} rows")
        return cls(num_rows, columns)

    def segment(self, name: str, num_axes: int | None) -> Segment:
        """Return a column.

        Raises:
            ValueError: it has another size or dtype.
        """
        deltas = self.columns.get(name + DELTAS)
        counts = self.columns.get(name + COUNTS)
        shape = (self.num_rows,) if num_axes is None else (self.num_rows, num_axes)
        if deltas is None or counts is None:
            return Segment(self.num_rows, stored_column(self.columns, name, shape))
        num_numbers = math.prod(shape)
        if not deltas.dtype == counts.dtype == np.int64 or deltas.shape != counts.shape:
            raise ValueError(f"{name!r} has no runs of int64")
        # Floating point does not wrap around.
        if counts.min(initial=1) < 1 or counts.sum(dtype=np.float64) != num_numbers:
            raise ValueError(f"the runs of {name!r} do not have {num_numbers} numbers")
        return Segment(self.num_rows, Runs.of(deltas, counts))


class LazyColumn:
    """A column of a chunk table in parts, indexed like an array.

    Its numbers are int64.

    Args:
        segments: segments of all parts, in the order of their rows.
        num_axes: None for one number in each row.

    Attributes:
        shape: (rows,) or (rows, axes).
        starts: the first row of each part that has rows, and the number of all rows.
    """

    def __init__(self, segments: Sequence[Segment], num_axes: int | None) -> None:
        self._segments = [segment for segment in segments if segment.num_rows]
        self._num_axes = num_axes
        self.starts: IntArray = np.cumsum([0, *(segment.num_rows for segment in self._segments)])
        axes = () if num_axes is None else (num_axes,)
        self.shape: tuple[int, ...] = (int(self.starts[-1]), *axes)

    @classmethod
    def of(cls, parts: Sequence[Part], name: str, num_axes: int | None = None) -> LazyColumn:
        """Return a column of a table in parts."""
        return cls([part.segment(name, num_axes) for part in parts], num_axes)

    def followed_by(self, numbers: IntArray) -> LazyColumn:
        """Return the column with further rows."""
        return LazyColumn([*self._segments, Segment(len(numbers), numbers)], self._num_axes)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Return the numbers in rows: one, a slice, or an array.

        A second index picks axes.
        """
        rows, *axes = index if isinstance(index, tuple) else (index,)
        if isinstance(rows, slice):
            numbers = self._at(np.arange(len(self))[rows])
        elif isinstance(rows, (int, np.integer)):
            numbers = self._at(np.array([rows], np.int64))[0]
        else:
            numbers = self._at(rows)
        if axes:
            return numbers[(..., *axes)]
        return numbers

    def whole(self) -> IntArray:
        """Return the column as an array."""
        empty = np.zeros((0, *self.shape[1:]), np.int64)
        return np.concatenate([empty, *self.parts()])

    def parts(self) -> Iterator[IntArray]:
        """Yield the numbers of each part that has rows."""
        for segment in self._segments:
            yield segment.all(self._num_axes)

    def rows_of(self, numbers: IntArray) -> IntArray:
        """Return the rows with some distinct numbers, in ascending order."""
        rows = [start + segment.rows_of(numbers) for segment, start in self._with_starts()]
        return np.concatenate([np.zeros(0, np.int64), *rows])

    def runs(self) -> Iterator[tuple[range, Runs]]:
        """Yield the rows of each part, and its column as runs.

        The runs are of the column or its first axis; the last one may go on after it.
        """
        for segment, start in self._with_starts():
            yield range(start, start + segment.num_rows), segment.runs()

    def _with_starts(self) -> Iterator[tuple[Segment, int]]:
        return zip(self._segments, self.starts.tolist(), strict=False)

    def _at(self, rows: IntArray) -> IntArray:
        numbers = np.empty((len(rows), *self.shape[1:]), np.int64)
        parts = np.searchsorted(self.starts, rows, "right") - 1
        for part in np.flatnonzero(np.bincount(parts)).tolist():
            is_here = parts == part
            here = rows[is_here] - self.starts[part]
            numbers[is_here] = self._segments[part].at(here, self._num_axes)
        return numbers


def _order_of_keys(
    key_starts: IntArray, offsets: LazyColumn, shapes: LazyColumn
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Look at the first axis of all chunks, as runs.

    Return the longest extent of the chunks of each key along it, and whether they are in the order
    of their offsets.
    """
    extents = np.zeros(len(key_starts) - 1, np.int64)
    descents = [np.zeros(0, np.int64)]
    for rows, runs in offsets.runs():
        descents.append(rows.start + runs.places_in(runs.deltas < 0))
    for rows, runs in shapes.runs():
        edges = np.clip(key_starts - rows.start, 0, len(rows))
        keys = np.flatnonzero(np.diff(edges))
        largest = runs.largest_in(edges[keys], edges[keys + 1])
        extents[keys] = np.maximum(extents[keys], largest)
    falls = np.sort(np.concatenate(descents))
    # The first chunk of a key may have a smaller offset than the one before it.
    up_to_first = np.searchsorted(falls, key_starts[:-1], "right")
    return extents, np.searchsorted(falls, key_starts[1:]) <= up_to_first


@dataclass(eq=False)
class LazyChunks:
    """The chunks of a manifest in parts; has the columns and methods of a `ChunkTable`.

    Attributes:
        location: of the manifest, for errors about it.
        num_unplaced: so many of the last rows were added by `followed_by`.
    """

    location: str
    files: Files
    key_ids: LazyColumn
    file_ids: LazyColumn
    first_bytes: LazyColumn
    num_bytes: LazyColumn
    offsets: LazyColumn
    shapes: LazyColumn
    block_checksums: Checksums
    checks: ChunkChecks
    num_unplaced: int = 0

    def __post_init__(self) -> None:
        self._num_placed = len(self.key_ids) - self.num_unplaced
        self._checked_keys: set[int] = set()
        self._order: tuple[IntArray, npt.NDArray[np.bool_]] | None = None

    def columns(self) -> dict[str, LazyColumn]:
        """Return the columns of integers by name."""
        return {name: getattr(self, name) for name in TABLE_COLUMNS}

    @classmethod
    def of_parts(
        cls,
        location: str,
        files: Files,
        parts: Sequence[bytes],
        rest: Mapping[str, Column],
        checks: ChunkChecks,
    ) -> LazyChunks:
        """Decode a table from its parts, and from the columns of the manifest that holds the rest.

        Raises:
            ValueError: they are something else.
        """
        # Each is decoded into as much again.
        tables = [Part.from_bytes(part) for part in parts]
        tables.append(Part(len(rest["key_ids"]), rest))
        num_axes = checks.key_shapes.shape[1]
        num_rows = sum(table.num_rows for table in tables)
        if num_rows * (4 + 2 * num_axes) > MAX_TABLE_NUMBERS:
            raise ValueError(f"{num_rows} chunks are too many")
        axes = dict.fromkeys(("offsets", "shapes"), num_axes)
        columns: dict[str, Any] = {
            name: LazyColumn.of(tables, name, axes.get(name)) for name in TABLE_COLUMNS
        }
        return cls(
            location, files, **columns, block_checksums=rest["block_checksums"], checks=checks
        )

    def rows(self, rows: IntArray) -> ChunkTable:
        """Return the chunks in some rows, in their order, without checksums."""
        columns = {name: column[rows] for name, column in self.columns().items()}
        return ChunkTable(self.files, **columns, block_checksums=NO_CHECKSUMS)

    def followed_by(self, more: ChunkTable) -> LazyChunks:
        """Return the table with further chunks at its end, which lie in no file."""
        columns: dict[str, Any] = {
            name: column.followed_by(getattr(more, name)) for name, column in self.columns().items()
        }
        return replace(self, **columns, num_unplaced=len(more.key_ids))

    def key_starts(self, num_keys: int) -> IntArray:
        """Return the first row of each key, and the number of all rows.

        Raises:
            ValueError: the rows are not sorted by key, or a key does not exist.
        """
        num_rows = np.zeros(num_keys, np.int64)
        last = 0
        for _, runs in self.key_ids.runs():
            if runs.deltas.min() < 0 or runs.deltas[0] < last:
                raise ValueError("chunks are not sorted by key")
            # Floating point does not wrap around.
            if runs.deltas.astype(np.float64) @ runs.counts >= num_keys:
                raise ValueError("a chunk has no key")
            is_constant = runs.deltas == 0
            np.add.at(num_rows, runs.befores[is_constant], runs.counts[is_constant])
            np.add.at(num_rows, runs.at(runs.places_in(~is_constant)), 1)
            last = int(runs.deltas @ runs.counts)
        return np.append(0, np.cumsum(num_rows))

    def rows_near(
        self, key_ids: IntArray, offsets: IntArray, shapes: IntArray, key_starts: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Return, for each of some regions of keys, a range of rows with all chunks it may meet."""
        firsts = key_starts[key_ids]
        stops = key_starts[key_ids + 1]
        if not offsets.shape[1]:
            return firsts, stops
        if self._order is None:
            self._order = _order_of_keys(key_starts, self.offsets, self.shapes)
        extents, are_sorted = self._order
        lows = offsets[:, 0] - extents[key_ids] + 1
        first_rows = self._bisect(firsts, stops, lows)
        # Not before the first row, where nothing is requested.
        ends = np.maximum(offsets[:, 0] + shapes[:, 0], lows)
        stop_rows = self._bisect(firsts, stops, ends)
        is_sorted = are_sorted[key_ids]
        return np.where(is_sorted, first_rows, firsts), np.where(is_sorted, stop_rows, stops)

    def _bisect(self, firsts: IntArray, stops: IntArray, bounds: IntArray) -> IntArray:
        """Return the first rows, of some ranges, with offsets from bounds on."""
        low = firsts.copy()
        high = stops.copy()
        while len(open_ := np.flatnonzero(low < high)):
            middle = (low[open_] + high[open_]) // 2
            is_less = self.offsets[middle, 0] < bounds[open_]
            low[open_[is_less]] = middle[is_less] + 1
            high[open_[~is_less]] = middle[~is_less]
        return low

    def rows_in_files(self, file_ids: IntArray) -> IntArray:
        """Return the rows of the chunks in some files, in ascending order."""
        return self.file_ids.rows_of(file_ids)

    def parts(self) -> Iterator[ChunkTable]:
        """Yield the checked chunks of each part that has some, without added chunks."""
        with judging_manifest(self.location):
            yield from self.checks.checked(self._tables())

    def whole(self) -> ChunkTable:
        """Return all chunks, checked, in one table, which takes much more memory."""
        columns = {name: column.whole() for name, column in self.columns().items()}
        chunks = ChunkTable(self.files, **columns, block_checksums=self.block_checksums)
        with judging_manifest(self.location):
            self.checks.check(chunks.rows(np.arange(self._num_placed)))
        return chunks

    def check_rows(self, rows: IntArray) -> None:
        """Check that some chunks lie inside of their tensors and files.

        Raises:
            CorruptCheckpointError: a chunk does not.
        """
        with judging_manifest(self.location):
            self.checks.check_places(self.rows(rows[rows < self._num_placed]))

    def check_key(self, key_id: int, rows: slice) -> None:
        """Check the chunks of a key, see `check_rows`; once."""
        if key_id not in self._checked_keys:
            self.check_rows(np.arange(rows.start, rows.stop))
            self._checked_keys.add(key_id)

    def in_files(self, file_ids: IntArray) -> tuple[IntArray, ChunkTable]:
        """Return the rows of the chunks in some whole files, and these chunks, checked.

        Raises:
            CorruptCheckpointError: a chunk does not lie inside of its tensor and file, or all of a
                file take more room than it has.
        """
        rows = self.rows_in_files(file_ids)
        chunks = self.rows(rows)
        placed = chunks.rows(np.flatnonzero(rows < self._num_placed))
        with judging_manifest(self.location):
            self.checks.check_places(placed)
            self.checks.check_room(np.bincount(placed.file_ids, placed.num_bytes))
        return rows, chunks

    def _tables(self) -> Iterator[ChunkTable]:
        has_unplaced = self._num_placed < len(self.key_ids)
        num_parts = len(self.key_ids.starts) - 1 - has_unplaced
        parts = zip(*(column.parts() for column in self.columns().values()), strict=True)
        for numbers in itertools.islice(parts, num_parts):
            columns = dict(zip(TABLE_COLUMNS, numbers, strict=True))
            yield ChunkTable(self.files, **columns, block_checksums=NO_CHECKSUMS)

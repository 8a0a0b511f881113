"""Chunks of a manifest: the table that has a row for each, and its checks."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from distckpt._base.errors import CorruptCheckpointError
from distckpt._format.checksum import CHECKSUM_BYTES, Checksums
from distckpt._format.columns import Column, joined_ranges, pack, unpack
from distckpt._format.safetensors_file import ShardFile
from distckpt._geometry.region import IntArray, stable_order, widen

if TYPE_CHECKING:
    from distckpt._format.file_table import FileTable

FILE_PATTERNS = "file_patterns"
"""Field in the place of `files` in manifests in parts, see `file_table`."""
MAX_TABLE_NUMBERS = 1 << 31
"""Limit of the numbers in a chunk table, whose parts may be compressed."""
Files: TypeAlias = "list[ShardFile] | FileTable"
"""A list, or, in manifests in parts, a sequence that computes files."""


@contextlib.contextmanager
def judging_manifest(location: str) -> Iterator[None]:
    """Report errors in decoding a manifest as damage."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise CorruptCheckpointError(
            f"The manifest of {location!r} is damaged ({type(error).__name__}: {error}). "
            "Load another checkpoint, or restore this one from a copy."
        ) from error


class ChunkTable(NamedTuple):
    """Chunks and the files that hold them: of one rank during a save, of all in a manifest.

    A further column is added here, and filled where its values are known: in
    `_plan.layout.chunk_table` when a save is planned, in `ShardSave` when it is written, in
    `_checkpoint.stored_pieces` for files of other programs. Code that only joins, sorts, selects,
    sends or stores chunks needs no change.

    Attributes:
        files: the files, which `file_ids` index.
        key_ids: the key of each chunk, by its position in the manifest; int64 of shape (n,), like
            the columns that are not named here.
        offsets: together with `shapes`, the regions; int64 of shape (n, max ndim), padded with 0
            and 1.
        block_checksums: uint64 xxh3-64 digests of the blocks of all chunks in order; empty if they
            are unknown, or in files of their own.
    """

    files: Files
    key_ids: IntArray
    file_ids: IntArray
    first_bytes: IntArray
    num_bytes: IntArray
    offsets: IntArray
    shapes: IntArray
    block_checksums: Checksums

    def columns(self) -> dict[str, Column]:
        """Return the arrays by name."""
        columns = self._asdict()
        del columns["files"]
        return columns

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return pack(self.files, self.columns())

    @classmethod
    def from_bytes(cls, data: bytes) -> ChunkTable:
        """Undo `to_bytes`."""
        files, columns = unpack(data)
        return cls([ShardFile(*file) for file in files], **columns)

    @classmethod
    def empty(cls) -> ChunkTable:
        """Return a table without chunks; `_replace` fills its columns."""
        numbers = np.zeros(0, np.int64)
        regions = np.zeros((0, 0), np.int64)
        checksums = np.zeros(0, np.uint64)
        return cls([], numbers, numbers, numbers, numbers, regions, regions, checksums)

    @classmethod
    def join(cls, tables: Sequence[ChunkTable], ndim: int) -> ChunkTable:
        """Join tables, the chunks of one after those of another; regions get `ndim` axes."""
        first_files = itertools.accumulate([len(table.files) for table in tables], initial=0)
        widened = [
            table._replace(
                file_ids=table.file_ids + first_file,
                offsets=widen(table.offsets, ndim, 0),
                shapes=widen(table.shapes, ndim, 1),
            )
            for table, first_file in zip(tables, first_files, strict=False)
        ]
        files, *columns = zip(*widened, strict=True)
        return cls(list(itertools.chain(*files)), *map(np.concatenate, columns))

    @property
    def sorted_rows(self) -> IntArray:
        """The rows in the order of a manifest: by key and offset."""
        rows = stable_order(self.key_ids, int(self.key_ids.max(initial=0)) + 1)
        keys = self.key_ids[rows]
        first_axis = self.offsets[rows, :1].ravel()
        # Ranks often have parts of a tensor in the order of its rows.
        if len(first_axis) and ((np.diff(first_axis) > 0) | (np.diff(keys) > 0)).all():
            return rows
        return np.lexsort((*self.offsets.T[::-1], self.key_ids))

    @property
    def file_order(self) -> IntArray:
        """The rows in the order of files and of bytes in them."""
        return np.lexsort((self.first_bytes, self.file_ids))

    def take(self, rows: IntArray, block_bytes: int) -> ChunkTable:
        """Return the chunks in some rows with the checksums of their blocks."""
        blocks = blocks_of(rows, self.num_bytes, block_bytes)
        return self.rows(rows)._replace(block_checksums=self.block_checksums[blocks])

    def rows(self, rows: IntArray) -> ChunkTable:
        """Return the chunks in some rows, in their order, without checksums."""
        taken = {name: getattr(self, name)[rows] for name in TABLE_COLUMNS}
        return ChunkTable(self.files, **taken, block_checksums=NO_CHECKSUMS)

    def followed_by(self, more: ChunkTable) -> ChunkTable:
        """Return the table with further chunks at its end.

        These lie in no file and have no checksums.
        """
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(self, name), getattr(more, name)])
            for name in TABLE_COLUMNS
        }
        return self._replace(**columns)

    def key_starts(self, num_keys: int) -> IntArray:
        """Return the first row of each key, and the number of rows."""
        return np.searchsorted(self.key_ids, np.arange(num_keys + 1))

    def rows_near(
        self, key_ids: IntArray, offsets: IntArray, shapes: IntArray, key_starts: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Return the range of rows that each of some regions may meet."""
        return key_starts[key_ids], key_starts[key_ids + 1]

    def rows_in_files(self, file_ids: IntArray) -> IntArray:
        """Return the rows of the chunks in some files, in ascending order."""
        is_wanted = np.zeros(len(self.files), bool)
        is_wanted[file_ids] = True
        return np.flatnonzero(is_wanted[self.file_ids])

    def parts(self) -> Iterator[ChunkTable]:
        """Yield all chunks in order, in one or several tables."""
        yield self

    def whole(self) -> ChunkTable:
        """Return all chunks in one table."""
        return self

    def check_rows(self, rows: IntArray) -> None:
        """Check that some chunks lie inside of their tensors and files."""

    def check_key(self, key_id: int, rows: slice) -> None:
        """Check the chunks of a key once."""

    def in_files(self, file_ids: IntArray) -> tuple[IntArray, ChunkTable]:
        """Return rows and chunks of whole files, checked."""
        rows = self.rows_in_files(file_ids)
        return rows, self.rows(rows)


TABLE_COLUMNS = [name for name in ChunkTable._fields if name not in ("files", "block_checksums")]
"""The columns that parts of a manifest have."""
NO_CHECKSUMS: Checksums = np.zeros(0, np.uint64)


def blocks_of(rows: IntArray, num_bytes: IntArray, block_bytes: int) -> IntArray:
    """Return the numbers of the blocks of some chunks, in their order."""
    all_counts = -(-num_bytes // block_bytes)
    firsts = np.cumsum(all_counts) - all_counts
    return joined_ranges(firsts[rows], all_counts[rows])


# --- Files ----------------------------------------------------------------------------------------


def files_as_stored(files: Files) -> tuple[dict[str, Any], dict[str, Column]]:
    """Return the fields and columns of a manifest that hold its files."""
    if isinstance(files, list):
        return {"files": files}, {}
    return {FILE_PATTERNS: [pattern.to_json() for pattern in files.patterns]}, files.columns()


def file_sizes(files: Files) -> tuple[Column, Column]:
    """Return the sizes of files, and of their headers."""
    if not isinstance(files, list):
        return files.num_bytes, files.header_bytes
    sizes = np.array([file.num_bytes for file in files], np.int64)
    header_sizes = np.array([file.header_bytes for file in files], np.int64)
    return sizes, header_sizes


def files_of_checksums(files: Files) -> IntArray:
    """Return the numbers of the files that hold checksums."""
    if not isinstance(files, list):
        return files.holders
    return np.flatnonzero([file.holds_checksums for file in files])


# --- Checks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChunkChecks:
    """Checks of chunks against the keys and files of their manifest.

    Attributes:
        key_shapes: the global shape of each key, padded with 1.
        item_bytes: of each key; 0 for objects and for items of less than a byte.
        files: all files.
        block_bytes: size of the blocks that have checksums.
        checksum_files: the numbers of the files that hold checksums.
        has_checksums: whether blocks have checksums, in these files or in the manifest.
        num_checksums: of those in the manifest.
    """

    key_shapes: IntArray
    item_bytes: IntArray
    files: Files
    block_bytes: int
    checksum_files: IntArray
    has_checksums: bool
    num_checksums: int

    def checked(self, parts: Iterator[ChunkTable]) -> Iterator[ChunkTable]:
        """Yield tables of all chunks once they are checked; check their sums at the end.

        Raises:
            ValueError: the chunks contradict each other, or the rest of the manifest.
        """
        # Integer sums would wrap around.
        num_bytes = np.zeros(len(self.files))
        num_blocks = np.zeros(len(self.files))
        for chunks in parts:
            if (np.diff(chunks.key_ids) < 0).any():
                raise ValueError("chunks are not sorted by key")
            self.check_places(chunks)
            last = self.checksum_files[-1:]
            if len(last) and chunks.file_ids.max(initial=0) > last[0]:
                raise ValueError("a chunk has no checksums")
            blocks_of_chunks = -(-chunks.num_bytes // self.block_bytes)
            num_bytes += np.bincount(chunks.file_ids, chunks.num_bytes, len(num_bytes))
            num_blocks += np.bincount(chunks.file_ids, blocks_of_chunks, len(num_blocks))
            yield chunks
        self.check_room(num_bytes)
        self._check_number_of_checksums(num_blocks)

    def check(self, chunks: ChunkTable) -> None:
        """Check a table of all chunks."""
        for _ in self.checked(iter([chunks])):
            pass

    def check_places(self, chunks: ChunkTable) -> None:
        """Check each of some chunks: it lies inside its tensor and file."""
        if not len(chunks.key_ids):
            return
        key_ids = chunks.key_ids
        if key_ids.min() < 0 or key_ids.max() >= len(self.key_shapes):
            raise ValueError("a chunk has no key")
        inside = chunks.offsets.min(initial=0) == chunks.shapes.min(initial=0) == 0
        # A difference of numbers from 0 on does not wrap around.
        if not inside or (chunks.offsets > self.key_shapes[key_ids] - chunks.shapes).any():
            raise ValueError("a chunk lies outside its tensor")
        self._check_bytes(chunks)
        self._check_sizes(chunks)

    def _check_bytes(self, chunks: ChunkTable) -> None:
        file_ids = chunks.file_ids
        if file_ids.min() < 0 or file_ids.max() >= len(self.files):
            raise ValueError("a chunk has no file")
        sizes, starts = (column[file_ids].astype(np.int64) for column in file_sizes(self.files))
        num_bytes = chunks.num_bytes
        fits = (num_bytes >= 0) & (chunks.first_bytes >= starts) & (num_bytes <= sizes)
        fits &= chunks.first_bytes <= sizes - num_bytes
        if not fits.all():
            raise ValueError("a chunk lies outside its file")

    def _check_sizes(self, chunks: ChunkTable) -> None:
        # Tensors have fewer than 2**62 elements, so none of these products wraps around.
        ones = np.ones(len(chunks.key_ids), np.int64)
        num_elements = functools.reduce(np.multiply, chunks.shapes.T, ones)
        if (num_elements >= 2**58).any():
            raise ValueError("a chunk is larger than any file")
        per_item = self.item_bytes[chunks.key_ids]
        is_exact = num_elements * per_item == chunks.num_bytes
        if not (is_exact | (per_item == 0)).all():
            raise ValueError("a chunk's size contradicts its shape")

    def check_room(self, num_bytes: Column) -> None:
        """Check that chunks take no more bytes than their files.

        No byte is in two chunks, so a small file cannot claim large tensors.
        """
        sizes = file_sizes(self.files)[0][: len(num_bytes)]
        if (num_bytes > sizes).any():
            raise ValueError("chunks take more room than their file has")

    def _check_number_of_checksums(self, num_blocks: npt.NDArray[np.float64]) -> None:
        """Check the number of checksums for the blocks in each file."""
        are_here = self.has_checksums and not len(self.checksum_files)
        if self.num_checksums != (num_blocks.sum() if are_here else 0):
            raise ValueError("the number of checksums is wrong")
        if not len(self.checksum_files):
            return
        groups = np.searchsorted(self.checksum_files, np.arange(len(num_blocks)))
        # Files after the last one have no chunks.
        in_groups = np.bincount(groups, num_blocks).tolist()
        for file_id, expected in zip(self.checksum_files.tolist(), in_groups, strict=False):
            check_size_of_checksums(self.files[file_id], expected)


def check_size_of_checksums(file: ShardFile, num_blocks: float) -> None:
    """Check that a file holds the checksums of a number of blocks.

    Raises:
        ValueError: it does not.
    """
    if not file.num_bytes == file.header_bytes == CHECKSUM_BYTES * num_blocks:
        raise ValueError(f"the number of checksums in {file.name!r} is wrong")

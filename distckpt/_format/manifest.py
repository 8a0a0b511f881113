"""The manifest: which chunk of which key lies where, in columns, so that reads of 10^6 chunks are
planned in milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from distckpt._base.dtypes import ITEM_BYTES, is_known
from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._format.checksum import BLOCK_BYTES, checksum
from distckpt._format.columns import Column, narrow, pack, require, unpack
from distckpt._format.lazy_columns import LazyColumn, Part, SortedRows, starts_of_keys
from distckpt._format.safetensors_file import MAX_HEADER_BYTES, ShardFile
from distckpt._geometry.region import IntArray, Region, stable_order, widen
from distckpt._storage import locations

if TYPE_CHECKING:
    from distckpt._format.file_table import FileTable
    from distckpt._format.tensor_stats import StatsColumns

FORMAT_VERSION = 3
MIN_READER_VERSION = 3
DIVIDED_VERSION = 4
"""Version of manifests that have parts, and of the oldest reader of these."""
MANIFEST_NAME = "manifest.safetensors"
_MANIFEST_NAMES = re.compile(r"manifest(-[0-9a-f]{16})?\.safetensors")
"""The name has a nonce where an object store already holds another manifest."""
MAX_TABLE_BYTES = 4 << 30
"""Limit of manifests, of files of checksums, and of all other files that say where the tensors of a
checkpoint lie.
"""
MAX_TABLE_NUMBERS = 1 << 31
"""Limit of the numbers in the parts of a chunk table, which may take less than they are."""
CHUNKS_AT_ONCE = 1 << 19
"""Of a checkpoint in more chunks or blocks, about so many are gone through at a time: in memory,
they take some 100 MB.
"""
MAX_BLOCK_BYTES = 64 << 20
"""Readers hold a few whole blocks in memory."""
MAX_BLOCKS = 1 << 16
"""With more blocks (16 GiB of data), their checksums are in files of their own, beside the shards;
otherwise in the manifest, which takes no further file.
"""
CHECKSUM_BYTES = 8
CARRIED_PART = "part:"
"""Begins the name of a column that holds the bytes of a part of the chunk table, in manifests that
are sent to other ranks.
"""
FILE_PATTERNS = "file_patterns"
"""Takes the place of the field `files` in manifests that have parts, see `file_table`."""
CHECKSUM = "xxh3-64"
FINGERPRINTS = "fingerprints"
NO_FINGERPRINT = (1 << 64) - 1
OBJECT = "OBJECT"
"""Takes the place of a dtype name where the chunks of a key are encoded objects, one for each cell
of the global shape.
"""


Files: TypeAlias = "list[ShardFile] | FileTable"
"""A list, or, in manifests that have parts, a sequence that computes files."""


class ChunkTable(NamedTuple):
    """Chunks and the files that hold them: those of one rank during a save, all of them in a
    manifest.

    A further column of the manifest is added here, and filled where its values are known: in
    `_plan.layout.chunk_table` when a save is planned, in `SafetensorsSave` when it is written, in
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
    block_checksums: npt.NDArray[np.uint64]

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays by name."""
        columns = self._asdict()
        del columns["files"]
        return columns

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return pack(self.files, self.columns())

    @classmethod
    def from_bytes(cls, data: bytes) -> ChunkTable:
        """Decode what `to_bytes` made."""
        files, columns = unpack(data)
        return cls([ShardFile(*file) for file in files], **columns)

    @classmethod
    def empty(cls) -> ChunkTable:
        """Return a table without chunks, to be filled with `_replace` as columns become known."""
        numbers, regions = np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
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
        keys, first_axis = self.key_ids[rows], self.offsets[rows, :1].ravel()
        # Ranks often have parts of a tensor in the order of its rows.
        if len(first_axis) and ((np.diff(first_axis) > 0) | (np.diff(keys) > 0)).all():
            return rows
        return np.lexsort((*self.offsets.T[::-1], self.key_ids))

    @property
    def file_order(self) -> IntArray:
        """The rows in the order of the files and of the bytes in them."""
        return np.lexsort((self.first_bytes, self.file_ids))

    def followed_by(self, more: ChunkTable) -> ChunkTable:
        """Return the table with further chunks behind its own, which lie in no file and have no
        checksums.
        """
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(self, name), getattr(more, name)])
            for name in TABLE_COLUMNS
        }
        return self._replace(**columns)

    def take(self, rows: IntArray, block_bytes: int) -> ChunkTable:
        """Return the chunks in some rows, in their order, with the checksums of their blocks."""
        blocks = blocks_of(rows, self.num_bytes, block_bytes)
        return self.without_blocks(rows)._replace(block_checksums=self.block_checksums[blocks])

    def without_blocks(self, rows: IntArray) -> ChunkTable:
        """Return the chunks in some rows, in their order, without checksums."""
        columns = self.columns()
        del columns["block_checksums"]
        taken = {name: column[rows] for name, column in columns.items()}
        return ChunkTable(self.files, **taken, block_checksums=np.zeros(0, np.uint64))


class LazyChunks(NamedTuple):
    """The same table where parts of the manifest hold it; its columns are computed for the rows
    that are asked for.

    Attributes:
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
    block_checksums: npt.NDArray[np.uint64]
    num_unplaced: int = 0

    def followed_by(self, more: ChunkTable) -> LazyChunks:
        """Do the same as with a `ChunkTable`."""
        columns: dict[str, Any] = {
            name: getattr(self, name).followed_by(getattr(more, name)) for name in TABLE_COLUMNS
        }
        return self._replace(**columns, num_unplaced=len(more.key_ids))

    def placed(self, rows: IntArray) -> IntArray:
        """Return the places of those of some rows whose chunks lie in files."""
        return np.flatnonzero(rows < len(self.key_ids) - self.num_unplaced)

    def whole(self) -> ChunkTable:
        """Return all chunks."""
        columns = {name: getattr(self, name).whole() for name in TABLE_COLUMNS}
        return ChunkTable(self.files, **columns, block_checksums=self.block_checksums)

    def parts(self) -> Iterator[ChunkTable]:
        """Yield the chunks of each part that has some, without checksums; not what was added."""
        num_parts = len(self.key_ids.starts) - 1 - bool(self.num_unplaced)
        parts = zip(*(getattr(self, name).parts() for name in TABLE_COLUMNS), strict=True)
        for numbers in itertools.islice(parts, num_parts):
            columns = dict(zip(TABLE_COLUMNS, numbers, strict=True))
            yield ChunkTable(self.files, **columns, block_checksums=np.zeros(0, np.uint64))

    def rows(self, rows: IntArray) -> ChunkTable:
        """Return the chunks in some rows, without checksums."""
        columns = {name: getattr(self, name)[rows] for name in TABLE_COLUMNS}
        return ChunkTable(self.files, **columns, block_checksums=np.zeros(0, np.uint64))


class Sums(NamedTuple):
    """What all chunks have together; int64.

    Attributes:
        bytes_of_keys: the size of the chunks of each key.
        bytes_in_files: the size of those in each file.
        blocks_in_files: the number of their blocks.
    """

    bytes_of_keys: IntArray
    bytes_in_files: IntArray
    blocks_in_files: IntArray


TABLE_COLUMNS = [name for name in ChunkTable._fields if name not in ("files", "block_checksums")]
"""The columns that parts of a manifest have."""


def blocks_of(rows: IntArray, num_bytes: IntArray, block_bytes: int) -> IntArray:
    """Return the numbers of the blocks of the chunks in some rows, in their order."""
    counts = -(-num_bytes // block_bytes)
    starts = np.cumsum(counts) - counts
    counts, starts = counts[rows], starts[rows]
    # For each block: the first block of its chunk, plus its number within the chunk.
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts, counts) + within


class Manifest:
    """The content of a checkpoint: its keys and the table of their chunks.

    Args:
        keys: distinct names of tensors and objects.
        dtypes: the safetensors dtype name of each key, or `OBJECT`.
        global_shapes: the global shape of each key.
        chunks: sorted by key id.
        aliases: for tied tensors, which are stored once, the key that has the chunks by each other
            key.
        block_bytes: size of the blocks in which chunks are checksummed; the last block of a chunk
            may be shorter.
        has_checksums: False for files of other programs; `block_checksums` is empty then.
            Otherwise it is empty when files beside the shards hold the checksums, see
            `checksum_files`.
        origin: None for distckpt's own checkpoints; otherwise the name of the reader as `format`,
            and JSON fields for that reader.
        quantization: what the configuration beside another program's files said of quantized
            tensors, see `settings_of`.
        fingerprints: the number of each key, see `distckpt.fingerprint`, as it was when it was
            saved; `NO_FINGERPRINT` for objects and tensors that have none. None if no key has one.
        stats: statistics of the tensors as they were saved; None if no key has them.

    Attributes:
        table: the chunks as they were given.
        checksum_files: the numbers of the files that hold checksums; none if `block_checksums` has
            them.
        fetched_checksums: what `checksum_files` hold, as far as it was fetched; by number of file.
        located: those of these files for whose chunks `first_blocks` is filled.
        checked_keys: the keys all of whose chunks were checked before they were used.
        locating: held by a thread that fetches many checksums, or fills `first_blocks`.
    """

    def __init__(
        self,
        keys: Sequence[str],
        dtypes: Sequence[str],
        global_shapes: Sequence[tuple[int, ...]],
        chunks: ChunkTable | LazyChunks,
        aliases: Mapping[str, str],
        block_bytes: int = BLOCK_BYTES,
        has_checksums: bool = True,
        origin: Mapping[str, Any] | None = None,
        quantization: Mapping[str, Any] | None = None,
        fingerprints: npt.NDArray[np.uint64] | None = None,
        stats: StatsColumns | None = None,
    ) -> None:
        self.keys = list(keys)
        self.dtypes = list(dtypes)
        self.global_shapes = list(global_shapes)
        self.table = chunks
        self.aliases = dict(aliases)
        self.block_bytes = block_bytes
        self.has_checksums = has_checksums
        self.origin = origin
        self.quantization = quantization or (origin or {}).get("quantization")
        self.fingerprints = fingerprints
        self.stats = stats
        self.files = chunks.files
        self.key_ids = chunks.key_ids
        self.file_ids = chunks.file_ids
        self.first_bytes = chunks.first_bytes
        self.num_bytes = chunks.num_bytes
        self.offsets = chunks.offsets
        self.shapes = chunks.shapes
        self.block_checksums = chunks.block_checksums
        self.key_starts = _key_starts(chunks, len(self.keys))
        self.checksum_files = _holders_in(self.files, has_checksums)
        self.fetched_checksums: dict[int, npt.NDArray[np.uint64]] = {}
        self.located: set[int] = set()
        self.checked_keys: set[int] = set()
        self.locating = threading.Lock()

    @functools.cached_property
    def chunks(self) -> ChunkTable:
        """All chunks. Where parts of the manifest hold them, they take much more memory than the
        manifest.
        """
        if isinstance(self.table, ChunkTable):
            return self.table
        with judging_manifest(self.table.location):
            chunks = self.table.whole()
            self._check_chunks(chunks)
        return chunks

    def parts(self) -> Iterator[ChunkTable]:
        """Yield all chunks, in order: one part of the manifest after the other, without checksums,
        if parts hold them. Each is checked before, and all of them at the end.

        Raises:
            CorruptCheckpointError: the chunks contradict each other, or the rest of the manifest.
        """
        if isinstance(self.table, ChunkTable):
            yield self.table
            return
        with judging_manifest(self.table.location):
            yield from self.checked(self.table.parts())

    @functools.cached_property
    def sums(self) -> Sums:
        """What all chunks have together, see `parts` for errors."""
        of_keys, in_files, blocks = (
            np.zeros(len(each), np.int64) for each in (self.keys, self.files, self.files)
        )
        for chunks in self.parts():
            np.add.at(of_keys, chunks.key_ids, chunks.num_bytes)
            np.add.at(in_files, chunks.file_ids, chunks.num_bytes)
            np.add.at(blocks, chunks.file_ids, -(-chunks.num_bytes // self.block_bytes))
        return Sums(of_keys, in_files, blocks)

    @functools.cached_property
    def block_starts(self) -> IntArray:
        """The number of blocks before each chunk, and of all blocks."""
        if isinstance(self.table, LazyChunks):
            _ = self.sums  # which checks all chunks
        return np.append(0, np.cumsum(-(-self.num_bytes[:] // self.block_bytes)))

    @functools.cached_property
    def first_blocks(self) -> npt.NDArray[Any]:
        """For each chunk, where the checksums of its blocks begin: in the file that holds them, as
        far as it was fetched, or in `block_checksums`.
        """
        if not len(self.checksum_files):
            return self.block_starts
        # Filled by `fetch_checksums`; pages that nobody fills take no memory.
        return np.zeros(len(self.key_ids), np.uint32)

    @functools.cached_property
    def _sorted_rows(self) -> SortedRows | None:
        table = self.table
        if isinstance(table, ChunkTable):
            return None
        return SortedRows.of(self.key_starts, table.offsets, table.shapes)

    @property
    def shapes_by_key(self) -> dict[str, tuple[int, ...]]:
        """Global shape of each key."""
        return dict(zip(self.keys, self.global_shapes, strict=True))

    @functools.cached_property
    def key_index(self) -> dict[str, int]:
        """Index of each key, tied keys included (they share the index of the stored one)."""
        index = {key: i for i, key in enumerate(self.keys)}
        index.update((alias, index[key]) for alias, key in self.aliases.items())
        return index

    @property
    def num_tensors(self) -> int:
        """How many names of tensors there are; each tied one counts."""
        return sum(self.dtypes[key_id] != OBJECT for key_id in self.key_index.values())

    @functools.cached_property
    def scales_key(self) -> str | None:
        """A key of scales that belong to codes, None if there is no such key."""
        # Imported when it is needed: few checkpoints hold codes.
        from distckpt._quantization import names

        dtypes = zip(self.keys, self.dtypes, strict=True)
        codes = [(key, dtype) for key, dtype in dtypes if names.may_be_codes(dtype)]
        for key, dtype in codes:
            if scales := names.scales_of(key, self.key_index):
                return scales[0]
            if not names.are_codes_beside_scales(key, dtype):
                continue
            if beside := names.scale_beside(key, self.scale_places):
                return beside
        return names.MARKER if names.MARKER in self.key_index else None

    @functools.cached_property
    def scale_places(self) -> dict[str, str]:
        """Where keys are that are named like scales, see `places_of_scales`."""
        from distckpt._quantization.names import places_of_scales

        return places_of_scales(self.key_index)

    def chunk_rows(self, key_id: int) -> slice:
        """Return the rows of the chunk table that belong to a key."""
        return slice(int(self.key_starts[key_id]), int(self.key_starts[key_id + 1]))

    def rows_near(
        self, key_ids: IntArray, offsets: IntArray, shapes: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Return for each of some regions of keys from which row on, and up to which, the chunks
        are that it may meet.
        """
        if self._sorted_rows is not None:
            return self._sorted_rows.near(key_ids, offsets, shapes)
        return self.key_starts[key_ids], self.key_starts[key_ids + 1]

    def rows_in_files(self, file_ids: IntArray) -> IntArray:
        """Return the rows of the chunks in some files, in ascending order."""
        if isinstance(self.file_ids, LazyColumn):
            return self.file_ids.rows_of(file_ids)
        is_wanted = np.zeros(len(self.files), bool)
        is_wanted[file_ids] = True
        return np.flatnonzero(is_wanted[self.file_ids])

    def rows(self, rows: IntArray) -> ChunkTable:
        """Return the chunks in some rows, in their order, without checksums."""
        if isinstance(self.table, ChunkTable):
            return self.table.without_blocks(rows)
        return self.table.rows(rows)

    def in_file_order(self, file_ids: IntArray) -> tuple[IntArray, ChunkTable]:
        """Return the rows of the chunks in some files, in the order of their bytes, and what is in
        these rows, without checksums.

        Raises:
            CorruptCheckpointError: a chunk does not lie inside of its tensor and file, or all of a
                file take more room than it has.
        """
        rows = self.rows_in_files(file_ids)
        chunks = self.rows(rows)
        self._check_placed(rows, chunks, are_whole_files=True)
        order = chunks.file_order
        return rows[order], chunks.without_blocks(order)

    def ranges_of_files(self) -> list[range]:
        """Cut the files that hold chunks into ranges of about `CHUNKS_AT_ONCE` blocks; files whose
        checksums are in one file stay together.
        """
        ends = np.arange(1, len(self.files) + 1)
        if len(self.checksum_files):
            ends = self.checksum_files + 1
        num_blocks = np.cumsum(self.sums.blocks_in_files)[ends - 1] // CHUNKS_AT_ONCE
        edges = [0, *ends[:-1][np.diff(num_blocks) > 0].tolist(), *ends[-1:].tolist()]
        return [range(*edge) for edge in itertools.pairwise(edges)]

    def check_rows(self, rows: IntArray) -> None:
        """Check that some chunks lie inside of their tensors and files, unless it is known.

        Raises:
            CorruptCheckpointError: a chunk does not.
        """
        if isinstance(self.table, LazyChunks):
            self._check_placed(rows, self.rows(rows))

    def check_key(self, key_id: int) -> None:
        """Check all chunks of a key, see `check_rows`; once."""
        if isinstance(self.table, LazyChunks) and key_id not in self.checked_keys:
            rows = self.chunk_rows(key_id)
            self.check_rows(np.arange(rows.start, rows.stop))
            self.checked_keys.add(key_id)

    def _check_placed(
        self, rows: IntArray, chunks: ChunkTable, are_whole_files: bool = False
    ) -> None:
        if not isinstance(self.table, LazyChunks):
            return
        with judging_manifest(self.table.location):
            placed = chunks.without_blocks(self.table.placed(rows))
            self._check_positions(placed)
            if are_whole_files:
                _check_room(self.files, np.bincount(placed.file_ids, placed.num_bytes))

    def chunk_region(self, row: int) -> Region:
        """Return the region of the global tensor that a chunk holds."""
        ndim = len(self.global_shapes[self.key_ids[row]])
        return Region(
            tuple(self.offsets[row, :ndim].tolist()), tuple(self.shapes[row, :ndim].tolist())
        )

    def to_bytes(
        self,
        chunks: ChunkTable | None = None,
        further: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> bytes:
        """Encode as the content of `manifest.safetensors`, with other chunks if they are given, and
        further columns that have a row for each key.
        """
        chunks = chunks or self.chunks
        fields = {
            "format_version": version_of(chunks.files),
            "keys": self.keys,
            "dtypes": self.dtypes,
            **_field_of_files(chunks.files),
            "aliases": self.aliases,
            "block_bytes": self.block_bytes,
            "checksum": CHECKSUM if self.has_checksums else None,
        }
        optional = {
            "origin": self.origin,
            "quantization": None if self.origin else self.quantization,
        }
        fields |= {name: value for name, value in optional.items() if value is not None}
        key_ndims = np.array([len(shape) for shape in self.global_shapes], np.int64)
        key_shapes = _padded_shapes(self.global_shapes, chunks.offsets.shape[1])
        columns = {"key_shapes": key_shapes, "key_ndims": key_ndims, **chunks.columns()}
        columns |= self._columns_of_values() | dict(further or {}) | _columns_of_files(chunks.files)
        data = pack(fields, {name: narrow(column) for name, column in columns.items()})
        if len(data) > MAX_TABLE_BYTES:
            raise too_large(f"{len(data)} bytes")
        return data

    @classmethod
    def from_bytes(cls, data: bytes, location: str) -> Manifest:
        """Decode a manifest, which may carry parts; check that it does not contradict itself."""
        with judging_manifest(location):
            fields, columns = unpack(data)
            files = files_in(fields, columns)
            key_shapes, key_ndims = map(_widened, (columns["key_shapes"], columns["key_ndims"]))
            _check_columns_of_keys(key_shapes, key_ndims, len(fields["keys"]))
            chunks = _read_chunks(files, columns, key_shapes.shape[1], location)
            is_axis = np.arange(key_shapes.shape[1]) < key_ndims[:, None]
            require(
                bool((is_axis.sum(axis=1) == key_ndims).all()), "a key has more axes than the table"
            )
            key_shapes = np.where(is_axis, key_shapes, 1)
            block_bytes = int(fields["block_bytes"])
            # Blocks must begin between items of any size.
            require(
                0 < block_bytes <= MAX_BLOCK_BYTES and block_bytes % 16 == 0,
                f"block_bytes is {block_bytes}",
            )
            manifest = cls(
                keys=[str(key) for key in fields["keys"]],
                dtypes=[str(name) for name in fields["dtypes"]],
                global_shapes=[
                    tuple(row[:n])
                    for row, n in zip(key_shapes.tolist(), key_ndims.tolist(), strict=True)
                ],
                chunks=chunks,
                aliases={str(alias): str(key) for alias, key in fields["aliases"].items()},
                block_bytes=block_bytes,
                has_checksums=_known_checksum(fields["checksum"]),
                origin=fields.get("origin"),
                quantization=fields.get("quantization"),
                fingerprints=columns.get(FINGERPRINTS),
                stats=_stats_of(columns, len(fields["keys"])),
            )
            manifest._key_shapes = key_shapes
            manifest._check()
        return manifest

    @functools.cached_property
    def _key_shapes(self) -> IntArray:
        """Global shapes, padded with 1 to as many axes as the table has."""
        return _padded_shapes(self.global_shapes, self.offsets.shape[1])

    def _columns_of_values(self) -> dict[str, npt.NDArray[Any]]:
        columns = {} if self.stats is None else self.stats.columns()
        if self.fingerprints is not None:
            columns[FINGERPRINTS] = self.fingerprints
        return columns

    def _check(self) -> None:
        num_keys, keys = len(self.keys), set(self.keys)
        require(
            len(self.dtypes) == len(self.global_shapes) == num_keys,
            "keys and dtypes differ in number",
        )
        require(len(keys) == num_keys, "keys are not distinct")
        require(
            all(name == OBJECT or is_known(name) for name in set(self.dtypes)),
            "a dtype is unknown",
        )
        self._check_columns_of_values()
        require(keys.issuperset(self.aliases.values()), "an alias has no target")
        require(keys.isdisjoint(self.aliases), "an alias has the name of a key")
        require(self.origin is None or isinstance(self.origin, dict), "its origin is not described")
        if self.quantization is not None:
            from distckpt._quantization.settings import are_settings

            require(
                are_settings(self.quantization),
                "what it says of quantized tensors is not a setting",
            )
        if isinstance(self.files, list):
            self._check_files(self.files)
        require(self.block_checksums.dtype == np.uint64, "checksums are not uint64")
        require(self.block_checksums.ndim == 1, "checksums are not one column")
        require(
            self.has_checksums or self.block_bytes == BLOCK_BYTES,
            "blocks of an unusual size, without checksums",
        )
        self._check_files_of_checksums()
        if isinstance(self.table, ChunkTable):
            self._check_chunks(self.table)

    def _check_files(self, files: list[ShardFile]) -> None:
        # Our own files lie at most one folder down; other programs may nest theirs deeper.
        max_parts = 2 if self.origin is None else 4
        for name, num_bytes, header_bytes, header_checksum in files:
            if not locations.is_inner_name(name, max_parts):
                raise ValueError(f"the file name {name!r:.300} leads elsewhere")
            is_all_header = header_bytes == num_bytes
            limit = MAX_TABLE_BYTES if is_all_header else 8 + MAX_HEADER_BYTES
            if not 0 <= header_bytes <= num_bytes or header_bytes > limit:
                raise ValueError(f"the file {name!r} has a header of {header_bytes} bytes")
            if not type(num_bytes) is type(header_bytes) is type(header_checksum) is int:
                raise TypeError(f"the numbers of the file {name!r} are not integers")

    def _check_columns_of_values(self) -> None:
        """Check fingerprints and statistics, which objects have none of."""
        numbers, stats = self.fingerprints, self.stats
        if numbers is None and stats is None:
            return
        are_objects = np.array([name == OBJECT for name in self.dtypes], bool)
        if numbers is not None:
            fits = numbers.dtype == np.uint64 and numbers.shape == (len(self.keys),)
            require(fits, "fingerprints are not one number for each key")
            has_one = bool((numbers[are_objects] != NO_FINGERPRINT).any())
            require(not has_one, "an object has a fingerprint")
        if stats is not None:
            require(not bool(stats.are_known[are_objects].any()), "an object has statistics")

    def _check_files_of_checksums(self) -> None:
        holders = self.checksum_files
        are_here = self.has_checksums and not len(holders)
        require(
            are_here or not len(self.block_checksums), "checksums are in the manifest and in files"
        )
        if not len(holders):
            return
        sizes, header_sizes = (column[holders] for column in _sizes_of(self.files))
        for place in np.flatnonzero((sizes % CHECKSUM_BYTES != 0) | (sizes != header_sizes))[:1]:
            name = self.files[int(holders[place])].name
            raise ValueError(f"the size of the file of checksums {name!r} is wrong")

    def _check_chunks(self, chunks: ChunkTable) -> None:
        """Check a table of all chunks."""
        for _ in self.checked(iter([chunks])):
            pass

    def checked(self, parts: Iterator[ChunkTable]) -> Iterator[ChunkTable]:
        """Yield parts of a table of all chunks when they are checked; what they have together is
        checked at the end.

        Raises:
            ValueError: the chunks contradict each other, or the rest of the manifest.
        """
        # Integer sums would wrap around.
        in_files, num_blocks = np.zeros(len(self.files)), np.zeros(len(self.files))
        for chunks in parts:
            require(bool((np.diff(chunks.key_ids) >= 0).all()), "chunks are not sorted by key")
            self._check_positions(chunks)
            self._check_checksum_files(chunks)
            blocks_of_chunks = -(-chunks.num_bytes // self.block_bytes)
            in_files += np.bincount(chunks.file_ids, chunks.num_bytes, len(in_files))
            num_blocks += np.bincount(chunks.file_ids, blocks_of_chunks, len(in_files))
            yield chunks
        _check_room(self.files, in_files)
        self._check_number_of_checksums(num_blocks)

    def _check_positions(self, chunks: ChunkTable) -> None:
        """Check some chunks, each by itself."""
        key_ids, file_ids, num_bytes = chunks.key_ids, chunks.file_ids, chunks.num_bytes
        if not len(key_ids):
            return
        require(key_ids.min() >= 0 and key_ids.max() < len(self.keys), "a chunk has no key")
        require(file_ids.min() >= 0 and file_ids.max() < len(self.files), "a chunk has no file")
        inside = chunks.offsets.min(initial=0) == chunks.shapes.min(initial=0) == 0
        # A difference of numbers from 0 on does not wrap around.
        inside = inside and bool(
            (chunks.offsets <= self._key_shapes[key_ids] - chunks.shapes).all()
        )
        require(inside, "a chunk lies outside its tensor")
        sizes, starts = (column[file_ids].astype(np.int64) for column in _sizes_of(self.files))
        fits = (num_bytes >= 0) & (chunks.first_bytes >= starts) & (num_bytes <= sizes)
        require(
            bool((fits & (chunks.first_bytes <= sizes - num_bytes)).all()),
            "a chunk lies outside its file",
        )
        # Tensors have fewer than 2**62 elements, so none of these products wraps around.
        num_elements = functools.reduce(
            np.multiply, chunks.shapes.T, np.ones(len(key_ids), np.int64)
        )
        require(bool((num_elements < 2**58).all()), "a chunk is larger than any file")
        item_bytes = np.array([ITEM_BYTES.get(name, 0) for name in self.dtypes], np.int64)
        per_item = item_bytes[key_ids]
        exact = num_elements * per_item == num_bytes
        require(bool((exact | (per_item == 0)).all()), "a chunk's size contradicts its shape")

    def _check_checksum_files(self, chunks: ChunkTable) -> None:
        """Check that files of checksums come after those with some chunks."""
        if len(self.checksum_files):
            last = chunks.file_ids.max(initial=0)
            require(last <= self.checksum_files[-1], "a chunk has no checksums")

    def _check_number_of_checksums(self, num_blocks: npt.NDArray[np.float64]) -> None:
        """Check how many checksums there are for the blocks in each file."""
        are_here = self.has_checksums and not len(self.checksum_files)
        expected_here = num_blocks.sum() if are_here else 0
        require(len(self.block_checksums) == expected_here, "the number of checksums is wrong")
        if not len(self.checksum_files):
            return
        groups = np.searchsorted(self.checksum_files, np.arange(len(num_blocks)))
        # Files after the last one have no chunks.
        in_groups = np.bincount(groups, num_blocks).tolist()
        for file_id, expected in zip(self.checksum_files.tolist(), in_groups, strict=False):
            check_size_of_checksums(self.files[file_id], expected)


def files_in(fields: Mapping[str, Any], columns: Mapping[str, Column]) -> Files:
    """Return the files of a manifest, from its fields and columns."""
    if FILE_PATTERNS not in fields:
        return list(map(ShardFile._make, fields["files"]))
    # Imported when it is needed: few checkpoints are so large.
    from distckpt._format.file_table import FileTable

    return FileTable.from_columns(fields[FILE_PATTERNS], columns, MAX_TABLE_BYTES)


def _field_of_files(files: Files) -> dict[str, Any]:
    if isinstance(files, list):
        return {"files": files}
    return {FILE_PATTERNS: [pattern.to_json() for pattern in files.patterns]}


def _columns_of_files(files: Files) -> dict[str, Column]:
    return {} if isinstance(files, list) else files.columns()


def _holders_in(files: Files, has_checksums: bool) -> IntArray:
    """Return the numbers of the files that hold checksums."""
    if isinstance(files, list):
        return np.flatnonzero([has_checksums and file.holds_checksums for file in files])
    return files.holders if has_checksums else np.zeros(0, np.int64)


def _sizes_of(files: Files) -> tuple[Column, Column]:
    """Return the sizes of files, and those of their headers."""
    if not isinstance(files, list):
        return files.num_bytes, files.header_bytes
    sizes = [file.num_bytes for file in files], [file.header_bytes for file in files]
    return np.array(sizes[0], np.int64), np.array(sizes[1], np.int64)


def _check_room(files: Files, num_bytes: npt.NDArray[Any]) -> None:
    """Check that the chunks in the first files have no more bytes than these. No byte is in two
    chunks, so a small file cannot claim large tensors.
    """
    sizes = _sizes_of(files)[0][: len(num_bytes)]
    require(bool((num_bytes <= sizes).all()), "chunks take more room than their file has")


def version_of(files: Files) -> int:
    """Return the version of the format of a manifest that has some files."""
    return FORMAT_VERSION if isinstance(files, list) else DIVIDED_VERSION


def _padded_shapes(global_shapes: Sequence[tuple[int, ...]], num_axes: int) -> IntArray:
    padded = np.ones((len(global_shapes), num_axes), np.int64)
    for row, shape in enumerate(global_shapes):
        padded[row, : len(shape)] = shape
    return padded


def check_size_of_checksums(file: ShardFile, num_blocks: float) -> None:
    """Check that a file holds the checksums of a number of blocks.

    Raises:
        ValueError: it does not.
    """
    require(
        file.num_bytes == file.header_bytes == CHECKSUM_BYTES * num_blocks,
        f"the number of checksums in {file.name!r} is wrong",
    )


def _key_starts(chunks: ChunkTable | LazyChunks, num_keys: int) -> IntArray:
    """Return the first row of each key, and the number of all rows."""
    if isinstance(chunks, ChunkTable):
        return np.searchsorted(chunks.key_ids, np.arange(num_keys + 1))
    return starts_of_keys(chunks.key_ids, num_keys)


def needs_checksum_files(num_blocks: int) -> bool:
    """Tell whether checksums of this number of blocks are stored beside the shards."""
    return num_blocks > MAX_BLOCKS


def num_blocks_of(manifest: Manifest) -> int:
    """Return how many blocks the tensors of a manifest have at least, however they are divided."""
    sizes = (
        math.prod(shape) * ITEM_BYTES[dtype]
        for shape, dtype in zip(manifest.global_shapes, manifest.dtypes, strict=True)
        if dtype != OBJECT
    )
    return sum(sizes) // manifest.block_bytes


def file_of_checksums(name: str, data: bytes) -> ShardFile:
    """Describe a file that holds checksums."""
    return ShardFile(name, len(data), len(data), checksum(data))


def _widened(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Undo `narrow`."""
    return column.astype(np.int64) if column.dtype in (np.uint8, np.uint16, np.uint32) else column


def _stats_of(columns: Mapping[str, Column], num_keys: int) -> StatsColumns | None:
    of_stats = {name: _widened(each) for name, each in columns.items() if name[:6] == "stats_"}
    if not of_stats:
        return None
    # Imported when it is needed: few saves store statistics.
    from distckpt._format.tensor_stats import StatsColumns

    return StatsColumns.from_columns(of_stats, num_keys)


def _read_chunks(
    files: Files, columns: dict[str, Column], num_axes: int, location: str
) -> ChunkTable | LazyChunks:
    """Return the chunk table of a manifest, which may carry parts: they are removed from it."""
    carried = sorted(name for name in columns if name.startswith(CARRIED_PART))
    if not carried:
        chunks = ChunkTable(
            files, **{name: _widened(columns[name]) for name in ChunkTable._fields[1:]}
        )
        _check_columns(chunks, num_axes)
        return chunks
    # Each is decoded into as much again.
    parts = [Part.from_bytes(columns.pop(name).tobytes()) for name in carried]
    parts.append(Part(len(columns["key_ids"]), columns))
    num_rows = sum(part.num_rows for part in parts)
    require(num_rows * (4 + 2 * num_axes) <= MAX_TABLE_NUMBERS, f"{num_rows} chunks are too many")
    axes = dict.fromkeys(("offsets", "shapes"), num_axes)
    lazy: dict[str, Any] = {
        name: LazyColumn.of(parts, name, axes.get(name)) for name in TABLE_COLUMNS
    }
    return LazyChunks(location, files, **lazy, block_checksums=columns["block_checksums"])


def too_large(size: str) -> CheckpointingException:
    """Return the error about a manifest that readers would refuse."""
    return CheckpointingException(
        f"The manifest of this checkpoint would have {size}, and readers accept {MAX_TABLE_BYTES} "
        f"bytes and {MAX_TABLE_NUMBERS} numbers. "
        "Nothing was committed: save the state as several checkpoints."
    )


def is_manifest_name(name: object) -> bool:
    """Tell whether a marker may give this name to the manifest."""
    return isinstance(name, str) and _MANIFEST_NAMES.fullmatch(name) is not None


def marker_fields(
    data: bytes, name: str = MANIFEST_NAME, version: int = FORMAT_VERSION
) -> dict[str, Any]:
    """Return the fields by which a marker names a manifest that has these bytes, of a version of
    the format.
    """
    return {
        "format_version": version,
        "min_reader_version": max(version, MIN_READER_VERSION),
        "manifest": {"name": name, "bytes": len(data), "checksum": f"{checksum(data):016x}"},
    }


def _known_checksum(name: object) -> bool:
    if name not in (CHECKSUM, None):
        raise ValueError(f"the checksum {name!r:.99} is unknown")
    return name == CHECKSUM


def _check_columns(chunks: ChunkTable, num_axes: int) -> None:
    """Check dtypes and shapes before all else: a column without elements can claim any length."""
    num_chunks = len(chunks.key_ids)
    shapes = dict.fromkeys(("offsets", "shapes"), (num_chunks, num_axes))
    for name in TABLE_COLUMNS:
        _check_column(name, getattr(chunks, name), shapes.get(name, (num_chunks,)))


def _check_columns_of_keys(key_shapes: IntArray, key_ndims: IntArray, num_keys: int) -> None:
    """Check the columns that have a row for each key."""
    _check_column("key_ndims", key_ndims, (num_keys,))
    _check_column("key_shapes", key_shapes, (num_keys, *key_shapes.shape[1:2]))
    require(key_shapes.ndim == 2 and bool((key_shapes >= 0).all()), "a global shape is negative")
    # Floating point detects products that would wrap around in int64.
    num_elements = np.prod(key_shapes.astype(np.float64), axis=1)
    require(
        bool((num_elements < 2.0**62).all()), "a tensor has more elements than any storage holds"
    )


def _check_column(name: str, column: Column, shape: tuple[int, ...]) -> None:
    if column.dtype != np.int64 or column.shape != shape:
        raise ValueError(f"column {name!r} is {column.dtype} {column.shape}, not int64 {shape}")


@contextlib.contextmanager
def judging_manifest(location: str) -> Iterator[None]:
    """Report what goes wrong in decoding a manifest as damage."""
    try:
        yield
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise CorruptCheckpointError(
            f"The manifest of {location!r} is damaged ({type(error).__name__}: {error}). "
            "Load another checkpoint, or restore this one from a copy."
        ) from error

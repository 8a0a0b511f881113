"""The manifest: which chunk of which key lies where, in columns, so that reads of 10^6 chunks are
planned in milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt._base.dtypes import ITEM_BYTES, is_known
from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._format.checksum import BLOCK_BYTES, checksum
from distckpt._format.columns import pack, unpack, unpack_table
from distckpt._format.safetensors_file import MAX_HEADER_BYTES
from distckpt._geometry.region import IntArray, Region, stable_order, widen
from distckpt._storage import locations

if TYPE_CHECKING:
    from distckpt._format.tensor_stats import StatsColumns

FORMAT_VERSION = 3
MIN_READER_VERSION = 3
MANIFEST_NAME = "manifest.safetensors"
_MANIFEST_NAMES = re.compile(r"manifest(-[0-9a-f]{16})?\.safetensors")
"""The name has a nonce where an object store already holds another manifest."""
MAX_TABLE_BYTES = 4 << 30
"""Limit of manifests, of files of checksums, and of all other files that say where the tensors of a
checkpoint lie.
"""
MAX_TABLE_NUMBERS = 1 << 31
"""Limit of the numbers in the parts of a chunk table, which may take less than they are."""
MAX_BLOCK_BYTES = 64 << 20
"""Readers hold a few whole blocks in memory."""
MAX_BLOCKS = 1 << 16
"""With more blocks (16 GiB of data), their checksums are in files of their own, beside the shards;
otherwise in the manifest, which takes no further file.
"""
CHECKSUMS_SUFFIX = ".checksums"
CHECKSUM_BYTES = 8
CARRIED_PART = "part:"
"""Begins the name of a column that holds the bytes of a part of the chunk table, in manifests that
are sent to other ranks.
"""
CHECKSUM = "xxh3-64"
FINGERPRINTS = "fingerprints"
NO_FINGERPRINT = (1 << 64) - 1
OBJECT = "OBJECT"
"""Takes the place of a dtype name where the chunks of a key are encoded objects, one for each cell
of the global shape.
"""


class ShardFile(NamedTuple):
    """A file of the checkpoint: its name, relative to the directory, its size, and the size and
    checksum of its header.
    """

    name: str
    num_bytes: int
    header_bytes: int
    header_checksum: int

    @property
    def holds_checksums(self) -> bool:
        """Tell whether it holds the checksums of blocks: those of all files that are listed between
        the previous such file and this one. All of its bytes count as header.
        """
        return self.name.endswith(CHECKSUMS_SUFFIX)


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

    files: list[ShardFile]
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
        plan: what a later job needs to use the plan of this save again, see `note_of_plan`; None
            if it cannot.
        fingerprints: the number of each key, see `distckpt.fingerprint`, as it was when it was
            saved; `NO_FINGERPRINT` for objects and tensors that have none. None if no key has one.
        stats: statistics of the tensors as they were saved; None if no key has them.

    Attributes:
        checksum_files: the numbers of the files that hold checksums; none if `block_checksums` has
            them.
        first_blocks: for each chunk, where the checksums of its blocks begin: in the file that
            holds them, as far as it was fetched, or in `block_checksums`.
        fetched_checksums: what `checksum_files` hold, as far as it was fetched; by number of file.
    """

    def __init__(
        self,
        keys: Sequence[str],
        dtypes: Sequence[str],
        global_shapes: Sequence[tuple[int, ...]],
        chunks: ChunkTable,
        aliases: Mapping[str, str],
        block_bytes: int = BLOCK_BYTES,
        has_checksums: bool = True,
        origin: Mapping[str, Any] | None = None,
        quantization: Mapping[str, Any] | None = None,
        plan: Mapping[str, Any] | None = None,
        fingerprints: npt.NDArray[np.uint64] | None = None,
        stats: StatsColumns | None = None,
    ) -> None:
        self.keys = list(keys)
        self.dtypes = list(dtypes)
        self.global_shapes = list(global_shapes)
        self.chunks = chunks
        self.aliases = dict(aliases)
        self.block_bytes = block_bytes
        self.has_checksums = has_checksums
        self.origin = origin
        self.quantization = quantization or (origin or {}).get("quantization")
        self.plan = plan
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
        self.key_starts: IntArray = np.searchsorted(self.key_ids, np.arange(len(self.keys) + 1))
        self.block_starts: IntArray = np.zeros(len(self.key_ids) + 1, np.int64)
        np.cumsum(-(-self.num_bytes // block_bytes), out=self.block_starts[1:])
        self.checksum_files: IntArray = np.flatnonzero(
            [has_checksums and file.holds_checksums for file in self.files]
        )
        self.first_blocks = self.block_starts
        if len(self.checksum_files):
            # Filled together with `fetched_checksums`; pages that nobody fills take no memory.
            self.first_blocks = np.zeros(len(self.key_ids), np.int64)
        self.fetched_checksums: dict[int, npt.NDArray[np.uint64]] = {}

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

    @functools.cached_property
    def scales_key(self) -> str | None:
        """A key of scales that belong to codes, None if there is no such key."""
        # Imported when it is needed: few checkpoints hold codes.
        names = importlib.import_module("distckpt._quantization.names")
        dtypes = zip(self.keys, self.dtypes, strict=True)
        codes = [(key, dtype) for key, dtype in dtypes if names.may_be_codes(dtype)]
        for key, dtype in codes:
            if scales := names.scales_of(key, self.key_index):
                return str(scales[0])
            if not names.are_codes_beside_scales(key, dtype):
                continue
            if beside := names.scale_beside(key, self.scale_places):
                return str(beside)
        return names.MARKER if names.MARKER in self.key_index else None

    @functools.cached_property
    def scale_places(self) -> dict[str, str]:
        """Where keys are that are named like scales, see `places_of_scales`."""
        names = importlib.import_module("distckpt._quantization.names")
        places: dict[str, str] = names.places_of_scales(self.key_index)
        return places

    def chunk_rows(self, key_id: int) -> slice:
        """Return the rows of the chunk table that belong to a key."""
        return slice(int(self.key_starts[key_id]), int(self.key_starts[key_id + 1]))

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
            "format_version": FORMAT_VERSION,
            "keys": self.keys,
            "dtypes": self.dtypes,
            "files": chunks.files,
            "aliases": self.aliases,
            "block_bytes": self.block_bytes,
            "checksum": CHECKSUM if self.has_checksums else None,
        }
        optional = {
            "origin": self.origin,
            "quantization": None if self.origin else self.quantization,
            "plan": self.plan,
        }
        fields |= {name: value for name, value in optional.items() if value is not None}
        columns = {**self._columns_of_keys(chunks.offsets.shape[1]), **chunks.columns()}
        columns |= self._columns_of_values() | dict(further or {})
        data = pack(fields, {name: narrow(column) for name, column in columns.items()})
        if len(data) > MAX_TABLE_BYTES:
            raise _too_large(f"{len(data)} bytes")
        return data

    @classmethod
    def from_bytes(cls, data: bytes, location: str) -> Manifest:
        """Decode a manifest, which may carry parts; check that it does not contradict itself."""
        with judging_manifest(location):
            fields, columns = unpack(data)
            columns = _with_parts(columns)
            files = [ShardFile(str(n), int(b), int(h), int(c)) for n, b, h, c in fields["files"]]
            key_shapes, key_ndims = columns.pop("key_shapes"), columns.pop("key_ndims")
            chunks = ChunkTable(files, **{name: columns[name] for name in ChunkTable._fields[1:]})
            _check_columns(chunks, key_shapes, key_ndims, len(fields["keys"]))
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
                plan=fields.get("plan"),
                fingerprints=columns.get(FINGERPRINTS),
                stats=_stats_of(columns, len(fields["keys"])),
            )
            manifest._check(key_shapes)
        return manifest

    def _columns_of_keys(self, ndim: int) -> dict[str, IntArray]:
        key_shapes = np.ones((len(self.keys), ndim), np.int64)
        for i, shape in enumerate(self.global_shapes):
            key_shapes[i, : len(shape)] = shape
        key_ndims = np.array([len(shape) for shape in self.global_shapes], np.int64)
        return {"key_shapes": key_shapes, "key_ndims": key_ndims}

    def _columns_of_values(self) -> dict[str, npt.NDArray[Any]]:
        columns = {} if self.stats is None else self.stats.columns()
        return (
            columns if self.fingerprints is None else {**columns, FINGERPRINTS: self.fingerprints}
        )

    def _check(self, key_shapes: IntArray) -> None:
        num_chunks, num_keys, keys = len(self.key_ids), len(self.keys), set(self.keys)
        require(
            len(self.dtypes) == len(self.global_shapes) == num_keys,
            "keys and dtypes differ in number",
        )
        require(len(keys) == num_keys, "keys are not distinct")
        require(
            all(name == OBJECT or is_known(name) for name in set(self.dtypes)),
            "a dtype is unknown",
        )
        self._check_fingerprints()
        require(keys.issuperset(self.aliases.values()), "an alias has no target")
        require(keys.isdisjoint(self.aliases), "an alias has the name of a key")
        require(self.origin is None or isinstance(self.origin, dict), "its origin is not described")
        if self.quantization is not None:
            settings = importlib.import_module("distckpt._quantization.settings")
            require(
                settings.are_settings(self.quantization),
                "what it says of quantized tensors is not a setting",
            )
        # Our own files lie at most one folder down; other programs may nest theirs deeper.
        max_parts = 2 if self.origin is None else 4
        for file in self.files:
            require(
                locations.is_inner_name(file.name, max_parts),
                f"the file name {file.name!r:.300} leads elsewhere",
            )
            is_all_header = file.header_bytes == file.num_bytes
            limit = MAX_TABLE_BYTES if is_all_header else 8 + MAX_HEADER_BYTES
            fits = 0 <= file.header_bytes <= min(file.num_bytes, limit)
            require(fits, f"the file {file.name!r} has a header of {file.header_bytes} bytes")
        self._check_number_of_checksums()
        if num_chunks == 0:
            return
        require(bool((np.diff(self.key_ids) >= 0).all()), "chunks are not sorted by key")
        require(self.key_ids[0] >= 0 and self.key_ids[-1] < num_keys, "a chunk has no key")
        require(
            bool(((self.file_ids >= 0) & (self.file_ids < len(self.files))).all()),
            "a chunk has no file",
        )
        self._check_positions(key_shapes)

    def _check_fingerprints(self) -> None:
        numbers = self.fingerprints
        if numbers is not None:
            fits = numbers.dtype == np.uint64 and numbers.shape == (len(self.keys),)
            require(fits, "fingerprints are not one number for each key")

    def _check_positions(self, key_shapes: IntArray) -> None:
        inside = self.offsets.min(initial=0) == self.shapes.min(initial=0) == 0
        # A difference of numbers from 0 on does not wrap around.
        inside = inside and bool((self.offsets <= key_shapes[self.key_ids] - self.shapes).all())
        require(inside, "a chunk lies outside its tensor")
        sizes = np.array([f.num_bytes for f in self.files], np.int64)[self.file_ids]
        starts = np.array([f.header_bytes for f in self.files], np.int64)[self.file_ids]
        fits = (self.num_bytes >= 0) & (self.first_bytes >= starts) & (self.num_bytes <= sizes)
        require(
            bool((fits & (self.first_bytes <= sizes - self.num_bytes)).all()),
            "a chunk lies outside its file",
        )
        # Tensors have fewer than 2**62 elements, so none of these products wraps around.
        num_elements = functools.reduce(
            np.multiply, self.shapes.T, np.ones(len(self.key_ids), np.int64)
        )
        require(bool((num_elements < 2**58).all()), "a chunk is larger than any file")
        item_bytes = np.array([ITEM_BYTES.get(name, 0) for name in self.dtypes], np.int64)
        per_item = item_bytes[self.key_ids]
        exact = num_elements * per_item == self.num_bytes
        require(bool((exact | (per_item == 0)).all()), "a chunk's size contradicts its shape")
        # No byte is in two chunks, so a small file cannot claim large tensors. Integer sums would
        # wrap around.
        in_files = np.bincount(self.file_ids, self.num_bytes.astype(np.float64), len(self.files))
        require(
            all(in_files <= [float(f.num_bytes) for f in self.files]),
            "chunks take more room than their file has",
        )

    def _check_number_of_checksums(self) -> None:
        require(self.block_checksums.dtype == np.uint64, "checksums are not uint64")
        require(
            self.has_checksums or self.block_bytes == BLOCK_BYTES,
            "blocks of an unusual size, without checksums",
        )
        are_here = self.has_checksums and not len(self.checksum_files)
        num_blocks = int(self.block_starts[-1]) if are_here else 0
        require(len(self.block_checksums) == num_blocks, "the number of checksums is wrong")
        if not len(self.checksum_files):
            return
        groups = np.searchsorted(self.checksum_files, self.file_ids)
        require(groups.max(initial=0) < len(self.checksum_files), "a chunk has no checksums")
        # Integer sums would wrap around.
        num_blocks_of = np.bincount(
            groups, np.diff(self.block_starts).astype(np.float64), len(self.checksum_files)
        )
        for file_id, expected in zip(self.checksum_files.tolist(), num_blocks_of, strict=True):
            file = self.files[file_id]
            require(
                file.num_bytes == file.header_bytes == CHECKSUM_BYTES * expected,
                f"the number of checksums in {file.name!r} is wrong",
            )


class PlannedManifest(NamedTuple):
    """A manifest without what is known only when the chunks are written. Repeated saves keep its
    order, and its columns in the form in which they are stored.

    Attributes:
        manifest: of the keys, without chunks.
        chunks: without checksums; the chunks of objects, whose files are not laid out yet, have no
            positions and sizes.
        order: the place of each chunk among the chunks of all ranks, one rank after the other;
            empty if the manifest does not have the checksums.
        open_files: the files that are not laid out, or hold checksums.
        open_rows: the chunks of these files, in their order.
        num_open: of these files and of these chunks, those of each rank; of shape (ranks, 2).
        parts: contents of files, by name, that hold further chunks, which come before the others
            and are all laid out; none if `chunks` are all.
    """

    manifest: Manifest
    chunks: ChunkTable
    order: IntArray
    open_files: IntArray
    open_rows: IntArray
    num_open: IntArray
    parts: Mapping[str, bytes] = {}

    def completed(self, reports: Sequence[bytes]) -> ChunkTable:
        """Return the chunks with what each rank has written.

        Args:
            reports: by rank, what `report_of` has made.
        """
        parts = [_parts_of(data, *counts) for data, counts in self._with_counts(reports)]
        of_files, of_chunks, checksums = map(np.concatenate, zip(*parts, strict=True))
        of_files, sizes = of_files.reshape(-1, 3), of_chunks.astype(np.int64)
        files = list(self.chunks.files)
        for file_id, numbers in zip(self.open_files.tolist(), of_files.tolist(), strict=True):
            files[file_id] = ShardFile(files[file_id].name, *numbers)
        chunks = self.chunks._replace(
            files=files,
            first_bytes=self._filled(self.chunks.first_bytes, self._positions(of_files, sizes)),
            num_bytes=self._filled(self.chunks.num_bytes, sizes),
        )
        if not len(self.order):
            return chunks
        in_order_of_ranks = np.empty(len(self.order), np.int64)
        in_order_of_ranks[self.order] = chunks.num_bytes
        blocks = blocks_of(self.order, in_order_of_ranks, BLOCK_BYTES)
        return chunks._replace(block_checksums=checksums[blocks])

    def _with_counts(self, reports: Sequence[bytes]) -> Iterator[tuple[bytes, list[int]]]:
        return zip(reports, self.num_open.tolist(), strict=True)

    def _positions(self, of_files: npt.NDArray[np.uint64], sizes: IntArray) -> IntArray:
        """Return where the chunks of open files begin: they follow the header without gaps."""
        file_ids = self.chunks.file_ids[self.open_rows]
        headers: IntArray = of_files[np.searchsorted(self.open_files, file_ids), 1].astype(np.int64)
        before: IntArray = np.cumsum(sizes) - sizes
        return headers + before - before[np.searchsorted(file_ids, file_ids)]

    def _filled(self, column: IntArray, values: IntArray) -> IntArray:
        if not len(self.open_rows):
            return column
        filled = column.astype(np.int64)
        filled[self.open_rows] = values
        return filled


def planned_manifest(
    manifest: Manifest, tables: Sequence[ChunkTable], parts: Mapping[str, bytes] | None = None
) -> PlannedManifest:
    """Sort the chunks that the ranks are going to write, which the tables list by rank, into a
    manifest without chunks.

    A file that is not laid out yet has no header. For `parts` see `PlannedManifest`.

    Raises:
        CheckpointingException: the manifest would be larger than readers accept.
    """
    joined = ChunkTable.join(tables, max(map(len, manifest.global_shapes), default=0))
    order = joined.sorted_rows
    num_files = [len(table.files) for table in tables]
    planned = planned_in_order(manifest, joined.without_blocks(order), order, num_files, parts)
    _check_size(planned)
    return planned


def planned_in_order(
    manifest: Manifest,
    chunks: ChunkTable,
    order: IntArray,
    num_files: Sequence[int],
    parts: Mapping[str, bytes] | None = None,
) -> PlannedManifest:
    """Do the same with chunks that are in the order of a manifest.

    Args:
        manifest: of the keys, without chunks.
        chunks: of all ranks.
        order: the place of each chunk among those of all ranks, one rank after the other.
        num_files: how many of the files are those of each rank.
        parts: see `PlannedManifest`.
    """
    is_open = np.array([not file.header_bytes for file in chunks.files], bool)
    open_files = np.flatnonzero(is_open)
    open_rows = np.flatnonzero(is_open[chunks.file_ids])
    ranks = np.repeat(np.arange(len(num_files)), num_files)
    num_open = [
        np.bincount(ranks[file_ids], minlength=len(num_files))
        for file_ids in (open_files, chunks.file_ids[open_rows])
    ]
    return PlannedManifest(
        manifest,
        ChunkTable(chunks.files, *map(narrow, chunks.columns().values())),
        np.zeros(0, np.int64) if any(f.holds_checksums for f in chunks.files) else order,
        open_files,
        open_rows[np.argsort(order[open_rows])],
        np.stack(num_open, axis=1),
        parts or {},
    )


def report_of(
    files: Sequence[ShardFile], num_bytes: IntArray, checksums: npt.NDArray[np.uint64]
) -> bytes:
    """Encode what the coordinator learns from a rank that has written its files.

    Args:
        files: those that were not laid out when the save was planned, in their order.
        num_bytes: the sizes of their chunks.
        checksums: of the blocks of all files of the rank, unless a file holds them.
    """
    of_files = np.array([numbers for _, *numbers in files], np.uint64).reshape(-1)
    return np.concatenate([of_files, num_bytes.astype(np.uint64), checksums]).tobytes()


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


def _parts_of(
    report: bytes, num_files: int, num_chunks: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Undo `report_of`."""
    words = np.frombuffer(report, np.uint64)
    first, second = 3 * num_files, 3 * num_files + num_chunks
    return words[:first], words[first:second], words[second:]


def _check_size(planned: PlannedManifest) -> None:
    """Refuse what readers would refuse, before anything is written."""
    chunks, block_bytes = planned.chunks, planned.manifest.block_bytes
    num_blocks = -(-chunks.num_bytes.astype(np.int64) // block_bytes)
    if len(planned.order):
        in_columns = CHECKSUM_BYTES * int(num_blocks.sum())
    else:
        in_columns = 0
        ends = [i for i, file in enumerate(chunks.files) if file.holds_checksums]
        groups = np.searchsorted(ends, chunks.file_ids)
        largest = CHECKSUM_BYTES * int(np.bincount(groups, num_blocks).max(initial=0))
        if largest > MAX_TABLE_BYTES:
            raise _too_large(f"{largest} bytes of checksums in a file")
    in_columns += sum(column.nbytes for column in chunks.columns().values())
    in_columns += sum(map(len, planned.parts.values()))
    num_rows = len(chunks.key_ids) + sum(unpack(part)[0]["rows"] for part in planned.parts.values())
    if num_rows * (4 + 2 * chunks.offsets.shape[1]) > MAX_TABLE_NUMBERS:
        raise _too_large(f"{num_rows} chunks")
    manifest = planned.manifest
    num_chars = sum(map(len, manifest.keys)) + sum(len(file.name) for file in chunks.files)
    at_least = in_columns + num_chars
    if at_least > MAX_TABLE_BYTES:
        raise _too_large(
            f"at least {at_least} bytes ({len(manifest.keys)} keys, {len(chunks.key_ids)} chunks, "
            f"{int(num_blocks.sum())} blocks of {block_bytes} bytes)"
        )


def narrow(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an int64 column with as few bytes per number as its numbers need; others as they
    are.
    """
    if column.dtype != np.int64 or column.min(initial=0) < 0:
        return column
    largest = column.max(initial=0)
    fitting = (each for each in (np.uint8, np.uint16, np.uint32) if largest <= np.iinfo(each).max)
    return column.astype(next(fitting, np.int64))


def _widened(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Undo `narrow`."""
    return column.astype(np.int64) if column.dtype in (np.uint8, np.uint16, np.uint32) else column


def _stats_of(columns: Mapping[str, npt.NDArray[Any]], num_keys: int) -> StatsColumns | None:
    if not any(name.startswith("stats_") for name in columns):
        return None
    # Imported when it is needed: few saves store statistics.
    tensor_stats = importlib.import_module("distckpt._format.tensor_stats")
    found: StatsColumns | None = tensor_stats.StatsColumns.from_columns(columns, num_keys)
    return found


def _with_parts(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Return columns with the rows of the parts that are carried among them."""
    names = sorted(name for name in columns if name.startswith(CARRIED_PART))
    joined = {name: _widened(column) for name, column in columns.items() if name not in names}
    if not names:
        return joined
    parts, max_numbers = list[Mapping[str, npt.NDArray[Any]]](), MAX_TABLE_NUMBERS
    for name in names:
        parts.append(unpack_table(columns[name].tobytes(), max_numbers))
        max_numbers -= sum(column.size for column in parts[-1].values())
    for name in parts[0]:
        widened = [_widened(part[name]) for part in parts]
        joined[name] = np.concatenate([*widened, joined[name]])
    return joined


def _too_large(size: str) -> CheckpointingException:
    return CheckpointingException(
        f"The manifest of this checkpoint would have {size}, and readers accept {MAX_TABLE_BYTES} "
        f"bytes and {MAX_TABLE_NUMBERS} numbers. "
        "Nothing was committed: save the state as several checkpoints."
    )


def is_manifest_name(name: object) -> bool:
    """Tell whether a marker may give this name to the manifest."""
    return isinstance(name, str) and _MANIFEST_NAMES.fullmatch(name) is not None


def marker_fields(data: bytes, name: str = MANIFEST_NAME) -> dict[str, Any]:
    """Return the fields by which a marker names a manifest that has these bytes."""
    return {
        "format_version": FORMAT_VERSION,
        "min_reader_version": MIN_READER_VERSION,
        "manifest": {"name": name, "bytes": len(data), "checksum": f"{checksum(data):016x}"},
    }


def _known_checksum(name: object) -> bool:
    if name not in (CHECKSUM, None):
        raise ValueError(f"the checksum {name!r:.99} is unknown")
    return name == CHECKSUM


def _check_columns(
    chunks: ChunkTable, key_shapes: IntArray, key_ndims: IntArray, num_keys: int
) -> None:
    """Check dtypes and shapes before all else: a column without elements can claim any length."""
    columns = {**chunks.columns(), "key_shapes": key_shapes, "key_ndims": key_ndims}
    require(columns.pop("block_checksums").ndim == 1, "checksums are not one column")
    num_chunks, ndim = len(chunks.key_ids), chunks.offsets.shape[-1]
    shapes = {"key_shapes": (num_keys, ndim), "key_ndims": (num_keys,)}
    shapes |= dict.fromkeys(("offsets", "shapes"), (num_chunks, ndim))
    for name, found in columns.items():
        shape = shapes.get(name, (num_chunks,))
        if found.dtype != np.int64 or found.shape != shape:
            raise ValueError(f"column {name!r} is {found.dtype} {found.shape}, not int64 {shape}")
    require(key_shapes.ndim == 2 and bool((key_shapes >= 0).all()), "a global shape is negative")
    # Floating point detects products that would wrap around in int64.
    num_elements = np.prod(key_shapes.astype(np.float64), axis=1)
    require(
        bool((num_elements < 2.0**62).all()), "a tensor has more elements than any storage holds"
    )


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
            f"The manifest {location!r} is damaged ({type(error).__name__}: {error}). "
            "Load another checkpoint, or restore this file from a copy."
        ) from error


def require(condition: bool, what: str) -> None:
    """Raise ValueError with a text unless a condition holds."""
    if not condition:
        raise ValueError(what)

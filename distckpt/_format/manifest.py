"""The manifest: which chunk of which key lies where, in columns, so that reads of 10^6 chunks are
planned in milliseconds.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt._base.dtypes import ITEM_BYTES, is_known
from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._format.checksum import BLOCK_BYTES, checksum
from distckpt._format.columns import pack, unpack
from distckpt._format.safetensors_file import MAX_HEADER_BYTES
from distckpt._geometry.region import IntArray, Region, widen
from distckpt._storage import locations

FORMAT_VERSION = 2
MIN_READER_VERSION = 1
MANIFEST_NAME = "manifest.safetensors"
_MANIFEST_NAMES = re.compile(r"manifest(-[0-9a-f]{16})?\.safetensors")
"""The name has a nonce where an object store already holds another manifest."""
MAX_TABLE_BYTES = 4 << 30
"""Limit of manifests, and of all other files that say where the tensors of a checkpoint lie."""
MAX_BLOCK_BYTES = 64 << 20
"""Readers hold a few whole blocks in memory."""
CHECKSUM = "xxh3-64"
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
            are unknown.
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
        return np.lexsort((*self.offsets.T[::-1], self.key_ids))

    def take(self, rows: IntArray, block_bytes: int) -> ChunkTable:
        """Return the chunks in some rows, in their order, with the checksums of their blocks."""
        blocks = _blocks_of(rows, self.num_bytes, block_bytes)
        return self.without_blocks(rows)._replace(block_checksums=self.block_checksums[blocks])

    def without_blocks(self, rows: IntArray) -> ChunkTable:
        """Return the chunks in some rows, in their order, without checksums."""
        columns = self.columns()
        del columns["block_checksums"]
        taken = {name: column[rows] for name, column in columns.items()}
        return ChunkTable(self.files, **taken, block_checksums=np.zeros(0, np.uint64))


def _blocks_of(rows: IntArray, num_bytes: IntArray, block_bytes: int) -> IntArray:
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
        origin: None for distckpt's own checkpoints; otherwise the name of the reader as `format`,
            and JSON fields for that reader.
        quantization: what the configuration beside another program's files said of quantized
            tensors, see `settings_of`.
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

    def with_chunks(self, chunks: ChunkTable) -> Manifest:
        """Return the manifest of the same keys with other chunks, sorted by key."""
        return Manifest(
            self.keys,
            self.dtypes,
            self.global_shapes,
            chunks,
            self.aliases,
            quantization=self.quantization,
        )

    def check_size(self, tables: Sequence[ChunkTable]) -> None:
        """Refuse chunks with which the manifest would be larger than readers accept."""
        ndim = max(map(len, self.global_shapes), default=0)
        num_chunks = sum(len(table.key_ids) for table in tables)
        num_blocks = sum(int((-(-table.num_bytes // self.block_bytes)).sum()) for table in tables)
        file_names = [file.name for table in tables for file in table.files]
        num_chars = sum(map(len, self.keys)) + sum(map(len, file_names))
        # Of a chunk: four columns of one number, and two of one number for each axis.
        per_chunk, per_key = 4 + 2 * ndim, 1 + ndim
        num_numbers = num_chunks * per_chunk + num_blocks + len(self.keys) * per_key
        at_least = 8 * num_numbers + num_chars
        if at_least > MAX_TABLE_BYTES:
            raise _too_large(
                f"at least {at_least} bytes ({len(self.keys)} keys, {num_chunks} chunks, "
                f"{num_blocks} blocks of {self.block_bytes} bytes)"
            )

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

    def to_bytes(self) -> bytes:
        """Encode as the content of `manifest.safetensors`."""
        fields = {
            "format_version": FORMAT_VERSION,
            "keys": self.keys,
            "dtypes": self.dtypes,
            "files": self.files,
            "aliases": self.aliases,
            "block_bytes": self.block_bytes,
            "checksum": CHECKSUM if self.has_checksums else None,
        }
        optional = {
            "origin": self.origin,
            "quantization": None if self.origin else self.quantization,
        }
        fields |= {name: value for name, value in optional.items() if value is not None}
        columns = {
            "key_shapes": self._key_shapes(),
            "key_ndims": np.array([len(shape) for shape in self.global_shapes], np.int64),
            **self.chunks.columns(),
        }
        data = pack(fields, columns)
        if len(data) > MAX_TABLE_BYTES:
            raise _too_large(f"{len(data)} bytes")
        return data

    @classmethod
    def from_bytes(cls, data: bytes, location: str) -> Manifest:
        """Decode a manifest, and check that it does not contradict itself."""
        try:
            fields, columns = unpack(data)
            files = [ShardFile(str(n), int(b), int(h), int(c)) for n, b, h, c in fields["files"]]
            key_shapes, key_ndims = columns.pop("key_shapes"), columns.pop("key_ndims")
            chunks = ChunkTable(files, **{name: columns[name] for name in ChunkTable._fields[1:]})
            _check_columns(chunks, key_shapes, key_ndims, len(fields["keys"]))
            is_axis = np.arange(key_shapes.shape[1]) < key_ndims[:, None]
            _require(
                bool((is_axis.sum(axis=1) == key_ndims).all()), "a key has more axes than the table"
            )
            key_shapes = np.where(is_axis, key_shapes, 1)
            block_bytes = int(fields["block_bytes"])
            # Blocks must begin between items of any size.
            _require(
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
            )
            manifest._check(key_shapes)
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
        return manifest

    def _key_shapes(self) -> IntArray:
        key_shapes = np.ones((len(self.keys), self.offsets.shape[1]), np.int64)
        for i, shape in enumerate(self.global_shapes):
            key_shapes[i, : len(shape)] = shape
        return key_shapes

    def _check(self, key_shapes: IntArray) -> None:
        num_chunks, num_keys, keys = len(self.key_ids), len(self.keys), set(self.keys)
        _require(
            len(self.dtypes) == len(self.global_shapes) == num_keys,
            "keys and dtypes differ in number",
        )
        _require(len(keys) == num_keys, "keys are not distinct")
        _require(
            all(name == OBJECT or is_known(name) for name in set(self.dtypes)),
            "a dtype is unknown",
        )
        _require(keys.issuperset(self.aliases.values()), "an alias has no target")
        _require(keys.isdisjoint(self.aliases), "an alias has the name of a key")
        _require(
            self.origin is None or isinstance(self.origin, dict), "its origin is not described"
        )
        if self.quantization is not None:
            settings = importlib.import_module("distckpt._quantization.settings")
            _require(
                settings.are_settings(self.quantization),
                "what it says of quantized tensors is not a setting",
            )
        # Our own files lie at most one folder down; other programs may nest theirs deeper.
        max_parts = 2 if self.origin is None else 4
        for file in self.files:
            _require(
                locations.is_inner_name(file.name, max_parts),
                f"the file name {file.name!r:.300} leads elsewhere",
            )
            fits = 0 <= file.header_bytes <= min(file.num_bytes, 8 + MAX_HEADER_BYTES)
            _require(fits, f"the file {file.name!r} has a header of {file.header_bytes} bytes")
        if num_chunks == 0:
            return
        _require(bool((np.diff(self.key_ids) >= 0).all()), "chunks are not sorted by key")
        _require(self.key_ids[0] >= 0 and self.key_ids[-1] < num_keys, "a chunk has no key")
        _require(
            bool(((self.file_ids >= 0) & (self.file_ids < len(self.files))).all()),
            "a chunk has no file",
        )
        self._check_positions(key_shapes)

    def _check_positions(self, key_shapes: IntArray) -> None:
        inside = self.offsets.min(initial=0) == self.shapes.min(initial=0) == 0
        # A difference of numbers from 0 on does not wrap around.
        inside = inside and bool((self.offsets <= key_shapes[self.key_ids] - self.shapes).all())
        _require(inside, "a chunk lies outside its tensor")
        sizes = np.array([f.num_bytes for f in self.files], np.int64)[self.file_ids]
        starts = np.array([f.header_bytes for f in self.files], np.int64)[self.file_ids]
        fits = (self.num_bytes >= 0) & (self.first_bytes >= starts) & (self.num_bytes <= sizes)
        _require(
            bool((fits & (self.first_bytes <= sizes - self.num_bytes)).all()),
            "a chunk lies outside its file",
        )
        # Tensors have fewer than 2**62 elements, so none of these products wraps around.
        num_elements = functools.reduce(
            np.multiply, self.shapes.T, np.ones(len(self.key_ids), np.int64)
        )
        _require(bool((num_elements < 2**58).all()), "a chunk is larger than any file")
        item_bytes = np.array([ITEM_BYTES.get(name, 0) for name in self.dtypes], np.int64)
        per_item = item_bytes[self.key_ids]
        exact = num_elements * per_item == self.num_bytes
        _require(bool((exact | (per_item == 0)).all()), "a chunk's size contradicts its shape")
        # No byte is in two chunks, so a small file cannot claim large tensors. Integer sums would
        # wrap around.
        in_files = np.bincount(self.file_ids, self.num_bytes.astype(np.float64), len(self.files))
        _require(
            all(in_files <= [float(f.num_bytes) for f in self.files]),
            "chunks take more room than their file has",
        )
        _require(self.block_checksums.dtype == np.uint64, "checksums are not uint64")
        num_blocks = int(self.block_starts[-1]) if self.has_checksums else 0
        _require(len(self.block_checksums) == num_blocks, "the number of checksums is wrong")
        _require(
            self.has_checksums or self.block_bytes == BLOCK_BYTES,
            "blocks of an unusual size, without checksums",
        )


class PlannedManifest(NamedTuple):
    """A manifest without what is known only when the chunks are written. Repeated saves keep its
    order.

    Attributes:
        manifest: its chunks have no checksums; objects, whose files are not laid out yet, no sizes.
        order: the place of each of its chunks among the chunks of all ranks, one rank after the
            other.
        open_rows: the chunks of the files that are not laid out, in that order.
    """

    manifest: Manifest
    order: IntArray
    open_rows: IntArray

    def completed(self, written: Sequence[ChunkTable]) -> Manifest:
        """Return the manifest with what each rank has written.

        Args:
            written: by rank, the checksums of all chunks; and the files that were laid out late,
                with positions and sizes of their chunks.
        """
        chunks = self.manifest.chunks
        late = {file.name: file for table in written for file in table.files}
        chunks = chunks._replace(
            files=[late.get(file.name, file) for file in chunks.files],
            first_bytes=self._filled(chunks.first_bytes, [each.first_bytes for each in written]),
            num_bytes=self._filled(chunks.num_bytes, [each.num_bytes for each in written]),
        )
        sizes = np.empty_like(chunks.num_bytes)
        sizes[self.order] = chunks.num_bytes
        checksums = np.concatenate([each.block_checksums for each in written])
        blocks = _blocks_of(self.order, sizes, BLOCK_BYTES)
        return self.manifest.with_chunks(chunks._replace(block_checksums=checksums[blocks]))

    def _filled(self, column: IntArray, late: Sequence[IntArray]) -> IntArray:
        filled = column.copy()
        filled[self.open_rows] = np.concatenate(late)
        return filled


def planned_manifest(manifest: Manifest, tables: Sequence[ChunkTable]) -> PlannedManifest:
    """Sort the chunks that the ranks are going to write, which the tables list by rank, into a
    manifest without chunks.

    A file that is not laid out yet has no header.
    """
    joined = ChunkTable.join(tables, max(map(len, manifest.global_shapes), default=0))
    order = joined.sorted_rows
    chunks = joined.without_blocks(order)
    is_open = np.array([not file.header_bytes for file in chunks.files], bool)
    open_rows = np.flatnonzero(is_open[chunks.file_ids])
    in_order_of_ranks = open_rows[np.argsort(order[open_rows])]
    return PlannedManifest(manifest.with_chunks(chunks), order, in_order_of_ranks)


def _too_large(size: str) -> CheckpointingException:
    return CheckpointingException(
        f"The manifest of this checkpoint would have {size}, and readers accept {MAX_TABLE_BYTES}. "
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
    _require(columns.pop("block_checksums").ndim == 1, "checksums are not one column")
    num_chunks, ndim = len(chunks.key_ids), chunks.offsets.shape[-1]
    shapes = {"key_shapes": (num_keys, ndim), "key_ndims": (num_keys,)}
    shapes |= dict.fromkeys(("offsets", "shapes"), (num_chunks, ndim))
    for name, found in columns.items():
        shape = shapes.get(name, (num_chunks,))
        if found.dtype != np.int64 or found.shape != shape:
            raise ValueError(f"column {name!r} is {found.dtype} {found.shape}, not int64 {shape}")
    _require(key_shapes.ndim == 2 and bool((key_shapes >= 0).all()), "a global shape is negative")
    # Floating point detects products that would wrap around in int64.
    num_elements = np.prod(key_shapes.astype(np.float64), axis=1)
    _require(
        bool((num_elements < 2.0**62).all()), "a tensor has more elements than any storage holds"
    )


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)

"""From layouts to the manifest: every rank says what it is going to write, and, when it is written, how it came out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt._format.checksum import BLOCK_BYTES
from distckpt._format.columns import pack, unpack
from distckpt._format.manifest import ChunkTable, Manifest, ShardFile
from distckpt._geometry.region import IntArray, regions_to_arrays, widen
from distckpt._plan.save import ChunkLayout, keys_of_shards
from distckpt._state.shards import GlobalTable


class FileLayout(NamedTuple):
    """A file to be written: what the manifest says of it, its first bytes, and where in it each chunk lies.

    Of a file of objects the header is empty and sizes are 0 until the objects are encoded.
    """

    file: ShardFile
    header: bytes
    chunks: Sequence[ChunkLayout]
    first_bytes: Sequence[int]
    num_bytes: Sequence[int]


class LayoutRecord(NamedTuple):
    """The chunks one rank is going to write: `file_ids` index `files`, `shard_ids` name a shard of the rank.

    A file of objects is the last one.
    """

    files: list[ShardFile]
    shard_ids: IntArray
    file_ids: IntArray
    first_bytes: IntArray
    num_bytes: IntArray
    offsets: IntArray
    shapes: IntArray

    @classmethod
    def of(cls, layouts: Sequence[FileLayout]) -> LayoutRecord:
        """Collect the layouts of a rank's files."""
        chunks = [chunk for layout in layouts for chunk in layout.chunks]
        offsets, shapes = regions_to_arrays([chunk.region for chunk in chunks])
        return cls(
            files=[layout.file for layout in layouts],
            shard_ids=np.array([chunk.pieces[0][0] for chunk in chunks], np.int64),
            file_ids=np.repeat(np.arange(len(layouts)), [len(layout.chunks) for layout in layouts]),
            first_bytes=np.array([b for layout in layouts for b in layout.first_bytes], np.int64),
            num_bytes=np.array([b for layout in layouts for b in layout.num_bytes], np.int64),
            offsets=offsets,
            shapes=shapes,
        )

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        columns = self._asdict()
        return pack(columns.pop("files"), columns)

    @classmethod
    def from_bytes(cls, data: bytes) -> LayoutRecord:
        """Decode what `to_bytes` made."""
        files, columns = unpack(data)
        return cls([ShardFile(*file) for file in files], **columns)


class WrittenRecord(NamedTuple):
    """What one rank knows only when its files are written.

    Attributes:
        object_file: the file of objects, None without objects.
        object_bytes: the size of each object, in the order of the file.
        block_checksums: of all chunks, in the order of the layout.
    """

    object_file: ShardFile | None
    object_bytes: IntArray
    block_checksums: npt.NDArray[np.uint64]

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return pack(self.object_file, self._asdict_of_columns())

    def _asdict_of_columns(self) -> dict[str, npt.NDArray[Any]]:
        return {"object_bytes": self.object_bytes, "block_checksums": self.block_checksums}

    @classmethod
    def from_bytes(cls, data: bytes) -> WrittenRecord:
        """Decode what `to_bytes` made."""
        file, columns = unpack(data)
        return cls(None if file is None else ShardFile(*file), **columns)


class ManifestLayout(NamedTuple):
    """A manifest but for what is known only when files are written; `columns` list chunks by rank and file.

    `order` sorts them as the manifest does; `num_files` and `num_chunks` have one item per rank.
    """

    keys: list[str]
    dtypes: list[str]
    global_shapes: list[tuple[int, ...]]
    files: list[ShardFile]
    aliases: dict[str, str]
    columns: dict[str, IntArray]
    order: IntArray
    num_files: list[int]
    num_chunks: list[int]


def lay_out_manifest(table: GlobalTable, aliases: Mapping[int, int], records: Sequence[LayoutRecord]) -> ManifestLayout:
    """Put the layouts of all ranks together.

    Args:
        table: the shards of all ranks.
        aliases: key id -> id of the key that is stored in its place.
        records: by rank.
    """
    ndim = table.offsets.shape[1]
    ranks = np.repeat(np.arange(len(records)), [len(record.shard_ids) for record in records])
    first_file = [0, *itertools.accumulate(len(record.files) for record in records)]
    key_ids = keys_of_shards(table, ranks, np.concatenate([record.shard_ids for record in records]))
    stored = [key_id for key_id in range(len(table.keys)) if key_id not in aliases]
    renumbered = np.full(len(table.keys), -1, np.int64)
    renumbered[stored] = np.arange(len(stored))
    columns = {
        "key_ids": renumbered[key_ids],
        "file_ids": np.concatenate([r.file_ids + n for r, n in zip(records, first_file, strict=False)]),
        "first_bytes": np.concatenate([record.first_bytes for record in records]),
        "num_bytes": np.concatenate([record.num_bytes for record in records]),
        "offsets": np.concatenate([widen(record.offsets, ndim, 0) for record in records]),
        "shapes": np.concatenate([widen(record.shapes, ndim, 1) for record in records]),
    }
    return ManifestLayout(
        keys=[table.keys[i] for i in stored],
        dtypes=[table.dtypes[i] for i in stored],
        global_shapes=[table.global_shape(i) for i in stored],
        files=[file for record in records for file in record.files],
        aliases={table.keys[alias]: table.keys[key] for alias, key in aliases.items()},
        columns=columns,
        order=np.lexsort((*columns["offsets"].T[::-1], columns["key_ids"])),
        num_files=[len(record.files) for record in records],
        num_chunks=[len(record.shard_ids) for record in records],
    )


def assemble_manifest(layout: ManifestLayout, records: Sequence[WrittenRecord]) -> Manifest:
    """Complete the manifest with what the ranks have written."""
    files = list(layout.files)
    first_bytes, num_bytes = layout.columns["first_bytes"].copy(), layout.columns["num_bytes"].copy()
    ends = zip(itertools.accumulate(layout.num_files), itertools.accumulate(layout.num_chunks), records, strict=True)
    for end_of_files, end_of_chunks, record in ends:
        if record.object_file is not None:
            files[end_of_files - 1] = record.object_file
            rows = slice(end_of_chunks - len(record.object_bytes), end_of_chunks)
            num_bytes[rows] = record.object_bytes
            first_bytes[rows] = record.object_file.header_bytes + np.cumsum(record.object_bytes) - record.object_bytes
    checksums = np.concatenate([record.block_checksums for record in records])
    columns = {**layout.columns, "first_bytes": first_bytes, "num_bytes": num_bytes}
    chunks = ChunkTable(files, **columns, block_checksums=checksums).take(layout.order, BLOCK_BYTES)
    return Manifest(layout.keys, layout.dtypes, layout.global_shapes, chunks, layout.aliases)

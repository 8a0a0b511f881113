"""Records of what was written: made by every rank, put together into the manifest by the coordinator."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt import _columns
from distckpt._io import BLOCK_BYTES
from distckpt._manifest import Manifest, ShardFile
from distckpt._plan_save import ChunkLayout, keys_of_shards
from distckpt._region import IntArray
from distckpt._shards import GlobalTable, regions_to_arrays, widen


class WrittenFile(NamedTuple):
    """A file that was written: its chunks, where in the file each begins, and the checksums of all their blocks."""

    file: ShardFile
    chunks: Sequence[ChunkLayout]
    first_bytes: Sequence[int]
    num_bytes: Sequence[int]
    block_checksums: npt.NDArray[np.uint64]


class Record(NamedTuple):
    """The chunks one rank wrote, as columns; `file_ids` index `files`, `shard_ids` name a shard of the rank."""

    files: list[ShardFile]
    shard_ids: IntArray
    file_ids: IntArray
    first_bytes: IntArray
    num_bytes: IntArray
    offsets: IntArray
    shapes: IntArray
    block_checksums: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, written: Sequence[WrittenFile]) -> Record:
        """Collect what was written."""
        chunks = [chunk for file in written for chunk in file.chunks]
        offsets, shapes = regions_to_arrays([chunk.region for chunk in chunks])
        checksums = [file.block_checksums for file in written]
        return cls(
            files=[file.file for file in written],
            shard_ids=np.array([chunk.pieces[0][0] for chunk in chunks], np.int64),
            file_ids=np.repeat(np.arange(len(written)), [len(file.chunks) for file in written]),
            first_bytes=np.array([b for file in written for b in file.first_bytes], np.int64),
            num_bytes=np.array([b for file in written for b in file.num_bytes], np.int64),
            offsets=offsets,
            shapes=shapes,
            block_checksums=np.concatenate(checksums) if checksums else np.zeros(0, np.uint64),
        )

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        columns = self._asdict()
        return _columns.pack(columns.pop("files"), columns)

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        """Decode what `to_bytes` made."""
        files, columns = _columns.unpack(data)
        return cls([ShardFile(*file) for file in files], **columns)


def assemble_manifest(table: GlobalTable, aliases: Mapping[int, int], records: Sequence[Record]) -> Manifest:
    """Put the records of all ranks together.

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
    key_ids = renumbered[key_ids]
    offsets = np.concatenate([widen(record.offsets, ndim, 0) for record in records])
    num_bytes = np.concatenate([record.num_bytes for record in records])
    order = np.lexsort((*offsets.T[::-1], key_ids))
    columns = {
        "key_ids": key_ids[order],
        "file_ids": np.concatenate([r.file_ids + n for r, n in zip(records, first_file, strict=False)])[order],
        "first_bytes": np.concatenate([record.first_bytes for record in records])[order],
        "num_bytes": num_bytes[order],
        "offsets": offsets[order],
        "shapes": np.concatenate([widen(record.shapes, ndim, 1) for record in records])[order],
        "block_checksums": _reorder_blocks(np.concatenate([r.block_checksums for r in records]), num_bytes, order),
    }
    return Manifest(
        keys=[table.keys[i] for i in stored],
        dtypes=[table.dtypes[i] for i in stored],
        global_shapes=[table.global_shape(i) for i in stored],
        files=[file for record in records for file in record.files],
        aliases={table.keys[alias]: table.keys[key] for alias, key in aliases.items()},
        block_bytes=BLOCK_BYTES,
        columns=columns,
    )


def _reorder_blocks(checksums: npt.NDArray[np.uint64], num_bytes: IntArray, order: IntArray) -> npt.NDArray[np.uint64]:
    """Bring the blocks of chunks into the order of the chunks."""
    counts = -(-num_bytes // BLOCK_BYTES)
    starts = np.cumsum(counts) - counts
    counts, starts = counts[order], starts[order]
    # For each block: the first block of its chunk, plus its number within the chunk.
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return checksums[np.repeat(starts, counts) + within]

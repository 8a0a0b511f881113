"""The manifest of a planned save, and its division into parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt._format.checksum import BLOCK_BYTES, CHECKSUM_BYTES, Checksums
from distckpt._format.chunk_table import MAX_TABLE_NUMBERS, TABLE_COLUMNS, ChunkTable, blocks_of
from distckpt._format.columns import narrow, pack_table, unpack
from distckpt._format.manifest import MAX_TABLE_BYTES, Manifest, too_large
from distckpt._format.safetensors_file import ShardFile
from distckpt._geometry.region import IntArray

PART_ROWS = 1 << 20
"""Number of chunks from which on a manifest has parts, and of each."""


class PlannedManifest(NamedTuple):
    """A manifest without the sizes and checksums that only writing tells.

    Repeated saves keep its order, and its columns in the form in which they are stored.

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
        """Return the chunks, completed by the reports of the ranks.

        Args:
            reports: by rank, see `report_of`.
        """
        parts = []
        for report, (num_files, num_chunks) in zip(reports, self.num_open.tolist(), strict=True):
            words = np.frombuffer(report, np.uint64)
            first_chunk = 3 * num_files
            first_checksum = first_chunk + num_chunks
            # `np.split` takes longer than all else here.
            of_chunks = words[first_chunk:first_checksum]
            parts.append((words[:first_chunk], of_chunks, words[first_checksum:]))
        file_numbers, chunk_sizes, checksums = map(np.concatenate, zip(*parts, strict=True))
        file_numbers = file_numbers.reshape(-1, 3)
        sizes = chunk_sizes.astype(np.int64)
        files = list(self.chunks.files)
        for file_id, numbers in zip(self.open_files.tolist(), file_numbers.tolist(), strict=True):
            files[file_id] = ShardFile(files[file_id].name, *numbers)
        chunks = self.chunks._replace(
            files=files,
            first_bytes=self._filled(self.chunks.first_bytes, self._positions(file_numbers, sizes)),
            num_bytes=self._filled(self.chunks.num_bytes, sizes),
        )
        if not len(self.order):
            return chunks
        in_order_of_ranks = np.empty(len(self.order), np.int64)
        in_order_of_ranks[self.order] = chunks.num_bytes
        blocks = blocks_of(self.order, in_order_of_ranks, BLOCK_BYTES)
        return chunks._replace(block_checksums=checksums[blocks])

    def _positions(self, file_numbers: npt.NDArray[np.uint64], sizes: IntArray) -> IntArray:
        """Return first bytes of the chunks of open files, without gaps."""
        file_ids = self.chunks.file_ids[self.open_rows]
        headers: IntArray = file_numbers[np.searchsorted(self.open_files, file_ids), 1].astype(
            np.int64
        )
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
    """Sort the chunks of all ranks into a manifest without chunks.

    The tables list them by rank. A file that is not laid out yet has no header. For `parts` see
    `PlannedManifest`.

    Raises:
        CheckpointingException: the manifest would be larger than readers accept.
    """
    joined = ChunkTable.join(tables, max(map(len, manifest.global_shapes), default=0))
    order = joined.sorted_rows
    chunks = joined.rows(order)
    is_open = np.array([not file.header_bytes for file in chunks.files], bool)
    open_files = np.flatnonzero(is_open)
    open_rows = np.flatnonzero(is_open[chunks.file_ids])
    ranks = np.repeat(np.arange(len(tables)), [len(table.files) for table in tables])
    num_open = [
        np.bincount(ranks[file_ids], minlength=len(tables))
        for file_ids in (open_files, chunks.file_ids[open_rows])
    ]
    planned = PlannedManifest(
        manifest,
        ChunkTable(chunks.files, *map(narrow, chunks.columns().values())),
        np.zeros(0, np.int64) if any(f.holds_checksums for f in chunks.files) else order,
        open_files,
        open_rows[np.argsort(order[open_rows])],
        np.stack(num_open, axis=1),
        parts or {},
    )
    _check_size(planned)
    return planned


def report_of(files: Sequence[ShardFile], num_bytes: IntArray, checksums: Checksums) -> bytes:
    """Encode the report of a rank that has written its files.

    Args:
        files: those that were not laid out when the save was planned, in their order.
        num_bytes: the sizes of their chunks.
        checksums: of the blocks of all files of the rank, unless a file holds them.
    """
    file_numbers = np.array([numbers for _, *numbers in files], np.uint64).reshape(-1)
    return np.concatenate([file_numbers, num_bytes.astype(np.uint64), checksums]).tobytes()


def _check_size(planned: PlannedManifest) -> None:
    """Refuse a manifest that readers would refuse, before anything is written."""
    chunks = planned.chunks
    block_bytes = planned.manifest.block_bytes
    num_blocks = -(-chunks.num_bytes.astype(np.int64) // block_bytes)
    if len(planned.order):
        in_columns = CHECKSUM_BYTES * int(num_blocks.sum())
    else:
        in_columns = 0
        ends = [i for i, file in enumerate(chunks.files) if file.holds_checksums]
        groups = np.searchsorted(ends, chunks.file_ids)
        largest = CHECKSUM_BYTES * int(np.bincount(groups, num_blocks).max(initial=0))
        if largest > MAX_TABLE_BYTES:
            raise too_large(f"{largest} bytes of checksums in a file")
    in_columns += sum(column.nbytes for column in chunks.columns().values())
    in_columns += sum(map(len, planned.parts.values()))
    num_rows = len(chunks.key_ids) + sum(unpack(part)[0]["rows"] for part in planned.parts.values())
    if num_rows * (4 + 2 * chunks.offsets.shape[1]) > MAX_TABLE_NUMBERS:
        raise too_large(f"{num_rows} chunks")
    manifest = planned.manifest
    num_chars = sum(map(len, manifest.keys)) + sum(len(file.name) for file in chunks.files)
    at_least = in_columns + num_chars
    if at_least > MAX_TABLE_BYTES:
        raise too_large(
            f"at least {at_least} bytes ({len(manifest.keys)} keys, {len(chunks.key_ids)} chunks, "
            f"{int(num_blocks.sum())} blocks of {block_bytes} bytes)"
        )


# --- Parts ----------------------------------------------------------------------------------------


def with_parts(
    chunks: ChunkTable, planned_parts: Mapping[str, bytes]
) -> tuple[ChunkTable, Mapping[str, bytes]]:
    """Divide the completed chunks of a plan, sorted by key.

    Returns the chunks that the manifest itself holds, all of them if they are few, and the contents
    of its parts by name, which the plan may have already.
    """
    parts = planned_parts
    rest = chunks
    if not parts and len(chunks.key_ids) > PART_ROWS:
        parts = parts_by_name(cut_into_parts(chunks))
        rest = chunks.rows(np.zeros(0, np.int64))
        rest = rest._replace(block_checksums=chunks.block_checksums)
    files = [*chunks.files, *(ShardFile.of(name, part) for name, part in parts.items())]
    return rest._replace(files=files), parts


def parts_by_name(parts: Iterable[bytes]) -> dict[str, bytes]:
    """Name parts, in their order."""
    return {
        f"objects/chunks-{number:05d}.safetensors": part for number, part in enumerate(parts, 1)
    }


def cut_into_parts(chunks: ChunkTable) -> list[bytes]:
    """Return the contents of the parts of chunks sorted by key.

    They are cut between keys, and have at least `PART_ROWS` rows.
    """
    key_ids = chunks.key_ids
    begins = np.flatnonzero(key_ids[1:] != key_ids[:-1]) + 1
    cuts = begins[np.diff(begins // PART_ROWS, prepend=0) > 0].tolist()
    parts = []
    for first, stop in itertools.pairwise([0, *cuts, len(key_ids)]):
        if stop:
            columns = {name: getattr(chunks, name)[first:stop] for name in TABLE_COLUMNS}
            parts.append(pack_table({name: narrow(column) for name, column in columns.items()}))
    return parts

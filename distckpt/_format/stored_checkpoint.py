"""A checkpoint in storage as one value, and checks of its files.

Also the checksums of blocks in files of their own, next to the shards.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.lazy import torch
from distckpt._base.threads import NUM_REQUESTS, run_threads
from distckpt._format.checksum import Checksums, checksum
from distckpt._format.chunk_table import check_size_of_checksums, judging_manifest
from distckpt._format.columns import joined_ranges
from distckpt._format.manifest import CHUNKS_AT_ONCE, OBJECT, Manifest
from distckpt._format.marker import file_size
from distckpt._format.safetensors_file import read_as_saved
from distckpt._geometry.region import IntArray
from distckpt._storage import locations, object_store
from distckpt._storage.file_state import FileState
from distckpt._storage.open_files import OpenFiles


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint in storage: location, content, and verification of its reads.

    Its methods take chunks as rows of the manifest's table, and keys as names.

    Attributes:
        location: path or URL.
        manifest: manifest of any format; the reader of another format makes one.
        verify: whether each block that is read, even in part, is compared with its checksum.
        marker: the fields of the marker; for another format, the fields that it would have.
        quantized: chunks of a view that are computed from other chunks, each a `QuantizedTensor`,
            see `_plan.decoded`.
        files: files that stay open from one read to the next; None if each read opens its own.
        states: for another format, the states of its files by location: on the rank that described
            it, before it did so; on others, when they first looked at a local file.
        compares_headers: whether the header of each file that is read is compared first: another
            rank has described the files, of a format without checksums.
    """

    location: str
    manifest: Manifest
    verify: bool = True
    marker: Mapping[str, Any] = field(default_factory=dict)
    quantized: Mapping[int, Any] = field(default_factory=dict)
    files: OpenFiles | None = None
    states: dict[str, FileState] = field(default_factory=dict)
    compares_headers: bool = False

    def with_files(self, files: OpenFiles) -> StoredCheckpoint:
        """Return the checkpoint with files that stay open."""
        return replace(self, files=files)

    @property
    def verifies(self) -> bool:
        """Return whether reads are compared with checksums.

        Not all formats have them.
        """
        return self.verify and self.manifest.has_checksums

    @cached_property
    def root(self) -> str:
        """Return the location of its files, a URL if reads decode them."""
        decoded = (self.manifest.origin or {}).get("decoded")
        if decoded is not None:
            return f"{object_store.DECODED}{decoded}{self.location}/!"
        return self.location

    def path_of_file(self, file_id: int) -> str:
        """Return the location of a file."""
        if (self.manifest.origin or {}).get("is_file"):
            return self.location
        return locations.join(self.root, *self.manifest.files[file_id].name.split("/"))

    def path_of(self, chunk: int) -> str:
        """Return the location of the file that holds a chunk."""
        return self.path_of_file(int(self.manifest.file_ids[chunk]))

    def key_of(self, chunk: int) -> str:
        """Return the key that a chunk belongs to."""
        return self.manifest.keys[int(self.manifest.key_ids[chunk])]

    def dtype_of(self, chunk: int) -> torch.dtype:
        """Return the dtype of a tensor's chunk."""
        return FROM_NAME[self.manifest.dtypes[int(self.manifest.key_ids[chunk])]]

    def chunks_of(self, key: str) -> range:
        """Return the chunks of a key, which are checked before.

        Raises:
            CorruptCheckpointError: a chunk does not lie inside of its tensor and file.
        """
        key_id = self.manifest.key_index[key]
        rows = self.manifest.chunk_rows(key_id)
        self.manifest.chunks.check_key(key_id, rows)
        return range(rows.start, rows.stop)

    def global_shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor, or of an object's grid."""
        return self.manifest.global_shapes[self.manifest.key_index[key]]

    def dtype_name(self, key: str) -> str:
        """Return the safetensors name of a tensor's dtype; `OBJECT` for objects."""
        return self.manifest.dtypes[self.manifest.key_index[key]]

    def is_object(self, key: str) -> bool:
        """Return whether a key holds encoded objects instead of a tensor."""
        return self.dtype_name(key) == OBJECT


def check_files(stored: StoredCheckpoint, chunks: Sequence[int]) -> None:
    """Check that the files of some chunks have their manifest sizes.

    On an object store each file takes a request, so missing bytes are left to checksums and reads
    to find.
    """
    rows = np.array(chunks, np.int64)
    stored.manifest.chunks.check_rows(rows)
    is_decoded = stored.root != stored.location
    if is_decoded or (stored.verifies and not locations.is_local(stored.location)):
        return
    num_threads = 1 if locations.is_local(stored.location) else NUM_REQUESTS
    file_ids = stored.manifest.file_ids[rows]
    # np.unique would import a part of numpy, at a time when perhaps no file can be opened any more.
    different = np.flatnonzero(np.bincount(file_ids)).tolist()

    def check(file_id: int) -> None:
        path = stored.path_of_file(file_id)
        if stored.files is None:
            _check_file(stored, path, file_id)
        else:
            stored.files.check_once(path, lambda: _check_file(stored, path, file_id))

    run_threads(check, different, num_threads)


def _check_file(stored: StoredCheckpoint, path: str, file_id: int) -> None:
    file = stored.manifest.files[file_id]
    try:
        actual = file_size(path)
        if stored.compares_headers and locations.is_local(path):
            stored.states.setdefault(path, locations.file_state(path))
    except FileNotFoundError as error:
        raise missing_file(stored, path) from error
    if actual != file.num_bytes:
        raise CorruptCheckpointError(
            f"{path!r} has {actual} bytes, but the manifest of {stored.location!r} says "
            f"{file.num_bytes}: the file was cut off, extended or replaced. Restore it from a copy "
            "or load another checkpoint."
        )
    # Some formats have no headers that are known.
    if not stored.compares_headers or not file.header_bytes:
        return
    header = locations.read_range(path, 0, file.header_bytes)
    if checksum(header) != file.header_checksum:
        raise CorruptCheckpointError(
            f"{path!r} on host {os.uname().nodename!r} has another header than where rank 0 has "
            "read it: they are not copies of one file, or it was replaced meanwhile. Give all "
            "ranks the same files."
        )


def missing_file(stored: StoredCheckpoint, path: str) -> CorruptCheckpointError:
    """Return the error about a file that is not there."""
    return CorruptCheckpointError(
        f"{path!r} is missing, but the manifest of {stored.location!r} needs it: it was "
        "deleted, or is not visible on this machine yet. Restore it from a copy, or check "
        "that all machines see the same directory."
    )


# --- Checksums in files beside the shards ---------------------------------------------------------


def fetch_checksums(stored: StoredCheckpoint, file_ids: IntArray) -> None:
    """Fetch the checksums of some files' blocks, unless done before.

    The manifest keeps them.

    Raises:
        CorruptCheckpointError: a file of checksums is missing or damaged.
    """
    manifest = stored.manifest
    if not len(manifest.checksum_files):
        return
    groups = np.flatnonzero(np.bincount(np.searchsorted(manifest.checksum_files, file_ids)))
    with judging_manifest(stored.location):
        holders = manifest.checksum_files[groups].tolist()
    if manifest.fetched.located.issuperset(holders):
        return
    # Threads that read parts of one tensor need the same files: of many, each reads none twice.
    num_missing = len(set(holders).difference(manifest.fetched.contents))
    with manifest.fetched.lock if num_missing > NUM_REQUESTS else contextlib.nullcontext():
        _read_missing(stored, holders)
    with manifest.fetched.lock, judging_manifest(stored.location):
        missing = [holder for holder in holders if holder not in manifest.fetched.located]
        # Not of all chunks at once: a whole tensor may lie in all files.
        num_holders = CHUNKS_AT_ONCE * len(manifest.checksum_files)
        step = max(1, num_holders // max(1, len(manifest.key_ids)))
        for start in range(0, len(missing), step):
            _find_first_blocks(manifest, np.array(missing[start : start + step], np.int64))
        manifest.fetched.located.update(missing)


def _read_missing(stored: StoredCheckpoint, holders: Sequence[int]) -> None:
    fetched, contents = stored.manifest.fetched.contents, dict[int, Checksums]()

    def read(holder: int) -> None:
        contents[holder] = read_checksums(stored, holder)

    missing = [holder for holder in holders if holder not in fetched]
    run_threads(read, missing, 1 if locations.is_local(stored.location) else NUM_REQUESTS)
    fetched.update(contents)


def checksums_of_blocks(manifest: Manifest, file_ids: IntArray, blocks: IntArray) -> Checksums:
    """Return the checksums of blocks in some files, after `fetch_checksums`.

    The files are in ascending order; `Manifest.first_blocks` tells how blocks are numbered.
    """
    holders = manifest.checksum_files
    if not len(holders):
        return manifest.block_checksums[blocks]
    groups = np.searchsorted(holders, file_ids)
    checksums = np.empty(len(blocks), np.uint64)
    for group in np.unique(groups).tolist():
        first, stop = np.searchsorted(groups, [group, group + 1]).tolist()
        fetched = manifest.fetched.contents[int(holders[group])]
        checksums[first:stop] = fetched[blocks[first:stop]]
    return checksums


def checksums_of_ranges(
    stored: StoredCheckpoint, file_ids: IntArray, ranges: Sequence[tuple[int, int, int]]
) -> tuple[Checksums, IntArray]:
    """Return the checksums of all blocks of some ranges.

    Also return, for each range, the number of its first block in the result. A range is a chunk,
    its first byte there, and the one behind its last. `file_ids` are the files of the ranges, in
    ascending order.
    """
    manifest = stored.manifest
    block = manifest.block_bytes
    fetch_checksums(stored, file_ids)
    chunks, starts, stops = np.array(ranges, np.int64).reshape(-1, 3).T
    counts = -(-(stops - starts) // block)
    blocks = joined_ranges(manifest.first_blocks[chunks] + starts // block, counts)
    checksums = checksums_of_blocks(manifest, np.repeat(file_ids, counts), blocks)
    return checksums, np.cumsum(counts) - counts


def read_checksums(stored: StoredCheckpoint, holder: int) -> Checksums:
    """Read a file of checksums.

    Raises:
        CorruptCheckpointError: it is missing or damaged.
    """
    data = read_as_saved(
        stored.path_of_file(holder),
        stored.manifest.files[holder],
        "The file of checksums",
        "load without comparing checksums (verify=False)",
    )
    return np.frombuffer(data, "<u8").astype(np.uint64, copy=False)


def _find_first_blocks(manifest: Manifest, holders: IntArray) -> None:
    """Note the beginning of chunks' checksums in some files.

    The chunks are the ones whose checksums these files hold.
    """
    holder_of_file = np.searchsorted(manifest.checksum_files, np.arange(len(manifest.files)))
    is_in_holders = np.isin(holder_of_file, np.searchsorted(manifest.checksum_files, holders))
    rows, chunks = manifest.in_file_order(np.flatnonzero(is_in_holders))
    # Other chunks of a view lie nowhere.
    counts = np.where(chunks.first_bytes < 0, 0, -(-chunks.num_bytes // manifest.block_bytes))
    starts = np.cumsum(counts) - counts
    groups = holder_of_file[chunks.file_ids]
    manifest.first_blocks[rows] = starts - starts[np.searchsorted(groups, groups)]
    num_blocks = np.bincount(groups, counts.astype(np.float64), len(manifest.checksum_files))
    for holder, group in zip(holders.tolist(), holder_of_file[holders].tolist(), strict=True):
        check_size_of_checksums(manifest.files[holder], num_blocks[group])

"""Checksums of blocks in files of their own, next to the shards."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.threads import NUM_REQUESTS, run_threads
from distckpt._format.checksum import checksum
from distckpt._format.chunk_table import (
    NO_CHECKSUMS,
    blocks_of,
    check_size_of_checksums,
    judging_manifest,
)
from distckpt._format.manifest import CHUNKS_AT_ONCE, Manifest, file_of_checksums
from distckpt._format.marker import read_file
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import IntArray
from distckpt._storage import locations

Checksums = npt.NDArray[np.uint64]


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
        _locate(manifest, [holder for holder in holders if holder not in manifest.fetched.located])


def _read_missing(stored: StoredCheckpoint, holders: Sequence[int]) -> None:
    fetched, contents = stored.manifest.fetched.contents, dict[int, Checksums]()

    def read(holder: int) -> None:
        contents[holder] = read_checksums(stored, holder)

    missing = [holder for holder in holders if holder not in fetched]
    run_threads(read, missing, 1 if locations.is_local(stored.location) else NUM_REQUESTS)
    fetched.update(contents)


def _locate(manifest: Manifest, holders: Sequence[int]) -> None:
    # Not of all chunks at once: a whole tensor may lie in all files.
    step = max(1, CHUNKS_AT_ONCE * len(manifest.checksum_files) // max(1, len(manifest.key_ids)))
    for start in range(0, len(holders), step):
        _find_first_blocks(manifest, np.array(holders[start : start + step], np.int64))
    manifest.fetched.located.update(holders)


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
    begins = np.cumsum(counts) - counts
    # For each block: the first one of its range, plus its number within the range.
    firsts = manifest.first_blocks[chunks] + starts // block - begins
    blocks = np.repeat(firsts, counts) + np.arange(int(counts.sum()))
    return checksums_of_blocks(manifest, np.repeat(file_ids, counts), blocks), begins


def read_checksums(stored: StoredCheckpoint, holder: int) -> Checksums:
    """Read a file of checksums.

    Raises:
        CorruptCheckpointError: it is missing or damaged.
    """
    file = stored.manifest.files[holder]
    path = stored.path_of_file(holder)
    try:
        data = read_file(path, file.num_bytes)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"The file of checksums {path!r} is missing: restore it from a copy, or load without "
            "comparing checksums (verify=False)."
        ) from error
    if len(data) != file.num_bytes or checksum(data) != file.header_checksum:
        raise CorruptCheckpointError(
            f"The file of checksums {path!r} is not the one that was saved (size or checksum "
            "differs from the manifest): restore it from a copy, or load without comparing "
            "checksums (verify=False)."
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


# --- All of them ----------------------------------------------------------------------------------


def with_checksums(stored: StoredCheckpoint) -> Manifest:
    """Return the manifest with the checksums of all blocks in it."""
    manifest = stored.manifest
    if not len(manifest.checksum_files):
        return manifest
    chunks = manifest.all_chunks
    fetch_checksums(stored, chunks.file_ids)
    holders = manifest.checksum_files.tolist()
    known = np.concatenate([manifest.fetched.contents.get(h, NO_CHECKSUMS) for h in holders])
    checksums = np.empty_like(known)
    checksums[blocks_of(chunks.file_order, chunks.num_bytes, manifest.block_bytes)] = known
    return manifest.replaced(chunks=chunks._replace(block_checksums=checksums))


def moved_beside(manifest: Manifest, name: str) -> tuple[Manifest, bytes]:
    """Return the manifest without its checksums, and the content of a new file that holds them."""
    chunks = manifest.all_chunks
    blocks = blocks_of(chunks.file_order, chunks.num_bytes, manifest.block_bytes)
    data = chunks.block_checksums[blocks].astype("<u8").tobytes()
    files = [*manifest.files, file_of_checksums(name, data)]
    without = chunks._replace(files=files, block_checksums=NO_CHECKSUMS)
    return manifest.replaced(chunks=without), data

"""Which files are read past the page cache: those that nobody has read yet, and that no other rank
on the machine reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import IntArray, mixed
from distckpt._io.shared_read import host_number
from distckpt._plan.load import Copy
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt._storage.open_files import MIN_DIRECT_BYTES, may_be_read_directly

_SAMPLE = 32
"""Chunks that ranks of a machine compare to find out whether they read the same ones."""
_MAX_COMMON = 1 / 8
"""This part of what a rank reads may be read by another rank of the machine as well."""


def unread_files(stored: StoredCheckpoint, chunks: IntArray | None = None) -> frozenset[str]:
    """Return the files, of some chunks or all, that may be read past the page cache."""
    if not locations.is_local(stored.location):
        return frozenset()
    file_ids = stored.manifest.file_ids if chunks is None else stored.manifest.file_ids[chunks]
    paths = [
        stored.path_of_file(file_id) for file_id in np.flatnonzero(np.bincount(file_ids)).tolist()
    ]
    return frozenset(path for path in paths if may_be_read_directly(path))


def files_to_read_directly(
    ranks: Ranks, stored: StoredCheckpoint, copies: Sequence[Copy], most_bytes: int
) -> frozenset[str]:
    """Return the files that this rank may read past the page cache: none if ranks of a machine read
    the same bytes, or no rank reads many. No rank requests more than `most_bytes`.

    Collective operation: all ranks must call it.
    """
    if most_bytes < MIN_DIRECT_BYTES or not locations.is_local(stored.location):
        return frozenset()
    chunks = np.flatnonzero(np.bincount(np.array([copy.chunk for copy in copies], np.int64)))
    files: frozenset[str] = frozenset() if stored.quantized else unread_files(stored, chunks)
    if ranks.size > 1 and _read_the_same(ranks, stored, chunks):
        return frozenset()
    return files


def _read_the_same(ranks: Ranks, stored: StoredCheckpoint, chunks: IntArray) -> bool:
    """Tell whether another rank of this machine reads many of the chunks that this one reads."""
    sizes = stored.manifest.num_bytes[chunks]
    # Not the many small ones that all ranks have. Of the others, every rank chooses the same.
    large = chunks[8 * sizes * len(sizes) >= sizes.sum()]
    sample = np.sort(mixed(large.astype(np.uint64)) >> np.uint64(1)).astype(np.int64)[:_SAMPLE]
    row = np.full(1 + _SAMPLE, -1)
    row[0], row[1 : 1 + len(sample)] = host_number(), sample
    rows = ranks.all_gather_numbers(row.tolist())
    others = np.delete(rows, ranks.rank, 0)
    beside = others[others[:, 0] == row[0]]
    common = np.isin(beside[:, 1:], sample).sum(axis=1)
    return bool(common.max(initial=0) > _MAX_COMMON * len(sample))

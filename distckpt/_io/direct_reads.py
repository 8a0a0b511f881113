"""Which files are read past the page cache: those that nobody has read yet, and nobody else on the
machine reads.
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
from distckpt._storage.open_files import may_be_read_directly

_SAMPLE = 32
"""Chunks by which ranks of a machine find out whether they read the same ones."""
_MAX_COMMON = 1 / 8
"""Of what a rank reads, so much may be read by another rank of the machine as well."""


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
    ranks: Ranks, stored: StoredCheckpoint, copies: Sequence[Copy]
) -> frozenset[str]:
    """Return the files that this rank may read past the page cache: none where ranks of a machine
    read the same bytes.

    Collective operation: all ranks must call it.
    """
    chunks = np.flatnonzero(np.bincount(np.array([copy.chunk for copy in copies], np.int64)))
    files: frozenset[str] = frozenset() if stored.quantized else unread_files(stored, chunks)
    if ranks.size == 1:
        return files
    sizes = stored.manifest.num_bytes[chunks]
    # Not the many small ones that all ranks have. Of the others the same are chosen on every rank.
    large = chunks[8 * sizes * len(sizes) >= sizes.sum()]
    sample = np.sort(mixed(large.astype(np.uint64)) >> np.uint64(1)).astype(np.int64)[:_SAMPLE]
    row = np.full(1 + _SAMPLE, -1)
    row[0], row[1 : 1 + len(sample)] = host_number(), sample
    rows = ranks.all_gather_numbers(row.tolist())
    beside = np.delete(rows, ranks.rank, 0)
    common = [int(np.isin(sample, other[1:]).sum()) for other in beside if other[0] == row[0]]
    return files if max(common, default=0) <= _MAX_COMMON * len(sample) else frozenset()

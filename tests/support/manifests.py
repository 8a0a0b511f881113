"""Manifests of tensors that no file holds."""

from __future__ import annotations

import numpy as np

from distckpt._format.manifest import ChunkTable, Manifest, ShardFile
from distckpt._geometry.region import regions_to_arrays


def manifest_of(tensors):
    """Make the manifest of int64 tensors from `{key: (global shape, regions of its chunks)}`."""
    regions = [region for _, chunks in tensors.values() for region in chunks]
    num_bytes = np.array([8 * region.num_elements for region in regions], np.int64)
    offsets, shapes = regions_to_arrays(regions)
    table = ChunkTable.empty()._replace(
        files=[ShardFile("tensors/a", int(num_bytes.sum()), 0, 0)],
        key_ids=np.repeat(np.arange(len(tensors)), [len(chunks) for _, chunks in tensors.values()]),
        file_ids=np.zeros(len(regions), np.int64),
        first_bytes=np.cumsum(num_bytes) - num_bytes,
        num_bytes=num_bytes,
        offsets=offsets,
        shapes=shapes,
        block_checksums=np.zeros(int((num_bytes > 0).sum()), np.uint64),
    )
    return Manifest(
        keys=list(tensors),
        dtypes=["I64"] * len(tensors),
        global_shapes=[shape for shape, _ in tensors.values()],
        chunks=table,
        aliases={},
    )

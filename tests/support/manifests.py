"""Manifests of tensors that no file holds, and the sizes from which on they are divided."""

from __future__ import annotations

import numpy as np
import pytest

from distckpt._format import manifest, planned_manifest
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import Manifest
from distckpt._format.safetensors_file import ShardFile
from distckpt._geometry.region import regions_to_arrays


def set_limits(
    monkeypatch: pytest.MonkeyPatch,
    max_blocks: int = 0,
    part_rows: int = 1,
    max_table_bytes: int = manifest.MAX_TABLE_BYTES,
) -> None:
    """Let small checkpoints be stored like large ones.

    Args:
        max_blocks: with more, checksums have files of their own, and the manifest has parts.
        part_rows: that a part has at least.
        max_table_bytes: of the manifest, and of each part.
    """
    monkeypatch.setattr(manifest, "MAX_BLOCKS", max_blocks)
    monkeypatch.setattr(planned_manifest, "PART_ROWS", part_rows)
    monkeypatch.setattr(manifest, "MAX_TABLE_BYTES", max_table_bytes)


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


def example_manifest() -> Manifest:
    """Make a manifest with two tensors in three chunks, one object and one alias."""
    return Manifest(
        keys=["a", "scalar", "rng/0"],
        dtypes=["F32", "BF16", "OBJECT"],
        global_shapes=[(4, 6), (), (2,)],
        chunks=ChunkTable.empty()._replace(
            files=[
                ShardFile(
                    "tensors/shard-00001-model-00001-of-00001.safetensors",
                    4096 + 98,
                    4096,
                    2**64 - 1,
                ),
                ShardFile("objects/rank-00001.safetensors", 5000, 4096, 5),
            ],
            key_ids=np.array([0, 0, 1, 2, 2]),
            file_ids=np.array([0, 0, 0, 1, 1]),
            first_bytes=np.array([4096, 4144, 4192, 4096, 4500]),
            num_bytes=np.array([48, 48, 2, 404, 500]),
            offsets=np.array([[0, 0], [2, 0], [0, 0], [0, 0], [1, 0]]),
            shapes=np.array([[2, 6], [2, 6], [1, 1], [1, 1], [1, 1]]),
            block_checksums=np.arange(18, dtype=np.uint64),
        ),
        aliases={"tied": "a"},
        block_bytes=64,
    )

"""Manifests of tensors that no file holds, the sizes from which on manifests are divided, and
checkpoints with and without parts of the manifest.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash

from distckpt._format import manifest, planned_manifest
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.file_table import FileTable
from distckpt._format.manifest import Manifest
from distckpt._format.safetensors_file import ShardFile
from distckpt._geometry.region import regions_to_arrays
from distckpt.megatron.core import write_marker


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


def write_rows(
    path: Path, values: np.ndarray, has_parts: bool = True, first_byte: int | None = None
) -> Path:
    """Write what ranks save that have a row of each tensor.

    Args:
        path: of the checkpoint.
        values: bytes, by tensor, rank and place in the row.
        has_parts: whether the manifest is divided; its parts are as large as `set_limits` says.
        first_byte: where one chunk begins according to the manifest; by default where it does.
    """
    num_tensors, num_ranks, row_bytes = values.shape
    ranks = np.tile(np.arange(num_ranks), num_tensors)
    tensors = np.repeat(np.arange(num_tensors), num_ranks)
    chunks = ChunkTable.empty()._replace(
        files=_write_files_of_ranks(path, values),
        key_ids=tensors,
        file_ids=2 * ranks,
        first_bytes=_HEADER_BYTES + row_bytes * tensors,
        num_bytes=np.full(len(ranks), row_bytes),
        offsets=np.stack([ranks, 0 * ranks], axis=1),
        shapes=np.stack([1 + 0 * ranks, 0 * ranks + row_bytes], axis=1),
    )
    if first_byte is not None:
        chunks.first_bytes[len(ranks) // 2] = first_byte
    of_keys = Manifest(
        [f"layer.{i:03d}" for i in range(num_tensors)],
        ["U8"] * num_tensors,
        [(num_ranks, row_bytes)] * num_tensors,
        ChunkTable.empty(),
        {},
    )
    if has_parts:
        chunks, parts = planned_manifest.with_parts(chunks, {})
        assert len(parts) == len(ranks) // planned_manifest.PART_ROWS
        for name, content in parts.items():
            (path / name).write_bytes(content)
        chunks = chunks._replace(files=FileTable.of(chunks.files))
    data = of_keys.replaced(chunks=chunks).to_bytes()
    (path / "manifest.safetensors").write_bytes(data)
    fields = manifest.marker_fields(data, version=4 if has_parts else 3)
    write_marker(path, {"sharded_backend": "safetensors", "sharded_backend_version": 1, **fields})
    return path


_HEADER_BYTES = 64


def _write_files_of_ranks(path: Path, values: np.ndarray) -> list[ShardFile]:
    """Write a file of rows, and one of their checksums, for each rank."""
    for folder in ("tensors", "objects"):
        (path / folder).mkdir(parents=True)
    files = []
    for rank in range(values.shape[1]):
        header, rows = bytes(_HEADER_BYTES), values[:, rank]
        checksums = np.array([xxhash.xxh3_64_intdigest(row.tobytes()) for row in rows], "<u8")
        contents = {
            f"tensors/shard-{rank + 1:05d}-model-00001-of-00001.safetensors": header,
            f"objects/rank-{rank + 1:05d}.checksums": checksums.tobytes(),
        }
        for (name, begin), rest in zip(contents.items(), (rows.tobytes(), b""), strict=True):
            (path / name).write_bytes(begin + rest)
            digest = xxhash.xxh3_64_intdigest(begin)
            files.append(ShardFile(name, len(begin + rest), len(begin), digest))
    return files

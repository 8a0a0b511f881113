"""The cost of a large manifest: writing it, opening it, planning a load out of it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measure import timed
from planning_layouts import LAYER

from distckpt._base.interrupts import paused_garbage_collection
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import Manifest
from distckpt._format.manifest_reading import manifest_from_bytes
from distckpt._format.safetensors_file import ShardFile
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._plan.load import Request, plan_load
from distckpt._storage import locations


def write_and_open_a_manifest(num_chunks: int) -> dict[str, Any]:
    """Time writing a manifest, opening it, and planning one rank's load out of it under another
    layout.
    """
    manifest = made_up_manifest(num_chunks)
    with tempfile.TemporaryDirectory() as folder:
        location = f"{folder}/manifest.safetensors"
        _, writing = timed(lambda: locations.write_bytes(location, manifest.to_bytes()))
        num_bytes = Path(location).stat().st_size
        opened, opening = timed(
            lambda: manifest_from_bytes(locations.read_bytes(location), location)
        )
    requests = [
        # One of 4 ranks that share a tensor by columns, where it was saved in 16 parts by rows.
        Request(key, shape, Region((0, shape[1] // 4), (shape[0], shape[1] // 4)))
        for key, shape in list(zip(opened.keys, opened.global_shapes, strict=True))[:1000]
    ]
    stored = StoredCheckpoint("checkpoint", opened)
    with paused_garbage_collection():  # as `load` does
        _, first = timed(lambda: plan_load(stored, requests[:1]))
        copies, planning = timed(lambda: plan_load(stored, requests))
    return {
        "write, s (bar: 3)": writing,
        "open, s (bar: 0.5)": opening,
        "first request of a load, s": first,
        f"plan a load of {len(requests)} tensors, s": planning,
        "parts of chunks in that plan": len(copies),
        "keys": len(opened.keys),
        "size, MB": num_bytes / 1e6,
    }


def made_up_manifest(num_chunks: int) -> Manifest:
    """Make the manifest of tensors of 16 chunks of 2 MiB each, in 1024 files."""
    per_key, rows, columns, block_bytes, num_files, header_bytes = (
        16,
        512,
        2048,
        1 << 20,
        1024,
        4096,
    )
    num_keys = num_chunks // per_key
    num_chunks = num_keys * per_key
    chunk_bytes = rows * columns * 2
    chunk, zeros = np.arange(num_chunks), np.zeros(num_chunks, np.int64)
    file_bytes = header_bytes + -(-num_chunks // num_files) * chunk_bytes
    return Manifest(
        keys=[f"model.layers.{i // 9}.{LAYER[i % 9][0]}" for i in range(num_keys)],
        dtypes=["BF16"] * num_keys,
        global_shapes=[(rows * per_key, columns)] * num_keys,
        chunks=ChunkTable.empty()._replace(
            files=[
                ShardFile(
                    f"tensors/shard-{i + 1:05d}-model-00001-of-00001.safetensors",
                    file_bytes,
                    header_bytes,
                    i,
                )
                for i in range(num_files)
            ],
            key_ids=chunk // per_key,
            file_ids=chunk % num_files,
            first_bytes=header_bytes + chunk // num_files * chunk_bytes,
            num_bytes=np.full(num_chunks, chunk_bytes),
            offsets=np.stack([chunk % per_key * rows, zeros], axis=1),
            shapes=np.stack([zeros + rows, zeros + columns], axis=1),
            block_checksums=np.arange(num_chunks * (chunk_bytes // block_bytes), dtype=np.uint64),
        ),
        aliases={},
        block_bytes=block_bytes,
    )

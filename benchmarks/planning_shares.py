"""Planning the shared reads of a load, simulated: what rank 0 spends on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from measure import peak_memory_bytes

from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import Manifest
from distckpt._format.safetensors_file import ShardFile
from distckpt._geometry.region import Region
from distckpt._plan.load import Copy
from distckpt._plan.share import ReadCosts, SharePlan, describe_units, divide
from distckpt._plan.share_out import plan_shares

ROWS, COLUMNS, ITEM = 8, 4096, 2


def plan_shared_reads(num_ranks: int, num_regions: int, num_sharing: int = 8) -> dict[str, Any]:
    """Plan a load of `num_regions` tensors: chunks have rows, and as many ranks as share request
    columns of the same chunks.
    """
    costs = ReadCosts(_manifest(num_ranks // num_sharing, num_regions))
    messages = list(_messages(costs, num_ranks, num_regions, num_sharing))
    received, seconds, plans = sum(map(len, messages)), 0.0, list[bytes]()

    def plan() -> None:
        nonlocal seconds
        start = time.process_time()
        plans.extend(plan_shares(messages, costs))
        seconds = time.process_time() - start

    peak = peak_memory_bytes(plan)
    read = [_bytes_read(costs, SharePlan.from_bytes(data)) for data in plans]
    needed = num_ranks * num_regions * ROWS * COLUMNS * ITEM // num_sharing
    return {
        "rank 0: plan shared reads, s": seconds,
        "rank 0: memory for it, MB": peak / 1e6,
        "rank 0: receives, MB": received / 1e6,
        "rank 0: sends, MB": sum(map(len, plans)) / 1e6,
        "read per byte that is needed": sum(read) / needed,
        "most that a rank reads, of the average": max(read) * len(read) / sum(read),
    }


def _manifest(num_files: int, num_keys: int) -> Manifest:
    """Return the manifest of a save by ranks that have rows of each tensor."""
    count, size = num_files * num_keys, ROWS * COLUMNS * ITEM
    files = np.tile(np.arange(num_files), num_keys)
    keys = np.repeat(np.arange(num_keys), num_files)
    table = ChunkTable(
        files=[ShardFile(f"{i}", size * num_keys, 0, 0) for i in range(num_files)],
        key_ids=keys,
        file_ids=files,
        first_bytes=keys * size,
        num_bytes=np.full(count, size),
        offsets=np.column_stack([files * ROWS, np.zeros_like(files)]),
        shapes=np.tile([ROWS, COLUMNS], (count, 1)),
        block_checksums=np.zeros(0, np.uint64),
    )
    names = [f"weight.{i}" for i in range(num_keys)]
    shape = (ROWS * num_files, COLUMNS)
    return Manifest(names, ["BF16"] * num_keys, [shape] * num_keys, table, {})


def _messages(
    costs: ReadCosts, num_ranks: int, num_regions: int, num_sharing: int
) -> Iterator[bytes]:
    """Yield what each rank tells rank 0."""
    num_files, width = num_ranks // num_sharing, COLUMNS // num_sharing
    for rank in range(num_ranks):
        region = Region((0, rank % num_sharing * width), (ROWS, width))
        chunks = range(rank // num_sharing, num_files * num_regions, num_files)
        copies = [Copy(chunk, region, 0, Region((0, 0), (ROWS, width))) for chunk in chunks]
        units = divide(costs.manifest, copies, ROWS * COLUMNS * 2)
        table = describe_units(costs, units, [torch.bfloat16], 0)
        yield table.to_bytes()


def _bytes_read(costs: ReadCosts, plan: SharePlan) -> int:
    return int(costs.of(plan.read_chunks, plan.read_offsets, plan.read_shapes).sum())

"""Reads past the page cache by several ranks: each byte leaves the disk once. Expected values are
those of numpy.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from tests.support.disk_reads import counted_disk_reads, evict, is_in_memory, need_direct_reads
from tests.support.harness import run, sum_over_ranks

NUM_TENSORS, ROWS, COLUMNS = 12, 2000, 1025
TENSOR_BYTES = ROWS * COLUMNS * 4


def content_of(number):
    return np.random.default_rng(number).integers(0, 1 << 30, (ROWS, COLUMNS), np.int32)


def shard_of(number, part, num_parts):
    rows = ROWS // num_parts
    local = torch.from_numpy(content_of(number)[part * rows : (part + 1) * rows])
    return ShardedTensor.from_rank_offsets(str(number), local, (0, part, num_parts))


def load_in(rank, folder, axis):
    """Load rows or columns of every tensor, or, where there is no axis, replicas; return what all
    read from disk.
    """
    shape = [ROWS, COLUMNS]
    if axis is not None:
        shape[axis] //= 2
    offset = [rank * shape[i] if i == axis else 0 for i in range(2)]
    replica_id = rank if axis is None else 0
    shards = {
        str(number): ShardedTensor(
            str(number),
            torch.zeros(shape, dtype=torch.int32),
            torch.int32,
            tuple(shape),
            (ROWS, COLUMNS),
            tuple(offset),
            None,
            replica_id,
        )
        for number in range(NUM_TENSORS)
    }
    with counted_disk_reads() as reads:
        loaded = distckpt.load(shards, folder, validate_access_integrity=False)
    for number in range(NUM_TENSORS):
        places = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        np.testing.assert_array_equal(loaded[str(number)].numpy(), content_of(number)[places])
    return sum_over_ranks(reads.num_bytes)


def save_in(rank, folder):
    distckpt.save({str(number): shard_of(number, rank, 2) for number in range(NUM_TENSORS)}, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("direct")
    need_direct_reads(folder)
    run(save_in, 2, folder / "checkpoint")
    return folder / "checkpoint"


@pytest.mark.parametrize(("axis", "is_cached"), [(0, False), (1, True), (None, True)])
def test_the_disk_is_asked_once_for_each_byte(folder, axis, is_cached):
    evict(folder)
    num_bytes, _ = run(load_in, 2, folder, axis)
    assert num_bytes < 1.1 * NUM_TENSORS * TENSOR_BYTES
    # What several ranks read, they find in the page cache.
    cached = [
        is_in_memory(file, file.stat().st_size // 5) for file in (folder / "tensors").iterdir()
    ]
    assert cached == [is_cached, is_cached]

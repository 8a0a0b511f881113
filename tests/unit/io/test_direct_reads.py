"""Reads past the page cache, of large files that nobody has read yet. Expected values are those of
numpy.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import distckpt
from distckpt import CorruptCheckpointError, ShardedTensor
from tests.support.disk import header_of
from tests.support.disk_reads import counted_disk_reads, evict, is_in_memory, need_direct_reads

VALUES = {
    # No multiples of a page, a checksum block, or what is read at once.
    "a": np.random.default_rng(0).integers(0, 256, 9_000_001, np.uint8),
    "rows": np.random.default_rng(1).integers(0, 1 << 30, (5001, 4099), np.int32),
    "wide": np.random.default_rng(2).integers(0, 1 << 14, (3001, 8191), np.int16),
}
NUM_BYTES = sum(value.nbytes for value in VALUES.values())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("direct")
    need_direct_reads(folder)
    shards = {
        key: ShardedTensor.from_rank_offsets(key, torch.from_numpy(value))
        for key, value in VALUES.items()
    }
    distckpt.save(shards, folder / "checkpoint")
    return folder / "checkpoint"


@pytest.fixture
def folder(saved):
    evict(saved)
    return saved


@pytest.fixture
def to_change(saved, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoint"))
    evict(folder)
    return folder


def file_of(folder):
    (file,) = (folder / "tensors").iterdir()
    return file


def part(key, dtype, shape, offset):
    return ShardedTensor(
        key, torch.zeros(shape, dtype=dtype), dtype, shape, VALUES[key].shape, offset, None
    )


def load(folder, **options):
    empty = {
        key: ShardedTensor.from_rank_offsets(
            key, torch.zeros(v.shape).to(torch.from_numpy(v[:0]).dtype)
        )
        for key, v in VALUES.items()
    }
    loaded = distckpt.load(empty, folder, **options)
    return {key: loaded[key].numpy() for key in VALUES}


def check(loaded, expected=VALUES):
    for key, value in expected.items():
        np.testing.assert_array_equal(loaded[key], value)


@pytest.mark.parametrize("verify", [True, False])
def test_the_first_load_leaves_nothing_in_memory_and_the_second_all(folder, verify):
    size, file = file_of(folder).stat().st_size, file_of(folder)
    with counted_disk_reads() as first:
        check(load(folder, verify=verify))
    assert size <= first.num_bytes < 1.05 * size
    assert not is_in_memory(file, size // 5)
    with counted_disk_reads() as second:
        check(load(folder, verify=verify))
    assert second.num_bytes > 0.9 * size
    assert is_in_memory(file, size // 5)
    check(load(folder, verify=verify))


def test_bytes_that_are_in_memory_do_not_come_from_the_disk(folder):
    file = file_of(folder)
    size = file.stat().st_size
    begin = size // 8 * 5
    with file.open("rb", buffering=0) as opened:
        while opened.tell() < size:
            opened.seek(max(begin, opened.tell()))
            opened.read(1 << 20)
    with counted_disk_reads() as reads:
        check(load(folder))
    assert reads.num_bytes < begin + 0.1 * size


def test_changes_that_are_in_memory_only_are_seen(to_change):
    file = file_of(to_change)
    first_byte, entries = header_of(file)
    content = bytearray(file.read_bytes())
    evict(to_change)
    with file.open("r+b", buffering=0) as opened:
        for position in range(1 << 20, len(content), 3_000_017):
            content[position : position + 7] = b"changed"
            os.pwrite(opened.fileno(), b"changed", position)
    loaded = load(to_change, verify=False)
    assert not is_in_memory(file, len(content) // 5)
    for key, value in loaded.items():
        begin, end = entries[key]["data_offsets"]
        assert value.tobytes() == content[first_byte + begin : first_byte + end]
    evict(to_change)
    with pytest.raises(CorruptCheckpointError, match=r"Checksum mismatch in .*safetensors"):
        load(to_change)


def test_parts_are_read_like_all(folder):
    rows, wide = VALUES["rows"], VALUES["wide"]
    shards = {
        "lower": part("rows", torch.int32, (4500, 4099), (501, 0)),
        "cast": part("wide", torch.int64, (3001, 8190), (0, 1)),
    }
    with counted_disk_reads() as reads:
        loaded = distckpt.load(shards, folder)
    assert reads.num_bytes < 1.1 * (wide.nbytes + 4500 * 4099 * 4)
    assert not is_in_memory(file_of(folder), NUM_BYTES // 5)
    np.testing.assert_array_equal(loaded["lower"].numpy(), rows[501:])
    np.testing.assert_array_equal(loaded["cast"].numpy(), wide[:, 1:])


def test_a_file_that_becomes_shorter_while_it_is_read(to_change):
    file = file_of(to_change)
    size = file.stat().st_size // 3 * 2

    def cut(num_bytes, total_bytes):
        os.truncate(file, size)

    with pytest.raises(
        CorruptCheckpointError, match=f"safetensors' ends at byte {size}, .* goes on after it"
    ):
        load(to_change, progress=cut, max_inflight_bytes=1)


def test_a_check_reads_each_byte_once_and_finds_damage(to_change):
    file = file_of(to_change)
    with counted_disk_reads() as reads:
        assert distckpt.verify(to_change).is_whole
    assert NUM_BYTES <= reads.num_bytes < 1.05 * NUM_BYTES
    assert not is_in_memory(file, NUM_BYTES // 5)
    with file.open("r+b") as opened:
        opened.seek(NUM_BYTES // 5)
        byte = opened.read(1)
        opened.seek(NUM_BYTES // 5)
        opened.write(bytes([byte[0] ^ 1]))
    evict(to_change)
    (problem,) = distckpt.verify(to_change).problems
    assert problem.first_byte <= NUM_BYTES // 5 < problem.stop_byte


def test_an_export_reads_each_byte_once(folder, tmp_path):
    with counted_disk_reads() as reads:
        distckpt.consolidate(folder, tmp_path / "exported")
    assert NUM_BYTES <= reads.num_bytes < 1.1 * NUM_BYTES
    assert not is_in_memory(file_of(folder), NUM_BYTES // 5)
    with pytest.importorskip("safetensors").safe_open(
        tmp_path / "exported" / "model.safetensors", "np"
    ) as exported:
        check({key: exported.get_tensor(key) for key in VALUES})

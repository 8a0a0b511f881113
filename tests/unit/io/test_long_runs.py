"""Scattered regions with runs of many KiB: they are read straight to where they belong."""

from __future__ import annotations

import pytest
import torch

import distckpt
from distckpt import CorruptCheckpointError, ShardedTensor
from tests.support.disk import flip
from tests.support.states import numbered

ROWS = (40, 65_536)
"""The shape of 10 MB, more than is read at once, in rows of 256 KiB."""


@pytest.fixture(autouse=True)
def shorter_runs(monkeypatch):
    """Let runs of 64 KiB be long, so that blocks and units end within many of them."""
    monkeypatch.setattr("distckpt._io.read_parts.LONG_GOAL_BYTES", 64 << 10)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "c"
    tensors = {
        "rows": numbered(*ROWS, dtype=torch.float32),
        "deep": numbered(3, 5, 2, 40_000, dtype=torch.int32),
        "bytes": numbered(30, 300_000, dtype=torch.uint8),
    }
    distckpt.save({k: ShardedTensor.from_rank_offsets(k, v) for k, v in tensors.items()}, path)
    return path, tensors


def framed(shape, dtype):
    """Return a target of which each row has neighbors in memory, and that memory."""
    memory = torch.full([n + 2 for n in shape], 77).to(dtype)
    return memory[tuple(slice(1, 1 + n) for n in shape)], memory


REGIONS = [
    ("rows", (slice(0, 40), slice(0, 65_536))),
    ("rows", (slice(0, 40), slice(0, 32_768))),
    ("rows", (slice(0, 40), slice(123, 40_001))),
    ("rows", (slice(7, 39), slice(65_536 - 16_384, 65_536))),
    ("rows", (slice(39, 40), slice(1, 65_535))),
    ("deep", (slice(0, 3), slice(0, 5), slice(0, 2), slice(0, 40_000))),
    ("deep", (slice(1, 3), slice(1, 4), slice(0, 1), slice(5, 39_000))),
    ("deep", (slice(0, 3), slice(2, 3), slice(0, 2), slice(0, 20_000))),
    ("bytes", (slice(0, 30), slice(3, 100_003))),
]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("key", "region"), REGIONS)
@pytest.mark.parametrize("layout", ["framed", "contiguous", "axes exchanged"])
def test_values_and_what_lies_beside_them(saved, key, region, layout, verify):
    path, tensors = saved
    expected = tensors[key][region]
    shape = tuple(expected.shape)
    if layout == "framed":
        target, memory = framed(shape, expected.dtype)
    elif layout == "contiguous":
        target = memory = torch.zeros(shape, dtype=expected.dtype)
    else:
        # The last axis stays: its runs are far apart, in another order.
        order = (*reversed(range(len(shape) - 1)), len(shape) - 1)
        memory = torch.zeros([shape[axis] for axis in order], dtype=expected.dtype)
        target = memory.permute(order)
    offset = tuple(each.start for each in region)
    shard = ShardedTensor(key, target, target.dtype, shape, tuple(tensors[key].shape), offset, None)
    distckpt.load({"w": shard}, path, verify=verify)
    assert torch.equal(target, expected)
    if layout == "framed":
        target.fill_(77)
        assert (memory == 77).all()


def test_damage_between_the_runs_is_found(tmp_path):
    values = numbered(*ROWS, dtype=torch.float32)
    distckpt.save({"w": ShardedTensor.from_rank_offsets("w", values)}, tmp_path / "c")
    (file,) = (tmp_path / "c" / "tensors").glob("*.safetensors")
    flip(file, -1)
    left, right = (
        ShardedTensor.from_rank_offsets("w", torch.zeros(40, 32_768), (1, half, 2))
        for half in range(2)
    )
    # A block has bytes of both halves of a row, and both are used only if it is as it was saved.
    for half in (left, right):
        with pytest.raises(CorruptCheckpointError, match="Checksum mismatch"):
            distckpt.load({"w": half}, tmp_path / "c")
    distckpt.load({"w": left}, tmp_path / "c", verify=False)
    assert torch.equal(left.data, values[:, :32_768])

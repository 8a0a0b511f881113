"""Tensors that are on an accelerator, with a made-up one: a copy is done only when it has been waited for."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from distckpt._base import device as base_device


class SlowDevice:
    """Does nothing until it is waited for; remembers what it was asked for."""

    def __init__(self):
        self.pinned = []
        self.marks = 0
        self.num_copied_bytes = 0
        self._lock = threading.Lock()
        self._asked = threading.local()

    def pinned_memory(self, num_bytes):
        memory = torch.empty(num_bytes, dtype=torch.uint8).fill_(0xEE)
        with self._lock:
            self.pinned.append((memory.data_ptr(), memory.data_ptr() + num_bytes, memory))
        return memory

    def mark(self):
        self.marks += 1
        return self.marks

    def copy(self, target, source, after):
        assert 1 <= after <= self.marks
        ends = [(t.data_ptr(), t.data_ptr() + t.untyped_storage().nbytes() - t.nbytes) for t in (target, source)]
        assert any(low <= first <= high for first, _ in ends for low, high, _ in self.pinned), "neither is pinned"
        self._asked.__dict__.setdefault("copies", []).append((target, source))

    def wait(self):
        for target, source in self._asked.__dict__.pop("copies", []):
            target.copy_(source)
            with self._lock:
                self.num_copied_bytes += target.nbytes


@pytest.fixture
def device(monkeypatch):
    """Let all tensors be on the made-up device."""
    layer = SlowDevice()
    monkeypatch.setattr(base_device, "layer_of", lambda tensor: layer)
    return layer


@pytest.mark.parametrize("durable", [True, False], ids=["direct", "buffered"])
def test_tensors_are_copied_into_pinned_memory_and_waited_for(device, monkeypatch, tmp_path, durable):
    big = torch.arange(9_000_000, dtype=torch.float32).view(3000, 3000)
    state = {
        "big": ShardedTensor.from_rank_offsets("big", big),
        "columns": ShardedTensor.from_rank_offsets("columns", big[:, 10:20]),
        "small": ShardedTensor.from_rank_offsets("small", torch.tensor(7, dtype=torch.int16)),
        "complex": ShardedTensor.from_rank_offsets("complex", torch.tensor([1 + 2j, 3 - 4j]).conj()),
    }
    expected = {key: shard.data.clone().numpy() for key, shard in state.items()}
    distckpt.save(state, tmp_path / "c", durable=durable)
    num_bytes = sum(array.nbytes for array in expected.values())
    assert num_bytes <= device.num_copied_bytes < num_bytes + 4096
    assert sum(high - low for low, high, _ in device.pinned) < 64 << 20
    monkeypatch.undo()
    loaded = distckpt.load_plain_tensors(tmp_path / "c")
    assert loaded.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(loaded[key].numpy(), array)


@pytest.mark.parametrize("verify", ["none", "read", "full"])
def test_what_is_read_is_copied_from_pinned_memory_and_waited_for(monkeypatch, tmp_path, verify):
    big = torch.arange(4_000_000, dtype=torch.float32).view(2000, 2000)
    small = torch.arange(5, dtype=torch.int64)
    saved = {key: ShardedTensor.from_rank_offsets(key, data) for key, data in (("big", big), ("small", small))}
    distckpt.save(saved, tmp_path / "c")
    device = SlowDevice()
    monkeypatch.setattr(base_device, "layer_of", lambda tensor: device)
    # Whole tensors; columns, in one process that asks for the left half only; and a wider dtype.
    targets = {
        "big": ShardedTensor.from_rank_offsets("big", torch.zeros(2000, 1000), (1, 0, 2)),
        "small": ShardedTensor.from_rank_offsets("small", torch.zeros(5, dtype=torch.int64)),
    }
    seen = []
    distckpt.load(targets, tmp_path / "c", verify=verify, validate_access_integrity=False, progress=seen.append)
    np.testing.assert_array_equal(targets["big"].data.numpy(), big.numpy()[:, :1000])
    np.testing.assert_array_equal(targets["small"].data.numpy(), small.numpy())
    assert device.num_copied_bytes == sum(seen) == 2000 * 1000 * 4 + 5 * 8
    assert sum(high - low for low, high, _ in device.pinned) < 64 << 20

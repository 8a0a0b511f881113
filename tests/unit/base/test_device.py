"""Tensors that are on an accelerator, with a made-up one: a copy is done only when it has been
waited for.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

import distckpt
from distckpt import ShardedTensor
from distckpt._base import memory as base_memory
from distckpt._io.replicas import sampled_digests
from tests.support.slow_device import SlowDevice


@pytest.fixture
def device(monkeypatch):
    """Let all tensors be on the made-up device."""
    layer = SlowDevice()
    monkeypatch.setattr(base_memory, "layer_of", lambda tensor: layer)
    return layer


@pytest.mark.parametrize("durable", [True, False], ids=["direct", "buffered"])
def test_tensors_are_copied_into_pinned_memory_and_waited_for(
    device, monkeypatch, tmp_path, durable
):
    big = torch.arange(9_000_000, dtype=torch.float32).view(3000, 3000)
    state = {
        "big": ShardedTensor.from_rank_offsets("big", big),
        "columns": ShardedTensor.from_rank_offsets("columns", big[:, 10:20]),
        "small": ShardedTensor.from_rank_offsets("small", torch.tensor(7, dtype=torch.int16)),
        "complex": ShardedTensor.from_rank_offsets(
            "complex", torch.tensor([1 + 2j, 3 - 4j]).conj()
        ),
    }
    expected = {key: shard.data.clone().numpy() for key, shard in state.items()}
    distckpt.save(state, tmp_path / "c", durable=durable)
    num_bytes = sum(array.nbytes for array in expected.values())
    assert num_bytes <= device.num_copied_bytes < num_bytes + 4096
    assert sum(high - low for low, high, _ in device.pinned) < 64 << 20
    monkeypatch.undo()
    loaded = distckpt.open(tmp_path / "c").read_tensors()
    assert loaded.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(loaded[key].numpy(), array)


@pytest.mark.parametrize("verify", [True, False])
def test_what_is_read_is_copied_from_pinned_memory_and_waited_for(monkeypatch, tmp_path, verify):
    big = torch.arange(4_000_000, dtype=torch.float32).view(2000, 2000)
    small = torch.arange(5, dtype=torch.int64)
    saved = {
        key: ShardedTensor.from_rank_offsets(key, data)
        for key, data in (("big", big), ("small", small))
    }
    distckpt.save(saved, tmp_path / "c")
    device = SlowDevice()
    monkeypatch.setattr(base_memory, "layer_of", lambda tensor: device)
    # Whole tensors; columns, in one process that asks for the left half only; and a wider dtype.
    targets = {
        "big": ShardedTensor.from_rank_offsets("big", torch.zeros(2000, 1000), (1, 0, 2)),
        "small": ShardedTensor.from_rank_offsets("small", torch.zeros(5, dtype=torch.int64)),
    }
    seen = []
    distckpt.load(
        targets,
        tmp_path / "c",
        verify=verify,
        validate_access_integrity=False,
        progress=lambda done, total: seen.append((done, total)),
    )
    np.testing.assert_array_equal(targets["big"].data.numpy(), big.numpy()[:, :1000])
    np.testing.assert_array_equal(targets["small"].data.numpy(), small.numpy())
    num_bytes = 2000 * 1000 * 4 + 5 * 8
    assert device.num_copied_bytes == num_bytes
    assert seen[-1] == (num_bytes, num_bytes)
    assert sum(high - low for low, high, _ in device.pinned) < 64 << 20
    # Threads that read have other streams than the one that loads.
    assert device.waited_in == [(threading.current_thread(), 0)]


class FailsAtTheSecondCopy(SlowDevice):
    """Queues one copy of a thread, and fails to queue another one behind it."""

    def __init__(self):
        super().__init__()
        self.num_queued = 0

    def copy(self, target, source, after):
        if self._asked.__dict__.get("copies"):
            raise RuntimeError("no memory on the device")
        self.num_queued += 1
        super().copy(target, source, after)

    def wait(self):
        self.num_queued -= len(self._asked.__dict__.get("copies", []))
        super().wait()


@pytest.mark.parametrize("verb", ["save", "load"])
def test_copies_under_way_are_waited_for_when_a_later_one_fails(monkeypatch, tmp_path, verb):
    """Since the memory that they copy from or to is used again."""
    columns = torch.arange(2048 * 3000, dtype=torch.float32).view(2048, 3000)
    state = {
        str(i): ShardedTensor.from_rank_offsets(str(i), columns[:, i : i + 9]) for i in range(2)
    }
    distckpt.save({"columns": ShardedTensor.from_rank_offsets("columns", columns)}, tmp_path / "c")
    # What one read brings of these columns are several regions, as it begins within a row.
    half = {
        "columns": ShardedTensor.from_rank_offsets("columns", torch.zeros(2048, 1500), (1, 0, 2))
    }
    device = FailsAtTheSecondCopy()
    monkeypatch.setattr(base_memory, "layer_of", lambda tensor: device)
    call = {
        "save": lambda: distckpt.save(state, tmp_path / "d"),
        "load": lambda: distckpt.load(half, tmp_path / "c", validate_access_integrity=False),
    }[verb]
    with pytest.raises(RuntimeError, match="no memory on the device"):
        call()
    assert (device.num_copied_bytes > 0, device.num_queued) == (True, 0)


class Transfers(TorchFunctionMode):
    """Counts what would bring tensors to a device or from it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.Tensor.to, torch.Tensor.cpu)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [1, 30])
def test_samples_of_any_number_of_tensors_take_one_copy_to_a_device_and_one_from_it(count):
    """Each of them waits for what the program has queued on the device. Columns are sampled as on a
    device.
    """
    table = torch.arange(40_000).view(1000, 40)
    columns = [table[:, i : i + 1 + i % 3] for i in range(count)]
    with Transfers() as transfers:
        digests = sampled_digests(columns)
    assert transfers.count == 2
    np.testing.assert_array_equal(digests, sampled_digests([each.contiguous() for each in columns]))

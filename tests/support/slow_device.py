"""A made-up accelerator whose copies are done only when they have been waited for."""

from __future__ import annotations

import threading

import pytest
import torch

from distckpt._base import memory as base_memory


def put_tensors_on(layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all tensors be on a made-up device."""
    monkeypatch.setattr(base_memory, "layer_of", lambda tensor: layer)


class SlowDevice:
    """Does nothing until it is waited for; remembers what it was asked for."""

    def __init__(self):
        self.pinned = []
        self.marks = 0
        self.waited_in = []
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

    def wait_for_queued(self):
        self.waited_in.append((threading.current_thread(), self.num_copied_bytes))

    def copy(self, target, source, after):
        assert 1 <= after <= self.marks
        ends = [
            (t.data_ptr(), t.data_ptr() + t.untyped_storage().nbytes() - t.nbytes)
            for t in (target, source)
        ]
        assert any(low <= first <= high for first, _ in ends for low, high, _ in self.pinned), (
            "neither is pinned"
        )
        self._asked.__dict__.setdefault("copies", []).append((target, source))

    def wait(self):
        for target, source in self._asked.__dict__.pop("copies", []):
            target.copy_(source)
            with self._lock:
                self.num_copied_bytes += target.nbytes

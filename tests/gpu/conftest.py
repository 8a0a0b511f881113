"""Where the tests of this folder put tensors: the GPU, if there is one, and in any case host
memory.

In host memory everything runs as on a GPU but the second half of `distckpt._base.memory`. With
made-up devices this runs as well, or what calls it: the copies of one are done late, the other has
streams and events that take what those of CUDA take.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch

from distckpt._base import memory as base_memory
from tests.support.slow_device import SlowDevice, put_tensors_on


class Place:
    """A device, and what only a real one has: streams, work that goes on, and synchronization."""

    def __init__(self, name):
        self.name = name
        self.device = torch.device("cuda" if name == "cuda" else "cpu")
        self.is_cuda = name == "cuda"

    def stream(self):
        """Make a stream of its own the current one."""
        return torch.cuda.stream(torch.cuda.Stream()) if self.is_cuda else contextlib.nullcontext()

    def keep_busy(self):
        """Queue work on the current stream that takes longer than a call that does not wait for
        it.
        """
        if self.is_cuda:
            torch.cuda._sleep(500_000_000)

    def num_pinned_blocks(self):
        """Return how many blocks of page-locked memory torch has taken from the system."""
        return getattr(torch.cuda, "host_memory_stats", dict)().get("num_host_alloc", 0)

    @contextlib.contextmanager
    def counting_waits(self):
        """Yield a list of the operations that wait for all work of a stream."""
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            if self.is_cuda:
                torch.cuda.set_sync_debug_mode("warn")
            try:
                yield waits
            finally:
                if self.is_cuda:
                    torch.cuda.set_sync_debug_mode("default")


def layer_with_signatures_of_cuda():
    """Return the layer of GPUs whose streams and events do nothing, but take what those of CUDA
    take.
    """
    layer = base_memory.DeviceLayer(torch.device("cpu"))
    names = ("Stream", "Event", "device", "stream", "current_stream")
    layer._module = SimpleNamespace(
        **{name: create_autospec(getattr(torch.cuda, name)) for name in names}
    )
    layer.pinned_memory = lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8)
    return layer


LAYERS = {"slow": SlowDevice, "signatures": layer_with_signatures_of_cuda}
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=[*DEVICES, *LAYERS])
def place(request, monkeypatch, no_saves_left):
    """A place for tensors: host memory, the GPU, or a made-up device, on which then all tensors
    are.
    """
    if request.param in LAYERS:
        layer = LAYERS[request.param]()
        put_tensors_on(layer, monkeypatch)
        # This thread keeps page-locked memory, which is that of another device.
        monkeypatch.setattr(base_memory, "_local", threading.local())
    return Place(request.param)

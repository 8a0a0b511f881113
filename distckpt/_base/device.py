"""Copies between accelerators and host memory, beside what the accelerator is computing.

Every thread that moves bytes has page-locked memory and a stream of its own, so one thread's copy
runs while another one's bytes are written or read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch


class DeviceLayer:
    """The operations of a device that moving bytes needs, for every kind that torch has streams
    for: cuda, xpu, ...
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._local = threading.local()
        self._idle_streams: list[Any] = []

    def pinned_memory(self, num_bytes: int) -> torch.Tensor:
        """Return new page-locked uint8 memory, which the device reaches by itself."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Any:
        """Mark the work that the calling thread has queued on the device so far."""
        with self._module.device(self._device):
            event = self._module.Event()
            event.record(self._module.current_stream(self._device))
        return event

    def wait_for_queued(self) -> None:
        """Return when the work is done that the calling thread has queued on the device so far."""
        self.mark().synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> None:
        """Queue a copy behind the work that was marked, on a stream of this thread; it is done when
        `wait` returns.
        """
        own = self._local.__dict__
        if "stream" not in own:
            own["stream"], own["sources"] = self._take_stream(), []
        own["stream"].wait_event(after)
        # The device first: else leaving the stream would make device 0 the current one, and start a
        # context on it.
        with self._module.device(self._device), self._module.stream(own["stream"]):
            # Not by copy_: in host memory it would conjugate before the bytes have come, and let go
            # of what is made contiguous before the device has read it.
            source = source.resolve_conj().resolve_neg().contiguous()
            own["sources"].append(source)
            target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Return when all copies of this thread are done."""
        own = self._local.__dict__
        stream = own.pop("stream", None)
        if stream is not None:
            # Not `stream.synchronize`: a program that looks for its own by `set_sync_debug_mode`
            # would find this.
            stream.record_event().synchronize()
            del own["sources"]
            self._idle_streams.append(stream)

    def _take_stream(self) -> Any:
        # Of an earlier thread, since the memory that torch allocates for copies on a stream stays
        # with the stream.
        try:
            return self._idle_streams.pop()
        except IndexError:
            return self._module.Stream(device=self._device)


_layers: dict[torch.device, DeviceLayer] = {}


def layer_of(tensor: torch.Tensor) -> DeviceLayer | None:
    """Return the device that a tensor is on; None when it is in host memory."""
    if tensor.device.type == "cpu":
        return None
    return _layers.setdefault(tensor.device, DeviceLayer(tensor.device))


class Copier:
    """Copies between host memory and the devices that some tensors are on.

    Make it in the thread that computes: work that it has queued on a device is done before bytes
    are copied.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._layers: dict[torch.device, DeviceLayer] = {}
        for tensor in tensors:
            if tensor.device not in self._layers and (layer := layer_of(tensor)) is not None:
                self._layers[tensor.device] = layer
        self._marks = {device: layer.mark() for device, layer in self._layers.items()}

    @property
    def layer(self) -> DeviceLayer | None:
        """The device that provides page-locked memory; None when all tensors are in host memory."""
        return next(iter(self._layers.values()), None)

    def is_away(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is not in host memory."""
        return tensor.device in self._layers

    def wait_for_queued(self) -> None:
        """Return when the work is done that the calling thread has queued on the devices so far."""
        for layer in self._layers.values():
            layer.wait_for_queued()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy values; between host and device this is done only when `wait` returns."""
        for device in (source.device, target.device):
            if device in self._layers:
                self._layers[device].copy(target, source, self._marks[device])
                return
        target.copy_(source)

    def wait(self) -> None:
        """Return when all copies of this thread are done."""
        for layer in self._layers.values():
            layer.wait()

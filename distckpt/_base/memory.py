"""Memory of tensors: their bytes, overlaps, scratch memory, and copies to accelerators.

Copies run while an accelerator computes. Every thread that moves bytes has page-locked memory and a
stream of its own, so one thread's copy runs while another one's bytes are written or read.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from distckpt._base.dtypes import as_integers, flat_bytes
from distckpt._base.errors import LoadMismatchError
from distckpt._base.lazy import torch
from distckpt._base.libc import ALIGNMENT, ask_for_huge_pages
from distckpt._base.threads import UNIT_BYTES

HUGE_PAGE_BYTES = 2 << 20
"""Alignment of scratch memory: a disk is faster if one of its requests consists of few pages."""

Bytes = npt.NDArray[np.uint8]

_local = threading.local()


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """View the memory of a contiguous CPU tensor as bytes."""
    num_bytes = tensor.nbytes
    if not num_bytes:
        return np.empty(0, np.uint8)
    return np.asarray(_Memory(tensor.data_ptr(), (num_bytes,), (1,), tensor))


def run_bytes(tensor: torch.Tensor, num_outer: int) -> Bytes:
    """View the memory of a CPU tensor as bytes.

    It is contiguous behind its first `num_outer` axes, which the result has.
    """
    num_bytes = math.prod(tensor.shape[num_outer:]) * tensor.itemsize
    strides = (*(step * tensor.itemsize for step in tensor.stride()[:num_outer]), 1)
    shape = (*tensor.shape[:num_outer], num_bytes)
    return np.asarray(_Memory(tensor.data_ptr(), shape, strides, tensor))


def memory_at(address: int, num_bytes: int) -> Bytes:
    """View memory as bytes. It belongs to tensors that the caller keeps."""
    return np.asarray(_Memory(address, (num_bytes,), (1,)))


def blocks_at(address: int, num_blocks: int, block_bytes: int, pitch_bytes: int) -> Bytes:
    """View blocks of memory as bytes, of shape (blocks, bytes).

    One begins every `pitch_bytes`. The memory belongs to tensors that the caller keeps.
    """
    return np.asarray(_Memory(address, (num_blocks, block_bytes), (pitch_bytes, 1)))


def copy_into(buffers: Sequence[Bytes], data: Bytes) -> int:
    """Copy data into consecutive buffers; return the bytes copied."""
    rest = data
    for buffer in buffers:
        count = min(len(buffer), len(rest))
        buffer[:count] = rest[:count]
        rest = rest[count:]
    return len(data) - len(rest)


class _Memory:
    """Numpy's access to memory at an address.

    It keeps the tensor that owns the memory, whose storage could never be resized again after
    `tensor.numpy()`.
    """

    __slots__ = ("__array_interface__", "owner")

    def __init__(
        self,
        address: int,
        shape: Sequence[int],
        strides: Sequence[int],
        owner: torch.Tensor | None = None,
        typestr: str = "|u1",
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "shape": shape,
            "strides": strides,
            "typestr": typestr,
            "data": (address, False),
            "version": 3,
        }


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor after asking for huge pages for its memory.

    It is filled three times as fast then.
    """
    if tensor.is_cpu and tensor.nbytes >= 2 * HUGE_PAGE_BYTES:
        ask_for_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain row-major bytes in CPU memory."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


# --- Memory that elements have in common ----------------------------------------------------------


def repeats_memory(tensor: torch.Tensor) -> bool:
    """Return whether several elements of a tensor share one place in memory.

    Expanded tensors are an example.
    """
    if tensor.is_contiguous() or not tensor.numel():
        return False
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    axes = sorted(pair for pair in strides if pair[1] > 1)
    reach = 0
    are_apart = True
    for stride, size in axes:
        are_apart &= stride > reach
        reach += stride * (size - 1)
    if are_apart or not axes[0][0]:
        return not are_apart
    # Interleaved axes: mark the place of each element.
    marks = np.zeros(reach + 1, np.bool_)
    np.lib.stride_tricks.as_strided(marks, tensor.shape, tensor.stride())[...] = True
    return int(np.count_nonzero(marks)) < tensor.numel()


def fill(key: str, target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor, whose elements may share places in memory.

    Raises:
        LoadMismatchError: such elements have different values.
    """
    target = target.detach()
    if not repeats_memory(target):
        target.copy_(values)
        return
    # torch refuses to fill expanded axes.
    once: tuple[slice, ...] = ()
    for stride in target.stride():
        once += (slice(None) if stride else slice(0, 1),)
    target[once].copy_(values[once])
    if not torch.equal(flat_bytes(target), flat_bytes(values.to(target))):
        raise LoadMismatchError(
            f"Key {key!r}: several elements of the tensor are one place in memory "
            f"(strides {target.stride()}), but have different values in the checkpoint. Give "
            "it memory of its own: clone() it before loading.",
            unexpected=[key],
        )


def overlapping(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of tensors that overlap, in the tensors' order."""
    starts = np.fromiter((tensor.data_ptr() for tensor in tensors), np.int64, len(tensors))
    ends = starts + np.fromiter(map(num_bytes_spanned, tensors), np.int64, len(tensors))
    order = np.argsort(starts, kind="stable")
    order = order[(starts != 0)[order] & (ends != starts)[order]]
    if (starts[order][1:] >= np.maximum.accumulate(ends[order])[:-1]).all():
        return
    earlier: list[int] = []
    for number in order.tolist():
        earlier = [other for other in earlier if ends[other] > starts[number]]
        for other in earlier:
            same_device = tensors[other].device == tensors[number].device
            if same_device and np.shares_memory(
                address_array(tensors[other]), address_array(tensors[number])
            ):
                yield min(other, number), max(other, number)
        earlier.append(number)


def num_bytes_spanned(tensor: torch.Tensor) -> int:
    """Return the bytes between a tensor's first element and its end."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def address_array(tensor: torch.Tensor) -> Any:
    """Return an array at the addresses of a tensor on any device.

    It must not be read.
    """
    size = tensor.element_size()
    strides = tuple(step * size for step in tensor.stride())
    place = _Memory(tensor.data_ptr(), tuple(tensor.shape), strides, typestr=f"|V{size}")
    return np.asarray(place)


def addresses(tensor: torch.Tensor) -> npt.NDArray[np.int64]:
    """Return the address of each element of a tensor, in row-major order."""
    result = np.array([tensor.data_ptr()], np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        steps = np.arange(size, dtype=np.int64) * (stride * tensor.element_size())
        result = (result[:, None] + steps).reshape(-1)
    return result


# --- Scratch memory -------------------------------------------------------------------------------


def bounce_buffer(
    purpose: str,
    num_bytes: int,
    device: DeviceLayer | None = None,
) -> Bytes:
    """Return this thread's scratch memory for a purpose.

    The thread's next call reuses it. It begins at a multiple of `ALIGNMENT`. With a device it is
    page-locked, so that the device reaches it by itself.
    """
    if device is not None:
        purpose = f"{purpose} pinned"
    buffer: Bytes | None = getattr(_local, purpose, None)
    if buffer is None or len(buffer) < num_bytes:
        size = max(num_bytes, UNIT_BYTES)
        alignment = ALIGNMENT if device else HUGE_PAGE_BYTES
        if device:
            memory: Bytes = device.pinned_memory(size + alignment).numpy()
        else:
            # numpy asks for huge pages. The bytes skipped at the beginning take no memory.
            memory = np.empty(size + alignment, np.uint8)
        buffer = memory[-memory.ctypes.data % alignment :]
        setattr(_local, purpose, buffer)
    return buffer[:num_bytes]


# --- Accelerators ---------------------------------------------------------------------------------


class DeviceLayer:
    """Device operations for moving bytes.

    It serves all kinds that torch has streams for: cuda, xpu, ...
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._local = threading.local()
        self._idle_streams: list[Any] = []

    def pinned_memory(self, num_bytes: int) -> torch.Tensor:
        """Return new page-locked uint8 memory, which the device reaches by itself."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def mark(self) -> Any:
        """Mark the calling thread's work on the device queued so far."""
        with self._module.device(self._device):
            event = self._module.Event()
            event.record(self._module.current_stream(self._device))
        return event

    def wait_for_queued(self) -> None:
        """Return when the calling thread's queued work on the device is done."""
        self.mark().synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> None:
        """Queue a copy behind the marked work, on this thread's stream.

        It is done when `wait` returns.
        """
        own = self._local.__dict__
        if "stream" not in own:
            own["stream"] = self._take_stream()
            own["sources"] = []
        own["stream"].wait_event(after)
        # The device first: else leaving the stream would make device 0 the current one, and start a
        # context on it.
        with self._module.device(self._device), self._module.stream(own["stream"]):
            # Not by copy_: in host memory it would conjugate before the bytes have come, and let go
            # of the contiguous copy before the device has read it.
            source = source.resolve_conj().resolve_neg().contiguous()
            own["sources"].append(source)
            target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Return when all copies of this thread are done."""
        own = self._local.__dict__
        stream = own.pop("stream", None)
        if stream is not None:
            # Not `stream.synchronize`: a program that looks for its own by `set_sync_debug_mode`
            # would report this one.
            stream.record_event().synchronize()
            del own["sources"]
            self._idle_streams.append(stream)

    def _take_stream(self) -> Any:
        # A stream of an earlier thread first: the memory that torch allocates for copies on a
        # stream stays with the stream.
        try:
            return self._idle_streams.pop()
        except IndexError:
            return self._module.Stream(device=self._device)


_layers: dict[torch.device, DeviceLayer] = {}


def layer_of(tensor: torch.Tensor) -> DeviceLayer | None:
    """Return the layer of a tensor's device, None for host memory."""
    if tensor.device.type == "cpu":
        return None
    return _layers.setdefault(tensor.device, DeviceLayer(tensor.device))


class Copier:
    """Copies between host memory and the devices of some tensors.

    Make it in the thread that computes: work that it has queued on a device is done before bytes
    are copied.

    Attributes:
        layer: the device that provides page-locked memory; None if all tensors are in host memory.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        one_of_each = {tensor.device: tensor for tensor in tensors}
        self._layers: dict[torch.device, DeviceLayer] = {}
        self._marks: dict[torch.device, Any] = {}
        for device, tensor in one_of_each.items():
            layer = layer_of(tensor)
            if layer is not None:
                self._layers[device] = layer
                self._marks[device] = layer.mark()
        self.layer = next(iter(self._layers.values()), None)

    def is_away(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is not in host memory."""
        return self.layer is not None and tensor.device in self._layers

    def is_plain(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's values are exactly its bytes in host memory.

        The bytes are in row-major order.
        """
        return is_plain_memory(tensor) and not self.is_away(tensor)

    def wait_for_queued(self) -> None:
        """Return when the calling thread's queued work on the devices is done."""
        for layer in self._layers.values():
            layer.wait_for_queued()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy values, bit by bit if the dtypes are the same.

        Between host and device this is done only when `wait` returns.
        """
        is_plain = not any(tensor.is_conj() or tensor.is_neg() for tensor in (source, target))
        if is_plain and source.dtype == target.dtype and source.element_size() <= 8:
            source = as_integers(source)
            target = as_integers(target)
        for device in (source.device, target.device):
            if device in self._layers:
                self._layers[device].copy(target, source, self._marks[device])
                return
        target.copy_(source)

    def wait(self) -> None:
        """Return when all copies of this thread are done."""
        for layer in self._layers.values():
            layer.wait()

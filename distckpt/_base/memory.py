"""Host memory: tensors as bytes, scratch buffers, and how much is left."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import mmap
import os
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.device import DeviceLayer
from distckpt._base.threads import UNIT_BYTES

ALIGNMENT = 4096
"""Direct I/O needs addresses, positions and lengths in multiples of this."""

HUGE_PAGE_BYTES = 2 << 20
"""Scratch memory begins at a multiple of this: a disk is faster where one of its requests is few
pages.
"""

Bytes = npt.NDArray[np.uint8]

_local = threading.local()


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """View the memory of a contiguous CPU tensor as bytes."""
    return run_bytes(tensor, 0) if tensor.numel() else np.empty(0, np.uint8)


def run_bytes(tensor: torch.Tensor, num_outer: int) -> Bytes:
    """View the memory of a CPU tensor as bytes, contiguous behind its first `num_outer` axes, which
    the result has.
    """
    num_bytes = math.prod(tensor.shape[num_outer:]) * tensor.itemsize
    strides = (*(step * tensor.itemsize for step in tensor.stride()[:num_outer]), 1)
    return np.asarray(_Memory(tensor, (*tensor.shape[:num_outer], num_bytes), strides))


class _Memory:
    """Gives numpy access to the memory of a tensor. After `tensor.numpy()` its storage could never
    be resized again.
    """

    def __init__(self, tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "shape": shape, "strides": strides, "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 3
        }  # fmt: skip


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor after asking for huge pages for its memory, which is filled three times
    as fast then.
    """
    if tensor.is_cpu and tensor.nbytes >= 2 * HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        # From page to page, as numpy does: tensors beside each other remain one mapping.
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        length = tensor.data_ptr() + tensor.nbytes - start
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE
        )
    return tensor


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's values are exactly its bytes in CPU memory, in row-major order."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def may_overlap(tensor: torch.Tensor) -> bool:
    """Tell whether several elements of a tensor may be one place in memory, as in expanded
    tensors.
    """
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(
        (stride, n) for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1
    ):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def bounce_buffer(purpose: str, num_bytes: int, device: DeviceLayer | None = None) -> Bytes:
    """Return this thread's scratch memory for a purpose; it is reused by the thread's next call.

    It begins at a multiple of `ALIGNMENT`. With a device it is page-locked, so that the device
    reaches it by itself.
    """
    purpose = purpose if device is None else f"{purpose} pinned"
    buffer: Bytes | None = getattr(_local, purpose, None)
    if buffer is None or len(buffer) < num_bytes:
        size, alignment = max(num_bytes, UNIT_BYTES), ALIGNMENT if device else HUGE_PAGE_BYTES
        # numpy asks for huge pages. What is skipped at the beginning takes no memory.
        memory = (
            device.pinned_memory(size + alignment).numpy()
            if device
            else np.empty(size + alignment, np.uint8)
        )
        buffer = memory[-memory.ctypes.data % alignment :]
        setattr(_local, purpose, buffer)
    return buffer[:num_bytes]


@contextlib.contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Keep the cyclic garbage collector from running.

    Planning makes many small tuples that all live on; the collector would walk over them again and
    again, which takes as long as the planning itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def estimate_available_memory(*, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """Estimate how many bytes of host memory this process can still take without swapping or being
    killed.

    The smaller of what the machine has available and what the memory limits of this process's
    control groups (of containers and batch jobs; version 1 and 2) leave. File cache that the kernel
    drops on demand counts as available.

    Args:
        proc: directory of the proc file system.
        cgroups: directory of the control groups.
    """
    free = [*_machine_memory(proc), *_cgroup_memory(proc, cgroups)]
    if not free:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, min(free))


def _machine_memory(proc: str) -> Iterator[int]:
    for line in _lines(os.path.join(proc, "meminfo")):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _cgroup_memory(proc: str, cgroups: str) -> Iterator[int]:
    """Yield what each memory limit that applies leaves: a process is also bound by those of the
    groups around its.
    """
    for line in _lines(os.path.join(proc, "self", "cgroup")):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for root in (cgroups, os.path.join(cgroups, "unified")):
                yield from _memory_upward(
                    root, path, "memory.max", "memory.current", "inactive_file"
                )
        elif "memory" in controllers.split(","):
            root = os.path.join(cgroups, "memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _memory_upward(root, path, *names)


def _memory_upward(
    root: str, path: str, limit_name: str, usage_name: str, cache_name: str
) -> Iterator[int]:
    # In a container the root may be the group itself, and the path one that is seen outside only.
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        group = os.path.join(root, *parts[:depth])
        limit = "".join(_lines(os.path.join(group, limit_name)))
        usage = "".join(_lines(os.path.join(group, usage_name)))
        if limit.isdigit() and usage.isdigit():
            stat = dict(line.split(" ", 1) for line in _lines(os.path.join(group, "memory.stat")))
            yield int(limit) - int(usage) + int(stat.get(cache_name, 0))


def _lines(path: str) -> Sequence[str]:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return ()

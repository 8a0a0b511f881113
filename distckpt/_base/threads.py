"""Moving bytes: what reading and writing share - units of work, a few threads, tensors as memory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from distckpt._base.device import DeviceLayer

BLOCK_BYTES = 1 << 20
"""Chunks are checksummed in blocks of this size."""
UNIT_BYTES = 8 << 20
"""One thread moves this much at a time; bounce buffers have this size."""
DIRECT_UNIT_BYTES = 16 << 20
"""The same for what is written past the page cache, where memory allows it: disks take longer requests faster."""
MAX_BUFFERS = 512
"""Buffers per vectored call, below every system's IOV_MAX."""
NUM_THREADS = max(2, min(4, os.cpu_count() or 1))
"""Enough to keep a disk busy while bytes are hashed; more threads than cores would only take turns."""
DEFAULT_INFLIGHT_BYTES = 256 << 20
"""How much memory data on its way may take."""
NUM_REQUESTS = 10
"""So many are made of an object store at the same time: they wait for the network, not for a processor."""
ALIGNMENT = 4096
"""Direct I/O wants addresses, positions and lengths in multiples of this."""

Bytes = npt.NDArray[np.uint8]

_Item = TypeVar("_Item")
_local = threading.local()


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """View the memory of a contiguous CPU tensor as bytes."""
    num_bytes = tensor.numel() * tensor.element_size()
    return np.asarray(_Memory(tensor, num_bytes)) if num_bytes else np.empty(0, np.uint8)


class _Memory:
    """The memory of a tensor, for numpy. `tensor.numpy()` would forbid ever after that its storage is resized."""

    def __init__(self, tensor: torch.Tensor, num_bytes: int) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 3
        }  # fmt: skip


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's values are exactly its bytes in CPU memory, in row-major order."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def bounce_buffer(purpose: str, num_bytes: int, device: DeviceLayer | None = None) -> Bytes:
    """Return this thread's scratch memory for a purpose; it is the caller's until the thread asks for it again.

    It begins at a multiple of `ALIGNMENT`. With a device it is page-locked, so that the device reaches it by itself.
    """
    purpose = purpose if device is None else f"{purpose} pinned"
    buffer: Bytes | None = getattr(_local, purpose, None)
    if buffer is None or len(buffer) < num_bytes:
        size = max(num_bytes, UNIT_BYTES) + ALIGNMENT
        memory = np.empty(size, np.uint8) if device is None else device.pinned_memory(size).numpy()
        buffer = memory[-memory.ctypes.data % ALIGNMENT :]
        setattr(_local, purpose, buffer)
    return buffer[:num_bytes]


@contextlib.contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Keep the cyclic garbage collector from running.

    Planning makes many small tuples that all live on; the collector would walk over them again and again, which takes
    as long as the planning itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def checksum(data: bytes | memoryview | Bytes) -> int:
    """Return the xxh3-64 digest of some bytes."""
    return xxhash.xxh3_64_intdigest(data)


def run_threads(function: Callable[[_Item], Any], items: Iterable[_Item], num_threads: int = NUM_THREADS) -> None:
    """Call `function` on every item in a few threads; the first error stops the rest and is raised."""
    work = list(items)
    if len(work) <= 1 or num_threads == 1:
        for item in work:
            function(item)
        return
    # next() on this is one step for the interpreter, so threads need no lock; a future for each item would cost more.
    upcoming = iter(work)
    errors: list[BaseException] = []

    def take_items() -> None:
        for item in upcoming:
            if errors:
                return
            try:
                function(item)
            except BaseException as error:
                errors.append(error)

    num_threads = min(num_threads, len(work))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="distckpt-io") as pool:
        running = [pool.submit(take_items) for _ in range(num_threads)]
        try:
            wait(running)
        except BaseException as error:
            # Such as Ctrl-C, which reaches the waiting thread only.
            errors.append(error)
            raise
    if errors:
        raise errors[0]


def num_threads_within(max_inflight_bytes: int) -> int:
    """Return how many threads may move a unit each; one always may."""
    return max(1, min(NUM_THREADS, max_inflight_bytes // UNIT_BYTES))


def direct_unit_within(max_inflight_bytes: int) -> int:
    """Return how much a thread may write past the page cache at a time."""
    return DIRECT_UNIT_BYTES if max_inflight_bytes >= NUM_THREADS * DIRECT_UNIT_BYTES else UNIT_BYTES


def num_requests_within(max_inflight_bytes: int) -> int:
    """Return how many requests of an object store may be under way, each with the memory of three units."""
    return max(1, min(NUM_REQUESTS, max_inflight_bytes // (3 * UNIT_BYTES)))


def allocate(fd: int, num_bytes: int) -> None:
    """Reserve disk space for a file, so that a full disk is found before anything is written.

    Uses the system call and not posix_fallocate, which writes zeros where the file system cannot reserve.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if num_bytes == 0 or not hasattr(libc, "fallocate"):
        return
    if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))

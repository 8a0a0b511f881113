"""Moving bytes: what reading and writing share - units of work, a few threads, tensors as memory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import xxhash

BLOCK_BYTES = 1 << 20
"""Chunks are checksummed in blocks of this size."""
UNIT_BYTES = 8 << 20
"""One thread moves this much at a time; bounce buffers have this size."""
MAX_BUFFERS = 512
"""Buffers per vectored call, below every system's IOV_MAX."""
NUM_THREADS = 4

Bytes = npt.NDArray[np.uint8]

_Item = TypeVar("_Item")
_local = threading.local()


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """View the memory of a contiguous CPU tensor as bytes."""
    # A tensor of one item counts as contiguous whatever its strides, but view() refuses most of them.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's values are exactly its bytes in CPU memory, in row-major order."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def bounce_buffer(purpose: str, num_bytes: int) -> Bytes:
    """Return this thread's scratch memory for a purpose; it is the caller's until the thread asks for it again."""
    buffer: Bytes | None = getattr(_local, purpose, None)
    if buffer is None or len(buffer) < num_bytes:
        buffer = np.empty(max(num_bytes, UNIT_BYTES), np.uint8)
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
    with ThreadPoolExecutor(min(num_threads, len(work)), thread_name_prefix="distckpt-io") as pool:
        futures = [pool.submit(function, item) for item in work]
        done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
        for future in futures:
            if future in done:
                future.result()


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

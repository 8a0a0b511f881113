"""Many reads of one file in one call of the system: Linux native asynchronous I/O, through `syscall`.

A strided slice is thousands of short runs. One system call each would need a Python loop over them; this takes arrays.
For files in the page cache the kernel does the reads before the call returns, without the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import sys

import numpy as np

from distckpt._geometry.region import IntArray

MAX_RUNS = 512
"""Reads per call of the system. All processes of a machine share 65536 by default."""


_CALLS = {
    "x86_64": {"setup": 206, "destroy": 207, "getevents": 208, "submit": 209},
    "aarch64": {"setup": 0, "destroy": 1, "getevents": 4, "submit": 2},
}.get(platform.machine() if sys.platform == "linux" and sys.maxsize > 2**32 else "", {})
"""Numbers of the system calls."""
_LIBC = ctypes.CDLL(None, use_errno=True) if _CALLS else None

_REQUEST = np.dtype([
    ("data", "u8"), ("key", "u4"), ("rw_flags", "u4"), ("opcode", "u2"), ("priority", "i2"), ("fd", "u4"),
    ("address", "u8"), ("num_bytes", "u8"), ("position", "i8"), ("reserved", "u8"), ("flags", "u4"), ("event_fd", "u4"),
])  # fmt: skip
"""The kernel's `struct iocb`; opcode 0 is a read."""
_EVENT = np.dtype([("data", "u8"), ("request", "u8"), ("result", "i8"), ("second", "i8")])
"""The kernel's `struct io_event`."""
_NOT_OFFERED = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)

# Closing a context takes the kernel tens of milliseconds, so they are kept: as many as threads read at the same time.
_free: list[int] = []
if hasattr(os, "register_at_fork"):
    # A child process does not inherit them.
    os.register_at_fork(after_in_child=_free.clear)


def is_available() -> bool:
    """Tell whether this system offers the calls: not where containers forbid them, nor outside of Linux."""
    context = _take_context()
    if context is not None:
        _free.append(context)
    return context is not None


def read_runs(fd: int, positions: IntArray, addresses: IntArray, num_bytes: int) -> IntArray | None:
    """Read runs of equal length from a file to memory, which the caller keeps alive.

    `positions` in the file and `addresses` in memory have shape (n,). Returns how many bytes of each run were read:
    fewer than `num_bytes` at the end of the file or after an interruption. None when the system or the file system does
    not offer these calls; some runs may have been read then.
    """
    context = _take_context()
    if context is None:
        return None
    results = np.empty(len(positions), np.int64)
    try:
        for start in range(0, len(positions), MAX_RUNS):
            batch = slice(start, start + MAX_RUNS)
            results[batch] = _read_batch(context, fd, positions[batch], addresses[batch], num_bytes)
    except BaseException:
        # Waits for the reads under way: their memory may not live on.
        _system_call("destroy", context)
        raise
    _free.append(context)
    results[(results == -errno.EINTR) | (results == -errno.EAGAIN)] = 0
    codes = -results[results < 0]
    if np.isin(codes, _NOT_OFFERED).any():
        return None
    if len(codes):
        raise OSError(int(codes[0]), os.strerror(int(codes[0])))
    return results


def _read_batch(context: int, fd: int, positions: IntArray, addresses: IntArray, num_bytes: int) -> IntArray:
    count = len(positions)
    requests = np.zeros(count, _REQUEST)
    requests["data"] = np.arange(count)
    requests["fd"] = fd
    requests["address"] = addresses
    requests["num_bytes"] = num_bytes
    requests["position"] = positions
    pointers = requests.ctypes.data + np.arange(count, dtype=np.uint64) * np.uint64(_REQUEST.itemsize)
    events = np.empty(count, _EVENT)
    results = np.zeros(count, np.int64)
    submitted = finished = 0
    while finished < count:
        step = _system_call("submit", context, count - submitted, pointers[submitted:].ctypes.data)
        if step <= 0:
            # Nothing is under way. The first request cannot be read this way, the others were not submitted.
            results[submitted:] = step or -errno.EINVAL
            return results
        submitted += step
        while finished < submitted:
            count_left = submitted - finished
            step = _system_call("getevents", context, count_left, count_left, events[finished:].ctypes.data, 0)
            if step < 0 and step != -errno.EINTR:
                raise OSError(-step, os.strerror(-step))
            finished += max(step, 0)
        results[events["data"][:finished]] = events["result"][:finished]
    return results


def _take_context() -> int | None:
    """Return a context that nobody uses, None when the system has none to give."""
    with contextlib.suppress(IndexError):
        return _free.pop()
    if not _CALLS:
        return None
    context = ctypes.c_ulong(0)
    result = _system_call("setup", MAX_RUNS, ctypes.addressof(context))
    return context.value if result == 0 else None


def _system_call(name: str, *arguments: int) -> int:
    """Make a system call; negative results are error numbers."""
    assert _LIBC is not None
    result = int(_LIBC.syscall(ctypes.c_long(_CALLS[name]), *map(ctypes.c_long, arguments)))
    return -ctypes.get_errno() if result == -1 else result

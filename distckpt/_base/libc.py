"""Calls below Python's files and memory: of the C library, and of the interpreter.

Where a system lacks an optional one, nothing happens.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 4096
"""Divisor of the addresses, positions and lengths of direct I/O."""
MAX_BUFFERS = 512
"""Buffers per vectored call, below every system's IOV_MAX."""
DIRECT = getattr(os, "O_DIRECT", 0)
"""Flag that opens a file for direct I/O, past the page cache; 0 where the system has none."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_OFFERED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)

_libc = ctypes.CDLL(None, use_errno=True)

copy_bytes = ctypes.PyDLL(None).memmove
copy_bytes.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
"""Copies a small number of bytes to an address, from another one. Meanwhile the thread keeps the
interpreter's lock, which it would otherwise have to wait for each time.
"""


# --- Reading and writing --------------------------------------------------------------------------


def read_into(fd: int, buffers: Sequence[_Bytes], position: int) -> int:
    """Fill buffers from a position of a file; return the bytes read."""
    total = 0
    for first in range(0, len(buffers), MAX_BUFFERS):
        batch = buffers[first : first + MAX_BUFFERS]
        num_wanted = sum(map(len, batch))
        num_read = more = os.preadv(fd, batch, position + total)
        while num_read < num_wanted and more:
            # A short read, because of a signal or on a network file system: go on until all bytes
            # are there, or the file ends.
            more = os.preadv(fd, _after(batch, num_read), position + total + num_read)
            num_read += more
        total += num_read
        if num_read < num_wanted:
            break
    return total


def write_all(fd: int, buffers: Sequence[_Bytes], position: int) -> None:
    """Write buffers one after the other."""
    for first in range(0, len(buffers), MAX_BUFFERS):
        batch = list(buffers[first : first + MAX_BUFFERS])
        num_wanted = sum(map(len, batch))
        written = os.pwritev(fd, batch, position)
        while written < num_wanted:
            # A short write: a signal, or almost no space left (then the next call says so).
            written += os.pwritev(fd, _after(batch, written), position + written)
        position += num_wanted


def _after(buffers: Sequence[_Bytes], num_bytes: int) -> list[_Bytes]:
    """Return the rest of some buffers behind their first bytes."""
    rest = []
    for buffer in buffers:
        if len(buffer) > num_bytes:
            rest.append(buffer[num_bytes:])
        num_bytes = max(0, num_bytes - len(buffer))
    return rest


def write_aligned(fd: int, data: _Bytes, position: int) -> int:
    """Write as much as direct I/O takes; return the bytes written.

    The file was opened for direct I/O.
    """
    written = 0
    while written < len(data) and written % ALIGNMENT == 0:
        try:
            written += os.pwrite(fd, data[written:], position + written)
        except OSError as error:
            # Some file systems agree to direct I/O when a file is opened, and refuse it later.
            if error.errno != errno.EINVAL:
                raise
            break
    return written


# --- Files ----------------------------------------------------------------------------------------


def reserve(fd: int, num_bytes: int, start: int = 0) -> None:
    """Reserve disk space for a file from a position on.

    A full disk shows before anything is written. This is the system call and not posix_fallocate,
    which writes zeros where the file system cannot reserve.
    """
    if num_bytes == 0 or not hasattr(_libc, "fallocate"):
        return
    if _libc.fallocate(fd, 0, ctypes.c_int64(start), ctypes.c_int64(num_bytes)) != 0:
        code = ctypes.get_errno()
        if code in _FULL_DISK:
            raise OSError(code, os.strerror(code))


def swap_names(first: str, second: str) -> bool:
    """Swap two files or directories in one atomic step.

    False where the file system cannot.
    """
    if not hasattr(_libc, "renameat2"):
        return False
    paths = (os.fsencode(first), os.fsencode(second))
    if _libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        if code in _NOT_OFFERED:
            return False
        raise OSError(code, os.strerror(code), first, None, second)
    return True


# --- Page cache -----------------------------------------------------------------------------------


def fetch(fd: int, position: int, num_bytes: int) -> None:
    """Let the system bring part of a file into the page cache."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, position, num_bytes, os.POSIX_FADV_WILLNEED)


# --- Memory ---------------------------------------------------------------------------------------


def ask_for_huge_pages(address: int, num_bytes: int) -> None:
    """Ask the system to back memory by huge pages."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # From page to page, as numpy does: adjacent tensors remain one mapping.
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        length = ctypes.c_size_t(address + num_bytes - start)
        _libc.madvise(ctypes.c_void_p(start), length, mmap.MADV_HUGEPAGE)


def keep_for_ever(value: Any) -> None:
    """Keep a value until the process is gone.

    Not even the exit of the interpreter frees it.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))

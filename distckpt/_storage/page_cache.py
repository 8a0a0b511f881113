"""What the page cache holds of a local file."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat

import numpy as np

MIN_DIRECT_BYTES = 32 << 20
"""Smaller files go through the page cache, as does whatever of a load is smaller on all ranks."""

_NUM_SAMPLES = 16

_libc = ctypes.CDLL(None)


def cached_fraction(fd: int, position: int, num_bytes: int) -> float:
    """Estimate from samples how much of a part of a file is in memory; 1.0 where the system does
    not tell.
    """
    low = position // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    starts = range(0, position + num_bytes - low, max(mmap.PAGESIZE, num_bytes // _NUM_SAMPLES))
    page, is_resident = ctypes.c_size_t(mmap.PAGESIZE), np.zeros(len(starts), np.uint8)
    try:
        # To ask for bytes and see whether they come at once (RWF_NOWAIT) would make the system
        # fetch them.
        with mmap.mmap(fd, position + num_bytes - low, prot=mmap.PROT_READ, offset=low) as mapped:
            address, result = np.frombuffer(mapped, np.uint8).ctypes.data, is_resident.ctypes.data
            for index, start in enumerate(starts):
                place = ctypes.c_void_p(address + start // mmap.PAGESIZE * mmap.PAGESIZE)
                if _libc.mincore(place, page, ctypes.c_void_p(result + index)):
                    return 1.0
    except (OSError, ValueError):
        return 1.0  # it cannot be mapped, or has become shorter
    return float(np.mean(is_resident & 1))


def may_be_read_directly(path: str) -> bool:
    """Tell whether a large file on a disk of this machine was not read yet, as far as the page
    cache remembers.

    Who reads such a file past the page cache leaves a mark in it with `mark_as_read`, so that the
    file goes through the cache when it is read a second time, and comes from memory the third time.
    """
    try:
        status = os.stat(path)
        # File systems without a block device below them are of networks, or in memory.
        is_on_disk = (
            hasattr(os, "O_DIRECT")
            and stat.S_ISREG(status.st_mode)
            and os.major(status.st_dev) != 0
        )
        if not is_on_disk or status.st_size < MIN_DIRECT_BYTES:
            return False
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not cached_fraction(fd, status.st_size // 2, 1)
    finally:
        os.close(fd)


def mark_as_read(fd: int) -> None:
    """Bring the page in the middle of a file into the page cache."""
    os.posix_fadvise(fd, os.fstat(fd).st_size // 2, 1, os.POSIX_FADV_WILLNEED)

"""What comes from the disk and what from memory, as the kernel tells."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest


def need_direct_reads(folder: Path) -> None:
    """Skip a test where files are on no disk, or on one that cannot be read past the page cache."""
    probe = folder / "probe"
    probe.write_bytes(bytes(4096))
    try:
        os.close(os.open(probe, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system has no O_DIRECT")
    if os.major(probe.stat().st_dev) == 0:
        pytest.skip("the file system has no block device below it")


def evict(folder: Path) -> None:
    """Take the files of a folder out of the page cache."""
    for place in folder.rglob("*"):
        if place.is_file() and place.stat().st_size:
            with place.open("rb") as file:
                os.fsync(file.fileno())
                # A page that something else holds at the moment stays.
                for _ in range(1000):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    if not _resident_pages(file.fileno()):
                        break
                else:
                    pytest.skip("the system keeps files in memory")


def _resident_pages(fd: int) -> int:
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
        content = np.frombuffer(mapped, np.uint8)
        flags = np.zeros(-(-len(content) // mmap.PAGESIZE), np.uint8)
        places = (ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(len(content)))
        assert ctypes.CDLL(None).mincore(*places, ctypes.c_void_p(flags.ctypes.data)) == 0
        del content
        return int((flags & 1).sum())


@contextlib.contextmanager
def counted_disk_reads() -> Iterator[SimpleNamespace]:
    """Count the bytes that this process has fetched from disks until the block ends:
    `num_bytes`.
    """
    counts = SimpleNamespace(num_bytes=-_read_bytes())
    try:
        yield counts
    finally:
        counts.num_bytes += _read_bytes()


def is_in_memory(file: Path, position: int) -> bool:
    """Tell whether a byte of a file comes without waiting for a disk. If not, the system may fetch
    it now.
    """
    with file.open("rb", buffering=0) as opened:
        try:
            return os.preadv(opened.fileno(), [bytearray(1)], position, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False


def _read_bytes() -> int:
    match = re.search(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.M)
    assert match is not None
    return int(match[1])

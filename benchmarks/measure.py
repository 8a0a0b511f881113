"""Clocks, peak memory, the page cache, and what figures depend on.

`ab.py` uses clocks and page cache with other versions of distckpt, which may lack what other
functions here need: these import it themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_T = TypeVar("_T")

MAX_SETTLE_SECONDS = 0.5


def timed(function: Callable[[], _T]) -> tuple[_T, float]:
    """Call a function; return its result and the seconds it took."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def time_together(function: Callable[[], Any]) -> float:
    """Return the seconds from a barrier to the moment the last rank is done. All ranks must call
    it.

    Without a process group, the seconds of this process.
    """
    if not dist.is_initialized():
        return timed(function)[1]
    dist.barrier()
    start = time.perf_counter()
    function()
    # The monotonic clock is the same in all processes of a machine.
    span = torch.tensor([-start, time.perf_counter()], dtype=torch.float64)
    dist.all_reduce(span, dist.ReduceOp.MAX)
    return float(span.sum())


def peak_memory_bytes(function: Callable[[], Any]) -> int:
    """Return by how much the resident memory of this process grew at most while `function` ran.

    The kernel keeps the maximum, so nothing is sampled. Pages of files that are mapped count while
    they are resident.
    """
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the peak begins again at what is resident now
    before = _status_bytes("VmRSS")
    function()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", _text("/proc/self/status"), re.M)
    assert match is not None
    return int(match[1]) * 1024


# --- The page cache -------------------------------------------------------------------------------


def at_rest(folder: str, settle_seconds: float = MAX_SETTLE_SECONDS) -> None:
    """Wait until nothing is being written to disk any more, and all files in a folder are in the
    page cache.

    Collective operation: all ranks must call it. On an object store it waits for the other ranks
    only.

    Args:
        folder: with everything that was written.
        settle_seconds: time to give deleted blocks back to the disk, which goes on in the
            background.
    """
    from distckpt._storage import locations

    gc.collect()  # nobody pays for what others left behind
    dist.barrier()
    if dist.get_rank() == 0 and locations.is_local(folder):
        for path in [*_files(folder), folder]:
            sync_file(path)
        fill_cache(folder)
        time.sleep(settle_seconds)
    dist.barrier()


def empty_cache(folder: str) -> str:
    """Drop the files of a folder, which are on disk, from the page cache.

    Returns:
        How: "posix_fadvise" or, as root, "drop_caches" (which empties the whole cache); empty when
            they stay.
    """
    from distckpt.cli._storage_speed import drop_from_page_cache

    if drop_from_page_cache(folder):
        return "posix_fadvise"
    with contextlib.suppress(OSError):
        with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as file:
            file.write("1")
        if drop_from_page_cache(folder):
            return "drop_caches"
    return ""


def sync_file(path: str) -> None:
    """Write the content of a file to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fill_cache(folder: str) -> None:
    """Bring the files of a folder into the page cache."""
    buffer = bytearray(16 << 20)
    for path in _files(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _files(folder: str) -> Iterator[str]:
    for place, _, names in os.walk(folder):
        yield from (os.path.join(place, name) for name in names)


# --- What figures depend on -----------------------------------------------------------------------


def machine_facts(folder: str | None) -> str:
    """Describe in one line what figures depend on; `folder` is where files go, a path or URL."""
    from distckpt._storage import locations

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = [f"{os.cpu_count()} cores", f"{memory_bytes / 2**30:.0f} GiB memory"]
    if folder:
        is_local = locations.is_local(folder)
        facts.append(
            f"{_file_system(folder)} file system"
            if is_local
            else f"{folder.partition('://')[0]} store"
        )
    facts += [
        f"Linux {platform.release().partition('-')[0]}",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
    ]
    return ", ".join(facts)


def _file_system(folder: str) -> str:
    """Return the type of the file system a folder is on."""
    place = os.path.realpath(folder)
    mounts = [line.split() for line in _text("/proc/self/mounts").splitlines()]
    inside = [(at, kind) for _, at, kind, *_ in mounts if os.path.commonpath([place, at]) == at]
    return max(inside, key=lambda mount: len(mount[0]))[1]


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()

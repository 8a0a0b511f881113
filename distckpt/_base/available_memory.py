"""The host memory that this process can still take."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence


def estimate_available_memory(*, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """Estimate the host memory in bytes that this process can still take.

    More would make the machine swap, or the process be killed. The estimate is the smaller of the
    machine's available memory and the memory left by the limits of this process's control groups
    (of containers and batch jobs; version 1 and 2). File cache that the kernel drops on demand
    counts as available.

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
    """Yield the memory that each applicable limit leaves.

    The limits of the groups around its own bind a process, too.
    """
    for line in _lines(os.path.join(proc, "self", "cgroup")):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            for root in (cgroups, os.path.join(cgroups, "unified")):
                yield from _memory_upward(root, path, *names)
        elif "memory" in controllers.split(","):
            root = os.path.join(cgroups, "memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _memory_upward(root, path, *names)


def _memory_upward(
    root: str, path: str, limit_name: str, usage_name: str, cache_name: str
) -> Iterator[int]:
    # In a container the root may be the group itself, and the path one that is visible outside
    # only.
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

"""What the benchmarks share: clocks, peak memory, gloo ranks, tables."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing

_T = TypeVar("_T")


def timed(function: Callable[[], _T]) -> tuple[_T, float]:
    """Call a function; return its result and the seconds it took."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def run_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any) -> None:
    """Call `function(rank, *arguments)` in `num_ranks` fresh processes that form a gloo process group.

    Raises:
        Exception: a rank failed; the others were ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        everything = (num_ranks, f"{folder}/rendezvous", function, arguments)
        torch.multiprocessing.spawn(_run_rank, everything, num_ranks, join=True)


def _run_rank(rank: int, num_ranks: int, rendezvous: str, function: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(rendezvous, num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()


def time_together(function: Callable[[], Any]) -> float:
    """Return the seconds from a barrier to the moment the last rank is done. Every rank calls.

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

    The kernel keeps the maximum, so nothing is sampled. Pages of files that are mapped count while they are resident.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is resident now
    before = _status_bytes("VmRSS")
    function()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert match is not None
    return int(match[1]) * 1024


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table whose columns after the first are numbers."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    aligned = [
        "| "
        + " | ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in [heads, *rows]
    ]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths))
    return "\n".join(f"{line} |" if line is not rule else f"{line}|" for line in [aligned[0], rule, *aligned[1:]])


def machine_facts(folder: str | None) -> str:
    """Describe in one line what figures depend on; `folder` is where files go."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = [f"{os.cpu_count()} cores", f"{memory_bytes / 2**30:.0f} GiB memory"]
    if folder:
        facts.append(f"{_file_system(folder)} file system")
    facts += [f"Linux {platform.release()}", f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    return ", ".join(facts)


def _file_system(folder: str) -> str:
    """Return the type of the file system a folder is on."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    inside = [(place, kind) for _, place, kind, *_ in mounts if Path(folder).resolve().is_relative_to(place)]
    return max(inside, key=lambda mount: len(mount[0]))[1]

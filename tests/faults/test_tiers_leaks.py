"""Many steps through all tiers: memory, descriptors, threads, sockets and files do not grow."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from pathlib import Path

import psutil
import pytest

from tests.support.harness import run, sum_over_ranks
from tests.support.tiers import manager_of, state_of

WARM_UP = 40
ALLOWED_GROWTH_BYTES = 16 << 20
"""In all steps together. A step of a rank has 400 KB, so that one in 10 steps left behind shows."""


def held_by(base: str) -> dict[str, object]:
    """Return what this process holds, and the files of all tiers."""
    gc.collect()
    process = psutil.Process()
    return {
        "memory": process.memory_info().rss,
        "descriptors": process.num_fds(),
        "sockets": len(process.net_connections()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "shared memory": len([name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]),
    }


def names_in(base: str) -> dict[str, list[str]]:
    """Return all names in the root and in the directory of the run on each host."""
    folders = [Path(base, "root"), *Path(base).glob("host*/run-*")]
    return {str(path): sorted(entry.name for entry in path.iterdir()) for path in folders}


def give_back_memory() -> None:
    """Let blocks of some size go back to the system when they are freed."""
    mmap_threshold = -3
    arena_max = -8
    libc = ctypes.CDLL(None)
    assert libc.mallopt(mmap_threshold, 1 << 16)
    assert libc.mallopt(arena_max, 1)


def save_many(rank: int, base: str, num_steps: int) -> tuple[dict, dict, dict]:
    give_back_memory()
    settings = {"peers": 1, "upload_every": 2, "keep_last": 2, "keep_local": 2}
    before: dict[str, object] = {}
    with manager_of(rank, base, 1, **settings) as manager:
        for step in range(1, num_steps + 1):
            manager.save(step, state_of(rank, 2, step))
            if step % 10 == 0:
                manager.wait(uploaded=True)
                assert manager.states[step].is_replicated
                assert manager.load(state_of(rank, 2, None))["step"] == step
                manager.wait(uploaded=True)
            if step == WARM_UP:
                sum_over_ranks(1)
                before = held_by(base)
                sum_over_ranks(1)
        sum_over_ranks(1)
        after = held_by(base)
        return before, after, names_in(base)


@pytest.mark.parametrize("num_steps", [60, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_nothing_grows_with_the_number_of_steps(tmp_path, num_steps):
    for before, after, names in run(save_many, 2, str(tmp_path), num_steps):
        growth = after.pop("memory") - before.pop("memory")
        assert growth < ALLOWED_GROWTH_BYTES, f"{growth / 2**20:.1f} MiB"
        assert after == before
        for folder, entries in names.items():
            steps = [name for name in entries if name.startswith("step_")]
            # On a host: those that are kept, one that is written, and at most four that wait.
            assert len(steps) <= 2 + 1 + 4, (folder, entries)
            assert len(entries) - len(steps) == 2, (folder, entries)

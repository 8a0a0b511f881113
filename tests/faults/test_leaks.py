"""Saving and loading again and again: memory, descriptors, threads, shared memory and files do not
grow.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import distckpt
from distckpt import CheckpointManager, ShardedObject, ShardedTensor
from tests.support.harness import error_of

TENSOR_BYTES = 4 << 20
ALLOWED_GROWTH_BYTES = 2 * TENSOR_BYTES
"""In all rounds together: as much as if two of them had left one tensor behind."""
WARM_UP = 8
PATIENCE = 120.0


def state_of_halves(value):
    weight = torch.full((TENSOR_BYTES // 4 // 256, 256), float(value))
    return {
        "halves": [
            ShardedTensor.from_rank_offsets("weight", half, (1, i, 2))
            for i, half in enumerate(weight.chunk(2, 1))
        ],
        "object": ShardedObject("object", {"value": value, "rng": torch.arange(5000)}, (1,), (0,)),
        "value": value,
    }


class Job:
    """What is done again and again in one directory; a method is one round."""

    def __init__(self, folder):
        self.folder = folder
        self.path = str(folder / "checkpoint")
        self.manager = CheckpointManager(folder / "run", keep_last=2)
        self.handle = None
        distckpt.save(state_of_halves(0), self.path)

    def save_and_load(self, number):
        distckpt.save(state_of_halves(number), self.path, overwrite=True)
        loaded = distckpt.load(state_of_halves(-1), self.path)
        assert loaded["value"] == number

    def save_in_the_background(self, number):
        self.handle = distckpt.async_save(state_of_halves(number), self.path, overwrite=True)
        if number % 2:
            self.handle.result(PATIENCE)
        distckpt.open(self.path).read_tensors()

    def save_with_a_limit(self, number):
        handle = distckpt.async_save(
            state_of_halves(number), self.path, overwrite=True, max_inflight_bytes=1 << 20
        )
        assert handle.staged.wait(PATIENCE)
        handle.result(PATIENCE)

    def keep_some(self, number):
        self.manager.save(number, state_of_halves(number), metrics={"loss": 1 / (1 + number)})
        if number % 5 == 0:
            self.manager.wait()
            assert self.manager.load(state_of_halves(-1))["value"] == number

    def consolidate_and_verify(self, number):
        distckpt.consolidate(self.path, self.folder / "export", overwrite=number > 0)
        assert distckpt.verify(self.path).is_whole

    def fail(self, number):
        """Saves and loads that go wrong early, in the middle and late, in the foreground and in the
        background.
        """

        def stop(num_bytes, total_bytes):
            raise OSError(28, "No space left on device")

        shard = ShardedTensor.from_rank_offsets("w", torch.ones(3), (0, 0, 2))
        absent = str(self.folder / "absent")
        failed = [
            error_of(distckpt.save, {"w": shard}, absent),
            error_of(distckpt.save, state_of_halves(number), self.path),
            error_of(distckpt.save, state_of_halves(number), absent, progress=stop),
            error_of(distckpt.load, state_of_halves(-1), absent),
            error_of(distckpt.load, {"w": shard}, self.path),
            error_of(distckpt.load, state_of_halves(-1), self.path, progress=stop),
            error_of(
                distckpt.async_save(state_of_halves(number), absent, progress=stop).result, PATIENCE
            ),
            error_of(distckpt.consolidate, self.path, absent, keys="nothing"),
        ]
        assert None not in failed, failed

    def settle(self):
        self.manager.wait()
        if self.handle is not None:
            self.handle.result(PATIENCE)

    def close(self):
        self.manager.close()
        distckpt.release_staging_memory()

    def everything(self, number):
        for name in JOBS:
            getattr(self, name)(number)


JOBS = [
    "save_and_load",
    "save_in_the_background",
    "save_with_a_limit",
    "keep_some",
    "consolidate_and_verify",
    "fail",
]


def num_kernel_threads(process):
    """Count threads as the system does, for which one that was joined may be there a moment
    longer.
    """
    counts = []
    for _ in range(20):
        counts.append(process.num_threads())
        time.sleep(0.05)
    return min(counts)


def resources_of(folder):
    """Return what this process holds, and which files lie in a directory."""
    gc.collect()
    process = psutil.Process()
    descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    temporary = [
        path
        for path in Path(os.environ["TMPDIR"]).rglob("*")
        if folder not in path.parents and path != folder
    ]
    return {
        "memory": process.memory_info().rss,
        "descriptors": sorted(os.readlink(link) for link in descriptors if os.path.lexists(link)),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "kernel threads": num_kernel_threads(process),
        "children": len(process.children(recursive=True)),
        "shared memory": [entry.path for entry in process.memory_maps() if "/dev/shm" in entry.path]
        + [name for name in os.listdir("/dev/shm") if str(process.pid) in name],
        "files": sorted(path.name for path in folder.iterdir()),
        "temporary files": sorted(str(path) for path in temporary),
    }


def watch(name, folder, rounds):
    """Do something again and again, and print what was held after the first rounds and after
    all.
    """
    job = Job(Path(folder))
    before = {}
    for number in range(1, rounds + 1):
        getattr(job, name)(number)
        if number == WARM_UP:
            job.settle()
            before = resources_of(job.folder)
    job.settle()
    print(json.dumps([before, resources_of(job.folder)]))
    job.close()


@pytest.mark.parametrize(
    ("name", "rounds"),
    [("everything", 14), *(pytest.param(name, 100, marks=pytest.mark.slow) for name in JOBS)],
)
def test_nothing_grows(name, rounds, tmp_path):
    folder, temporary = tmp_path / "work", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    # A process of its own: what others have allocated and freed would blur the measurement.
    program = (
        f"from tests.faults.test_leaks import watch; watch({name!r}, {str(folder)!r}, {rounds})"
    )
    # Blocks of some size come from the system and go back to it, so that what is held is what is in
    # use.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    environment = {**os.environ, **allocator, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = json.loads(done.stdout.splitlines()[-1])
    growth = after.pop("memory") - before.pop("memory")
    assert growth < ALLOWED_GROWTH_BYTES, f"{growth / 2**20:.1f} MiB in {rounds - WARM_UP} rounds"
    assert after == before
    assert all(entry.startswith(("checkpoint", "run", "export")) for entry in after["files"]), (
        after["files"]
    )
    assert os.listdir(temporary) == []

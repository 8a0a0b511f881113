"""Time saves and loads on a storage against raw writes and reads."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from distckpt._base.libc import DIRECT
from distckpt._operations.load import load
from distckpt._operations.save import save
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.mapping._sharded_tensor import ShardedTensor

REQUEST_BYTES = 16 << 20
OBJECT_BYTES = 64 << 20
NUM_THREADS = 4
_NUM_SAMPLES = 16
TENSOR_SHAPE = (1024, 4096)
TENSOR_BYTES = 16 << 20
"""Bytes of a tensor that one rank holds."""


class Task(NamedTuple):
    """A measurement: `num_runs` rounds of saves and loads in a folder.

    Each rank has `num_tensors` tensors.
    """

    folder: str
    num_ranks: int
    num_tensors: int
    num_runs: int

    @property
    def num_bytes(self) -> int:
        """The bytes of all ranks together."""
        return self.num_ranks * self.num_tensors * TENSOR_BYTES


class Contestant(NamedTuple):
    """A way to save and load.

    `save(durable)` returns when all is on disk if durable, `load(cold)` reads it again.
    """

    save: Callable[[bool], object]
    load: Callable[[bool], object]


def measure(rank: int, task: Task) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each round, by case and contestant; all ranks must call it."""
    make_raw = _raw_file if locations.is_local(task.folder) else _raw_objects
    contestants = {
        "distckpt": _distckpt(rank, task),
        "raw": make_raw(
            task.num_tensors * TENSOR_BYTES, locations.join(task.folder, f"rank-{rank}")
        ),
    }
    seconds: dict[str, dict[str, list[float]]] = {}
    # Round 0 warms up, and does not count.
    for number in range(task.num_runs + 1):
        if rank == 0:
            print(
                f"round {number} of {task.num_runs}" if number else "warming up",
                file=sys.stderr,
                flush=True,
            )
        # Each goes first by turns: the disk may still be busy with the files that the other has
        # deleted.
        for name in sorted(contestants, reverse=number % 2 == 1):
            for case, took in _measure_cases(contestants[name], Ranks(), task.folder):
                if number:
                    seconds.setdefault(case, {}).setdefault(name, []).append(took)
    return seconds


def _measure_cases(
    contestant: Contestant, ranks: Ranks, folder: str
) -> Iterator[tuple[str, float]]:
    """Yield each case of this storage, with its seconds."""
    is_local = locations.is_local(folder)
    if is_local:
        yield "save_unsynced", _time(ranks, lambda: contestant.save(False))
        _empty(ranks, folder)
    yield "save", _time(ranks, lambda: contestant.save(True))
    if is_local:
        if ranks.decide_json("empty the page cache", lambda: drop_from_page_cache(folder)):
            yield "cold_load", _time(ranks, lambda: contestant.load(True))
        contestant.load(False)  # brings all files into the page cache
    yield "warm_load", _time(ranks, lambda: contestant.load(False))
    _empty(ranks, folder)


def _time(ranks: Ranks, function: Callable[[], object]) -> float:
    """Return the seconds from a barrier until the last rank is done."""
    gc.collect()
    _wait_for_all(ranks)
    start = time.monotonic_ns()  # of the same clock in all processes of a machine
    function()
    spans = ranks.all_gather_numbers([start, time.monotonic_ns()])
    return float(spans[:, 1].max() - spans[:, 0].min()) / 1e9


def _empty(ranks: Ranks, folder: str) -> None:
    _wait_for_all(ranks)
    for name in locations.list_names(folder) if ranks.is_coordinator else ():
        locations.remove_tree(locations.join(folder, name))
    _wait_for_all(ranks)


def _wait_for_all(ranks: Ranks) -> None:
    ranks.all_gather_numbers([0])  # gloo does not wait if there is nothing to send


def _distckpt(rank: int, task: Task) -> Contestant:
    """Save a checkpoint, and load it into existing tensors, verifying checksums."""
    shards = {}
    for i in range(task.num_tensors):
        key = f"layers.{i}.weight"
        shards[key] = ShardedTensor.from_rank_offsets(
            key, torch.randn(TENSOR_SHAPE), (0, rank, task.num_ranks)
        )
    location = locations.join(task.folder, "checkpoint")
    return Contestant(
        lambda durable: save(dict(shards), location, durable=durable),
        lambda cold: load(dict(shards), location),
    )


def _raw_file(num_bytes: int, path: str) -> Contestant:
    """Write and read one file.

    Durable writes and cold reads go around the page cache, the rest through it.
    """
    memory = np.empty(num_bytes + 4096, np.uint8)
    memory = memory[-memory.ctypes.data % 4096 :][:num_bytes]  # aligned as direct I/O needs it
    memory[:] = np.random.default_rng().integers(
        0, 256, num_bytes, np.uint8
    )  # no storage can compress this

    def move(
        function: Callable[..., int],
        flags: int,
        is_direct: bool,
        is_durable: bool,
    ) -> None:
        def move_request(start: int) -> None:
            request = memory[start : start + REQUEST_BYTES]
            _check(function(fd, [request], start), len(request))

        # More threads keep a disk busy; copies from and to the page cache do not become faster.
        num_threads = 1
        if is_direct:
            num_threads = NUM_THREADS
        with _opened(path, flags, is_direct) as fd, ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(move_request, range(0, num_bytes, REQUEST_BYTES)))
            if is_durable:
                os.fsync(fd)
                locations.sync_directory(os.path.dirname(path))

    return Contestant(
        lambda durable: move(os.pwritev, os.O_CREAT | os.O_WRONLY, durable, durable),
        lambda cold: move(os.preadv, os.O_RDONLY, cold, False),
    )


def _raw_objects(num_bytes: int, prefix: str) -> Contestant:
    """Put and get objects of 64 MiB, a few at a time."""
    block = np.random.default_rng().bytes(OBJECT_BYTES)
    contents = {}
    for start in range(0, num_bytes, OBJECT_BYTES):
        contents[f"{prefix}-{start}"] = block[: num_bytes - start]

    def get(url: str) -> None:
        _check(len(locations.read_bytes(url)), len(contents[url]))

    def move(function: Callable[..., None], *arguments: Any) -> None:
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(function, contents, *arguments))

    return Contestant(
        lambda durable: move(locations.write_bytes, contents.values()), lambda cold: move(get)
    )


@contextlib.contextmanager
def _opened(path: str, flags: int, is_direct: bool) -> Iterator[int]:
    """Open a file, around the page cache if `is_direct` and possible."""
    try:
        fd = os.open(path, flags | (DIRECT if is_direct else 0), 0o666)
    except OSError:
        fd = os.open(path, flags, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def _check(num_moved: int, num_bytes: int) -> None:
    if num_moved != num_bytes:
        raise OSError(f"{num_moved} of {num_bytes} bytes were read or written")


def drop_from_page_cache(folder: str) -> bool:
    """Drop the files of a folder on disk from the page cache.

    Return False where that cannot be done.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    is_dropped = True
    for place, _, names in os.walk(folder):
        for name in names:
            is_dropped &= _drop_file(os.path.join(place, name))
    return is_dropped


def _drop_file(path: str) -> bool:
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        num_bytes = os.fstat(file.fileno()).st_size
        return num_bytes == 0 or not _is_cached(file.fileno(), num_bytes)


def _is_cached(fd: int, num_bytes: int) -> bool:
    """Whether samples of a file are in memory; True where the system does not tell."""
    mincore = ctypes.CDLL(None).mincore
    page = ctypes.c_size_t(mmap.PAGESIZE)
    state = ctypes.c_ubyte()
    try:
        # To ask for bytes and see whether they come at once (RWF_NOWAIT) would make the system
        # fetch them.
        with mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ) as mapped:
            address = np.frombuffer(mapped, np.uint8).ctypes.data
            for start in range(0, num_bytes, max(mmap.PAGESIZE, num_bytes // _NUM_SAMPLES)):
                place = ctypes.c_void_p(address + start // mmap.PAGESIZE * mmap.PAGESIZE)
                if mincore(place, page, ctypes.byref(state)) or state.value & 1:
                    return True
    except (OSError, ValueError):
        return True  # it cannot be mapped, or has become shorter
    return False

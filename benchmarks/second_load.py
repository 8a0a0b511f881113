"""A load of files that are not in memory, and a second one right after it.

    python benchmarks/second_load.py [--dir DIR] [--gb 1] [--ranks 1 2 4] [--runs 5]

Both together should take no longer than reading the same bytes once from the disk, in the fastest
way there is, and loading them once from the page cache. Ratios above 1 say by how much they do. Raw
reads are made with 4 threads of one process, each with a quarter of every file, or past the page
cache in requests of 8 MiB. The way with the lower median counts: the faster one of each round would
be the better of two draws. Two exports write twice, so they are compared with a raw read and two
exports from the page cache. What is read:

- same: each rank loads what it has saved, its rows.
- other: each rank loads columns.
- verify, export: one process reads everything.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from measure import empty_cache, sync_file, time_together, timed
from report import Cell, Report, figure, median, parser_of

import distckpt
from distckpt import ShardedTensor
from distckpt.cli._processes import run_ranks

WIDTH = 4096
NUM_TENSORS = 16
RAW_THREADS = 4
RAW_REQUEST_BYTES = 1 << 20
DIRECT_REQUEST_BYTES = 8 << 20


class Seconds(NamedTuple):
    """The times of one round: of raw reads through the page cache and past it, of a cold load, a
    second one and a third.
    """

    buffered: float
    direct: float
    first: float
    second: float
    warm: float


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()
    report = Report(arguments)
    report.about = f"{arguments.gb:g} GB in {NUM_TENSORS} tensors of float32."
    rows = []
    for num_ranks in arguments.ranks:
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            job = (folder, arguments.gb, arguments.runs)
            measured = run_ranks(measure, num_ranks, *job)
        rows += [row_of(num_ranks, name, rounds) for name, rounds in measured.items()]
    report.add(["", *COLUMNS], rows)
    report.finish()


COLUMNS = ("raw cold s", "first s", "second s", "warm s", "both / (raw + warm)")


def row_of(num_ranks: int, name: str, rounds: list[Seconds]) -> list[Cell]:
    """Return the row of a table about one case."""
    buffered, direct, first, second, warm = (list(column) for column in zip(*rounds, strict=True))
    raw = min(buffered, direct, key=statistics.median)
    medians = [statistics.median(runs) for runs in (raw, first, second, warm)]
    num_warm = 2 if name == "export" else 1
    ratio = (medians[1] + medians[2]) / (medians[0] + num_warm * medians[3])
    return [
        f"{num_ranks} rank(s), {name}",
        *(median(runs, "{:.3f}") for runs in (raw, first, second, warm)),
        figure(f"{ratio:.2f}", raw, first, second, warm),
    ]


def measure(rank: int, folder: str, gigabytes: float, num_rounds: int) -> dict[str, list[Seconds]]:
    """Measure all cases on one rank; return their rounds."""
    torch.set_num_threads(1)
    size = dist.get_world_size()
    num_rows = int(gigabytes * 1e9 / NUM_TENSORS / WIDTH / 4) // size * size
    path = f"{folder}/checkpoint"
    distckpt.save(state_of(rank, size, (num_rows, WIDTH), axis=0), path)
    if rank == 0:
        for file in files_of(path):
            sync_file(file)
    same = state_of(rank, size, (num_rows, WIDTH), axis=0)
    other = state_of(rank, size, (num_rows, WIDTH), axis=1)
    cases: dict[str, Callable[[], object]] = {
        "same": lambda: distckpt.load(same, path),
        "other": lambda: distckpt.load(other, path),
    }
    if size == 1:
        cases["verify"] = lambda: distckpt.verify(path)
        cases["export"] = lambda: export(path, f"{folder}/export")
    found = {}
    for name, case in cases.items():
        case()
        found[name] = [one_round(rank, path, case) for _ in range(num_rounds)]
    return found


def state_of(rank: int, size: int, shape: tuple[int, int], axis: int) -> dict[str, ShardedTensor]:
    """Return what a rank holds of all tensors, divided along an axis."""
    own = [extent // size if axis == number else extent for number, extent in enumerate(shape)]
    place = (axis, rank, size)
    return {
        f"layers.{number}": ShardedTensor.from_rank_offsets(
            f"layers.{number}", torch.randn(own), place
        )
        for number in range(NUM_TENSORS)
    }


def export(path: str, output: str) -> None:
    """Export a checkpoint, and remove the export."""
    distckpt.consolidate(path, output)
    shutil.rmtree(output)


def one_round(rank: int, path: str, case: Callable[[], object]) -> Seconds:
    """Time a raw cold read, a cold and a second load, and one more that is warm."""
    buffered = cold(rank, path, lambda: read_raw(path))
    direct = cold(rank, path, lambda: read_direct(path))
    first = cold(rank, path, case, of_all=True)
    return Seconds(buffered, direct, first, time_together(case), time_together(case))


def cold(rank: int, path: str, case: Callable[[], object], of_all: bool = False) -> float:
    """Time something after dropping the files from the page cache; on rank 0 alone unless it is
    `of_all`.
    """
    dist.barrier()
    if rank == 0 and not empty_cache(path):
        raise SystemExit("The files stay in the page cache: run this as root, or on another disk.")
    dist.barrier()
    if of_all:
        return time_together(case)
    seconds = timed(case)[1] if rank == 0 else 0.0
    dist.barrier()
    return seconds


def files_of(path: str) -> list[str]:
    """Return the files with tensors."""
    return [entry.path for entry in os.scandir(f"{path}/tensors")]


def read_raw(path: str) -> None:
    """Read all files through the page cache, a quarter in each thread."""

    def read(item: tuple[str, int, int]) -> None:
        file, start, stop = item
        buffer = np.empty(RAW_REQUEST_BYTES, np.uint8)
        with open(file, "rb", buffering=0) as opened:
            for position in range(start, stop, RAW_REQUEST_BYTES):
                os.preadv(opened.fileno(), [buffer[: stop - position]], position)

    for file in files_of(path):
        size = os.path.getsize(file)
        step = -(-size // RAW_THREADS)
        parts = [(file, start, min(start + step, size)) for start in range(0, size, step)]
        with ThreadPoolExecutor(RAW_THREADS) as pool:
            list(pool.map(read, parts))


def read_direct(path: str) -> None:
    """Read all files past the page cache, in turn by all threads."""

    def read(item: tuple[str, int]) -> None:
        file, position = item
        memory = np.empty(DIRECT_REQUEST_BYTES + 4096, np.uint8)
        buffer = memory[-memory.ctypes.data % 4096 :][:DIRECT_REQUEST_BYTES]
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(fd, [buffer], position)
        finally:
            os.close(fd)

    parts = [
        (file, position)
        for file in files_of(path)
        for position in range(0, os.path.getsize(file), DIRECT_REQUEST_BYTES)
    ]
    with ThreadPoolExecutor(RAW_THREADS) as pool:
        list(pool.map(read, parts))


if __name__ == "__main__":
    main()

"""What saving in the background costs training: seconds it waits, and how much slower it is
meanwhile.

    python benchmarks/async_save.py [--gb 2] [--ranks 2] [--runs 5] [--dir DIR]
        [--only NAME ...]

Distckpt's `async_save` beside DCP's and Megatron Core's. The state is that of save_load.py. All
figures are those of the rank that took longest, medians over the runs:

- blocked, first / later: seconds from the call to the return. The first call also allocates memory,
  unless that was reserved.
- x copy: the later ones divided by the time of one copy (`numpy.copyto`, one thread) of a rank's
  tensors.
- x save: the later ones divided by the time of the same library's blocking save.
- step: how much longer a step takes while a save goes on; a step is a product of matrices on one
  thread.
- Python: how much slower a loop in pure Python counts meanwhile. This holds the interpreter's lock
  all the time, so what is lost is the share of time in which the background holds it, plus what
  processors and memory are shared for.
- on disk: seconds from the call until the save was done, training all the while.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contest.contestants import chosen, contestants
from contest.state import State, llama_sizes, llama_state, local_bytes
from measure import time_together
from report import Cell, Report, figure, median, parser_of, ratio

import distckpt
from distckpt.cli._processes import run_ranks

STEP_SIZE = 384
COUNT_SECONDS = 0.02
IDLE_STEPS = 50


class Background(NamedTuple):
    """A way to save in the background: `start` returns a function that tells whether the save is
    done.
    """

    name: str
    contestant: str
    start: Callable[[Any, str], Callable[[], bool]]
    reserve: Callable[[Any], object] = lambda state: None


def start_distckpt(state: Any, folder: str) -> Callable[[], bool]:
    handle = distckpt.async_save(state, folder)
    return lambda: handle.done() and handle.result() is not None


def reserve_for_distckpt(state: Any) -> None:
    distckpt.release_staging_memory()
    distckpt.reserve_staging_memory(state).result()


def start_dcp(state: Any, folder: str) -> Callable[[], bool]:
    future = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(folder))
    return lambda: future.done() and future.result() is not None


def start_megatron(state: Any, folder: str) -> Callable[[], bool]:
    package = "megatron.core.dist_checkpointing"
    queue = importlib.import_module(f"{package}.strategies.async_utils").AsyncCallsQueue()
    os.makedirs(folder, exist_ok=True)
    request = importlib.import_module(package).save(state, folder, async_sharded_save=True)
    queue.schedule_async_request(request)
    return lambda: bool(queue.maybe_finalize_async_calls())


WAYS = [
    Background("distckpt async_save", "distckpt", start_distckpt),
    Background("distckpt, reserved", "distckpt", start_distckpt, reserve_for_distckpt),
    Background("DCP async_save", "DCP FileSystemWriter", start_dcp),
    Background("Megatron Core async", "Megatron Core fully parallel", start_megatron),
]


def main() -> None:
    """Run all ways in fresh processes, and print."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--gb", type=float, default=2.0, help="size of the state, all ranks together"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="ways whose name begins with one of these")
    arguments = parser.parse_args()
    report = Report(arguments)
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="distckpt-benchmark-") as folder:
        rows, num_bytes, copy_seconds = run_ranks(run_rank, arguments.ranks, arguments, folder)
    report.about = (
        f"{num_bytes / 1e9:.2f} GB on {arguments.ranks} gloo ranks; "
        f"one copy takes {copy_seconds:.3f} s."
    )
    report.add(["", "first s", "later s", "x copy", "x save", "step", "Python", "on disk s"], rows)
    report.finish()


def run_rank(
    rank: int, arguments: argparse.Namespace, folder: str
) -> tuple[list[list[Cell]], int, float]:
    """Measure everything in one rank; return rows, the bytes of all ranks, and the seconds of one
    copy.
    """
    torch.set_num_threads(1)
    state = llama_state(llama_sizes(arguments.gb))
    target = np.ones(sum(part.num_bytes for part in state.values()), np.uint8)
    copies = [time_copy(state, target) for _ in range(arguments.runs)]
    del target
    rows: list[list[Cell]] = []
    for way in WAYS:
        if arguments.only and not way.name.startswith(tuple(arguments.only)):
            continue
        found = chosen(contestants(), [way.contestant])
        if not found:
            rows.append([way.name, *["not installed"] * 7])
            continue
        prepared = found[0].prepare(state)
        way.reserve(prepared)
        saves = [timed_save(found[0].save, prepared, f"{folder}/c") for _ in range(arguments.runs)]
        steps = [measure(way, prepared, folder, work_of_a_step) for _ in range(arguments.runs + 1)]
        counts = [measure(way, prepared, folder, work_of_counting) for _ in range(arguments.runs)]
        later = [blocked for blocked, _, _ in steps[1:]]
        rows.append(
            [
                way.name,
                f"{steps[0][0]:.3f}",
                median(later, "{:.3f}"),
                ratio(later, copies),
                ratio(later, saves),
                percent([slower for _, slower, _ in steps[1:]]),
                percent([slower for _, slower, _ in counts]),
                median([seconds for _, _, seconds in steps[1:]]),
            ]
        )
    total = torch.tensor(local_bytes(state))
    dist.all_reduce(total)
    return rows, int(total), statistics.median(copies)


def percent(slower: list[float]) -> Cell:
    """Return by how much work was slower."""
    return figure(f"{100 * statistics.median(slower):+.0f} %", [1 + each for each in slower])


def measure(
    way: Background, prepared: Any, folder: str, work: Callable[[], float]
) -> tuple[float, float, float]:
    """Save once in the background while working.

    Returns:
        Seconds that the call took, by how much slower work was until the save was done, and when
        that was; each on the rank that took longest.
    """
    idle = statistics.mean(work() for _ in range(IDLE_STEPS))
    dist.barrier()
    started = time.perf_counter()
    is_done = way.start(prepared, f"{folder}/c")
    blocked = time.perf_counter() - started
    costs = [work()]
    while not is_done():
        costs.append(work())
    figures = torch.tensor(
        [blocked, statistics.mean(costs) / idle - 1, time.perf_counter() - started]
    )
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    remove(f"{folder}/c")
    return float(figures[0]), float(figures[1]), float(figures[2])


def work_of_a_step() -> float:
    """Return the seconds that a product of matrices takes."""
    factor = torch.ones(STEP_SIZE, STEP_SIZE)
    started = time.perf_counter()
    for _ in range(4):
        factor @ factor
    return time.perf_counter() - started


def work_of_counting() -> float:
    """Return the seconds that a loop needs to count by one."""
    number, end = 0, time.perf_counter() + COUNT_SECONDS
    while time.perf_counter() < end:
        number += 1
    return COUNT_SECONDS / number


def time_copy(state: State, target: npt.NDArray[np.uint8]) -> float:
    """Return the seconds that the slowest rank needs to copy its tensors into memory that is there
    already.
    """

    def copy() -> None:
        start = 0
        for part in state.values():
            np.copyto(
                target[start : start + part.num_bytes],
                part.local.view(-1).view(torch.uint8).numpy(),
            )
            start += part.num_bytes

    return time_together(copy)


def timed_save(save: Callable[[Any, str], Any], prepared: Any, location: str) -> float:
    """Return the seconds of a blocking save."""
    seconds = time_together(lambda: save(prepared, location))
    remove(location)
    return seconds


def remove(location: str) -> None:
    """Delete a checkpoint and let the disk come to rest."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(location)
        os.sync()
    dist.barrier()


if __name__ == "__main__":
    main()

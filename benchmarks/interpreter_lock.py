"""What share of the time a background save holds the interpreter's lock.

    python benchmarks/interpreter_lock.py [--gb 1] [--runs 7] [--dir DIR]

A loop in pure Python counts on a processor of its own, and everything else that the process does
runs on another one (Linux, two processors or more). What the loop loses while a save goes on is the
time in which others hold the lock, plus what the machine itself takes (memory, interrupts). The
same loop in a process beside the saving one loses only the latter. Medians over the runs.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection

import torch
from report import Report, figure, parser_of

import distckpt
from distckpt import ShardedTensor

COUNT_SECONDS = 0.02
IDLE_COUNTS = 50


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__, runs=7)
    parser.add_argument("--gb", type=float, default=1.0)
    arguments = parser.parse_args()
    report = Report(arguments)
    report.about = f"{arguments.gb:g} GB."
    torch.set_num_threads(1)
    here, elsewhere = sorted(os.sched_getaffinity(0))[:2]
    num_tensors = 64
    size = int(arguments.gb * 1e9) // 4 // num_tensors
    tensors = {f"w{i}": torch.full((size,), float(i)) for i in range(num_tensors)}
    state = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}
    ours, theirs = multiprocessing.Pipe()
    beside = multiprocessing.get_context("spawn").Process(
        target=count_beside, args=(theirs, here), daemon=True
    )
    beside.start()
    within: list[float] = []
    without: list[float] = []
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="distckpt-benchmark-") as folder:
        # The first save allocates memory and starts threads.
        save(state, folder)
        for _ in range(arguments.runs):
            within.append(loss_within(state, folder, here, elsewhere))
            without.append(loss_beside(state, folder, ours, elsewhere))
    beside.kill()
    beside.join()
    rows = [
        [
            name,
            figure(f"{100 * statistics.median(losses):.1f} %", [1 - loss for loss in losses]),
            f"{100 * min(losses):.1f} to {100 * max(losses):.1f} %",
        ]
        for name, losses in (("in the saving process", within), ("in a process beside it", without))
    ]
    report.add(["the loop loses", "median", "range"], rows)
    report.finish()


def save(state: dict[str, ShardedTensor], folder: str) -> distckpt.SaveHandle:
    """Save in the background, and wait for it."""
    handle = distckpt.async_save(state, f"{folder}/c")
    handle.result()
    shutil.rmtree(f"{folder}/c")
    os.sync()
    return handle


def loss_within(state: dict[str, ShardedTensor], folder: str, here: int, elsewhere: int) -> float:
    """Return what share of its speed a loop in this process loses while a save goes on."""
    os.sched_setaffinity(0, {here})
    idle = statistics.mean(count() for _ in range(IDLE_COUNTS))
    handle = distckpt.async_save(state, f"{folder}/c")
    costs = []
    while not handle.done():
        move_others(elsewhere)
        costs.append(count())
    os.sched_setaffinity(0, {here, elsewhere})
    handle.result()
    shutil.rmtree(f"{folder}/c")
    os.sync()
    return 1 - idle / statistics.mean(costs)


def loss_beside(
    state: dict[str, ShardedTensor], folder: str, ours: Connection, elsewhere: int
) -> float:
    """Return what share of its speed a loop in another process loses while a save goes on."""
    ours.send("idle")
    idle = ours.recv()
    handle = distckpt.async_save(state, f"{folder}/c")
    move_others(elsewhere)
    ours.send("busy")
    while not handle.done():
        move_others(elsewhere)
        time.sleep(COUNT_SECONDS)
    ours.send("stop")
    cost = ours.recv()
    handle.result()
    shutil.rmtree(f"{folder}/c")
    os.sync()
    return 1 - idle / cost


def count_beside(connection: Connection, here: int) -> None:
    """Count when asked to, on one processor."""
    os.sched_setaffinity(0, {here})
    while connection.recv() == "idle":
        connection.send(statistics.mean(count() for _ in range(IDLE_COUNTS)))
        connection.recv()
        costs = []
        while not connection.poll():
            costs.append(count())
        connection.recv()
        connection.send(statistics.mean(costs))


def move_others(processor: int) -> None:
    """Have all threads of this process but the calling one run on one processor."""
    for thread in map(int, os.listdir("/proc/self/task")):
        if thread != threading.get_native_id():
            try:
                os.sched_setaffinity(thread, {processor})
            except ProcessLookupError:
                continue


def count() -> float:
    """Return the seconds that a loop needs to count by one."""
    number, end = 0, time.perf_counter() + COUNT_SECONDS
    while time.perf_counter() < end:
        number += 1
    return COUNT_SECONDS / number


if __name__ == "__main__":
    main()

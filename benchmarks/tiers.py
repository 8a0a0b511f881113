"""Managers with local directories: what their saves cost training, and how fast they restart.

    python benchmarks/tiers.py [--ranks 2] [--gb 0.5] [--restart-gb 2] [--runs 5] [--dir DIR]

Each rank is a host with a directory of its own. The first table has the seconds that a save keeps
training, the seconds until all of it is done, how much longer a training step takes meanwhile (a
product of matrices on one thread), and the bytes that cross the network, counted by the system on
the loopback interface, per byte of a step. The second one has restarts by twice as many ranks,
which have moved: each wants what another host has. The floor is a plain copy of the same bytes from
the same ranks over gloo, in pieces of 16 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import time_together
from report import Cell, Report, figure, median, parser_of, ratio

import distckpt
from distckpt import CheckpointManager, ShardedTensor
from distckpt.cli._processes import run_ranks

NUM_TENSORS = 16
WIDTH = 1024
STEP_SIZE = 384
IDLE_STEPS = 200
PIECE_BYTES = 16 << 20


def main() -> None:
    """Print the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gb", type=float, default=0.5, help="size of the state that is saved")
    parser.add_argument(
        "--restart-gb", type=float, default=2.0, help="size of the one that is loaded"
    )
    arguments = parser.parse_args()
    report = Report(arguments)
    report.about = (
        f"{arguments.gb:g} GB are saved by {arguments.ranks} hosts of one gloo rank, and "
        f"{arguments.restart_gb:g} GB are loaded by twice as many ranks."
    )
    with tempfile.TemporaryDirectory(dir=arguments.dir or "/dev/shm") as folder:
        rows = run_ranks(measure_saves, arguments.ranks, arguments, folder)
        report.add(["save", "blocked s", "x async_save", "done s", "step", "network"], rows)
        shutil.rmtree(folder)
        run_ranks(save_once, arguments.ranks, arguments, folder)
        rows = run_ranks(measure_restarts, 2 * arguments.ranks, arguments, folder)
        report.add(["restart", "seconds", "x plain copy"], rows)
    report.finish()


def state_of(rank: int, num_ranks: int, gb: float) -> dict[str, Any]:
    """Return the rows of each tensor that a rank has."""
    # As many in total for all numbers of ranks up to 64.
    rows = int(gb * 1e9 / NUM_TENSORS / WIDTH / 4 / 64) * 64 // num_ranks
    state = {}
    for number in range(NUM_TENSORS):
        values = torch.full((rows, WIDTH), float(rank + number))
        place = (0, rank, num_ranks)
        state[f"t{number}"] = ShardedTensor.from_rank_offsets(f"t{number}", values, place)
    return state


def num_bytes_of(state: dict[str, Any]) -> int:
    """Return the bytes of a state on this rank."""
    return sum(part.data.nbytes for part in state.values())


# --- Saves ----------------------------------------------------------------------------------------


def measure_saves(rank: int, arguments: argparse.Namespace, folder: str) -> list[list[Cell]]:
    """Save in all ways by turns; return rows of medians."""
    torch.set_num_threads(1)
    state = state_of(rank, dist.get_world_size(), arguments.gb)
    local = f"{folder}/host{rank}"
    blocked: dict[str, list[float]] = {}
    done: dict[str, list[float]] = {}
    slower: dict[str, list[float]] = {}
    carried: dict[str, list[float]] = {}
    with contextlib.ExitStack() as managers:
        ways: dict[str, Callable[[int], Callable[[], bool]]] = {
            "async_save": _async_save(state, folder)
        }
        for name, peers in (("local=", 0), ("local=, peers=1", 1)):
            # Uploads stay out of the figures: the first step is the only one.
            manager = CheckpointManager(
                f"{folder}/root{peers}", local=f"{local}-{peers}", peers=peers, upload_every=10**6
            )
            managers.callback(manager._close, has_failed=True)
            manager.save(0, state).result()
            manager.wait(uploaded=True)
            ways[name] = _save(manager, state, bool(peers))
        for number in range(1, arguments.runs + 2):
            for name, way in ways.items():
                figures = _timed(way, number)
                if number > 1:
                    for column, value in zip(
                        (blocked, done, slower, carried), figures, strict=True
                    ):
                        column.setdefault(name, []).append(value)
    total = num_bytes_of(state) * dist.get_world_size()
    rows: list[list[Cell]] = []
    for name in ways:
        network = statistics.median(carried[name]) / total
        step = statistics.median(slower[name])
        rows.append(
            [
                name,
                median(blocked[name], "{:.3f}"),
                ratio(blocked[name], blocked["async_save"]),
                median(done[name]),
                figure(f"{100 * step:+.0f} %", [1 + each for each in slower[name]]),
                f"{network:.2f}",
            ]
        )
    return rows


def _async_save(state: dict[str, Any], folder: str) -> Callable[[int], Callable[[], bool]]:
    def start(number: int) -> Callable[[], bool]:
        path = f"{folder}/plain"
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        return distckpt.async_save(state, path).done

    return start


def _save(
    manager: CheckpointManager, state: dict[str, Any], has_peers: bool
) -> Callable[[int], Callable[[], bool]]:
    def start(number: int) -> Callable[[], bool]:
        handle = manager.save(number, state)

        def is_done() -> bool:
            known = manager.states.get(number)
            return handle.done() and known is not None and known.is_replicated >= has_peers

        return is_done

    return start


def _timed(
    start: Callable[[int], Callable[[], bool]], number: int
) -> tuple[float, float, float, float]:
    """Save once while training; return the figures of the slowest rank."""
    idle = _seconds_per_step(lambda count: count >= IDLE_STEPS)
    dist.barrier()
    carried = _carried_bytes()
    began = time.perf_counter()
    is_done = start(number)
    blocked = time.perf_counter() - began
    step = _seconds_per_step(lambda count: is_done())
    done = time.perf_counter() - began
    figures = torch.tensor([blocked, done, step / idle - 1], dtype=torch.float64)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    return (*figures.tolist(), float(_carried_bytes() - carried))


def _seconds_per_step(is_last: Callable[[int], bool]) -> float:
    matrix = torch.rand(STEP_SIZE, STEP_SIZE)
    began = time.perf_counter()
    count = 0
    while True:
        matrix @ matrix
        count += 1
        if is_last(count):
            return (time.perf_counter() - began) / count


def _carried_bytes() -> int:
    """Return the bytes that the loopback interface has carried."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


# --- Restarts -------------------------------------------------------------------------------------


def save_once(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """Save a step to the hosts."""
    state = state_of(rank, dist.get_world_size(), arguments.restart_gb)
    manager = CheckpointManager(
        f"{folder}/root", local=f"{folder}/host{rank}", upload_every=10**6, keep_local=1
    )
    manager.save(1, state).result()
    manager.wait(uploaded=True)
    manager._close(has_failed=True)


def measure_restarts(rank: int, arguments: argparse.Namespace, folder: str) -> list[list[Cell]]:
    """Load what other hosts have, and copy as much, by turns; return rows of medians."""
    torch.set_num_threads(1)
    num_ranks = dist.get_world_size()
    state = state_of(rank, num_ranks, arguments.restart_gb)
    # Ranks are in pairs on the hosts, in the opposite order.
    local = f"{folder}/host{(num_ranks - 1 - rank) // 2}"
    manager = CheckpointManager(f"{folder}/root", local=local, upload_every=10**6)
    peer = num_ranks - 1 - rank
    memory = torch.empty(num_bytes_of(state), dtype=torch.uint8)
    ways: dict[str, Callable[[], object]] = {
        "plain copy over gloo": lambda: _copy(memory, peer),
        "manager.load": lambda: manager.load(state),
        "manager.load(verify=False)": lambda: manager.load(state, verify=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.runs + 1):
        for name, way in ways.items():
            took = time_together(way)
            if number:
                seconds[name].append(took)
    manager._close(has_failed=True)
    floor = seconds["plain copy over gloo"]
    return [[name, median(runs, "{:.3f}"), ratio(runs, floor)] for name, runs in seconds.items()]


def _copy(memory: torch.Tensor, peer: int) -> None:
    """Receive as many bytes as are sent, in pieces."""
    sent = torch.ones(min(PIECE_BYTES, memory.nbytes), dtype=torch.uint8)
    for start in range(0, memory.nbytes, PIECE_BYTES):
        piece = memory[start : start + PIECE_BYTES]
        works = [dist.irecv(piece, peer), dist.isend(sent[: piece.nbytes], peer)]
        for work in works:
            work.wait()


if __name__ == "__main__":
    main()

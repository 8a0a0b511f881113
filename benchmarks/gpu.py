"""Save out of and load into the memory of one GPU, beside plain copies of the same bytes in
page-locked memory.

    python benchmarks/gpu.py [--gb 4] [--runs 7] [--dir DIR] [--device cuda]

- out: a copy into page-locked memory that is there already; the page-locked ring of a save, without
  writing anything; the time until `async_save` returns; whole saves; safetensors.
- in: the file read into page-locked memory and copied from there, both in the same threads; loads
  of distckpt, safetensors and, where it is installed, fastsafetensors. Warm: files are in the page
  cache; cold: they were dropped.
- steps: products of matrices on the device while `async_save` goes on in the background.
- page-locked memory: how much torch got from the system for the first and for later calls.

Contestants take turns, medians over the runs; a round before the first is not counted, and compares
what was loaded. Without a GPU this says so and ends. `--device cpu` shows that the script works;
its figures mean nothing.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import empty_cache, fill_cache, sync_file, timed
from report import Cell, Report, figure, median, parser_of, ratio
from safetensors.torch import load_file, save_file

import distckpt
from distckpt import ShardedTensor
from distckpt._base.memory import bounce_buffer
from distckpt._base.threads import UNIT_BYTES, run_threads
from distckpt._format.checksum import BLOCK_BYTES
from distckpt._geometry.units import units_of
from distckpt._io.write import file_of_tensors
from distckpt.cli._bench import scratch_folder

TENSOR_BYTES = 64 << 20
IDLE_STEPS = 50

Tensors = dict[str, torch.Tensor]


def main() -> None:
    """Measure everything, print and write it."""
    parser = parser_of(__doc__, runs=7)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return
    report = Report(arguments)
    shape = (TENSOR_BYTES // 2 // 4096, 4096)
    num_tensors = max(1, round(arguments.gb * 1e9 / TENSOR_BYTES))
    tensors = {
        f"layers.{i}.weight": torch.randn(shape, device=device).bfloat16()
        for i in range(num_tensors)
    }
    num_bytes = num_tensors * TENSOR_BYTES
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    report.about = f"{name}, {num_bytes / 1e9:.2f} GB in tensors of {TENSOR_BYTES >> 20} MiB."
    with scratch_folder(arguments.dir) as folder:
        pinned_rows = page_locked(tensors, device, folder)
        out = rounds(ways_out(tensors, device, folder), arguments.runs)
        report.add(["out of the device", *HEADS], rows_of(out, "page-locked copy", num_bytes))
        place = written(tensors, Path(folder) / "in")
        for warmth in ("warm", "cold"):
            if warmth == "cold" and not empty_cache(str(place)):
                report.notes.append("Cold loads were left out: the files stay in the page cache.")
                continue
            found = rounds(ways_in(tensors, device, place, warmth == "cold"), arguments.runs)
            report.add(
                [f"into the device, {warmth}", *HEADS], rows_of(found, "read and copy", num_bytes)
            )
        row = steps(tensors, device, folder, arguments.runs)
        report.add(["steps", "ms alone", "ms during a save", "slower"], [row])
    report.add(
        ["page-locked memory from the system", "first: blocks", "MB", "later: blocks", "MB"],
        pinned_rows,
    )
    report.finish()


def state_of(tensors: Tensors) -> dict[str, ShardedTensor]:
    """Describe whole tensors."""
    return {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}


def empty_pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return page-locked memory."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")


def synchronize(device: torch.device) -> None:
    """Wait for all work of a device."""
    torch.get_device_module(device).synchronize()


# --- Rounds ---------------------------------------------------------------------------------------

HEADS = ["seconds", "range", "GB/s", "of the first"]

Way = Callable[[bool], float]
"""Goes once, and compares when it is told to; returns seconds."""


def rounds(ways: dict[str, Way], num_runs: int) -> dict[str, list[float]]:
    """Let everyone go in turn, beginning with another one each time."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(num_runs + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            took = ways[name](number == 0)
            seconds[name] += [took] if number else []
    return seconds


def rows_of(found: dict[str, list[float]], floor: str, num_bytes: int) -> list[list[Cell]]:
    """Lay out what was measured under a title and `HEADS`."""
    return [
        [
            name,
            median(seconds, "{:.4f}"),
            f"{min(seconds):.4f} - {max(seconds):.4f}",
            figure(f"{num_bytes / statistics.median(seconds) / 1e9:.2f}", seconds),
            ratio(found[floor], seconds),
        ]
        for name, seconds in found.items()
    ]


# --- Out ------------------------------------------------------------------------------------------


def ways_out(tensors: Tensors, device: torch.device, folder: str) -> dict[str, Way]:
    """Return what brings the tensors out of the device."""
    flat = [tensor.view(-1).view(torch.uint8) for tensor in tensors.values()]
    host = [empty_pinned(len(each), device) for each in flat]
    state = state_of(tensors)

    def copy() -> None:
        for target, source in zip(host, flat, strict=True):
            target.copy_(source, non_blocking=True)
        synchronize(device)

    def ring() -> None:
        file = file_of_tensors("", b"", [[tensor] for tensor in tensors.values()])
        units = list(units_of(file.chunk_bytes, UNIT_BYTES, BLOCK_BYTES))
        run_threads(
            lambda unit: file.fill(unit, bounce_buffer("ring", UNIT_BYTES, file.device)), units
        )

    def in_background(is_compared: bool) -> float:
        handle, took = timed(lambda: distckpt.async_save(state, f"{folder}/out"))
        handle.result()
        shutil.rmtree(f"{folder}/out")
        return took

    def saving(save: Callable[[str], object]) -> Way:
        def way(is_compared: bool) -> float:
            os.sync()
            took = timed(lambda: save(f"{folder}/out"))[1]
            shutil.rmtree(f"{folder}/out")
            return took

        return way

    def save_with_safetensors(location: str) -> None:
        os.mkdir(location)
        save_file(tensors, f"{location}/model.safetensors")

    return {
        "page-locked copy": lambda is_compared: timed(copy)[1],
        "page-locked ring": lambda is_compared: timed(ring)[1],
        "async_save, until it returns": in_background,
        "save": saving(lambda location: distckpt.save(state, location)),
        "save, durable=False": saving(
            lambda location: distckpt.save(state, location, durable=False)
        ),
        "safetensors save_file, no fsync": saving(save_with_safetensors),
    }


# --- In -------------------------------------------------------------------------------------------


def ways_in(tensors: Tensors, device: torch.device, place: Path, is_cold: bool) -> dict[str, Way]:
    """Return what brings the tensors into the device, out of the files of a folder."""
    path = place / "model.safetensors"
    targets = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
    num_bytes = path.stat().st_size
    host, target = (
        empty_pinned(num_bytes, device),
        torch.empty(num_bytes, dtype=torch.uint8, device=device),
    )

    def read_and_copy() -> None:
        def unit(start: int) -> None:
            part = host[start : start + UNIT_BYTES]
            os.preadv(file.fileno(), [part.numpy()], start)
            target[start : start + UNIT_BYTES].copy_(part, non_blocking=True)

        with open(path, "rb", buffering=0) as file:
            run_threads(unit, range(0, num_bytes, UNIT_BYTES))
        synchronize(device)

    def load(**options: Any) -> Tensors:
        distckpt.load(state_of(targets), place / "checkpoint", **options)
        return targets

    def loading(function: Callable[[], Any]) -> Way:
        def way(is_compared: bool) -> float:
            prepare = empty_cache if is_cold else fill_cache
            prepare(str(place))
            loaded, took = timed(lambda: (function(), synchronize(device))[0])
            if is_compared and loaded is not None:
                assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items())
            return took

        return way

    ways: dict[str, Callable[[], Any]] = {
        "read and copy": read_and_copy,
        "distckpt": load,
        "distckpt, verify=none": lambda: load(verify=False),
        "safetensors load_file": lambda: load_file(path, device=str(device)),
    }
    if importlib.util.find_spec("fastsafetensors"):
        ways["fastsafetensors"] = lambda: load_fast(path, device)
    return {name: loading(function) for name, function in ways.items()}


def written(tensors: Tensors, place: Path) -> Path:
    """Write a file of safetensors and a checkpoint; return where."""
    place.mkdir()
    save_file(tensors, place / "model.safetensors")
    distckpt.save(state_of(tensors), place / "checkpoint")
    for file in place.rglob("*.safetensors"):
        sync_file(str(file))  # only what is on disk can be dropped from the cache
    return place


def load_fast(path: Path, device: torch.device) -> Tensors:
    """Load with fastsafetensors, without what only some machines have (GPUDirect Storage)."""
    from fastsafetensors import fastsafe_open

    with fastsafe_open([str(path)], device=str(device), nogds=True) as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


# --- Steps, and page-locked memory ----------------------------------------------------------------


def steps(tensors: Tensors, device: torch.device, folder: str, num_runs: int) -> list[Cell]:
    """Return a row: how long steps on the device take, alone and during saves in the background."""
    size = 128 if device.type == "cpu" else 4096
    factor = torch.randn(size, size, device=device)

    def step() -> float:
        started = time.perf_counter()
        for _ in range(4):
            factor @ factor
        synchronize(device)
        return time.perf_counter() - started

    alone, during = [], []
    for _ in range(num_runs):
        alone.append(statistics.mean(step() for _ in range(IDLE_STEPS)))
        handle = distckpt.async_save(state_of(tensors), f"{folder}/out")
        costs = [step()]
        while not handle.done():
            costs.append(step())
        handle.result()
        during.append(statistics.mean(costs))
        shutil.rmtree(f"{folder}/out")
    slower = [b / a for a, b in zip(alone, during, strict=True)]
    percent = figure(f"{100 * (statistics.median(slower) - 1):+.0f} %", slower)
    milliseconds = [median([1e3 * one for one in each]) for each in (alone, during)]
    return ["4 products of matrices", *milliseconds, percent]


def page_locked(tensors: Tensors, device: torch.device, folder: str) -> list[list[Cell]]:
    """Return rows: blocks and megabytes of page-locked memory that torch took in the first and in a
    later call.

    What torch has taken, it keeps: a verb may find what the verbs before it have left.
    """
    state, targets = (
        state_of(tensors),
        state_of({key: torch.empty_like(each) for key, each in tensors.items()}),
    )
    verbs: dict[str, Callable[[], object]] = {
        "save": lambda: distckpt.save(state, f"{folder}/first", overwrite=True),
        "load": lambda: distckpt.load(targets, f"{folder}/first"),
        "async_save": lambda: distckpt.async_save(
            state, f"{folder}/first", overwrite=True
        ).result(),
    }
    rows = []
    for name, verb in verbs.items():
        row: list[Cell] = [name]
        for _ in range(2):
            before = blocks_and_megabytes(device)
            verb()
            after = blocks_and_megabytes(device)
            row += [f"{late - early:.0f}" for early, late in zip(before, after, strict=True)]
        rows.append(row)
    shutil.rmtree(f"{folder}/first")
    return rows


def blocks_and_megabytes(device: torch.device) -> tuple[float, float]:
    """Return how much page-locked memory torch has taken from the system so far; NaN where it does
    not say.
    """
    taken = getattr(torch.get_device_module(device), "host_memory_stats", dict)()
    return taken.get("num_host_alloc", math.nan), taken.get(
        "allocated_bytes.allocated", math.nan
    ) / 1e6


if __name__ == "__main__":
    main()

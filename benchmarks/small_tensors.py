"""Save and load very many small tensors, where what counts is the work per tensor and not the
bytes.

    python benchmarks/small_tensors.py [--tensors 20000] [--kib 16] [--runs 5] [--dir DIR]
        [--only NAME ...] [--profile] [--peers [--flashpack DIR]]

Every rank holds a row block of each tensor. Measured as in save_load.py, in one process and on two
ranks. With --profile, the main thread of rank 0 is profiled while distckpt saves and loads once
more.

With --peers, one process is measured beside what others have for that: loads into tensors that are
there already, saves that do not wait for the disk, since none of the others does, and the
consolidation of a tenth as many tensors of 4 KiB out of 4 shards of torch. Every run is a fresh
process that has called each function for one tensor before; files are in the page cache, and
contestants take turns. flashpack takes part when its wheel was unpacked before: `pip install
--no-deps --target DIR flashpack`.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import os
import pstats
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from contest.contestants import SAVE, WARM, Contestant, chosen, contestants, saving_case
from contest.figures import Figure, table_of
from contest.rounds import Settings, Targets, measure
from contest.state import Part, State, local_bytes
from measure import at_rest, fill_cache, timed
from report import Cell, Report, median, parser_of, ratio
from safetensors.torch import load_file, save_file

import distckpt
from distckpt.cli._processes import run_ranks

NAMES = ("distckpt", "DCP FileSystemWriter", "safetensors")


def main() -> None:
    """Print a table for one rank and one for two."""
    parser = parser_of(__doc__)
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument(
        "--kib", type=int, default=16, help="size of what one rank holds of a tensor"
    )
    parser.add_argument(
        "--only", nargs="+", default=NAMES, help="contestants whose name begins with one of these"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--flashpack", help="folder that the wheel flashpack was unpacked into")
    arguments = parser.parse_args()
    report = Report(arguments)
    if arguments.peers:
        compare_with_peers(arguments, report)
        report.finish()
        return
    report.about = (
        f"{arguments.tensors:,} tensors of {arguments.kib} KiB on each rank, "
        f"medians of {arguments.runs} rounds."
    )
    for num_ranks in (1, 2):
        with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="distckpt-benchmark-") as folder:
            figures: list[Figure] = run_ranks(run_rank, num_ranks, arguments, folder)
        for case, title in ((SAVE, "durable save"), (WARM, "warm load")):
            of_case = [figure for figure in figures if figure.case == case]
            heads, rows = table_of(f"{title}, {num_ranks} rank{'s' * (num_ranks > 1)}", of_case)
            for row, figure in zip(rows, of_case, strict=True):
                row.append(f"{figure.median / arguments.tensors * 1e6:.0f}")
            report.add([*heads, "us per tensor"], rows)
    report.finish()


def run_rank(rank: int, arguments: argparse.Namespace, folder: str) -> list[Figure]:
    """Measure everything in one rank."""
    generator = torch.Generator().manual_seed(rank)
    shape = (arguments.kib * 256 // 64, 64)
    state: dict[str, Part] = {
        f"layers.{i // 10}.weight_{i % 10}": Part(
            torch.empty(shape).normal_(generator=generator), 0
        )
        for i in range(arguments.tensors)
    }
    targets = {key: Part(torch.zeros_like(part.local), 0) for key, part in state.items()}
    # Only durable saves, and the loads of what they have written.
    measured = [one for one in chosen(contestants(), arguments.only) if saving_case(one) == SAVE]
    num_bytes = local_bytes(state) * dist.get_world_size()
    settings = Settings(num_bytes, arguments.runs, (SAVE, WARM), folder, with_peaks=True)
    figures, _ = measure(measured, state, Targets(targets, {}, None), settings)
    if arguments.profile:
        profile(measured[0], state, targets, f"{folder}/profiled")
    return figures


def profile(contestant: Contestant, state: State, targets: State, location: str) -> None:
    """Print where the main thread of rank 0 spends its time."""
    for verb, parts in (("save", state), ("load", targets)):
        prepared = contestant.prepare(parts)
        at_rest(location)
        profiler = cProfile.Profile()
        action: Any = getattr(contestant, verb)
        profiler.runcall(action, prepared, location)
        if dist.get_rank() == 0:
            print(f"\n{contestant.name} {verb}:")
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(location)


# --- Peers, each run in a fresh process -----------------------------------------------------------

Tensors = dict[str, torch.Tensor]
NUM_SHARDS = 4
DIRECTORY, CHECKPOINT, SHARDS = "hugging_face", "checkpoint", "shards"


class Job(NamedTuple):
    """One run of a contestant: `source` holds what it reads, `target` is what it writes."""

    case: str
    name: str
    arguments: argparse.Namespace
    source: str
    target: str


class Times(NamedTuple):
    """Seconds that passed, and processor seconds of all threads."""

    wall: float
    processor: float


def compare_with_peers(arguments: argparse.Namespace, report: Report) -> None:
    """Add a table for each case."""
    num_tensors = arguments.tensors
    report.about = (
        f"One process, {num_tensors:,} tensors of {arguments.kib} KiB, medians of "
        f"{arguments.runs} fresh processes each."
    )
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="distckpt-benchmark-") as folder:
        in_fresh_process(prepare_sources, arguments, folder)
        for case, contestants_of_case in PEERS.items():
            names = [name for name in contestants_of_case if is_there(name, arguments)]
            runs: dict[str, list[Times]] = {name: [] for name in names}
            for number in range(arguments.runs + 1):
                for name in names if number % 2 else reversed(names):
                    job = Job(case, name, arguments, folder, f"{folder}/new")
                    times = in_fresh_process(run_job, job)
                    shutil.rmtree(job.target, ignore_errors=True)
                    # The first round does not count.
                    runs[name] += [times] * (number > 0)
                    print(f"{case}: {name}: {times}", file=sys.stderr)
            heads = [case, "seconds", "processor s", "us per tensor", "time / distckpt's"]
            num_of_case = num_tensors // 10 if case == CONSOLIDATE else num_tensors
            rows = [row_of_peer(name, runs, num_of_case) for name in names]
            report.add(heads, rows)


def row_of_peer(name: str, runs: dict[str, list[Times]], num_tensors: int) -> list[Cell]:
    """Lay out the figures of one contestant."""
    walls = [run.wall for run in runs[name]]
    own = [run.wall for run in runs[OWN]]
    return [
        name,
        median(walls, "{:.3f}"),
        median([run.processor for run in runs[name]], "{:.3f}"),
        f"{statistics.median(walls) / num_tensors * 1e6:.1f}",
        ratio(walls, own),
    ]


def is_there(name: str, arguments: argparse.Namespace) -> bool:
    """Tell whether a contestant can take part."""
    if arguments.flashpack:
        sys.path.append(arguments.flashpack)
    return name != "flashpack" or find_spec("flashpack") is not None


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(function, *arguments).result()


def tensors_of(num_tensors: int, kib: int) -> Tensors:
    """Make fp32 tensors of 64 columns."""
    generator = torch.Generator().manual_seed(0)
    shape = (kib * 256 // 64, 64)
    return {
        f"layers.{i // 10}.weight_{i % 10}": torch.empty(shape).normal_(generator=generator)
        for i in range(num_tensors)
    }


def prepare_sources(arguments: argparse.Namespace, folder: str) -> None:
    """Write what the cases read: a Hugging Face directory, a checkpoint and shards of torch."""
    tensors = tensors_of(arguments.tensors, arguments.kib)
    os.mkdir(f"{folder}/{DIRECTORY}")
    save_file(tensors, f"{folder}/{DIRECTORY}/model.safetensors", {"format": "pt"})
    distckpt.save(described(tensors), f"{folder}/{CHECKPOINT}")
    write_shards(tensors_of(arguments.tensors // 10, 4), f"{folder}/{SHARDS}")
    write_shards(tensors_of(1, 4), f"{folder}/one")


def write_shards(tensors: Tensors, folder: str) -> None:
    """Write what torch's `HuggingFaceStorageWriter(save_distributed=True)` writes."""
    os.mkdir(folder)
    for number in range(NUM_SHARDS):
        pieces = {key: tensor.chunk(NUM_SHARDS)[number] for key, tensor in tensors.items()}
        info = {key: {"saved_offsets": [number * len(piece), 0]} for key, piece in pieces.items()}
        save_file(
            pieces,
            f"{folder}/shard-{number + 1:05d}-model-00001-of-00001.safetensors",
            {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"},
        )


def described(tensors: Tensors) -> dict[str, Any]:
    """Describe tensors as distckpt does."""
    describe = distckpt.ShardedTensor.from_rank_offsets
    return {key: describe(key, tensor) for key, tensor in tensors.items()}


def run_job(job: Job) -> Times:
    """Call a contestant for one tensor, then for all; check what it did."""
    torch.set_num_threads(1)
    is_there(job.name, job.arguments)
    prepare = PEERS[job.case][job.name]
    with tempfile.TemporaryDirectory(dir=job.source) as folder:
        few = argparse.Namespace(**{**vars(job.arguments), "tensors": 1})
        in_few = Job(job.case, job.name, few, folder, f"{folder}/new")
        prepare_sources(few, folder)
        shutil.rmtree(f"{folder}/{SHARDS}")
        os.rename(f"{folder}/one", f"{folder}/{SHARDS}")
        prepare(in_few, tensors_of(1, few.kib))()
    fill_cache(job.source)
    tensors = tensors_of(job.arguments.tensors, job.arguments.kib)
    if job.case != SAVE_UNSYNCED:
        tensors = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    call = prepare(job, tensors)
    before = os.times()
    _, seconds = timed(call)
    after = os.times()
    check(job, tensors)
    return Times(seconds, after.user - before.user + after.system - before.system)


def check(job: Job, tensors: Tensors) -> None:
    """Compare what was loaded or written with what was there."""
    expected = tensors_of(job.arguments.tensors, job.arguments.kib)
    found = tensors
    if job.case == CONSOLIDATE:
        expected = tensors_of(job.arguments.tensors // 10, 4)
        found = {}
        for path in Path(job.target).glob("*.safetensors"):
            found |= load_file(path)
    elif job.case == SAVE_UNSYNCED:
        return
    assert found.keys() == expected.keys(), f"{job.name} left tensors out"
    assert all(torch.equal(found[key], expected[key]) for key in expected), f"{job.name} differs"


def _loading(source: str) -> Callable[[Job, Tensors], Callable[[], Any]]:
    def prepare(job: Job, tensors: Tensors) -> Callable[[], Any]:
        targets = described(tensors)
        return lambda: distckpt.load(targets, f"{job.source}/{source}")

    return prepare


def _load_and_copy(job: Job, tensors: Tensors) -> Callable[[], Any]:
    def call() -> None:
        for key, value in load_file(f"{job.source}/{DIRECTORY}/model.safetensors").items():
            tensors[key].copy_(value)

    return call


def _saving(job: Job, tensors: Tensors) -> Callable[[], Any]:
    state = described(tensors)
    return lambda: distckpt.save(state, job.target, durable=False)


def _save_by_safetensors(job: Job, tensors: Tensors) -> Callable[[], Any]:
    os.mkdir(job.target)
    return lambda: save_file(tensors, f"{job.target}/model.safetensors")


def _save_by_flashpack(job: Job, tensors: Tensors) -> Callable[[], Any]:
    pack = import_module("flashpack.serialization").pack_to_file
    os.mkdir(job.target)
    return lambda: pack(tensors, f"{job.target}/model.flashpack", None)


def _consolidating(module: str) -> Callable[[Job, Tensors], Callable[[], Any]]:
    def prepare(job: Job, tensors: Tensors) -> Callable[[], Any]:
        consolidate = import_module(module).consolidate_safetensors_files
        num_tensors = max(1, job.arguments.tensors // 10)
        file_numbers = dict.fromkeys(tensors_of(num_tensors, 4), 1)
        os.mkdir(job.target)
        source = f"{job.source}/{SHARDS}"
        return lambda: consolidate(source, job.target, file_numbers, num_threads=2)

    return prepare


OWN = "distckpt"
SAVE_UNSYNCED = "save, not durable"
CONSOLIDATE = "consolidate, 4 shards"
PEERS: dict[str, dict[str, Callable[[Job, Tensors], Callable[[], Any]]]] = {
    "load a directory": {OWN: _loading(DIRECTORY), "load_file, copy_": _load_and_copy},
    "load a checkpoint": {OWN: _loading(CHECKPOINT), "load_file, copy_": _load_and_copy},
    SAVE_UNSYNCED: {
        OWN: _saving,
        "save_file": _save_by_safetensors,
        "flashpack": _save_by_flashpack,
    },
    CONSOLIDATE: {
        OWN: _consolidating("distckpt.hf"),
        "torch": _consolidating("torch.distributed.checkpoint._consolidate_hf_safetensors"),
    },
}
"""Contestants by case: what prepares the call that is measured."""


if __name__ == "__main__":
    main()

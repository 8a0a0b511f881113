"""Save and load very many small tensors, where what counts is the work per tensor and not the
bytes.

    python benchmarks/small_tensors.py [--tensors 20000] [--kib 16] [--runs 5] [--dir DIR]
        [--only NAME ...] [--profile]

Every rank holds a row block of each tensor. Measured as in save_load.py, in one process and on two
ranks. With --profile, the main thread of rank 0 is profiled while distckpt saves and loads once
more.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from contest.contestants import SAVE, WARM, Contestant, chosen, contestants, saving_case
from contest.figures import Figure, table_of
from contest.rounds import Settings, Targets, measure
from contest.state import Part, State, local_bytes
from measure import at_rest
from report import Report, parser_of

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
    arguments = parser.parse_args()
    report = Report(arguments)
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


if __name__ == "__main__":
    main()

"""What planning and exchange cost when the same structure is saved again.

    python benchmarks/repeated_save.py [--ranks 8] [--tensors 5000] [--runs 6] [--dir DIR]

Every rank holds shards of all tensors, tiny ones, so that hardly anything but planning takes time.
The phases are those of `SaveReport`; one all-reduce, which is what agreeing on a known plan
exchanges, is timed beside them.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from report import Cell, Report, median, parser_of

import distckpt
from distckpt import ShardedTensor
from distckpt.cli._processes import run_ranks


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__, runs=6)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tensors", type=int, default=5000)
    arguments = parser.parse_args()
    report = Report(arguments)
    report.about = (
        f"{arguments.ranks} ranks x {arguments.tensors} tensors, milliseconds on the slowest rank."
    )
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="distckpt-benchmark-") as folder:
        rows = run_ranks(save_often, arguments.ranks, arguments.tensors, arguments.runs, folder)
    report.add(["phase", "first save", "again, median"], rows)
    report.finish()


def state_of(rank: int, num_ranks: int, num_tensors: int) -> dict[str, Any]:
    """Make one rank's state dict."""
    keys = [f"model.layers.{i // 10}.weight_{i % 10}" for i in range(num_tensors)]
    return {
        key: ShardedTensor.from_rank_offsets(key, torch.ones(8), (0, rank, num_ranks))
        for key in keys
    }


def save_often(rank: int, num_tensors: int, num_runs: int, folder: str) -> list[list[Cell]]:
    """Save again and again; return rows of the first save and of all others."""
    num_ranks = dist.get_world_size()
    rows = []
    for number in range(num_runs + 1):
        state = state_of(rank, num_ranks, num_tensors)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(torch.zeros(2))
        agreement = time.perf_counter() - started
        dist.barrier()
        reports: list[distckpt.SaveReport] = []
        distckpt.save(state, f"{folder}/{number}", durable=False, on_report=reports.append)
        report = reports[0]
        rows.append([agreement, *report.phases.values()])
        assert report.plan_reused == (number > 0)
    again = zip(*rows[1:], strict=True)
    return [
        [name, f"{first * 1e3:.1f}", median([seconds * 1e3 for seconds in column], "{:.1f}")]
        for name, first, column in zip(
            ["one all-reduce", *report.phases], rows[0], again, strict=True
        )
    ]


if __name__ == "__main__":
    main()

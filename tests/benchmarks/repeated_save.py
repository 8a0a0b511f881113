"""What planning and exchange cost when the same structure is saved again.

    python tests/benchmarks/repeated_save.py DIR [--ranks 8] [--tensors 5000] [--saves 7]

Every rank holds shards of all tensors, tiny ones, so that hardly anything but planning takes time. The phases are those
of `SaveReport`; one all-reduce, which is what agreeing on a known plan exchanges, is timed beside them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import machine_facts, markdown_table

import distckpt
from distckpt import ShardedTensor


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tensors", type=int, default=5000)
    parser.add_argument("--saves", type=int, default=7)
    arguments = parser.parse_args()
    print(machine_facts(arguments.directory), end="\n\n")
    folder = os.path.join(arguments.directory, f"repeated-{os.getpid()}")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", OMP_NUM_THREADS="1")
    try:
        mp.spawn(save_often, (arguments.ranks, arguments.tensors, arguments.saves, folder), arguments.ranks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def state_of(rank: int, num_ranks: int, num_tensors: int) -> dict[str, Any]:
    """Make one rank's state dict."""
    keys = [f"model.layers.{i // 10}.weight_{i % 10}" for i in range(num_tensors)]
    return {key: ShardedTensor.from_rank_offsets(key, torch.ones(8), (0, rank, num_ranks)) for key in keys}


def save_often(rank: int, num_ranks: int, num_tensors: int, num_saves: int, folder: str) -> None:
    """Save again and again; rank 0 prints medians of all but the first."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    rows = []
    for number in range(num_saves):
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
    if rank == 0:
        names = ["one all-reduce", *report.phases]
        again = [statistics.median(column) for column in zip(*rows[1:], strict=True)]
        table = [[n, f"{a * 1e3:.1f}", f"{b * 1e3:.1f}"] for n, a, b in zip(names, rows[0], again, strict=True)]
        print(f"{num_ranks} ranks x {num_tensors} tensors, milliseconds on the slowest rank:\n")
        print(markdown_table(["phase", "first save", "again, median"], table))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

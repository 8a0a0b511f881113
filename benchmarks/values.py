"""Verification, statistics and comparisons of all values of a checkpoint, beside raw reads of the
same files.

    python benchmarks/values.py [--gigabytes 1] [--kib 0] [--dtype float32] [--runs 5]
        [--dir DIR]

Warm: files are in the page cache; cold: they were dropped from it before. Raw reads take as many
threads. Contestants take turns in one process, which has imported everything. With --kib, tensors
have this size. Medians over the runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile

import torch
from measure import empty_cache, sync_file, timed
from report import Report, figure, median, parser_of

import distckpt
from distckpt._base.memory import bounce_buffer
from distckpt._base.threads import NUM_THREADS, UNIT_BYTES, run_threads
from distckpt._checkpoint.opening import open_checkpoint
from distckpt._ranks.collectives import Ranks
from distckpt._tools.stats import compute_stats

SHARD_BYTES = 256 << 20


def main() -> None:
    """Measure, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument(
        "--kib", type=int, default=0, help="size of each tensor; large ones when it is 0"
    )
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    report = Report(arguments)
    report.about = f"{arguments.gigabytes:g} GB, {arguments.dtype}."
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="distckpt-benchmark-") as folder:
        for name in ("a", "b"):
            save(f"{folder}/{name}", arguments)
        files = [f"{folder}/a/tensors/{name}" for name in os.listdir(f"{folder}/a/tensors")]
        contestants = {
            "raw reads": lambda: read(files),
            "verify": lambda: distckpt.verify(f"{folder}/a"),
            "stats": lambda: list(compute_stats(open_checkpoint(Ranks.alone(), f"{folder}/a"))),
            "diff (two checkpoints)": lambda: distckpt.diff(f"{folder}/a", f"{folder}/b"),
        }
        num_bytes = sum(map(os.path.getsize, files))
        runs: dict[tuple[str, str], list[float]] = {}
        for _ in range(arguments.runs + 1):
            for state in ("warm", "cold"):
                for name, function in contestants.items():
                    if state == "warm":
                        function()
                    elif not empty_cache(folder):
                        continue
                    runs.setdefault((state, name), []).append(timed(function)[1])
    rows = []
    for (state, name), (_, *seconds) in runs.items():
        raw, num_read = (
            runs[state, "raw reads"][1:],
            num_bytes * (2 if name.startswith("diff") else 1),
        )
        speed = num_read / statistics.median(seconds) / 1e9
        of_raw = speed * statistics.median(raw) / num_bytes * 1e9
        cells = (
            median(seconds),
            figure(f"{speed:.2f}", seconds),
            figure(f"{of_raw:.2f}", seconds, raw),
        )
        rows.append([f"{state}, {name}", *cells])
    report.add(["", "seconds", "GB/s", "of raw"], rows)
    report.finish()


def save(location: str, arguments: argparse.Namespace) -> None:
    """Save tensors of random numbers, the same each time."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    num_elements = (arguments.kib << 10 or SHARD_BYTES) // dtype.itemsize
    num_tensors = max(1, int(arguments.gigabytes * 1e9) // (num_elements * dtype.itemsize))
    values = torch.randn(num_elements, generator=generator).to(dtype)
    keys = [f"layers.{number}" for number in range(num_tensors)]
    distckpt.save(
        {key: distckpt.ShardedTensor.from_rank_offsets(key, values.clone()) for key in keys},
        location,
    )
    for name in os.listdir(f"{location}/tensors"):
        sync_file(f"{location}/tensors/{name}")


def read(files: list[str]) -> None:
    """Read all of some files, and do nothing with it."""

    def read_unit(item: tuple[str, int]) -> None:
        path, position = item
        with open(path, "rb", buffering=0) as file:
            os.preadv(file.fileno(), [bounce_buffer("raw", UNIT_BYTES)], position)

    units = [
        (path, position)
        for path in files
        for position in range(0, os.path.getsize(path), UNIT_BYTES)
    ]
    run_threads(read_unit, units, NUM_THREADS)


if __name__ == "__main__":
    main()

"""What sharing reads saves or costs: ranks that load the same tensors, from local files and from a
slow store.

    python benchmarks/shared_reads.py [--ranks 2] [--gb 1] [--runs 5]
        [--stores 200:0.02 ...] [--dir DIR]

All ranks load all tensors, as data-parallel replicas do, with `share_reads` off, on and auto by
turns. Local files are in the page cache. A slow store, say 200:0.02, has the same files and makes
each rank wait for them: 0.02 s for each request, and for its bytes at 200 MB/s for all requests of
a rank together.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from typing import Any

import fsspec
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from measure import time_together
from report import Cell, Report, median, parser_of

import distckpt
from distckpt import ShardedTensor
from distckpt.cli._processes import run_ranks

MODES = ("off", "on", "auto")
TENSOR_BYTES = 32 << 20


class SlowFileSystem(LocalFileSystem):
    """Files under `slow:///path` are those under `/path`."""

    protocol = "slow"
    cachable = False
    bytes_per_second = 0.0
    latency_seconds = 0.0
    _lock = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("slow://")))

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Read after a while."""
        data = bytes(super().cat_file(path, start, end, **kwargs))
        time.sleep(self.latency_seconds)
        with self._lock:
            time.sleep(len(data) / self.bytes_per_second)
        return data


fsspec.register_implementation("slow", SlowFileSystem)


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument(
        "--stores",
        nargs="+",
        default=["200:0.02", "600:0.005", "2000:0.001"],
        metavar="MBPS:SECONDS",
    )
    arguments = parser.parse_args()
    report = Report(arguments)
    report.about = (
        f"{arguments.ranks} ranks load the same {arguments.gb:g} GB, seconds; stores are simulated."
    )
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="distckpt-benchmark-") as folder:
        rows = run_ranks(compare, arguments.ranks, arguments, f"{folder}/checkpoint")
    report.add(["from", *MODES, "on / off", "auto / off"], rows)
    report.finish()


def state_of(rank: int, num_tensors: int, value: float) -> dict[str, Any]:
    """Make one replica of the state."""
    shape = (TENSOR_BYTES // 4 // 1024, 1024)
    tensors = {f"layers.{i}.weight": torch.full(shape, value + i) for i in range(num_tensors)}
    return {
        key: ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank)
        for key, tensor in tensors.items()
    }


def compare(rank: int, arguments: argparse.Namespace, folder: str) -> list[list[Cell]]:
    """Load in all modes by turns; return rows of medians, and of ratios within rounds."""
    num_tensors = max(1, round(arguments.gb * 1e9 / TENSOR_BYTES))
    distckpt.save(state_of(rank, num_tensors, 1.0), folder, durable=False)
    state = state_of(rank, num_tensors, 0.0)
    rows = [["local files, in the page cache", *seconds_of(state, folder, arguments.runs)]]
    for store in arguments.stores:
        rate, latency = map(float, store.split(":"))
        SlowFileSystem.bytes_per_second, SlowFileSystem.latency_seconds = rate * 1e6, latency
        rows.append(
            [
                f"a store, {rate:g} MB/s for each rank",
                *seconds_of(state, f"slow://{folder}", arguments.runs),
            ]
        )
    dist.barrier()
    return rows


def seconds_of(state: dict[str, Any], location: str, num_runs: int) -> list[Cell]:
    """Load from one place."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(num_runs + 1):
        for mode in MODES:
            took = time_together(lambda mode=mode: distckpt.load(state, location, share_reads=mode))
            # The first round warms up.
            if number:
                seconds[mode].append(took)
    ratios = [
        [a / b for a, b in zip(seconds[mode], seconds["off"], strict=True)] for mode in MODES[1:]
    ]
    return [*(median(seconds[mode], "{:.3f}") for mode in MODES), *map(median, ratios)]


if __name__ == "__main__":
    main()

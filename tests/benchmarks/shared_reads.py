"""What sharing reads saves or costs: ranks that load the same tensors, from local files and from a slow store.

    python tests/benchmarks/shared_reads.py DIR [--ranks 2] [--gb 1.0] [--rounds 5] [--mbps 200] [--latency 0.02]

All ranks load all tensors, as data-parallel replicas do, with `parallel_load` off, on and auto by turns. Local files
are in the page cache. The slow store has the same files and makes each rank wait for them: `--latency` seconds for each
request, and for its bytes at `--mbps` MB/s for all requests of a rank together.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import threading
import time
from typing import Any

import fsspec
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from measure import machine_facts, markdown_table, time_together

import distckpt
from distckpt import ShardedTensor
from distckpt._ranks.processes import run_ranks

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

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Read after a while."""
        data = bytes(super().cat_file(path, start, end, **kwargs))
        time.sleep(self.latency_seconds)
        with self._lock:
            time.sleep(len(data) / self.bytes_per_second)
        return data


fsspec.register_implementation("slow", SlowFileSystem)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mbps", type=float, default=200.0)
    parser.add_argument("--latency", type=float, default=0.02)
    arguments = parser.parse_args()
    print(machine_facts(arguments.directory), end="\n\n")
    folder = os.path.join(os.path.abspath(arguments.directory), f"shared-{os.getpid()}")
    try:
        run_ranks(compare, arguments.ranks, arguments, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def state_of(rank: int, num_tensors: int, value: float) -> dict[str, Any]:
    """Make one replica of the state."""
    shape = (TENSOR_BYTES // 4 // 1024, 1024)
    tensors = {f"layers.{i}.weight": torch.full(shape, value + i) for i in range(num_tensors)}
    return {key: ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank) for key, tensor in tensors.items()}


def compare(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """Load in all modes by turns; rank 0 prints medians."""
    num_ranks = dist.get_world_size()
    SlowFileSystem.bytes_per_second, SlowFileSystem.latency_seconds = arguments.mbps * 1e6, arguments.latency
    num_tensors = max(1, round(arguments.gb * 1e9 / TENSOR_BYTES))
    distckpt.save(state_of(rank, num_tensors, 1.0), folder, durable=False)
    state = state_of(rank, num_tensors, 0.0)
    places = {"local files": folder, f"store, {arguments.mbps:g} MB/s for each rank": f"slow://{folder}"}
    rows = []
    for name, location in places.items():
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        for number in range(arguments.rounds + 1):
            for mode in MODES:
                took = time_together(
                    lambda mode=mode, location=location: distckpt.load(state, location, parallel_load=mode)
                )
                # The first round warms up.
                if number:
                    seconds[mode].append(took)
        medians = [statistics.median(seconds[mode]) for mode in MODES]
        ratios = [statistics.median(a / b for a, b in zip(seconds[m], seconds["off"], strict=True)) for m in MODES[1:]]
        rows.append([name, *(f"{m:.3f}" for m in medians), *(f"{r:.2f}" for r in ratios)])
    if rank == 0:
        print(f"{num_ranks} ranks load the same {num_tensors * TENSOR_BYTES / 1e9:.2f} GB; seconds, medians:\n")
        print(markdown_table(["from", *MODES, "on / off", "auto / off"], rows))
    dist.barrier()


if __name__ == "__main__":
    main()

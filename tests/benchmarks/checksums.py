"""What checksums add: durable saves with and without, cold loads that verify and that do not.

    python tests/benchmarks/checksums.py DIR [--gb 1] [--runs 7]

One process. Saves without checksums exist only here: the writer is asked for none, and the checkpoint is thrown away.
Files are out of the page cache before each load (posix_fadvise).
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import machine_facts, markdown_table

import distckpt
from distckpt import ShardedTensor
from distckpt._cli.storage_speed import drop_from_page_cache
from distckpt._io.write import WriteSettings, file_of_tensors, write_files

TENSOR_BYTES = 16 << 20


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(arguments.directory) / f"checksums-{os.getpid()}"
    folder.mkdir()
    tensors = [torch.randn(TENSOR_BYTES // 4) for _ in range(round(arguments.gb * 1e9 / TENSOR_BYTES))]
    state = {str(i): ShardedTensor.from_rank_offsets(str(i), tensor) for i, tensor in enumerate(tensors)}
    drop = functools.partial(drop_from_page_cache, str(folder / "checkpoint"))
    try:
        distckpt.save(state, folder / "checkpoint")
        contestants: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "write, with checksums": (lambda: None, lambda: write(folder, tensors, True)),
            "write, without": (lambda: None, lambda: write(folder, tensors, False)),
            "cold load, verified": (
                drop,
                lambda: load(state, folder, "read"),
            ),
            "cold load, not verified": (
                drop,
                lambda: load(state, folder, "none"),
            ),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for run in range(arguments.runs):
            # What comes before a contestant may slow it down (files that were just deleted): change the order.
            for name in list(contestants)[:: -1 if run % 2 else 1]:
                prepare, function = contestants[name]
                os.sync()
                prepare()
                started = time.perf_counter()
                function()
                seconds[name].append(time.perf_counter() - started)
                (folder / "written").unlink(missing_ok=True)
    finally:
        shutil.rmtree(folder)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = [
        [name, f"{medians[name]:.3f}", f"{min(seconds[name]):.3f} - {max(seconds[name]):.3f}"] for name in contestants
    ]
    print(machine_facts(arguments.directory), end="\n\n")
    print(markdown_table([f"{arguments.gb:g} GB", "seconds", "range"], rows))
    ratios = [
        medians[f"{what}, {with_}"] / medians[f"{what}, {without}"]
        for what, with_, without in (
            ("write", "with checksums", "without"),
            ("cold load", "verified", "not verified"),
        )
    ]
    print(f"\nChecksums cost {ratios[0] - 1:+.0%} of a durable write and {ratios[1] - 1:+.0%} of a cold load.")


def write(folder: Path, tensors: list[torch.Tensor], with_checksums: bool) -> None:
    """Write one file as a save does."""
    file = file_of_tensors(str(folder / "written"), bytes(4096), [[tensor] for tensor in tensors])
    write_files([file], WriteSettings(with_checksums=with_checksums))


def load(state: dict[str, ShardedTensor], folder: Path, verify: distckpt.serialization.Verify) -> None:
    """Load into the same tensors."""
    distckpt.load(dict(state), folder / "checkpoint", verify=verify)


if __name__ == "__main__":
    main()

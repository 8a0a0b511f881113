"""Export a checkpoint with `concurrent.futures`: a process for each core, and no process group.

    python examples/parts/in_processes.py --work-dir /tmp/parts

Makes a checkpoint, and exports it as eight tasks. Run it again after an interrupt: it goes on.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import distckpt
from distckpt import ShardedTensor, tasks


def make_checkpoint(path: Path) -> None:
    """Save a model of a few layers."""
    state = {
        f"{layer}": ShardedTensor.from_rank_offsets(
            f"model.layers.{layer}.weight", torch.full((500, 500), float(layer))
        )
        for layer in range(16)
    }
    distckpt.save(state, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", required=True, type=Path, help="where to put everything")
    folder: Path = parser.parse_args().work_dir
    if not (folder / "step_1").exists():
        make_checkpoint(folder / "step_1")

    work = tasks.consolidate(
        folder / "step_1", folder / "export", num_tasks=8, max_file_bytes=2_000_000
    )
    # Processes that are started anew: a fork would copy the threads' locks of this one.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=2, mp_context=context) as pool:
        reports = list(pool.map(tasks.Task.run, work))
    print(f"{sum(report.num_pieces for report in reports)} pieces were written now")
    report = work[0].finish()
    print(f"{report.num_tensors} tensors in {len(report.files)} files")


if __name__ == "__main__":
    main()

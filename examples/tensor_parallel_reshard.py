"""Save a tensor parallel layer on 4 processes and load it on 2 and on 1 with the same values.

    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel_reshard.py \
        --work-dir /tmp/tensor_parallel_reshard

Each process only describes the part of each global tensor that it holds. `up` is sharded by output
features, `down` by input features, and `norm` is replicated: each process writes a part of it. A
load may request any other parts. (`train_reshard_resume.py` does this in a complete training
program, with pipeline and data parallelism.)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import distckpt
from distckpt import ShardedTensor

WIDTH, HIDDEN = 64, 256


def describe(parts: dict[str, Tensor], rank: int, size: int) -> dict[str, ShardedTensor]:
    """Describe the part of each global tensor that this one of `size` tensor parallel ranks
    holds.
    """
    return {
        "up": ShardedTensor.from_rank_offsets("mlp.up.weight", parts["up"], (0, rank, size)),
        "down": ShardedTensor.from_rank_offsets("mlp.down.weight", parts["down"], (1, rank, size)),
        "norm": ShardedTensor.from_rank_offsets("mlp.norm.weight", parts["norm"], replica_id=rank),
    }


def make_parts(rank: int, size: int) -> dict[str, Tensor]:
    """Make this rank's parts of tensors that do not depend on the layout."""
    rng = torch.Generator().manual_seed(0)
    up, down = torch.randn(HIDDEN, WIDTH, generator=rng), torch.randn(WIDTH, HIDDEN, generator=rng)
    parts = {
        "up": up.chunk(size)[rank],
        "down": down.chunk(size, dim=1)[rank],
        "norm": torch.randn(WIDTH, generator=rng),
    }
    return {name: part.clone() for name, part in parts.items()}


def load_and_compare(path: Path, rank: int, size: int, group: dist.ProcessGroup | None) -> bool:
    """Load this rank's parts under a different number of ranks; return whether they are correct."""
    expected = make_parts(rank, size)
    targets = {name: torch.full_like(part, torch.nan) for name, part in expected.items()}
    distckpt.load(describe(targets, rank, size), path, process_group=group)
    return all(torch.equal(targets[name], expected[name]) for name in expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", required=True, type=Path, help="where to put the checkpoint")
    path: Path = parser.parse_args().work_dir / "step_1"
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    reports: list[distckpt.SaveReport] = []
    distckpt.save(
        describe(make_parts(rank, size), rank, size), path, overwrite=True, on_report=reports.append
    )
    if rank == 0:
        print(f"saved by {size}: {reports[0].num_bytes} bytes")

    pair = dist.new_group([0, 1])
    alone = [dist.new_group([number]) for number in range(size)][rank]
    if rank < 2:
        has_parts = [False, False]
        dist.all_gather_object(has_parts, load_and_compare(path, rank, 2, pair), pair)
    if rank == 0:
        for number, is_equal in enumerate(has_parts):
            print(f"loaded by 2: rank {number} {'has its parts' if is_equal else 'is WRONG'}")
        is_equal = load_and_compare(path, 0, 1, alone)
        print(f"loaded by 1: rank 0 {'has everything' if is_equal else 'is WRONG'}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Lose one of 4 hosts with its disk: the newest step is put together from the others' copies.

    torchrun --standalone --nproc-per-node 4 examples/lose_a_host.py --work-dir /tmp/lose_a_host

Each process stands for a host, and has another directory as `local`. Saves go to the hosts; with
`peers=1`, each host keeps a copy of another one's files. The first step is also uploaded to the
root. Then host 2 is lost, and an empty one takes its place. The job starts again from step 20,
which the root does not have, and repeats the losses that it had before.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distckpt import CheckpointManager, ShardedTensor

NUM_HOSTS, NUM_STEPS, SAVE_EVERY, LOST_AT, LOST = 4, 30, 10, 25, 2


class HostLostError(Exception):
    """What the other ranks of a job see of a lost host: one of their calls fails."""


def describe(model: nn.Linear, momentum: Tensor, step: int) -> dict[str, Any]:
    """Describe the state: each rank has some rows of the weight and of its momentum."""
    place = (0, dist.get_rank(), NUM_HOSTS)
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", model.weight.data, place),
        "momentum": ShardedTensor.from_rank_offsets("momentum", momentum, place),
        "step": step,
    }


def train(work_dir: Path, lost_at: int, losses: dict[int, float]) -> None:
    """Train from the newest step, or from the beginning, until a host is lost."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(256, 64, bias=False)
    momentum, first = torch.zeros_like(model.weight), 0
    local = work_dir / f"host{dist.get_rank()}"  # of real hosts, all have the same: "/nvme/run"
    with CheckpointManager(work_dir / "root", local=local, peers=1, upload_every=4) as manager:
        if manager.steps():
            first = manager.load(describe(model, momentum, 0))["step"]
        for step in range(first + 1, NUM_STEPS + 1):
            losses[step] = train_step(model, momentum, step)
            if step % SAVE_EVERY == 0:
                manager.save(step, describe(model, momentum, step))  # in the background
            if step == lost_at:
                manager.wait(uploaded=True)  # a step without copies yet would be lost
                raise HostLostError


def train_step(model: nn.Linear, momentum: Tensor, step: int) -> float:
    """Take a gradient step with momentum; return the loss of all ranks."""
    inputs = torch.randn(32, 256, generator=torch.Generator().manual_seed(step))
    loss = (model(inputs) - inputs[:, :64]).square().mean()
    (gradient,) = torch.autograd.grad(loss, [model.weight])
    momentum.mul_(0.9).add_(gradient)
    model.weight.data.sub_(0.5 * momentum)
    total = loss.detach()
    dist.all_reduce(total)
    return total.item() / NUM_HOSTS


def show_files(work_dir: Path, step: int) -> None:
    """Print on one rank which files of a step are where."""
    for folder in [work_dir / "root", *(work_dir / f"host{host}" for host in range(NUM_HOSTS))]:
        files = folder.glob(f"**/step_{step:08}/tensors/shard-*")
        names = sorted(file.name[: len("shard-00000")] for file in files)
        say(f"  {folder.name:5} {', '.join(names) or 'nothing'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", required=True, type=Path, help="where to put the directories")
    work_dir = parser.parse_args().work_dir
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Has each rank say how much it reads from where.
    logging.basicConfig(stream=sys.stdout, format=f"  rank {rank}: %(message)s")
    logging.getLogger("distckpt.manager").setLevel(logging.INFO)
    if rank == 0:
        shutil.rmtree(work_dir, ignore_errors=True)  # of an earlier drill
    dist.barrier()

    before: dict[int, float] = {}
    with contextlib.suppress(HostLostError):
        train(work_dir, LOST_AT, before)
    say("files of step 20 before the loss:")
    show_files(work_dir, 20)
    if rank == LOST:
        shutil.rmtree(work_dir / f"host{LOST}")
    say(f"host {LOST} is lost after step {LOST_AT}, loss {before[LOST_AT]:.6f}")
    again: dict[int, float] = {}
    train(work_dir, 0, again)
    say(f"started again after step {min(again) - 1}; step {LOST_AT}, loss {again[LOST_AT]:.6f}")
    say("files of step 30 at the end:")
    show_files(work_dir, 30)
    dist.destroy_process_group()


def say(text: str) -> None:
    """Print on one rank only."""
    dist.barrier()
    if dist.get_rank() == 0:
        print(text, flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()

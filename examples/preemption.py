"""Stop on a signal: SIGTERM reaches one of 2 processes, both save the same step, a new job resumes.

    python examples/preemption.py --work-dir /tmp/preemption

`PreemptionGuard.should_stop` returns True on all ranks at the same step once one of them has
received the signal. `CheckpointManager` finds the newest complete checkpoint. The second job
repeats no step and loses none: its losses are those of an uninterrupted job. A job on a cluster is
in `cluster/`.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

from distckpt import CheckpointManager, PreemptionGuard, ShardedTensor
from distckpt.modules import sharded_state_dict

NUM_RANKS, NUM_STEPS, SAVE_EVERY, SIGNAL_AFTER = 2, 40, 15, 22


def describe(model: nn.Module, momentum: Tensor, step: int) -> dict[str, Any]:
    """Describe the state: the model is the same on all ranks, the momentum is sharded."""
    shard = ShardedTensor.from_rank_offsets("momentum", momentum, (0, dist.get_rank(), NUM_RANKS))
    return {"model": sharded_state_dict(model, prefix="model."), "momentum": shard, "step": step}


def train(rank: int, store_port: int, directory: Path, is_preempted: bool) -> None:
    """Train from the newest checkpoint, or from the beginning; rank 1 may receive SIGTERM on the
    way.
    """
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", store_port, None, False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    torch.manual_seed(0)
    model, momentum, first = nn.Linear(64, 1, bias=False), torch.zeros(64 // NUM_RANKS), 0
    with PreemptionGuard() as guard, CheckpointManager(directory, keep_last=2) as manager:
        if manager.steps():
            first = manager.load(describe(model, momentum, 0))["step"]
            say(rank, f"resumed after step {first}")
        for step in range(first + 1, NUM_STEPS + 1):
            loss = train_step(model, momentum, step)
            if is_preempted and step == SIGNAL_AFTER and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)  # what a scheduler does
            if step % 10 == 0 or step == first + 1:
                say(rank, f"step {step:2}   loss {loss:.6f}")
            if guard.should_stop():
                manager.save(step, describe(model, momentum, step)).result()
                say(rank, f"asked to stop: saved step {step}")
                break
            if step % SAVE_EVERY == 0:
                manager.save(step, describe(model, momentum, step))  # in the background
    dist.destroy_process_group()


def train_step(model: nn.Linear, momentum: Tensor, step: int) -> float:
    """Take a gradient step with momentum, of which each rank keeps one half."""
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    (gradient,) = torch.autograd.grad(loss, [model.weight])
    momentum.mul_(0.9).add_(gradient.view(NUM_RANKS, -1)[dist.get_rank()])
    halves = [torch.empty_like(momentum) for _ in range(NUM_RANKS)]
    dist.all_gather(halves, momentum)
    model.weight.data.sub_(0.004 * torch.cat(halves))
    return loss.item()


def say(rank: int, text: str) -> None:
    """Print on one rank only."""
    if rank == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", required=True, type=Path, help="where to put the checkpoints")
    work_dir: Path = parser.parse_args().work_dir
    for name, is_preempted in (("uninterrupted", False), ("preempted", True), ("preempted", False)):
        print(f"{name}:", flush=True)
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        arguments = (store.port, work_dir / name, is_preempted)
        torch.multiprocessing.start_processes(train, arguments, NUM_RANKS, start_method="fork")


if __name__ == "__main__":
    main()

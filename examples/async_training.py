"""Train on two processes, save in the background, lose a process, and resume.

    python examples/async_training.py --work-dir /tmp/async_training

Prints the loss of every fifth step and how long each save blocked training. Right after the fourth
save has started, one process is killed, as if its machine had failed. The second run finds the
newest complete checkpoint and repeats the losses of the first run from there.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

import distckpt

NUM_RANKS, NUM_STEPS, SAVE_EVERY, KILL_AFTER = 2, 60, 10, 42
INPUTS, HIDDEN, BATCH = 256, 4096, 64


class HalfOfAnMLP(nn.Module):
    """A perceptron whose hidden units are sharded over the ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        rng = torch.Generator().manual_seed(rank)
        own = HIDDEN // NUM_RANKS
        self.up = nn.Parameter(torch.randn(INPUTS, own, generator=rng) * INPUTS**-0.5)
        self.down = nn.Parameter(torch.randn(own, 1, generator=rng) * HIDDEN**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        own = (x @ self.up).relu() @ self.down
        total = own.detach().clone()
        dist.all_reduce(total)
        return own + (total - own).detach()


def describe(model: HalfOfAnMLP, optimizer: torch.optim.Adam, step: int) -> dict[str, Any]:
    """Describe the part of each global tensor that this rank holds: a checkpoint needs nothing
    else.
    """

    def shard(key: str, tensor: Tensor, axis: int) -> distckpt.ShardedTensor:
        return distckpt.ShardedTensor.from_rank_offsets(
            key, tensor.detach(), (axis, model.rank, NUM_RANKS)
        )

    state: dict[str, Any] = {"step": step}
    for name, parameter, axis in (("up", model.up, 1), ("down", model.down, 0)):
        state[name] = shard(f"model.{name}", parameter, axis)
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"{name}.{moment}"] = shard(
                f"optimizer.{moment}.{name}", optimizer.state[parameter][moment], axis
            )
    return state


def train(rank: int, store_port: int, work_dir: str, dies: bool) -> None:
    """Train from the newest checkpoint, or from the beginning; rank 1 may be killed on the way."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", store_port, None, False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    model = HalfOfAnMLP(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for parameter in model.parameters():  # so that there are moments to load
        zeros = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}
    first = 0
    with distckpt.CheckpointManager(os.path.join(work_dir, "checkpoints"), keep_last=2) as manager:
        if manager.steps():
            first = manager.load(describe(model, optimizer, 0))["step"]
            for parameter in model.parameters():
                optimizer.state[parameter]["step"].fill_(first)
            say(rank, f"resumed from step {first}")
        for step in range(first + 1, NUM_STEPS + 1):
            x = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(step))
            loss = (model(x) - x[:, :8].sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stall = ""
            if step % SAVE_EVERY == 0:
                started = time.perf_counter()
                manager.save(step, describe(model, optimizer, step))
                stall = f"   saving: {1000 * (time.perf_counter() - started):.1f} ms stall"
            if step % 5 == 0 or step == KILL_AFTER - 1:
                say(rank, f"step {step:3}   loss {loss.item():.6f}{stall}")
            if dies and step == KILL_AFTER and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


def say(rank: int, text: str) -> None:
    """Print on one rank only."""
    if rank == 0:
        print(text, flush=True)


def main() -> None:
    """Run twice; the first run loses a process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", required=True)
    work_dir = parser.parse_args().work_dir
    for dies in (True, False):
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        try:
            arguments = (store.port, work_dir, dies)
            torch.multiprocessing.start_processes(train, arguments, NUM_RANKS, start_method="fork")
        except torch.multiprocessing.ProcessExitedException as error:
            print(f"a process died: {error}", flush=True)


if __name__ == "__main__":
    main()

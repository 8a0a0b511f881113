"""A tiny model and its data, shared by the examples in this folder; none of it is about
checkpoints.

Every example trains until `--until` with a global batch of 8 rows, whatever the number of
processes, goes on from the newest checkpoint in `--work-dir`, and prints the loss of each step.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn

GLOBAL_BATCH, WIDTH = 8, 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work-dir", required=True)
    parser.add_argument("--until", type=int, default=6, help="train until this step")
    return parser.parse_args()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 2))


def make_batch(step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the rows of one of `size` data parallel ranks."""
    rows = torch.randn(GLOBAL_BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(
        size
    )[rank]
    return rows, torch.stack([rows.sum(1), rows.square().mean(1)], 1)


def loss_of(model: nn.Module, step: int, rank: int = 0, size: int = 1) -> Tensor:
    rows, targets = make_batch(step, rank, size)
    return (model(rows) - targets).square().mean()


def report(step: int, loss: Tensor) -> None:
    """Print the mean loss of all processes."""
    loss = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.6f}", flush=True)

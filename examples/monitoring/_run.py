"""A tiny training run whose saves are reported, shared by the examples beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import distckpt

NUM_STEPS, SAVE_EVERY = 30, 10


def train(root: Path, on_report: Callable[[distckpt.SaveReport], object]) -> None:
    """Train, and save every few steps in the background."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(256, 64)
    with distckpt.CheckpointManager(root, keep_last=2, on_report=on_report) as manager:
        for step in range(1, NUM_STEPS + 1):
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            if step % SAVE_EVERY == 0:
                state = {"model": model, "optimizer": optimizer, "step": step}
                manager.save(step, state, metrics={"loss": loss.item()})


def step_of(report: distckpt.SaveReport) -> int:
    """Return the step of a report: its location ends in `step_<number>`."""
    return int(report.location.rsplit("_", 1)[1])


def is_first_rank() -> bool:
    """Tell whether this is the process that reports for all; reports are the same on every rank."""
    distributed = torch.distributed
    return not distributed.is_initialized() or distributed.get_rank() == 0

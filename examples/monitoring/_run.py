"""A tiny training run whose saves are reported, shared by the examples beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import distckpt

NUM_STEPS, SAVE_EVERY = 30, 10


def train(
    root: Path,
    on_report: Callable[[distckpt.SaveReport], object] | None = None,
    on_start: Callable[[distckpt.CheckpointManager], object] | None = None,
    **options: Any,
) -> None:
    """Train, and save every few steps in the background.

    Args:
        root: the directory of the checkpoints.
        on_report: called with the report of each save.
        on_start: called with the manager before the first step.
        options: further options of the manager.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(256, 64)
    options = {"keep_last": 2, "on_report": on_report, **options}
    with distckpt.CheckpointManager(root, **options) as manager:
        if on_start is not None:
            on_start(manager)
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

"""Learning rate schedulers: their classes, which their states do not name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import summarize_keys

logger = logging.getLogger(__name__)

_OF_ALL = {
    "_step_count",
    "_last_lr",
    "_is_initial",
    "_get_lr_called_within_step",
    "verbose",
}
"""Not the same in all releases of PyTorch."""


def scheduler_class(value: Any) -> str:
    """Name the class of a scheduler, and those in it.

    An example is `SequentialLR[LinearLR, StepLR]`; the name is empty for other objects.
    """
    if type(value).__name__ == "AcceleratedScheduler":
        value = value.scheduler
    if not isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return ""
    inner = ", ".join(map(scheduler_class, getattr(value, "_schedulers", ())))
    if inner:
        return f"{type(value).__name__}[{inner}]"
    return type(value).__name__


def check_scheduler(name: str, scheduler: Any, stored: str, state: Any, is_strict: bool) -> None:
    """Warn of a scheduler that gets the state of another class.

    `stored` is that class, if it is known.

    LoadMismatchError when each has something that the other lacks. Other releases may add to a
    state, so that less than that is no mistake where the class is not known.
    """
    own = scheduler_class(scheduler)
    if not own or not isinstance(state, Mapping):
        return
    expected = scheduler.state_dict().keys() - _OF_ALL
    loaded = state.keys() - _OF_ALL
    if stored == own or (not stored and expected == loaded):
        return
    lacking = expected - loaded
    more = loaded - expected
    text = (
        f"the state that was saved at {name!r} has {summarize_keys(more) or 'nothing'} in place of "
        f"{own}'s {summarize_keys(lacking) or 'nothing'}"
    )
    if is_strict and lacking and more:
        raise LoadMismatchError(
            f"A scheduler of another kind: {text}. Create the one that was saved"
            f"{stored and f', {stored}'}, or leave it out."
        )
    _warn(name, own, stored, text)


def _warn(name: str, own: str, stored: str, text: str) -> None:
    if not stored:
        logger.warning("%s: is it of another scheduler?", text)
        return
    logger.warning(
        "the scheduler that was saved at %r is of class %s, and is loaded into one of class %s, "
        "which computes other learning rates",
        name,
        stored,
        own,
    )

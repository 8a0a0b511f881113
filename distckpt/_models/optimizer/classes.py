"""The class of an optimizer, and whether it goes on from the state of one of another class."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import summarize_keys
from distckpt._models.optimizer.state import Entry
from distckpt._models.optimizer.view import class_name, sharded_inner

logger = logging.getLogger(__name__)

_NEEDED = {
    "ASGD": {"ax", "eta", "mu"},
    "Adadelta": {"acc_delta", "square_avg"},
    "Adagrad": {"sum"},
    "Adam": {"exp_avg", "exp_avg_sq"},
    "AdamW": {"exp_avg", "exp_avg_sq"},
    "Adamax": {"exp_avg", "exp_inf"},
    "LBFGS": {"func_evals", "n_iter"},
    "Muon": {"momentum_buffer"},
    "NAdam": {"exp_avg", "exp_avg_sq", "mu_product"},
    "RAdam": {"exp_avg", "exp_avg_sq"},
    "RMSprop": {"square_avg"},
    "Rprop": {"prev", "step_size"},
    "SparseAdam": {"exp_avg", "exp_avg_sq"},
}
"""What a step of torch's optimizers reads of the state of a parameter that has one."""


def check_class(
    optimizer: Any, prefix: str, settings: Iterable[Entry], names: Collection[str]
) -> None:
    """Warn of an optimizer that gets the state of one of another class, given the names of its
    parameters. State dicts of PyTorch do not name the class.

    LoadMismatchError when its next step would fail.
    """
    own_names = set(names)
    known = [entry for entry in settings if not own_names.isdisjoint(entry["params"])]
    own = class_name(optimizer)
    stored = sorted({entry["class"] for entry in known if "class" in entry})
    if own in stored:
        return
    text = f"The optimizer that was saved at {prefix!r} is of class {', '.join(stored)}, "
    if lacking := _lacking(optimizer, known):
        keeps = f"{text}which keeps" if stored else f"The state that was saved at {prefix!r} has"
        raise LoadMismatchError(
            f"{keeps} no {summarize_keys(lacking)}: {own} cannot go on from there. "
            "Create the optimizer that was saved, or leave it out of the state dict."
        )
    if stored:
        logger.warning("%sand is loaded into one of class %s, which trains otherwise.", text, own)


def _lacking(optimizer: Any, known: Iterable[Entry]) -> set[str]:
    """Return what the next step of an optimizer reads and some parameters do not get."""
    used = [entry for entry in known if entry["has_state"]]
    used = [entry for entry in used if "path" not in entry] or used
    needed = _needed_by(optimizer)
    return {name for entry in used for name in needed - {*entry["tensors"], *entry["values"]}}


def _needed_by(optimizer: Any) -> set[str]:
    bases = type(sharded_inner(optimizer) or optimizer).__mro__
    names = (base.__name__ for base in bases if base.__module__.startswith("torch.optim."))
    return next((_NEEDED[name] for name in names if name in _NEEDED), set())

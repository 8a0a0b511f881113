"""Objects in a state dict, filled with what was loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import summarize_keys
from distckpt._base.tree import HOLE, at, replaced
from distckpt._mapping.wrappers import ShardedObject, StateDict
from distckpt._models.modules import bare_module, load_sharded_state_dict
from distckpt._models.objects import Described, Kind, Place
from distckpt._models.optimizer.sharded import load_sharded_optimizer_state_dict
from distckpt._models.per_rank import warn_of_skipped

logger = logging.getLogger(__name__)

_OF_ALL_SCHEDULERS = {
    "_step_count",
    "_last_lr",
    "_is_initial",
    "_get_lr_called_within_step",
    "verbose",
}
"""Not the same in all releases of PyTorch."""


def restore_objects(described: Described, loaded: StateDict, is_strict: bool) -> StateDict:
    """Put what was loaded into the objects; return it with the objects in their places, those for
    which nothing was loaded included.

    Raises:
        LoadMismatchError: nothing was loaded for an object, unless `is_strict` is False.
    """
    for place in sorted(described.places, key=lambda place: (place.kind, -len(place.path))):
        value = at(loaded, place.path, HOLE)
        if value is not HOLE:
            _restore(place, value, at(described.state_dict, place.path), is_strict)
            loaded = replaced(loaded, place.path, place.value)
        elif not is_strict:
            loaded = _with_object(loaded, place)
        else:
            raise LoadMismatchError(
                f"The checkpoint has nothing at {place.name!r}, where the state dict has a "
                f"{type(place.value).__name__}: leave it out, or load under the names that "
                "were saved.",
                unexpected=[place.name],
            )
    return loaded


def _with_object(loaded: StateDict, place: Place) -> StateDict:
    """Put an object where nothing was loaded; what is in a list is left out, as its items are."""
    if any(isinstance(step, int) for step in place.path):
        return loaded
    missing: Any = place.value
    for depth in range(len(place.path) - 1, -1, -1):
        above = at(loaded, place.path[:depth], HOLE)
        missing = {**(above if isinstance(above, dict) else {}), place.path[depth]: missing}
    whole: StateDict = missing
    return whole


def _restore(place: Place, value: Any, described: Any, is_strict: bool) -> None:
    if place.kind is Kind.MODULE:
        _restore_module(place, value, is_strict)
    elif place.kind is Kind.OPTIMIZER:
        if is_strict or "settings" in value:
            load_sharded_optimizer_state_dict(place.value, value)
    elif place.kind is Kind.PER_RANK:
        _restore_per_rank(place, value, described)
    elif place.kind is Kind.STATEFUL:
        if isinstance(place.value, torch.optim.lr_scheduler.LRScheduler):
            _check_scheduler(place, value, is_strict)
        place.value.load_state_dict(value)


def _restore_module(place: Place, value: StateDict, is_strict: bool) -> None:
    module, prefix = bare_module(place.value), place.prefix and f"{place.prefix}."
    try:
        load_sharded_state_dict(module, value, prefix, strict=is_strict)
    except LoadMismatchError as error:
        if place.path or not error.unexpected:
            raise
        raise LoadMismatchError(
            f"The checkpoint holds more than the {type(module).__name__}: "
            f"{summarize_keys(error.unexpected)}. To load the module alone, put it into a state "
            f"dict: load({{'model': model}}, path).",
            unexpected=error.unexpected,
        ) from error


def _restore_per_rank(place: Place, value: Mapping[str, Any], cell: ShardedObject) -> None:
    stored, own = value["layout"], cell.data["layout"]
    if stored == own:
        place.value.load_state_dict(value["value"])
    else:
        warn_of_skipped(cell, f"layout {stored}", f"layout {own}")


def _check_scheduler(place: Place, state: Mapping[str, Any], is_strict: bool) -> None:
    """Refuse the state of a scheduler of another class, which `load_state_dict` takes; other
    releases may add to it.
    """
    own = place.value.state_dict().keys() - _OF_ALL_SCHEDULERS
    stored = state.keys() - _OF_ALL_SCHEDULERS
    if own == stored:
        return
    text = (
        f"the state that was saved at {place.name!r} has "
        f"{summarize_keys(stored - own) or 'nothing'} in place of {type(place.value).__name__}'s "
        f"{summarize_keys(own - stored) or 'nothing'}"
    )
    if is_strict and own - stored and stored - own:
        raise LoadMismatchError(
            f"A scheduler of another kind: {text}. Create the one that was saved, or leave it out."
        )
    logger.warning("%s: is it of another scheduler?", text)

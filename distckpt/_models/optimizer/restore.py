"""What was loaded, put into an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from distckpt._base.errors import LoadMismatchError
from distckpt._models.dtensor import is_dtensor, local_part
from distckpt._models.optimizer.description import OwnState, places_of
from distckpt._models.optimizer.ids import memory_of
from distckpt._models.optimizer.state import (
    Entry,
    by_name,
    entries_of,
    joined_state,
    options_of,
)
from distckpt._models.optimizer.view import Section


def restored_section(
    section: Section,
    own: OwnState,
    settings: list[Entry],
    loaded: Mapping[Any, Mapping[str, torch.Tensor]],
    owned: set[int] | None,
    fresh: list[str],
) -> Section:
    """Return a section with what was loaded. Names of parameters that have nothing in the
    checkpoint go to `fresh`.
    """
    entries = by_name(settings, section.path)
    state: dict[torch.Tensor, Any] = {}
    names: list[list[str]] = [[] for _ in section.groups]
    for number, place, param in places_of(section):
        name = own.names.get(place)
        entry = entries.get(name)
        if name is not None:
            names[number].append(name)
            if param.requires_grad and (entry is None or entry.get("frozen")):
                fresh.append(name)
        if entry is None:
            state |= {param: section.state[param]} if param in section.state else {}
        elif entry["has_state"] and (owned is None or id(param) in owned):
            tensors = own.tensors.get(place, {})
            _fill(str(name), tensors, loaded.get(place, {}), entry)
            scalar = partial(_scalar, section.groups[number], param, section.state.get(param))
            state[param] = joined_state(entry, tensors, scalar, local_part(param).device)
    given = entries_of(settings, section.path)
    groups = [
        options_of(given, group, known) for group, known in zip(section.groups, names, strict=True)
    ]
    return Section(section.path, section.by_number, groups, state)


def _fill(
    name: str, tensors: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor], entry: Entry
) -> None:
    """Put what was loaded for a parameter into the tensors of the optimizer, where it is not there
    already.
    """
    if sorted(tensors) != entry["tensors"] or sorted(loaded) != entry["tensors"]:
        raise LoadMismatchError(
            f"For the parameter {name!r} the tensors {entry['tensors']} of the optimizer were "
            f"saved, loaded were {sorted(loaded)}. Pass the dict of sharded_optimizer_state_dict "
            "itself to load, without copying it.",
            unexpected=[name],
        )
    for key, tensor in tensors.items():
        target, value = local_part(tensor), local_part(loaded[key])
        if target is not value and (
            memory_of(target) is None or memory_of(target) != memory_of(value)
        ):
            target.detach().copy_(value)


def _scalar(
    group: Mapping[str, Any], param: Any, present: Any, name: str, number: Any, dtype: torch.dtype
) -> torch.Tensor:
    """Make a tensor without axes, where torch's own `load_state_dict` would have it."""
    own = present.get(name) if isinstance(present, dict) else None
    if isinstance(own, torch.Tensor):
        # In the form that the optimizer uses, where it has one.
        return torch.full_like(own, number)
    if name == "step" and not (group.get("capturable") or group.get("fused")):
        return torch.tensor(number, dtype=dtype)
    if name != "step" and not param.ndim and is_dtensor(param):
        return torch.full_like(param.detach(), number, dtype=dtype)
    return torch.tensor(number, dtype=dtype, device=local_part(param).device)

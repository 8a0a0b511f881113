"""What was loaded, put into an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from distckpt._base.errors import LoadMismatchError
from distckpt._base.memory import fill
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
) -> Section:
    """Return a section with what was loaded: the tensors of each state, by place."""
    entries = by_name(settings, section.path)
    state: dict[torch.Tensor, Any] = {}
    for number, place, param in places_of(section):
        entry = entries.get(own.names.get(place))
        if entry is None:
            if param in section.state:
                state[param] = section.state[param]
        elif entry["has_state"] and (owned is None or id(param) in owned):
            tensors = own.tensors.get(place, {})
            # Values of a state by number are at its place in common state, and are in the entry.
            found = loaded.get(place, {})
            given = {name: found[name] for name in entry["tensors"] if name in found}
            _fill(own.names[place], tensors, given, entry)
            scalar = partial(_scalar, section.groups[number], param, section.state.get(param))
            state[param] = joined_state(entry, tensors, scalar, local_part(param).device)
    groups = _restored_groups(section, own, settings)
    return Section(section.path, section.by_number, groups, state)


def _restored_groups(
    section: Section, own: OwnState, settings: list[Entry]
) -> list[dict[str, Any]]:
    names: list[list[str | int]] = [
        [] if group["params"] else [number] for number, group in enumerate(section.groups)
    ]
    for number, place, _ in places_of(section):
        if place in own.names:
            names[number].append(own.names[place])
    given = entries_of(settings, section.path)
    pairs = zip(section.groups, names, strict=True)
    return [options_of(given, group, known) for group, known in pairs]


def untrained_names(section: Section, own: OwnState, settings: list[Entry]) -> list[str]:
    """Return the names of trained parameters that were not trained when the optimizer was saved."""
    entries = by_name(settings, section.path)
    names = []
    for _, place, param in places_of(section):
        name = own.names.get(place)
        entry = entries.get(name)
        if name is not None and param.requires_grad and (entry is None or entry.get("frozen")):
            names.append(name)
    return names


def _fill(
    name: str, tensors: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor], entry: Entry
) -> None:
    """Copy what was loaded for a parameter into the tensors of the optimizer, unless it is there
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
            fill(name, target, value)


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

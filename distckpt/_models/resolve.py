"""Descriptions of objects completed with stored entries, for a load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distckpt._base.tree import HOLE, at, replaced
from distckpt._models.modules import bare_module, with_stored_buffers
from distckpt._models.objects import Description, Kind
from distckpt._models.optimizer.describe import optimizer_targets
from distckpt._models.per_rank import warn_of_shared, warn_of_skipped
from distckpt._state.stored_form import StoredEntry
from distckpt.mapping._base import OpenReplicaId
from distckpt.mapping._wrappers import LocalNonpersistentObject, ShardedObject, StateDict


def needs_stored(description: Description) -> int:
    """Return how much a load needs to know of the checkpoint.

    It is 1 for its keys, 2 for the settings of optimizers as well, else 0.
    """
    if description.optimizers:
        return 2
    return int(any(place.kind is not Kind.DTENSOR for place in description.places))


def settings_of(
    description: Description, stored: Mapping[str, StoredEntry]
) -> dict[str, ShardedObject]:
    """Return the stored settings of optimizers, which `resolve` needs."""
    keys = {f"{state.prefix}.settings" for _, state in description.optimizers}
    return {key: ShardedObject(key, None, (1,), (0,)) for key in sorted(keys & stored.keys())}


def resolve(
    rank: int,
    description: Description,
    stored: Mapping[str, StoredEntry],
    settings: StateDict,
    shared_value: Callable[[str], Any],
) -> Description:
    """Complete the description of a load from stored entries and settings."""
    tree = _with_optimizer_targets(rank, description, stored, settings)
    for place in description.places:
        if place.kind is Kind.MODULE:
            shards = at(tree, place.path)
            requested = with_stored_buffers(bare_module(place.value), shards, stored)
            if requested is not shards:
                tree = replaced(tree, place.path, requested)
    places = []
    for place in description.places:
        entry = stored.get(place.name)
        cell = at(tree, place.path, HOLE)
        if place.kind is not Kind.PER_RANK or entry is None or entry.shape == cell.global_shape:
            places.append(place)
            continue
        shared = shared_value(place.name)
        if shared is not HOLE:
            warn_of_shared(place.value, cell)
            # From now on a state that all ranks have in common.
            places.append(place._replace(kind=Kind.STATEFUL))
            tree = replaced(tree, place.path, LocalNonpersistentObject(shared["value"]))
        else:
            grids = f"grid {tuple(entry.shape)}", f"grid {cell.global_shape}"
            warn_of_skipped(place.value, cell, *grids)
            tree = replaced(tree, place.path, LocalNonpersistentObject(place.value))
    return Description(tree, places, description.optimizers)


def _with_optimizer_targets(
    rank: int,
    description: Description,
    stored: Mapping[str, StoredEntry],
    settings: StateDict,
) -> Any:
    """Return the state dict with targets for stored optimizer states."""
    tree = description.state_dict
    unrequested = set(settings)
    for path, state in description.optimizers:
        key = f"{state.prefix}.settings"
        if key not in settings:
            continue
        targets = optimizer_targets(state, settings[key], stored)
        if key in unrequested:
            # Requested once more, by the first with this prefix, as all that is loaded is.
            unrequested.remove(key)
            targets["settings"] = ShardedObject(key, None, (1,), (0,), OpenReplicaId((0, rank)))
        tree = replaced(tree, path, targets)
    return tree

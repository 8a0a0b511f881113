"""Values that a load requests and the checkpoint lacks."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import summarize_keys
from distckpt._base.tree import (
    HOLE,
    Position,
    at,
    dotted,
    is_container,
    is_dict,
    leaves,
    on_the_way,
)
from distckpt._models.objects import Kind
from distckpt._operations.load_request import Differences, Targets
from distckpt._ranks.collectives import Ranks
from distckpt._state.strictness import StrictHandling
from distckpt.mapping._wrappers import ShardedObject, StateDict

logger = logging.getLogger(__name__)


def absent_keys(targets: Targets, differences: Differences) -> Mapping[str, Any]:
    """Return the values for shards that are not read, by key."""
    absent: dict[str, Any] = dict.fromkeys(differences.unexpected, HOLE)
    if targets.request.family is None:
        return absent
    # Objects of Transformer Engine, which no Hugging Face directory holds; modules accept None for
    # them.
    for shard in targets.split.shards:
        if isinstance(shard, ShardedObject) and shard.key.endswith("_extra_state"):
            absent.setdefault(shard.key, None)
    return absent


def refuse_absent(targets: Targets, loaded: StateDict) -> None:
    """Refuse requested plain tensors and values that were not loaded.

    Values that are None may be absent, as may objects, which check for themselves whether they were
    loaded completely.

    Raises:
        LoadMismatchError: a tensor or value is missing.
    """
    request = targets.request
    if not request.asks_for_all:
        return
    values = targets.split.common
    lost = _absent(tensor_paths(values), loaded)
    if lost:
        raise LoadMismatchError(
            f"The tensors {summarize_keys(lost)} of the state dict are not sharded, and the "
            f"common state of the checkpoint {targets.location!r} has none there: nothing can be "
            "loaded for them. Give load the module itself, {'model': model}, or its "
            "sharded_state_dict(model), in the place of model.state_dict()."
            + _way_to_read(targets, lost),
            unexpected=lost,
        )
    if request.warns_of_values:
        return
    objects = {place.path for place in targets.described.places}
    absent = _absent(_value_paths(values, objects), loaded)
    if absent:
        holder = f"The checkpoint {targets.location!r}"
        if targets.source.is_live:
            holder = "What is given"
        raise LoadMismatchError(
            f"{holder} holds no value for {summarize_keys(absent)}, which the state dict asks for: "
            "leave that out of the state dict, and set it yourself afterwards."
            + _way_to_read(targets, absent),
            unexpected=absent,
        )


def _way_to_read(targets: Targets, absent: Iterable[str]) -> str:
    """Name the call that reads a stored tensor of an absent name."""
    names = tuple(f"{name}." for name in absent)
    for key in targets.stored:
        if f"{key}.".startswith(names):
            return f" A tensor is there: distckpt.open({targets.location!r}).read({key!r})."
    return ""


def report_absent_values(ranks: Ranks, targets: Targets, loaded: StateDict) -> frozenset[str]:
    """Warn about plain tensors, values and objects for which nothing was loaded.

    Return their names on all ranks. Collective operation: all ranks must call it.
    """
    request = targets.request
    if request.mode is not StrictHandling.LOG_ALL and not request.warns_of_values:
        return frozenset()
    objects = set()
    for place in targets.described.places:
        if request.asks_for_all or place.kind is not Kind.STATEFUL:
            objects.add(place.path)
    values = targets.split.common
    paths = itertools.chain(tensor_paths(values), _value_paths(values, objects))
    absent = united(ranks, _absent(paths, loaded))
    if absent and ranks.is_coordinator:
        logger.warning(
            "the checkpoint %r holds nothing for %s, which the state dict asks for: not loaded",
            request.path,
            summarize_keys(sorted(absent)),
        )
    return absent


def united(ranks: Ranks, names: Iterable[str]) -> frozenset[str]:
    """Return the names of all ranks. Collective operation: all ranks must call it."""
    sent = ranks.all_gather(json.dumps(sorted(names)).encode())
    return frozenset[str]().union(*map(json.loads, sent))


def _absent(paths: Iterable[Position], loaded: StateDict) -> list[str]:
    absent = []
    for path in paths:
        if at(loaded, path, HOLE) is HOLE:
            absent.append(dotted(path))
    return absent


def tensor_paths(tree: Any) -> Iterator[Position]:
    """Yield the position of each tensor in nested dicts."""
    for path, leaf in leaves(tree, is_dict):
        if isinstance(leaf, torch.Tensor):
            yield path


def _value_paths(tree: Any, objects: Collection[Position]) -> Iterator[Position]:
    """Yield the position of each value that is not None.

    A dict or list that contains no objects counts as one value.
    """
    above = itertools.chain([tree], *(on_the_way(tree, place[:-1]) for place in objects))
    holders = set(map(id, filter(is_container, above)))

    def is_holder(node: Any) -> bool:
        return id(node) in holders or _holds_shards(node)

    for position, value in leaves(tree, is_holder):
        is_value = value is not None and value is not HOLE
        if is_value and position not in objects and id(value) not in holders:
            yield position


def _holds_shards(node: Any) -> bool:
    return isinstance(node, list | tuple) and any(item is HOLE for item in node)

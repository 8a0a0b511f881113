"""Values that a load requests and the checkpoint lacks."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
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
from distckpt.mapping._wrappers import StateDict


def refuse_absent_tensors(values: Any, loaded: StateDict, location: str) -> None:
    """Refuse plain tensors in a request for which nothing was loaded.

    Args:
        values: the request without its shards.
        loaded: the loaded values.
        location: location of the checkpoint.

    Raises:
        LoadMismatchError: a tensor is missing.
    """
    lost = _absent(tensor_paths(values), loaded)
    if lost:
        raise LoadMismatchError(
            f"The tensors {summarize_keys(lost)} of the state dict are not sharded, and the "
            f"common state of the checkpoint {location!r} has none there: nothing can be loaded "
            f"for them. Give load the module itself, {{'model': model}}, or its "
            "sharded_state_dict(model), in the place of model.state_dict().",
            unexpected=lost,
        )


def refuse_absent_values(
    values: Any, objects: Collection[Position], loaded: StateDict, holder: str
) -> None:
    """Refuse plain values in a request for which nothing was loaded.

    See `refuse_absent_tensors`. Values that are None may be absent, as may paths to `objects`,
    which check for themselves whether they were loaded completely.
    """
    absent = _absent(_value_paths(values, objects), loaded)
    if absent:
        raise LoadMismatchError(
            f"{holder} holds no value for {summarize_keys(absent)}, which the "
            "state dict asks for: leave that out of the state dict, and set it yourself "
            "afterwards.",
            unexpected=absent,
        )


def absent_values(
    values: Any,
    objects: Collection[Position],
    loaded: StateDict,
) -> frozenset[str]:
    """Name plain tensors, values and objects for which nothing was loaded.

    Shards are not named.
    """
    paths = [*tensor_paths(values), *_value_paths(values, objects)]
    return frozenset(_absent(paths, loaded))


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

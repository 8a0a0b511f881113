"""Flatten state dicts as torch.distributed.checkpoint does.

Values have dotted keys, and lie in nested dicts and lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from distckpt._base import tree
from distckpt._base.errors import CheckpointingException, InvalidShardingError
from distckpt._base.tree import HOLE, Position, at, compacted, dotted, map_leaves, new_like


def unwrap_stateful(state_dict: Mapping[str, Any], *, in_order: bool = False) -> dict[str, Any]:
    """Replace stateful values at the top by their state dicts.

    `in_order` calls them by key.
    """
    if not isinstance(state_dict, Mapping):
        raise CheckpointingException(
            f"state_dict is a {type(state_dict).__name__} and must be a dict, such as "
            + '{"model": model}.'
        )
    unwrapped = {}
    for key in sorted(state_dict) if in_order else state_dict:
        value = state_dict[key]
        if is_stateful(value):
            value = value.state_dict()
        unwrapped[key] = value
    return unwrapped


def is_stateful(value: Any) -> bool:
    """Whether a value is saved and loaded through its own state dict."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class Leaf(NamedTuple):
    """A value of a state dict with its path.

    The path as text is the key.
    """

    key: str
    path: Position
    value: Any


def leaves(state_dict: Mapping[Any, Any]) -> list[Leaf]:
    """Flatten a state dict.

    Dicts are always flattened, lists only where they hold tensors or dicts, other containers never.

    Raises:
        InvalidShardingError: two values have one key, as in `{"a": {"b": 1}, "a.b": 2}`.
    """
    leaves_by_key: dict[str, Leaf] = {}
    for path, value in tree.leaves(state_dict, _is_flattened):
        key = dotted(path)
        if key in leaves_by_key:
            raise InvalidShardingError(
                f"Two values have the key {key!r}, those at {list(leaves_by_key[key].path)} and at "
                f"{list(path)}: rename one."
            )
        leaves_by_key[key] = Leaf(key, path, value)
    return list(leaves_by_key.values())


def with_leaves(state_dict: Any, replace: Callable[[Position, Any], Any]) -> Any:
    """Copy a state dict with each value replaced by `replace(path, value)`."""
    return map_leaves(replace, state_dict, _is_flattened, join=new_like)


def _is_flattened(node: Any) -> bool:
    if isinstance(node, list):
        return any(
            leaf is HOLE or isinstance(leaf, torch.Tensor | Mapping)
            for _, leaf in tree.leaves(node, _is_list)
        )
    return isinstance(node, Mapping)


def _is_list(node: Any) -> bool:
    return isinstance(node, list)


def put(state_dict: Any, path: Position, value: Any) -> None:
    """Replace the value at a path, in the container that holds it."""
    *above, last = path
    for part in above:
        state_dict = state_dict[part]
    state_dict[last] = value


def find(common: Any, path: Position) -> Any:
    """Return the value at a path in common state, or `HOLE`."""
    return compacted(at(common, path, HOLE))


def by_key(common: Any) -> dict[str, Any]:
    """Return the values of common state by key.

    A key is less exact than a path: `a.b` may be nested or not.

    PyTorch compares keys, so that state dicts may be flat when saved and nested when loaded, and
    its format turns all keys of dicts into text.
    """
    values: dict[str, Any] = {}
    for path, value in tree.leaves(common, _is_flattened):
        values.setdefault(dotted(path), compacted(value))
    return values

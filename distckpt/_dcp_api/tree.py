"""Flatten state dicts as torch.distributed.checkpoint does: values with dotted keys, in nested
dicts and lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from distckpt._base.errors import CheckpointingException, InvalidShardingError
from distckpt._format.codec import HOLE
from distckpt._state import flatten

Path: TypeAlias = tuple[Any, ...]
"""The keys of dicts and the positions in lists that lead to a value."""


def unwrap_stateful(state_dict: Mapping[str, Any], *, in_order: bool = False) -> dict[str, Any]:
    """Replace the values at the top that have state dicts of their own by those; `in_order` calls
    them by key.
    """
    if not isinstance(state_dict, Mapping):
        raise CheckpointingException(
            f"state_dict is a {type(state_dict).__name__} and must be a dict, such as "
            + '{"model": model}.'
        )
    values = ((key, state_dict[key]) for key in (sorted(state_dict) if in_order else state_dict))
    return {key: value.state_dict() if is_stateful(value) else value for key, value in values}


def is_stateful(value: Any) -> bool:
    """Tell whether a value is saved and loaded through its own state dict."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class Leaf(NamedTuple):
    """A value of a state dict with its path, and the path as text: the key."""

    key: str
    path: Path
    value: Any


def leaves(state_dict: Mapping[Any, Any]) -> list[Leaf]:
    """Flatten a state dict.

    Dicts are always flattened, lists only where they hold tensors or dicts, other containers never.

    Raises:
        InvalidShardingError: two values have one key, such as those of `{"a": {"b": 1}, "a.b": 2}`.
    """
    found: dict[str, Leaf] = {}

    def visit(path: Path, value: Any) -> None:
        key = _key(path)
        if key in found:
            raise InvalidShardingError(
                f"Two values have the key {key!r}, those at {list(found[key].path)} and at "
                f"{list(path)}: rename one."
            )
        found[key] = Leaf(key, path, value)

    with_leaves(state_dict, visit)
    return list(found.values())


def with_leaves(node: Any, replace: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Copy the dicts and lists of a state dict, with each value replaced by `replace(path,
    value)`.
    """
    if isinstance(node, Mapping):
        return {part: with_leaves(child, replace, (*path, part)) for part, child in node.items()}
    if _is_flattened(node):
        return [with_leaves(child, replace, (*path, part)) for part, child in enumerate(node)]
    return replace(path, node)


def _is_flattened(node: Any) -> bool:
    if not isinstance(node, list):
        return False
    return any(
        item is HOLE or isinstance(item, torch.Tensor | Mapping) or _is_flattened(item)
        for item in node
    )


def put(state_dict: Any, path: Path, value: Any) -> None:
    """Replace the value at a path, in the container that holds it."""
    *above, last = path
    for part in above:
        state_dict = state_dict[part]
    state_dict[last] = value


def find(tree: Any, path: Iterable[Any]) -> Any:
    """Return the value at a path in common state, `HOLE` when there is none."""
    for part in path:
        if isinstance(tree, Mapping):
            tree = tree.get(part, HOLE)
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return HOLE
    return _compact(tree)


def by_key(common: Any) -> dict[str, Any]:
    """Return the values of common state by key, which is less exact than a path: `a.b` may be
    nested or not.

    PyTorch compares keys, so that state dicts may be flat when saved and nested when loaded, and
    its format turns all keys of dicts into text.
    """
    found: dict[str, Any] = {}
    with_leaves(common, lambda path, value: found.setdefault(_key(path), _compact(value)))
    return found


def _key(path: Path) -> str:
    return ".".join(map(str, path))


def _compact(value: Any) -> Any:
    return flatten.compact({"found": value}).get("found", HOLE)

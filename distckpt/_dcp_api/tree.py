"""State dicts as torch.distributed.checkpoint takes them apart: values with dotted keys, in nested dicts and lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from distckpt._base.errors import InvalidShardingError
from distckpt._format.codec import HOLE
from distckpt._state import flatten

Path: TypeAlias = tuple[Any, ...]
"""The keys of dicts and the positions in lists that lead to a value."""


class Leaf(NamedTuple):
    """A value of a state dict, and where it stands; its key is that place as text."""

    key: str
    path: Path
    value: Any


def leaves(state_dict: Mapping[Any, Any]) -> list[Leaf]:
    """List the values of a state dict.

    Dicts are always taken apart, lists only where they hold tensors or dicts, and other containers never.

    Raises:
        InvalidShardingError: two values have one key, such as those of `{"a": {"b": 1}, "a.b": 2}`.
    """
    found: dict[str, Leaf] = {}

    def visit(path: Path, value: Any) -> None:
        key = _key(path)
        if key in found:
            raise InvalidShardingError(
                f"Two values have the key {key!r}, those at {list(found[key].path)} and at {list(path)}: rename one."
            )
        found[key] = Leaf(key, path, value)

    with_leaves(state_dict, visit)
    return list(found.values())


def with_leaves(node: Any, replace: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return the same dicts and lists with other values: those that `replace` gives for each path and value."""
    if isinstance(node, Mapping):
        return {part: with_leaves(child, replace, (*path, part)) for part, child in node.items()}
    if _is_divided(node):
        return [with_leaves(child, replace, (*path, part)) for part, child in enumerate(node)]
    return replace(path, node)


def _is_divided(node: Any) -> bool:
    if not isinstance(node, list):
        return False
    return any(item is HOLE or isinstance(item, torch.Tensor | Mapping) or _is_divided(item) for item in node)


def put(state_dict: Any, path: Path, value: Any) -> None:
    """Replace the value at a path, in the container that holds it."""
    *above, last = path
    for part in above:
        state_dict = state_dict[part]
    state_dict[last] = value


def find(tree: Any, path: Iterable[Any]) -> Any:
    """Return what stands at a path in common state, `HOLE` when nothing does."""
    for part in path:
        if isinstance(tree, Mapping):
            tree = tree.get(part, HOLE)
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return HOLE
    return _compact(tree)


def by_key(common: Any) -> dict[str, Any]:
    """Return the values of common state by their keys, which say less than paths: `a.b` may be nested or not.

    PyTorch compares keys, so that state dicts may be flat when saved and nested when loaded, and its format has text in
    place of all other keys of dicts.
    """
    found: dict[str, Any] = {}
    with_leaves(common, lambda path, value: found.setdefault(_key(path), _compact(value)))
    return found


def _key(path: Path) -> str:
    return ".".join(map(str, path))


def _compact(value: Any) -> Any:
    return flatten.compact({"found": value}).get("found", HOLE)

"""Pure functions over nested dicts and lists.

Dicts and lists (and their subclasses) are containers, which these functions walk through.
Everything else is a leaf, tuples included. A *position* is the tuple of dict keys and list indices
that leads to a leaf.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch

from distckpt._base.public import set_public_home
from distckpt._base.tree import Position, children_of, map_leaves, nested_items_iter, new_like

__all__ = [
    "DiffResult",
    "Position",
    "dict_list_map_inplace",
    "dict_list_map_outplace",
    "dict_map",
    "dict_map_with_key",
    "diff",
    "extract_matching_values",
    "inspect_types",
    "map_reduce",
    "merge",
    "nested_items_iter",
    "nested_values",
]

set_public_home(globals())

DiffResult: TypeAlias = tuple[list[Any], list[Any], list[Any]]


def extract_matching_values(
    x: dict[Any, Any] | list[Any],
    predicate: Callable[[Any], bool],
    return_lists_as_dicts: bool = False,
) -> tuple[Any, Any]:
    """Split nested containers into leaves that match and leaves that do not.

    Both halves keep the nesting of `x`. A container that ends up without leaves is left out of its
    half, except that a dict value which was empty from the start stays in the second half. An empty
    container inside a list is offered to `predicate` like a leaf.

    Args:
        x: dict or list to split; it is not changed. ValueError for anything else.
        predicate: tells whether a leaf belongs to the first half.
        return_lists_as_dicts: give each list as a dict from original index to value. Otherwise the
            lists of each half are compacted, so that indices shift.
    """
    if not isinstance(x, dict | list):
        raise ValueError(f"expected a dict or a list at the top, got {type(x).__name__}")
    matching: dict[Any, Any] = {}
    other: dict[Any, Any] = {}
    for key, value in children_of(x):
        if not _is_split(value, x):
            (matching if predicate(value) else other)[key] = value
            continue
        below = extract_matching_values(value, predicate, return_lists_as_dicts)
        if below[0]:
            matching[key] = below[0]
        if below[1] or not value:
            other[key] = below[1]
    if isinstance(x, list) and not return_lists_as_dicts:
        return list(matching.values()), list(other.values())
    return matching, other


def _is_split(value: Any, container: dict[Any, Any] | list[Any]) -> bool:
    return isinstance(value, dict | list) and (bool(value) or isinstance(container, dict))


def diff(x1: Any, x2: Any, prefix: Position = ()) -> DiffResult:
    """Compare two nested values, and list where they differ.

    Here tuples and numpy arrays are walked through as well. Tensors are compared by shape and
    value, whatever their dtype and device. Of two objects with a `replica_id` only their `data` is
    compared. Values are equal unless `!=` says otherwise, so NaN differs from NaN.

    Returns:
        Three lists, all empty when the values are equal: the positions found only on the left,
        those found only on the right, and one tuple per differing leaf, `(position, type on the
        left, type on the right)`. For tensors of one shape it goes on with the number of differing
        elements, the shape, and the indices of those elements; for other tensors with both shapes.
        Positions begin with `prefix`.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        return _diff_dicts(x1, x2, prefix)
    if type(x1) is type(x2):
        if _is_sequence(x1) and _is_sequence(x2):
            return _diff_sequences(x1, x2, prefix)
        if hasattr(x1, "replica_id") and hasattr(x2, "replica_id"):
            return diff(x1.data, x2.data, (*prefix, type(x1)))
    return [], [], _diff_leaves(x1, x2, prefix)


def _diff_dicts(x1: dict[Any, Any], x2: dict[Any, Any], prefix: Position) -> DiffResult:
    only_left = [(*prefix, key) for key in x1 if key not in x2]
    only_right = [(*prefix, key) for key in x2 if key not in x1]
    common = [(key, x1[key], x2[key]) for key in x1 if key in x2]
    return _diff_common(only_left, only_right, common, prefix)


def _diff_common(
    only_left: list[Any],
    only_right: list[Any],
    common: Iterable[tuple[Any, Any, Any]],
    prefix: Position,
) -> DiffResult:
    """Add the differences between values on both sides.

    They are given as (key, left, right).
    """
    mismatch: list[Any] = []
    for key, left_value, right_value in common:
        left, right, differing = diff(left_value, right_value, (*prefix, key))
        only_left += left
        only_right += right
        mismatch += differing
    return only_left, only_right, mismatch


def _is_sequence(x: Any) -> bool:
    return isinstance(x, (list, tuple)) or (isinstance(x, np.ndarray) and x.ndim > 0)


def _diff_sequences(x1: Any, x2: Any, prefix: Position) -> DiffResult:
    if isinstance(x1, np.ndarray) and x1.dtype != object and np.array_equal(x1, x2):
        return [], [], []  # large equal arrays are common, and slow to walk
    only_left = [(*prefix, i) for i in range(len(x1) - 1, len(x2) - 1, -1)]
    only_right = [(*prefix, i) for i in range(len(x2) - 1, len(x1) - 1, -1)]
    return _diff_common(only_left, only_right, zip(itertools.count(), x1, x2, strict=False), prefix)


def _diff_leaves(x1: Any, x2: Any, prefix: Position) -> list[tuple[Any, ...]]:
    kinds = (prefix, type(x1), type(x2))
    if isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor):
        details = _diff_tensors(x1, x2)
        if details is None:
            return []
        return [kinds + details]
    if _differ(x1, x2):
        return [kinds]
    return []


def _diff_tensors(x1: torch.Tensor, x2: torch.Tensor) -> tuple[Any, ...] | None:
    if x1.shape != x2.shape:
        return x1.shape, x2.shape
    if x1.device != x2.device:
        x1 = x1.cpu()
        x2 = x2.cpu()
    try:
        unequal = x1 != x2
        count = unequal.sum()
        if not count:
            return None
        return count, unequal.shape, unequal.nonzero().tolist()
    except (RuntimeError, TypeError, ValueError):
        # Some tensors cannot be compared at all, such as those on the meta device.
        return x1.shape, x2.shape


def _differ(x1: Any, x2: Any) -> bool:
    try:
        return bool(x1 != x2)
    except Exception:
        # `!=` of any class may fail, or give an array without a truth value. The two are not known
        # to be equal.
        return True


def inspect_types(x: Any, prefix: Position = (), indent: int = 4) -> None:
    """Print the nesting of a value and the types of its leaves.

    They are indented by `indent` spaces for each item of `prefix`.
    """
    if isinstance(x, (dict, list)):
        print()
        for key, value in children_of(x):
            bullet = "-"
            if isinstance(x, dict):
                bullet = ">"
            print(f"{' ' * (indent * len(prefix))}{bullet} {key}: ", end="")
            inspect_types(value, (*prefix, key), indent)
    elif isinstance(x, torch.Tensor):
        print(f"Tensor of shape {x.shape}")
    else:
        text = str(x)
        print(f"[{type(x)}]: {text if len(text) <= 30 else text[:30] + '... (truncated)'}")


def nested_values(x: dict[Any, Any] | list[Any]) -> Iterator[Any]:
    """Iterate over the leaves of nested dicts and lists, in order."""
    for _, _, value in nested_items_iter(x):
        yield value


def dict_map(f: Callable[[Any], Any], d: dict[Any, Any]) -> None:
    """Replace each leaf of nested dicts and lists by `f(leaf)`, in place."""
    for container, key, value in nested_items_iter(d):
        container[key] = f(value)


def dict_map_with_key(f: Callable[[Any, Any], Any], d: dict[Any, Any]) -> None:
    """Replace each leaf by `f(key, leaf)`, in place; `key` is the last key or index on the way."""
    for container, key, value in nested_items_iter(d):
        container[key] = f(key, value)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace each leaf of nested dicts and lists by `f(leaf)`, in place.

    The results of `f` are not walked through.

    Returns:
        `x` itself when it is a container, else `f(x)`.
    """
    if not _is_nested(x):
        return f(x)
    dict_map(f, x)
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Copy nested dicts and lists with `f(leaf)` for each leaf.

    The copies are plain ones. If `x` is a leaf, return `f(x)`.
    """
    return map_leaves(lambda _, leaf: f(leaf), x, _is_nested, join=new_like)


def _is_nested(x: Any) -> bool:
    return isinstance(x, dict | list)


def merge(x1: Any, x2: Any, key: Position = ()) -> Any:
    """Merge nested dicts and lists into `x1`, in place.

    Dicts are united. Lists must have the same length and are merged element by element, so their
    elements must be containers. A leaf may be on one side only, even if both are equal. `x2` is not
    changed, but its containers may become part of `x1`, which is returned. `key` is the position of
    both, for error messages.

    Raises:
        ValueError: lists of different lengths, or a leaf on both sides; the message gives the
            position.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for k, value in x2.items():
            x1[k] = merge(x1[k], value, (*key, k)) if k in x1 else value
    elif isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise ValueError(
                f"cannot merge lists of different lengths, {len(x1)} and {len(x2)}, at position "
                f"{key}"
            )
        for i, value in enumerate(x2):
            x1[i] = merge(x1[i], value, (*key, i))
    else:
        raise ValueError(
            f"both sides of a merge hold a value at position {key}, and at least one is not a "
            f"container of the other's kind: {x1!r} and {x2!r}"
        )
    return x1


def map_reduce(
    xs: Iterable[Any],
    key_fn: Callable[[Any], Any] = lambda x: x,
    value_fn: Callable[[Any], Any] = lambda x: x,
    reduce_fn: Callable[[list[Any]], Any] = lambda x: x,
) -> dict[Any, Any]:
    """Group items by `key_fn`, and return `reduce_fn(values)` of each group.

    Groups are in the order in which they first appear.

    The values of a group are the results of `value_fn`, in the order of its items.
    """
    groups: defaultdict[Any, list[Any]] = defaultdict(list)
    for x in xs:
        groups[key_fn(x)].append(value_fn(x))
    return {key: reduce_fn(values) for key, values in groups.items()}

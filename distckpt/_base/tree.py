"""Nested dicts, lists and tuples: walking through them, and changing them.

A *position* is the tuple of dict keys and indices that leads to a value. Dicts, lists and tuples
are containers, and everything else is a leaf. `is_container` arguments narrow that down.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

Position: TypeAlias = tuple[Any, ...]

CONTAINERS = (dict, list, tuple)


def is_container(node: object) -> bool:
    """Tell whether a value is a dict, list or tuple, or of a class derived from them."""
    return isinstance(node, CONTAINERS)


def is_plain_container(node: object) -> bool:
    """Tell whether a value is a dict, list or tuple itself."""
    return type(node) in CONTAINERS


def dotted(position: Position) -> str:
    """Write a position as text, such as `model.layers.0.weight`."""
    return ".".join(map(str, position))


# --- Walking --------------------------------------------------------------------------------------


def children_of(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return the values in a container with their keys or indices."""
    return container.items() if isinstance(container, dict) else enumerate(container)


def leaves(
    tree: Any, is_container: Callable[[Any], bool] = is_container, position: Position = ()
) -> Iterator[tuple[Position, Any]]:
    """Yield the leaves with their positions, which begin with `position`."""
    if not is_container(tree):
        yield position, tree
        return
    for key, child in children_of(tree):
        yield from leaves(child, is_container, (*position, key))


def on_the_way(tree: Any, position: Position) -> Iterator[Any]:
    """Yield the tree, and what is at each step towards a position, as far as there is something."""
    yield tree
    for key in position:
        is_there = isinstance(tree, CONTAINERS) and (
            key in tree if isinstance(tree, dict) else key in range(len(tree))
        )
        if not is_there:
            return
        tree = tree[key]
        yield tree


def at(tree: Any, position: Position, default: Any = None) -> Any:
    """Return the value at a position, `default` if there is none."""
    found = list(on_the_way(tree, position))
    return found[-1] if len(found) > len(position) else default


def nested_items_iter(x: dict[Any, Any] | list[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield `(container, key, leaf)` for the leaves of nested dicts and lists, where tuples are
    leaves. They may be replaced during the iteration.
    """
    for key, value in children_of(x):
        if isinstance(value, (dict, list)):
            yield from nested_items_iter(value)
        else:
            yield x, key, value


# --- Changing -------------------------------------------------------------------------------------


def rebuilt(container: Any, children: Sequence[Any]) -> Any:
    """Return a container with other children: a dict, a list, or a tuple of the same class.

    An instance of another class (OrderedDict, defaultdict, torch.Size) is kept if its children are
    the same; one that no children can be given, unlike a named tuple, also if they are copies.
    """
    if not is_plain_container(container):
        own = container.values() if isinstance(container, dict) else container
        is_same = operator.is_ if isinstance(container, tuple) else _is_copy
        if all(map(is_same, own, children)):
            return container
    if isinstance(container, dict):
        return dict(zip(container, children, strict=True))
    if isinstance(container, list):
        return list(children)
    has_fields = hasattr(container, "_fields")
    return type(container)(*children) if has_fields else tuple(children)


def _is_copy(old: Any, new: Any) -> bool:
    """Tell whether a tree is another one, or consists of new containers with the same leaves."""
    if old is new:
        return True
    if not is_plain_container(old) or type(old) is not type(new) or len(old) != len(new):
        return False
    pairs = zip(children_of(old), children_of(new), strict=True)
    return all(key == other and _is_copy(a, b) for (key, a), (other, b) in pairs)


def copied(tree: Any) -> Any:
    """Copy the dicts and lists of a tree, but not its leaves."""
    if isinstance(tree, dict):
        return {key: copied(child) for key, child in tree.items()}
    if isinstance(tree, list):
        return [copied(child) for child in tree]
    return rebuilt(tree, [copied(child) for child in tree]) if isinstance(tree, tuple) else tree


def map_leaves(
    function: Callable[[Position, Any], Any],
    tree: Any,
    is_container: Callable[[Any], bool] = is_container,
    position: Position = (),
) -> Any:
    """Return a tree with `function(position, leaf)` in the place of each leaf, see `rebuilt`."""
    if not is_container(tree):
        return function(position, tree)
    children = [
        map_leaves(function, child, is_container, (*position, key))
        for key, child in children_of(tree)
    ]
    return rebuilt(tree, children)


def replaced(tree: Any, position: Position, value: Any) -> Any:
    """Return a tree with another value at a position; the containers on the way are copied."""
    if not position:
        return value
    first, *below = position
    children = dict(children_of(tree))
    children[first] = replaced(children[first], tuple(below), value)
    return rebuilt(tree, list(children.values()))

"""Nested dicts, lists and tuples: walks through them, and changes.

A *position* is the tuple of dict keys and indices that leads to a value. Dicts, lists and tuples
are containers, and everything else is a leaf. `is_container` arguments narrow that down, or admit
other mappings.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Position: TypeAlias = tuple[Any, ...]

CONTAINERS = (dict, list, tuple)


class Hole:
    """Type of `HOLE`."""

    def __repr__(self) -> str:
        return "<hole>"

    def __reduce__(self) -> str:
        # A string names a global of this module: copies are the same object.
        return "HOLE"


HOLE = Hole()
"""Placeholder in a container for a value that is stored elsewhere. The items of a list keep their
places.
"""


def is_container(node: object, opaque: tuple[type, ...] = ()) -> bool:
    """Return whether a value is a dict, list or tuple, or derived.

    Those of `opaque` classes are leaves.
    """
    return isinstance(node, CONTAINERS) and not isinstance(node, opaque)


def is_plain_container(node: object) -> bool:
    """Return whether a value is a dict, list or tuple itself."""
    return type(node) in CONTAINERS


def is_dict(node: object) -> bool:
    """Return whether a value is a dict, or derived from it."""
    return isinstance(node, dict)


def dotted(position: Position) -> str:
    """Write a position as text, such as `model.layers.0.weight`."""
    return ".".join(map(str, position))


# --- Walking --------------------------------------------------------------------------------------


def children_of(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return the values in a container with their keys or indices."""
    # A dict first: asking an abstract class takes longer.
    if isinstance(container, dict | Mapping):
        return container.items()
    return enumerate(container)


def leaves(
    tree: Any, is_container: Callable[[Any], bool] = is_container, position: Position = ()
) -> list[tuple[Position, Any]]:
    """List the leaves with their positions, which begin with `position`."""
    if not is_container(tree):
        return [(position, tree)]
    items = []
    for key, child in children_of(tree):
        # To call this function for each of many leaves takes longer.
        if is_container(child):
            items += leaves(child, is_container, (*position, key))
        else:
            items.append(((*position, key), child))
    return items


def on_the_way(tree: Any, position: Position) -> Iterator[Any]:
    """Yield the tree, and the value at each step towards a position.

    The walk ends where there is no value.
    """
    yield tree
    for key in position:
        if not isinstance(tree, CONTAINERS):
            return
        known = tree if isinstance(tree, dict) else range(len(tree))
        if key not in known:
            return
        tree = tree[key]
        yield tree


def at(tree: Any, position: Position, default: Any = None) -> Any:
    """Return the value at a position, `default` if there is none."""
    values = list(on_the_way(tree, position))
    if len(values) <= len(position):
        return default
    return values[-1]


def nested_items_iter(x: dict[Any, Any] | list[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield `(container, key, leaf)` for the leaves of nested dicts and lists.

    Tuples are leaves. Leaves may be replaced during the iteration.
    """
    for key, value in children_of(x):
        if isinstance(value, (dict, list)):
            yield from nested_items_iter(value)
        else:
            yield x, key, value


# --- Changing -------------------------------------------------------------------------------------


def rebuilt(container: Any, children: Sequence[Any]) -> Any:
    """Return a container with other children.

    It is a dict, a list, or a tuple of the same class. An instance of another class (OrderedDict,
    defaultdict, torch.Size) is kept if its children are the same; one that no children can be
    given, unlike a named tuple, also if they are copies.
    """
    if not is_plain_container(container):
        own = (child for _, child in children_of(container))
        is_same = operator.is_ if isinstance(container, tuple) else is_copy
        if all(map(is_same, own, children)):
            return container
    if isinstance(container, tuple):
        if hasattr(container, "_fields"):
            return type(container)(*children)
        return tuple(children)
    return new_like(container, children)


def new_like(container: Any, children: Sequence[Any]) -> Any:
    """Return a new dict or list with other children; for tuples see `rebuilt`."""
    if isinstance(container, tuple):
        return rebuilt(container, children)
    if isinstance(container, list):
        return list(children)
    return dict(zip(container, children, strict=True))


def without_holes(container: Any, children: Sequence[Any]) -> Any:
    """Return a dict, list or tuple with other children, without the holes.

    `HOLE` if there are only holes. A named tuple has None where a hole was.
    """
    values = [child for child in children if child is not HOLE]
    if children and not values:
        return HOLE
    if isinstance(container, dict):
        pairs = zip(container, children, strict=True)
        return {key: child for key, child in pairs if child is not HOLE}
    if hasattr(container, "_fields"):
        return _named_tuple(container, children)
    if isinstance(container, tuple):
        return tuple(values)
    return values


def _named_tuple(container: Any, children: Sequence[Any]) -> Any:
    """Return a named tuple: a place for each field, and no other."""
    fields = list(children[: len(container)])
    for index, child in enumerate(fields):
        if child is HOLE:
            fields[index] = None
    return type(container)(*fields)


def is_copy(old: Any, new: Any) -> bool:
    """Return whether two trees have the same leaves in equal containers."""
    if old is new:
        return True
    if not is_plain_container(old) or type(old) is not type(new) or len(old) != len(new):
        return False
    pairs = zip(children_of(old), children_of(new), strict=True)
    return all(key == other and is_copy(a, b) for (key, a), (other, b) in pairs)


def copied(tree: Any) -> Any:
    """Copy the dicts and lists of a tree, but not its leaves."""
    return map_leaves(_itself, tree, join=new_like)


def compacted(tree: Any) -> Any:
    """Drop the holes of a tree, so that lists close up.

    `HOLE` if there is nothing else in it.
    """
    if not is_plain_container(tree):
        return tree
    return map_leaves(_itself, tree, is_plain_container, join=without_holes)


def _itself(_: Position, leaf: Any) -> Any:
    return leaf


def map_leaves(
    function: Callable[[Position, Any], Any],
    tree: Any,
    is_container: Callable[[Any], bool] = is_container,
    position: Position = (),
    *,
    join: Callable[[Any, list[Any]], Any] = rebuilt,
) -> Any:
    """Return a tree with `function(position, leaf)` for each leaf.

    Its containers are `join(container, children)`.
    """
    if not is_container(tree):
        return function(position, tree)
    children = []
    for key, child in children_of(tree):
        place = (*position, key)
        # To call this function for each of many leaves takes longer.
        if is_container(child):
            children.append(map_leaves(function, child, is_container, place, join=join))
        else:
            children.append(function(place, child))
    return join(tree, children)


def map_nodes(
    function: Callable[[Position, Any], Any],
    tree: Any,
    is_container: Callable[[Any], bool] = is_container,
    position: Position = (),
) -> Any:
    """Return a tree with `function(position, node)` for each node.

    A container gets its turn before its children: the children of its replacement.
    """
    node = function(position, tree)
    if not is_container(node):
        return node
    children = [
        map_nodes(function, child, is_container, (*position, key))
        for key, child in children_of(node)
    ]
    return rebuilt(node, children)


def filled(function: Callable[[Any, Any], Any], tree: Any, other: Any) -> Any:
    """Return one tree with the values of two.

    `function(leaf, value)` replaces each leaf of `tree`, where `value` is the value at its position
    in the other tree. The leaf is `HOLE` where only the other tree has a value, and the value is
    `HOLE` where the other tree has none. Remaining holes are dropped; where a container has only
    holes, or is empty, `function(HOLE, value)` replaces it.
    """
    if not isinstance(tree, CONTAINERS):
        return function(tree, other)
    if not tree and other is not HOLE:
        return function(HOLE, other)
    if isinstance(tree, dict):
        values = other if isinstance(other, dict) else {}
        container: Any = {**values, **tree}
        pairs: Iterable[Any] = ((tree.get(key, HOLE), values.get(key, HOLE)) for key in container)
    else:
        items = other if isinstance(other, list | tuple) else ()
        container = tree
        pairs = itertools.zip_longest(tree, items, fillvalue=HOLE)
    children = []
    for leaf, value in pairs:
        if issubclass(type(leaf), CONTAINERS):
            children.append(filled(function, leaf, value))
        else:
            children.append(function(leaf, value))
    result = without_holes(container, children)
    if result is HOLE:
        return function(HOLE, other)
    return result


def replaced(tree: Any, position: Position, value: Any) -> Any:
    """Return a tree with another value at a position.

    The containers on the way are copied.
    """
    if not position:
        return value
    children = dict(children_of(tree))
    children[position[0]] = replaced(children[position[0]], position[1:], value)
    return rebuilt(tree, list(children.values()))

"""Nested dicts, lists and tuples: walking through them, and changing them.

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
"""Takes the place in a container of a value that is kept elsewhere, so that the items of a list
keep theirs.
"""


def is_container(node: object) -> bool:
    """Tell whether a value is a dict, list or tuple, or of a class derived from them."""
    return isinstance(node, CONTAINERS)


def is_plain_container(node: object) -> bool:
    """Tell whether a value is a dict, list or tuple itself."""
    return type(node) in CONTAINERS


def is_dict(node: object) -> bool:
    """Tell whether a value is a dict, or of a class derived from it."""
    return isinstance(node, dict)


def dotted(position: Position) -> str:
    """Write a position as text, such as `model.layers.0.weight`."""
    return ".".join(map(str, position))


# --- Walking --------------------------------------------------------------------------------------


def children_of(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return the values in a container with their keys or indices."""
    # A dict first: asking an abstract class takes longer.
    is_mapping = isinstance(container, dict | Mapping)
    return container.items() if is_mapping else enumerate(container)


def nodes(
    tree: Any, is_container: Callable[[Any], bool] = is_container, position: Position = ()
) -> Iterator[tuple[Position, Any]]:
    """Yield the containers and leaves with their positions, each container before its children."""
    yield position, tree
    if is_container(tree):
        for key, child in children_of(tree):
            yield from nodes(child, is_container, (*position, key))


def leaves(
    tree: Any, is_container: Callable[[Any], bool] = is_container, position: Position = ()
) -> Iterator[tuple[Position, Any]]:
    """Yield the leaves with their positions, which begin with `position`."""
    if not is_container(tree):
        yield position, tree
        return
    for key, child in children_of(tree):
        yield from leaves(child, is_container, (*position, key))


def listed(
    tree: Any, opaque: tuple[type, ...] = (), position: Position = ()
) -> list[tuple[Position, Any]]:
    """List the leaves with their positions, which begin with `position`.

    Containers of `opaque` classes are leaves.
    """
    if not isinstance(tree, CONTAINERS) or isinstance(tree, opaque):
        return [(position, tree)]
    items = []
    for key, child in children_of(tree):
        # To call a function for each of many leaves takes longer.
        if isinstance(child, CONTAINERS):
            items += listed(child, opaque, (*position, key))
        else:
            items.append(((*position, key), child))
    return items


def fold(
    function: Callable[[Any], Any],
    join: Callable[[Any, list[Any]], Any],
    tree: Any,
    is_container: Callable[[Any], bool] = is_container,
) -> Any:
    """Return what a tree comes to: `function(leaf)` for a leaf, and for a container
    `join(container, children)`, where `children` is what its children come to.
    """
    if not is_container(tree):
        return function(tree)
    children = tree.values() if isinstance(tree, dict) else tree
    return join(
        tree,
        [
            # To call `is_container` for each of many leaves, or `isinstance`, takes longer.
            fold(function, join, child, is_container)
            if issubclass(type(child), CONTAINERS)
            else function(child)
            for child in children
        ],
    )


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
        own = (child for _, child in children_of(container))
        is_same = operator.is_ if isinstance(container, tuple) else _is_copy
        if all(map(is_same, own, children)):
            return container
    if isinstance(container, tuple):
        has_fields = hasattr(container, "_fields")
        return type(container)(*children) if has_fields else tuple(children)
    return new_like(container, children)


def new_like(container: Any, children: Sequence[Any]) -> Any:
    """Return a new dict or list with other children; for tuples see `rebuilt`."""
    if isinstance(container, tuple):
        return rebuilt(container, children)
    if isinstance(container, list):
        return list(children)
    return dict(zip(container, children, strict=True))


def without_holes(container: Any, children: Sequence[Any]) -> Any:
    """Return a dict, list or tuple with those of other children that are no holes: `HOLE` if there
    are only holes. A named tuple has None in the place of a hole.
    """
    kept = [child for child in children if child is not HOLE]
    if children and not kept:
        return HOLE
    if isinstance(container, dict):
        pairs = zip(container, children, strict=True)
        return {key: child for key, child in pairs if child is not HOLE}
    if hasattr(container, "_fields"):
        return _named_tuple(container, children)
    return tuple(kept) if isinstance(container, tuple) else kept


def _named_tuple(container: Any, children: Sequence[Any]) -> Any:
    """Return a named tuple, which has a place for each of its fields, and for nothing else."""
    fields = children[: len(container)]
    return type(container)(*(None if child is HOLE else child for child in fields))


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
    return fold(_itself, new_like, tree)


def compacted(tree: Any) -> Any:
    """Drop the holes of a tree; lists close up. `HOLE` if there is nothing else in it."""
    if not is_plain_container(tree):
        return tree
    return fold(_itself, without_holes, tree, is_plain_container)


def _itself(leaf: Any) -> Any:
    return leaf


def map_leaves(
    function: Callable[[Position, Any], Any],
    tree: Any,
    is_container: Callable[[Any], bool] = is_container,
    position: Position = (),
    *,
    join: Callable[[Any, list[Any]], Any] = rebuilt,
) -> Any:
    """Return a tree with `function(position, leaf)` in the place of each leaf. Its containers are
    `join(container, children)`.
    """
    if not is_container(tree):
        return function(position, tree)
    children = [
        map_leaves(function, child, is_container, (*position, key), join=join)
        for key, child in children_of(tree)
    ]
    return join(tree, children)


def with_leaves(tree: Any, values: Iterator[Any], opaque: tuple[type, ...] = ()) -> Any:
    """Return a tree with other leaves, in the order in which `listed` lists them."""
    if not isinstance(tree, CONTAINERS) or isinstance(tree, opaque):
        return next(values)
    children = []
    for _, child in children_of(tree):
        if isinstance(child, CONTAINERS):
            children.append(with_leaves(child, values, opaque))
        else:
            children.append(next(values))
    return rebuilt(tree, children)


def map_nodes(
    function: Callable[[Position, Any], Any],
    tree: Any,
    is_container: Callable[[Any], bool] = is_container,
    position: Position = (),
) -> Any:
    """Return a tree with `function(position, node)` in the place of each node. A container gets its
    turn before its children, which are those of what takes its place.
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
    """Return what two trees have, in one.

    `function(leaf, value)` takes the place of each leaf of `tree`, where `value` is what the other
    tree has at its position. The leaf is `HOLE` where only the other tree has something, and the
    value is `HOLE` where it has nothing. Holes that are left are dropped; where a container has
    only holes, or is empty, `function(HOLE, value)` takes its place.
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
    children = [
        filled(function, leaf, value)
        if issubclass(type(leaf), CONTAINERS)
        else function(leaf, value)
        for leaf, value in pairs
    ]
    found = without_holes(container, children)
    return function(HOLE, other) if found is HOLE else found


def replaced(tree: Any, position: Position, value: Any) -> Any:
    """Return a tree with another value at a position; the containers on the way are copied."""
    if not position:
        return value
    first, *below = position
    children = dict(children_of(tree))
    children[first] = replaced(children[first], tuple(below), value)
    return rebuilt(tree, list(children.values()))

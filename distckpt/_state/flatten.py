"""Flattening a sharded state dict, and filling it with loaded values. The caller's dict is never
changed.

Dicts, lists and tuples are containers here. What lies elsewhere (shards, local objects) leaves a
`HOLE` in its container, so positions in lists stay what they were.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from distckpt._base.errors import (
    CheckpointingException,
    InvalidShardingError,
    UnsupportedObjectError,
)
from distckpt._format.codec import HOLE, refuse_unknown
from distckpt._mapping.wrappers import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from distckpt._state.megatron_shards import adopt, is_foreign
from distckpt._state.shards import Shard
from distckpt._state.stored_form import stored_form


class _Slot(NamedTuple):
    """The place of a shard in a skeleton."""

    number: int


class _Local(NamedTuple):
    """The place of a local non-persistent object."""

    value: Any


class _Merge(NamedTuple):
    """The place of a factory: `merge_fn` makes its value from the filled `built`."""

    factory: ShardedTensorFactory
    built: Any


class SplitState(NamedTuple):
    """A flattened state dict.

    `shards` are its sharded leaves, those that factories build included; `common` is the rest of
    the tree with holes for everything else; `skeleton` is the tree with marks for shards, local
    objects and factories, and holes for the rest.
    """

    shards: list[Shard]
    common: Any
    skeleton: Any


def split(state_dict: Any) -> SplitState:
    """Flatten a sharded state dict into its shards, its common state and its structure."""
    if not isinstance(state_dict, dict):
        raise CheckpointingException(
            f"A sharded state dict is a dict, such as {{'model': model, 'step': 100}}, got "
            f"{type(state_dict).__name__}."
        )
    shards: list[Shard] = []

    def skeleton_of(node: Any, inside_factory: bool = False) -> Any:
        # By far the most frequent type first; isinstance is slow for an abstract class.
        if type(node) is not ShardedTensor:
            node = adopt(node)
        if isinstance(node, ShardedTensor):
            node = stored_form(node)
        if type(node) is ShardedTensor or isinstance(node, ShardedTensor | ShardedObject):
            shards.append(node)
            return _Slot(len(shards) - 1)
        if isinstance(node, ShardedTensorFactory):
            return _Merge(node, skeleton_of(node.build(), True))
        if isinstance(node, ShardedBase):
            raise UnsupportedObjectError(
                f"Key {node.key!r} is a {type(node).__name__}: only ShardedTensor, ShardedObject "
                "and ShardedTensorFactory can be saved and loaded."
            )
        if isinstance(node, LocalNonpersistentObject):
            return _Local(node.unwrap())
        if _is_container(node):
            return _map_container(node, lambda child: skeleton_of(child, inside_factory))
        # What a factory builds besides shards is there again when it builds for loading.
        return _Local(node) if inside_factory else HOLE

    skeleton = skeleton_of(state_dict)
    common = prune(_common_of(state_dict, skeleton))
    return SplitState(shards, {} if common is HOLE else common, skeleton)


def check_keys_are_different(state_dict: Any, shards: Sequence[Shard]) -> None:
    """Refuse two tensors of this rank that claim one place under one key, such as those of two
    models of one class.
    """
    counts = Counter(shard.key for shard in shards)
    seen: dict[Any, ShardedTensor] = {}
    for shard in shards:
        if counts[shard.key] > 1 and isinstance(shard, ShardedTensor) and shard.data is not None:
            flat = str(shard.flattened_range)
            place = (
                shard.key,
                shard.replica_id,
                tuple(shard.global_offset),
                tuple(shard.local_shape),
                flat,
            )
            first = seen.setdefault(place, shard)
            if (
                first is not shard
                and first.data is not None
                and first.data.data_ptr() != shard.data.data_ptr()
            ):
                names = _paths_of(state_dict, shard.key)
                raise InvalidShardingError(
                    f"The same key twice: {shard.key!r} is the key of several tensors, at "
                    f"{' and at '.join(names)} of the state dict. Give one of the modules another "
                    "prefix: sharded_state_dict(module, prefix='ema.'). Modules that are in the "
                    "state dict themselves have their path as prefix, without positions in lists, "
                    "since a list may hold the stages of a pipeline: put several models into a "
                    f"dict, {{'first': module, 'second': other}}."
                )


def _paths_of(node: Any, key: str, path: str = "") -> Iterator[str]:
    if isinstance(node, ShardedBase) and node.key == key:
        yield repr(path.removeprefix("."))
    elif isinstance(node, dict | list | tuple):
        for name, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _paths_of(child, key, f"{path}.{name}")


def _common_of(node: Any, skeleton: Any) -> Any:
    if type(skeleton) in (_Slot, _Local, _Merge):
        return HOLE
    if skeleton is HOLE:
        return node
    if isinstance(node, dict):
        return {key: _common_of(node[key], child) for key, child in skeleton.items()}
    # A named tuple becomes a plain one: its class need not be known to whoever reads the common
    # state.
    pairs = list(zip(node, skeleton, strict=True))
    return _map_container(
        pairs, lambda pair: _common_of(*pair), like=() if isinstance(node, tuple) else []
    )


def put_together(skeleton: Any, values: Sequence[Any], common: Any) -> dict[Any, Any]:
    """Fill a skeleton from `split`: with a value (or `HOLE`) for each shard, and with common values
    at other places.

    Places that nothing fills are dropped; the items of a list move together. What only `common` has
    is added. Objects of unknown classes are an error where the skeleton has a value.
    """
    refuse_unknown(common, lambda path: _asks_for(skeleton, path))
    filled = _fill(skeleton, values, common)
    return {} if filled is HOLE else filled


def _asks_for(skeleton: Any, path: Sequence[Any]) -> bool:
    for step in path:
        is_there = step in skeleton if isinstance(skeleton, dict) else step in range(len(skeleton))
        if not is_there:
            return False
        skeleton = skeleton[step]
        if not _is_container(skeleton):
            break
    return skeleton is HOLE


def _fill(skeleton: Any, values: Sequence[Any], common: Any) -> Any:
    if isinstance(skeleton, _Slot | _Local | _Merge):
        value = _value_at(skeleton, values)
        return _compact(common) if value is HOLE else value
    if skeleton is HOLE:
        return _compact(common)
    if isinstance(skeleton, dict):
        below = common if isinstance(common, dict) else {}
        keys = {**below, **skeleton}
        filled = _close_up(
            {key: _fill(skeleton.get(key, HOLE), values, below.get(key, HOLE)) for key in keys}
        )
    else:
        items = common if isinstance(common, list | tuple) else ()
        pairs = itertools.zip_longest(skeleton, items, fillvalue=HOLE)
        filled = _close_up([_fill(above, values, below) for above, below in pairs], like=skeleton)
    # Stored empty, it is empty, whatever was in the requested one.
    return _compact(common) if filled is HOLE else filled


def _value_at(leaf: _Slot | _Local | _Merge, values: Sequence[Any]) -> Any:
    if isinstance(leaf, _Slot):
        return values[leaf.number]
    if isinstance(leaf, _Local):
        return leaf.value
    built = _fill_built(leaf.built, values)
    # A factory that lacks a part cannot be merged.
    return HOLE if _has_hole(built) else leaf.factory.merge_fn(built)


def _fill_built(skeleton: Any, values: Sequence[Any]) -> Any:
    if isinstance(skeleton, _Slot | _Local | _Merge):
        return _value_at(skeleton, values)
    return _map_container(skeleton, lambda child: _fill_built(child, values))


def prune(tree: Any) -> Any:
    """Drop holes from dicts; containers that held nothing but holes become holes. Holes in mixed
    lists stay.
    """
    if not _is_container(tree):
        return tree
    if isinstance(tree, dict):
        kept = {
            key: value
            for key, value in ((k, prune(v)) for k, v in tree.items())
            if value is not HOLE
        }
        return HOLE if tree and not kept else kept
    items = _map_container(tree, prune)
    return HOLE if items and all(item is HOLE for item in items) else items


def compact(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Drop all holes; the items of a list move together."""
    compacted = _compact(tree)
    return {} if compacted is HOLE else compacted


def _compact(tree: Any) -> Any:
    return _close_up(_map_container(tree, _compact), like=tree) if _is_container(tree) else tree


def _close_up(children: Any, like: Any = None) -> Any:
    """Drop holes from a dict or list; one that held nothing else becomes a hole. A list becomes a
    tuple like `like`.
    """
    if isinstance(children, dict):
        kept = {key: child for key, child in children.items() if child is not HOLE}
        return HOLE if children and not kept else kept
    items = [child for child in children if child is not HOLE]
    if children and not items:
        return HOLE
    if hasattr(like, "_fields"):
        # A named tuple has a place for each of its fields, and for nothing else.
        return type(like)(*(None if child is HOLE else child for child in children[: len(like)]))
    return tuple(items) if isinstance(like, tuple) else items


def _is_container(node: Any) -> bool:
    # A slot is a tuple too, but a leaf; so is a torch.Size.
    return type(node) in (dict, list, tuple) or (
        isinstance(node, dict | list | tuple)
        and not isinstance(node, _Slot | _Local | _Merge)
        and _holds_shards(node)
    )


def _holds_shards(node: Any) -> bool:
    """Tell whether a subclass of a container (OrderedDict, named tuple) must be walked: the others
    are plain values.
    """
    children = node.values() if isinstance(node, dict) else node
    return any(
        isinstance(child, ShardedBase | LocalNonpersistentObject | _Slot | _Local | _Merge)
        or child is HOLE
        or is_foreign(child)
        or (isinstance(child, dict | list | tuple) and _holds_shards(child))
        for child in children
    )


def _has_hole(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(_has_hole(child) for child in tree.values())
    if isinstance(tree, list | tuple):
        return any(_has_hole(child) for child in tree)
    return tree is HOLE


def _map_container(container: Any, function: Callable[[Any], Any], like: Any = None) -> Any:
    """Apply a function to the items of a container; the result is a dict, a list, or a tuple of the
    type of `like`.
    """
    like = container if like is None else like
    if isinstance(container, dict):
        return {key: function(value) for key, value in container.items()}
    items = [function(item) for item in container]
    if isinstance(like, tuple):
        return type(like)(*items) if hasattr(like, "_fields") else tuple(items)
    return items

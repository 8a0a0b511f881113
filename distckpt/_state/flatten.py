"""Flattening a sharded state dict, and filling it with loaded values.

The caller's dict is never changed. Dicts, lists and tuples are containers here. What is stored
elsewhere (shards) or not at all (local objects) leaves a `HOLE` in its container, so positions in
lists stay the same.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distckpt._base.errors import (
    CheckpointingException,
    InvalidShardingError,
    UnsupportedObjectError,
)
from distckpt._base.tree import (
    CONTAINERS,
    Position,
    dotted,
    is_container,
    leaves,
    map_leaves,
    on_the_way,
    rebuilt,
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


@dataclass(slots=True)
class _Slot:
    """The place of a shard in a skeleton."""

    number: int


@dataclass(slots=True)
class _Local:
    """The place of a local non-persistent object."""

    value: Any


@dataclass(slots=True)
class _Merge:
    """The place of a factory: `merge_fn` makes its value from the filled `built`."""

    factory: ShardedTensorFactory
    built: Any


_MARKS = (_Slot, _Local, _Merge)


class SplitState(NamedTuple):
    """A flattened state dict.

    `shards` are its sharded leaves, including what factories build; `common` is the rest of the
    tree with holes for everything else; `skeleton` is the tree with marks for shards, local objects
    and factories, and holes for the rest.
    """

    shards: list[Shard]
    common: Any
    skeleton: Any


# --- Taking a state dict apart --------------------------------------------------------------------


def split(state_dict: Any) -> SplitState:
    """Flatten a sharded state dict into its shards, its common state and its structure."""
    if not isinstance(state_dict, dict):
        raise CheckpointingException(
            f"A sharded state dict is a dict, such as {{'model': model, 'step': 100}}, got "
            f"{type(state_dict).__name__}."
        )
    shards: list[Shard] = []
    skeleton, common = _take_apart(state_dict, shards, inside_factory=False)
    return SplitState(shards, {} if common is HOLE else common, skeleton)


def _take_apart(node: Any, shards: list[Shard], inside_factory: bool) -> tuple[Any, Any]:
    """Return the skeleton and common state of a part of a state dict; collect its shards."""
    # By far the most frequent type first; isinstance is slow for an abstract class.
    if type(node) is not ShardedTensor:
        node = adopt(node)
    if isinstance(node, ShardedTensor):
        node = stored_form(node)
    if type(node) is ShardedTensor or isinstance(node, ShardedTensor | ShardedObject):
        shards.append(node)
        return _Slot(len(shards) - 1), HOLE
    if isinstance(node, ShardedTensorFactory):
        with _naming(node, "build_fn"):
            shards_and_more = node.build()
        built, _ = _take_apart(shards_and_more, shards, inside_factory=True)
        return _Merge(node, built), HOLE
    if isinstance(node, ShardedBase):
        raise UnsupportedObjectError(
            f"Key {node.key!r} is a {type(node).__name__}: only ShardedTensor, ShardedObject "
            "and ShardedTensorFactory can be saved and loaded."
        )
    if isinstance(node, LocalNonpersistentObject):
        return _Local(node.unwrap()), HOLE
    if _is_walked(node):
        return _take_container_apart(node, shards, inside_factory)
    # What a factory builds besides shards, it builds again for loading.
    return (_Local(node), HOLE) if inside_factory else (HOLE, node)


@contextlib.contextmanager
def _naming(factory: ShardedTensorFactory, function: str) -> Iterator[None]:
    """Let errors of a factory's function say which factory it is."""
    try:
        yield
    except CheckpointingException:
        raise
    except Exception as error:
        raise CheckpointingException(
            f"{function} of the ShardedTensorFactory {factory.key!r} failed: "
            f"{type(error).__name__}: {error}"
        ) from error


def _take_container_apart(
    container: Any, shards: list[Shard], inside_factory: bool
) -> tuple[Any, Any]:
    children = container.values() if isinstance(container, dict) else container
    parts = [_take_apart(child, shards, inside_factory) for child in children]
    skeleton = rebuilt(container, [part for part, _ in parts])
    return skeleton, _common_of(container, [part for _, part in parts])


def _common_of(container: Any, children: list[Any]) -> Any:
    if _are_holes(children):
        return HOLE
    if isinstance(container, dict):
        return _without_holes(dict(zip(container, children, strict=True)))
    # A named tuple becomes a plain one: its class need not be known to whoever reads the common
    # state.
    return tuple(children) if isinstance(container, tuple) else children


def _is_walked(node: Any) -> bool:
    """Tell whether a value is a container here. Instances of subclasses (OrderedDict, named tuple)
    are plain values unless they hold shards.
    """
    if type(node) in CONTAINERS:
        return True
    return is_container(node) and any(_is_part(leaf) for _, leaf in leaves(node))


def _is_part(leaf: Any) -> bool:
    is_marked = leaf is HOLE or type(leaf) in _MARKS
    return is_marked or isinstance(leaf, ShardedBase | LocalNonpersistentObject) or is_foreign(leaf)


# --- Checking -------------------------------------------------------------------------------------


def check_keys_are_different(split: SplitState, modules: Collection[Position]) -> None:
    """Refuse two tensors of this rank that claim one place under one key, such as tensors of two
    models of one class; `modules` are the paths of those in the state dict.
    """
    counts = Counter(shard.key for shard in split.shards)
    first_pointers: dict[Any, int] = {}
    for shard in split.shards:
        if counts[shard.key] > 1 and isinstance(shard, ShardedTensor) and shard.data is not None:
            pointer = shard.data.data_ptr()
            if first_pointers.setdefault(_place_of(shard), pointer) != pointer:
                raise _same_key_twice(split, shard, modules)


def _place_of(shard: ShardedTensor) -> tuple[Any, ...]:
    offset, shape = tuple(shard.global_offset), tuple(shard.local_shape)
    return shard.key, shard.replica_id, offset, shape, str(shard.flattened_range)


def _same_key_twice(
    split: SplitState, shard: ShardedTensor, modules: Collection[Position]
) -> InvalidShardingError:
    same = {
        number
        for number, other in enumerate(split.shards)
        if isinstance(other, ShardedTensor) and _place_of(other) == _place_of(shard)
    }
    names = [
        repr(dotted(next((path for path in modules if position[: len(path)] == path), position)))
        for position, mark in leaves(split.skeleton)
        if not same.isdisjoint(_numbers_of(mark))
    ]
    text = (
        f"The same key twice: {shard.key!r} is the key of several tensors, at "
        f"{' and at '.join(names)} of the state dict, all at the offset "
        f"{tuple(shard.global_offset)}. Give one of them another key (what describes a module "
        "takes a prefix: sharded_state_dict(..., prefix='ema.')), or, if they are parts of one "
        "tensor, such as layers, another offset."
    )
    if modules:
        text += (
            " Modules that are in the state dict themselves have their path as prefix, without "
            "positions in lists, since a list may hold the stages of a pipeline: put several "
            "models into a dict, {'first': module, 'second': other}."
        )
    return InvalidShardingError(text)


def _numbers_of(mark: Any) -> set[int]:
    """Return the numbers of the shard, or of those of the factory, of which a mark is the place."""
    if isinstance(mark, _Slot):
        return {mark.number}
    built = leaves(mark.built) if isinstance(mark, _Merge) else ()
    return set[int]().union(*(_numbers_of(inner) for _, inner in built))


# --- Putting a state dict together ----------------------------------------------------------------


def put_together(skeleton: Any, values: Sequence[Any], common: Any) -> dict[Any, Any]:
    """Fill a skeleton from `split`: with a value (or `HOLE`) for each shard, and with common values
    at other places.

    Places that nothing fills are dropped, and lists close up. What only `common` has is added.
    Objects of unknown classes are an error where the skeleton has a value.
    """
    refuse_unknown(common, lambda position: _asks_for(skeleton, position))
    filled = _fill(skeleton, values, common)
    return {} if filled is HOLE else filled


def _asks_for(skeleton: Any, position: Position) -> bool:
    return any(node is HOLE for node in on_the_way(skeleton, position))


def _fill(skeleton: Any, values: Sequence[Any], common: Any) -> Any:
    if type(skeleton) in _MARKS:
        value = _value_at(skeleton, values)
        return _compact(common) if value is HOLE else value
    if skeleton is HOLE:
        return _compact(common)
    if isinstance(skeleton, dict):
        filled = _filled_dict(skeleton, values, common if isinstance(common, dict) else {})
    else:
        items = common if isinstance(common, list | tuple) else ()
        pairs = itertools.zip_longest(skeleton, items, fillvalue=HOLE)
        filled = _closed_up([_fill(above, values, below) for above, below in pairs], skeleton)
    # A container that was stored empty is empty, whatever was in the requested one.
    return _compact(common) if filled is HOLE else filled


def _filled_dict(skeleton: dict[Any, Any], values: Sequence[Any], common: dict[Any, Any]) -> Any:
    return _without_holes(
        {
            key: _fill(skeleton.get(key, HOLE), values, common.get(key, HOLE))
            for key in {**common, **skeleton}
        }
    )


def _value_at(mark: _Slot | _Local | _Merge, values: Sequence[Any]) -> Any:
    if isinstance(mark, _Slot):
        return values[mark.number]
    if isinstance(mark, _Local):
        return mark.value
    built = map_leaves(lambda _, inner: _value_at(inner, values), mark.built)
    # A factory that lacks a part cannot be merged.
    is_complete = all(value is not HOLE for _, value in leaves(built))
    if not is_complete:
        return HOLE
    with _naming(mark.factory, "merge_fn"):
        return mark.factory.merge_fn(built)


def compact(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Drop all holes; lists close up."""
    compacted = _compact(tree)
    return {} if compacted is HOLE else compacted


def _compact(tree: Any) -> Any:
    if not _is_walked(tree):
        return tree
    if isinstance(tree, dict):
        return _without_holes({key: _compact(child) for key, child in tree.items()})
    return _closed_up([_compact(child) for child in tree], tree)


def _without_holes(children: dict[Any, Any]) -> Any:
    """Drop the holes from a dict; `HOLE` if there is nothing else."""
    if _are_holes(children.values()):
        return HOLE
    return {key: child for key, child in children.items() if child is not HOLE}


def _closed_up(items: list[Any], like: Any) -> Any:
    """Drop the holes among the new items of a list or tuple; `HOLE` if there is nothing else."""
    if _are_holes(items):
        return HOLE
    if hasattr(like, "_fields"):
        # A named tuple has a place for each of its fields, and for nothing else.
        return type(like)(*(None if item is HOLE else item for item in items[: len(like)]))
    kept = [item for item in items if item is not HOLE]
    return tuple(kept) if isinstance(like, tuple) else kept


def _are_holes(values: Collection[Any]) -> bool:
    return len(values) > 0 and all(value is HOLE for value in values)

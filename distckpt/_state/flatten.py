"""Flattening of a sharded state dict, and filling with loaded values.

The caller's dict is not changed here. Dicts, lists and tuples are containers here. A value that is
stored elsewhere (shards) or not at all (local objects) leaves a `HOLE` in its container, so
positions in lists stay the same.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from distckpt._base.errors import (
    CheckpointingException,
    InvalidShardingError,
    UnsupportedObjectError,
)
from distckpt._base.tree import (
    CONTAINERS,
    HOLE,
    Position,
    compacted,
    dotted,
    filled,
    leaves,
    map_leaves,
    on_the_way,
    rebuilt,
    without_holes,
)
from distckpt._format.codec import refuse_unknown, register_object_type
from distckpt._format.codec.encode import how_to_register, unknown_objects
from distckpt._state.shards import Shard
from distckpt._state.stored_form import StoredEntry, stored_form
from distckpt.mapping._base import ShardedBase, kind_of
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensorFactory,
    is_main_replica,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Local:
    """The place of a local non-persistent object."""

    value: Any


@dataclass(slots=True)
class _Merge:
    """The place of a factory: `merge_fn` makes its value from the filled `built`."""

    factory: ShardedTensorFactory
    built: Any


_NEVER_FOREIGN = (ShardedTensor, *CONTAINERS)


class SplitState(NamedTuple):
    """A flattened state dict.

    `shards` are its sharded leaves, including the ones that factories build; `common` is the rest
    of the tree with holes for everything else; `skeleton` is the tree with the numbers of shards,
    marks for local objects and factories, and holes for the rest.
    """

    shards: list[Shard]
    common: Any
    skeleton: Any


# --- Objects of Megatron --------------------------------------------------------------------------
# Objects of Megatron Core are recognized by their structure, so Megatron need not be installed, and
# every version and copy of it will do.

# The arguments of Megatron's scripts hold a signal.
register_object_type(signal.Signals)
# Transformer layers keep their extra state in files in memory.
register_object_type(io.BytesIO, "io.BytesIO", to_state=io.BytesIO.getvalue, from_state=io.BytesIO)


def adopt(node: Any) -> Any:
    """Convert an object of Megatron to its equivalent in distckpt.

    Other values are returned as they are.
    """
    convert = _converter_of(type(node))  # type: ignore[arg-type]  # Classes are hashable.
    if convert is None:
        return node
    return convert(node)


def _adopt_tensor(node: Any) -> ShardedTensor:
    data = node.data
    dtype = node.dtype
    # Megatron stores 8-bit tensors of Transformer Engine in the precision that they represent.
    is_packed = (
        getattr(type(data), "dequantize", torch.Tensor.dequantize) is not torch.Tensor.dequantize
    )
    if data is not None and is_packed:
        data = data.detach().dequantize()
        dtype = data.dtype
    return ShardedTensor(
        node.key,
        data,
        dtype,
        node.local_shape,
        node.global_shape,
        node.global_offset,
        node.axis_fragmentations,
        node.replica_id,
        node.prepend_axis_num,
        node.allow_shape_mismatch,
        getattr(node, "flattened_range", None),
    )


def _adopt_factory(node: Any) -> ShardedTensorFactory:
    flat = getattr(node, "flattened_range", None)
    return ShardedTensorFactory(
        node.key, node.data, node.build_fn, node.merge_fn, node.replica_id, flat
    )


_CONVERTERS: dict[str | None, Callable[[Any], Any]] = {
    "ShardedTensor": _adopt_tensor,
    "ShardedObject": lambda node: ShardedObject(
        node.key, node.data, node.global_shape, node.global_offset, node.replica_id
    ),
    "ShardedTensorFactory": _adopt_factory,
    "LocalNonpersistentObject": lambda node: LocalNonpersistentObject(node.unwrap()),
}


@functools.cache
def _converter_of(cls: type) -> Callable[[Any], Any] | None:
    if issubclass(cls, ShardedBase | LocalNonpersistentObject):
        return None
    return _CONVERTERS.get(kind_of(cls))  # type: ignore[arg-type]  # Classes are hashable.


# --- Taking a state dict apart --------------------------------------------------------------------


def split(
    state_dict: Any,
    entries: Mapping[str, StoredEntry] = MappingProxyType({}),
    leaves_out: bool = False,
) -> SplitState:
    """Flatten a sharded state dict into shards, common state and structure.

    With the `entries` of a checkpoint, shards are requested in their stored form. With
    `leaves_out`, a warning names tensors that cannot be stored, and they are left out.
    """
    if not isinstance(state_dict, dict):
        raise CheckpointingException(
            f"A sharded state dict is a dict, such as {{'model': model, 'step': 100}}, got "
            f"{type(state_dict).__name__}."
        )
    flattening = _Flattening(entries, leaves_out)
    skeleton, common = map_leaves(flattening.take, state_dict, _is_walked, join=_join)
    if common is HOLE:
        common = {}
    problems = flattening.problems
    if problems:
        text = "tensors that cannot be stored are left out (%d): %s"
        logger.warning(text, len(problems), " ".join(problems))
    return SplitState(flattening.shards, common, skeleton)


class _Flattening:
    """A walk that collects shards; each leaf becomes a pair of its mark and its common value."""

    def __init__(self, entries: Mapping[str, StoredEntry], leaves_out: bool) -> None:
        self.shards: list[Shard] = []
        self.problems: list[str] = []
        self._entries = entries
        self._leaves_out = leaves_out

    def take(self, position: Position, node: Any) -> tuple[Any, Any]:
        """Take a leaf of the state dict."""
        # By far the most frequent types first; isinstance is slow for an abstract class.
        if type(node) not in _NEVER_FOREIGN:
            node = adopt(node)
        if isinstance(node, ShardedTensor):
            node = self._stored_form(node)
        if type(node) is ShardedTensor or isinstance(node, ShardedTensor | ShardedObject):
            self.shards.append(node)
            return len(self.shards) - 1, HOLE
        if isinstance(node, ShardedTensorFactory):
            with _naming(node, "build_fn"):
                shards_and_more = node.build()
            built, _ = map_leaves(self._take_built, shards_and_more, _is_walked, join=_join)
            return _Merge(node, built), HOLE
        if isinstance(node, ShardedBase):
            raise UnsupportedObjectError(
                f"Key {node.key!r} is a {type(node).__name__}: only ShardedTensor, ShardedObject "
                "and ShardedTensorFactory can be saved and loaded."
            )
        if isinstance(node, LocalNonpersistentObject):
            return _Local(node.unwrap()), HOLE
        return HOLE, node

    def _take_built(self, position: Position, node: Any) -> tuple[Any, Any]:
        mark, value = self.take(position, node)
        if value is HOLE:
            return mark, HOLE
        # Values other than shards that a factory builds, it builds again for loading.
        return _Local(value), HOLE

    def _stored_form(self, tensor: ShardedTensor) -> Any:
        try:
            return stored_form(tensor, self._entries.get(tensor.key))
        except UnsupportedObjectError as error:
            if not self._leaves_out:
                raise
            if is_main_replica(tensor.replica_id):
                self.problems.append(str(error))
            return LocalNonpersistentObject(None)


@contextlib.contextmanager
def _naming(factory: ShardedTensorFactory, function: str) -> Iterator[None]:
    """Name the factory in errors of its function."""
    try:
        yield
    except CheckpointingException:
        raise
    except Exception as error:
        raise CheckpointingException(
            f"{function} of the ShardedTensorFactory {factory.key!r} failed: "
            f"{type(error).__name__}: {error}"
        ) from error


def _join(container: Any, parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    skeleton = rebuilt(container, [skeleton for skeleton, _ in parts])
    children = [common for _, common in parts]
    common = without_holes(container, children)
    if common is HOLE or isinstance(container, dict):
        return skeleton, common
    # Lists and tuples keep their holes, so that positions stay the same. A named tuple becomes a
    # plain one: readers of the common state need not know its class.
    if isinstance(container, tuple):
        return skeleton, tuple(children)
    return skeleton, children


def _is_walked(node: Any) -> bool:
    """Return whether a value is a container here.

    Instances of subclasses (OrderedDict, named tuple) are plain values unless they hold shards.
    """
    if type(node) in CONTAINERS:
        return True
    parts = (ShardedBase, LocalNonpersistentObject)
    return isinstance(node, CONTAINERS) and any(isinstance(leaf, parts) for _, leaf in leaves(node))


# --- Checking -------------------------------------------------------------------------------------


def check_keys_are_different(split: SplitState, modules: Collection[Position]) -> None:
    """Refuse two tensors of this rank with one place under one key.

    They may be tensors of two models of one class; `modules` are the paths of the modules in the
    state dict.
    """
    counts = Counter(shard.key for shard in split.shards)
    first_pointers: dict[Any, int] = {}
    for shard in split.shards:
        if counts[shard.key] > 1 and isinstance(shard, ShardedTensor) and shard.data is not None:
            pointer = shard.data.data_ptr()
            if first_pointers.setdefault(_place_of(shard), pointer) != pointer:
                raise _same_key_twice(split, shard, modules)


def _place_of(shard: ShardedTensor) -> tuple[Any, ...]:
    offset = tuple(shard.global_offset)
    shape = tuple(shard.local_shape)
    return shard.key, shard.replica_id, offset, shape, str(shard.flattened_range)


def _same_key_twice(
    split: SplitState, shard: ShardedTensor, modules: Collection[Position]
) -> InvalidShardingError:
    numbers = set()
    for number, other in enumerate(split.shards):
        if isinstance(other, ShardedTensor) and _place_of(other) == _place_of(shard):
            numbers.add(number)
    names = []
    for position, mark in leaves(split.skeleton):
        if not numbers.isdisjoint(_numbers_of(mark)):
            inside = (path for path in modules if position[: len(path)] == path)
            names.append(repr(dotted(next(inside, position))))
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
    """Return the numbers of a mark's shards.

    The mark stands for a shard, or a factory of shards.
    """
    if isinstance(mark, int):
        return {mark}
    numbers: set[int] = set()
    if isinstance(mark, _Merge):
        for _, inner in leaves(mark.built):
            numbers |= _numbers_of(inner)
    return numbers


# --- Putting a state dict together ----------------------------------------------------------------


def put_together(skeleton: Any, values: Sequence[Any], common: Any) -> dict[Any, Any]:
    """Fill a skeleton from `split` with values of shards and common values.

    There is a value (or `HOLE`) for each shard; common values are for other places. Places without
    a value are dropped, and lists close up. Values of `common` alone are added. Objects of unknown
    classes are an error where the skeleton has a value, and a warning next to the values of a
    container that it has.
    """
    if next(unknown_objects(common), None) is not None:
        refuse_unknown(common, lambda position: _asks_for(skeleton, position))
        _warn_of_unknown(skeleton, common)

    def fill(mark: Any, value: Any) -> Any:
        filling = _value_of(mark, values)
        # A container that was stored empty is empty, whatever was in the requested one.
        if filling is HOLE:
            return compacted(value)
        return filling

    result = filled(fill, skeleton, common)
    return {} if result is HOLE else result


def _asks_for(skeleton: Any, position: Position) -> bool:
    values = list(on_the_way(skeleton, position))
    return len(values) > len(position) or any(value is HOLE for value in values)


def _warn_of_unknown(skeleton: Any, common: Any) -> None:
    """Name objects of unknown classes in containers of the request."""
    for position, unknown in unknown_objects(common):
        if len(position) > 1 and len(list(on_the_way(skeleton, position))) > 1:
            logger.warning(
                "%r is %r where it is loaded: %s",
                dotted(position),
                unknown,
                how_to_register(unknown),
            )


def _value_of(mark: Any, values: Sequence[Any]) -> Any:
    if mark is HOLE:
        return HOLE
    if isinstance(mark, int):
        return values[mark]
    if isinstance(mark, _Local):
        return mark.value
    built = map_leaves(lambda _, inner: _value_of(inner, values), mark.built)
    # A factory that lacks a part cannot be merged.
    is_complete = all(value is not HOLE for _, value in leaves(built))
    if not is_complete:
        return HOLE
    with _naming(mark.factory, "merge_fn"):
        return mark.factory.merge_fn(built)


def compact(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Drop all holes, so that lists close up."""
    result = compacted(tree)
    return {} if result is HOLE else result

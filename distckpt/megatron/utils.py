"""Extract parts of sharded state dicts, and rename the keys in them.

Megatron's helpers for debugging are here, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from distckpt._plan.selection import renamed
from distckpt._state.common_state import storable_metadata
from distckpt.mapping._base import ShardedBase
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    ShardedTensorFactory,
    StateDict,
)
from distckpt.megatron.dict_utils import extract_matching_values, nested_values

__all__ = [
    "add_prefix_for_sharding",
    "apply_prefix_mapping",
    "debug_msg",
    "debug_time",
    "extract_nonpersistent",
    "extract_sharded_base",
    "extract_sharded_tensors",
    "extract_sharded_tensors_and_factories",
    "extract_sharded_tensors_or_nonpersistent",
    "force_all_tensors_to_non_fp8",
    "logger_stack",
    "replace_prefix_for_sharding",
    "zip_strict",
]

_clean_metadata_for_serialization = storable_metadata
fallback_logger = logging.getLogger(__name__)
# A context variable, so that threads (an asynchronous save, say) do not see one another's nesting.
_scope: ContextVar[tuple[tuple[str, ...], logging.Logger]] = ContextVar(
    "distckpt_debug_scope", default=((), fallback_logger)
)


def zip_strict(*args: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Zip iterables of the same length.

    A ValueError gives all lengths when they differ, before any tuple comes.
    """
    columns = list(map(list, args))
    lengths = list(map(len, columns))
    if len(set(lengths)) > 1:
        raise ValueError(f"tried to zip iterables of unequal lengths {lengths}")
    return zip(*columns, strict=True)


@contextmanager
def logger_stack(
    name: str | None = None, current_logger: logging.Logger | None = None
) -> Iterator[tuple[str, logging.Logger]]:
    """Enter a named scope for debug logging, for this thread.

    None takes the name or logger of the scope around it.

    Yields:
        The names of the scopes around, joined by dots, and the logger.
    """
    names, scope_logger = _scope.get()
    if name:
        names = (*names, name)
    if current_logger:
        scope_logger = current_logger
    token = _scope.set((names, scope_logger))
    try:
        yield ".".join(names), scope_logger
    finally:
        _scope.reset(token)


@contextmanager
def debug_time(
    name: str,
    logger: logging.Logger | None = None,
    threshold: float = float("-inf"),
    level: int | None = None,
) -> Iterator[None]:
    """Log the duration of the body, in a scope as of `logger_stack`.

    It is logged also when the body raises.

    Args:
        threshold: shortest time to log, in seconds.
        level: logging level; None takes WARNING when there is a threshold, else DEBUG.
    """
    if level is None:
        level = logging.WARNING
        if threshold == float("-inf"):
            level = logging.DEBUG
    with logger_stack(name, logger) as (full_name, scope_logger):
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            if seconds >= threshold:
                scope_logger.log(level, "%s took %.4f s", full_name, seconds)


def debug_msg(msg: str) -> None:
    """Log a message at level DEBUG, with its scopes.

    The names of the scopes around come before it, see `logger_stack`.
    """
    with logger_stack() as (full_name, scope_logger):
        scope_logger.debug("%s %s", full_name, msg)


# ---- parts of state dicts, and their keys

# Key, global offset, and the bounds of the flattened range of a flat shard.
_ShardId = tuple[str, tuple[int, ...], tuple[int | None, int | None] | None]
# Key, global offset, and global shape.
_ObjectId = tuple[str, tuple[int, ...], tuple[int, ...]]


def extract_sharded_tensors(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split a state dict into its `ShardedTensor`s and the rest.

    This and the functions like it return two halves of nested dicts and lists: the values that
    they are named after, and everything else. They keep the nesting, close gaps in lists, and do
    not change their argument; see `dict_utils.extract_matching_values`.
    """
    return _split(sharded_state_dict, ShardedTensor)


def extract_sharded_tensors_and_factories(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split a state dict into its `ShardedTensor`s and `ShardedTensorFactory`s, and the rest."""
    return _split(sharded_state_dict, ShardedTensor, ShardedTensorFactory)


def extract_sharded_tensors_or_nonpersistent(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split off `ShardedTensor`s, factories and `LocalNonpersistentObject`s from the rest."""
    return _split(sharded_state_dict, ShardedTensor, ShardedTensorFactory, LocalNonpersistentObject)


def extract_sharded_base(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split off `ShardedBase` values (shards, objects, factories) from the rest."""
    return _split(sharded_state_dict, ShardedBase)


def extract_nonpersistent(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split a state dict into its `LocalNonpersistentObject`s, still wrapped, and the rest."""
    return _split(sharded_state_dict, LocalNonpersistentObject)


def _split(state: ShardedStateDict, *classes: type) -> tuple[ShardedStateDict, StateDict]:
    return extract_matching_values(state, lambda value: isinstance(value, classes))


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Put a prefix before every wrapped value's key, in place.

    The key is `ShardedBase.key`; the keys of dicts stay.
    """
    apply_prefix_mapping(sharded_state_dict, {"": prefix})


def replace_prefix_for_sharding(
    sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str
) -> None:
    """Replace the common prefix of all wrapped values' keys, in place.

    Raises:
        ValueError: a key does not start with `old_prefix`; nothing is changed then.
    """
    for value in nested_values([sharded_state_dict]):
        if isinstance(value, ShardedBase) and not value.key.startswith(old_prefix):
            raise ValueError(
                f"expected every key to begin with prefix {old_prefix!r}, but found {value.key!r}; "
                "apply_prefix_mapping leaves other keys alone"
            )
    apply_prefix_mapping(sharded_state_dict, {old_prefix: new_prefix})


def apply_prefix_mapping(sharded_state_dict: ShardedStateDict, prefix_map: dict[str, str]) -> None:
    """Replace prefixes of the keys of wrapped values, in place.

    `prefix_map` gives the new prefix for each old one. The first old prefix that a key starts with
    counts; other keys stay.
    """

    # By identity: a value that is at several positions of a state dict is renamed once.
    # In a list, since a single wrapped value is accepted as well.
    wrapped = {id(v): v for v in nested_values([sharded_state_dict]) if isinstance(v, ShardedBase)}
    for value in wrapped.values():
        value.key = renamed(value.key, prefix_map)


def force_all_tensors_to_non_fp8(sharded_state_dict: ShardedStateDict) -> None:
    """Replace Transformer Engine's Float8 tensors by ordinary ones, in place.

    Such a tensor pretends to be of a high precision type, but holds 8-bit numbers and scales.
    """
    for value in nested_values([sharded_state_dict]):
        if isinstance(value, ShardedBase) and _is_float8(value.data):
            value.data = value.data.dequantize()
            if isinstance(value, ShardedTensor):
                value.dtype = value.data.dtype


def _is_float8(data: Any) -> bool:
    # By name, since Transformer Engine is not a dependency. Subclasses count, too.
    return hasattr(data, "dequantize") and any(
        "Float8" in cls.__name__ for cls in type(data).__mro__
    )


def _sharded_tensor_shard_id(sharded_tensor: ShardedTensor) -> _ShardId:
    """Return an id of a shard that its replicas share."""
    flat = sharded_tensor.flattened_range
    return (
        sharded_tensor.key,
        sharded_tensor.global_offset,
        None if flat is None else (flat.start, flat.stop),
    )


def _sharded_object_id(sharded_object: ShardedObject) -> _ObjectId:
    """Return an id of a sharded object that its replicas share."""
    return sharded_object.key, sharded_object.global_offset, sharded_object.global_shape

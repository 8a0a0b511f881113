"""Extract parts of sharded state dicts, and rename the keys in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distckpt.mapping._base import ShardedBase
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    ShardedTensorFactory,
    StateDict,
)
from distckpt.megatron._impl.dict_utils import extract_matching_values, nested_values

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
    return extract_matching_values(sharded_state_dict, lambda v: isinstance(v, ShardedTensor))


def extract_sharded_tensors_and_factories(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split a state dict into its `ShardedTensor`s and `ShardedTensorFactory`s, and the rest."""
    return extract_matching_values(
        sharded_state_dict, lambda v: isinstance(v, ShardedTensor | ShardedTensorFactory)
    )


def extract_sharded_tensors_or_nonpersistent(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split off `ShardedTensor`s, factories and `LocalNonpersistentObject`s from the rest."""
    return extract_matching_values(
        sharded_state_dict,
        lambda v: isinstance(v, ShardedTensor | ShardedTensorFactory | LocalNonpersistentObject),
    )


def extract_sharded_base(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split off `ShardedBase` values (shards, objects, factories) from the rest."""
    return extract_matching_values(sharded_state_dict, lambda v: isinstance(v, ShardedBase))


def extract_nonpersistent(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split a state dict into its `LocalNonpersistentObject`s, still wrapped, and the rest."""
    return extract_matching_values(
        sharded_state_dict, lambda v: isinstance(v, LocalNonpersistentObject)
    )


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Put a prefix before every wrapped value's key, in place.

    The key is `ShardedBase.key`; the keys of dicts stay.
    """
    _rename_keys(sharded_state_dict, lambda key: prefix + key)


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
    _rename_keys(sharded_state_dict, lambda key: new_prefix + key[len(old_prefix) :])


def apply_prefix_mapping(sharded_state_dict: ShardedStateDict, prefix_map: dict[str, str]) -> None:
    """Replace prefixes of the keys of wrapped values, in place.

    `prefix_map` gives the new prefix for each old one. The first old prefix that a key starts with
    counts; other keys stay.
    """

    def rename(key: str) -> str:
        for old, new in prefix_map.items():
            if key.startswith(old):
                return new + key[len(old) :]
        return key

    _rename_keys(sharded_state_dict, rename)


def _rename_keys(sharded_state_dict: ShardedStateDict, rename: Callable[[str], str]) -> None:
    # By identity: a value that is at several positions of a state dict is renamed once.
    # In a list, since a single wrapped value is accepted as well.
    wrapped = {id(v): v for v in nested_values([sharded_state_dict]) if isinstance(v, ShardedBase)}
    for value in wrapped.values():
        value.key = rename(value.key)


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

"""Shards of an opened checkpoint: descriptions of stored ones, and loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distckpt._base.dtypes import FROM_NAME
from distckpt._checkpoint.stored_values import (
    decode_common_state,
    load_objects,
    read_encoded,
    stores_common_state,
)
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.load_shards import ReadSettings, load_tensors
from distckpt._plan.decoded import find
from distckpt._plan.load import check_keys
from distckpt._ranks.collectives import Ranks
from distckpt._state.common_state import COMMON_KEY
from distckpt._state.shards import Shard
from distckpt._storage import locations
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedObject


def load_shards(
    ranks: Ranks, stored: StoredCheckpoint, shards: Sequence[Shard], settings: ReadSettings
) -> list[Any]:
    """Read tensors in place and decode objects.

    Both are returned in the order of the shards.

    Collective operation: all ranks must call it.

    Raises:
        LoadMismatchError: a key, shape, dtype or object grid is not stored as requested.
        CorruptCheckpointError: files contradict the manifest or their checksums.
    """
    tensors: list[ShardedTensor] = []
    objects: list[ShardedObject] = []
    for shard in shards:
        if isinstance(shard, ShardedTensor):
            tensors.append(shard)
        else:
            objects.append(shard)
    loaded_tensors = iter(load_tensors(ranks, stored, tensors, settings))
    check_keys(stored, [shard.key for shard in objects if shard.key != COMMON_KEY])
    loaded_objects = iter(_load_objects(ranks, stored, objects))
    values = []
    for shard in shards:
        loaded = loaded_tensors if isinstance(shard, ShardedTensor) else loaded_objects
        values.append(next(loaded))
    return values


def _load_objects(
    ranks: Ranks, stored: StoredCheckpoint, objects: Sequence[ShardedObject]
) -> list[Any]:
    """Decode objects.

    On an object store, common state is read once, by the coordinator.
    """
    is_far = ranks.size > 1 and not locations.is_local(stored.location)
    is_requested = any(shard.key == COMMON_KEY for shard in objects)
    if not (is_far and is_requested and stores_common_state(stored)):
        return load_objects(stored, objects)
    with ranks.telling("read the common state") as told:
        pass
    with ranks.answering(told, "read the common state"):
        if ranks.is_coordinator:
            (told.answer,) = read_encoded(stored, COMMON_KEY).values()
    rest = [shard for shard in objects if shard.key != COMMON_KEY]
    others = iter(load_objects(stored, rest))
    common = decode_common_state(stored, told.answer)
    values = []
    for shard in objects:
        values.append(common if shard.key == COMMON_KEY else next(others))
    return values


def describe_tensors(stored: StoredCheckpoint) -> dict[str, ShardedTensor]:
    """Describe every stored tensor as one shard without data, by key."""
    shards = {}
    for key in stored.manifest.key_index:
        if not stored.is_object(key):
            shards[key] = _unsharded(key, stored.dtype_name(key), stored.global_shape(key))
    return shards


def describe_objects(stored: StoredCheckpoint) -> dict[str, ShardedObject]:
    """Describe every cell of the stored objects, without data, by unique key."""
    shards = {}
    for key in filter(stored.is_object, stored.manifest.keys):
        for chunk in stored.chunks_of(key):
            offset = stored.manifest.chunk_region(chunk).offset
            shard = ShardedObject(key, None, stored.global_shape(key), offset)
            shards[shard.unique_key] = shard
    return shards


def describe_quantized(
    stored: StoredCheckpoint,
) -> dict[str, tuple[ShardedTensor, tuple[str, ...]]]:
    """Describe the tensors stored as codes and scales, by key.

    The description names the codes and scales.
    """
    descriptions = {}
    for key, tensor in find(stored).items():
        shard = _unsharded(key, tensor.dtype, tensor.model_shape)
        descriptions[key] = (shard, tensor.keys)
    return descriptions


def _unsharded(key: str, dtype: str, shape: tuple[int, ...]) -> ShardedTensor:
    num_axes = len(shape)
    return ShardedTensor(
        key, None, FROM_NAME[dtype], shape, shape, (0,) * num_axes, (1,) * num_axes
    )

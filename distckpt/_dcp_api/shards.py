"""What the values of a state dict of torch.distributed.checkpoint are in a sharded state dict.

Such state dicts say less than those of distckpt: which ranks have copies of a tensor, and which ranks have a value at
all, only shows when all are compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from distckpt._base.errors import InvalidShardingError
from distckpt._dcp_api import tree
from distckpt._format.checksum import checksum
from distckpt._models.dtensor import Grid, is_dtensor, is_in_mesh, shard_of_dtensor
from distckpt._ranks.collectives import Ranks
from distckpt.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    is_main_replica,
)

_MAIN, _EVERYWHERE = 1, 2
"""Flags of a key on a rank: it has the copy that counts; all ranks have the key."""


def sharded(state_dict: Mapping[Any, Any], ranks: Ranks) -> ShardedStateDict:
    """Return the sharded state dict that stores a state dict.

    Collective: every rank calls. Compares a hash of keys, and the keys themselves only where they differ.

    Args:
        state_dict: tensors are whole or DTensors or PyTorch's sharded tensors.
        ranks: that save together.

    Returns:
        The same nested dict. Values that all ranks have are left as they are, to become common state; those that only
        some have are sharded objects.

    Raises:
        InvalidShardingError: a DTensor is a sum that is yet to be made, or two values have one key.
    """
    with ranks.phase("describe the state dict"):
        leaves = tree.leaves(state_dict)
        shards = {leaf.key: shards_of(leaf.key, leaf.value, ranks.rank) for leaf in leaves}
        copies = [(key, _copy_number(held[0])) for key, held in shards.items() if held]
    flags = _compare(ranks, copies)
    places = {leaf.path: leaf for leaf in leaves}

    def stored(path: tree.Path, value: Any) -> Any:
        key = places[path].key
        if not isinstance(value, torch.Tensor) and flags[key] & _EVERYWHERE:
            return value
        for shard in shards[key]:
            if flags[key] & _MAIN:
                shard.replica_id = 0
        # A rank outside of a mesh has nothing of its tensors.
        return shards[key] or LocalNonpersistentObject(None)

    state: ShardedStateDict = tree.with_leaves(state_dict, stored)
    return state


def shards_of(key: str, value: Any, rank: int) -> list[ShardedBase]:
    """Describe what this rank holds of a value.

    Args:
        key: of the value.
        value: a tensor of any kind; anything else is an object.
        rank: number of this rank, which tells copies of values from each other that do not know of copies.

    Returns:
        Shards, whose replica ids are zero for main copies if rank 0 is among those that have the value.
    """
    if not isinstance(value, torch.Tensor):
        return [ShardedObject(key, value, (1,), (0,), rank)]
    if is_dtensor(value):
        return [shard_of_dtensor(key, value, Grid(), None)] if is_in_mesh(value) else []
    if _is_torch_sharded(value):
        return list(_shards_of_torch(key, value))
    return [ShardedTensor.from_rank_offsets(key, value, replica_id=rank)]


def _is_torch_sharded(value: Any) -> bool:
    """Tell whether a tensor is of the class ShardedTensor of PyTorch, as FSDP1 makes them."""
    return hasattr(type(value), "local_shards") and hasattr(type(value), "sharding_spec")


def _shards_of_torch(key: str, value: Any) -> Iterator[ShardedTensor]:
    shape = tuple(value.metadata().size)
    for shard in value.local_shards():
        local, place = shard.tensor, shard.metadata
        if is_dtensor(local) or _is_torch_sharded(local):
            raise InvalidShardingError(
                f"Key {key!r} is a sharded tensor of sharded tensors, as FSDP1 makes of what tensor parallelism has "
                "divided: give FSDP1 a device mesh, so that its state dict has DTensors."
            )
        yield ShardedTensor(key, local, local.dtype, tuple(place.shard_sizes), shape, tuple(place.shard_offsets), None)


def _copy_number(shard: ShardedBase) -> tuple[int, ...]:
    number = shard.replica_id
    return (number,) if isinstance(number, int) else tuple(number)


def _compare(ranks: Ranks, copies: Sequence[tuple[str, tuple[int, ...]]]) -> dict[str, int]:
    """Return the flags of the keys of which this rank has something.

    Collective: every rank calls.

    Args:
        ranks: that compare.
        copies: these keys, each with the number of this rank's copy; the lowest number of all ranks is the main one.
    """
    keys = sorted(key for key, _ in copies)
    digest = checksum(json.dumps(keys).encode()) >> 3
    if ranks.is_coordinator and not all(is_main_replica(number) for _, number in copies):
        # That rank 0 has all keys tells nothing about the main copies then.
        digest = -1
    if ranks.all_equal(digest):
        return {key: _EVERYWHERE | (_MAIN if is_main_replica(number) else 0) for key, number in copies}
    tables = ranks.gather(json.dumps(copies).encode())
    flags: list[bytes] = []
    with ranks.phase("compare keys", decision=True):
        if ranks.is_coordinator:
            flags = _flags([json.loads(table) for table in tables])
    return dict(zip((key for key, _ in copies), ranks.scatter(flags), strict=True))


def _flags(tables: Sequence[Sequence[tuple[str, list[int]]]]) -> list[bytes]:
    """Return, for each rank, the flags of its keys, given the keys and copy numbers of all ranks."""
    lowest: dict[str, list[int]] = {}
    for key, number in (entry for table in tables for entry in table):
        lowest[key] = min(lowest.get(key, number), number)
    held_by = Counter(key for table in tables for key, _ in table)
    return [
        bytes(
            (_MAIN if number == lowest[key] else 0) | (_EVERYWHERE if held_by[key] == len(tables) else 0)
            for key, number in table
        )
        for table in tables
    ]

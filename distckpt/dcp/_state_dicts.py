"""State dicts of torch.distributed.checkpoint: flattened as it does, and as sharded state dicts.

Values have dotted keys, and lie in nested dicts and lists. They hold less information than sharded
state dicts: the ranks that have copies of a tensor, or have a value at all, are only known once all
ranks are compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from distckpt._base import tree
from distckpt._base.errors import CheckpointingException, InvalidShardingError
from distckpt._base.tree import HOLE, Position, compacted, dotted, map_leaves, new_like
from distckpt._format.checksum import checksum
from distckpt._models.dtensor import (
    has_parts,
    is_dtensor,
    is_in_mesh,
    shard_of_dtensor,
    shard_of_parts,
)
from distckpt._ranks.collectives import Ranks
from distckpt.mapping._base import OpenReplicaId, ShardedBase
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
)


def unwrap_stateful(state_dict: Mapping[str, Any], *, in_order: bool = False) -> dict[str, Any]:
    """Replace stateful values at the top by their state dicts.

    `in_order` calls them by key.
    """
    if not isinstance(state_dict, Mapping):
        raise CheckpointingException(
            f"state_dict is a {type(state_dict).__name__} and must be a dict, such as "
            + '{"model": model}.'
        )
    unwrapped = {}
    for key in sorted(state_dict) if in_order else state_dict:
        value = state_dict[key]
        if is_stateful(value):
            value = value.state_dict()
        unwrapped[key] = value
    return unwrapped


def is_stateful(value: Any) -> bool:
    """Whether a value is saved and loaded through its own state dict."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class Leaf(NamedTuple):
    """A value of a state dict with its path.

    The path as text is the key.
    """

    key: str
    path: Position
    value: Any


def leaves(state_dict: Mapping[Any, Any]) -> list[Leaf]:
    """Flatten a state dict.

    Dicts are always flattened, lists only where they hold tensors or dicts, other containers never.

    Raises:
        InvalidShardingError: two values have one key, as in `{"a": {"b": 1}, "a.b": 2}`.
    """
    leaves_by_key: dict[str, Leaf] = {}
    for path, value in tree.leaves(state_dict, _is_flattened):
        key = dotted(path)
        if key in leaves_by_key:
            raise InvalidShardingError(
                f"Two values have the key {key!r}, those at {list(leaves_by_key[key].path)} and at "
                f"{list(path)}: rename one."
            )
        leaves_by_key[key] = Leaf(key, path, value)
    return list(leaves_by_key.values())


def _is_flattened(node: Any) -> bool:
    if isinstance(node, list):
        return any(
            leaf is HOLE or isinstance(leaf, torch.Tensor | Mapping)
            for _, leaf in tree.leaves(node, _is_list)
        )
    return isinstance(node, Mapping)


def _is_list(node: Any) -> bool:
    return isinstance(node, list)


def by_key(common: Any) -> dict[str, Any]:
    """Return the values of common state by key.

    A key is less exact than a path: `a.b` may be nested or not.

    PyTorch compares keys, so that state dicts may be flat when saved and nested when loaded, and
    its format turns all keys of dicts into text.
    """
    values: dict[str, Any] = {}
    for path, value in tree.leaves(common, _is_flattened):
        values.setdefault(dotted(path), compacted(value))
    return values


# --- Sharding -------------------------------------------------------------------------------------


def sharded(state_dict: Mapping[Any, Any], ranks: Ranks) -> ShardedStateDict:
    """Convert the tensors of a state dict to shards.

    Tensors are plain, DTensors or PyTorch's sharded tensors.

    The result is the same nested dict. Values that all ranks have stay as they are, to become
    common state; values that only some ranks have become sharded objects. Collective operation: all
    ranks must call it. It compares a hash of the keys, and the keys themselves only where they
    differ.

    Raises:
        InvalidShardingError: a DTensor is a partial sum, or two values have one key.
    """
    with ranks.phase("describe the state dict"):
        shards: dict[Position, list[ShardedBase]] = {}
        own = {}
        for leaf in leaves(state_dict):
            parts = shards_of(leaf.key, leaf.value, ranks.rank)
            shards[leaf.path] = parts
            if parts:
                own[leaf.key] = isinstance(parts[0], ShardedTensor)
    of_all = _objects_of_all(ranks, own)

    def stored(path: Position, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) and dotted(path) in of_all:
            return value
        # A rank outside of a mesh holds no part of its tensors.
        return shards[path] or LocalNonpersistentObject(None)

    state: ShardedStateDict = map_leaves(stored, state_dict, _is_flattened, join=new_like)
    return state


def shards_of(key: str, value: Any, rank: int) -> list[ShardedBase]:
    """Describe this rank's part of a value; anything but a tensor is an object.

    The lowest rank that has a part has its main copy.
    """
    copy = OpenReplicaId((0, rank))
    if not isinstance(value, torch.Tensor):
        return [ShardedObject(key, value, (1,), (0,), copy)]
    if is_dtensor(value):
        if is_in_mesh(value):
            return [shard_of_dtensor(key, value, (), 0, None)]
        return []
    if _is_torch_sharded(value):
        return list(_shards_of_torch(key, value))
    if not has_parts(value):
        return [ShardedTensor.from_rank_offsets(key, value, replica_id=copy)]
    shard = shard_of_parts(key, value, (), 0, copy)
    if isinstance(shard, ShardedTensor):
        return [shard]
    return list[Any](shard.build())


def _is_torch_sharded(value: Any) -> bool:
    """Whether a tensor is PyTorch's ShardedTensor, which FSDP1 makes."""
    return hasattr(type(value), "local_shards") and hasattr(type(value), "sharding_spec")


def _shards_of_torch(key: str, value: Any) -> Iterator[ShardedTensor]:
    shape = tuple(value.metadata().size)
    for shard in value.local_shards():
        local = shard.tensor
        place = shard.metadata
        if is_dtensor(local) or _is_torch_sharded(local):
            raise InvalidShardingError(
                f"Key {key!r} is a sharded tensor of sharded tensors, as FSDP1 makes of what "
                "tensor parallelism has divided: give FSDP1 a device mesh, so that its state dict "
                "has DTensors."
            )
        yield ShardedTensor(
            key,
            local,
            local.dtype,
            tuple(place.shard_sizes),
            shape,
            tuple(place.shard_offsets),
            None,
        )


def _objects_of_all(ranks: Ranks, own: Mapping[str, bool]) -> set[str]:
    """Return the common keys that are not tensors on all ranks.

    `own` tells for this rank's keys whether they are tensors. Collective operation: all ranks must
    call it.
    """
    message = json.dumps(own, sort_keys=True).encode()
    if ranks.all_equal(checksum(message) >> 3):
        return {key for key, is_tensor in own.items() if not is_tensor}
    tables = list(map(json.loads, ranks.gather(message)))

    def objects() -> list[str]:
        of_all = set.intersection(*map(set, tables))
        return sorted(key for key in of_all if not all(table[key] for table in tables))

    return set(ranks.decide_json("compare keys", objects))

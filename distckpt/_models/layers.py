"""Shards of the tensors of one layer, divided among tensor parallel ranks.

`distckpt.modules` is the public path.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from distckpt._base.errors import InvalidShardingError
from distckpt._models.dtensor import (
    TensorShard,
    has_parts,
    is_dtensor,
    shard_of_dtensor,
    shard_of_parts,
)
from distckpt._ranks.groups import own_rank
from distckpt.mapping._base import OpenReplicaId, ReplicaId
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import (
    ShardedObject,
    ShardedStateDict,
    StateDict,
)

Offsets: TypeAlias = Iterable[tuple[int, int, int]]
"""Prepended axes: for each, from 0 on, `(axis, position, number of parts)`."""
Group: TypeAlias = Any
"""Ranks among which something is divided or copied: a process group, or `(rank, size)`."""

EXTRA_STATE = "_extra_state"
"""The end of the name of a module's extra state."""


def make_tp_sharded_tensor_for_checkpoint(
    tensor: torch.Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: ReplicaId | None = None,
    prepend_offsets: Offsets = (),
    *,
    tp_group: Group | None = None,
    dp_cp_group: Group | None = None,
    **kwargs: Any,
) -> TensorShard:
    """Describe a tensor that is divided evenly among tensor parallel ranks.

        tp = (tp_rank, tp_size)
        make_tp_sharded_tensor_for_checkpoint(weight, "up.weight", 0, tp_group=tp, dp_cp_group=dp)

    Args:
        tensor: this rank's part. A DTensor is this tensor parallel rank's part, divided once more
            by FSDP2.
        key: name of the global tensor.
        tp_axis: axis of `tensor` along which the parts lie.
        replica_id: which copy of the part this is; `(0, 0, data parallel rank)` by default, with
            mesh coordinates in place of that rank for a DTensor. Without `dp_cp_group` the lowest
            rank that holds the part has the main replica.
        prepend_offsets: axes in front of the tensor's own, see `sharded_state_dict`.
        tp_group: the tensor parallel ranks: a process group or `(rank, size)`; None for this one
            alone.
        dp_cp_group: the ranks with copies of the part; None for all that turn out to hold it.
        kwargs: further attributes of the `ShardedTensor`.

    Raises:
        InvalidShardingError: axes or positions that do not exist.
    """
    offsets = tuple(prepend_offsets)
    division = (len(offsets) + tp_axis, *_rank_and_size(tp_group))
    default = _default_replica_id(tp_group, dp_cp_group, is_divided=True)
    return _shard(tensor, key, offsets, (division,), replica_id, default, kwargs)


def make_sharded_tensor_for_checkpoint(
    tensor: torch.Tensor,
    key: str,
    prepend_offsets: Offsets = (),
    replica_id: ReplicaId | None = None,
    *,
    tp_group: Group | None = None,
    dp_cp_group: Group | None = None,
    **kwargs: Any,
) -> TensorShard:
    """Describe a tensor that is copied among ranks, or divided by FSDP2.

    Args:
        tensor: the tensor, or a DTensor.
        key: name of the global tensor.
        prepend_offsets: axes in front of the tensor's own, see `sharded_state_dict`.
        replica_id: which copy this is; `(0, tensor parallel rank, data parallel rank)` by default,
            with mesh coordinates in place of the data parallel rank for a DTensor.
        tp_group: see `make_tp_sharded_tensor_for_checkpoint`.
        dp_cp_group: likewise.
        kwargs: further attributes of the `ShardedTensor`.
    """
    default = _default_replica_id(tp_group, dp_cp_group)
    return _shard(tensor, key, tuple(prepend_offsets), (), replica_id, default, kwargs)


def _default_replica_id(
    tp_group: Group | None, dp_cp_group: Group | None, *, is_divided: bool = False
) -> tuple[int, ...]:
    """Return `(0, tensor parallel rank, data parallel rank)`.

    The tensor parallel ranks have copies unless a tensor is divided among them.
    """
    tp_rank = 0
    if not is_divided:
        tp_rank, _ = _rank_and_size(tp_group)
    if dp_cp_group is not None:
        dp_rank, _ = _rank_and_size(dp_cp_group)
        return 0, tp_rank, dp_rank
    # Without a group of the ranks with copies, these are found when all shards are known.
    if tp_group is not None:
        return OpenReplicaId((0, tp_rank, 0))
    return OpenReplicaId((0, 0, own_rank()))


def _shard(
    tensor: torch.Tensor,
    key: str,
    offsets: tuple[tuple[int, int, int], ...],
    division: tuple[tuple[int, int, int], ...],
    replica_id: ReplicaId | None,
    default_replica_id: tuple[int, ...],
    attributes: dict[str, Any],
) -> TensorShard:
    """Describe a tensor that is whole or one part of a `division`.

    It lies behind prepended axes (`offsets`).
    """
    place = offsets + division
    num_prepended = len(offsets)
    if is_dtensor(tensor):
        if replica_id is None:
            # The mesh numbers its copies itself.
            replica_id = type(default_replica_id)(default_replica_id[:2])
        prepended_axes(offsets, "prepend_offsets")
        return shard_of_dtensor(key, tensor, place, num_prepended, replica_id, **attributes)
    if replica_id is None:
        replica_id = default_replica_id
    if has_parts(tensor):
        return shard_of_parts(key, tensor, place, num_prepended, replica_id, **attributes)
    return ShardedTensor.from_rank_offsets(
        key, tensor, *place, replica_id=replica_id, prepend_axis_num=num_prepended, **attributes
    )


def make_sharded_object_for_checkpoint(
    obj: Any,
    key: str,
    sharded_offsets: Offsets = (),
    replica_id: ReplicaId | None = None,
    *,
    tp_group: Group | None = None,
    dp_cp_group: Group | None = None,
    **kwargs: Any,
) -> ShardedObject:
    """Describe an object that tensor and data parallel ranks have copies of.

    Args:
        obj: any value that `save` can store.
        key: name of the global object.
        sharded_offsets: its place in an array of objects: `(axis, position, size)` for the axes 0,
            1, ...
        replica_id: which copy this is; `(0, tensor parallel rank, data parallel rank)` by default.
        tp_group: see `make_tp_sharded_tensor_for_checkpoint`.
        dp_cp_group: likewise.
        kwargs: further attributes of the `ShardedObject`.
    """
    if replica_id is None:
        replica_id = _default_replica_id(tp_group, dp_cp_group)
    place = prepended_axes(sharded_offsets, "sharded_offsets") or ((0, 1),)
    offset, shape = zip(*place, strict=True)
    return ShardedObject(key, obj, shape, offset, replica_id, **kwargs)


def make_sharded_tensors_for_checkpoint(
    state_dict: StateDict,
    prefix: str,
    tensor_parallel_layers_axis_map: dict[str, int] | None = None,
    sharded_offsets: Offsets = (),
    extra_state_suffix: str = EXTRA_STATE,
    tp_group: Group | None = None,
    dp_cp_group: Group | None = None,
) -> ShardedStateDict:
    """Describe the state dict of a layer with tensor parallel weights.

        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            return make_sharded_tensors_for_checkpoint(
                self.state_dict(keep_vars=True), prefix, {"weight": 0}, sharded_offsets,
                tp_group=self.tp,
            )

    Args:
        state_dict: the layer's, made with `keep_vars=True` if there is an optimizer.
        prefix: put before every name.
        tensor_parallel_layers_axis_map: name -> axis, for the tensors that are divided evenly among
            tensor parallel ranks.
        sharded_offsets: axes in front of each tensor's own, see `sharded_state_dict`.
        extra_state_suffix: objects have names that end like this.
        tp_group: see `make_tp_sharded_tensor_for_checkpoint`.
        dp_cp_group: likewise.

    Returns:
        By prefixed name a `ShardedTensor` (a factory for some DTensors) or `ShardedObject`.
    """
    axes = tensor_parallel_layers_axis_map or {}
    offsets = tuple(sharded_offsets)
    groups = {"tp_group": tp_group, "dp_cp_group": dp_cp_group}
    state: ShardedStateDict = {}
    for name, value in state_dict.items():
        key = prefix + name
        if name.endswith(extra_state_suffix):
            state[key] = make_sharded_object_for_checkpoint(value, key, offsets, **groups)
        elif name in axes:
            state[key] = make_tp_sharded_tensor_for_checkpoint(
                value, key, axes[name], prepend_offsets=offsets, **groups
            )
        else:
            state[key] = make_sharded_tensor_for_checkpoint(value, key, offsets, **groups)
    return state


def prepended_axes(offsets: Offsets, argument: str) -> tuple[tuple[int, int], ...]:
    """Return the position and the number of parts for each prepended axis.

    Raises:
        InvalidShardingError: the axes are not 0, 1, ...
    """
    ordered = sorted(offsets, key=operator.itemgetter(0))
    if [axis for axis, *_ in ordered] != list(range(len(ordered))):
        raise InvalidShardingError(
            f"{argument} {ordered} must give (axis, position, number of parts) for the axes 0 to "
            f"{len(ordered) - 1}, each once: they lie in front of the axes of the tensor."
        )
    return tuple((position, parts) for _, position, parts in ordered)


def _rank_and_size(group: Group | None) -> tuple[int, int]:
    if group is None:
        return 0, 1
    if isinstance(group, tuple):
        rank, size = group
        return rank, size
    return group.rank(), group.size()

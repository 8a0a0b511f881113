"""Mixtures of experts: the experts of a rank as parts of tensors that have an axis for all experts.

Expert parallel ranks hold different experts under the same names, counted from 0 on each. In a
checkpoint an expert needs the number that it has in the whole model. Describe the experts of one
rank as if there were no others, and let one of these functions number them:

    experts = [expert.sharded_state_dict("experts.") for expert in self.local_experts]
    state["experts"] = sequential_experts(experts, ep_rank, ep_size, expert_dp_rank=expert_dp_rank)

All of these functions store the same: tensors with one axis in front of an expert's own, which has
an index for each expert of the model. So the number of expert parallel ranks can change, and so can
the way in which the model holds its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from distckpt._base.errors import InvalidShardingError
from distckpt._base.tree import Position, map_leaves
from distckpt._geometry.region import with_item
from distckpt._models.fused import FusedPart, fail, parts_factory
from distckpt._models.layers import prepended_axes
from distckpt._state.flatten import adopt
from distckpt.mapping._base import ReplicaId
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedObject, ShardedStateDict, ShardedTensorFactory

__all__ = [
    "grouped_experts",
    "grouped_mlp_sharded_state_dict",
    "sequential_experts",
]


def sequential_experts(
    experts: Sequence[ShardedStateDict], ep_rank: int, ep_size: int, *, expert_dp_rank: int | None
) -> list[ShardedStateDict]:
    """Number the experts of a rank that has one module each.

    Args:
        experts: for each expert of this rank, in order, its sharded state dict, in which all
            experts have the same keys. All ranks hold the same number of experts.
        ep_rank: position of this rank among the ranks that hold different experts.
        ep_size: number of such ranks.
        expert_dp_rank: position of this rank among the ranks that hold the same part of the same
            experts, 0 if there are no others. It becomes the last number of all replica ids, in
            place of the data parallel rank, which also counts ranks with other experts. None leaves
            the replica ids as they are, which is right for DTensors.

    Returns:
        The same state dicts, with an axis of all experts in front of the axes of each tensor,
        behind axes that are prepended already (for layers, say). Objects get it as their last axis.
        The arguments are not changed.

    Raises:
        InvalidShardingError: no such rank.
    """
    _check_rank(ep_rank, ep_size)
    first = ep_rank * len(experts)
    num_experts = ep_size * len(experts)
    numbered = []
    for number, expert in enumerate(experts, first):
        add_axis = partial(_add_axis, number=number, num_experts=num_experts)
        numbered.append(_map_shards(expert, add_axis, expert_dp_rank))
    return numbered


def grouped_experts(
    state_dict: ShardedStateDict, ep_rank: int, ep_size: int, *, expert_dp_rank: int | None
) -> ShardedStateDict:
    """Number the experts of a rank that has all in one tensor.

    They follow one another along its first axis.

        # The weight has the shape [local experts, out, in].
        fc2 = ShardedTensor.from_rank_offsets("experts.fc2", weight, (2, tp_rank, tp_size))
        state.update(grouped_experts({"fc2": fc2}, ep_rank, ep_size, expert_dp_rank=0))

    `ep_rank`, `ep_size` and `expert_dp_rank` are described in `sequential_experts`.

    Args:
        state_dict: shards and factories of tensors of local shape `[local experts, ...]`; prepended
            axes may be in front of the experts. All ranks hold the same number of experts.

    Returns:
        The same state dict, with the axis of the experts as long as the whole model has experts.
        The arguments are not changed.

    Raises:
        InvalidShardingError: no such rank, or an object among the shards, which cannot be divided
            by expert.
    """
    _check_rank(ep_rank, ep_size)
    extend = partial(_extend_axis, ep_rank=ep_rank, ep_size=ep_size)
    mapped: ShardedStateDict = _map_shards(state_dict, extend, expert_dp_rank)
    return mapped


def grouped_mlp_sharded_state_dict(
    weight1: torch.Tensor,
    weight2: torch.Tensor,
    prefix: str = "",
    sharded_offsets: Sequence[tuple[int, int, int]] = (),
    *,
    num_local_experts: int,
    gated: bool,
    ep_rank: int,
    ep_size: int,
    tp_rank: int = 0,
    tp_size: int = 1,
    expert_dp_rank: int = 0,
) -> ShardedStateDict:
    """Describe experts whose weights are in two matrices, as in Megatron's `GroupedMLP`.

    They are stored as Megatron stores them: `<prefix>experts.linear_fc1.weight`, [experts,
    features, hidden], and `<prefix>experts.linear_fc2.weight`, [experts, hidden, features]. Each
    expert has two linear layers, whose features are divided among tensor parallel ranks, gate
    before up. `ep_rank`, `ep_size` and `expert_dp_rank` are described in `sequential_experts`.

    Args:
        weight1: of shape [hidden, local experts * width], which holds expert after expert: it is
            used as `weight1.view(local experts, hidden, width)`. The width is the number of
            features on this rank, or twice that if `gated`: all of gate, then all of up.
        weight2: of shape [local experts * features on this rank, hidden].
        prefix: beginning of the keys.
        sharded_offsets: axes to prepend, as (axis, position, size): for layers, say.
        num_local_experts: number of experts that each rank holds.
        gated: whether `weight1` holds gate and up (SwiGLU).
        tp_rank: position of this rank among the ranks that hold different features of the same
            experts.
        tp_size: number of such ranks.

    Returns:
        Factories for `<prefix>weight1` and `<prefix>weight2`.

    Raises:
        InvalidShardingError: shapes that contradict each other, or no such rank.
    """
    _check_rank(tp_rank, tp_size)
    num_projections = 1
    gate = "without gate"
    if gated:
        num_projections = 2
        gate = "with gate"
    shapes = tuple(weight1.shape), tuple(weight2.shape)
    if not _hold_experts(*shapes, num_local_experts, num_projections):
        fail(
            f"{prefix}experts",
            f"weight1 {shapes[0]} and weight2 {shapes[1]} do not hold {num_local_experts} experts "
            f"{gate}",
        )
    hidden = weight1.shape[0]
    features = weight2.shape[0] // num_local_experts
    layers = prepended_axes(sharded_offsets, "sharded_offsets")
    layer = tuple(position for position, _ in layers)
    num_layers = tuple(size for _, size in layers)

    stored = (*num_layers, num_local_experts, num_projections * features * tp_size, hidden)
    local = (num_local_experts, hidden, features)
    projections = []
    for number in range(num_projections):
        stored_offset = (*layer, 0, (number * tp_size + tp_rank) * features, 0)
        projections.append(FusedPart((0, 0, number * features), local, stored_offset, stored))
    stored = (*num_layers, num_local_experts, hidden, features * tp_size)
    local = (num_local_experts, features, hidden)
    part = FusedPart((0, 0, 0), local, (*layer, 0, 0, tp_rank * features), stored)
    state = {}
    for own, name, weight, num_in, num_out, parts in (
        ("weight1", "linear_fc1", weight1, hidden, num_projections * features, projections),
        ("weight2", "linear_fc2", weight2, features, hidden, [part]),
    ):
        # Viewed as [experts, in, out], stored as [experts, out, in].
        state[f"{prefix}{own}"] = parts_factory(
            f"{prefix}experts.{name}.weight",
            weight,
            parts,
            local_shape=weight.shape,
            view_shape=(num_local_experts, num_in, num_out),
            axes=(0, 2, 1),
            prepend_axis_num=len(layers),
            replica_id=(0, 0, 0),
        )
    return grouped_experts(state, ep_rank, ep_size, expert_dp_rank=expert_dp_rank)


def _map_shards(tree: Any, change: Callable[[Any], Any], expert_dp_rank: int | None) -> Any:
    """Change the shards and objects in nested containers, and all replica ids.

    The shards that factories build are changed, too.
    """

    def changed(_: Position, leaf: Any) -> Any:
        part = adopt(leaf)
        if isinstance(part, ShardedTensorFactory):
            part = _with_built(part, change)
        elif isinstance(part, ShardedTensor | ShardedObject):
            part = change(part)
        else:
            return leaf
        return replace(part, replica_id=_with_last(part.replica_id, expert_dp_rank))

    return map_leaves(changed, tree)


def _with_built(
    factory: ShardedTensorFactory, change: Callable[[Any], Any]
) -> ShardedTensorFactory:
    """Make the factory of changed shards."""

    def changed(_: Position, leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensor | ShardedObject):
            return change(adopt(leaf))
        return leaf

    def build(
        key: str, tensor: torch.Tensor, replica_id: ReplicaId, flattened_range: slice | None
    ) -> Any:
        return map_leaves(changed, factory.build_fn(key, tensor, replica_id, flattened_range))

    return replace(factory, build_fn=build)


def _add_axis(
    shard: ShardedTensor | ShardedObject, number: int, num_experts: int
) -> ShardedTensor | ShardedObject:
    if isinstance(shard, ShardedObject):
        grid = (*shard.global_shape, num_experts)
        cell = (*shard.global_offset, number)
        return replace(shard, global_shape=grid, global_offset=cell)
    axis = shard.prepend_axis_num
    fragmentations = shard.axis_fragmentations
    if fragmentations is not None:
        fragmentations = _with_inserted(fragmentations, axis, num_experts)
    return replace(
        shard,
        global_shape=_with_inserted(shard.global_shape, axis, num_experts),
        global_offset=_with_inserted(shard.global_offset, axis, number),
        axis_fragmentations=fragmentations,
        prepend_axis_num=axis + 1,
    )


def _extend_axis(shard: ShardedTensor | ShardedObject, ep_rank: int, ep_size: int) -> ShardedTensor:
    if isinstance(shard, ShardedObject):
        raise InvalidShardingError(
            f"ShardedObject {shard.key!r}: an object for a group of experts cannot be divided when "
            "the groups change; make one per expert (sequential_experts numbers them) or leave it "
            "out"
        )
    axis = shard.prepend_axis_num
    fragmentations = shard.axis_fragmentations
    if axis == len(shard.global_shape):
        fail(shard.key, "has no axis for the experts of this rank; sequential_experts adds one")
    if fragmentations is not None:
        fragmentations = with_item(fragmentations, axis, fragmentations[axis] * ep_size)
    num_local = shard.global_shape[axis]
    return replace(
        shard,
        global_shape=with_item(shard.global_shape, axis, num_local * ep_size),
        global_offset=with_item(
            shard.global_offset, axis, shard.global_offset[axis] + num_local * ep_rank
        ),
        axis_fragmentations=fragmentations,
    )


def _hold_experts(
    shape1: tuple[int, ...], shape2: tuple[int, ...], num_experts: int, num_projections: int
) -> bool:
    """Tell whether weights of two shapes hold the layers of some experts."""
    if len(shape2) != 2 or num_experts < 1:
        return False
    width, hidden = shape2
    return width % num_experts == 0 and shape1 == (hidden, num_projections * width)


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise InvalidShardingError(
            f"there is no rank {rank} among {size}: ranks are counted from 0"
        )


def _with_last(replica_id: ReplicaId, value: int | None) -> ReplicaId:
    """Replace the last number of a replica id; None leaves it."""
    if value is None:
        return replica_id
    if isinstance(replica_id, tuple | list):
        return (*replica_id[:-1], value)
    return value


def _with_inserted(values: tuple[int, ...], position: int, value: int) -> tuple[int, ...]:
    return (*values[:position], value, *values[position:])

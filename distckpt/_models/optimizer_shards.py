"""Shards of what an optimizer keeps for one parameter. `distckpt.optimizer` is the public path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from distckpt._base.errors import InvalidShardingError
from distckpt._models.dtensor import Grid, is_dtensor, local_part, shard_of_dtensor
from distckpt.dict_utils import nested_values
from distckpt.mapping import ShardedTensor, ShardedTensorFactory


def make_sharded_optimizer_tensor(
    model_param: ShardedTensor | ShardedTensorFactory, optim_param: torch.Tensor, prefix: str
) -> ShardedTensor | ShardedTensorFactory:
    """Wrap an optimizer tensor the way the parameter that it belongs to is wrapped.

    Args:
        model_param: shard or factory of the parameter.
        optim_param: tensor of the shape of the parameter's shard (1-D if that is flat), of any dtype.
        prefix: put before the parameter's key, with a dot between them.

    Returns:
        A shard or factory like `model_param`, of the new key, with `optim_param` as its data.

    Raises:
        InvalidShardingError: the shapes differ.
    """
    data = local_part(optim_param)
    key = f"{prefix}.{model_param.key}"
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=data)
    return replace(model_param, key=key, data=data, dtype=data.dtype)


def param_name(shard: ShardedTensor | ShardedTensorFactory) -> str:
    """Return what names a parameter under every layout: its key and, where layers share it, its place among them."""
    part: Any = shard
    if isinstance(shard, ShardedTensorFactory):
        part = next((s for s in nested_values([shard.build()]) if isinstance(s, ShardedTensor)), None)
    if part is None or not part.prepend_axis_num:
        return shard.key
    return f"{shard.key}[{','.join(map(str, part.global_offset[: part.prepend_axis_num]))}]"


def state_shard(
    shard: ShardedTensor | ShardedTensorFactory, param: torch.Tensor, tensor: torch.Tensor, name: str, prefix: str
) -> ShardedTensor | ShardedTensorFactory:
    """Describe a tensor in the state of a parameter, given the parameter's shard; it has the key `<prefix>.<key>`."""
    place = (tuple(tensor.shape), getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None))
    if place == (tuple(param.shape), getattr(param, "device_mesh", None), getattr(param, "placements", None)):
        return make_sharded_optimizer_tensor(shard, tensor, prefix)
    if isinstance(shard, ShardedTensor) and shard.flattened_range is None:
        if is_dtensor(tensor) and is_dtensor(param):
            outer = shard.replica_id if isinstance(shard.replica_id, tuple) else (shard.replica_id,)
            outer = outer[: max(0, len(outer) - param.device_mesh.ndim)]  # type: ignore[attr-defined]
            num_prepended = shard.prepend_axis_num
            prepended = zip(shard.global_offset[:num_prepended], shard.global_shape[:num_prepended], strict=True)
            if shard.global_shape[num_prepended:] == tuple(param.shape):
                return shard_of_dtensor(f"{prefix}.{shard.key}", tensor, Grid(tuple(prepended)), outer)
        elif not is_dtensor(tensor) and (found := _reduced(shard, tensor, prefix)) is not None:
            return found
    if tuple(local_part(tensor).shape) == tuple(local_part(param).shape):
        return make_sharded_optimizer_tensor(shard, tensor, prefix)
    raise InvalidShardingError(
        f"The optimizer's {name!r} for the parameter {shard.key!r} has shape {tuple(tensor.shape)}, the parameter "
        f"{tuple(param.shape)}, of which this rank has a part: how it is divided cannot be told. Keep it in a shape "
        "with size 1 along the axes that it lacks, or make a ShardedTensor of it yourself."
    )


def _reduced(shard: ShardedTensor, tensor: torch.Tensor, prefix: str) -> ShardedTensor | None:
    """Describe a tensor that lacks some axes of a parameter's part (has size 1 there); None when it is none."""
    num_prepended, shape = shard.prepend_axis_num, tuple(tensor.shape)
    if shape == shard.local_shape:
        return None
    sizes, offset = shard.global_shape[num_prepended:], shard.global_offset[num_prepended:]
    parts = shard.axis_fragmentations and shard.axis_fragmentations[num_prepended:]
    pairs = zip(shape, shard.local_shape, strict=False)
    if shard.local_shape == sizes:
        place = [(size, 0, 1) for size in shape]
    elif parts is None or len(shape) != len(sizes) or any(n not in (1, m) for n, m in pairs):
        return None
    else:
        # Where the parameter is divided along an axis that is missing here, each part has a value of its own.
        place = [
            (size, start, count) if n == local else (count, start // local, count)
            for n, local, size, start, count in zip(shape, shard.local_shape, sizes, offset, parts, strict=True)
        ]
    prepended = shard.global_shape[:num_prepended]
    return replace(
        shard,
        key=f"{prefix}.{shard.key}",
        data=tensor,
        dtype=tensor.dtype,
        local_shape=shape,
        global_shape=prepended + tuple(size for size, _, _ in place),
        global_offset=shard.global_offset[:num_prepended] + tuple(start for _, start, _ in place),
        axis_fragmentations=prepended + tuple(count for _, _, count in place),
    )

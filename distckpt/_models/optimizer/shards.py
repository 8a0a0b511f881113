"""Shards of the tensors in an optimizer's state, made from those of the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from distckpt._base.errors import InvalidShardingError, LoadMismatchError
from distckpt._base.memory import in_huge_pages
from distckpt._base.tree import leaves
from distckpt._mapping.kinds import is_a
from distckpt._mapping.wrappers import ShardedTensor, ShardedTensorFactory
from distckpt._models.dtensor import is_dtensor, local_part, shard_of_dtensor
from distckpt._state.stored_form import shard_at


def make_sharded_optimizer_tensor(
    model_param: ShardedTensor | ShardedTensorFactory, optim_param: torch.Tensor, prefix: str
) -> ShardedTensor | ShardedTensorFactory:
    """Wrap an optimizer tensor the way the parameter that it belongs to is wrapped.

    Args:
        model_param: shard or factory of the parameter.
        optim_param: tensor of the shape of the parameter's shard (1-D if that is flat), of any
            dtype.
        prefix: put before the parameter's key, with a dot between them.

    Returns:
        A shard or factory like `model_param`, of the new key, with `optim_param` as its data.

    Raises:
        InvalidShardingError: the shapes differ.
    """
    data = local_part(optim_param)
    key = f"{prefix}.{model_param.key}"
    if is_a(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=data)
    return replace(model_param, key=key, data=data, dtype=data.dtype)


def param_name(shard: ShardedTensor | ShardedTensorFactory) -> str:
    """Name a parameter, whatever the layout: by its key and, where layers share that, its place
    among them.
    """
    part: Any = shard
    if isinstance(shard, ShardedTensorFactory):
        part = next((s for _, s in leaves(shard.build()) if isinstance(s, ShardedTensor)), None)
    if part is None or not part.prepend_axis_num:
        return shard.key
    return f"{shard.key}[{','.join(map(str, part.global_offset[: part.prepend_axis_num]))}]"


def state_shard(
    shard: ShardedTensor | ShardedTensorFactory,
    param: torch.Tensor,
    tensor: torch.Tensor,
    name: str,
    prefix: str,
) -> ShardedTensor | ShardedTensorFactory:
    """Describe a tensor in the state of a parameter, given the parameter's shard; it has the key
    `<prefix>.<key>`.
    """
    is_alike = tensor.shape == param.shape and is_dtensor(tensor) == is_dtensor(param)
    if is_alike and is_dtensor(param):
        is_alike = _distribution(tensor) == _distribution(param)
    if is_alike and type(shard) is ShardedTensor:
        # Not with `replace`, which checks again what has been checked: this is most of the time
        # that describing takes.
        alike = object.__new__(ShardedTensor)
        data = local_part(tensor)
        vars(alike).update(vars(shard), key=f"{prefix}.{shard.key}", data=data, dtype=data.dtype)
        return alike
    if is_alike:
        return make_sharded_optimizer_tensor(shard, tensor, prefix)
    if isinstance(shard, ShardedTensor) and shard.flattened_range is None:
        if is_dtensor(tensor) and is_dtensor(param):
            outer = shard.replica_id if isinstance(shard.replica_id, tuple) else (shard.replica_id,)
            outer = type(outer)(outer[: max(0, len(outer) - param.device_mesh.ndim)])  # type: ignore[attr-defined]
            num_prepended = shard.prepend_axis_num
            place = [
                (axis, shard.global_offset[axis], shard.global_shape[axis])
                for axis in range(num_prepended)
            ]
            if shard.global_shape[num_prepended:] == tuple(param.shape):
                return shard_of_dtensor(
                    f"{prefix}.{shard.key}", tensor, place, num_prepended, outer
                )
        elif not is_dtensor(tensor) and (found := _reduced(shard, tensor, prefix)) is not None:
            return found
    if tuple(local_part(tensor).shape) == tuple(local_part(param).shape):
        return make_sharded_optimizer_tensor(shard, tensor, prefix)
    raise InvalidShardingError(
        f"The optimizer's {name!r} for the parameter {shard.key!r} has shape "
        f"{tuple(tensor.shape)}, the parameter {tuple(param.shape)}, of which this rank has a "
        "part: how it is divided is unknown. Keep it in a shape with size 1 along the axes that "
        "it lacks, or make a ShardedTensor of it yourself."
    )


def _distribution(dtensor: Any) -> tuple[Any, Any]:
    return dtensor.device_mesh, dtensor.placements


def _reduced(shard: ShardedTensor, tensor: torch.Tensor, prefix: str) -> ShardedTensor | None:
    """Describe a tensor that lacks some axes of a parameter's part (has size 1 there); None when it
    is none.
    """
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
        # Where the parameter is divided along an axis that is missing here, each part has a value
        # of its own.
        place = [
            (size, start, count) if n == local else (count, start // local, count)
            for n, local, size, start, count in zip(
                shape, shard.local_shape, sizes, offset, parts, strict=True
            )
        ]
    return shard_at(shard, f"{prefix}.{shard.key}", tensor, place)


class StoredEntry(NamedTuple):
    """A key of a checkpoint: the dtype of its tensor, None for an object, and the global shape.

    `parts` are the keys of the codes and scales that a quantised tensor is stored as.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    parts: tuple[str, ...] = ()


def form_of(shard: ShardedTensor | ShardedTensorFactory) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and the global shape of what a shard or factory describes; of a factory,
    those of one part.
    """
    part = _first_part(shard)
    return part.dtype, tuple(part.global_shape)


def _first_part(shard: ShardedTensor | ShardedTensorFactory) -> ShardedTensor:
    if isinstance(shard, ShardedTensor):
        return shard
    return next(part for _, part in leaves(shard.build()) if isinstance(part, ShardedTensor))


def state_target(
    shard: ShardedTensor | ShardedTensorFactory,
    param: torch.Tensor,
    own: torch.Tensor | None,
    prefix: str,
    stored: Mapping[str, StoredEntry],
    order: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the tensor that a stored tensor of a parameter's state is loaded into: the optimizer's
    own if it fits.

    `prefix` is what the key begins with, see `state_shard`; `order` is that of the axes in memory.
    What is not stored is taken to be like the parameter.
    """
    renamed: ShardedTensor | ShardedTensorFactory = replace(shard, key=f"{prefix}.{shard.key}")
    if f"{renamed.key}.tensor_type" in stored:
        if own is None:
            raise LoadMismatchError(
                f"The state {renamed.key!r} was saved as a tensor that is made of others, which "
                "only the optimizer can make: have it make a step (with any gradients) before "
                "loading.",
                unexpected=[renamed.key],
            )
        return own
    entry = stored.get(renamed.key) or stored.get(_first_part(renamed).key)
    if entry is None or entry.dtype is None:
        return _new_like(param, param.dtype)
    of_param = stored.get(shard.key)
    # The state that has the dtype of the parameter has it under another dtype, too.
    dtype = param.dtype if of_param is not None and of_param.dtype == entry.dtype else entry.dtype
    is_like_param = isinstance(shard, ShardedTensorFactory) or entry.shape == tuple(
        shard.global_shape
    )
    if is_like_param:
        shape = tuple(param.shape)
    else:
        assert isinstance(shard, ShardedTensor)
        shape = _shape_of_part(shard, param, entry.shape, prefix)
    if (
        own is not None
        and own.dtype == dtype
        and tuple(own.shape) == shape
        and is_dtensor(own) == is_dtensor(param)
    ):
        return own
    if order is not None and not is_dtensor(param) and len(order) == len(shape):
        blank = in_huge_pages(
            torch.empty([shape[axis] for axis in order], dtype=dtype, device=param.device)
        )
        return blank.permute([order.index(axis) for axis in range(len(order))])
    if is_like_param:
        return _new_like(param, dtype)
    blank = in_huge_pages(torch.empty(shape, dtype=dtype, device=local_part(param).device))
    return _distributed_like(param, blank) if is_dtensor(param) else blank


def _new_like(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    new = torch.empty_like(param.detach(), dtype=dtype)
    in_huge_pages(local_part(new))
    return new


def _shape_of_part(
    shard: ShardedTensor, param: torch.Tensor, stored: tuple[int, ...], prefix: str
) -> tuple[int, ...]:
    """Return the shape of this rank's part of a tensor that has other axes than its parameter; see
    `_reduced`.
    """
    num_prepended = shard.prepend_axis_num
    shape, sizes = stored[num_prepended:], tuple(shard.global_shape[num_prepended:])
    if is_dtensor(param) or shard.local_shape == sizes:
        return shape
    parts = shard.axis_fragmentations and shard.axis_fragmentations[num_prepended:]
    fits = parts is not None and len(shape) == len(sizes)
    if not fits or any(n not in pair for n, *pair in zip(shape, sizes, parts or (), strict=True)):
        raise LoadMismatchError(
            f"The state {prefix}.{shard.key} was saved with shape {stored}, its parameter has "
            f"{shard.global_shape}, of which this rank has a part: what of the state belongs to "
            "it is unknown. Load it under the layout it was saved under, or without dividing "
            "this parameter.",
            unexpected=[f"{prefix}.{shard.key}"],
        )
    return tuple(
        n if size == whole else 1
        for n, size, whole in zip(shard.local_shape, shape, sizes, strict=True)
    )


def _distributed_like(param: Any, whole: torch.Tensor) -> torch.Tensor:
    """Distribute a tensor as a DTensor is, along the axes that both have; it is copied along the
    others.
    """
    copied = type(param).from_local(whole, param.device_mesh, run_check=False)
    [copy] = set(copied.placements)
    has_axes = whole.ndim == param.ndim
    placements = [
        placement
        if has_axes
        and getattr(placement, "dim", None) is not None
        and whole.shape[placement.dim] == param.shape[placement.dim]
        else copy
        for placement in param.placements
    ]
    distributed: torch.Tensor = copied.redistribute(placements=placements)
    return distributed

"""Shards of the tensors in an optimizer's state, made from the shards of the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from distckpt._base.errors import InvalidShardingError, LoadMismatchError
from distckpt._base.memory import in_huge_pages
from distckpt._base.tree import leaves
from distckpt._mapping.sharded_tensor import ShardedTensor
from distckpt._mapping.wrappers import ShardedTensorFactory
from distckpt._models.dtensor import has_parts, is_dtensor, local_part, shard_of_dtensor
from distckpt._state.stored_form import StoredEntry, shard_at


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
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=data)
    return replace(model_param, key=key, data=data, dtype=data.dtype)


def param_name(shard: ShardedTensor | ShardedTensorFactory) -> str:
    """Name a parameter, whatever the layout: by its key and, where several layers share that, its
    place among them.
    """
    part: Any = shard
    if isinstance(shard, ShardedTensorFactory):
        part = _first_part(shard)
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
    """Describe a tensor in the state of a parameter, given the parameter's shard and what goes in
    front of its key.
    """
    if _is_alike(tensor, param):
        if type(shard) is not ShardedTensor:
            return make_sharded_optimizer_tensor(shard, tensor, prefix)
        # Not with `replace`, which checks again what has been checked: this is most of the time
        # that describing takes.
        alike = object.__new__(ShardedTensor)
        data = local_part(tensor)
        vars(alike).update(vars(shard), key=f"{prefix}.{shard.key}", data=data, dtype=data.dtype)
        return alike
    if isinstance(shard, ShardedTensor) and shard.flattened_range is None:
        found = _divided_otherwise(shard, param, tensor, f"{prefix}.{shard.key}")
        if found is not None:
            return found
    if tuple(local_part(tensor).shape) == tuple(local_part(param).shape):
        return make_sharded_optimizer_tensor(shard, tensor, prefix)
    raise InvalidShardingError(
        f"The optimizer's {name!r} for the parameter {shard.key!r} has shape "
        f"{tuple(tensor.shape)}, the parameter {tuple(param.shape)}, of which this rank has a "
        "part: how it is divided is unknown. Keep it in a shape with size 1 along the axes that "
        "it lacks, or make a ShardedTensor of it yourself."
    )


def _is_alike(tensor: Any, param: Any) -> bool:
    """Tell whether a tensor has the shape of a parameter and is distributed as it is."""
    if tensor.shape != param.shape:
        return False
    if not is_dtensor(param):
        return not is_dtensor(tensor)
    return is_dtensor(tensor) and _distribution(tensor) == _distribution(param)


def _distribution(dtensor: Any) -> tuple[Any, Any]:
    return dtensor.device_mesh, dtensor.placements


def _divided_otherwise(
    shard: ShardedTensor, param: torch.Tensor, tensor: torch.Tensor, key: str
) -> ShardedTensor | ShardedTensorFactory | None:
    """Describe a tensor that is not divided as its parameter is; None if its place is unknown."""
    if not is_dtensor(tensor):
        return _reduced(shard, tensor, key)
    num_prepended = shard.prepend_axis_num
    if not is_dtensor(param) or shard.global_shape[num_prepended:] != tuple(param.shape):
        return None
    outer = shard.replica_id if isinstance(shard.replica_id, tuple) else (shard.replica_id,)
    num_outer = max(0, len(outer) - param.device_mesh.ndim)  # type: ignore[attr-defined]
    outer = type(outer)(outer[:num_outer])
    place = [
        (axis, shard.global_offset[axis], shard.global_shape[axis]) for axis in range(num_prepended)
    ]
    return shard_of_dtensor(key, tensor, place, num_prepended, outer)


def _reduced(shard: ShardedTensor, tensor: torch.Tensor, key: str) -> ShardedTensor | None:
    """Describe a tensor that lacks some axes of a parameter's part, where it has size 1; None for
    other tensors.
    """
    shape = tuple(tensor.shape)
    if shape == shard.local_shape:
        return None
    if shard.local_shape == shard.global_shape[shard.prepend_axis_num :]:
        return shard_at(shard, key, tensor, [(size, 0, 1) for size in shape])
    place = _reduced_place(shard, shape)
    return None if place is None else shard_at(shard, key, tensor, place)


def _reduced_place(
    shard: ShardedTensor, shape: tuple[int, ...]
) -> list[tuple[int, int, int]] | None:
    num_prepended, parts = shard.prepend_axis_num, shard.axis_fragmentations
    if parts is None or len(shape) != len(shard.local_shape):
        return None
    sizes, offset = shard.global_shape[num_prepended:], shard.global_offset[num_prepended:]
    axes = zip(shape, shard.local_shape, sizes, offset, parts[num_prepended:], strict=True)
    place = []
    for n, local, size, start, count in axes:
        if n == local:
            place.append((size, start, count))
        elif n == 1:
            # Each part of the parameter has a value of its own.
            place.append((count, start // local, count))
        else:
            return None
    return place


def form_of(shard: ShardedTensor | ShardedTensorFactory) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and the global shape of what a shard describes, or the first part that a
    factory makes.
    """
    part = shard if isinstance(shard, ShardedTensor) else _first_part(shard)
    assert part is not None
    return part.dtype, tuple(part.global_shape)


def _first_part(factory: ShardedTensorFactory) -> ShardedTensor | None:
    parts = (part for _, part in leaves(factory.build()) if isinstance(part, ShardedTensor))
    return next(parts, None)


def state_target(
    shard: ShardedTensor | ShardedTensorFactory,
    param: torch.Tensor,
    own: torch.Tensor | None,
    prefix: str,
    stored: Mapping[str, StoredEntry],
    order: Sequence[int] | None = None,
    of_pairs: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the tensor that a stored tensor of a parameter's state is loaded into: the optimizer's
    own if it fits.

    `prefix` is what the key begins with, see `state_shard`; `order` is the order of the axes in
    memory, `of_pairs` the dtype of complex numbers that are stored as pairs. What is not stored is
    taken to be like the parameter.
    """
    key = f"{prefix}.{shard.key}"
    if f"{key}.tensor_type" in stored:
        return _own_subclass(own, key)
    entry = _stored_entry(shard, key, stored)
    if entry is None or entry.dtype is None:
        return _new_like(param, param.dtype)
    of_param = stored.get(shard.key)
    # A state that was saved with the dtype of the parameter has the dtype of the new parameter.
    is_like_param = of_param is not None and of_param.dtype == entry.dtype
    saved = of_pairs or entry.dtype
    is_like_param &= saved.is_complex == param.dtype.is_complex
    dtype = param.dtype if is_like_param else saved
    shape = _target_shape(shard, param, entry.shape[: -1 if of_pairs else None], key)
    if own is not None and _has_form(own, dtype, shape, param):
        return own
    return _new_target(param, shape, dtype, order)


def _new_target(
    param: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, order: Sequence[int] | None
) -> torch.Tensor:
    if order is not None and len(order) == len(shape) and not is_dtensor(param):
        return _new_transposed(shape, dtype, param.device, order)
    if shape == tuple(param.shape):
        new = _new_like(param, dtype)
        # What is in no part is not loaded, and steps compute with it.
        return new.zero_() if has_parts(param) else new
    blank = in_huge_pages(torch.empty(shape, dtype=dtype, device=local_part(param).device))
    return _distributed_like(param, blank) if is_dtensor(param) else blank


def _own_subclass(own: torch.Tensor | None, key: str) -> torch.Tensor:
    if own is None:
        raise LoadMismatchError(
            f"The state {key!r} was saved as a tensor that is made of others, which only the "
            "optimizer can make: have it make a step (with any gradients) before loading.",
            unexpected=[key],
        )
    return own


def _stored_entry(
    shard: ShardedTensor | ShardedTensorFactory, key: str, stored: Mapping[str, StoredEntry]
) -> StoredEntry | None:
    """Return what is stored under a key, or as the first part that a factory makes for it."""
    if key in stored or isinstance(shard, ShardedTensor):
        return stored.get(key)
    part = _first_part(replace(shard, key=key))
    return None if part is None else stored.get(part.key)


def _has_form(
    tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], param: torch.Tensor
) -> bool:
    is_same_kind = is_dtensor(tensor) == is_dtensor(param)
    return is_same_kind and tensor.dtype == dtype and tuple(tensor.shape) == shape


def _new_transposed(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, order: Sequence[int]
) -> torch.Tensor:
    """Make a tensor whose axes lie in memory in another order."""
    in_memory = torch.empty([shape[axis] for axis in order], dtype=dtype, device=device)
    return in_huge_pages(in_memory).permute([order.index(axis) for axis in range(len(order))])


def _new_like(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    new = torch.empty_like(param.detach(), dtype=dtype)
    in_huge_pages(local_part(new))
    return new


def _target_shape(
    shard: ShardedTensor | ShardedTensorFactory,
    param: torch.Tensor,
    stored: tuple[int, ...],
    key: str,
) -> tuple[int, ...]:
    """Return the shape of this rank's part of a tensor that is stored with a global shape."""
    if isinstance(shard, ShardedTensorFactory) or stored == tuple(shard.global_shape):
        return tuple(param.shape)
    num_prepended = shard.prepend_axis_num
    shape = stored[num_prepended:]
    if is_dtensor(param) or shard.local_shape == tuple(shard.global_shape[num_prepended:]):
        return shape
    part = _reduced_shape(shard, shape)
    if part is None:
        raise LoadMismatchError(
            f"The state {key} was saved with shape {stored}, its parameter has "
            f"{shard.global_shape}, of which this rank has a part: what of the state belongs to "
            "it is unknown. Load it under the layout it was saved under, or without dividing "
            "this parameter.",
            unexpected=[key],
        )
    return part


def _reduced_shape(shard: ShardedTensor, stored: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of this rank's part of a tensor that lacks some axes, see `_reduced`; None
    if that is unknown.
    """
    num_prepended, parts = shard.prepend_axis_num, shard.axis_fragmentations
    sizes = shard.global_shape[num_prepended:]
    if parts is None or len(stored) != len(sizes):
        return None
    shape = []
    for n, local, size, count in zip(
        stored, shard.local_shape, sizes, parts[num_prepended:], strict=True
    ):
        if n not in (size, count):
            return None
        shape.append(local if n == size else 1)
    return tuple(shape)


def _distributed_like(param: Any, whole: torch.Tensor) -> torch.Tensor:
    """Distribute a tensor as a DTensor is, along the axes that both have, and copy it along the
    others.
    """
    copied = type(param).from_local(whole, param.device_mesh, run_check=False)
    [copy] = set(copied.placements)

    def is_shared(axis: int | None) -> bool:
        if axis is None or whole.ndim != param.ndim:
            return False
        return bool(whole.shape[axis] == param.shape[axis])

    distributed: torch.Tensor = copied.redistribute(
        placements=[
            placement if is_shared(getattr(placement, "dim", None)) else copy
            for placement in param.placements
        ]
    )
    return distributed

"""Tensors that are stored in another form than a rank holds them in: complex numbers, and
subclasses of tensors.

safetensors files hold neither complex32 nor complex128: these become pairs of real numbers along
one more axis. A tensor that is made of others (those with `__tensor_flatten__`, such as torchao's)
is stored as these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from distckpt._base.errors import InvalidShardingError, LoadMismatchError, UnsupportedObjectError
from distckpt._geometry.region import with_item
from distckpt._mapping.base import flat_bounds, unsuitable
from distckpt._mapping.wrappers import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)

_PARTS_OF = {torch.complex32: torch.float16, torch.complex128: torch.float64}


def stored_form(shard: ShardedTensor) -> ShardedTensor | ShardedTensorFactory:
    """Return a factory for a shard that is stored in another form, and any other as it is.

    UnsupportedObjectError names the key of a tensor whose elements cannot be read or written.
    """
    data: Any = shard.data
    kind = type(data)
    is_subclass = kind is not torch.Tensor and kind is not torch.nn.Parameter
    if is_subclass and hasattr(
        kind, "trigger_wait"
    ):  # The result of a collective operation that may be under way.
        return stored_form(replace(shard, data=data.trigger_wait()))
    if is_subclass and hasattr(kind, "__tensor_flatten__") and not hasattr(kind, "device_mesh"):
        built = _inner_tensors(shard, data)
        return _factory(
            shard, built, lambda loaded: _check_type(shard, built["type"].data, loaded["type"])
        )
    if problem := data is not None and unsuitable(data):
        raise UnsupportedObjectError(
            f"Key {shard.key!r} at offset {shard.global_offset} {problem}."
        )
    if shard.dtype in _PARTS_OF:
        pairs = _pairs(shard)
        return _factory(shard, pairs, lambda loaded: _complex(shard, pairs, loaded))
    return shard


def _factory(shard: ShardedTensor, built: Any, merge: Callable[[Any], Any]) -> ShardedTensorFactory:
    return ShardedTensorFactory(shard.key, shard.data, lambda *_: built, merge, shard.replica_id)


# --- Complex numbers ------------------------------------------------------------------------------


def _pairs(shard: ShardedTensor) -> ShardedTensor:
    flat, data = shard.flattened_range, shard.data
    if flat is not None:
        start, stop = flat_bounds(flat, shard.local_shape)
        flat = slice(2 * start, 2 * stop)
    if data is not None:
        data = torch.view_as_real(data.detach().resolve_conj().resolve_neg())
    return replace(
        shard,
        data=data if data is None or flat is None else data.flatten(),
        dtype=_PARTS_OF[shard.dtype],
        local_shape=(*shard.local_shape, 2),
        global_shape=(*shard.global_shape, 2),
        global_offset=(*shard.global_offset, 0),
        axis_fragmentations=shard.axis_fragmentations and (*shard.axis_fragmentations, 1),
        flattened_range=flat,
    )


def _complex(shard: ShardedTensor, pairs: ShardedTensor, loaded: torch.Tensor) -> torch.Tensor:
    target = shard.data
    if (
        target is None
        or pairs.data is None
        or pairs.data.data_ptr() != target.data_ptr()
        or target.is_conj()
    ):
        values = torch.view_as_complex(
            loaded if shard.flattened_range is None else loaded.view(-1, 2)
        )
        if target is None:
            return values
        target.detach().copy_(values)
    return target


# --- Subclasses -----------------------------------------------------------------------------------


def _inner_tensors(shard: ShardedTensor, data: Any) -> dict[str, Any]:
    """Describe the tensors that a tensor is made of, and what else belongs to it as text, to be
    compared.
    """
    names, context = data.__tensor_flatten__()
    described = f"{type(data).__module__}.{type(data).__qualname__} {context!r}"
    for shape in (data.shape, tuple(data.shape), list(data.shape)):
        described = described.replace(repr(shape), "shape")
    prepended = shard.prepend_axis_num
    grid, place = shard.global_shape[:prepended] or (1,), shard.global_offset[:prepended] or (0,)
    is_main = is_main_replica(shard.replica_id) and not any(shard.global_offset[prepended:])
    text = re.sub(r" at 0x\w+", "", described)
    built: dict[str, Any] = {name: _inner_shard(shard, data, name) for name in names}
    return {
        **built,
        "type": ShardedObject(f"{shard.key}.tensor_type", text, grid, place, 0 if is_main else 1),
    }


def _inner_shard(shard: ShardedTensor, data: Any, name: str) -> ShardedTensor:
    """Describe one of the tensors that a tensor is made of: of each block of elements it has one,
    or it is whole.
    """
    inner, prepended = getattr(data, name), shard.prepend_axis_num
    local, sizes, offset = (
        shard.local_shape,
        shard.global_shape[prepended:],
        shard.global_offset[prepended:],
    )
    shape = tuple(inner.shape)
    if shard.flattened_range is None and local == sizes:
        place = [(size, 0, 1) for size in shape]
    elif (
        shard.flattened_range is None
        and len(shape) == len(local)
        and _is_cut_alike(data, name, shape, sizes)
    ):
        blocks = [n // own for n, own in zip(local, shape, strict=True)]
        cuts = list(zip(sizes, offset, blocks, strict=True))
        if any(size % block or start % block for size, start, block in cuts):
            raise _unknown_place(shard, data, name)
        parts = [size // n for size, n in zip(sizes, local, strict=True)]
        place = [
            (size // n, start // n, count)
            for (size, start, n), count in zip(cuts, parts, strict=True)
        ]
    else:
        raise _unknown_place(shard, data, name)
    return shard_at(shard, f"{shard.key}.{name}", inner, place)


def shard_at(
    shard: ShardedTensor, key: str, data: torch.Tensor, place: Sequence[tuple[int, int, int]]
) -> ShardedTensor:
    """Give a shard other data: along each axis, it begins somewhere in a size that is divided into
    so many parts.
    """
    prepended = shard.prepend_axis_num
    lead = shard.global_shape[:prepended]
    return replace(
        shard,
        key=key,
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=lead + tuple(size for size, _, _ in place),
        global_offset=shard.global_offset[:prepended] + tuple(start for _, start, _ in place),
        axis_fragmentations=shard.axis_fragmentations
        and lead + tuple(parts for _, _, parts in place),
    )


def _is_cut_alike(data: Any, name: str, shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Tell whether a part of a tensor along each divided axis consists of the same part of the
    inner tensor.
    """
    for axis, (n, own, size) in enumerate(zip(data.shape, shape, sizes, strict=True)):
        if own == 0 or n % own:
            return False
        if own == 1 or n == size:
            continue
        try:
            cut = getattr(data.narrow(axis, 0, n // own), name)
        except Exception:  # Subclasses raise what they like where they lack an operation.
            return False
        if tuple(cut.shape) != with_item(shape, axis, 1):
            return False
    return True


def _unknown_place(shard: ShardedTensor, data: Any, name: str) -> InvalidShardingError:
    return InvalidShardingError(
        f"Key {shard.key!r} is a {type(data).__name__}, of which this rank has the part "
        f"{shard.local_shape} at {shard.global_offset}: how its inner tensor {name!r} of shape "
        f"{tuple(getattr(data, name).shape)} is divided is unknown. Save the tensor before it is "
        "converted (data.dequantize()), or make a ShardedTensor of each of its inner tensors."
    )


def _check_type(shard: ShardedTensor, own: str, stored: str) -> Any:
    if stored != own:
        raise LoadMismatchError(
            f"Key {shard.key!r} was saved as {stored}, and is requested as {own}: convert the "
            "model in the way of the one that was saved.",
            unexpected=[shard.key],
        )
    return shard.data

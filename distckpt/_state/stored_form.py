"""Tensors with another form in storage: complex numbers, and subclasses.

safetensors files hold neither complex32, bcomplex32 nor complex128: these become pairs of real
numbers along one more axis. A tensor that is made of other tensors (one with `__tensor_flatten__`,
such as torchao's) is stored as these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from distckpt._base.errors import InvalidShardingError, LoadMismatchError, UnsupportedObjectError
from distckpt._base.memory import fill
from distckpt._geometry.region import with_item
from distckpt.mapping._base import flat_bounds, unsuitable
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedObject, ShardedTensorFactory, is_main_replica

_PARTS_OF: dict[torch.dtype, torch.dtype] = {torch.complex128: torch.float64}
if hasattr(torch, "complex32"):
    _PARTS_OF[torch.complex32] = torch.float16
if hasattr(torch, "bcomplex32"):
    _PARTS_OF[torch.bcomplex32] = torch.bfloat16
"""Complex dtype that becomes pairs -> dtype of the pairs' numbers. Old releases of torch lack some.
"""


class StoredEntry(NamedTuple):
    """A key of a checkpoint: dtype and global shape of its tensor.

    The dtype is None for an object. `parts` are the keys of a quantized tensor's codes and scales.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    parts: tuple[str, ...] = ()


def is_stored_as_pairs(dtype: torch.dtype) -> bool:
    """Return whether a dtype's complex numbers are stored as real pairs."""
    return dtype in _PARTS_OF


def stored_form(
    shard: ShardedTensor, entry: StoredEntry | None = None
) -> ShardedTensor | ShardedTensorFactory:
    """Return a factory for a shard with another form in storage.

    Any other shard is returned as it is. A load passes the stored entry of the key, since complex
    numbers are loaded from either form. UnsupportedObjectError names the key of a tensor whose
    elements cannot be read or written.
    """
    data: Any = shard.data
    kind = type(data)
    is_subclass = kind is not torch.Tensor and kind is not torch.nn.Parameter
    if is_subclass and hasattr(kind, "trigger_wait"):
        # The result of a collective operation that may be under way.
        return stored_form(replace(shard, data=data.trigger_wait()), entry)
    if is_subclass and hasattr(kind, "__tensor_flatten__") and not hasattr(kind, "device_mesh"):
        built = _inner_tensors(shard, data)
        return _factory(
            shard, built, lambda loaded: _check_type(shard, built["type"].data, loaded["type"])
        )
    problem = data is not None and unsuitable(data)
    if problem:
        raise UnsupportedObjectError(
            f"Key {shard.key!r} at offset {shard.global_offset} {problem}."
        )
    if not shard.dtype.is_complex:
        return shard
    return _complex_form(shard, entry)


def _factory(
    shard: ShardedTensor,
    built: Any,
    merge: Callable[[Any], Any],
) -> ShardedTensorFactory:
    return ShardedTensorFactory(shard.key, shard.data, lambda *_: built, merge, shard.replica_id)


# --- Complex numbers ------------------------------------------------------------------------------


def may_be_complex(shards: Iterable[ShardedTensor | ShardedObject]) -> bool:
    """Return whether a shard's requested form depends on its stored form.

    The shards are results of `stored_form`, or were built by them.
    """
    part_dtypes = set(_PARTS_OF.values())
    for shard in shards:
        if not isinstance(shard, ShardedTensor):
            continue
        is_pair = shard.dtype in part_dtypes and tuple(shard.global_shape[-1:]) == (2,)
        if is_pair or shard.dtype.is_complex:
            return True
    return False


def _complex_form(
    shard: ShardedTensor, entry: StoredEntry | None
) -> ShardedTensor | ShardedTensorFactory:
    stored, shape, _ = entry or StoredEntry(None, ())
    if shard.dtype == torch.complex128 and stored == torch.complex64:
        memory = None
        if shard.data is not None:
            memory = torch.empty_like(shard.data, dtype=torch.complex64)
        narrow = replace(shard, data=memory, dtype=torch.complex64)
        return _factory(shard, narrow, lambda loaded: _put(shard, loaded))
    are_pairs = stored in _PARTS_OF.values() and shape == (*shard.global_shape, 2)
    if shard.dtype == torch.complex64 and not are_pairs:
        return shard
    pairs = _pairs(shard)
    return _factory(shard, pairs, lambda loaded: _complex(shard, pairs, loaded))


def _put(shard: ShardedTensor, values: torch.Tensor) -> torch.Tensor:
    """Return values in a shard's dtype, in its tensor if possible."""
    if shard.data is None:
        return values.to(shard.dtype)
    fill(shard.key, shard.data, values)
    return shard.data


def _pairs(shard: ShardedTensor) -> ShardedTensor:
    flat = shard.flattened_range
    data = shard.data
    fragmentations = shard.axis_fragmentations
    if fragmentations is not None:
        fragmentations = (*fragmentations, 1)
    if flat is not None:
        start, stop = flat_bounds(flat, shard.local_shape)
        flat = slice(2 * start, 2 * stop)
    if data is not None:
        data = torch.view_as_real(data.detach().resolve_conj().resolve_neg())
        if flat is not None:
            data = data.flatten()
    return replace(
        shard,
        data=data,
        dtype=_part_of(shard),
        local_shape=(*shard.local_shape, 2),
        global_shape=(*shard.global_shape, 2),
        global_offset=(*shard.global_offset, 0),
        axis_fragmentations=fragmentations,
        flattened_range=flat,
    )


def _part_of(shard: ShardedTensor) -> torch.dtype:
    """Return the dtype of a complex dtype's real numbers."""
    if shard.dtype == torch.complex64:
        return torch.float32
    if shard.dtype not in _PARTS_OF:
        raise UnsupportedObjectError(
            f"Key {shard.key!r} has dtype {shard.dtype}, whose elements distckpt does not know: "
            "convert it to another complex dtype first."
        )
    return _PARTS_OF[shard.dtype]


def _complex(
    shard: ShardedTensor,
    pairs: ShardedTensor,
    loaded: torch.Tensor,
) -> torch.Tensor:
    target = shard.data
    # Loading the pairs has filled a tensor that they are a view of.
    if (
        target is not None
        and pairs.data is not None
        and pairs.data.data_ptr() == target.data_ptr()
        and not target.is_conj()
    ):
        return target
    numbers = loaded
    if shard.flattened_range is not None:
        numbers = loaded.view(-1, 2)
    # torch.view_as_complex does not make bcomplex32.
    values = numbers.contiguous().view(shard.dtype).squeeze(-1)
    return _put(shard, values)


# --- Subclasses -----------------------------------------------------------------------------------


def _inner_tensors(shard: ShardedTensor, data: Any) -> dict[str, Any]:
    """Describe the tensors that a tensor is made of.

    All else that belongs to it becomes a text, which a load compares.
    """
    names, context = data.__tensor_flatten__()
    text = f"{type(data).__module__}.{type(data).__qualname__} {context!r}"
    for shape in (data.shape, tuple(data.shape), list(data.shape)):
        text = text.replace(repr(shape), "shape")
    text = re.sub(r" at 0x\w+", "", text)
    built: dict[str, Any] = {name: _inner_shard(shard, data, name) for name in names}
    built["type"] = _type_object(shard, text)
    return built


def _type_object(shard: ShardedTensor, text: str) -> ShardedObject:
    """Describe the text about a tensor, one for all its parts."""
    prepended = shard.prepend_axis_num
    grid = shard.global_shape[:prepended] or (1,)
    place = shard.global_offset[:prepended] or (0,)
    is_main = is_main_replica(shard.replica_id) and not any(shard.global_offset[prepended:])
    return ShardedObject(f"{shard.key}.tensor_type", text, grid, place, int(not is_main))


def _inner_shard(shard: ShardedTensor, data: Any, name: str) -> ShardedTensor:
    """Describe one of the tensors that a tensor is made of.

    It is whole, or has one element for each block of the tensor's elements.
    """
    inner = getattr(data, name)
    sizes = shard.global_shape[shard.prepend_axis_num :]
    if shard.flattened_range is None and shard.local_shape == sizes:
        place = [(size, 0, 1) for size in inner.shape]
    else:
        place = _place_by_blocks(shard, data, name)
    return shard_at(shard, f"{shard.key}.{name}", inner, place)


def _place_by_blocks(
    shard: ShardedTensor,
    data: Any,
    name: str,
) -> list[tuple[int, int, int]]:
    """Return the place of an inner tensor divided like its tensor.

    See `shard_at`.
    """
    prepended = shard.prepend_axis_num
    local = shard.local_shape
    shape = getattr(data, name).shape
    sizes = shard.global_shape[prepended:]
    offset = shard.global_offset[prepended:]
    is_known = shard.flattened_range is None and len(shape) == len(local)
    place = []
    if is_known and _is_cut_alike(data, name, tuple(shape), sizes):
        for size, start, num, num_inner in zip(sizes, offset, local, shape, strict=True):
            block = num // num_inner
            if size % block == 0 and start % block == 0:
                place.append((size // block, start // block, size // num))
    if len(place) < len(local) or not is_known:
        raise InvalidShardingError(
            f"Key {shard.key!r} is a {type(data).__name__}, of which this rank has the part "
            f"{local} at {shard.global_offset}: how its inner tensor {name!r} of shape "
            f"{tuple(shape)} is divided is unknown. Save the tensor before it is converted "
            "(data.dequantize()), or make a ShardedTensor of each of its inner tensors."
        )
    return place


def shard_at(
    shard: ShardedTensor, key: str, data: torch.Tensor, place: Sequence[tuple[int, int, int]]
) -> ShardedTensor:
    """Return a shard with other data, at a place.

    The `place` is, for each axis, `(global size, offset, number of parts)`.
    """
    prepended = shard.prepend_axis_num
    lead = shard.global_shape[:prepended]
    fragmentations = None
    if shard.axis_fragmentations is not None:
        fragmentations = lead + tuple(parts for _, _, parts in place)
    return replace(
        shard,
        key=key,
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=lead + tuple(size for size, _, _ in place),
        global_offset=shard.global_offset[:prepended] + tuple(start for _, start, _ in place),
        axis_fragmentations=fragmentations,
    )


def _is_cut_alike(
    data: Any,
    name: str,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
) -> bool:
    """Return whether an inner tensor is cut along with its tensor.

    A part of a tensor must consist of the same part of the inner tensor, along all divided axes.
    """
    for axis, (n, own, size) in enumerate(zip(data.shape, shape, sizes, strict=True)):
        if own == 0 or n % own:
            return False
        if own == 1 or n == size:
            continue
        try:
            cut = getattr(data.narrow(axis, 0, n // own), name)
        except Exception:  # Subclasses raise any error where they lack an operation.
            return False
        if tuple(cut.shape) != with_item(shape, axis, 1):
            return False
    return True


def _check_type(shard: ShardedTensor, own: str, stored: str) -> Any:
    if stored != own:
        raise LoadMismatchError(
            f"Key {shard.key!r} was saved as {stored}, and is requested as {own}: convert the "
            "model in the same way as the one that was saved.",
            unexpected=[shard.key],
        )
    return shard.data

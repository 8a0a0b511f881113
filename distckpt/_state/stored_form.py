"""Tensors that are stored in another form than a rank holds them in: complex numbers, and
subclasses of tensors.

safetensors files hold neither complex32, bcomplex32 nor complex128: these become pairs of real
numbers along one more axis. A tensor that is made of others (one with `__tensor_flatten__`, such as
torchao's) is stored as these.
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
from distckpt._mapping.base import flat_bounds, unsuitable
from distckpt._mapping.sharded_tensor import ShardedTensor
from distckpt._mapping.wrappers import ShardedObject, ShardedTensorFactory, is_main_replica

_PARTS_OF = {
    getattr(torch, name): part
    for name, part in (
        ("complex32", torch.float16),
        ("bcomplex32", torch.bfloat16),
        ("complex128", torch.float64),
    )
    if hasattr(torch, name)
}
"""Complex dtypes that become pairs, and the dtype of the numbers in these. Old releases of torch
lack some.
"""


class StoredEntry(NamedTuple):
    """A key of a checkpoint: the dtype of its tensor, None for an object, and the global shape.

    `parts` are the keys of the codes and scales that a quantized tensor is stored as.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    parts: tuple[str, ...] = ()


def is_stored_as_pairs(dtype: torch.dtype) -> bool:
    """Tell whether complex numbers of a dtype are stored as pairs of real numbers."""
    return dtype in _PARTS_OF


def stored_form(
    shard: ShardedTensor, entry: StoredEntry | None = None
) -> ShardedTensor | ShardedTensorFactory:
    """Return a factory for a shard that is stored in another form, and any other as it is. A load
    says what is stored under the key, since complex numbers are loaded from either form.

    UnsupportedObjectError names the key of a tensor whose elements cannot be read or written.
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
    if problem := data is not None and unsuitable(data):
        raise UnsupportedObjectError(
            f"Key {shard.key!r} at offset {shard.global_offset} {problem}."
        )
    return _complex_form(shard, entry) if shard.dtype.is_complex else shard


def _factory(
    shard: ShardedTensor,
    built: Any,
    merge: Callable[[Any], Any],
) -> ShardedTensorFactory:
    return ShardedTensorFactory(shard.key, shard.data, lambda *_: built, merge, shard.replica_id)


# --- Complex numbers ------------------------------------------------------------------------------


def may_be_complex(shards: Iterable[ShardedTensor | ShardedObject]) -> bool:
    """Tell whether the form that a shard is requested in depends on the form in which it is
    stored, given results of `stored_form` or what they have built.
    """
    tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
    dtypes = {tensor.dtype for tensor in tensors}
    if any(dtype.is_complex for dtype in dtypes):
        return True
    of_pairs = dtypes.intersection(_PARTS_OF.values())
    return bool(of_pairs) and any(
        tensor.dtype in of_pairs and tuple(tensor.global_shape[-1:]) == (2,) for tensor in tensors
    )


def _complex_form(
    shard: ShardedTensor, entry: StoredEntry | None
) -> ShardedTensor | ShardedTensorFactory:
    stored, shape = (entry.dtype, entry.shape) if entry is not None else (None, ())
    if shard.dtype == torch.complex128 and stored == torch.complex64:
        own = shard.data
        memory = None if own is None else torch.empty_like(own, dtype=torch.complex64)
        narrow = replace(shard, data=memory, dtype=torch.complex64)
        return _factory(shard, narrow, lambda loaded: _put(shard, loaded))
    are_pairs = stored in _PARTS_OF.values() and shape == (*shard.global_shape, 2)
    if shard.dtype == torch.complex64 and not are_pairs:
        return shard
    pairs = _pairs(shard)
    return _factory(shard, pairs, lambda loaded: _complex(shard, pairs, loaded))


def _put(shard: ShardedTensor, values: torch.Tensor) -> torch.Tensor:
    """Return values in the dtype of a shard, in its tensor if it has one."""
    if shard.data is None:
        return values.to(shard.dtype)
    fill(shard.key, shard.data, values)
    return shard.data


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
        dtype=_part_of(shard),
        local_shape=(*shard.local_shape, 2),
        global_shape=(*shard.global_shape, 2),
        global_offset=(*shard.global_offset, 0),
        axis_fragmentations=None
        if shard.axis_fragmentations is None
        else (*shard.axis_fragmentations, 1),
        flattened_range=flat,
    )


def _part_of(shard: ShardedTensor) -> torch.dtype:
    """Return the dtype of the real numbers of a complex one."""
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
    if target is not None and _is_filled_through(pairs, target):
        return target
    numbers = loaded if shard.flattened_range is None else loaded.view(-1, 2)
    # torch.view_as_complex does not make bcomplex32.
    values = numbers.contiguous().view(shard.dtype).squeeze(-1)
    return _put(shard, values)


def _is_filled_through(pairs: ShardedTensor, target: torch.Tensor) -> bool:
    """Tell whether what is loaded into pairs of real numbers is in a complex tensor thereby."""
    is_same_memory = pairs.data is not None and pairs.data.data_ptr() == target.data_ptr()
    return is_same_memory and not target.is_conj()


# --- Subclasses -----------------------------------------------------------------------------------


def _inner_tensors(shard: ShardedTensor, data: Any) -> dict[str, Any]:
    """Describe the tensors that a tensor is made of, and as text what else belongs to it: a load
    compares it.
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
    """Describe the text about a tensor: one for all its parts."""
    prepended = shard.prepend_axis_num
    grid, place = shard.global_shape[:prepended] or (1,), shard.global_offset[:prepended] or (0,)
    is_main = is_main_replica(shard.replica_id) and not any(shard.global_offset[prepended:])
    return ShardedObject(f"{shard.key}.tensor_type", text, grid, place, 0 if is_main else 1)


def _inner_shard(shard: ShardedTensor, data: Any, name: str) -> ShardedTensor:
    """Describe one of the tensors that a tensor is made of: it is whole, or has one element for
    each block of the tensor's elements.
    """
    inner, sizes = getattr(data, name), shard.global_shape[shard.prepend_axis_num :]
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
    """Return the place, as in `shard_at`, of an inner tensor that is divided as its tensor is."""
    prepended, local, shape = shard.prepend_axis_num, shard.local_shape, getattr(data, name).shape
    sizes, offset = shard.global_shape[prepended:], shard.global_offset[prepended:]
    if shard.flattened_range is not None or len(shape) != len(local):
        raise _unknown_place(shard, data, name)
    if not _is_cut_alike(data, name, tuple(shape), sizes):
        raise _unknown_place(shard, data, name)
    place = []
    for size, start, num, num_inner in zip(sizes, offset, local, shape, strict=True):
        block = num // num_inner
        if size % block or start % block:
            raise _unknown_place(shard, data, name)
        place.append((size // block, start // block, size // num))
    return place


def shard_at(
    shard: ShardedTensor, key: str, data: torch.Tensor, place: Sequence[tuple[int, int, int]]
) -> ShardedTensor:
    """Give a shard other data. Its `place` is, for each axis, `(global size, offset, number of
    parts)`.
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
        axis_fragmentations=None
        if shard.axis_fragmentations is None
        else lead + tuple(parts for _, _, parts in place),
    )


def _is_cut_alike(
    data: Any,
    name: str,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
) -> bool:
    """Tell whether a part of a tensor consists of the same part of an inner tensor, along all
    divided axes.
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
            "model in the same way as the one that was saved.",
            unexpected=[shard.key],
        )
    return shard.data

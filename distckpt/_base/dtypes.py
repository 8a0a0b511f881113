"""Element types: torch dtypes, their safetensors names, and lossless conversions."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from distckpt._base.lazy import torch
from distckpt._base.messages import did_you_mean

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class LazyTable(Mapping[_Key, _Value]):
    """A table that is made when it is first looked at."""

    def __init__(self, make: Callable[[], dict[_Key, _Value]]) -> None:
        self._make = make

    @functools.cached_property
    def _table(self) -> dict[_Key, _Value]:
        return self._make()

    def __getitem__(self, key: _Key) -> _Value:
        return self._table[key]

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


STORED_NAMES: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}
"""torch attribute name -> safetensors name; torch releases lack some of them."""

TO_NAME: Mapping[torch.dtype, str] = LazyTable(
    lambda: {getattr(torch, t): name for t, name in STORED_NAMES.items() if hasattr(torch, t)}
)
FROM_NAME: Mapping[str, torch.dtype] = LazyTable(
    lambda: {name: dtype for dtype, name in TO_NAME.items()}
)


def _item_bytes(attribute: str) -> int:
    """Return the size of an item, from the name of its dtype."""
    bits = re.search(r"\d+", attribute)
    # Booleans tell none. Elements of fewer bits are packed into a byte.
    return 1 if bits is None else max(1, int(bits[0]) // 8)


ITEM_BYTES: dict[str, int] = {
    name: _item_bytes(attribute) for attribute, name in STORED_NAMES.items()
}
"""safetensors name -> size of a torch item. Sizes alone need no import of torch, unlike
`FROM_NAME`.
"""
_NOT_IN_ALL_RELEASES = frozenset(("F8_E8M0", "F4"))
"""Names of dtypes that some supported releases of torch lack."""

PACKED_PER_ITEM: dict[str, int] = {"F4": 2}
"""Elements packed into one torch item. A safetensors entry counts elements along its last axis,
torch counts items.
"""

_SAME_SIZE_INTEGER = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def is_known(name: str) -> bool:
    """Return whether this torch has the dtype of a safetensors name."""
    if name in _NOT_IN_ALL_RELEASES:
        return name in FROM_NAME
    return name in ITEM_BYTES


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's items as integers of the same size.

    Copies of integers work for every dtype.
    """
    return tensor.view(getattr(torch, _SAME_SIZE_INTEGER[tensor.dtype.itemsize]))


def flat_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of values in row-major order, as a uint8 vector.

    The result is a view where possible.
    """
    plain = values.detach().resolve_conj().resolve_neg()
    if plain.dtype.itemsize == 1:
        # This comes first: copies of bools have other bits than these, if they are not 0 or 1.
        plain = plain.view(torch.uint8)
    plain = plain.contiguous()
    # A tensor of one item counts as contiguous whatever its strides, but view() refuses most of
    # them.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def to_numpy(values: torch.Tensor) -> npt.NDArray[Any]:
    """Convert CPU values to numpy.

    Floats that numpy lacks become float32, packed values become their bytes (uint8).
    """
    if TO_NAME[values.dtype] in PACKED_PER_ITEM:
        values = values.view(torch.uint8)
    elif values.dtype.is_floating_point and values.dtype.itemsize == 1:
        # torch takes about ten times longer to convert them.
        return np.asarray(item_values(values.dtype)[values.view(torch.uint8).numpy()])
    elif values.dtype == torch.bfloat16:
        values = values.float()
    array: npt.NDArray[Any] = values.numpy()
    return array


@functools.cache
def item_values(dtype: torch.dtype) -> npt.NDArray[np.float32]:
    """Return each byte's value as an item of a one-byte dtype.

    For a packed dtype, the value is the byte.
    """
    codes = torch.arange(256, device="cpu").to(torch.uint8)
    items = codes if TO_NAME[dtype] in PACKED_PER_ITEM else codes.view(dtype)
    values = items.float()
    # numpy warns when it converts some of the NaN that torch makes.
    return values.where(~values.isnan(), torch.nan).numpy()


def is_lossless_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether every value of `source` has an equal value in `target`.

    Every bf16 has one in fp32, not every int64.
    """
    if source == target:
        return True
    if source.is_complex or target == torch.bool:
        return False
    if target.is_complex:
        return target == torch.complex64 and is_lossless_cast(source, torch.float32)
    if not _peculiar().isdisjoint((source, target)):
        return False
    if source == torch.bool:
        return True
    if source.is_floating_point:
        return target.is_floating_point and _contains_float(target, source)
    return _contains_integers(target, torch.iinfo(source))


def _contains_integers(target: torch.dtype, source: torch.iinfo) -> bool:
    if target.is_floating_point:
        info = torch.finfo(target)
        return source.max <= 2 / info.eps and source.max <= info.max
    limits = torch.iinfo(target)
    return limits.min <= source.min and source.max <= limits.max


def is_convertible(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a conversion keeps the meaning of values.

    Range and precision may change; complex to real does not keep the meaning.
    """
    if source == target:
        return True
    if not _peculiar().isdisjoint((source, target)):
        return False
    if target == torch.bool or target not in TO_NAME:
        return False
    return target.is_complex or not source.is_complex


def is_summed(dtype: torch.dtype) -> bool:
    """Return whether merging checkpoints adds tensors of a dtype.

    Integers and packed numbers are not added.
    """
    return (dtype.is_floating_point or dtype.is_complex) and dtype not in _peculiar()


def has_smaller_range(target: torch.dtype, source: torch.dtype) -> bool:
    """Return whether finite values of `source` may be infinite in `target`.

    From float32 to bfloat16, they hardly ever are.
    """
    are_floats = target != source and target.is_floating_point and source.is_floating_point
    return are_floats and 2 * torch.finfo(target).max < torch.finfo(source).max


def _contains_float(target: torch.dtype, source: torch.dtype) -> bool:
    wide = torch.finfo(target)
    narrow = torch.finfo(source)
    # Only float16, bfloat16, float32 and float64 can be targets: 8-bit floats differ in their
    # special values.
    if wide.bits <= narrow.bits or wide.bits == 8:
        return False
    # The smallest subnormal is tiny * eps: compare exponents and precision.
    smallest_wide = math.log2(wide.tiny) + math.log2(wide.eps)
    smallest_narrow = math.log2(narrow.tiny) + math.log2(narrow.eps)
    return wide.eps <= narrow.eps and wide.max >= narrow.max and smallest_wide <= smallest_narrow


@functools.cache
def _peculiar() -> frozenset[torch.dtype]:
    """Return scales and packed types.

    They have no arithmetic of their own and are only ever copied.
    """
    return frozenset(FROM_NAME[name] for name in ("F8_E8M0", "F4") if name in FROM_NAME)


# --- Arrays ---------------------------------------------------------------------------------------


def estimate_array_nbytes(array: Any) -> int:
    """Return the size of an array in bytes, without touching its data.

    It is a torch tensor on any device (also "meta"), a numpy array, or anything else with `shape`
    and `dtype` (of torch, of numpy, or by name). A DTensor counts as a whole; its `to_local()` is
    the part on this rank.

    Raises:
        TypeError: it has no shape and dtype.
    """
    if isinstance(array, torch.Tensor):
        return array.numel() * array.element_size()
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(
            f"the size of a {type(array).__name__} is unknown: it has no shape and dtype"
        )
    dtype = array.dtype
    if not isinstance(dtype, np.dtype):
        dtype = as_torch_dtype(dtype)
    return int(math.prod(array.shape) * dtype.itemsize)


def memory_order(tensor: torch.Tensor) -> list[int] | None:
    """Return the order of a transposed tensor's axes in memory, outermost first.

    None for other tensors, expanded ones included.
    """
    strides = tensor.stride()
    if tensor.is_contiguous() or 0 in strides:
        return None
    order = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
    if order == sorted(order):
        return None
    return order


def in_memory_order(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Return a copy of a tensor with its axes reordered in memory."""
    return tensor.permute(order).contiguous().permute([order.index(i) for i in range(len(order))])


def as_torch_dtype(dtype: torch.dtype | str | np.dtype[Any] | type) -> torch.dtype:
    """Return the torch dtype for a torch or numpy dtype or name.

    Names are "bfloat16", "torch.bfloat16", "BF16" or "bf16".

    Raises:
        ValueError: there is no such dtype.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(dtype, str):
        dtype = np.dtype(dtype).name
    torch_dtype = FROM_NAME.get(dtype.upper(), getattr(torch, dtype.removeprefix("torch."), None))
    if not isinstance(torch_dtype, torch.dtype):
        raise ValueError(
            f"torch {torch.__version__} has no dtype {dtype!r}{did_you_mean(dtype, FROM_NAME)}"
        )
    return torch_dtype

"""Element types: torch dtypes, their safetensors names, and which conversions lose nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from distckpt._base.lazy import LazyTable, torch

_NAMES: dict[str, str] = {
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
"""torch attribute name -> safetensors name; torch releases differ in which of them exist."""

TO_NAME: Mapping[torch.dtype, str] = LazyTable(
    lambda: {getattr(torch, t): name for t, name in _NAMES.items() if hasattr(torch, t)}
)
FROM_NAME: Mapping[str, torch.dtype] = LazyTable(
    lambda: {name: dtype for dtype, name in TO_NAME.items()}
)

ITEM_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "U16": 2,
    "I16": 2,
    "U32": 4,
    "I32": 4,
    "U64": 8,
    "I64": 8,
    "F16": 2,
    "BF16": 2,
    "F32": 4,
    "F64": 8,
    "C64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "F4": 1,
}
"""safetensors name -> size of a torch item, for what needs no more than sizes: `FROM_NAME` takes an
import of torch.
"""
_NOT_IN_ALL_RELEASES = frozenset(("F8_E8M0", "F4"))
"""Names of dtypes that some supported releases of torch lack."""

PACKED_PER_ITEM: dict[str, int] = {"F4": 2}
"""Elements packed into one torch item: a safetensors entry counts elements along its last axis,
torch counts items.
"""

_SAME_SIZE_INTEGER = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def is_known(name: str) -> bool:
    """Tell whether a safetensors name is of a dtype that this torch has."""
    return name in (FROM_NAME if name in _NOT_IN_ALL_RELEASES else ITEM_BYTES)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's items as integers of the same size, so that copies work for every dtype."""
    return tensor.view(getattr(torch, _SAME_SIZE_INTEGER[tensor.dtype.itemsize]))


def flat_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of values in row-major order, as uint8 on one axis; views where they can."""
    plain = values.detach().resolve_conj().resolve_neg()
    if plain.dtype.itemsize == 1:
        # First of all: copies of bools have other bits than these, if they are not 0 or 1.
        plain = plain.view(torch.uint8)
    plain = plain.contiguous()
    # A tensor of one item counts as contiguous whatever its strides, but view() refuses most of
    # them.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def to_numpy(values: torch.Tensor) -> npt.NDArray[Any]:
    """Convert CPU values to numpy: floats that it lacks become float32, packed values become their
    bytes (uint8).
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
    """Return the value of each byte as an item of a dtype of one byte; the byte if it is packed."""
    codes = torch.arange(256, device="cpu").to(torch.uint8)
    values = (codes if TO_NAME[dtype] in PACKED_PER_ITEM else codes.view(dtype)).float()
    # numpy warns when it converts some of the NaN that torch makes.
    return values.where(~values.isnan(), torch.nan).numpy()


def is_lossless_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Tell whether every value of `source` has an equal value in `target` (bf16 in fp32, int64 not
    in fp32).
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
    """Tell whether a conversion keeps the meaning of values, apart from range and precision;
    complex to real does not.
    """
    if source == target:
        return True
    if not _peculiar().isdisjoint((source, target)):
        return False
    if target == torch.bool or target not in TO_NAME:
        return False
    return target.is_complex or not source.is_complex


def is_summed(dtype: torch.dtype) -> bool:
    """Tell whether tensors of a dtype are added to merge checkpoints; integers and packed numbers
    are not.
    """
    return (dtype.is_floating_point or dtype.is_complex) and dtype not in _peculiar()


def has_smaller_range(target: torch.dtype, source: torch.dtype) -> bool:
    """Tell whether finite values of `source` may be infinite in `target`; from float32 to bfloat16,
    they hardly ever are.
    """
    are_floats = target != source and target.is_floating_point and source.is_floating_point
    return are_floats and 2 * torch.finfo(target).max < torch.finfo(source).max


def _contains_float(target: torch.dtype, source: torch.dtype) -> bool:
    wide, narrow = torch.finfo(target), torch.finfo(source)
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
    """Return scales and packed types, without arithmetic of their own: they are only ever
    copied.
    """
    return frozenset(FROM_NAME[name] for name in ("F8_E8M0", "F4") if name in FROM_NAME)

"""Conversion of values, rounding once and counting values that do not fit."""

from __future__ import annotations

import math

import numpy as np
import torch

from distckpt._quantization.numbers import scratch

_COUNTED_AT_ONCE = 1 << 18
"""Elements that are counted at a time: counting takes several temporary tensors of 8 bytes an
element.
"""


def cast_and_count(values: torch.Tensor, target: torch.Tensor) -> int:
    """Convert flat values; return the number that do not fit."""
    overflows = 0
    for low in range(0, len(values), _COUNTED_AT_ONCE):
        window = values[low : low + _COUNTED_AT_ONCE]
        place = target[low : low + _COUNTED_AT_ONCE]
        round_once(window, place)
        overflows += _count_overflows(window, place)
    return overflows


def round_once(values: torch.Tensor, target: torch.Tensor) -> None:
    """Convert values with a single rounding, overwriting float64 values.

    Torch converts float64 to 16 and 8 bits by way of float32, which would round twice. So float64
    values are shortened first: the last digit that stays says whether any digit was cut off (as
    many as 13 stay). The scratch memory is the one for products, which is in cache.
    """
    is_narrow = target.dtype.is_floating_point and target.dtype.itemsize < 4
    if values.dtype == torch.float64 and is_narrow:
        bits = values.view(torch.int64).numpy()
        cut = (1 << 40) - 1
        rest = np.bitwise_and(bits, cut, out=scratch("product", bits.shape, torch.int64).numpy())
        np.bitwise_or(bits, np.add(rest, cut, out=rest), out=bits)
        np.bitwise_and(bits, ~cut, out=bits)
    target.copy_(values)


def are_finite(values: torch.Tensor) -> bool:
    """Whether no value is infinite or NaN."""
    if values.dtype.is_complex:
        values = values.view(values.dtype.to_real())
    elif values.itemsize == 1:
        values = values.float()
    return len(values) == 0 or all(math.isfinite(limit.item()) for limit in values.aminmax())


def _count_overflows(values: torch.Tensor, converted: torch.Tensor) -> int:
    """Count the values beyond the range of the converted dtype. Infinities may stay infinite."""
    dtype = converted.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return _count_outside_integers(values, torch.iinfo(dtype))
    limit = _limit_of(dtype)
    if values.dtype.is_floating_point:
        low, high = values.aminmax()
        if -limit < low.item() <= high.item() < limit:
            return 0
    if values.dtype.is_complex:
        values = values.view(-1, 1).view(values.dtype.to_real())
        converted = converted.view(-1, 1).view(dtype.to_real())
    doubles = values.double()
    result = converted.real if converted.is_complex() else converted.float()
    has_overflown = (doubles.abs() >= limit) & ~(doubles.isinf() & result.isinf())
    return int(has_overflown.view(len(values), -1).any(1).sum())


def _limit_of(dtype: torch.dtype) -> float:
    """Return the magnitude from which on numbers do not fit a dtype.

    A number less than half a unit in the last place above the largest number is rounded to it. Some
    8-bit floats hold their largest number, or NaN, instead of infinities.
    """
    info = torch.finfo(dtype)
    return info.max + math.ldexp(info.eps / 2, math.frexp(info.max)[1] - 1)


def _count_outside_integers(values: torch.Tensor, limits: torch.iinfo) -> int:
    if values.dtype.is_floating_point:
        doubles = values.double().trunc()
        return int((~((doubles >= limits.min) & (doubles < limits.max + 1.0))).sum())
    integers = values.numpy()
    return int(((integers < limits.min) | (integers > limits.max)).sum())

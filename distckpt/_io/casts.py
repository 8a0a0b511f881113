"""Converting values: rounding once, and counting those that do not fit."""

from __future__ import annotations

import math

import numpy as np
import torch

from distckpt._quantization.numbers import scratch

_COUNTED_AT_ONCE = 1 << 18
"""Elements; counting makes several temporary tensors of 8 bytes an element."""


def cast_and_count(values: torch.Tensor, target: torch.Tensor) -> int:
    """Convert flat values, and return how many of them do not fit."""
    overflows = 0
    for low in range(0, len(values), _COUNTED_AT_ONCE):
        window, place = values[low : low + _COUNTED_AT_ONCE], target[low : low + _COUNTED_AT_ONCE]
        round_once(window, place)
        overflows += _count_overflows(window, place)
    return overflows


def round_once(values: torch.Tensor, target: torch.Tensor) -> None:
    """Convert values, overwriting those in float64, which torch takes to 16 and 8 bits by way of
    float32.

    So that this does not round twice, they are shortened first: of the digits that are cut off, the
    last one that stays says whether there was any (as many as 13 stay). The scratch memory is that
    of products, which is in cache.
    """
    is_narrow = target.dtype.is_floating_point and target.dtype.itemsize < 4
    if values.dtype == torch.float64 and is_narrow:
        bits, cut = values.view(torch.int64).numpy(), (1 << 40) - 1
        rest = np.bitwise_and(bits, cut, out=scratch("product", bits.shape, torch.int64).numpy())
        np.bitwise_or(bits, np.add(rest, cut, out=rest), out=bits)
        np.bitwise_and(bits, ~cut, out=bits)
    target.copy_(values)


def are_finite(values: torch.Tensor) -> bool:
    """Tell whether no value is infinite or not a number."""
    if values.dtype.is_complex:
        values = values.view(values.dtype.to_real())
    elif values.itemsize == 1:
        values = values.float()
    return len(values) == 0 or all(math.isfinite(limit.item()) for limit in values.aminmax())


def _count_overflows(values: torch.Tensor, converted: torch.Tensor) -> int:
    """Count the values beyond the range of what they were converted to; infinities may stay
    infinite.
    """
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

    What is less than half a unit in the last place above the largest number is rounded to it. Some
    8-bit floats hold their largest number, or NaN, in the place of infinities.
    """
    info = torch.finfo(dtype)
    return info.max + math.ldexp(info.eps / 2, math.frexp(info.max)[1] - 1)


def _count_outside_integers(values: torch.Tensor, limits: torch.iinfo) -> int:
    if values.dtype.is_floating_point:
        doubles = values.double().trunc()
        return int((~((doubles >= limits.min) & (doubles < limits.max + 1.0))).sum())
    integers = values.numpy()
    return int(((integers < limits.min) | (integers > limits.max)).sum())

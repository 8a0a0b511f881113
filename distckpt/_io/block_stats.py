"""Statistics of blocks of values that fit a cache, and their combination."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.dtypes import item_values
from distckpt._geometry.region import IntArray
from distckpt._quantization.numbers import scratch

BLOCK_ELEMENTS = 1 << 18
_ROW = 1024
"""Squares per row: they are added in the numbers' precision, and the sums of rows in float64."""
_SAFE = (1e-15, 1e15)
"""Range of float32 numbers whose squares neither vanish nor overflow."""

StatsRows = npt.NDArray[np.float64]
"""Rows of `BlockStats`. Counts are exact below 2**53."""


class BlockStats(NamedTuple):
    """Counts and statistics of a block of values.

    The statistics are of the finite values.
    """

    num_finite: int
    num_nan: int
    num_infinite: int
    num_zero: int
    mean: float
    norm: float
    low: float
    high: float


def blocks_of(values: torch.Tensor) -> Sequence[torch.Tensor]:
    """Cut values into blocks."""
    return torch.split(values.view(-1), BLOCK_ELEMENTS)


def block_stats(values: torch.Tensor) -> BlockStats:
    """Return the statistics of a block, which may be on an accelerator."""
    if values.dtype.itemsize == 1:
        return _stats_of_codes(values)
    if values.device.type != "cpu":
        return stats_on_device(values)
    numbers = real_numbers(values)
    num_all = numbers.numel()
    num_nan = 0
    low, high = extremes(numbers)
    if not math.isfinite(low + high) and num_all:
        num_nan = int(numbers.isnan().sum())
        numbers = numbers[numbers.isfinite()]
        low, high = extremes(numbers)
    num_finite = numbers.numel()
    largest = max(abs(low), abs(high))
    return BlockStats(
        num_finite,
        num_nan,
        num_infinite=num_all - num_nan - num_finite,
        num_zero=int(np.count_nonzero(numbers.numpy() == 0)) if low <= 0 <= high else 0,
        mean=_sum(numbers, largest) / num_finite if num_finite else math.nan,
        norm=norm(numbers, largest),
        low=low,
        high=high,
    )


def stats_on_device(values: torch.Tensor) -> BlockStats:
    """Return the statistics of a block, computed on its device."""
    real = values
    if values.is_complex():
        real = torch.view_as_real(values)
    numbers = real.reshape(-1).double()
    num_all = numbers.numel()
    num_nan = int(numbers.isnan().sum())
    numbers = numbers[numbers.isfinite()]
    num_finite = numbers.numel()
    low = high = math.nan
    if num_finite:
        low, high = map(float, numbers.aminmax())
    # Sums of large numbers, and squares, would overflow.
    largest = max(abs(low), abs(high))
    scale = largest if largest > 0 else 1.0
    scaled = numbers / scale
    return BlockStats(
        num_finite,
        num_nan,
        num_infinite=num_all - num_nan - num_finite,
        num_zero=int((numbers == 0).sum()),
        mean=scale * float(scaled.mean()),
        norm=scale * float(torch.linalg.vector_norm(scaled)),
        low=low,
        high=high,
    )


def _stats_of_codes(values: torch.Tensor) -> BlockStats:
    """Return the statistics of 8-bit values.

    Counting the occurrences of 256 values takes less time than converting all of them.
    """
    codes = values.view(torch.uint8)
    table = item_values(values.dtype).astype(np.float64)
    times = torch.bincount(codes, minlength=256).cpu().numpy()
    is_there = np.isfinite(table) & (times > 0)
    numbers = table[is_there]
    weights = times[is_there]
    num_finite = int(weights.sum())
    num_nan = int(times[np.isnan(table)].sum())
    low, high = extremes(torch.from_numpy(numbers))
    return BlockStats(
        num_finite,
        num_nan,
        num_infinite=len(codes) - num_finite - num_nan,
        num_zero=int(weights[numbers == 0].sum()),
        mean=float(np.dot(numbers, weights)) / num_finite if num_finite else math.nan,
        norm=math.sqrt(float(np.dot(numbers**2, weights))),
        low=low,
        high=high,
    )


def _sum(numbers: torch.Tensor, largest: float) -> float:
    """Return the sum of finite numbers; large numbers are scaled first."""
    if largest < 1e30:
        return float(numbers.sum())
    return largest * float((numbers.double() / largest).sum())


def together(parts: Sequence[BlockStats]) -> BlockStats:
    """Combine the statistics of one or more blocks.

    Statistics are NaN without any finite number.
    """
    if len(parts) == 1:
        return parts[0]
    (row,) = sums_of_rows(np.array(parts, np.float64), np.zeros(len(parts), np.int64), 1).tolist()
    return BlockStats(*map(int, row[:4]), *row[4:])


def sums_of_rows(rows: StatsRows, slots: IntArray, num_slots: int) -> StatsRows:
    """Combine the statistics of the rows of each slot.

    The result has shape (`num_slots`, 8). Statistics are NaN without any finite number.

    Args:
        rows: of shape (n, 8).
        slots: the slot of each row, of shape (n,).
        num_slots: how many there are.
    """
    counts = [_added_up(column, slots, num_slots) for column in rows[:, :4].T]
    is_finite = rows[:, 0] > 0
    slots = slots[is_finite]
    num_finite, _, _, _, means, norms, lows, highs = rows[is_finite].T
    # Sums of large numbers would overflow.
    shares = num_finite / counts[0][slots]
    means = _added_up(means * shares, slots, num_slots)
    norms = _norms_of_rows(norms, slots, num_slots)
    low = np.full(num_slots, np.inf)
    high = np.full(num_slots, -np.inf)
    np.minimum.at(low, slots, lows)
    np.maximum.at(high, slots, highs)
    has_none = counts[0] == 0
    for column in (means, low, high):
        column[has_none] = math.nan
    return np.stack([*counts, means, norms, low, high], axis=1)


def _norms_of_rows(norms: StatsRows, slots: IntArray, num_slots: int) -> StatsRows:
    """Combine the norms of each slot, scaling them first."""
    largest = np.zeros(num_slots)
    np.maximum.at(largest, slots, norms)
    scales = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    return scales * np.sqrt(_added_up(np.square(norms / scales[slots]), slots, num_slots))


def _added_up(column: StatsRows, slots: IntArray, num_slots: int) -> StatsRows:
    # numpy returns integers for an empty column.
    return np.bincount(slots, column, num_slots).astype(np.float64)


def real_numbers(values: torch.Tensor) -> torch.Tensor:
    """Return a block of values as flat float32 or float64.

    Converted values are in scratch memory.
    """
    if values.is_complex():
        values = torch.view_as_real(values)
    values = values.reshape(-1)
    if values.dtype in (torch.float32, torch.float64):
        return values
    if values.dtype.itemsize == 1:
        return torch.from_numpy(item_values(values.dtype)[values.view(torch.uint8).numpy()])
    wide = torch.float64 if values.dtype.itemsize > 2 else torch.float32
    return scratch("numbers", values.shape, wide).copy_(values)


def extremes(numbers: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and largest number; NaN if any is, or without numbers."""
    if not numbers.numel():
        return math.nan, math.nan
    # numpy takes half of the time of torch.aminmax.
    array = numbers.numpy()
    with np.errstate(invalid="ignore"):
        return float(array.min()), float(array.max())


def norm(numbers: torch.Tensor, largest: float | None = None) -> float:
    """Return the L2 norm of a block of real numbers.

    `largest` is the largest absolute value, if it is known.
    """
    if largest is None:
        largest = max(map(abs, extremes(numbers)))
    if not _SAFE[0] < largest < _SAFE[1]:
        if not 0 < largest < math.inf:
            return largest if len(numbers) else 0.0
        return largest * norm(numbers.double() / largest, 1.0)
    array = numbers.numpy()
    rows = array[: len(array) // _ROW * _ROW].reshape(-1, 1, _ROW)
    squares = np.matmul(rows, rows.transpose(0, 2, 1)).sum(dtype=np.float64)
    rest = array[rows.size :]
    return math.sqrt(squares + float(np.dot(rest, rest)))

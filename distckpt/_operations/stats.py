"""Statistics of the values of each tensor: one pass, a few windows in memory at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.dtypes import item_values
from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import natural_order, summarize_keys
from distckpt._checkpoint.stored_values import StoredTensor
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._operations.windows import (
    Window,
    blocks_of,
    extremes,
    map_windows,
    norm,
    real_numbers,
)
from distckpt._plan.selection import matches

_NUM_SAMPLED = 1000
"""Values of a tensor that its histogram is made of, at most twice as many."""
NUM_BINS = 8


class TensorStats(NamedTuple):
    """Statistics of one tensor; of finite values only, but for the counts. A complex number counts
    as two.

    Attributes:
        num_elements: all of them, and how many are NaN, infinite and zero.
        norm: the L2 norm.
        histogram: counts of values, of a sample where there are many, in bins of equal width from
            `min` to `max`.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    num_elements: int
    num_nan: int
    num_infinite: int
    num_zero: int
    norm: float
    min: float
    max: float
    mean: float
    histogram: tuple[int, ...]


class _Part(NamedTuple):
    """A block of values: how many are finite, NaN, infinite and zero, and of the finite ones their
    mean and so on.
    """

    num_finite: int
    num_nan: int
    num_infinite: int
    num_zero: int
    mean: float
    norm: float
    low: float
    high: float


def compute_stats(
    stored: StoredCheckpoint, keys: Sequence[str] | None, count: Callable[[int], None] | None
) -> Iterator[TensorStats]:
    """Yield the statistics of each tensor that matches; `count` is called with numbers of bytes
    that were read.

    Raises:
        LoadMismatchError: no tensor matches.
    """
    names = sorted(
        (key for key in stored.manifest.key_index if not stored.is_object(key)), key=natural_order
    )
    chosen = [name for name in names if keys is None or matches(name, keys)]
    if not names:
        raise LoadMismatchError(
            f"{stored.location!r} has no tensors, only common state and objects."
        )
    if not chosen:
        patterns, there = ", ".join(map(repr, keys or ())), summarize_keys(names)
        raise LoadMismatchError(
            f"No tensor of {stored.location!r} matches {patterns}; there are {there}."
        )
    tensors = [StoredTensor(stored, name) for name in chosen]

    def compute(
        window: Window, values: torch.Tensor
    ) -> tuple[list[_Part], npt.NDArray[np.float64]]:
        stride = max(1, math.prod(tensors[window.tensor].shape) // _NUM_SAMPLED)
        sample = real_numbers(values.view(-1)[::stride]).to(torch.float64, copy=True).numpy()
        return [_part(block) for block in blocks_of(values)], sample

    for tensor, found in zip(tensors, map_windows([tensors], compute, count), strict=True):
        yield _join(
            tensor, [part for parts, _ in found for part in parts], [sample for _, sample in found]
        )


def _join(
    tensor: StoredTensor, parts: Sequence[_Part], samples: Sequence[npt.NDArray[np.float64]]
) -> TensorStats:
    counts = [sum(column) for column in itertools.islice(zip(*parts, strict=True), 4)]
    finite = [part for part in parts if part.num_finite]
    low, high = (
        min((p.low for p in finite), default=math.nan),
        max((p.high for p in finite), default=math.nan),
    )
    # Sums of large numbers would overflow.
    mean = sum(part.mean * (part.num_finite / counts[0]) for part in finite) if finite else math.nan
    length = math.hypot(*(part.norm for part in finite))
    place = (tensor.key, tensor.dtype, tensor.shape, math.prod(tensor.shape))
    _, num_nan, num_infinite, num_zero = counts
    histogram = _histogram(np.concatenate(samples), low, high) if finite else ()
    return TensorStats(*place, num_nan, num_infinite, num_zero, length, low, high, mean, histogram)


def _histogram(sample: npt.NDArray[np.float64], low: float, high: float) -> tuple[int, ...]:
    values = sample[np.isfinite(sample)]
    # Halves, since the distance between large numbers would overflow.
    shares = (values / 2 - low / 2) / ((high / 2 - low / 2) or 1.0)
    bins = np.clip((shares * NUM_BINS).astype(np.int64), 0, NUM_BINS - 1)
    return tuple(np.bincount(bins, minlength=NUM_BINS).tolist())


def _part(values: torch.Tensor) -> _Part:
    if values.dtype.itemsize == 1:
        return _part_of_codes(values)
    numbers = real_numbers(values)
    num_all, num_nan = numbers.numel(), 0
    low, high = extremes(numbers)
    if not math.isfinite(low + high) and num_all:
        num_nan = int(numbers.isnan().sum())
        numbers = numbers[numbers.isfinite()]
        low, high = extremes(numbers)
    num_finite, largest = numbers.numel(), max(abs(low), abs(high))
    num_zero = int(np.count_nonzero(numbers.numpy() == 0)) if low <= 0 <= high else 0
    # Sums of large numbers would overflow.
    total = (
        float(numbers.sum())
        if largest < 1e30
        else largest * float((numbers.double() / largest).sum())
    )
    mean = total / max(1, num_finite)
    return _Part(
        num_finite,
        num_nan,
        num_all - num_nan - num_finite,
        num_zero,
        mean,
        norm(numbers, largest),
        low,
        high,
    )


def _part_of_codes(values: torch.Tensor) -> _Part:
    """Count how often each of 256 values is there, which takes less time than to convert them
    all.
    """
    codes = values.view(torch.uint8)
    table, times = (
        item_values(values.dtype).astype(np.float64),
        torch.bincount(codes, minlength=256).numpy(),
    )
    is_there = np.isfinite(table) & (times > 0)
    numbers, weights = table[is_there], times[is_there]
    num_finite, num_nan = int(weights.sum()), int(times[np.isnan(table)].sum())
    counts = (
        num_finite,
        num_nan,
        len(codes) - num_finite - num_nan,
        int(weights[numbers == 0].sum()),
    )
    mean, squares = (
        float(np.dot(numbers, weights)) / max(1, num_finite),
        float(np.dot(numbers**2, weights)),
    )
    return _Part(*counts, mean, math.sqrt(squares), *extremes(torch.from_numpy(numbers)))

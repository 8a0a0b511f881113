"""Statistics of the values of each tensor: one pass, a few windows in memory at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.dtypes import item_values
from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import natural_order, summarize_keys
from distckpt._base.options import Progress
from distckpt._base.threads import ProgressCounter
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


@dataclass(frozen=True)
class TensorStats:
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


class BlockStats(NamedTuple):
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


class WindowStats(NamedTuple):
    """Of a window: its blocks, and a sample of its values."""

    parts: list[BlockStats]
    sample: npt.NDArray[np.float64]


def compute_stats(
    stored: StoredCheckpoint,
    keys: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Iterator[TensorStats]:
    """Yield the statistics of each tensor that matches; `progress` is called with the bytes read
    so far and the bytes to read.

    Raises:
        LoadMismatchError: no tensor matches.
    """
    tensors = tensors_to_measure(stored, keys)
    counter = ProgressCounter(progress, sum(tensor.num_bytes for tensor in tensors))
    results = map_windows([tensors], partial(measure_window, tensors), counter)
    for tensor, found in zip(tensors, results, strict=True):
        yield stats_of_windows(tensor, found)


def tensors_to_measure(stored: StoredCheckpoint, keys: Sequence[str] | None) -> list[StoredTensor]:
    """Return the tensors that match, see `compute_stats`."""
    return [StoredTensor(stored, name) for name in _chosen_names(stored, keys)]


def measure_window(
    tensors: Sequence[StoredTensor], window: Window, values: torch.Tensor
) -> WindowStats:
    """Return the statistics of a window of one of the tensors."""
    stride = max(1, math.prod(tensors[window.tensor].shape) // _NUM_SAMPLED)
    sample = real_numbers(values.view(-1)[::stride])
    wide = sample.to(torch.float64, copy=True).numpy()
    return WindowStats([_part(block) for block in blocks_of(values)], wide)


def _chosen_names(stored: StoredCheckpoint, keys: Sequence[str] | None) -> list[str]:
    """Return the names of the tensors that match, in natural order."""
    names = [key for key in stored.manifest.key_index if not stored.is_object(key)]
    if not names:
        raise LoadMismatchError(
            f"{stored.location!r} has no tensors, only common state and objects."
        )
    names.sort(key=natural_order)
    if keys is None:
        return names
    chosen = [name for name in names if matches(name, keys)]
    if not chosen:
        patterns, there = ", ".join(map(repr, keys)), summarize_keys(names)
        raise LoadMismatchError(
            f"No tensor of {stored.location!r} matches {patterns}; there are {there}."
        )
    return chosen


def stats_of_windows(tensor: StoredTensor, windows: Sequence[WindowStats]) -> TensorStats:
    """Put the statistics of the windows of a tensor together."""
    whole = _put_together([part for window in windows for part in window.parts])
    histogram: tuple[int, ...] = ()
    if whole.num_finite:
        sample = np.concatenate([window.sample for window in windows])
        histogram = _histogram(sample, whole.low, whole.high)
    return TensorStats(
        tensor.key,
        tensor.dtype,
        tensor.shape,
        num_elements=math.prod(tensor.shape),
        num_nan=whole.num_nan,
        num_infinite=whole.num_infinite,
        num_zero=whole.num_zero,
        norm=whole.norm,
        min=whole.low,
        max=whole.high,
        mean=whole.mean,
        histogram=histogram,
    )


def _put_together(parts: Sequence[BlockStats]) -> BlockStats:
    """Return the figures of all parts together; NaN where there is no finite number."""
    columns = itertools.islice(zip(*parts, strict=True), 4)
    num_finite, num_nan, num_infinite, num_zero = map(sum, columns)
    finite = [part for part in parts if part.num_finite]
    # Sums of large numbers would overflow.
    mean = sum(part.mean * (part.num_finite / num_finite) for part in finite)
    return BlockStats(
        num_finite,
        num_nan,
        num_infinite,
        num_zero,
        mean=mean if finite else math.nan,
        norm=math.hypot(*(part.norm for part in finite)),
        low=min((part.low for part in finite), default=math.nan),
        high=max((part.high for part in finite), default=math.nan),
    )


def _histogram(
    sample: npt.NDArray[np.float64],
    low: float,
    high: float,
) -> tuple[int, ...]:
    values = sample[np.isfinite(sample)]
    # Halves, since the distance between large numbers would overflow.
    shares = (values / 2 - low / 2) / ((high / 2 - low / 2) or 1.0)
    bins = np.clip((shares * NUM_BINS).astype(np.int64), 0, NUM_BINS - 1)
    return tuple(np.bincount(bins, minlength=NUM_BINS).tolist())


def _part(values: torch.Tensor) -> BlockStats:
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
    return BlockStats(
        num_finite,
        num_nan,
        num_infinite=num_all - num_nan - num_finite,
        num_zero=int(np.count_nonzero(numbers.numpy() == 0)) if low <= 0 <= high else 0,
        mean=_sum(numbers, largest) / max(1, num_finite),
        norm=norm(numbers, largest),
        low=low,
        high=high,
    )


def _sum(numbers: torch.Tensor, largest: float) -> float:
    """Return the sum of finite numbers, that of large ones by way of smaller ones."""
    if largest < 1e30:
        return float(numbers.sum())
    return largest * float((numbers.double() / largest).sum())


def _part_of_codes(values: torch.Tensor) -> BlockStats:
    """Count how often each of 256 values is there, which takes less time than to convert them
    all.
    """
    codes = values.view(torch.uint8)
    table = item_values(values.dtype).astype(np.float64)
    times = torch.bincount(codes, minlength=256).numpy()
    is_there = np.isfinite(table) & (times > 0)
    numbers, weights = table[is_there], times[is_there]
    num_finite, num_nan = int(weights.sum()), int(times[np.isnan(table)].sum())
    low, high = extremes(torch.from_numpy(numbers))
    return BlockStats(
        num_finite,
        num_nan,
        num_infinite=len(codes) - num_finite - num_nan,
        num_zero=int(weights[numbers == 0].sum()),
        mean=float(np.dot(numbers, weights)) / max(1, num_finite),
        norm=math.sqrt(float(np.dot(numbers**2, weights))),
        low=low,
        high=high,
    )

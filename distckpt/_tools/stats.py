"""Statistics of tensors' values: one pass, few windows in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import natural_order, summarize_keys
from distckpt._base.options import Progress
from distckpt._base.threads import ProgressCounter
from distckpt._checkpoint.stored_values import StoredTensor
from distckpt._format.manifest import STATS_COUNTS, STATS_VALUES
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.block_stats import BlockStats, block_stats, blocks_of, real_numbers, together
from distckpt._operations.windows import Window, map_windows
from distckpt._plan.selection import matches, names_of_tensors

_NUM_SAMPLED = 1000
"""Smallest sample for the histogram of a large tensor; it is at most twice as large."""
NUM_BINS = 8


@dataclass(frozen=True)
class TensorStats:
    """Statistics of one tensor.

    They are about finite values only, but for the counts. A complex number counts as two.

    Attributes:
        num_elements: number of all elements; other numbers count NaN, infinite values and zeros.
        norm: the L2 norm.
        histogram: counts of values, of a sample where there are many, in bins of equal width from
            `min` to `max`; empty where a save has stored the statistics.
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


class WindowStats(NamedTuple):
    """The statistics of a window's blocks, and a sample of its values."""

    parts: list[BlockStats]
    sample: npt.NDArray[np.float64]


def compute_stats(
    stored: StoredCheckpoint,
    keys: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Iterator[TensorStats]:
    """Yield the statistics of each tensor that matches.

    `progress` is called with the bytes read so far and the bytes to read.

    Raises:
        LoadMismatchError: no tensor matches.
    """
    tensors = tensors_to_measure(stored, keys)
    counter = ProgressCounter(progress, sum(tensor.num_bytes for tensor in tensors))
    results = map_windows([tensors], partial(measure_window, tensors), counter)
    for tensor, windows in zip(tensors, results, strict=True):
        yield stats_of_windows(tensor, windows)


def tensors_to_measure(stored: StoredCheckpoint, keys: Sequence[str] | None) -> list[StoredTensor]:
    """Return the tensors that match, see `compute_stats`."""
    return [StoredTensor(stored, name) for name in chosen_names(stored, keys)]


def measure_window(
    tensors: Sequence[StoredTensor], window: Window, values: torch.Tensor
) -> WindowStats:
    """Return the statistics of a window of one of the tensors."""
    stride = max(1, math.prod(tensors[window.tensor].shape) // _NUM_SAMPLED)
    sample = real_numbers(values.view(-1)[::stride])
    wide = sample.to(torch.float64, copy=True).numpy()
    return WindowStats([block_stats(block) for block in blocks_of(values)], wide)


def stats_of_windows(tensor: StoredTensor, windows: Sequence[WindowStats]) -> TensorStats:
    """Combine the statistics of the windows of a tensor."""
    parts: list[BlockStats] = []
    for window in windows:
        parts.extend(window.parts)
    whole = together(parts)
    histogram: tuple[int, ...] = ()
    if whole.num_finite:
        sample = np.concatenate([window.sample for window in windows])
        histogram = _histogram(sample, whole.low, whole.high)
    return _stats_of_tensor(tensor, whole, histogram)


def _stats_of_tensor(
    tensor: StoredTensor, stats: BlockStats, histogram: tuple[int, ...]
) -> TensorStats:
    return TensorStats(
        tensor.key,
        tensor.dtype,
        tensor.shape,
        num_elements=math.prod(tensor.shape),
        num_nan=stats.num_nan,
        num_infinite=stats.num_infinite,
        num_zero=stats.num_zero,
        norm=stats.norm,
        min=stats.low,
        max=stats.high,
        mean=stats.mean,
        histogram=histogram,
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


# --- Saved stats ----------------------------------------------------------------------------------


def saved_stats(stored: StoredCheckpoint, keys: Sequence[str] | None) -> list[TensorStats] | None:
    """Return the stored statistics of each tensor that matches.

    Return None if some of them have none.

    Raises:
        LoadMismatchError: no tensor matches.
    """
    figures = stored.manifest.figures
    if STATS_VALUES not in figures:
        return None
    all_stats: list[TensorStats] = []
    for name in chosen_names(stored, keys):
        tensor = StoredTensor(stored, name)
        key_id = stored.manifest.key_index[name]
        norm, mean, low, high = figures[STATS_VALUES][key_id].tolist()
        num_nan, num_infinite, num_zero = figures[STATS_COUNTS][key_id].tolist()
        num_elements = math.prod(tensor.shape)
        if not num_elements:
            norm = 0.0
        if math.isnan(norm):
            return None
        num_finite = num_elements - num_nan - num_infinite
        counts = (num_finite, num_nan, num_infinite, num_zero)
        stats = BlockStats(*counts, mean, norm, low, high)
        all_stats.append(_stats_of_tensor(tensor, stats, ()))
    return all_stats


def chosen_names(stored: StoredCheckpoint, keys: Sequence[str] | None) -> list[str]:
    """Return the names of the tensors that match, in natural order.

    Raises:
        LoadMismatchError: no tensor matches.
    """
    names = sorted(names_of_tensors(stored.manifest), key=natural_order)
    if not names:
        raise LoadMismatchError(
            f"{stored.location!r} has no tensors, only common state and objects."
        )
    if keys is None:
        return names
    matching = []
    for name in names:
        if matches(name, keys):
            matching.append(name)
    if not matching:
        patterns = ", ".join(map(repr, keys))
        there = summarize_keys(names)
        raise LoadMismatchError(
            f"No tensor of {stored.location!r} matches {patterns}; there are {there}."
        )
    return matching

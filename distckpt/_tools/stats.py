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
from distckpt._format.manifest import STATS_COUNTS, STATS_VALUES, Manifest
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


def saved_stats(
    stored: StoredCheckpoint, keys: Sequence[str] | None = None
) -> list[TensorStats] | None:
    """Return the stored statistics of each tensor that matches.

    Return None if some of them have none.

    Raises:
        LoadMismatchError: no tensor matches.
    """
    if STATS_VALUES not in stored.manifest.figures:
        return None
    all_stats: list[TensorStats] = []
    for name in chosen_names(stored, keys):
        stats = _stats_of_key(stored.manifest, name)
        if stats is None:
            return None
        all_stats.append(stats)
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


def _stats_of_key(manifest: Manifest, key: str) -> TensorStats | None:
    """Return the statistics that a save has stored of a tensor; None if it has none."""
    if STATS_VALUES not in manifest.figures:
        return None
    key_id = manifest.key_index[key]
    shape = manifest.global_shapes[key_id]
    num_elements = math.prod(shape)
    norm, mean, low, high = manifest.figures[STATS_VALUES][key_id].tolist()
    if math.isnan(norm) and num_elements:
        return None
    num_nan, num_infinite, num_zero = manifest.figures[STATS_COUNTS][key_id].tolist()
    return TensorStats(
        key,
        manifest.dtypes[key_id],
        shape,
        num_elements=num_elements,
        num_nan=num_nan,
        num_infinite=num_infinite,
        num_zero=num_zero,
        norm=norm if num_elements else 0.0,
        min=low,
        max=high,
        mean=mean,
        histogram=(),
    )

"""Statistics of the values of each tensor: one pass, a few windows in memory at a time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.dtypes import FROM_NAME, PACKED_PER_ITEM, TO_NAME
from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import natural_order, summarize_keys
from distckpt._base.threads import run_threads
from distckpt._foreign.stored_values import StoredTensor, read_region_into
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region, cut_region, whole
from distckpt._plan.export import matches

WINDOW_ELEMENTS = 1 << 21
"""A thread reads so many at a time,"""
_BLOCK_ELEMENTS = 1 << 18
"""and computes on so many, which stay in its cache."""
_BATCH_WINDOWS = 64
_NUM_SAMPLED = 1000
"""Values of a tensor that its histogram is made of, at most twice as many."""
NUM_BINS = 8
_SAFE = (1e-15, 1e15)
"""Squares of float32 numbers between these neither vanish nor overflow."""


class TensorStats(NamedTuple):
    """Statistics of one tensor; of finite values only, but for the counts. A complex number counts as two.

    Attributes:
        num_elements: all of them, and how many are NaN, infinite and zero.
        norm: the L2 norm.
        histogram: counts of values, of a sample where there are many, in bins of equal width from `min` to `max`.
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
    """A block of values: its counts of finite, NaN, infinite and zero values, its mean and norm."""

    counts: tuple[int, int, int, int]
    mean: float
    norm: float
    low: float
    high: float
    sample: npt.NDArray[np.float64]


def compute_stats(
    stored: StoredCheckpoint, keys: Sequence[str] | None, count: Callable[[int], None] | None
) -> Iterator[TensorStats]:
    """Yield the statistics of each tensor that matches; `count` is called with numbers of bytes that were read.

    Raises:
        LoadMismatchError: no tensor matches.
    """
    names = sorted((key for key in stored.manifest.keys if not stored.is_object(key)), key=natural_order)
    chosen = [name for name in names if keys is None or matches(name, keys)]
    if not chosen:
        there = summarize_keys(names)
        raise LoadMismatchError(f"No tensor of {stored.location!r} matches {keys!r}; there are {there or 'none'}.")
    buffers = threading.local()  # fresh memory costs more than all that is computed on it
    for batch in _batches([StoredTensor(stored, name) for name in chosen]):
        windows = [(tensor, part) for tensor in batch for part in cut_region(whole(tensor.shape), WINDOW_ELEMENTS)]
        parts: dict[str, list[_Part]] = {tensor.key: [] for tensor in batch}

        def add(item: tuple[StoredTensor, Region], parts: dict[str, list[_Part]] = parts) -> None:
            tensor, window = item
            values = _buffer(buffers, FROM_NAME[tensor.dtype], window.num_elements)
            read_region_into(stored, tensor.key, window, values.view(window.shape), num_threads=1)
            stride = max(1, math.prod(tensor.shape) // _NUM_SAMPLED)
            parts[tensor.key] += [_part(block, stride, buffers) for block in torch.split(values, _BLOCK_ELEMENTS)]
            if count is not None:
                count(values.nbytes)

        run_threads(add, windows)
        yield from (_join(tensor, parts[tensor.key]) for tensor in batch)


def _batches(tensors: Sequence[StoredTensor]) -> Iterator[list[StoredTensor]]:
    """Yield tensors together that keep all threads busy."""
    batch: list[StoredTensor] = []
    for tensor in tensors:
        batch.append(tensor)
        if sum(math.prod(member.shape) for member in batch) > _BATCH_WINDOWS * WINDOW_ELEMENTS or len(batch) == 1000:
            yield batch
            batch = []
    yield batch


def _join(tensor: StoredTensor, parts: Sequence[_Part]) -> TensorStats:
    num_finite, num_nan, num_infinite, num_zero = (
        np.array([(0,) * 4, *(part.counts for part in parts)]).sum(axis=0).tolist()
    )
    finite = [part for part in parts if part.counts[0]]
    low, high = min((p.low for p in finite), default=math.nan), max((p.high for p in finite), default=math.nan)
    histogram = _histogram(np.concatenate([part.sample for part in finite]), low, high) if finite else ()
    # Sums of large numbers would overflow.
    mean = sum(part.mean * (part.counts[0] / num_finite) for part in finite) if finite else math.nan
    norm = math.hypot(*(part.norm for part in finite))
    place = (tensor.key, tensor.dtype, tensor.shape, math.prod(tensor.shape))
    return TensorStats(*place, num_nan, num_infinite, num_zero, norm, low, high, mean, histogram)


def _histogram(values: npt.NDArray[np.float64], low: float, high: float) -> tuple[int, ...]:
    bins = ((values - low) * (NUM_BINS / ((high - low) or 1.0))).astype(np.int64)
    return tuple(np.bincount(np.clip(bins, 0, NUM_BINS - 1), minlength=NUM_BINS).tolist())


def _buffer(buffers: threading.local, dtype: torch.dtype, num_elements: int) -> torch.Tensor:
    """Return memory of this thread, which its next call with this dtype returns again."""
    name = str(dtype)
    found: torch.Tensor | None = getattr(buffers, name, None)
    if found is None or found.numel() < num_elements:
        found = torch.empty(num_elements, dtype=dtype)
        setattr(buffers, name, found)
    return found[:num_elements]


def _part(values: torch.Tensor, stride: int, buffers: threading.local) -> _Part:
    if values.is_complex():
        values = torch.view_as_real(values).reshape(-1)
    elif TO_NAME[values.dtype] in PACKED_PER_ITEM:
        values = values.view(torch.uint8)
    if values.dtype not in (torch.float32, torch.float64):
        wide = torch.float64 if values.dtype.itemsize > 2 else torch.float32
        values = _buffer(buffers, wide, 2 * _BLOCK_ELEMENTS)[: values.numel()].copy_(values)
    num_all, num_nan = values.numel(), 0
    low, high = _extremes(values)
    if not math.isfinite(low + high) and num_all:
        num_nan = int(values.isnan().sum())
        values = values[values.isfinite()]
        low, high = _extremes(values)
    largest = max(abs(low), abs(high))
    array = values.numpy()
    scale = 1.0
    if not _SAFE[0] < largest < _SAFE[1] and largest > 0:
        scale, array = largest, array.astype(np.float64) / largest
    num_finite = values.numel()
    counts = (num_finite, num_nan, num_all - num_nan - num_finite, int(np.count_nonzero(array == 0)))
    mean = scale * (float(array.sum()) / max(1, num_finite))
    norm = scale * math.sqrt(np.dot(array, array))
    return _Part(counts, mean, norm, low, high, array[::stride].astype(np.float64) * scale)


def _extremes(values: torch.Tensor) -> tuple[float, float]:
    if not values.numel():
        return math.nan, math.nan
    low, high = torch.aminmax(values)
    return float(low), float(high)

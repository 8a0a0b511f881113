"""Differences between tensors of two checkpoints.

They are found window by window, then joined for each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.dtypes import as_integers, to_numpy
from distckpt._checkpoint.stored_values import StoredTensor
from distckpt._geometry.region import Region
from distckpt._io.block_stats import blocks_of, norm, real_numbers
from distckpt._operations.windows import Window, window_regions


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the same on both sides.

    Attributes:
        key: its name; its name in B if it is renamed.
        shapes: its global shape in A and in B. Values are compared when they are equal.
        dtypes: its safetensors dtype in A and in B.
        num_elements: number of elements on each side; 0 when the values were not compared.
        num_different: elements whose values differ. NaN equals NaN.
        max_difference: the largest absolute difference; infinite where only one side is infinite or
            NaN.
        first_index: index of the first element that differs, in row-major order; None when none
            does.
        region: the smallest region that holds all elements that differ, `[start:stop, ...]`; None
            when none does.
        norms: the L2 norm of A and of B; 0 when no values differ.
        difference_norm: the L2 norm of A - B.
    """

    key: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    num_elements: int = 0
    num_different: int = 0
    max_difference: float = 0.0
    first_index: tuple[int, ...] | None = None
    region: str | None = None
    norms: tuple[float, float] = (0.0, 0.0)
    difference_norm: float = 0.0

    @property
    def relative_difference(self) -> float:
        """Return the norm of the difference divided by the norm of B.

        It is infinite where B is zero and A is not.
        """
        if not self.norms[1]:
            return math.inf if self.difference_norm else 0.0
        return self.difference_norm / self.norms[1]


class Change(NamedTuple):
    """A window whose bytes differ.

    Attributes:
        first_index: index of the first element whose value differs; empty when all are equal.
        spans: along each axis, the first index of such elements, and the index behind the last.
        norms: norms of A, of B and of the difference.
    """

    num_different: int
    max_difference: float
    first_index: tuple[int, ...]
    spans: list[tuple[int, int]]
    norms: tuple[float, ...]


def tensor_differences(
    pairs: Mapping[str, tuple[StoredTensor, StoredTensor]],
    windows: Mapping[str, Sequence[Change | None]],
) -> Iterator[TensorDifference]:
    """Yield the tensors that differ, given the changes in their windows.

    Tensors of different shapes have no windows.
    """
    for key, (a, b) in pairs.items():
        cast = TensorDifference(key, (a.shape, b.shape), (a.dtype, b.dtype))
        if key not in windows:
            yield cast
            continue
        cast = replace(cast, num_elements=math.prod(a.shape))
        changes = []
        for change in windows[key]:
            if change is not None and change.num_different:
                changes.append(change)
        if changes:
            yield _joined(cast, changes, _norms(a, windows[key]))
        elif a.dtype != b.dtype:
            yield cast


def _joined(
    cast: TensorDifference, changes: Sequence[Change], norms: Sequence[float]
) -> TensorDifference:
    """Join the changes in a tensor's windows."""
    norm_a, norm_b, distance = norms
    # Of all windows, axes, and both ends: the smallest region around all.
    spans = np.array([change.spans for change in changes]).reshape(len(changes), -1, 2)
    starts = spans[:, :, 0].min(axis=0)
    extents = spans[:, :, 1].max(axis=0) - starts
    return replace(
        cast,
        num_different=sum(change.num_different for change in changes),
        max_difference=max(change.max_difference for change in changes),
        first_index=changes[0].first_index,
        region=str(Region(tuple(starts.tolist()), tuple(extents.tolist()))),
        norms=(norm_a, norm_b),
        difference_norm=distance,
    )


def _norms(a: StoredTensor, windows: Sequence[Change | None]) -> list[float]:
    """Return the norms of A, of B and of the difference.

    Equal windows of A are read once more.
    """
    norms = []
    for change, region in zip(windows, window_regions(a.shape), strict=True):
        if change is not None:
            norms.append(change.norms)
        else:
            size = math.hypot(*(norm(real_numbers(block)) for block in blocks_of(a.read(region))))
            norms.append((size, size, 0.0))
    return [math.hypot(*column) for column in zip(*norms, strict=True)]


def compare_window(
    window: Window, left: torch.Tensor, right: torch.Tensor, *, atol: float, rtol: float
) -> Change | None:
    """Compare a window of both sides; None when the bytes are equal."""
    blocks = list(zip(blocks_of(left), blocks_of(right), strict=True))
    if left.dtype == right.dtype and all(_has_equal_bytes(*block) for block in blocks):
        return None
    places = []
    norms = []
    largest = []
    for block in blocks:
        a, b = map(to_numpy, block)
        differs, distance = _compare(a, b, atol, rtol)
        places.append(differs)
        norms.append([norm(real_numbers(torch.from_numpy(values))) for values in (a, b, distance)])
        # numpy takes longer with a mask.
        largest.append(
            distance.max(initial=0, where=differs) if atol or rtol else distance.max(initial=0)
        )
    first_index, spans = _place(np.concatenate(places).reshape(left.shape), window.region.offset)
    num_different = sum(int(np.count_nonzero(differs)) for differs in places)
    lengths = tuple(math.hypot(*column) for column in zip(*norms, strict=True))
    return Change(num_different, float(max(largest)), first_index, spans, lengths)


def _has_equal_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    # numpy takes a fifth of torch's time.
    return np.array_equal(as_integers(left).numpy(), as_integers(right).numpy())


def _compare(
    a: npt.NDArray[Any], b: npt.NDArray[Any], atol: float, rtol: float
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[Any]]:
    """Return the elements that differ, and the distances of all."""
    if a.dtype.kind in "iub" and b.dtype.kind in "iub":
        return _compare_integers(a, b, atol, rtol)
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    with np.errstate(all="ignore"):
        distance = np.abs(np.subtract(a, b, dtype=wide))
        unclear = np.isnan(distance)
        if unclear.any():
            # NaN on one side or both, or equal infinities.
            x = a[unclear]
            y = b[unclear]
            distance[unclear] = np.where((x == y) | ((x != x) & (y != y)), 0.0, np.inf)
        if atol or rtol:
            differs = (distance > atol + rtol * np.abs(b)) | np.isinf(distance)
        else:
            differs = distance > 0
    return differs, distance


def _compare_integers(
    a: npt.NDArray[Any], b: npt.NDArray[Any], atol: float, rtol: float
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint64]]:
    """Compare exactly: float64 is too coarse for large integers."""
    with np.errstate(all="ignore"):
        x = a.astype(np.uint64)
        y = b.astype(np.uint64)
        # Modulo 2**64, which is right for negative numbers, too.
        distance = np.where(a > b, x - y, y - x)
        bound = atol + rtol * np.abs(b.astype(np.float64))
        is_reachable = bound < 2.0**64
        differs = (
            (a != b)
            & is_reachable
            & (distance > np.where(is_reachable, bound, 0).astype(np.uint64))
        )
    return differs, distance


def _place(
    differs: npt.NDArray[np.bool_], offset: tuple[int, ...]
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Return the first index and the spans of different elements."""
    if not differs.any():
        return (), []
    first = np.unravel_index(int(differs.argmax()), differs.shape)
    spans = []
    for axis, start in enumerate(offset):
        hits = np.flatnonzero(
            differs.any(axis=tuple(other for other in range(differs.ndim) if other != axis))
        )
        spans.append((start + int(hits[0]), start + int(hits[-1]) + 1))
    return tuple(int(i) + o for i, o in zip(first, offset, strict=True)), spans

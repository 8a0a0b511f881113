"""Difference of two copies of a tensor: drift, or nothing in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.dtypes import FROM_NAME, to_numpy

UNRELATED_SHARE = 0.5
"""Share of difference from which two tensors are unrelated. It is the share of the energy of both
(1 for independent values around 0), or of their integers.
"""


class Difference(NamedTuple):
    """The difference of two samples.

    Attributes:
        absolute: the largest difference of two elements; infinite or NaN next to a number count
            as infinite.
        relative: the largest difference as a share of the largest element.
        is_unrelated: the samples have nothing in common.
    """

    absolute: float
    relative: float
    is_unrelated: bool


def largest_of(differences: Iterable[Difference]) -> str:
    """Describe the largest difference of some samples."""
    absolute = max(difference.absolute for difference in differences)
    relative = max(difference.relative for difference in differences)
    return f"up to {absolute:.3g} ({relative:.3g} of the largest element), in samples of them"


def compare_samples(dtype: str, first: bytes, second: bytes) -> Difference:
    """Compare the elements of two samples; `dtype` is a safetensors name."""
    one = _numbers(dtype, first)
    other = _numbers(dtype, second)
    differs = (one != other) & ~(np.isnan(one) & np.isnan(other))
    if not differs.any():
        return Difference(0.0, 0.0, False)
    with np.errstate(all="ignore"):
        distance = np.abs(one - other)
        absolute = float(np.where(np.isnan(distance), np.inf, distance)[differs].max())
    numbers = np.abs(np.concatenate((one, other)))
    largest = float(numbers.max(where=np.isfinite(numbers), initial=0.0))
    relative = np.inf
    if np.isfinite(absolute):
        relative = absolute / largest
    is_exact = not FROM_NAME[dtype].is_floating_point and not FROM_NAME[dtype].is_complex
    if is_exact:
        return Difference(absolute, relative, bool(differs.mean() > UNRELATED_SHARE))
    return Difference(absolute, relative, _are_unrelated(one, other))


def _numbers(dtype: str, sample: bytes) -> npt.NDArray[np.float64]:
    items = torch.frombuffer(bytearray(sample), dtype=FROM_NAME[dtype])
    if items.is_complex():
        items = torch.view_as_real(items)
    array: npt.NDArray[Any] = to_numpy(items)
    return array.ravel().astype(np.float64)


def _are_unrelated(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> bool:
    # Where a run has diverged on both, it has the same values.
    are_equal = (one == other) | (np.isnan(one) & np.isnan(other))
    are_finite = np.isfinite(one) & np.isfinite(other)
    if (are_finite | are_equal).mean() < UNRELATED_SHARE:
        return True
    one = one[are_finite]
    other = other[are_finite]
    return bool(((one - other) ** 2).sum() >= UNRELATED_SHARE * (one**2 + other**2).sum())

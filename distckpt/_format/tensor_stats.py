"""Statistics of the values of tensors, and their columns in manifests.

The columns hold the statistics that a save has stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt._geometry.region import IntArray

_COUNTS = "stats_counts"
_VALUES = "stats_values"
_NUM_COUNTS = 3
_NUM_VALUES = 4


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


class StatsColumns(NamedTuple):
    """Statistics of all keys of a manifest.

    Attributes:
        counts: numbers of NaN, infinite values and zeros, of shape (keys, 3).
        values: norm, mean, minimum and maximum of the finite ones, of shape (keys, 4); the norm is
            NaN for keys without statistics, the others also where no value is finite.
    """

    counts: IntArray
    values: npt.NDArray[np.float64]

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, npt.NDArray[Any]], num_keys: int
    ) -> StatsColumns | None:
        """Return the statistics in the columns of a manifest, or None.

        Raises:
            ValueError: they do not fit the manifest.
        """
        if _COUNTS not in columns and _VALUES not in columns:
            return None
        stats = cls(columns[_COUNTS], columns[_VALUES])
        shapes = (num_keys, _NUM_COUNTS), (num_keys, _NUM_VALUES)
        kinds = np.dtype(np.int64), np.dtype(np.float64)
        if tuple(c.shape for c in stats) != shapes or tuple(c.dtype for c in stats) != kinds:
            raise ValueError("statistics are not a row of numbers for each key")
        if stats.counts.min(initial=0) < 0:
            raise ValueError("statistics count less than nothing")
        return stats

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return the columns by name."""
        return {_COUNTS: self.counts, _VALUES: self.values}

    @property
    def are_known(self) -> npt.NDArray[np.bool_]:
        """A flag for each key: whether it has statistics."""
        return ~np.isnan(self.values[:, 0]) | self.counts.any(axis=1)

    def take(self, key_ids: Sequence[int]) -> StatsColumns:
        """Return the rows of some keys, in their order.

        -1 stands for a key without statistics.
        """
        places = np.array(key_ids, np.int64)
        counts = np.concatenate([self.counts, np.zeros((1, _NUM_COUNTS), np.int64)])
        values = np.concatenate([self.values, np.full((1, _NUM_VALUES), math.nan)])
        return StatsColumns(counts[places], values[places])

    def of_key(
        self, key_id: int, key: str, dtype: str, shape: tuple[int, ...]
    ) -> TensorStats | None:
        """Return the statistics of a key; None if it has none."""
        num_elements = math.prod(shape)
        norm, mean, low, high = self.values[key_id].tolist()
        if math.isnan(norm) and num_elements:
            return None
        num_nan, num_infinite, num_zero = self.counts[key_id].tolist()
        return TensorStats(
            key,
            dtype,
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

"""Statistics of the values of tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distckpt._format.manifest import STATS_COUNTS, STATS_VALUES, Manifest


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


def stats_of_key(manifest: Manifest, key: str) -> TensorStats | None:
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

"""Statistics that a save stores: each rank measures what it writes, and the coordinator puts that
together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from distckpt._base.threads import run_threads
from distckpt._format.manifest import OBJECT, STATS_COUNTS, STATS_VALUES, Manifest
from distckpt._io.block_stats import BlockStats, block_stats, blocks_of, sums_of_rows
from distckpt._io.fingerprints import LiveRegion, regions_of, windows_of
from distckpt._io.save_shards import OwnedChunk

_NUM_FIGURES = len(BlockStats._fields)


def numbers_of(owned: Iterable[OwnedChunk]) -> bytes:
    """Return the statistics of what a rank owns of each key, for `columns_of`."""
    windows = [window for each in regions_of(owned) for window in windows_of(each)]
    found: list[list[BlockStats]] = [[] for _ in windows]

    def measure(item: tuple[int, LiveRegion]) -> None:
        number, window = item
        values = window.values.detach().resolve_conj().resolve_neg().contiguous()
        found[number] = [block_stats(block) for block in blocks_of(values)]

    run_threads(measure, enumerate(windows))
    rows = [
        (window.slot, *block) for window, of in zip(windows, found, strict=True) for block in of
    ]
    table = np.array(rows, np.float64).reshape(-1, 1 + _NUM_FIGURES)
    key_ids, slots = np.unique(table[:, 0].astype(np.int64), return_inverse=True)
    sums = sums_of_rows(table[:, 1:], slots, len(key_ids))
    return np.column_stack([key_ids, sums]).astype(np.float64).tobytes()


def columns_of(manifest: Manifest, numbers: Sequence[bytes]) -> dict[str, npt.NDArray[np.generic]]:
    """Put the statistics of all ranks together; return columns of the manifest.

    A tensor has none if some of its elements are not saved.
    """
    rows = np.frombuffer(b"".join(numbers), np.float64).reshape(-1, 1 + _NUM_FIGURES)
    slots = rows[:, 0].astype(np.int64)
    sums = sums_of_rows(rows[:, 1:], slots, len(manifest.keys))
    counts = sums[:, :4].astype(np.int64)
    is_whole = counts[:, :3].sum(axis=1) == _numbers_of_values(manifest)
    mean, norm, low, high = sums[:, 4:].T
    values = np.stack([norm, mean, low, high], axis=1)
    counts[~is_whole], values[~is_whole] = 0, math.nan
    return {STATS_COUNTS: np.ascontiguousarray(counts[:, 1:]), STATS_VALUES: values}


def _numbers_of_values(manifest: Manifest) -> npt.NDArray[np.int64]:
    """Return how many values each key has, two for a complex number; -1 for objects."""
    per_item = {"C64": 2}
    return np.array(
        [
            -1 if dtype == OBJECT else math.prod(shape) * per_item.get(dtype, 1)
            for dtype, shape in zip(manifest.dtypes, manifest.global_shapes, strict=True)
        ],
        np.int64,
    )

"""Statistics that a save stores.

Each rank measures its own chunks, and the coordinator puts the results together.
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
from distckpt._io.prepared_save import OwnedChunk

_NUM_FIGURES = len(BlockStats._fields)


def numbers_of(owned: Iterable[OwnedChunk]) -> bytes:
    """Return the statistics of this rank's values by key, for `columns_of`."""
    windows: list[LiveRegion] = []
    for region in regions_of(owned):
        windows.extend(windows_of(region))
    blocks_of_windows: list[list[BlockStats]] = [[] for _ in windows]

    def measure(item: tuple[int, LiveRegion]) -> None:
        number, window = item
        values = window.values.detach().resolve_conj().resolve_neg().contiguous()
        blocks_of_windows[number] = [block_stats(block) for block in blocks_of(values)]

    run_threads(measure, enumerate(windows))
    rows = []
    for window, blocks in zip(windows, blocks_of_windows, strict=True):
        for block in blocks:
            rows.append((window.slot, *block))
    table = np.array(rows, np.float64).reshape(-1, 1 + _NUM_FIGURES)
    key_ids, slots = np.unique(table[:, 0].astype(np.int64), return_inverse=True)
    sums = sums_of_rows(table[:, 1:], slots, len(key_ids))
    return np.column_stack([key_ids, sums]).astype(np.float64).tobytes()


def columns_of(manifest: Manifest, numbers: Sequence[bytes]) -> dict[str, npt.NDArray[np.generic]]:
    """Put the statistics of all ranks together; return manifest columns.

    A tensor has none if some of its elements are not saved.
    """
    rows = np.frombuffer(b"".join(numbers), np.float64).reshape(-1, 1 + _NUM_FIGURES)
    slots = rows[:, 0].astype(np.int64)
    sums = sums_of_rows(rows[:, 1:], slots, len(manifest.keys))
    counts = sums[:, :4].astype(np.int64)
    is_whole = counts[:, :3].sum(axis=1) == _numbers_of_values(manifest)
    mean, norm, low, high = sums[:, 4:].T
    values = np.stack([norm, mean, low, high], axis=1)
    counts[~is_whole] = 0
    values[~is_whole] = math.nan
    return {STATS_COUNTS: np.ascontiguousarray(counts[:, 1:]), STATS_VALUES: values}


def _numbers_of_values(manifest: Manifest) -> npt.NDArray[np.int64]:
    """Return the number of values of each key. A complex number has two; objects have -1."""
    numbers = []
    for dtype, shape in zip(manifest.dtypes, manifest.global_shapes, strict=True):
        if dtype == OBJECT:
            numbers.append(-1)
        elif dtype == "C64":
            numbers.append(2 * math.prod(shape))
        else:
            numbers.append(math.prod(shape))
    return np.array(numbers, np.int64)

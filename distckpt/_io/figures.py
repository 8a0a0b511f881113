"""Figures of tensors in memory: fingerprints, and statistics that a save stores.

Threads measure windows of regions, each rank puts the results of its own regions together, and the
coordinator those of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.dtypes import ITEM_BYTES
from distckpt._base.threads import run_threads
from distckpt._format.fingerprint import PRIME, region_number
from distckpt._format.manifest import (
    FINGERPRINTS,
    NO_FINGERPRINT,
    OBJECT,
    STATS_COUNTS,
    STATS_VALUES,
    KeyFigures,
    Manifest,
)
from distckpt._geometry.region import Region
from distckpt._geometry.units import cut_region
from distckpt._io.block_stats import BlockStats, block_stats, blocks_of, sums_of_rows
from distckpt._ranks.collectives import Ranks

TITLES = {"fingerprint": "fingerprints", "stats": "statistics"}
"""The name of the figures that an option of a save requests."""
WINDOW_ELEMENTS = 1 << 22
"""Elements that a thread works on at a time."""
_LOW_BITS = np.int64(0xFFFFFFFF)
_NUM_FIGURES = len(BlockStats._fields)

_Result = TypeVar("_Result")


class LiveRegion(NamedTuple):
    """A region of a tensor, its values, and its slot."""

    slot: int
    region: Region
    values: torch.Tensor


def numbers_of(name: str, regions: Sequence[LiveRegion]) -> bytes:
    """Return this rank's figures for each key, for `columns_of`."""
    if name == "stats":
        return _stats_of(regions)
    num_keys = 1 + max((region.slot for region in regions), default=-1)
    sums = np.array(sums_of(regions, num_keys), np.int64)
    key_ids = np.flatnonzero(sums)
    return np.column_stack([key_ids, sums[key_ids]]).tobytes()


def columns_of(name: str, manifest: Manifest, numbers: Sequence[bytes]) -> KeyFigures:
    """Put the figures of all ranks together; return manifest columns."""
    if name == "stats":
        return _columns_of_stats(manifest, numbers)
    totals = []
    for dtype in manifest.dtypes:
        if dtype in ITEM_BYTES:
            totals.append(0)
        else:
            totals.append(NO_FINGERPRINT)
    for key_id, number in np.frombuffer(b"".join(numbers), np.int64).reshape(-1, 2).tolist():
        totals[key_id] = (totals[key_id] + number) % PRIME
    return {FINGERPRINTS: np.array(totals, np.uint64)}


def _map_windows(
    regions: Iterable[LiveRegion], measure: Callable[[LiveRegion], _Result]
) -> list[tuple[int, _Result]]:
    """Measure windows of regions in threads; return slots and results, in order."""
    windows: list[LiveRegion] = []
    for live in regions:
        for part in cut_region(live.region, WINDOW_ELEMENTS):
            local = part.relative_to(live.region.offset).slices()
            windows.append(LiveRegion(live.slot, part, live.values[local]))
    results: dict[int, _Result] = {}

    def work(item: tuple[int, LiveRegion]) -> None:
        number, window = item
        results[number] = measure(window)

    run_threads(work, enumerate(windows))
    return [(window.slot, results[number]) for number, window in enumerate(windows)]


# --- Fingerprints ---------------------------------------------------------------------------------


def sums_of(regions: Iterable[LiveRegion], num_slots: int) -> list[int]:
    """Return the sum of the regions of each slot, modulo the prime."""
    sums = [0] * num_slots
    for slot, number in _map_windows(regions, _number_of):
        sums[slot] = (sums[slot] + number) % PRIME
    return sums


def _number_of(window: LiveRegion) -> int:
    return region_number(window.values, window.region.offset)


def sum_over_ranks(ranks: Ranks, numbers: Sequence[int]) -> list[int]:
    """Add up numbers of all ranks modulo the prime.

    Collective operation: all ranks must call it.
    """
    own = np.array(numbers, np.int64)
    # In halves, whose sums over any number of ranks fit 64 bits.
    halves = np.stack([own & _LOW_BITS, own >> 32])
    low, high = ranks.all_reduce_sum(halves, "add up fingerprints").tolist()
    return [(a + (b << 32)) % PRIME for a, b in zip(low, high, strict=True)]


# --- Statistics -----------------------------------------------------------------------------------


def _stats_of(regions: Iterable[LiveRegion]) -> bytes:
    rows = []
    for slot, blocks in _map_windows(regions, _stats_of_blocks):
        for block in blocks:
            rows.append((slot, *block))
    table = np.array(rows, np.float64).reshape(-1, 1 + _NUM_FIGURES)
    key_ids, slots = np.unique(table[:, 0].astype(np.int64), return_inverse=True)
    sums = sums_of_rows(table[:, 1:], slots, len(key_ids))
    return np.column_stack([key_ids, sums]).astype(np.float64).tobytes()


def _stats_of_blocks(window: LiveRegion) -> list[BlockStats]:
    values = window.values.detach().resolve_conj().resolve_neg().contiguous()
    return [block_stats(block) for block in blocks_of(values)]


def _columns_of_stats(manifest: Manifest, numbers: Sequence[bytes]) -> KeyFigures:
    """Put statistics together. A tensor has none if some of its elements are not saved."""
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

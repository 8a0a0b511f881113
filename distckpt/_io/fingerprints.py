"""Fingerprints of tensors in memory.

Threads add up the numbers of regions, and ranks add up their sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.dtypes import ITEM_BYTES
from distckpt._base.threads import run_threads
from distckpt._format.fingerprint import PRIME, region_number
from distckpt._format.manifest import FINGERPRINTS, NO_FINGERPRINT, Manifest
from distckpt._geometry.region import Region
from distckpt._geometry.units import cut_region
from distckpt._io.prepared_save import OwnedChunk
from distckpt._ranks.collectives import Ranks

WINDOW_ELEMENTS = 1 << 22
"""Elements that a thread works on at a time."""
_LOW_BITS = np.int64(0xFFFFFFFF)


class LiveRegion(NamedTuple):
    """A region of a tensor with its values, and its sum's slot."""

    slot: int
    region: Region
    values: torch.Tensor


def regions_of(owned: Iterable[OwnedChunk]) -> Iterator[LiveRegion]:
    """Return the regions of a rank's chunks; slots are the numbers of their keys."""
    for chunk, values in owned:
        for (_, region), part in zip(chunk.pieces, values, strict=True):
            yield LiveRegion(chunk.key_id, region, part)


def sums_of(regions: Iterable[LiveRegion], num_slots: int) -> list[int]:
    """Return the sum of the regions of each slot, modulo the prime."""
    windows: list[LiveRegion] = []
    for region in regions:
        windows.extend(windows_of(region))
    # One step for the interpreter each: no addition is lost.
    numbers: list[tuple[int, int]] = []

    def add(window: LiveRegion) -> None:
        numbers.append((window.slot, region_number(window.values, window.region.offset)))

    run_threads(add, windows)
    sums = [0] * num_slots
    for slot, number in numbers:
        sums[slot] = (sums[slot] + number) % PRIME
    return sums


def windows_of(live: LiveRegion) -> Iterator[LiveRegion]:
    """Cut a region into windows for threads."""
    for part in cut_region(live.region, WINDOW_ELEMENTS):
        local = part.relative_to(live.region.offset).slices()
        yield LiveRegion(live.slot, part, live.values[local] if local else live.values)


def numbers_of(owned: Iterable[OwnedChunk]) -> bytes:
    """Return this rank's sum for each key, for `columns_of`."""
    regions = list(regions_of(owned))
    key_ids = sorted({region.slot for region in regions})
    sums = sums_of(regions, max(key_ids, default=-1) + 1)
    return np.array([[key_id, sums[key_id]] for key_id in key_ids], np.int64).tobytes()


def columns_of(manifest: Manifest, numbers: Sequence[bytes]) -> dict[str, npt.NDArray[np.uint64]]:
    """Add up the numbers of all ranks; return a manifest column."""
    totals = []
    for dtype in manifest.dtypes:
        if dtype in ITEM_BYTES:
            totals.append(0)
        else:
            totals.append(NO_FINGERPRINT)
    for of_rank in numbers:
        for key_id, number in np.frombuffer(of_rank, np.int64).reshape(-1, 2).tolist():
            totals[key_id] = (totals[key_id] + number) % PRIME
    return {FINGERPRINTS: np.array(totals, np.uint64)}


def sum_over_ranks(ranks: Ranks, numbers: Sequence[int]) -> list[int]:
    """Add up numbers of all ranks modulo the prime.

    Collective operation: all ranks must call it.
    """
    own = np.array(numbers, np.int64)
    # In halves, whose sums over any number of ranks fit 64 bits.
    halves = np.stack([own & _LOW_BITS, own >> 32])
    low, high = ranks.all_reduce_sum(halves, "add up fingerprints").tolist()
    return [(a + (b << 32)) % PRIME for a, b in zip(low, high, strict=True)]

"""Planning shared reads: one of several ranks that request the same bytes reads them for all. Pure
functions.

A unit is the part of a `Copy` that one rank reads at a time. Equal copies are divided into equal
units on every rank, so that rank 0 can compare them by their numbers alone: `plan_shares` gives
each unit that several ranks request one reader, and puts all units in one order, in which every
rank sends and receives.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.dtypes import ITEM_BYTES
from distckpt._format.columns import pack, unpack
from distckpt._format.manifest import Manifest
from distckpt._geometry.region import (
    IntArray,
    Region,
    num_outer_axes,
    regions_to_arrays,
    row_hashes,
    widen,
)
from distckpt._geometry.units import cut_region
from distckpt._plan.load import Copy
from distckpt._plan.save import even_shares, lines

UNIT_BYTES = 2 << 20
"""Copies are divided into units of about this size: few enough to be planned, small enough to be
dealt out evenly.
"""
WAVE_BYTES = 64 << 20
"""Bytes that each rank reads in a wave."""


def divide(manifest: Manifest, copies: Sequence[Copy]) -> tuple[list[Copy], IntArray]:
    """Divide copies into units; return the units, and for each the index of its copy."""
    units: list[Copy] = []
    copy_of: list[int] = []
    for index, copy in enumerate(copies):
        item = ITEM_BYTES[manifest.dtypes[manifest.key_ids[copy.chunk]]]
        if copy.source.num_elements * item <= UNIT_BYTES:
            units.append(copy)
            copy_of.append(index)
            continue
        shape = manifest.chunk_region(copy.chunk).shape
        # Between blocks, so that each is read whole by one rank and can be verified. The blocks of
        # strided regions are not.
        is_run = manifest.has_checksums and num_outer_axes(shape, copy.source) == 0
        multiple = manifest.block_bytes // math.gcd(manifest.block_bytes, item) if is_run else 1
        for piece in cut_region(copy.source, UNIT_BYTES // item, shape=shape, multiple=multiple):
            target = tuple(
                map(int.__add__, piece.relative_to(copy.source.offset).offset, copy.target.offset)
            )
            units.append(Copy(copy.chunk, piece, copy.request, Region(target, piece.shape)))
            copy_of.append(index)
    return units, np.array(copy_of, np.int64)


class UnitTable(NamedTuple):
    """The units of one rank, without data: equal rows on several ranks are the same bytes in the
    same dtype.

    `rows` has shape (n, m); what its columns mean does not matter to planning. `num_bytes` (n,)
    counts what is read. Ranks share within their `group`, and only what is requested by ranks with
    two different values of `place`.
    """

    rows: IntArray
    num_bytes: IntArray
    group: int
    place: int

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return pack([self.group, self.place], {"rows": self.rows, "num_bytes": self.num_bytes})

    @classmethod
    def from_bytes(cls, data: bytes) -> UnitTable:
        """Decode what `to_bytes` made."""
        (group, place), columns = unpack(data)
        return cls(columns["rows"], columns["num_bytes"], group, place)


def describe_units(
    manifest: Manifest, units: Sequence[Copy], dtypes: Sequence[torch.dtype], group: int, place: int
) -> UnitTable:
    """Describe the units of this rank; `dtypes` has the dtype of the target of each request."""
    chunks = np.array([unit.chunk for unit in units], np.int64)
    codes = [zlib.crc32(str(dtype).encode()) for dtype in dtypes]
    offsets, shapes = regions_to_arrays([unit.source for unit in units])
    ndim = manifest.offsets.shape[1]
    kinds = np.array([chunks, [codes[unit.request] for unit in units]], np.int64).reshape(2, -1).T
    item_bytes = np.array([ITEM_BYTES.get(name, 0) for name in manifest.dtypes], np.int64)
    rows = np.concatenate([kinds, widen(offsets, ndim, 0), widen(shapes, ndim, 1)], axis=1)
    num_bytes = np.prod(shapes, axis=1, dtype=np.int64) * item_bytes[manifest.key_ids[chunks]]
    return UnitTable(rows, num_bytes, group, place)


class SharePlan(NamedTuple):
    """The part of one rank in a plan of `num_waves` waves.

    For each of its units, `readers` has the rank that reads it (-1: not shared), `sequence` its
    place in the order of all units, and `waves` the wave in which it is read and sent. The
    `send_units`, in that order, go to `send_ranks`. No rank requests more shared bytes than
    `most_bytes`.
    """

    num_waves: int
    most_bytes: int
    readers: IntArray
    sequence: IntArray
    waves: IntArray
    send_units: IntArray
    send_ranks: IntArray

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return pack(self[:2], dict(zip(self._fields[2:], self[2:], strict=True)))

    @classmethod
    def from_bytes(cls, data: bytes) -> SharePlan:
        """Decode what `to_bytes` made."""
        (num_waves, most_bytes), columns = unpack(data)
        return cls(num_waves, most_bytes, **columns)


def plan_shares(tables: Sequence[UnitTable]) -> list[SharePlan]:
    """Give every unit that several ranks request one reader, so that all ranks have about the same
    amount to read.
    """
    edges = np.cumsum([0, *(len(table.rows) for table in tables)]).tolist()
    num_bytes = np.concatenate([table.num_bytes for table in tables])
    holders = _find_holders(tables)
    read_alone = num_bytes.copy()
    read_alone[holders.rows] = 0
    loads = np.array([read_alone[low:high].sum() for low, high in itertools.pairwise(edges)])
    sizes = num_bytes[holders.rows[holders.starts[:-1]]]
    owners, turns = _choose_readers(holders, sizes, loads)
    sequence, waves = _put_in_order(owners, turns, sizes)

    # From units to the rows of each rank.
    units = np.repeat(np.arange(len(owners)), np.diff(holders.starts))
    columns = np.full((3, len(num_bytes)), -1, np.int64)
    columns[:, holders.rows] = np.stack([owners, sequence, waves])[:, units]
    is_owner = holders.ranks == owners[units]
    row_of_owner = holders.rows[is_owner]
    # What is sent, by sender.
    sends = np.flatnonzero(~is_owner)
    sends = sends[np.lexsort((sequence[units[sends]], owners[units[sends]]))]
    send_edges = np.searchsorted(owners[units[sends]], np.arange(len(tables) + 1))
    requested = np.bincount(holders.ranks, num_bytes[holders.rows], len(tables))
    num_waves, most_bytes = int(waves.max(initial=-1)) + 1, int(requested.max())
    plans = []
    bounds = zip(itertools.pairwise(edges), itertools.pairwise(send_edges.tolist()), strict=True)
    for (low, high), (first, last) in bounds:
        mine = sends[first:last]
        own = columns[:, low:high]
        send_units = row_of_owner[units[mine]] - low
        plans.append(
            SharePlan(
                num_waves, most_bytes, own[0], own[1], own[2], send_units, holders.ranks[mine]
            )
        )
    return plans


class _Holders(NamedTuple):
    """The ranks that request each shared unit.

    From `starts[i]` to `starts[i + 1]` are the `rows` of unit i (of all tables together) and their
    `ranks`, ascending.
    """

    rows: IntArray
    ranks: IntArray
    starts: IntArray


def _find_holders(tables: Sequence[UnitTable]) -> _Holders:
    counts = [len(table.rows) for table in tables]
    ranks = np.repeat(np.arange(len(tables)), counts)
    groups = np.repeat(np.array([table.group for table in tables], np.int64), counts)
    rows = np.column_stack([groups, np.concatenate([table.rows for table in tables])])
    hashes = row_hashes(list(rows.T))
    # Stable: equal rows stay in the order of their ranks.
    order = np.argsort(hashes, kind="stable")
    starts = _run_starts(hashes[order])
    unit = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    # Rows that share a hash by chance, or that a rank has twice, are read as if no other rank had
    # them.
    belongs = (rows[order] == rows[order[starts[:-1]]][unit]).all(axis=1)
    belongs[1:] &= (unit[1:] != unit[:-1]) | (ranks[order][1:] != ranks[order][:-1])
    order, unit = order[belongs], unit[belongs]
    _, places = np.unique(
        np.array([table.place for table in tables], np.int64), return_inverse=True
    )
    pairs = np.unique(unit * len(tables) + places[ranks[order]])
    is_shared = np.bincount(pairs // len(tables), minlength=len(starts) - 1)[unit] > 1
    order, unit = order[is_shared], unit[is_shared]
    # From the order of hashes to that in which the first rank with each unit named it.
    starts = _run_starts(unit)
    unit_rows = order[starts[:-1]]
    place_of_unit = np.empty(len(unit_rows), np.int64)
    place_of_unit[np.argsort(unit_rows, kind="stable")] = np.arange(len(unit_rows))
    back = np.argsort(np.repeat(place_of_unit, np.diff(starts)), kind="stable")
    lengths = np.diff(starts)[np.argsort(unit_rows, kind="stable")]
    return _Holders(order[back], ranks[order][back], np.append(0, np.cumsum(lengths)))


def _run_starts(values: npt.NDArray[np.generic]) -> IntArray:
    """Return where runs of equal values begin, and where the last one ends."""
    is_first = np.ones(len(values), np.bool_)
    is_first[1:] = values[1:] != values[:-1]
    return np.append(np.flatnonzero(is_first), len(values))


def _choose_readers(
    holders: _Holders, sizes: IntArray, loads: IntArray
) -> tuple[IntArray, IntArray]:
    """Deal out units with the same holders in runs, longer ones to ranks with less to read so far.

    Returns:
        For each unit its reader, and its place in the order in which units were dealt out.
    """
    loads = loads.copy()
    readers = np.zeros(len(sizes), np.int64)
    turns = np.zeros(len(sizes), np.int64)
    num_done = 0
    for members, candidates in lines(holders.ranks, holders.starts):
        shares = even_shares(loads[candidates], int(sizes[members].sum()))
        # A unit goes to the rank in whose share its middle lies.
        middles = np.cumsum(sizes[members]) - sizes[members] // 2
        part = np.minimum(np.searchsorted(np.cumsum(shares), middles), len(candidates) - 1)
        readers[members] = candidates[part]
        loads[candidates] += np.bincount(part, sizes[members], len(candidates)).astype(np.int64)
        turns[members] = num_done + np.arange(len(members))
        num_done += len(members)
    return readers, turns


def _put_in_order(
    readers: IntArray,
    turns: IntArray,
    sizes: IntArray,
) -> tuple[IntArray, IntArray]:
    """Let all readers go through their units side by side; return the place in the sequence and the
    wave of each unit.
    """
    mine = np.lexsort((turns, readers))
    before = np.cumsum(sizes[mine]) - sizes[mine]
    starts = _run_starts(readers[mine])
    position = np.empty(len(sizes), np.int64)
    position[mine] = before - np.repeat(before[starts[:-1]], np.diff(starts))
    sequence = np.empty(len(sizes), np.int64)
    sequence[np.lexsort((turns, readers, position))] = np.arange(len(sizes))
    return sequence, position // WAVE_BYTES

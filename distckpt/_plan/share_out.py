"""Plans of shared reads: one rank reads a region for several ranks.

Pure functions. Rank 0 plans for all ranks. Where it saves reading, `plan_shares` gives the region
around the units of a cell one reader, and puts all units in one order, in which every rank sends
and receives. There may be millions of units: columns use as few bytes per number as they need, and
are processed in parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt._format.columns import Column, joined_ranges, narrow
from distckpt._format.manifest import Manifest
from distckpt._geometry.region import IntArray, row_hashes
from distckpt._plan.save import even_shares, lines
from distckpt._plan.share import ReadCosts, SharePlan, UnitMessage, item_bytes_of

WAVE_BYTES = 64 << 20
"""Most bytes that each rank reads in a wave."""
MIN_WAVES = 16
"""Number of waves, unless they would have less than a 16th of `WAVE_BYTES`.

The first one is read before anything is sent, and the last one sent when nothing is left to read.
"""
MIN_SAVED = 1 / 8
"""Smallest saving, relative to the shared read, for which units are shared."""
NUM_SWEEPS = 6
"""Times that loads are evened out. Lines that have ranks in common change each other's."""
PART_ROWS = 1 << 17
"""Approximate number of rows processed at a time, which bounds the memory."""


def plan_shares(
    messages: list[bytes], costs: ReadCosts, max_held_bytes: int = WAVE_BYTES
) -> Iterator[bytes]:
    """Plan the shared reads of all ranks; yield each rank's encoded `SharePlan`.

    Every shared region has one reader; all ranks read similar amounts.

    Args:
        messages: the units of all ranks, see `UnitTable.to_bytes`. The list is emptied.
        costs: the costs of reading.
        max_held_bytes: limit of a rank's buffers in each wave, for regions that its targets cannot
            hold; a single region may exceed it.
    """
    units = _all_units(messages, costs.manifest.offsets.shape[1])
    regions_of_parts = [_shared_regions(units, rows, costs) for rows in _parts_of(units.names)]
    units = units._replace(names=())
    regions = _in_order_of_files(regions_of_parts, costs.manifest)
    order, choice = _choose(units, regions, max_held_bytes)
    regions = regions.take(order)
    yield from _plans_of_ranks(units, regions, choice)


class _AllUnits(NamedTuple):
    """The units of all ranks, rank by rank.

    Attributes:
        names: columns that are equal for units that may be shared: chunk, cell, and the number of a
            pair of group and dtype; empty once they are no longer needed.
        offsets: with `shapes`, the requested regions, of shape (n, ndim).
        shapes: see `offsets`.
        num_bytes: the bytes read without sharing.
        ranks: the rank of each unit.
        edges: the first unit of each rank, then the number of units.
        requested: the bytes that each rank would read without sharing.
        item_bytes: the element size of each pair of group and dtype.
    """

    names: tuple[Column, ...]
    offsets: Column
    shapes: Column
    num_bytes: Column
    ranks: Column
    edges: IntArray
    requested: IntArray
    item_bytes: IntArray


def _all_units(messages: list[bytes], ndim: int) -> _AllUnits:
    """Decode the units of all ranks into one table; the list is emptied."""
    units_of_ranks = [UnitMessage.of(data, ndim) for data in messages]
    messages.clear()
    edges = np.cumsum([0, *(units.num_units for units in units_of_ranks)])
    pairs: dict[tuple[int, int], int] = {}
    numbers = []
    for units in units_of_ranks:
        group = units.group
        numbers.append([pairs.setdefault((group, kind), len(pairs)) for kind in units.kinds])
    largest = np.max([units.largest for units in units_of_ranks], axis=0)
    chunks, cells, num_bytes = (_empty(edges[-1], largest[i]) for i in (0, 1, 3))
    offsets = _empty((edges[-1], ndim), largest[4 : 4 + ndim].max(initial=0))
    shapes = _empty((edges[-1], ndim), largest[4 + ndim :].max(initial=0))
    kinds = _empty(edges[-1], len(pairs))
    requested = np.zeros(len(units_of_ranks), np.int64)
    for rank, (low, high) in enumerate(itertools.pairwise(edges.tolist())):
        columns = units_of_ranks[rank].columns()
        chunks[low:high], cells[low:high], num_bytes[low:high] = columns[[0, 1, 3]]
        kinds[low:high] = np.array(numbers[rank], np.int64)[columns[2]]
        offsets[low:high] = columns[4 : 4 + ndim].T
        shapes[low:high] = columns[4 + ndim :].T
        requested[rank] = columns[3].sum()
        units_of_ranks[rank] = units_of_ranks[rank]._replace(data=b"")
    return _AllUnits(
        names=(chunks, cells, kinds),
        offsets=offsets,
        shapes=shapes,
        num_bytes=num_bytes,
        ranks=np.repeat(narrow(np.arange(len(units_of_ranks))), np.diff(edges)),
        edges=edges,
        requested=requested,
        item_bytes=np.array([item_bytes_of(kind) for _, kind in pairs], np.int64),
    )


def _empty(shape: Any, largest: int) -> Column:
    """Return an array of the narrowest dtype for the largest number."""
    return np.empty(shape, narrow(np.array([largest], np.int64)).dtype)


class _Regions(NamedTuple):
    """Regions that are read for several ranks.

    Attributes:
        rows: the rows of the units of each region, by ascending rank; region by region.
        counts: the number of units of each region.
        chunks: the chunk of each region.
        cells: the cell of each region.
        kinds: the pair of group and dtype of each region.
        offsets: with `shapes`, the region that is read of the chunk.
        shapes: see `offsets`.
        num_bytes: the cost of reading each region.
    """

    rows: Column
    counts: Column
    chunks: Column
    cells: Column
    kinds: Column
    offsets: Column
    shapes: Column
    num_bytes: Column

    @property
    def starts(self) -> IntArray:
        """The first row of each region, then the number of rows."""
        return _starts_of(self.counts)

    def take(self, regions: IntArray) -> _Regions:
        """Return some regions in the given order."""
        rows, _ = _in_order(self.rows, self.starts, regions)
        return _Regions(rows, *(column[regions] for column in self[1:]))


def _in_order_of_files(parts: list[_Regions], manifest: Manifest) -> _Regions:
    """Join regions in the order of their bytes in files; the list is emptied."""
    regions = _Regions(*map(np.concatenate, zip(*parts, strict=True)))
    parts.clear()
    chunks = regions.chunks.astype(np.int64)
    places = (manifest.first_bytes[chunks], manifest.file_ids[chunks])
    return regions.take(np.lexsort((regions.kinds, regions.cells, *places)))


def _parts_of(names: Sequence[Column]) -> Iterator[IntArray]:
    """Yield the rows of units in parts; equal names are in one part."""
    num_rows = len(names[0])
    num_parts = num_rows // PART_ROWS
    if num_parts < 2:
        yield np.arange(num_rows)
        return
    part_of = _empty(num_rows, num_parts)
    for first in range(0, num_rows, PART_ROWS):
        block = slice(first, first + PART_ROWS)
        part_of[block] = row_hashes([column[block] for column in names]) % np.uint64(num_parts)
    for number in range(num_parts):
        yield np.flatnonzero(part_of == number)


def _shared_regions(units: _AllUnits, rows: IntArray, costs: ReadCosts) -> _Regions:
    """Find the shared regions of some units: all with their names."""
    rows, starts = _rows_of_same(rows, [column[rows] for column in units.names])
    ranks = units.ranks[rows]
    differs = ranks != np.repeat(ranks[starts[:-1]], np.diff(starts))
    is_shared = np.logical_or.reduceat(differs, starts[:-1])
    rows, starts = _in_order(rows, starts, np.flatnonzero(is_shared))
    # The smallest region around all units is read.
    firsts = units.offsets[rows].astype(np.int64)
    offsets = np.minimum.reduceat(firsts, starts[:-1])
    shapes = np.maximum.reduceat(firsts + units.shapes[rows], starts[:-1]) - offsets
    chunks, cells, kinds = (column[rows[starts[:-1]]] for column in units.names)
    num_bytes = costs.of(chunks.astype(np.int64), offsets, shapes)
    # A request costs as much of a cell as where tensors are stored as they are.
    requests = costs.request_bytes * costs.stored_shares[chunks]
    alone = np.add.reduceat(units.num_bytes[rows], starts[:-1], dtype=np.int64)
    alone_with_requests = alone + np.diff(starts) * requests
    pays = np.flatnonzero(alone_with_requests > (1 + MIN_SAVED) * (num_bytes + requests))
    rows, starts = _in_order(rows, starts, pays)
    columns = (column[pays] for column in (chunks, cells, kinds, offsets, shapes, num_bytes))
    return _Regions(rows.astype(np.int32), *map(narrow, (np.diff(starts), *columns)))


def _rows_of_same(rows: IntArray, columns: Sequence[Column]) -> tuple[IntArray, IntArray]:
    """Group the rows that are equal in all columns.

    Return the rows group by group, and the start of each group.
    """
    hashes = row_hashes(columns)
    # Stable: equal rows stay in the order of their ranks.
    order = np.argsort(hashes, kind="stable")
    starts = _run_starts(hashes[order])
    first = order[np.repeat(starts[:-1], np.diff(starts))]
    # Rows that share a hash by chance are read without sharing.
    belongs = np.ones(len(order), np.bool_)
    for column in columns:
        belongs &= column[order] == column[first]
    return rows[order[belongs]], np.append(0, np.cumsum(belongs))[starts]


def _in_order(rows: Column, starts: IntArray, groups: IntArray) -> tuple[Column, IntArray]:
    """Return some groups of rows in the given order."""
    new_starts = _starts_of(np.diff(starts)[groups])
    new_rows = np.empty(new_starts[-1], rows.dtype)
    for low, high in _blocks(new_starts):
        block = _rows_of_groups(rows, starts, groups[low:high])
        new_rows[new_starts[low] : new_starts[high]] = block
    return new_rows, new_starts


def _rows_of_groups(rows: Column, starts: IntArray, groups: Column) -> Column:
    """Return the rows of some groups, one after the other."""
    firsts = starts[groups]
    rows_of_groups: Column = rows[joined_ranges(firsts, starts[groups + 1] - firsts)]
    return rows_of_groups


def _starts_of(counts: Column) -> IntArray:
    """Return the first row of each group, then the number of rows."""
    return np.append(0, np.cumsum(counts, dtype=np.int64))


def _blocks(starts: IntArray) -> Iterator[tuple[int, int]]:
    """Yield `(first, end)` of runs of groups with about `PART_ROWS` rows."""
    inner = np.searchsorted(starts, np.arange(PART_ROWS, starts[-1], PART_ROWS))
    for low, high in itertools.pairwise([0, *inner.tolist(), len(starts) - 1]):
        if low < high:
            yield low, high


def _run_starts(values: npt.NDArray[np.generic]) -> IntArray:
    """Return the starts of runs of equal values, then the end."""
    is_first = np.ones(len(values), np.bool_)
    is_first[1:] = values[1:] != values[:-1]
    return np.append(np.flatnonzero(is_first), len(values))


class _Choice(NamedTuple):
    """The decision about each region.

    Attributes:
        readers: the rank that reads it.
        waves: the wave in which it is read.
        whole_rows: the row of the reader's unit that is the whole region; -1 without one.
    """

    readers: Column
    waves: Column
    whole_rows: Column


def _choose(units: _AllUnits, regions: _Regions, max_held_bytes: int) -> tuple[IntArray, _Choice]:
    """Return an order of the regions, and the choices in this order.

    All ranks process regions in this order.
    """
    loads = units.requested - _bytes_alone(units, regions.rows)
    sizes = regions.num_bytes.astype(np.int64)
    readers, turns = _choose_readers(*_holders_of(units, regions), sizes, loads)
    whole_rows = _whole_rows(units, regions, readers)
    # Regions that need a buffer weigh more.
    factor = WAVE_BYTES / max(1, min(WAVE_BYTES, max_held_bytes))
    buffer_bytes = np.prod(regions.shapes, axis=1, dtype=np.int64) * units.item_bytes[regions.kinds]
    weights = np.where(whole_rows < 0, (buffer_bytes * factor).astype(np.int64), sizes)
    order, waves = _put_in_order(readers, turns, weights)
    return order, _Choice(readers[order], waves[order], whole_rows[order])


def _bytes_alone(units: _AllUnits, rows: Column) -> IntArray:
    """Return the bytes of some units that each rank would read alone."""
    total = np.zeros(len(units.requested), np.int64)
    for first in range(0, len(rows), PART_ROWS):
        part = rows[first : first + PART_ROWS]
        sums = np.bincount(units.ranks[part], units.num_bytes[part], len(total))
        total += sums.astype(np.int64)
    return total


def _holders_of(units: _AllUnits, regions: _Regions) -> tuple[Column, IntArray]:
    """Return the ranks that request parts of each region.

    Also return the first of each region's ranks, then their number.
    """
    holders = units.ranks[regions.rows]
    firsts = regions.starts[:-1]
    is_new = np.ones(len(holders), np.bool_)
    is_new[1:] = holders[1:] != holders[:-1]
    is_new[firsts] = True
    return holders[is_new], _starts_of(np.add.reduceat(is_new, firsts, dtype=np.int64))


def _choose_readers(
    holders: Column, starts: IntArray, sizes: IntArray, loads: IntArray
) -> tuple[Column, Column]:
    """Distribute regions with the same holders in runs.

    Ranks with lower loads get longer runs.

    Returns:
        For each region its reader, and its position in the order of distribution.
    """
    loads = loads.copy()
    readers, turns = np.zeros((2, len(sizes)), np.int32)
    num_done = 0
    all_lines = list(lines(holders, starts))
    shares_of_lines = [np.zeros(len(candidates), np.int64) for _, candidates in all_lines]
    for sweep in range(NUM_SWEEPS):
        for number, (members, candidates) in enumerate(all_lines):
            loads[candidates] -= shares_of_lines[number]
            shares = even_shares(loads[candidates], int(sizes[members].sum()))
            if sweep == NUM_SWEEPS - 1:
                # A region goes to the rank whose share contains its middle.
                middles = np.cumsum(sizes[members]) - sizes[members] // 2
                part = np.minimum(np.searchsorted(np.cumsum(shares), middles), len(candidates) - 1)
                readers[members] = candidates[part]
                shares = np.bincount(part, sizes[members], len(candidates)).astype(np.int64)
                turns[members] = num_done + np.arange(len(members))
                num_done += len(members)
            loads[candidates] += shares
            shares_of_lines[number] = shares
    return readers, turns


def _put_in_order(readers: Column, turns: Column, weights: IntArray) -> tuple[IntArray, Column]:
    """Interleave the regions of all readers by bytes read.

    Return the regions in this order, and the wave of each.
    """
    by_reader = np.lexsort((turns, readers))
    before = np.cumsum(weights[by_reader]) - weights[by_reader]
    starts = _run_starts(readers[by_reader])
    position = np.empty(len(weights), np.int64)
    position[by_reader] = before - np.repeat(before[starts[:-1]], np.diff(starts))
    size = (position.max(initial=0) // MIN_WAVES + 1).clip(WAVE_BYTES // MIN_WAVES, WAVE_BYTES)
    return np.lexsort((turns, readers, position)), narrow(position // size)


def _whole_rows(units: _AllUnits, regions: _Regions, readers: Column) -> Column:
    """Return the reader's unit that is the whole region, or -1."""
    whole_rows = np.full(len(readers), -1, np.int32)
    starts = regions.starts
    for low, high in _blocks(starts):
        rows = regions.rows[starts[low] : starts[high]]
        region = np.repeat(np.arange(low, high), regions.counts[low:high])
        is_whole = (units.shapes[rows] == regions.shapes[region]).all(axis=1)
        is_whole &= units.ranks[rows] == readers[region]
        whole_rows[region[is_whole]] = rows[is_whole]
    return whole_rows


def _plans_of_ranks(units: _AllUnits, regions: _Regions, choice: _Choice) -> Iterator[bytes]:
    """Encode the part of each rank; regions are in the order of the plan."""
    ranks = np.arange(len(units.requested) + 1)
    by_reader = np.argsort(choice.readers, kind="stable").astype(np.int32)
    read_edges = np.searchsorted(choice.readers[by_reader], ranks)
    numbers = np.empty(len(by_reader), np.int32)
    numbers[by_reader] = np.arange(len(by_reader)) - read_edges[choice.readers[by_reader]]
    columns = _PlanColumns(
        units, regions, regions.starts, choice, numbers, *_places_of(units, regions)
    )
    num_waves = 0
    if len(choice.waves):
        num_waves = int(choice.waves.max()) + 1
    most_bytes = int(_bytes_alone(units, regions.rows).max())
    head = [num_waves, most_bytes, _bytes_sent(units, regions, choice)]
    for low, high in _blocks(units.edges):
        reads = by_reader[read_edges[low] : read_edges[high]]
        sends, senders = columns.sends(reads)
        columns_of_ranks = zip(
            _split_by_rank(
                columns.units_between(units.edges[low], units.edges[high]),
                units.edges[low : high + 1],
            ),
            _split_by_rank(columns.reads(reads), read_edges[low : high + 1]),
            _split_by_rank(sends, np.searchsorted(senders, ranks[low : high + 1])),
            strict=True,
        )
        for parts in columns_of_ranks:
            yield SharePlan.encode(head, regions.shapes.shape[1], parts)


def _bytes_sent(units: _AllUnits, regions: _Regions, choice: _Choice) -> int:
    """Return the bytes that readers send to other ranks."""
    total = 0
    starts = regions.starts
    for low, high in _blocks(starts):
        rows = regions.rows[starts[low] : starts[high]]
        region = np.repeat(np.arange(low, high), regions.counts[low:high])
        sizes = np.prod(units.shapes[rows], axis=1, dtype=np.int64)
        sizes *= units.item_bytes[regions.kinds[region]]
        total += int(sizes[units.ranks[rows] != choice.readers[region]].sum())
    return total


def _split_by_rank(columns: IntArray, edges: IntArray) -> Iterator[IntArray]:
    """Yield the columns between the edges of ranks; the first edge is the beginning."""
    for low, high in itertools.pairwise((edges - edges[0]).tolist()):
        yield columns[:, low:high]


def _places_of(units: _AllUnits, regions: _Regions) -> tuple[Column, Column]:
    """Return each unit's position in the plan, and its region.

    Both are -1 if the unit is not shared.
    """
    sequence, region_of = np.full((2, len(units.ranks)), -1, np.int32)
    sequence[regions.rows] = np.arange(len(regions.rows), dtype=np.int32)
    numbers = np.arange(len(regions.counts), dtype=np.int32)
    region_of[regions.rows] = np.repeat(numbers, regions.counts)
    return sequence, region_of


class _PlanColumns(NamedTuple):
    """The columns of a `SharePlan`, computed for some ranks at a time.

    Attributes:
        units: the units of all ranks.
        regions: the regions in the order of the plan.
        starts: the first row of each region.
        choice: the decisions about regions.
        numbers: the number of each region among the regions of its reader.
        sequence: see `_places_of`.
        region_of: see `_places_of`.
    """

    units: _AllUnits
    regions: _Regions
    starts: IntArray
    choice: _Choice
    numbers: Column
    sequence: Column
    region_of: Column

    def units_between(self, low: int, high: int) -> IntArray:
        """Return the columns of some units."""
        columns = np.full((4, high - low), -1, np.int64)
        shared = low + np.flatnonzero(self.region_of[low:high] >= 0)
        region = self.region_of[shared]
        readers = self.choice.readers[region]
        waves = self.choice.waves[region]
        is_own = self.units.ranks[shared] == readers
        reads = np.where(is_own, self.numbers[region], -1)
        columns[:, shared - low] = (readers, self.sequence[shared], waves, reads)
        return columns

    def reads(self, reads: Column) -> IntArray:
        """Return the columns of regions that ranks read."""
        wholes = self.choice.whole_rows[reads]
        firsts = self.units.edges[self.choice.readers[reads]]
        whole_units = np.where(wholes < 0, -1, wholes - firsts)
        regions = (self.regions.offsets[reads].T, self.regions.shapes[reads].T)
        columns = (self.regions.chunks[reads], self.choice.waves[reads], whole_units)
        return np.vstack((*columns, *regions), dtype=np.int64)

    def sends(self, reads: Column) -> tuple[IntArray, Column]:
        """Return the columns of messages about regions, and their senders."""
        rows = _rows_of_groups(self.regions.rows, self.starts, reads)
        region = np.repeat(reads, self.regions.counts[reads])
        is_sent = self.units.ranks[rows] != self.choice.readers[region]
        rows = rows[is_sent]
        region = region[is_sent]
        regions = (self.units.offsets[rows].T, self.units.shapes[rows].T)
        columns = (self.numbers[region], self.units.ranks[rows], self.sequence[rows])
        return np.vstack((*columns, *regions), dtype=np.int64), self.choice.readers[region]

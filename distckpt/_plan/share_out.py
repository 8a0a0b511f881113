"""Plans of shared reads: one rank reads a region for several ranks.

Pure functions. Rank 0 plans for all ranks. Where it saves reading, `plan_shares` gives the region
around the units of a cell one reader, and puts all units in one order, in which every rank sends
and receives. There may be millions of units: columns use as few bytes per number as they need, and
are compared in parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt._format.columns import Column, narrow
from distckpt._format.manifest import Manifest
from distckpt._geometry.region import IntArray, row_hashes
from distckpt._plan.save import even_shares, lines
from distckpt._plan.share import ReadCosts, SharePlan, UnitTable, item_bytes_of

WAVE_BYTES = 64 << 20
"""Bytes that each rank reads in a wave."""
MIN_SAVED = 1 / 8
"""Smallest saving, relative to the shared read, for which units are shared."""
PART_ROWS = 1 << 17
"""Approximate number of units compared at a time, which bounds the memory."""


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
        places: the place of each rank.
        requested: the bytes that each rank would read without sharing.
        item_bytes: the element size of each pair of group and dtype.
    """

    names: tuple[Column, ...]
    offsets: Column
    shapes: Column
    num_bytes: Column
    ranks: Column
    edges: IntArray
    places: IntArray
    requested: IntArray
    item_bytes: IntArray


def _all_units(messages: list[bytes], ndim: int) -> _AllUnits:
    """Decode the units of all ranks into one table; the list is emptied."""
    pairs: dict[tuple[int, int], int] = {}
    counts = [0]
    places = []
    requested = []
    columns_of_ranks = []
    for data in messages:
        table, kinds = UnitTable.from_bytes(data, ndim)
        numbers = [pairs.setdefault((table.group, kind), len(pairs)) for kind in kinds]
        chunks, cells, kind = table.names.T
        pair = np.array(numbers, np.int64)[kind]
        columns_of_ranks.append((chunks, cells, pair, table.offsets, table.shapes, table.num_bytes))
        counts.append(len(kind))
        places.append(table.place)
        requested.append(table.num_bytes.sum())
    messages.clear()
    joined = [narrow(np.concatenate(columns)) for columns in zip(*columns_of_ranks, strict=True)]
    chunks, cells, pair, offsets, shapes, num_bytes = joined
    return _AllUnits(
        names=(chunks, cells, pair),
        offsets=offsets,
        shapes=shapes,
        num_bytes=num_bytes,
        ranks=np.repeat(narrow(np.arange(len(places))), counts[1:]),
        edges=np.cumsum(counts),
        places=np.array(places, np.int64),
        requested=np.array(requested, np.int64),
        item_bytes=np.array([item_bytes_of(kind) for _, kind in pairs], np.int64),
    )


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
    num_parts = max(1, len(names[0]) // PART_ROWS)
    part_of = row_hashes(names) % np.uint64(num_parts)
    for number in range(num_parts):
        yield np.flatnonzero(part_of == number)


def _shared_regions(units: _AllUnits, rows: IntArray, costs: ReadCosts) -> _Regions:
    """Find the shared regions of some units: all with their names."""
    rows, starts = _rows_of_same(rows, [column[rows] for column in units.names])
    places = units.places[units.ranks[rows]]
    differs = places != np.repeat(places[starts[:-1]], np.diff(starts))
    is_shared = np.logical_or.reduceat(differs, starts[:-1])
    rows, starts = _in_order(rows, starts, np.flatnonzero(is_shared))
    # The smallest region around all units is read.
    firsts = units.offsets[rows].astype(np.int64)
    offsets = np.minimum.reduceat(firsts, starts[:-1])
    shapes = np.maximum.reduceat(firsts + units.shapes[rows], starts[:-1]) - offsets
    chunks, cells, kinds = (column[rows[starts[:-1]]] for column in units.names)
    num_bytes = costs.of(chunks.astype(np.int64), offsets, shapes)
    alone = np.add.reduceat(units.num_bytes[rows], starts[:-1], dtype=np.int64)
    pays = np.flatnonzero(alone > (1 + MIN_SAVED) * num_bytes)
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
    firsts = starts[groups]
    counts = starts[groups + 1] - firsts
    ends = np.cumsum(counts)
    within = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
    return rows[np.repeat(firsts, counts) + within], _starts_of(counts)


def _starts_of(counts: Column) -> IntArray:
    """Return the first row of each group, then the number of rows."""
    return np.append(0, np.cumsum(counts, dtype=np.int64))


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
    sums = np.bincount(units.ranks[rows], units.num_bytes[rows], len(units.places))
    return sums.astype(np.int64)


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
    for members, candidates in lines(holders, starts):
        shares = even_shares(loads[candidates], int(sizes[members].sum()))
        # A region goes to the rank whose share contains its middle.
        middles = np.cumsum(sizes[members]) - sizes[members] // 2
        part = np.minimum(np.searchsorted(np.cumsum(shares), middles), len(candidates) - 1)
        readers[members] = candidates[part]
        loads[candidates] += np.bincount(part, sizes[members], len(candidates)).astype(np.int64)
        turns[members] = num_done + np.arange(len(members))
        num_done += len(members)
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
    return np.lexsort((turns, readers, position)), narrow(position // WAVE_BYTES)


def _whole_rows(units: _AllUnits, regions: _Regions, readers: Column) -> Column:
    """Return the reader's unit that is the whole region, or -1."""
    whole_rows = np.full(len(readers), -1, np.int32)
    rows = regions.rows
    region = np.repeat(np.arange(len(readers)), regions.counts)
    is_whole = (units.shapes[rows] == regions.shapes[region]).all(axis=1)
    is_whole &= units.ranks[rows] == readers[region]
    whole_rows[region[is_whole]] = rows[is_whole]
    return whole_rows


def _plans_of_ranks(units: _AllUnits, regions: _Regions, choice: _Choice) -> Iterator[bytes]:
    """Encode the part of each rank; regions are in the order of the plan."""
    ranks = np.arange(len(units.places) + 1)
    reads = np.argsort(choice.readers, kind="stable")
    read_edges = np.searchsorted(choice.readers[reads], ranks)
    # The number of each region among the regions of its reader.
    numbers = np.empty(len(reads), np.int64)
    numbers[reads] = np.arange(len(reads)) - read_edges[choice.readers[reads]]
    sends, senders = _columns_of_sends(units, regions, choice, reads, numbers)
    columns_of_ranks = zip(
        _split_by_rank(_columns_of_units(units, regions, choice, numbers), units.edges),
        _split_by_rank(_columns_of_reads(units, regions, choice, reads), read_edges),
        _split_by_rank(sends, np.searchsorted(senders, ranks)),
        strict=True,
    )
    num_waves = 0
    if len(choice.waves):
        num_waves = int(choice.waves.max()) + 1
    most_bytes = int(_bytes_alone(units, regions.rows).max())
    for columns in columns_of_ranks:
        yield SharePlan.encode(num_waves, most_bytes, regions.shapes.shape[1], columns)


def _split_by_rank(columns: IntArray, edges: IntArray) -> Iterator[IntArray]:
    """Yield the columns between the edges of ranks."""
    for low, high in itertools.pairwise(edges.tolist()):
        yield columns[:, low:high]


def _columns_of_units(
    units: _AllUnits, regions: _Regions, choice: _Choice, numbers: IntArray
) -> IntArray:
    """Return the columns of all units; -1 if they are not shared."""
    columns = np.full((4, len(units.ranks)), -1, np.int64)
    rows = regions.rows
    region = np.repeat(np.arange(len(numbers)), regions.counts)
    readers = choice.readers[region]
    reads = np.where(units.ranks[rows] == readers, numbers[region], -1)
    columns[:, rows] = (readers, np.arange(len(rows)), choice.waves[region], reads)
    return columns


def _columns_of_reads(
    units: _AllUnits, regions: _Regions, choice: _Choice, reads: IntArray
) -> IntArray:
    """Return the columns of regions that ranks read."""
    wholes = choice.whole_rows[reads]
    whole_units = np.where(wholes < 0, -1, wholes - units.edges[choice.readers[reads]])
    columns = (regions.chunks[reads], choice.waves[reads], whole_units)
    return np.vstack((*columns, regions.offsets[reads].T, regions.shapes[reads].T), dtype=np.int64)


def _columns_of_sends(
    units: _AllUnits, regions: _Regions, choice: _Choice, reads: IntArray, numbers: IntArray
) -> tuple[IntArray, Column]:
    """Return the columns of messages about regions, and their senders."""
    places, _ = _in_order(np.arange(len(regions.rows)), regions.starts, reads)
    region = np.repeat(reads, regions.counts[reads])
    is_sent = units.ranks[regions.rows[places]] != choice.readers[region]
    places = places[is_sent]
    region = region[is_sent]
    rows = regions.rows[places]
    columns = (numbers[region], units.ranks[rows], places)
    sends = np.vstack((*columns, units.offsets[rows].T, units.shapes[rows].T), dtype=np.int64)
    return sends, choice.readers[region]

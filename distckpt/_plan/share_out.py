"""Sharing out what several ranks request parts of: one reads it for all. Rank 0 does this for all
ranks. Pure functions.

Where it saves reading, `plan_shares` gives the region that the units of a cell span one reader, and
puts all units in one order, in which every rank sends and receives. There may be millions of units:
columns have as few bytes for each number as they need, and are gone through in parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt._format.columns import Column, narrow
from distckpt._format.manifest import Manifest
from distckpt._geometry.region import IntArray, row_hashes
from distckpt._plan.save import even_shares, lines
from distckpt._plan.share import ReadCosts, SharePlan, UnitMessage, item_bytes_of

WAVE_BYTES = 64 << 20
"""Bytes that each rank reads in a wave."""
MIN_SAVED = 1 / 8
"""Units are shared if without that at least so much more would be read."""
PART_ROWS = 1 << 17
"""Tables of units are gone through in parts of about this many rows, which bounds the memory."""


def plan_shares(
    messages: list[bytes], costs: ReadCosts, max_held_bytes: int = WAVE_BYTES
) -> Iterator[bytes]:
    """Give what several ranks request parts of one reader, so that all ranks have about the same
    amount to read; yield for each rank its `SharePlan`, encoded.

    Of what its targets cannot hold, a rank reads `max_held_bytes` in a wave, or one region.

    Args:
        messages: of all ranks, see `UnitTable.to_bytes`. The list is emptied meanwhile.
        costs: of reading.
        max_held_bytes: see above.
    """
    units = _all_units(messages, costs.manifest.offsets.shape[1])
    found = [_shared_among(units, rows, costs) for rows in _parts_of(units.names)]
    units = units._replace(names=())
    regions = _in_order_of_files(found, costs.manifest)
    order, choice = _choose(units, regions, max_held_bytes)
    regions = regions.take(order)
    yield from _plans_of_ranks(units, regions, choice)


class _AllUnits(NamedTuple):
    """The units of all ranks, rank by rank.

    Attributes:
        names: columns that are equal for what may be shared: chunk, cell, and number of a pair of a
            group and a dtype; none when they are no longer needed.
        offsets: with `shapes`, of shape (n, ndim).
        num_bytes: that would be read without sharing,
        ranks: and which rank would.
        edges: where the units of each rank begin, and the end.
        places: of the ranks.
        requested: bytes that each rank would read without sharing.
        item_bytes: for each pair of a group and a dtype.
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
    """Put together what ranks tell of their units; the list is emptied meanwhile."""
    told = [UnitMessage.of(data, ndim) for data in messages]
    messages.clear()
    edges = np.cumsum([0, *(each.num_units for each in told)])
    pairs: dict[tuple[int, int], int] = {}
    numbers = [
        [pairs.setdefault((each.group, kind), len(pairs)) for kind in each.kinds] for each in told
    ]
    largest = np.max([each.largest for each in told], axis=0)
    chunks, cells, num_bytes = (_empty(edges[-1], largest[i]) for i in (0, 1, 3))
    offsets = _empty((edges[-1], ndim), largest[4 : 4 + ndim].max(initial=0))
    shapes = _empty((edges[-1], ndim), largest[4 + ndim :].max(initial=0))
    kinds = _empty(edges[-1], len(pairs))
    requested = np.zeros(len(told), np.int64)
    for rank, (low, high) in enumerate(itertools.pairwise(edges.tolist())):
        columns = told[rank].columns()
        chunks[low:high], cells[low:high], num_bytes[low:high] = columns[[0, 1, 3]]
        kinds[low:high] = np.array(numbers[rank], np.int64)[columns[2]]
        offsets[low:high], shapes[low:high] = columns[4 : 4 + ndim].T, columns[4 + ndim :].T
        requested[rank] = columns[3].sum()
        told[rank] = told[rank]._replace(data=b"")
    return _AllUnits(
        names=(chunks, cells, kinds),
        offsets=offsets,
        shapes=shapes,
        num_bytes=num_bytes,
        ranks=np.repeat(narrow(np.arange(len(told))), np.diff(edges)),
        edges=edges,
        places=np.array([each.place for each in told], np.int64),
        requested=requested,
        item_bytes=np.array([item_bytes_of(kind) for _, kind in pairs], np.int64),
    )


def _empty(shape: Any, largest: int) -> Column:
    """Return an array whose numbers have as few bytes as the largest one takes."""
    return np.empty(shape, narrow(np.array([largest], np.int64)).dtype)


class _Regions(NamedTuple):
    """Regions that are read for several ranks.

    Attributes:
        rows: of the units of each region, their ranks ascending; region by region.
        counts: how many each region has.
        chunks: with `cells` and `kinds` the names of the units,
        offsets: with `shapes` what is read of the chunk,
        num_bytes: and what it takes to read.
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
        """Where the rows of each region begin, and the end."""
        return _starts_of(self.counts)

    def take(self, regions: IntArray) -> _Regions:
        """Return some regions in the given order."""
        rows, _ = _in_order(self.rows, self.starts, regions)
        return _Regions(rows, *(column[regions] for column in self[1:]))


def _in_order_of_files(found: list[_Regions], manifest: Manifest) -> _Regions:
    """Join regions, in an order in which ranks read on and on in few files. The list is emptied."""
    regions = _Regions(*map(np.concatenate, zip(*found, strict=True)))
    found.clear()
    chunks = regions.chunks.astype(np.int64)
    places = (manifest.first_bytes[chunks], manifest.file_ids[chunks])
    return regions.take(np.lexsort((regions.kinds, regions.cells, *places)))


def _parts_of(names: Sequence[Column]) -> Iterator[IntArray]:
    """Yield the rows of units in parts, those with equal names in the same one."""
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


def _shared_among(units: _AllUnits, rows: IntArray, costs: ReadCosts) -> _Regions:
    """Find what is shared among some units, which have all of their names."""
    rows, starts = _rows_of_same(rows, [column[rows] for column in units.names])
    places = units.places[units.ranks[rows]]
    differs = places != np.repeat(places[starts[:-1]], np.diff(starts))
    is_shared = np.logical_or.reduceat(differs, starts[:-1])
    rows, starts = _in_order(rows, starts, np.flatnonzero(is_shared))
    # What is read is the smallest region around all units.
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
    """Group the rows that are equal in all columns; return the rows group by group, and where
    groups begin.
    """
    hashes = row_hashes(columns)
    # Stable: equal rows stay in the order of their ranks.
    order = np.argsort(hashes, kind="stable")
    starts = _run_starts(hashes[order])
    first = order[np.repeat(starts[:-1], np.diff(starts))]
    # Rows that share a hash by chance are read as if no other rank had them.
    belongs = np.ones(len(order), np.bool_)
    for column in columns:
        belongs &= column[order] == column[first]
    return rows[order[belongs]], np.append(0, np.cumsum(belongs))[starts]


def _in_order(rows: Column, starts: IntArray, groups: IntArray) -> tuple[Column, IntArray]:
    """Return some groups of rows in the given order."""
    new_starts = _starts_of(np.diff(starts)[groups])
    taken = np.empty(new_starts[-1], rows.dtype)
    for low, high in _blocks(new_starts):
        taken[new_starts[low] : new_starts[high]] = _of_groups(rows, starts, groups[low:high])
    return taken, new_starts


def _of_groups(rows: Column, starts: IntArray, groups: Column) -> Column:
    """Return the rows of some groups, one after the other."""
    firsts, counts = starts[groups], starts[groups + 1] - starts[groups]
    ends = np.cumsum(counts)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    found: Column = rows[np.repeat(firsts, counts) + within]
    return found


def _starts_of(counts: Column) -> IntArray:
    """Return where groups of so many rows begin, and the end."""
    return np.append(0, np.cumsum(counts, dtype=np.int64))


def _blocks(starts: IntArray) -> Iterator[tuple[int, int]]:
    """Yield the first group and the end of runs of groups that have about as many rows as a
    part.
    """
    inner = np.searchsorted(starts, np.arange(PART_ROWS, starts[-1], PART_ROWS))
    for low, high in itertools.pairwise([0, *inner.tolist(), len(starts) - 1]):
        if low < high:
            yield low, high


def _run_starts(values: npt.NDArray[np.generic]) -> IntArray:
    """Return where runs of equal values begin, and where the last one ends."""
    is_first = np.ones(len(values), np.bool_)
    is_first[1:] = values[1:] != values[:-1]
    return np.append(np.flatnonzero(is_first), len(values))


class _Choice(NamedTuple):
    """What was decided about each region: its reader, its wave, and the unit of the reader, as a
    row of all units, that is the whole region (-1: none is).
    """

    readers: Column
    waves: Column
    whole_rows: Column


def _choose(units: _AllUnits, regions: _Regions, max_held_bytes: int) -> tuple[IntArray, _Choice]:
    """Return the regions in the order in which ranks go through them, and in this order what was
    decided about each.
    """
    loads = units.requested - _bytes_alone(units, regions.rows)
    sizes = regions.num_bytes.astype(np.int64)
    readers, turns = _choose_readers(*_holders_of(units, regions), sizes, loads)
    whole_rows = _whole_rows(units, regions, readers)
    # What must be held besides the targets counts as more.
    factor = WAVE_BYTES / max(1, min(WAVE_BYTES, max_held_bytes))
    held = np.prod(regions.shapes, axis=1, dtype=np.int64) * units.item_bytes[regions.kinds]
    weights = np.where(whole_rows < 0, (held * factor).astype(np.int64), sizes)
    order, waves = _put_in_order(readers, turns, weights)
    return order, _Choice(readers[order], waves[order], whole_rows[order])


def _bytes_alone(units: _AllUnits, rows: Column) -> IntArray:
    """Return how many bytes of some units each rank would read without sharing."""
    total = np.zeros(len(units.places), np.int64)
    for first in range(0, len(rows), PART_ROWS):
        part = rows[first : first + PART_ROWS]
        sums = np.bincount(units.ranks[part], units.num_bytes[part], len(total))
        total += sums.astype(np.int64)
    return total


def _holders_of(units: _AllUnits, regions: _Regions) -> tuple[Column, IntArray]:
    """Return the ranks that request some of each region, and where those of each region begin."""
    holders, firsts = units.ranks[regions.rows], regions.starts[:-1]
    is_new = np.ones(len(holders), np.bool_)
    is_new[1:] = holders[1:] != holders[:-1]
    is_new[firsts] = True
    return holders[is_new], _starts_of(np.add.reduceat(is_new, firsts, dtype=np.int64))


def _choose_readers(
    holders: Column, starts: IntArray, sizes: IntArray, loads: IntArray
) -> tuple[Column, Column]:
    """Deal out regions with the same holders in runs, longer ones to ranks with less to read so
    far.

    Returns:
        For each region its reader, and its place in the order in which regions were dealt out.
    """
    loads = loads.copy()
    readers, turns = np.zeros((2, len(sizes)), np.int32)
    num_done = 0
    for members, candidates in lines(holders, starts):
        shares = even_shares(loads[candidates], int(sizes[members].sum()))
        # A region goes to the rank in whose share its middle lies.
        middles = np.cumsum(sizes[members]) - sizes[members] // 2
        part = np.minimum(np.searchsorted(np.cumsum(shares), middles), len(candidates) - 1)
        readers[members] = candidates[part]
        loads[candidates] += np.bincount(part, sizes[members], len(candidates)).astype(np.int64)
        turns[members] = num_done + np.arange(len(members))
        num_done += len(members)
    return readers, turns


def _put_in_order(readers: Column, turns: Column, weights: IntArray) -> tuple[IntArray, Column]:
    """Let all readers go through their regions side by side; return the regions in this order, and
    the wave of each.
    """
    mine = np.lexsort((turns, readers))
    before = np.cumsum(weights[mine]) - weights[mine]
    starts = _run_starts(readers[mine])
    position = np.empty(len(weights), np.int64)
    position[mine] = before - np.repeat(before[starts[:-1]], np.diff(starts))
    return np.lexsort((turns, readers, position)), narrow(position // WAVE_BYTES)


def _whole_rows(units: _AllUnits, regions: _Regions, readers: Column) -> Column:
    """Return for each region the row of a unit of its reader that is all of it; -1 if none is."""
    whole_rows, starts = np.full(len(readers), -1, np.int32), regions.starts
    for low, high in _blocks(starts):
        rows = regions.rows[starts[low] : starts[high]]
        region = np.repeat(np.arange(low, high), regions.counts[low:high])
        is_whole = (units.shapes[rows] == regions.shapes[region]).all(axis=1)
        is_whole &= units.ranks[rows] == readers[region]
        whole_rows[region[is_whole]] = rows[is_whole]
    return whole_rows


def _plans_of_ranks(units: _AllUnits, regions: _Regions, choice: _Choice) -> Iterator[bytes]:
    """Encode the part of each rank; the order of the regions is that of the plan."""
    ranks = np.arange(len(units.places) + 1)
    by_reader = np.argsort(choice.readers, kind="stable").astype(np.int32)
    read_edges = np.searchsorted(choice.readers[by_reader], ranks)
    numbers = np.empty(len(by_reader), np.int32)
    numbers[by_reader] = np.arange(len(by_reader)) - read_edges[choice.readers[by_reader]]
    columns = _PlanColumns(
        units, regions, regions.starts, choice, numbers, *_places_of(units, regions)
    )
    num_waves = int(choice.waves.max()) + 1 if len(choice.waves) else 0
    most_bytes = int(_bytes_alone(units, regions.rows).max())
    for low, high in _blocks(units.edges):
        reads = by_reader[read_edges[low] : read_edges[high]]
        sends, readers = columns.of_sends(reads)
        cut = (
            _cut(
                columns.of_units(units.edges[low], units.edges[high]), units.edges[low : high + 1]
            ),
            _cut(columns.of_reads(reads), read_edges[low : high + 1]),
            _cut(sends, np.searchsorted(readers, ranks[low : high + 1])),
        )
        for parts in zip(*cut, strict=True):
            yield SharePlan.encode(num_waves, most_bytes, regions.shapes.shape[1], parts)


def _cut(columns: IntArray, edges: IntArray) -> Iterator[IntArray]:
    """Yield what lies between the edges of ranks, the first of which is the beginning."""
    for low, high in itertools.pairwise((edges - edges[0]).tolist()):
        yield columns[:, low:high]


def _places_of(units: _AllUnits, regions: _Regions) -> tuple[Column, Column]:
    """Return for each unit its place in the order of all that are shared, and the number of its
    region; -1 if it is not shared.
    """
    sequence, region_of = np.full((2, len(units.ranks)), -1, np.int32)
    sequence[regions.rows] = np.arange(len(regions.rows), dtype=np.int32)
    numbers = np.arange(len(regions.counts), dtype=np.int32)
    region_of[regions.rows] = np.repeat(numbers, regions.counts)
    return sequence, region_of


class _PlanColumns(NamedTuple):
    """Makes the columns of a `SharePlan` for some ranks.

    Attributes:
        units: of all ranks.
        regions: in the order of the plan.
        starts: where their rows begin.
        choice: about them.
        numbers: of each among those with the same reader.
        sequence: with `region_of`, see `_places_of`.
    """

    units: _AllUnits
    regions: _Regions
    starts: IntArray
    choice: _Choice
    numbers: Column
    sequence: Column
    region_of: Column

    def of_units(self, low: int, high: int) -> IntArray:
        """Return the columns of some units."""
        columns = np.full((4, high - low), -1, np.int64)
        shared = low + np.flatnonzero(self.region_of[low:high] >= 0)
        region = self.region_of[shared]
        readers, waves = self.choice.readers[region], self.choice.waves[region]
        is_own = self.units.ranks[shared] == readers
        reads = np.where(is_own, self.numbers[region], -1)
        columns[:, shared - low] = (readers, self.sequence[shared], waves, reads)
        return columns

    def of_reads(self, reads: Column) -> IntArray:
        """Return the columns of regions that ranks read."""
        wholes = self.choice.whole_rows[reads]
        firsts = self.units.edges[self.choice.readers[reads]]
        whole_units = np.where(wholes < 0, -1, wholes - firsts)
        regions = (self.regions.offsets[reads].T, self.regions.shapes[reads].T)
        named = (self.regions.chunks[reads], self.choice.waves[reads], whole_units)
        return np.vstack((*named, *regions), dtype=np.int64)

    def of_sends(self, reads: Column) -> tuple[IntArray, Column]:
        """Return the columns of messages about regions that ranks read, and who sends each."""
        rows = _of_groups(self.regions.rows, self.starts, reads)
        region = np.repeat(reads, self.regions.counts[reads])
        is_sent = self.units.ranks[rows] != self.choice.readers[region]
        rows, region = rows[is_sent], region[is_sent]
        regions = (self.units.offsets[rows].T, self.units.shapes[rows].T)
        named = (self.numbers[region], self.units.ranks[rows], self.sequence[rows])
        return np.vstack((*named, *regions), dtype=np.int64), self.choice.readers[region]

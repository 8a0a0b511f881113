"""Planning shared reads: of several ranks that request parts of the same bytes, one reads them for
all. Pure functions.

Chunks are divided into cells, in the same way on every rank. A unit is the part of a `Copy` that
lies in one cell. Rank 0 compares units by the numbers of their cells: where it saves reading,
`plan_shares` gives the region that the units of a cell span one reader, and puts all units in one
order, in which every rank sends and receives.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.dtypes import ITEM_BYTES
from distckpt._format.columns import pack, unpack
from distckpt._format.manifest import Manifest
from distckpt._geometry.region import IntArray, Region, regions_to_arrays, row_hashes, widen
from distckpt._plan.load import Copy
from distckpt._plan.save import even_shares, lines

UNIT_BYTES = 2 << 20
"""Chunks are divided into cells of about this size: few enough to be planned, small enough to be
dealt out evenly.
"""
MAX_UNIT_BYTES = 16 << 20
"""Cells of loads that are so large that there would be too many."""
MANY_UNITS = 2048
UNALIGNED_UNIT_BYTES = 8 << 20
"""Cells that do not end where blocks do are larger: blocks on their edges are read twice."""
WAVE_BYTES = 64 << 20
"""Bytes that each rank reads in a wave."""
MIN_SAVED = 1 / 8
"""Units are shared if without that at least so much more would be read."""
_KINDS = 64
"""Larger than the size of an element of any dtype."""


# --- Cells ----------------------------------------------------------------------------------------


class Units(NamedTuple):
    """The units of one rank; for each the index of its copy, and the number of its cell in the
    chunk.
    """

    units: list[Copy]
    copy_of: IntArray
    cells: IntArray


def unit_bytes_for(most_bytes: int) -> int:
    """Return the size of cells if no rank requests more than `most_bytes`."""
    size = UNIT_BYTES
    while size < MAX_UNIT_BYTES and most_bytes > size * MANY_UNITS:
        size *= 2
    return size


def divide(manifest: Manifest, copies: Sequence[Copy], unit_bytes: int = UNIT_BYTES) -> Units:
    """Divide copies into units."""
    units: list[Copy] = []
    copy_of: list[int] = []
    cells: list[int] = []
    sizes = manifest.num_bytes[np.array([copy.chunk for copy in copies], np.int64)].tolist()
    for index, (copy, size) in enumerate(zip(copies, sizes, strict=True)):
        if size <= unit_bytes:
            units.append(copy)
            copy_of.append(index)
            cells.append(0)
            continue
        for cell, piece in _in_cells(manifest, copy, unit_bytes):
            place = piece.relative_to(copy.source.offset).offset
            target = Region(tuple(map(int.__add__, place, copy.target.offset)), piece.shape)
            units.append(Copy(copy.chunk, piece, copy.request, target))
            copy_of.append(index)
            cells.append(cell)
    return Units(units, np.array(copy_of, np.int64), np.array(cells, np.int64))


def _in_cells(manifest: Manifest, copy: Copy, unit_bytes: int) -> Iterator[tuple[int, Region]]:
    """Yield the parts of a copy in the cells of its chunk, each after the number of the cell."""
    shape, (offset, extent) = manifest.chunk_region(copy.chunk).shape, copy.source
    item = ITEM_BYTES[manifest.dtypes[manifest.key_ids[copy.chunk]]]
    block_bytes = manifest.block_bytes if manifest.has_checksums else 1
    axis, step = _cell_rows(shape, item, unit_bytes, block_bytes)
    low, high = offset[axis], offset[axis] + extent[axis]
    numbers = range(low // step, -(-high // step))
    for outer in itertools.product(
        *(range(o, o + n) for o, n in zip(offset[:axis], extent, strict=False))
    ):
        row = 0
        for size, index in zip(shape, outer, strict=False):
            row = row * size + index
        for number in numbers:
            first, end = max(low, number * step), min(high, (number + 1) * step)
            piece = Region(
                (*outer, first, *offset[axis + 1 :]),
                ((1,) * axis + (end - first, *extent[axis + 1 :])),
            )
            yield row * -(-shape[axis] // step) + number, piece


@functools.lru_cache(maxsize=1024)
def _cell_rows(
    shape: tuple[int, ...], item: int, unit_bytes: int, block_bytes: int
) -> tuple[int, int]:
    """Return along which axis the cells of a chunk follow one another, and their size there. They
    have one index along earlier axes, and all along later ones.

    If possible they begin and end between blocks, so that each block is read by one rank.
    """
    rows = [math.prod(shape[axis + 1 :]) * item for axis in range(len(shape))]
    axis = next(axis for axis, row in enumerate(rows) if row <= unit_bytes or axis == len(rows) - 1)
    num_rows = math.lcm(rows[axis], block_bytes) // rows[axis]
    is_aligned = axis == 0 or shape[axis] * rows[axis] % block_bytes == 0
    if not is_aligned or num_rows * rows[axis] > MAX_UNIT_BYTES:
        num_rows, unit_bytes = 1, max(unit_bytes, UNALIGNED_UNIT_BYTES)
    return axis, max(1, unit_bytes // (rows[axis] * num_rows)) * num_rows


class ReadCosts(NamedTuple):
    """How many bytes it takes to read regions of chunks.

    Attributes:
        manifest: of the checkpoint.
        are_exact: nothing is read that was not asked for; otherwise whole blocks, from that with
            the first element to that with the last one.
    """

    manifest: Manifest
    are_exact: bool = False

    def of(self, chunks: IntArray, offsets: IntArray, shapes: IntArray) -> IntArray:
        """Return the bytes of some regions."""
        manifest = self.manifest
        item_bytes = np.array([ITEM_BYTES.get(name, 0) for name in manifest.dtypes], np.int64)
        items = item_bytes[manifest.key_ids[chunks]]
        sizes: IntArray = np.prod(shapes, axis=1, dtype=np.int64) * items
        if self.are_exact:
            return sizes
        strides = np.ones_like(shapes)
        strides[:, :-1] = np.cumprod(manifest.shapes[chunks][:, :0:-1], axis=1)[:, ::-1]
        first = (offsets * strides).sum(axis=1)
        last = ((offsets + shapes - 1) * strides).sum(axis=1)
        block = manifest.block_bytes if manifest.has_checksums else 1
        starts, stops = first * items // block * block, -(-(last + 1) * items // block) * block
        span: IntArray = np.minimum(stops, manifest.num_bytes[chunks]) - starts
        return span * (sizes > 0)


# --- What ranks tell rank 0, and what it answers --------------------------------------------------


class UnitTable(NamedTuple):
    """The units of one rank, without data.

    Attributes:
        names: int64 of shape (n, 3): the chunk, the cell, and the dtype of the target. Rows that
            are equal on several ranks may be shared.
        offsets: with `shapes`, what of the chunk is requested; int64 of shape (n, ndim).
        num_bytes: that would be read without sharing, (n,).
        group: ranks share within their group,
        place: and only what is requested at two different places.
    """

    names: IntArray
    offsets: IntArray
    shapes: IntArray
    num_bytes: IntArray
    group: int
    place: int

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return pack(self[4:], dict(zip(self._fields[:4], self[:4], strict=True)))

    @classmethod
    def from_bytes(cls, data: bytes) -> UnitTable:
        """Decode what `to_bytes` made."""
        (group, place), columns = unpack(data)
        return cls(**columns, group=group, place=place)

    def take(self, rows: IntArray) -> UnitTable:
        """Return the units in some rows."""
        return self._replace(
            names=self.names[rows],
            offsets=self.offsets[rows],
            shapes=self.shapes[rows],
            num_bytes=self.num_bytes[rows],
        )


def describe_units(
    costs: ReadCosts, divided: Units, dtypes: Sequence[torch.dtype], group: int, place: int
) -> UnitTable:
    """Describe the units of this rank; `dtypes` has the dtype of the target of each request."""
    units, ndim = divided.units, costs.manifest.offsets.shape[1]
    chunks = np.array([unit.chunk for unit in units], np.int64)
    kinds = [zlib.crc32(str(dtype).encode()) * _KINDS + dtype.itemsize for dtype in dtypes]
    kind = np.array([kinds[unit.request] for unit in units], np.int64)
    offsets, shapes = regions_to_arrays([unit.source for unit in units])
    offsets, shapes = widen(offsets, ndim, 0), widen(shapes, ndim, 1)
    return UnitTable(
        np.column_stack([chunks, divided.cells, kind]),
        offsets,
        shapes,
        costs.of(chunks, offsets, shapes),
        group,
        place,
    )


class SharePlan(NamedTuple):
    """The part of one rank in a plan of `num_waves` waves.

    Attributes:
        num_waves: in which all ranks read and send.
        most_bytes: no rank would read more of what is shared, if nothing was.
        readers: for each unit of this rank the rank that reads it; -1 if it is not shared.
        sequence: for each unit its place in the order of the units of all ranks.
        waves: for each unit the wave in which it is read and sent.
        unit_reads: for each unit that this rank reads, the row in the columns that follow; else -1.
        read_chunks: for each region that this rank reads, its chunk,
        read_offsets: where it begins there,
        read_shapes: and its shape.
        read_waves: the wave,
        read_units: and the unit of this rank that is the whole region, -1 if none is.
        send_reads: for each message to another rank, the row of the region that it is a part of.
        send_ranks: to which rank,
        send_sequence: at which place in the order,
        send_offsets: and what of the chunk.
        send_shapes: the shape of that.
    """

    num_waves: int
    most_bytes: int
    readers: IntArray
    sequence: IntArray
    waves: IntArray
    unit_reads: IntArray
    read_chunks: IntArray
    read_offsets: IntArray
    read_shapes: IntArray
    read_waves: IntArray
    read_units: IntArray
    send_reads: IntArray
    send_ranks: IntArray
    send_sequence: IntArray
    send_offsets: IntArray
    send_shapes: IntArray

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return pack(self[:2], dict(zip(self._fields[2:], self[2:], strict=True)))

    @property
    def sends(self) -> tuple[IntArray, ...]:
        """The columns of messages to other ranks."""
        return self[-5:]

    @classmethod
    def from_bytes(cls, data: bytes) -> SharePlan:
        """Decode what `to_bytes` made."""
        (num_waves, most_bytes), columns = unpack(data)
        return cls(num_waves, most_bytes, **columns)


# --- The plan -------------------------------------------------------------------------------------


def plan_shares(
    tables: Sequence[UnitTable], costs: ReadCosts, max_held_bytes: int = WAVE_BYTES
) -> list[SharePlan]:
    """Give what several ranks request parts of one reader, so that all ranks have about the same
    amount to read.

    Of what its targets cannot hold, a rank reads `max_held_bytes` in a wave, or one region.
    """
    every = _all_units(tables)
    shared = _find_shared(tables, every, costs)
    starts, holders = shared.starts, every.ranks[shared.rows]
    is_new = np.diff(holders, prepend=-1) != 0
    is_new[starts[:-1]] = True
    holder_starts = np.append(0, np.cumsum(is_new))[starts]
    read_alone = every.num_bytes.copy()
    read_alone[shared.rows] = 0
    loads = np.bincount(every.ranks, read_alone, len(tables)).astype(np.int64)
    readers, turns = _choose_readers(holders[is_new], holder_starts, shared.num_bytes, loads)
    region = np.repeat(np.arange(len(readers)), np.diff(starts))
    is_reader = holders == readers[region]
    is_whole = is_reader & (every.shapes[shared.rows] == shared.shapes[region]).all(axis=1)
    whole_rows = np.full(len(readers), -1, np.int64)
    whole_rows[region[is_whole]] = shared.rows[is_whole]
    # What must be held besides the targets counts as more.
    held_bytes = np.prod(shared.shapes, axis=1) * (
        every.names[shared.rows[starts[:-1]], 2] % _KINDS
    )
    factor = WAVE_BYTES / max(1, min(WAVE_BYTES, max_held_bytes))
    weights = np.where(whole_rows < 0, (held_bytes * factor).astype(np.int64), shared.num_bytes)
    order, waves = _put_in_order(readers, turns, weights)
    return _plans_of_ranks(tables, every, shared, _Choice(readers, order, waves, whole_rows))


class _AllUnits(NamedTuple):
    """The columns of all tables together, and the rank of each row."""

    names: IntArray
    offsets: IntArray
    shapes: IntArray
    num_bytes: IntArray
    ranks: IntArray


def _all_units(tables: Sequence[UnitTable]) -> _AllUnits:
    counts = [len(table.names) for table in tables]
    return _AllUnits(
        names=np.concatenate([table.names for table in tables]),
        offsets=np.concatenate([table.offsets for table in tables]),
        shapes=np.concatenate([table.shapes for table in tables]),
        num_bytes=np.concatenate([table.num_bytes for table in tables]),
        ranks=np.repeat(np.arange(len(tables)), counts),
    )


class _Shared(NamedTuple):
    """The regions that are read for several ranks.

    From `starts[i]` to `starts[i + 1]` are the `rows` of the units of region i, their ranks
    ascending. Regions, of `shapes` from `offsets` on, are in the order of files; each takes
    `num_bytes` to read.
    """

    rows: IntArray
    starts: IntArray
    offsets: IntArray
    shapes: IntArray
    num_bytes: IntArray


def _find_shared(tables: Sequence[UnitTable], every: _AllUnits, costs: ReadCosts) -> _Shared:
    groups = np.array([table.group for table in tables], np.int64)[every.ranks]
    rows, starts = _rows_of_same([groups, *every.names.T])
    region = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    _, places = np.unique(
        np.array([table.place for table in tables], np.int64), return_inverse=True
    )
    pairs = np.unique(region * len(tables) + places[every.ranks[rows]])
    is_shared = np.bincount(pairs // len(tables), minlength=len(starts) - 1) > 1
    if not is_shared.any():
        none = np.zeros(0, np.int64)
        flat = np.zeros((0, every.offsets.shape[1]), np.int64)
        return _Shared(none, np.zeros(1, np.int64), flat, flat, none)
    rows, starts = _selected(rows, starts, is_shared)
    # What is read is the smallest region around all units.
    offsets = np.minimum.reduceat(every.offsets[rows], starts[:-1])
    ends = np.maximum.reduceat(every.offsets[rows] + every.shapes[rows], starts[:-1])
    chunks, cells = every.names[rows[starts[:-1]], :2].T
    num_bytes = costs.of(chunks, offsets, ends - offsets)
    alone = np.add.reduceat(every.num_bytes[rows], starts[:-1])
    pays = np.flatnonzero(alone > (1 + MIN_SAVED) * num_bytes)
    # Ranks then read on and on in few files.
    manifest = costs.manifest
    first_bytes, files = manifest.first_bytes[chunks[pays]], manifest.file_ids[chunks[pays]]
    pays = pays[np.lexsort((cells[pays], first_bytes, files))]
    rows, starts = _in_order(rows, starts, pays)
    return _Shared(rows, starts, offsets[pays], (ends - offsets)[pays], num_bytes[pays])


def _rows_of_same(columns: Sequence[IntArray]) -> tuple[IntArray, IntArray]:
    """Group the rows that are equal; return the rows group by group, and where groups begin."""
    hashes = row_hashes(columns)
    # Stable: equal rows stay in the order of their ranks.
    order = np.argsort(hashes, kind="stable")
    starts = _run_starts(hashes[order])
    first = order[np.repeat(starts[:-1], np.diff(starts))]
    # Rows that share a hash by chance are read as if no other rank had them.
    belongs = np.ones(len(order), np.bool_)
    for column in columns:
        belongs &= column[order] == column[first]
    return order[belongs], np.append(0, np.cumsum(belongs))[starts]


def _selected(
    rows: IntArray, starts: IntArray, is_wanted: npt.NDArray[np.bool_]
) -> tuple[IntArray, IntArray]:
    """Return the groups of rows that are wanted, in their order."""
    return _in_order(rows, starts, np.flatnonzero(is_wanted))


def _in_order(rows: IntArray, starts: IntArray, groups: IntArray) -> tuple[IntArray, IntArray]:
    """Return some groups of rows in the given order."""
    counts = np.diff(starts)[groups]
    new_starts = np.append(0, np.cumsum(counts))
    within = np.arange(new_starts[-1]) - np.repeat(new_starts[:-1], counts)
    return rows[np.repeat(starts[groups], counts) + within], new_starts


def _run_starts(values: npt.NDArray[np.generic]) -> IntArray:
    """Return where runs of equal values begin, and where the last one ends."""
    is_first = np.ones(len(values), np.bool_)
    is_first[1:] = values[1:] != values[:-1]
    return np.append(np.flatnonzero(is_first), len(values))


def _choose_readers(
    holders: IntArray, starts: IntArray, sizes: IntArray, loads: IntArray
) -> tuple[IntArray, IntArray]:
    """Deal out regions with the same holders in runs, longer ones to ranks with less to read so
    far.

    Returns:
        For each region its reader, and its place in the order in which regions were dealt out.
    """
    loads = loads.copy()
    readers = np.zeros(len(sizes), np.int64)
    turns = np.zeros(len(sizes), np.int64)
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


def _put_in_order(
    readers: IntArray,
    turns: IntArray,
    weights: IntArray,
) -> tuple[IntArray, IntArray]:
    """Let all readers go through their regions side by side; return the regions in this order, and
    the wave of each.
    """
    mine = np.lexsort((turns, readers))
    before = np.cumsum(weights[mine]) - weights[mine]
    starts = _run_starts(readers[mine])
    position = np.empty(len(weights), np.int64)
    position[mine] = before - np.repeat(before[starts[:-1]], np.diff(starts))
    return np.lexsort((turns, readers, position)), position // WAVE_BYTES


class _Choice(NamedTuple):
    """What was decided about each region: its reader, its wave, and the unit of the reader, as a
    row of all units, that is the whole region (-1: none is). `order` has the regions in sequence.
    """

    readers: IntArray
    order: IntArray
    waves: IntArray
    whole_rows: IntArray


def _plans_of_ranks(
    tables: Sequence[UnitTable], every: _AllUnits, shared: _Shared, choice: _Choice
) -> list[SharePlan]:
    """Tell each rank its part."""
    edges = np.cumsum([0, *(len(table.names) for table in tables)])
    # All regions in sequence from here on; those of a rank follow one another after a stable sort.
    rows, starts = _in_order(shared.rows, shared.starts, choice.order)
    readers, waves = choice.readers[choice.order], choice.waves[choice.order]
    region = np.repeat(np.arange(len(readers)), np.diff(starts))
    by_reader = np.argsort(readers, kind="stable")
    read_edges = np.searchsorted(readers[by_reader], np.arange(len(tables) + 1))
    number = np.empty(len(readers), np.int64)
    number[by_reader] = np.arange(len(readers)) - read_edges[readers[by_reader]]
    is_own = every.ranks[rows] == readers[region]
    own = np.full((4, len(every.ranks)), -1, np.int64)
    own[:, rows] = [
        readers[region],
        np.arange(len(rows)),
        waves[region],
        np.where(is_own, number[region], -1),
    ]
    sends = np.flatnonzero(~is_own)
    sends = sends[np.argsort(readers[region[sends]], kind="stable")]
    send_edges = np.searchsorted(readers[region[sends]], np.arange(len(tables) + 1))
    reads = choice.order[by_reader]
    chunks = every.names[shared.rows[shared.starts[:-1]], 0]
    most_bytes = np.bincount(every.ranks[rows], every.num_bytes[rows], len(tables)).max()
    num_waves = int(waves.max(initial=-1)) + 1
    plans = []
    for rank in range(len(tables)):
        mine = reads[read_edges[rank] : read_edges[rank + 1]]
        sent = sends[send_edges[rank] : send_edges[rank + 1]]
        wholes = choice.whole_rows[mine]
        columns = (
            *own[:, edges[rank] : edges[rank + 1]],
            chunks[mine],
            shared.offsets[mine],
            shared.shapes[mine],
            choice.waves[mine],
            np.where(wholes < 0, -1, wholes - edges[rank]),
            number[region[sent]],
            every.ranks[rows[sent]],
            sent,
            every.offsets[rows[sent]],
            every.shapes[rows[sent]],
        )
        plans.append(SharePlan(num_waves, int(most_bytes), *columns))
    return plans

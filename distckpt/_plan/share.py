"""Messages of shared reads: requests to rank 0, and its answers.

Pure functions. Chunks are divided into cells, in the same way on every rank. A unit is the part of
a `Copy` in one cell. Rank 0 compares units by the numbers of their cells, see `share_out`.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from distckpt._base.dtypes import ITEM_BYTES
from distckpt._format.columns import compress, decompress
from distckpt._format.manifest import Manifest
from distckpt._geometry.region import IntArray, Region, regions_to_arrays, widen
from distckpt._plan.load import Copy

UNIT_BYTES = 2 << 20
"""Approximate size of cells: few to plan, small to balance."""
MAX_UNIT_BYTES = 16 << 20
"""Largest size of cells, for very large loads."""
MANY_UNITS = 2048
"""Largest number of units per rank before cells grow."""
UNALIGNED_UNIT_BYTES = 8 << 20
"""Size of cells without alignment, whose outer blocks are read twice."""
REQUEST_COST_BYTES = 256 << 10
"""Bytes that storage delivers in the time of one further request."""
_KINDS = 64
"""A number above the element size of any dtype."""


# --- Cells ----------------------------------------------------------------------------------------


class Units(NamedTuple):
    """The units of one rank.

    Attributes:
        units: the units.
        copy_of: for each unit the index of its copy.
        cells: for each unit the number of its cell in the chunk.
    """

    units: list[Copy]
    copy_of: IntArray
    cells: IntArray


def unit_bytes_for(most_bytes: int) -> int:
    """Return the size of cells; no rank requests more than `most_bytes`."""
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
    """Yield `(cell, part)` for each cell that a copy touches."""
    shape = manifest.chunk_region(copy.chunk).shape
    offset, extent = copy.source
    item = ITEM_BYTES[manifest.dtypes[manifest.key_ids[copy.chunk]]]
    block_bytes = _block_bytes(manifest)
    axis, step = _cell_rows(shape, item, unit_bytes, block_bytes)
    low = offset[axis]
    high = low + extent[axis]
    numbers = range(low // step, -(-high // step))
    outer_ranges = [range(o, o + n) for o, n in zip(offset[:axis], extent, strict=False)]
    for outer in itertools.product(*outer_ranges):
        row = 0
        for size, index in zip(shape, outer, strict=False):
            row = row * size + index
        for number in numbers:
            first = max(low, number * step)
            end = min(high, (number + 1) * step)
            piece = Region(
                (*outer, first, *offset[axis + 1 :]),
                ((1,) * axis + (end - first, *extent[axis + 1 :])),
            )
            yield row * -(-shape[axis] // step) + number, piece


@functools.lru_cache(maxsize=1024)
def _cell_rows(
    shape: tuple[int, ...], item: int, unit_bytes: int, block_bytes: int
) -> tuple[int, int]:
    """Return the axis along which cells divide a chunk, and their length.

    Cells have one index along earlier axes, and all indices along later ones. If possible they
    begin and end between blocks, so that each block is read by one rank.
    """
    rows = [math.prod(shape[axis + 1 :]) * item for axis in range(len(shape))]
    axis = next(axis for axis, row in enumerate(rows) if row <= unit_bytes or axis == len(rows) - 1)
    num_rows = math.lcm(rows[axis], block_bytes) // rows[axis]
    is_aligned = axis == 0 or shape[axis] * rows[axis] % block_bytes == 0
    if not is_aligned or num_rows * rows[axis] > MAX_UNIT_BYTES:
        num_rows = 1
        unit_bytes = max(unit_bytes, UNALIGNED_UNIT_BYTES)
    return axis, max(1, unit_bytes // (rows[axis] * num_rows)) * num_rows


def _block_bytes(manifest: Manifest) -> int:
    """Return the size of the blocks that reads consist of; 1 without checksums."""
    if not manifest.has_checksums:
        return 1
    return manifest.block_bytes


class ReadCosts(NamedTuple):
    """The costs of reading regions of chunks, in bytes.

    Attributes:
        manifest: the manifest of the checkpoint.
        are_exact: whether runs of a region may be read without the gaps between them; otherwise all
            blocks from the first element to the last one are read.
        request_bytes: the cost of a request.
    """

    manifest: Manifest
    are_exact: bool = False
    request_bytes: int = REQUEST_COST_BYTES

    def of(self, chunks: IntArray, offsets: IntArray, shapes: IntArray) -> IntArray:
        """Return the cost of each region, without its first request."""
        manifest = self.manifest
        item_bytes = np.array([ITEM_BYTES.get(name, 0) for name in manifest.dtypes], np.int64)
        items = item_bytes[manifest.key_ids[chunks]]
        sizes: IntArray = np.prod(shapes, axis=1, dtype=np.int64) * items
        strides = np.ones_like(shapes)
        strides[:, :-1] = np.cumprod(manifest.shapes[chunks][:, :0:-1], axis=1)[:, ::-1]
        first = (offsets * strides).sum(axis=1)
        last = ((offsets + shapes - 1) * strides).sum(axis=1)
        block = _block_bytes(manifest)
        starts = first * items // block * block
        stops = -(-(last + 1) * items // block) * block
        span: IntArray = np.minimum(stops, manifest.num_bytes[chunks]) - starts
        if self.are_exact:
            num_gaps = _num_runs(manifest.shapes[chunks], shapes) - 1
            span = np.minimum(span, sizes + num_gaps * self.request_bytes)
        return span * (sizes > 0)


def _num_runs(chunk_shapes: IntArray, shapes: IntArray) -> IntArray:
    """Return the number of contiguous runs of each region."""
    is_full = (shapes == chunk_shapes)[:, ::-1]
    rest_is_full = np.logical_and.accumulate(is_full, axis=1)[:, ::-1][:, 1:]
    num_runs: IntArray = np.where(rest_is_full, 1, shapes[:, :-1]).prod(axis=1)
    return num_runs


# --- Messages -------------------------------------------------------------------------------------


class UnitTable(NamedTuple):
    """The units of one rank, without data.

    Attributes:
        names: int64 of shape (n, 3): the chunk, the cell, and the dtype of the target. Units with
            equal names on several ranks may be shared.
        offsets: with `shapes`, the requested region of the chunk; int64 of shape (n, ndim).
        shapes: see `offsets`.
        num_bytes: the cost of reading each without sharing, of shape (n,).
        group: ranks share only within their group.
    """

    names: IntArray
    offsets: IntArray
    shapes: IntArray
    num_bytes: IntArray
    group: int

    def to_bytes(self) -> bytes:
        """Encode for rank 0, see `UnitMessage`."""
        kinds, kind = np.unique(self.names[:, 2], return_inverse=True)
        names = (self.names[:, 0], self.names[:, 1], kind)
        numbers = np.vstack([*names, self.num_bytes, self.offsets.T, self.shapes.T])
        head = [len(self.names), len(kinds), self.group]
        first = np.concatenate([head, kinds, numbers.max(axis=1, initial=0)], dtype=np.int64)
        return first.tobytes() + compress(numbers.tobytes())

    def take(self, rows: IntArray) -> UnitTable:
        """Return the units in some rows."""
        return self._replace(
            names=self.names[rows],
            offsets=self.offsets[rows],
            shapes=self.shapes[rows],
            num_bytes=self.num_bytes[rows],
        )


class UnitMessage(NamedTuple):
    """The encoded units of a rank.

    Attributes:
        num_units: the number of units.
        group: the group of the rank.
        kinds: the dtypes of targets, see `item_bytes_of`.
        largest: the largest number in each column.
        data: the whole message. Its columns are chunk, cell, position in `kinds`, bytes, and one
            column of offsets and of shapes for each axis.
    """

    num_units: int
    group: int
    kinds: list[int]
    largest: IntArray
    data: bytes

    @classmethod
    def of(cls, data: bytes, ndim: int) -> UnitMessage:
        """Decode the beginning of a result of `UnitTable.to_bytes`."""
        num_units, num_kinds, group = np.frombuffer(data, np.int64, 3).tolist()
        rest = np.frombuffer(data, np.int64, num_kinds + 4 + 2 * ndim, 24)
        kinds = rest[:num_kinds].tolist()
        largest = rest[num_kinds:].copy()
        return cls(num_units, group, kinds, largest, data)

    def columns(self) -> IntArray:
        """Return the columns, of shape (columns, units)."""
        head_bytes = 8 * (3 + len(self.kinds) + len(self.largest))
        numbers = np.frombuffer(decompress(self.data[head_bytes:]), np.int64)
        return numbers.reshape(len(self.largest), self.num_units)


def item_bytes_of(kind: int) -> int:
    """Return the element size of a dtype, given its number in `UnitMessage.kinds`."""
    return kind % _KINDS


def describe_units(
    costs: ReadCosts, divided: Units, dtypes: Sequence[torch.dtype], group: int
) -> UnitTable:
    """Describe the units of this rank.

    `dtypes` has the dtype of each request's target.
    """
    units = divided.units
    ndim = costs.manifest.offsets.shape[1]
    chunks = np.array([unit.chunk for unit in units], np.int64)
    kinds = [zlib.crc32(str(dtype).encode()) * _KINDS + dtype.itemsize for dtype in dtypes]
    kind = np.array([kinds[unit.request] for unit in units], np.int64)
    offsets, shapes = regions_to_arrays([unit.source for unit in units])
    offsets = widen(offsets, ndim, 0)
    shapes = widen(shapes, ndim, 1)
    return UnitTable(
        np.column_stack([chunks, divided.cells, kind]),
        offsets,
        shapes,
        costs.of(chunks, offsets, shapes),
        group,
    )


class SharePlan(NamedTuple):
    """The part of one rank in a plan of `num_waves` waves.

    Attributes:
        num_waves: the number of waves in which all ranks read and send.
        most_bytes: the most bytes of shared units that one rank would read without sharing.
        sent_bytes: the bytes that all ranks send.
        readers: for each unit of this rank the rank that reads it; -1 if it is not shared.
        sequence: for each unit its position in the order of the units of all ranks.
        waves: for each unit the wave in which it is read and sent.
        unit_reads: for each unit that this rank reads, the row in the `read_` columns; else -1.
        read_chunks: for each region that this rank reads, its chunk.
        read_waves: for each region its wave.
        read_units: for each region the unit of this rank that is the whole region; -1 without one.
        read_offsets: for each region its offset in the chunk.
        read_shapes: for each region its shape.
        send_reads: for each message to another rank, the row of its region.
        send_ranks: for each message its receiver.
        send_sequence: for each message its position in the order.
        send_offsets: for each message the offset of its content in the chunk.
        send_shapes: for each message the shape of its content.
    """

    num_waves: int
    most_bytes: int
    sent_bytes: int
    readers: IntArray
    sequence: IntArray
    waves: IntArray
    unit_reads: IntArray
    read_chunks: IntArray
    read_waves: IntArray
    read_units: IntArray
    read_offsets: IntArray
    read_shapes: IntArray
    send_reads: IntArray
    send_ranks: IntArray
    send_sequence: IntArray
    send_offsets: IntArray
    send_shapes: IntArray

    @property
    def sends(self) -> tuple[IntArray, ...]:
        """The columns of messages to other ranks."""
        return self[-5:]

    @staticmethod
    def encode(
        head: Sequence[int],
        ndim: int,
        columns: Sequence[IntArray],
    ) -> bytes:
        """Encode the columns of units, of regions and of messages.

        They are in the order of the attributes, of which `head` has the first three. Offsets and
        shapes have a column for each axis.
        """
        counts = [numbers.shape[1] for numbers in columns]
        first = np.array([*head, ndim, *counts], np.int64)
        return first.tobytes() + compress(b"".join(numbers.tobytes() for numbers in columns))

    @classmethod
    def from_bytes(cls, data: bytes) -> SharePlan:
        """Decode the result of `encode`."""
        first = np.frombuffer(data, np.int64, 7)
        *head, ndim, num_units, num_reads, num_sends = first.tolist()
        numbers = np.frombuffer(decompress(data[first.nbytes :]), np.int64)
        sizes = (4 * num_units, (3 + 2 * ndim) * num_reads)
        own, reads, sends = np.split(numbers, np.cumsum(sizes))
        return cls(
            *head,
            *own.reshape(4, num_units),
            *_columns_of(reads, num_reads, ndim),
            *_columns_of(sends, num_sends, ndim),
        )


def _columns_of(numbers: IntArray, count: int, ndim: int) -> tuple[IntArray, ...]:
    """Split numbers into three columns, offsets and shapes of `count` rows."""
    first, second, third, *axes = numbers.reshape(3 + 2 * ndim, count)
    regions = np.array(axes, np.int64).reshape(2, ndim, count)
    return first, second, third, regions[0].T, regions[1].T

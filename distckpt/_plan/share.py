"""Messages of shared reads: requests to rank 0, and its answers.

Pure functions. Chunks are divided into cells, in the same way on every rank. A unit is the part of
a `Copy` in one cell. Rank 0 compares units by the numbers of their cells, see `share_out`.
"""

from __future__ import annotations

import functools
import math
import operator
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.dtypes import ITEM_BYTES
from distckpt._format.columns import compress, decompress, joined_ranges
from distckpt._format.manifest import Manifest
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import IntArray, Region, regions_to_arrays
from distckpt._plan.load import Copy
from distckpt._quantization.quantized import QuantizedTensor
from distckpt._storage import locations

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
_ONE_CELL = 1 << 62
"""A number of rows above that of any chunk."""
_KINDS = 64
"""A number above the element size of any dtype."""


# --- Cells ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Units:
    """The units of one rank, as columns.

    Attributes:
        copies: the copies that they are parts of.
        copy_of: for each unit the index of its copy.
        cells: for each unit the number of its cell in the chunk.
        offsets: with `shapes`, its region of the chunk; int64 of shape (n, ndim).
        shapes: see `offsets`.
    """

    copies: Sequence[Copy]
    copy_of: IntArray
    cells: IntArray
    offsets: IntArray
    shapes: IntArray

    def __len__(self) -> int:
        return len(self.copy_of)

    def __iter__(self) -> Iterator[Copy]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> Copy:
        copy = self.copies[int(self.copy_of[number])]
        offset, shape = copy.source
        ndim = len(shape)
        source = Region(
            tuple(self.offsets[number, :ndim].tolist()), tuple(self.shapes[number, :ndim].tolist())
        )
        if source.shape == shape:
            return copy
        place = map(operator.sub, source.offset, offset)
        target = Region(tuple(map(operator.add, place, copy.target.offset)), source.shape)
        return Copy(copy.chunk, source, copy.request, target)

    @property
    def chunks(self) -> IntArray:
        """The chunk of each unit."""
        return np.array([copy.chunk for copy in self.copies], np.int64)[self.copy_of]

    def take(self, numbers: IntArray) -> Units:
        """Return some of the units."""
        columns = (self.copy_of, self.cells, self.offsets, self.shapes)
        return Units(self.copies, *(column[numbers] for column in columns))

    def join(self, numbers: IntArray) -> list[Copy]:
        """Return the copies for some units. A copy whose units are all among them stays whole."""
        num_given = np.bincount(self.copy_of[numbers], minlength=len(self.copies))
        is_complete = num_given == np.bincount(self.copy_of, minlength=len(self.copies))
        complete = np.flatnonzero(is_complete & (num_given > 0))
        others = numbers[~is_complete[self.copy_of[numbers]]]
        return [
            *(self.copies[i] for i in complete.tolist()),
            *(self[i] for i in others.tolist()),
        ]


def unit_bytes_for(most_bytes: int) -> int:
    """Return the size of cells; no rank requests more than `most_bytes`."""
    size = UNIT_BYTES
    while size < MAX_UNIT_BYTES and most_bytes > size * MANY_UNITS:
        size *= 2
    return size


def divide(manifest: Manifest, copies: Sequence[Copy], unit_bytes: int = UNIT_BYTES) -> Units:
    """Divide copies into units."""
    ndim = manifest.offsets.shape[1]
    chunks = np.array([copy.chunk for copy in copies], np.int64)
    lows, extents = regions_to_arrays([copy.source for copy in copies], ndim)
    axes = np.zeros(len(copies), np.int64)
    # Small chunks are one cell.
    steps = np.full(len(copies), _ONE_CELL)
    block_bytes = _block_bytes(manifest)
    for row in np.flatnonzero(manifest.num_bytes[chunks] > unit_bytes).tolist():
        shape = manifest.chunk_region(copies[row].chunk).shape
        item = ITEM_BYTES[manifest.dtypes[manifest.key_ids[copies[row].chunk]]]
        axes[row], steps[row] = _cell_rows(shape, item, unit_bytes, block_bytes)
    if not ndim:
        none = np.zeros(len(copies), np.int64)
        return Units(copies, np.arange(len(copies)), none, lows, extents)
    # One unit for each index along the axes before `axes`, and each step along that axis.
    rows = np.arange(len(copies))
    low = lows[rows, axes]
    high = low + extents[rows, axes]
    first = low // steps
    counts = -(-high // steps) - first
    is_outer = np.arange(ndim) < axes[:, None]
    num_units = counts * np.where(is_outer, extents, 1).prod(axis=1)
    rows = np.repeat(rows, num_units)
    number = joined_ranges(np.zeros_like(num_units), num_units)
    rest, cells = np.divmod(number, counts[rows])
    cells += first[rows]
    offsets = lows[rows]
    shapes = extents[rows]
    units = np.arange(len(rows))
    along = axes[rows]
    begin = np.maximum(low[rows], cells * steps[rows])
    offsets[units, along] = begin
    shapes[units, along] = np.minimum(high[rows], (cells + 1) * steps[rows]) - begin
    sizes = manifest.shapes[chunks]
    num_cells = -(-sizes[np.arange(len(copies)), axes] // steps)[rows]
    for axis in reversed(range(int(axes.max(initial=0)))):
        outer = np.flatnonzero(axis < along)
        rest[outer], index = np.divmod(rest[outer], extents[rows[outer], axis])
        offsets[outer, axis] += index
        shapes[outer, axis] = 1
        cells[outer] += num_cells[outer] * offsets[outer, axis]
        num_cells[outer] *= sizes[rows[outer], axis]
    return Units(copies, rows, cells, offsets, shapes)


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


@dataclass(frozen=True)
class ReadCosts:
    """The costs of reading regions of chunks, in bytes.

    Attributes:
        manifest: the manifest of the checkpoint.
        are_exact: whether runs of a region may be read without the gaps between them; otherwise all
            blocks from the first element to the last one are read.
        request_bytes: the cost of a request.
        quantized: the chunks that are computed from codes and scales; these are read.
    """

    manifest: Manifest
    are_exact: bool = False
    request_bytes: int = REQUEST_COST_BYTES
    quantized: Mapping[int, QuantizedTensor] = field(default_factory=dict)

    def of(self, chunks: IntArray, offsets: IntArray, shapes: IntArray) -> IntArray:
        """Return the cost of each region, without its first request."""
        manifest = self.manifest
        items = self._item_bytes[manifest.key_ids[chunks]]
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
        if self.quantized:
            span = (span * self.stored_shares[chunks]).astype(np.int64)
        return span * (sizes > 0)

    @cached_property
    def _item_bytes(self) -> IntArray:
        """The element size of each key."""
        return np.array([ITEM_BYTES.get(name, 0) for name in self.manifest.dtypes], np.int64)

    @cached_property
    def stored_shares(self) -> npt.NDArray[np.float64]:
        """The stored bytes of each chunk per byte of its values."""
        shares = np.ones(len(self.manifest.key_ids))
        for chunk, tensor in self.quantized.items():
            shares[chunk] = tensor.num_bytes / max(1, int(self.manifest.num_bytes[chunk]))
        return shares


def costs_of(stored: StoredCheckpoint) -> ReadCosts:
    """Return the costs of reading from a view of a checkpoint."""
    are_exact = locations.is_local(stored.root) and not stored.verifies
    return ReadCosts(stored.manifest, are_exact, quantized=stored.quantized)


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
        names = self.names[:, :2].T
        numbers = np.vstack([names, kind, self.num_bytes, self.offsets.T, self.shapes.T])
        head = [len(self.names), len(kinds), self.group]
        first = np.concatenate([head, kinds, numbers.max(axis=1, initial=0)], dtype=np.int64)
        return first.tobytes() + compress(numbers.tobytes())


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
    numbers = {}
    for dtype in set(dtypes):
        numbers[dtype] = zlib.crc32(str(dtype).encode()) * _KINDS + dtype.itemsize
    chunks = divided.chunks
    kinds = np.array([numbers[dtypes[copy.request]] for copy in divided.copies], np.int64)
    return UnitTable(
        np.column_stack([chunks, divided.cells, kinds[divided.copy_of]]),
        divided.offsets,
        divided.shapes,
        costs.of(chunks, divided.offsets, divided.shapes),
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
    columns = numbers.reshape(3 + 2 * ndim, count)
    return (*columns[:3], columns[3 : 3 + ndim].T, columns[3 + ndim :].T)

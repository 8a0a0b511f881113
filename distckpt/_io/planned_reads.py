"""The requests that reads would make, from the plan alone."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.memory import Copier
from distckpt._base.threads import UNIT_BYTES
from distckpt._format.columns import joined_ranges
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import IntArray, Region, num_outer_axes, run_starts
from distckpt._geometry.units import Unit, sizes_of
from distckpt._io.read import PIECE_BYTES, Reading, are_near, in_file_order
from distckpt._io.read_parts import ReadPart, even_runs, parts_by_copy, parts_of
from distckpt._plan.decoded import Piece, plan_decoding
from distckpt._plan.load import Copy
from distckpt._storage.open_files import OpenFiles

_FILE_BYTES = 1 << 44
"""Distance of the first bytes of two files from each other: more than a file has."""
_UNLIMITED = 1 << 60
"""Size of an unlimited request, and pitch of a single range."""
_CACHED_COPIES = 1 << 18
"""Copies of quantized tensors whose requests are kept for another look: about 200 MB."""

Call: TypeAlias = tuple[Sequence[Copy], Sequence[torch.Tensor]]
"""Copies of a call of `read_copies`, and their targets, also meta tensors."""
_Row: TypeAlias = tuple[int, int, int, int, int, int]


class _MetaCopier(Copier):
    """A copier for which meta tensors stand for those in host memory."""

    def is_plain(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is row-major."""
        return tensor.is_contiguous()


_COPIER = _MetaCopier(())


@functools.lru_cache(maxsize=4096)
def meta_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


class ReadFigures(NamedTuple):
    """Ranges of bytes that leave the storage, as columns.

    Attributes:
        starts: the places of ranges, which grow from file to file.
        sizes: the bytes of each range.
        counts: the number of ranges at equal distances.
        pitches: the distances.
        piece_bytes: the most bytes of a request: a call that reads from a local file, or a ranged
            GET.
        num_bytes: the bytes that are asked for, without those that are fetched between them.
    """

    starts: IntArray
    sizes: IntArray
    counts: IntArray
    pitches: IntArray
    piece_bytes: IntArray
    num_bytes: IntArray

    @classmethod
    def joined(cls, reads: Iterable[ReadFigures]) -> ReadFigures:
        """Return the ranges of several reads."""
        return cls(*map(np.concatenate, zip(*reads, strict=True)))

    def requests(self) -> Counter[int]:
        """Count the requests of each size."""
        num_whole, rest = np.divmod(self.sizes, self.piece_bytes)
        sizes, places = np.unique(np.append(self.piece_bytes, rest), return_inverse=True)
        counts = np.append(num_whole, rest > 0) * np.tile(self.counts, 2)
        totals = np.bincount(places, counts).astype(np.int64)
        return +Counter(dict(zip(sizes.tolist(), totals.tolist(), strict=True)))

    def num_different_bytes(self) -> int:
        """Count the bytes that leave the storage once."""
        if not len(self.starts):
            return 0
        columns = self._take(np.argsort(self.starts))
        starts, sizes, counts, pitches = columns[:4]
        ends = np.maximum.accumulate(starts + (counts - 1) * pitches + sizes)
        # Ranges that overlap count at the first distance alone if they repeat in step.
        is_first = np.append(True, starts[1:] >= ends[:-1])
        firsts = np.flatnonzero(is_first)
        group = np.cumsum(is_first) - 1
        first = firsts[group]
        is_even = (counts == counts[first]) & (pitches == pitches[first])
        is_even &= starts + sizes <= starts[first] + pitches
        is_odd = ~np.logical_and.reduceat(is_even, firsts)[group]
        if is_odd.any():
            odd = columns._take(is_odd)._one_by_one()
            return odd.num_different_bytes() + columns._take(~is_odd).num_different_bytes()
        stops = np.maximum.accumulate(starts + sizes)
        covered = stops - np.maximum(starts, np.append(starts[0], stops[:-1]))
        return int((np.maximum(covered, 0) * counts).sum())

    def _take(self, rows: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> ReadFigures:
        return ReadFigures(*(column[rows] for column in self))

    def _one_by_one(self) -> ReadFigures:
        """Give each of the ranges a row of its own."""
        number = joined_ranges(np.zeros_like(self.counts), self.counts)
        single = self._take(np.repeat(np.arange(len(self.counts)), self.counts))
        ones = np.ones_like(number)
        return single._replace(
            starts=single.starts + number * single.pitches, counts=ones, pitches=ones * _UNLIMITED
        )


class RequestCounter:
    """A counter of the requests to a view of a checkpoint."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        self._stored = stored
        self._num_files = len(stored.manifest.files)
        self._rows_of_copies: dict[tuple[int, Region], list[_Row]] = {}

    def reads(self, calls: Iterable[Call], chunks: Sequence[int] = ()) -> ReadFigures:
        """Return the requests of calls of `read_copies`, and for whole chunks."""
        stored = self._stored
        groups: list[list[ReadPart]] = [[]]
        for chunk in chunks:
            size = int(stored.manifest.num_bytes[chunk])
            groups[0].append(ReadPart(chunk, 0, size, None))
        quantized: list[Copy] = []
        for copies, targets in calls:
            plain = copies
            if stored.quantized:
                plain = [copy for copy in copies if copy.chunk not in stored.quantized]
                quantized += [copy for copy in copies if copy.chunk in stored.quantized]
            groups.append(parts_of(stored, plain, targets, _COPIER))
        rows = [row for _, row in self._rows_of(groups)]
        if quantized:
            rows += self._rows_of_codes(quantized)
        return ReadFigures(*np.array(rows, np.int64).reshape(-1, 6).T)

    def _rows_of_codes(self, copies: Sequence[Copy]) -> Iterator[_Row]:
        """Yield the requests for quantized tensors. Each piece is read on its own."""
        cached = self._rows_of_copies
        if len(cached) > _CACHED_COPIES:
            cached.clear()
        new = {}
        for copy in copies:
            place = (copy.chunk, copy.source)
            if place not in cached:
                new[place] = copy
                cached[place] = []
        pieces = plan_decoding(self._stored, list(new.values()))
        for number, row in self._rows_of(self._parts_of_pieces(pieces)):
            copy = pieces[number].copy
            cached[copy.chunk, copy.source].append(row)
        for copy in copies:
            yield from cached[copy.chunk, copy.source]

    def _parts_of_pieces(self, pieces: Sequence[Piece]) -> list[list[ReadPart]]:
        """Return the parts of codes and scales of each piece."""
        copies: list[Copy] = []
        targets: list[torch.Tensor] = []
        numbers: list[int] = []
        for number, piece in enumerate(pieces):
            for copy in piece.copies:
                copies.append(copy._replace(request=len(targets) + copy.request))
                numbers.append(number)
            for role, region in piece.parts.items():
                dtype = FROM_NAME[piece.quantized.parts[role].dtype]
                targets.append(meta_tensor(region.shape, dtype))
        groups: list[list[ReadPart]] = [[] for _ in pieces]
        parts = parts_by_copy(self._stored, copies, targets, _COPIER)
        for number, of_copy in zip(numbers, parts, strict=True):
            groups[number] += of_copy
        return groups

    def _rows_of(self, groups: Sequence[Sequence[ReadPart]]) -> Iterator[tuple[int, _Row]]:
        """Yield the number and the requests of each group, read apart."""
        parts = list(itertools.chain.from_iterable(groups))
        numbers = np.repeat(np.arange(len(groups)), list(map(len, groups)))
        # Parts have the blocks of checksums already.
        stored = replace(self._stored, verify=False)
        table = in_file_order(stored, _COPIER, parts, numbers * self._num_files)
        reading = Reading(table, OpenFiles())
        if reading.is_local:
            for unit in reading.units():
                number, file = divmod(reading.file_of(unit), self._num_files)
                for row in _rows_of_unit(reading, unit, self._stored.verifies):
                    yield number, (file * _FILE_BYTES + row[0], *row[1:])
            return
        for units in reading.near_units():
            file, start, stop = reading.range_of(units)
            number, file = divmod(file, self._num_files)
            yield number, _row(file * _FILE_BYTES + start, stop - start)


def _row(start: int, size: int, piece_bytes: int = _UNLIMITED) -> _Row:
    """Return the row of a single range."""
    return start, size, 1, _UNLIMITED, piece_bytes, size


def _rows_of_unit(reading: Reading, unit: Unit, verifies: bool) -> Iterator[_Row]:
    """Yield the ranges of a unit of a local file."""
    part = reading.table.parts[unit[0].chunk]
    start = reading.position(unit)
    if part.is_sparse:
        yield from _rows_of_runs(reading.stored, part, start)
        return
    num_bytes = sum(sizes_of(unit))
    has_windows = num_bytes > PIECE_BYTES
    if has_windows and not verifies:
        has_windows = even_runs(reading.table, unit) is not None
    yield _row(start, num_bytes, PIECE_BYTES if has_windows else UNIT_BYTES)


def _rows_of_runs(stored: StoredCheckpoint, part: ReadPart, start: int) -> Iterator[_Row]:
    """Yield the runs of a sparse part, given its position."""
    shape = stored.manifest.chunk_region(part.chunk).shape
    item = stored.dtype_of(part.chunk).itemsize
    region = part.region
    axis = num_outer_axes(shape, region) - 1
    num_runs = math.prod(region.shape[: axis + 1])
    run = math.prod(region.shape[axis + 1 :]) * item
    if are_near(part, num_runs):
        yield *_row(start, part.stop - part.start)[:5], run * num_runs
        return
    firsts = run_starts(shape, region, axis) * item
    count = region.shape[axis]
    pitch = math.prod(shape[axis + 1 :]) * item
    for first in (firsts - firsts[0] + start).tolist():
        yield first, run, count, pitch, _UNLIMITED, run * count

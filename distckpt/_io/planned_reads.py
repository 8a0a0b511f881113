"""The requests that reads would make, from the plan alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.memory import Copier
from distckpt._base.threads import UNIT_BYTES
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import IntArray
from distckpt._geometry.units import Span
from distckpt._io.read import PIECE_BYTES, Reading, are_near, in_file_order, runs_of
from distckpt._io.read_parts import NOT_PLAIN, PartTable, ReadPart, even_runs, parts_of
from distckpt._plan.decoded import plan_decoding
from distckpt._plan.load import Copy
from distckpt._storage.open_files import OpenFiles

_FILE_BYTES = 1 << 44
"""Distance of the first bytes of two files from each other: more than a file has."""


class _MetaCopier(Copier):
    """A copier for which meta tensors stand for those in host memory."""

    def is_plain(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is row-major."""
        return tensor.is_contiguous()


class ReadFigures(NamedTuple):
    """The requests of reads, without data.

    Attributes:
        starts: with `stops`, ranges of bytes that leave the storage, in places that grow from file
            to file.
        stops: see `starts`.
        sizes: how many requests there are of each size. They are calls that read from a local
            file, or ranged GETs.
        num_bytes: the bytes that are asked for, without those that are fetched between them.
    """

    starts: IntArray
    stops: IntArray
    sizes: Counter[int]
    num_bytes: int

    @classmethod
    def joined(cls, reads: Iterable[ReadFigures]) -> ReadFigures:
        """Return the requests of several reads."""
        none = np.zeros(0, np.int64)
        columns = zip(cls(none, none, Counter(), 0), *reads, strict=True)
        starts, stops, sizes, num_bytes = columns
        total = Counter[int]()
        for counts in sizes:
            total.update(counts)
        return cls(np.concatenate(starts), np.concatenate(stops), total, sum(num_bytes))

    def num_different_bytes(self) -> int:
        """Count the bytes that leave the storage once."""
        if not len(self.starts):
            return 0
        starts = np.sort(self.starts)
        stops = np.sort(self.stops)
        # A gap is where all ranges that have begun have ended.
        gaps = np.maximum(starts[1:] - stops[:-1], 0)
        return int(stops[-1] - starts[0] - gaps.sum())


def planned_reads(
    stored: StoredCheckpoint,
    copies: Sequence[Copy],
    targets: Sequence[torch.Tensor],
    chunks: Sequence[int] = (),
) -> ReadFigures:
    """Return the requests of `read_copies`; targets may be on the meta device."""
    plain = [copy for copy in copies if copy.chunk not in stored.quantized]
    parts = parts_of(stored, plain, targets, _MetaCopier(()))
    for chunk in chunks:
        size = int(stored.manifest.num_bytes[chunk])
        parts.append(ReadPart(chunk, 0, size, None, NOT_PLAIN))
    groups = [parts]
    if len(plain) < len(copies):
        groups += _parts_of_codes(stored, copies)
    return _reads_of_groups(stored, groups)


def _parts_of_codes(stored: StoredCheckpoint, copies: Sequence[Copy]) -> Iterator[list[ReadPart]]:
    """Yield the parts of each piece of a quantized tensor."""
    for piece in plan_decoding(stored, copies):
        targets = []
        for role, region in piece.parts.items():
            dtype = FROM_NAME[piece.quantized.parts[role].dtype]
            targets.append(torch.empty(region.shape, dtype=dtype, device="meta"))
        yield parts_of(stored, piece.copies, targets, _MetaCopier(()))


def _table_of(stored: StoredCheckpoint, groups: Sequence[Sequence[ReadPart]]) -> PartTable:
    """Return the parts of several calls of `read_parts`.

    The same file in two groups counts as two, so that nothing is read together.
    """
    # Parts have the blocks of checksums already.
    plain = replace(stored, verify=False)
    table = in_file_order(plain, _MetaCopier(()), list(itertools.chain(*groups)))
    group_of = {id(part): number for number, group in enumerate(groups) for part in group}
    of_parts = np.array([group_of[id(part)] for part in table.parts], np.int64)
    order = np.argsort(of_parts, kind="stable")
    return table._replace(
        parts=[table.parts[i] for i in order.tolist()],
        files=(table.files + of_parts * len(stored.manifest.files))[order],
        positions=table.positions[order],
    )


def _reads_of_groups(stored: StoredCheckpoint, groups: Sequence[Sequence[ReadPart]]) -> ReadFigures:
    """Return the requests of a call of `read_parts` for each group."""
    table = _table_of(stored, groups)
    num_files = len(stored.manifest.files)
    reading = Reading(table, OpenFiles())
    if not reading.is_local:
        ranges = np.array([reading.range_of(units) for units in reading.near_units()], np.int64)
        files, starts, stops = ranges.reshape(-1, 3).T
        return _reads_of_ranges(files % num_files, starts, stops - starts)
    figures = []
    spans: dict[int, list[tuple[int, int, int]]] = {PIECE_BYTES: [], UNIT_BYTES: []}
    for unit in reading.units():
        first = unit[0]
        if table.parts[first.chunk].is_sparse:
            figures.append(_reads_of_runs(reading, unit))
            continue
        has_windows = stored.verifies or even_runs(table, unit) is not None
        of_size = spans[PIECE_BYTES if has_windows else UNIT_BYTES]
        of_size.append((first.chunk, first.start, sum(span.num_bytes for span in unit)))
    for piece_bytes, of_size in spans.items():
        numbers, starts, num_bytes = np.array(of_size, np.int64).reshape(-1, 3).T
        starts = starts + table.positions[numbers]
        files = table.files[numbers] % num_files
        figures.append(_reads_of_ranges(files, starts, num_bytes, piece_bytes))
    return ReadFigures.joined(figures)


def _reads_of_ranges(
    files: IntArray, starts: IntArray, num_bytes: IntArray, piece_bytes: int = 1 << 62
) -> ReadFigures:
    """Return the requests for ranges of files, of at most `piece_bytes` each."""
    last_pieces, counts = np.unique(num_bytes % piece_bytes, return_counts=True)
    sizes = Counter(dict(zip(last_pieces.tolist(), counts.tolist(), strict=True)))
    sizes[piece_bytes] += int((num_bytes // piece_bytes).sum())
    del sizes[0]
    starts = starts + files * _FILE_BYTES
    return ReadFigures(starts, starts + num_bytes, +sizes, int(num_bytes.sum()))


def _reads_of_runs(reading: Reading, unit: list[Span]) -> ReadFigures:
    """Return the requests for the runs of a sparse part."""
    part = reading.table.parts[unit[0].chunk]
    starts, run = runs_of(reading.stored, part)
    file = reading.file_of(unit) % len(reading.stored.manifest.files)
    if are_near(part, len(starts)):
        _, start, stop = np.array(reading.range_of([unit]), np.int64).reshape(3, 1)
        reads = _reads_of_ranges(np.array([file]), start, stop - start)
        return reads._replace(num_bytes=run * len(starts))
    starts += file * _FILE_BYTES
    sizes = Counter({run: len(starts)})
    return ReadFigures(starts, starts + run, sizes, run * len(starts))

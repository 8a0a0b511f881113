"""The requests that reads would make, from the plan alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from distckpt._io.read_parts import NOT_PLAIN, ReadPart, parts_of
from distckpt._plan.decoded import plan_decoding
from distckpt._plan.load import Copy
from distckpt._storage.open_files import OpenFiles


class PlannedReads(NamedTuple):
    """The requests of a read, without data.

    Attributes:
        files: with `starts` and `stops`, ranges of bytes that leave the storage.
        starts: see `files`.
        stops: see `files`.
        num_requests: the number of requests: calls that read from a local file, or ranged GETs.
        num_bytes: the bytes that they ask for.
    """

    files: IntArray
    starts: IntArray
    stops: IntArray
    num_requests: int
    num_bytes: int

    @classmethod
    def joined(cls, reads: Iterable[PlannedReads]) -> PlannedReads:
        """Return the requests of several reads."""
        none = np.zeros(0, np.int64)
        files, starts, stops, num_requests, num_bytes = zip(
            cls(none, none, none, 0, 0), *reads, strict=True
        )
        columns = map(np.concatenate, (files, starts, stops))
        return cls(*columns, num_requests=sum(num_requests), num_bytes=sum(num_bytes))

    def num_different_bytes(self) -> int:
        """Return the number of bytes, each of them once."""
        order = np.lexsort((self.starts, self.files))
        files = self.files[order]
        # The end of all ranges before, in places that grow from file to file.
        size = int(self.stops.max(initial=0))
        starts = self.starts[order] + files * size
        stops = self.stops[order] + files * size
        before = np.maximum.accumulate(np.append(0, stops))[:-1]
        return int(np.maximum(stops - np.maximum(starts, before), 0).sum())


def planned_reads(
    stored: StoredCheckpoint,
    copies: Sequence[Copy],
    targets: Sequence[torch.Tensor],
    chunks: Sequence[int] = (),
) -> PlannedReads:
    """Return the requests of `read_copies`; targets may be on the meta device."""
    plain = [copy for copy in copies if copy.chunk not in stored.quantized]
    parts = parts_of(stored, plain, targets, Copier(()))
    for chunk in chunks:
        size = int(stored.manifest.num_bytes[chunk])
        parts.append(ReadPart(chunk, 0, size, None, NOT_PLAIN))
    reads = [_reads_of_parts(stored, parts)]
    if len(plain) < len(copies):
        for piece in plan_decoding(stored, copies):
            of_piece = []
            for role, region in piece.parts.items():
                dtype = FROM_NAME[piece.quantized.parts[role].dtype]
                of_piece.append(torch.empty(region.shape, dtype=dtype, device="meta"))
            of_codes = parts_of(stored, piece.copies, of_piece, Copier(()))
            reads.append(_reads_of_parts(stored, of_codes))
    return PlannedReads.joined(reads)


def _reads_of_parts(stored: StoredCheckpoint, parts: Sequence[ReadPart]) -> PlannedReads:
    """Return the requests that `read_parts` makes for some parts."""
    # Parts have the blocks of checksums already.
    table = in_file_order(replace(stored, verify=False), Copier(()), parts)
    reading = Reading(table, OpenFiles())
    if not reading.is_local:
        ranges = []
        for units in reading.near_units():
            ranges.append((reading.file_of(units[0]), *reading.range_of(units)))
        files, starts, stops = np.array(ranges, np.int64).reshape(-1, 3).T
        return PlannedReads(files, starts, stops, len(ranges), int((stops - starts).sum()))
    piece_bytes = PIECE_BYTES if stored.verifies else UNIT_BYTES
    rows = []
    sparse = []
    for unit in reading.units():
        part = table.parts[unit[0].chunk]
        if part.is_sparse:
            sparse.append(_planned_runs(reading, unit))
        else:
            rows.append((reading.file_of(unit), *reading.range_of([unit])))
    files, starts, stops = np.array(rows, np.int64).reshape(-1, 3).T
    num_requests = int((-(-(stops - starts) // piece_bytes)).sum())
    dense = PlannedReads(files, starts, stops, num_requests, int((stops - starts).sum()))
    return PlannedReads.joined([dense, *sparse])


def _planned_runs(reading: Reading, unit: list[Span]) -> PlannedReads:
    """Return the requests of `_read_runs`."""
    part = reading.table.parts[unit[0].chunk]
    starts, run = runs_of(reading.stored, part)
    num_bytes = run * len(starts)
    stops = starts + run
    if are_near(part, len(starts)):
        starts, stops = np.array([reading.range_of([unit])], np.int64).T
    files = np.full(len(starts), reading.file_of(unit))
    return PlannedReads(files, starts, stops, len(starts), num_bytes)

"""Owners of the shards of one planner, and messages about them.

Pure functions. The coordinator balances the bytes of ranks over the reports of all planners, so
that the plan is the same for any number of planners.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distckpt._format.columns import narrow, pack, unpack
from distckpt._geometry.region import IntArray
from distckpt._plan.save import Pieces, cut_tolerance, writer_shares
from distckpt._state.shards import ShardTable


class ReplicaGroups(NamedTuple):
    """The bytes of one planner, grouped by their possible writers.

    All bytes that the same several ranks hold form one line, see `lines`.

    Attributes:
        loads: for each rank the bytes that no other rank can write.
        totals: the size of each line.
        starts: the first of each line's ranks in `candidates`, then the number of candidates.
        candidates: the ranks of all lines.
    """

    loads: IntArray
    totals: IntArray
    starts: IntArray
    candidates: IntArray


class CutPoints(NamedTuple):
    """The positions at which the lines of a planner are cut.

    Attributes:
        positions: in bytes from the beginning of the planner's part of each line.
        tolerances: for each line the distance by which a cut may be moved, see `cut_line`.
    """

    positions: IntArray
    tolerances: IntArray


def to_bytes(columns: ReplicaGroups | CutPoints) -> bytes:
    """Encode columns for sending."""
    return pack(None, {name: narrow(column) for name, column in columns._asdict().items()})


def columns_of(data: bytes) -> dict[str, IntArray]:
    """Decode the result of `to_bytes`; return the columns by field."""
    _, columns = unpack(data)
    return {name: column.astype(np.int64) for name, column in columns.items()}


def choose_cuts(groups_of_planners: Sequence[ReplicaGroups]) -> list[CutPoints]:
    """Choose the cuts that give all ranks similar loads, as `plan_owners` does.

    A line consists of the parts of all planners, one after the other.
    """
    loads = np.sum([groups.loads for groups in groups_of_planners], axis=0)
    positions = []
    tolerances = []
    parts: dict[bytes, list[tuple[int, int]]] = {}
    for planner, groups in enumerate(groups_of_planners):
        num_lines = len(groups.totals)
        positions.append(np.zeros(len(groups.candidates) - num_lines, np.int64))
        tolerances.append(np.zeros(num_lines, np.int64))
        for line, (low, high) in enumerate(itertools.pairwise(groups.starts.tolist())):
            ranks = groups.candidates[low:high].tobytes()
            parts.setdefault(ranks, []).append((planner, line))
    # As within one planner: smaller sets of ranks first, then in the order of the keys.
    for ranks in sorted(parts, key=len):
        candidates = np.frombuffer(ranks, np.int64)
        totals = [int(groups_of_planners[planner].totals[line]) for planner, line in parts[ranks]]
        shares = writer_shares(loads[candidates], sum(totals))
        loads[candidates] += shares
        ends = np.cumsum(shares)[:-1]
        begin = 0
        for (planner, line), total in zip(parts[ranks], totals, strict=True):
            low = int(groups_of_planners[planner].starts[line]) - line
            positions[planner][low : low + len(ends)] = np.clip(ends - begin, 0, total)
            tolerances[planner][line] = cut_tolerance(sum(totals), len(candidates))
            begin += total
    return [CutPoints(*columns) for columns in zip(positions, tolerances, strict=True)]


class PlannedRows(NamedTuple):
    """The answer of a planner to a rank.

    All rows are rows of the rank's own table.

    Attributes:
        whole_rows: rows that the rank writes whole.
        cut_rows: rows of which it writes the regions in `offsets` and `shapes`.
        factors: factors of replicas, see `replica_factors`.
        factor_rows: the row of each factor.
        sampled_rows: rows whose samples the coordinator needs.
    """

    whole_rows: IntArray
    cut_rows: IntArray
    offsets: IntArray
    shapes: IntArray
    factors: IntArray
    factor_rows: IntArray
    sampled_rows: IntArray

    @classmethod
    def from_bytes(cls, data: bytes, rows: IntArray) -> PlannedRows:
        """Decode a message of `PartPlanning.finish` to a rank.

        Args:
            data: the message.
            rows: the rows of its table that the rank has described to the planner.
        """
        num_whole, num_cut, num_factors, num_sampled, ndim = np.frombuffer(
            data, np.int64, 5
        ).tolist()
        sizes = [num_cut, num_cut * 2 * ndim, num_factors, num_factors, num_sampled]
        words = np.frombuffer(data, np.int64, 5 + sum(sizes))
        cut, regions, factors, with_factor, sampled, _ = np.split(words[5:], np.cumsum(sizes))
        whole = np.frombuffer(data, np.int32, num_whole, words.nbytes)
        regions = regions.reshape(num_cut, 2 * ndim)
        return cls(
            rows[whole],
            rows[cut],
            regions[:, :ndim],
            regions[:, ndim:],
            factors,
            rows[with_factor],
            rows[sampled],
        )


def join_pieces(
    table: ShardTable, answers: Sequence[PlannedRows], ids: IntArray, aliases: Sequence[int]
) -> Pieces:
    """Join the pieces of a rank from all planners.

    Args:
        table: the table of the rank.
        answers: one from each planner.
        ids: the numbers of the rank's keys.
        aliases: the numbers of keys that are not stored.
    """
    # The manifest numbers only keys that are stored.
    stored_ids = ids - np.searchsorted(np.sort(np.array(aliases, np.int64)), ids)
    ndim = table.offsets.shape[1]
    whole = np.concatenate([answer.whole_rows for answer in answers])
    cut = np.concatenate([answer.cut_rows for answer in answers])
    rows = np.concatenate((whole, cut))
    offsets = [table.offsets[whole]]
    shapes = [table.shapes[whole]]
    for answer in answers:
        offsets.append(answer.offsets[:, :ndim])
        shapes.append(answer.shapes[:, :ndim])
    return Pieces(
        key_ids=stored_ids[table.key_ids[rows]],
        shard_ids=table.shard_ids[rows],
        offsets=np.concatenate(offsets),
        shapes=np.concatenate(shapes),
    )


def join_factors(table: ShardTable, answers: Sequence[PlannedRows]) -> IntArray:
    """Return the factors of the rows of a rank's table, see `replica_factors`."""
    factors = np.zeros(len(table.key_ids), np.int64)
    for answer in answers:
        factors[answer.factor_rows] = answer.factors
    return factors

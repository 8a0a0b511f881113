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
from distckpt._io.divided.descriptions import PlannerInput
from distckpt._plan.save import (
    Groups,
    OwnedParts,
    Pieces,
    Slice,
    cut_line,
    cut_tolerance,
    find_aliases,
    group_replicas,
    owned_parts,
    writer_shares,
)
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

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return pack(None, {name: narrow(column) for name, column in self._asdict().items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> ReplicaGroups:
        """Decode the result of `to_bytes`."""
        _, columns = unpack(data)
        return cls(*(columns[name].astype(np.int64) for name in cls._fields))


class CutPoints(NamedTuple):
    """The positions at which the lines of a planner are cut.

    Attributes:
        positions: in bytes from the beginning of the planner's part of each line.
        tolerances: for each line the distance by which a cut may be moved, see `cut_line`.
    """

    positions: IntArray
    tolerances: IntArray

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return pack(None, {name: narrow(column) for name, column in self._asdict().items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> CutPoints:
        """Decode the result of `to_bytes`."""
        _, columns = unpack(data)
        return cls(*(columns[name].astype(np.int64) for name in cls._fields))


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


class Planner:
    """The owners of the valid shards of a range of keys."""

    def __init__(self, planner_input: PlannerInput) -> None:
        self.table = planner_input.table
        self.row_starts = planner_input.row_starts
        exchange_groups = planner_input.exchange_groups
        self.num_ranks = len(exchange_groups)
        self.aliases = find_aliases(self.table)
        self.groups: Groups = group_replicas(
            self.table, self.num_ranks, self.aliases, exchange_groups, by_key=True
        )
        self._owners = self.groups.lone_owners()
        self._lines = list(self.groups.shared_lines())

    def replica_groups(self) -> ReplicaGroups:
        """Return the bytes that the coordinator distributes over ranks."""
        sizes = []
        totals = []
        candidates = [np.zeros(0, np.int64)]
        for members, ranks in self._lines:
            sizes.append(len(ranks))
            totals.append(int(self.groups.num_bytes[members].sum()))
            candidates.append(ranks)
        return ReplicaGroups(
            loads=self.groups.loads_of(self._owners, self.num_ranks),
            totals=np.array(totals, np.int64),
            starts=np.append(0, np.cumsum(sizes)).astype(np.int64),
            candidates=np.concatenate(candidates),
        )

    def assign(self, cut_points: CutPoints) -> OwnedParts:
        """Return the parts that each rank writes."""
        owners = self._owners.copy()
        slices: list[Slice] = []
        low = 0
        for (members, candidates), tolerance in zip(
            self._lines, cut_points.tolerances.tolist(), strict=True
        ):
            high = low + len(candidates) - 1
            cuts = cut_points.positions[low:high]
            owners[members], slices_of_line = cut_line(
                self.table, self.groups, members, cuts, candidates, tolerance
            )
            slices += slices_of_line
            low = high
        return owned_parts(self.table, self.groups, owners, slices)

    def shares(
        self, parts: OwnedParts, factors: IntArray, sampled: Sequence[Sequence[int]]
    ) -> list[bytes]:
        """Encode the answer to each rank, see `PlannedRows`.

        Args:
            parts: the parts that ranks write.
            factors: of all rows, see `replica_factors`.
            sampled: for each rank the rows whose samples the coordinator needs.
        """
        shares = []
        ndim = self.table.offsets.shape[1]
        local_rows = parts.rows - self.row_starts[parts.ranks]
        regions = np.hstack((parts.offsets, parts.shapes)).astype(np.int64)
        with_factor = np.flatnonzero(factors)
        factor_bounds = np.searchsorted(with_factor, self.row_starts).tolist()
        ranges_of_ranks = zip(
            itertools.pairwise(parts.bounds(self.num_ranks)),
            itertools.pairwise(factor_bounds),
            self.row_starts.tolist(),
            sampled,
            strict=False,
        )
        for (low, high), (first, last), row_start, sampled_rows in ranges_of_ranks:
            rows = local_rows[low:high]
            is_whole = parts.is_whole[low:high]
            is_cut = ~is_whole
            factor_rows = with_factor[first:last]
            counts = [is_whole.sum(), is_cut.sum(), len(factor_rows), len(sampled_rows), ndim]
            arrays = (
                np.array(counts, np.int64),
                rows[is_cut].astype(np.int64),
                regions[low:high][is_cut],
                factors[factor_rows].astype(np.int64),
                (factor_rows - row_start).astype(np.int64),
                np.array(sampled_rows, np.int64),
                rows[is_whole].astype(np.int32),
            )
            shares.append(b"".join(array.tobytes() for array in arrays))
        return shares


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
        """Decode a message of `Planner.shares` to a rank.

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

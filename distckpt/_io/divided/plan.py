"""A plan of a save with very many shards, by several ranks.

All ranks describe their shards to the coordinator, which forwards them to several planners by key,
and their answers to the ranks.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from distckpt._base.errors import InvalidShardingError
from distckpt._base.options import SaveOptions
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import Manifest, needs_checksum_files, num_blocks_of
from distckpt._format.planned_manifest import parts_by_name
from distckpt._io.divided.descriptions import (
    KeysOfRank,
    Numbering,
    chunks_by_planner,
    describe_rows,
    number_keys,
    parts_of_chunks,
    planner_ranks,
    read_descriptions,
    split_chunks,
    tied_keys,
)
from distckpt._io.divided.owners import (
    CutPoints,
    PlannedRows,
    ReplicaGroups,
    choose_cuts,
    columns_of,
    join_factors,
    join_pieces,
    to_bytes,
)
from distckpt._io.replica_differences import (
    Pair,
    ReplicasToCompare,
    keep_different_whole,
)
from distckpt._io.shared_plan import Share, SharedPlan
from distckpt._plan.layout import manifest_without_chunks
from distckpt._plan.save import (
    CutLine,
    OwnedPieces,
    assign_pieces,
    find_aliases,
    group_replicas,
)
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.exchanges import pack_parts, unpack_parts
from distckpt._state.shards import ShardTable
from distckpt._state.validation import (
    find_differences,
    num_replicated,
    replica_factors,
    stride_of,
    validate_shards,
)

_STEP = "plan"
_INVALID = b"-"
_VALID = b"+"


def plan_divided(
    ranks: Ranks, table: ShardTable, options: SaveOptions, num_planners: int
) -> SharedPlan:
    """Plan a save with several planners.

    Collective operation: all ranks must call it. All ranks raise the refusal of a planner.

    Raises:
        InvalidShardingError: shards overlap, leave gaps or contradict each other.
    """
    coordinator = Coordinator(ranks.size, num_planners)
    kinds, ties = ranks.gather_once((table.kinds_to_bytes(), tied_keys(table)))
    own_keys = KeysOfRank.from_bytes(
        ranks.decide_each(_STEP, lambda: coordinator.number_keys(kinds, ties))
    )
    rows_of_planners = own_keys.rows_of_planners(table)
    descriptions = ranks.gather_once(
        [describe_rows(table, own_keys, rows) for rows in rows_of_planners]
    )
    bundle = ranks.decide_each(_STEP, lambda: coordinator.bundles_by_rank(descriptions))
    # Without validation, elements that no rank holds are accepted.
    allow_gaps = not options.validate_access_integrity
    planning = PartPlanning(allow_gaps, bool(options.validate_replicas))
    with ranks.telling(_STEP) as reports:
        if bundle:
            reports.payload = planning.begin(bundle)
    with ranks.answering(reports, _STEP):
        if ranks.is_coordinator:
            reports.answer = coordinator.balance(reports.payloads)
    number, stride, aliases, has_differences, ndim = json.loads(reports.answer)
    cuts = ranks.decide_each(_STEP, coordinator.cuts_by_rank)
    with ranks.telling(_STEP, answer_each=True) as shares:
        if bundle:
            shares.payload = planning.finish(CutPoints(**columns_of(cuts)))
    has_files, *messages = unpack_parts(
        ranks.decide_each(_STEP, lambda: coordinator.join_shares(shares.payloads), shares)
    )
    answers = []
    for message, rows in zip(messages, rows_of_planners, strict=True):
        answers.append(PlannedRows.from_bytes(message, rows))
    sampled = None
    if has_differences:
        sampled = np.concatenate([answer.sampled_rows for answer in answers]).tolist()
    share = Share(
        number=number,
        stride=stride,
        sampled=sampled,
        has_checksum_file=bool(has_files),
        factors=join_factors(table, answers),
        pieces=join_pieces(table, answers, own_keys.ids, aliases),
    )
    shared = SharedPlan(share, coordinator.manifest, coordinator.differing)
    if not has_files:
        return shared
    edges = own_keys.edges - np.searchsorted(sorted(aliases), own_keys.edges)
    divide = partial(_gather_parts, edges=edges.tolist(), ndim=ndim)
    return shared._replace(divide_chunks=divide)


def _gather_parts(
    ranks: Ranks, table: ChunkTable, edges: Sequence[int], ndim: int
) -> tuple[ChunkTable, dict[str, bytes]]:
    """Let planners sort all chunks into parts of the manifest.

    Collective operation: all ranks must call it. Return the chunks of this rank that no part has,
    with its files, and on the coordinator the parts by name.

    Args:
        ranks: the ranks that save together.
        table: the chunks that this rank writes.
        edges: the first key of each planner in the manifest, then the number of keys.
        ndim: the largest number of axes of any key there.
    """
    rest, message = split_chunks(table, edges, ndim)
    messages = ranks.gather(message)
    planners = planner_ranks(len(edges) - 1, ranks.size)
    bundle = ranks.decide_each(
        _STEP, lambda: _by_rank(chunks_by_planner(messages), planners, ranks.size)
    )
    parts: dict[str, bytes] = {}
    with ranks.telling(_STEP) as exchange:
        if bundle:
            exchange.payload = pack_parts(parts_of_chunks(bundle, ndim))
    with ranks.answering(exchange, _STEP):
        if ranks.is_coordinator:
            parts_of_planners = [unpack_parts(exchange.payloads[rank]) for rank in planners]
            parts = parts_by_name(itertools.chain(*parts_of_planners))
    return rest, parts


def _by_rank(messages: Sequence[bytes], planners: Sequence[int], num_ranks: int) -> list[bytes]:
    """List messages to planners by rank; other ranks get an empty one."""
    payloads = [b""] * num_ranks
    for rank, payload in zip(planners, messages, strict=True):
        payloads[rank] = payload
    return payloads


class _PlannerReport(NamedTuple):
    """The report of a planner to the coordinator about its keys.

    Attributes:
        groups: the bytes to distribute.
        aliases: pairs of tied keys, of which only the second is stored, from the planner's first
            key on.
        num_replicated: see the function of this name.
        differing: replicas that differ, see `differences_to_json`; None if all are equal.
    """

    groups: ReplicaGroups
    aliases: list[tuple[int, int]]
    num_replicated: int
    differing: Any

    def to_bytes(self) -> bytes:
        return pack_parts([to_bytes(self.groups), json.dumps(self[1:]).encode()])

    @classmethod
    def from_bytes(cls, data: bytes) -> _PlannerReport:
        groups, fields = unpack_parts(data)
        return cls(ReplicaGroups(**columns_of(groups)), *json.loads(fields))


def _read_reports(answers: Sequence[bytes]) -> list[_PlannerReport]:
    """Return the reports of planners, or raise their refusal."""
    refusals = [answer[1:].decode() for answer in answers if answer[:1] == _INVALID]
    if len(refusals) > 1:
        raise InvalidShardingError(refusals[0] + "\n- Other keys are wrong, too.")
    if refusals:
        raise InvalidShardingError(refusals[0])
    return [_PlannerReport.from_bytes(answer[1:]) for answer in answers]


class PartPlanning:
    """The work of one planner, in two steps: the owners of the shards of a range of keys."""

    def __init__(self, allow_gaps: bool, differences_are_errors: bool) -> None:
        self._allow_gaps = allow_gaps
        self._differences_are_errors = differences_are_errors
        self._sampled: Sequence[Sequence[int]] = ()

    def begin(self, bundle: bytes) -> bytes:
        """Validate the shards of some keys; return a report, or a refusal."""
        keys, senders, *distinct = unpack_parts(bundle)
        messages = [distinct[i] for i in np.frombuffer(senders, np.int32).tolist()]
        self._table, self._row_starts, exchange_groups = read_descriptions(keys, messages)
        try:
            return _VALID + self._report(exchange_groups).to_bytes()
        except InvalidShardingError as error:
            return _INVALID + str(error).encode()

    def _report(self, exchange_groups: Sequence[int]) -> _PlannerReport:
        table = self._table
        validate_shards(table, allow_gaps=self._allow_gaps)
        differences = find_differences(table)
        differing = None
        starts = self._row_starts[:-1].tolist()
        self._sampled = [()] * len(starts)
        if len(differences.rows):
            replicas = keep_different_whole(
                table, differences, starts, self._differences_are_errors
            )
            self._sampled = replicas.rows_of_ranks
            differing = differences_to_json(replicas)
        aliases = find_aliases(table)
        self._groups = group_replicas(table, len(starts), aliases, exchange_groups, by_key=True)
        self._owners = self._groups.lone_owners()
        self._lines = list(self._groups.shared_lines())
        self._factors = replica_factors(table)
        return _PlannerReport(
            self._replica_groups(),
            list(aliases.items()),
            num_replicated(self._factors),
            differing,
        )

    def _replica_groups(self) -> ReplicaGroups:
        """Return the bytes that the coordinator distributes over ranks."""
        sizes = []
        totals = []
        candidates = [np.zeros(0, np.int64)]
        for members, ranks in self._lines:
            sizes.append(len(ranks))
            totals.append(int(self._groups.num_bytes[members].sum()))
            candidates.append(ranks)
        return ReplicaGroups(
            loads=self._groups.loads_of(self._owners, len(self._sampled)),
            totals=np.array(totals, np.int64),
            starts=np.append(0, np.cumsum(sizes)).astype(np.int64),
            candidates=np.concatenate(candidates),
        )

    def finish(self, cut_points: CutPoints) -> bytes:
        """Encode the number of all pieces, then the answer to each rank."""
        cuts = self._cut_lines(cut_points)
        pieces = assign_pieces(self._table, self._groups, self._owners, cuts)
        return pack_parts([len(pieces.rows).to_bytes(8, "little"), *self._shares(pieces)])

    def _cut_lines(self, cut_points: CutPoints) -> Iterator[CutLine]:
        low = 0
        for line, tolerance in zip(self._lines, cut_points.tolerances.tolist(), strict=True):
            high = low + len(line[1]) - 1
            yield (*line, cut_points.positions[low:high], tolerance)
            low = high

    def _shares(self, pieces: OwnedPieces) -> list[bytes]:
        """Encode the answer to each rank, see `PlannedRows`."""
        shares = []
        ndim = self._table.offsets.shape[1]
        local_rows = pieces.rows - self._row_starts[pieces.ranks]
        regions = np.hstack((pieces.offsets, pieces.shapes)).astype(np.int64)
        with_factor = np.flatnonzero(self._factors)
        factor_bounds = np.searchsorted(with_factor, self._row_starts).tolist()
        ranges_of_ranks = zip(
            itertools.pairwise(pieces.bounds(len(self._sampled))),
            itertools.pairwise(factor_bounds),
            self._row_starts.tolist(),
            self._sampled,
            strict=False,
        )
        for (low, high), (first, last), row_start, sampled_rows in ranges_of_ranks:
            rows = local_rows[low:high]
            is_whole = pieces.is_whole[low:high]
            is_cut = ~is_whole
            factor_rows = with_factor[first:last]
            counts = [is_whole.sum(), is_cut.sum(), len(factor_rows), len(sampled_rows), ndim]
            arrays = (
                np.array(counts, np.int64),
                rows[is_cut].astype(np.int64),
                regions[low:high][is_cut],
                self._factors[factor_rows].astype(np.int64),
                (factor_rows - row_start).astype(np.int64),
                np.array(sampled_rows, np.int64),
                rows[is_whole].astype(np.int32),
            )
            shares.append(b"".join(array.tobytes() for array in arrays))
        return shares


class Coordinator:
    """The state of the coordinator while ranks plan; other ranks leave it empty."""

    manifest: Manifest | None = None
    differing: ReplicasToCompare | None = None
    not_stored: Sequence[int] = ()
    _numbering: Numbering
    _cuts: list[CutPoints]

    def __init__(self, num_ranks: int, num_planners: int) -> None:
        self._num_ranks = num_ranks
        self._planners = planner_ranks(num_planners, num_ranks)

    def number_keys(self, kinds: list[bytes], ties: list[bytes]) -> list[bytes]:
        """Number the keys; return a message to each rank."""
        self._numbering = number_keys(kinds, ties, len(self._planners))
        return self._numbering.to_ranks()

    def bundles_by_rank(self, descriptions: list[list[bytes]]) -> list[bytes]:
        """Return, by rank, the keys and descriptions for each planner.

        Args:
            descriptions: for each planner the messages of all ranks. They are removed from the list
                one after the other.
        """
        bundles = []
        for planner, messages in enumerate(descriptions):
            positions: dict[bytes, int] = {}
            senders = [positions.setdefault(message, len(positions)) for message in messages]
            keys = self._numbering.to_planner(planner)
            sender_bytes = np.array(senders, np.int32).tobytes()
            bundles.append(pack_parts([keys, sender_bytes, *positions]))
            descriptions[planner] = []
        return _by_rank(bundles, self._planners, self._num_ranks)

    def balance(self, payloads: Sequence[bytes]) -> bytes:
        """Balance the bytes of ranks; return a message to all of them.

        Raises:
            InvalidShardingError: a planner has refused its shards.
        """
        reports = _read_reports([payloads[rank] for rank in self._planners])
        self._cuts = choose_cuts([report.groups for report in reports])
        aliases: list[tuple[int, int]] = []
        differing = []
        for first, report in zip(self._numbering.edges, reports, strict=False):
            for alias, key in report.aliases:
                aliases.append((first + alias, first + key))
            if report.differing:
                differing.append(report.differing)
        self.not_stored = [alias for alias, _ in aliases]
        numbering = self._numbering
        self.manifest = manifest_without_chunks(
            numbering.keys, numbering.dtypes, numbering.global_shapes, dict(aliases)
        )
        if differing:
            self.differing = join_differences(differing)
        number = 1 + secrets.randbits(61)
        stride = stride_of(sum(report.num_replicated for report in reports))
        ndim = max(map(len, self.manifest.global_shapes), default=0)
        return json.dumps([number, stride, self.not_stored, bool(differing), ndim]).encode()

    def cuts_by_rank(self) -> list[bytes]:
        """Return, by rank, the cuts of each planner."""
        cuts = list(map(to_bytes, self._cuts))
        return _by_rank(cuts, self._planners, self._num_ranks)

    def join_shares(self, payloads: Sequence[bytes]) -> list[bytes]:
        """Return, by rank, the answers of all planners.

        Before them comes whether checksums need files.
        """
        assert self.manifest is not None
        num_pieces = 0
        shares_of_planners = []
        for rank in self._planners:
            count, *shares = unpack_parts(payloads[rank])
            num_pieces += int.from_bytes(count, "little")
            shares_of_planners.append(shares)
        has_files = needs_checksum_files(num_blocks_of(self.manifest) + num_pieces)
        flag = b"+" if has_files else b""
        return [pack_parts([flag, *shares]) for shares in zip(*shares_of_planners, strict=True)]


# --- Replicas that differ -------------------------------------------------------------------------


def differences_to_json(compared: ReplicasToCompare) -> Any:
    """Encode the differing replicas of one planner, for `join_differences`."""
    num_rows = {str(i): len(rows) for i, rows in enumerate(compared.rows_of_ranks) if rows}
    return [compared.keys, compared.ranks, compared.pairs, num_rows, str(compared.error)]


def join_differences(parts: Sequence[Any]) -> ReplicasToCompare:
    """Join the differing replicas of all planners.

    Samples of a rank are in the order of the planners.
    """
    num_before: Counter[int] = Counter()
    keys: list[str] = []
    ranks: set[int] = set()
    pairs: list[Pair] = []
    for keys_of_part, ranks_of_part, pairs_of_part, num_rows, _ in parts:
        keys += keys_of_part
        ranks.update(ranks_of_part)
        for key, dtype, num_elements, *places in pairs_of_part:
            main, other = ((rank, num_before[rank] + place) for rank, place in places)
            pairs.append(Pair(key, dtype, num_elements, main, other))
        num_before.update({int(rank): num for rank, num in num_rows.items()})
    error = InvalidShardingError(parts[0][-1])
    # Ranks hear from the planners which rows to send.
    return ReplicasToCompare(keys, sorted(ranks), pairs, [], error)

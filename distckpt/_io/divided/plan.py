"""Planning a save of many shards together: ranks send the coordinator what they hold, it hands that
on to several planners by key, and their answers back.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from distckpt._base.errors import InvalidShardingError
from distckpt._base.options import SaveOptions
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import Manifest, needs_checksum_files, num_blocks_of
from distckpt._format.planned_manifest import parts_by_name
from distckpt._io.divided.planner import (
    Cuts,
    Described,
    Lines,
    Numbering,
    OwnKeys,
    PlannedRows,
    Planner,
    chunks_by_planner,
    chunks_message,
    describe_rows,
    join_factors,
    join_pieces,
    number_keys,
    parts_of_chunks,
    planner_ranks,
    read_descriptions,
    share_lines,
    split_chunks,
    tied_keys,
)
from distckpt._io.replica_differences import (
    Pair,
    ReplicasToCompare,
    keep_different_whole,
)
from distckpt._io.shared_plan import Share, SharedPlan, without_parts
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
_INVALID, _VALID = b"-", b"+"


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
    own_keys = OwnKeys.from_bytes(
        ranks.decide_each(_STEP, lambda: coordinator.number_keys(kinds, ties))
    )
    rows = own_keys.rows_of_planners(table)
    described = ranks.gather_once([describe_rows(table, own_keys, each) for each in rows])
    bundle = ranks.decide_each(_STEP, lambda: coordinator.hand_on(described))
    # Without validation, elements that no rank holds are accepted.
    allow_gaps = not options.validate_access_integrity
    planning = PartPlanning(allow_gaps, bool(options.validate_replicas))
    with ranks.telling(_STEP) as told:
        if bundle:
            told.payload = planning.begin(bundle)
    with ranks.answering(told, _STEP):
        if ranks.is_coordinator:
            told.answer = coordinator.share_out(told.payloads)
    number, stride, aliases, differ = json.loads(told.answer)
    cuts = ranks.decide_each(_STEP, coordinator.cuts_by_rank)
    with ranks.telling(_STEP) as told:
        if bundle:
            told.payload = planning.finish(Cuts.from_bytes(cuts))
    with ranks.answering(told, _STEP):
        if ranks.is_coordinator:
            told.answer = bytes([coordinator.gather_shares(told.payloads)])
    has_files = any(told.answer)
    shares = unpack_parts(ranks.decide_each(_STEP, coordinator.shares_by_rank))
    planned = [PlannedRows.from_bytes(*each) for each in zip(shares, rows, strict=True)]
    share = Share(
        number=number,
        stride=stride,
        sampled=_sampled_rows(planned) if differ else None,
        has_checksum_file=has_files,
        factors=join_factors(table, planned),
        pieces=join_pieces(table, planned, own_keys.ids, aliases),
    )
    edges = own_keys.edges - np.searchsorted(sorted(aliases), own_keys.edges)
    divide = partial(_gather_parts, edges=edges.tolist(), manifest=coordinator.manifest)
    return SharedPlan(
        share,
        coordinator.manifest,
        coordinator.differing,
        divide if has_files else without_parts,
    )


def _sampled_rows(planned: Sequence[PlannedRows]) -> list[int]:
    return [row for each in planned for row in each.sampled_rows.tolist()]


def _gather_parts(
    ranks: Ranks, table: ChunkTable, edges: Sequence[int], manifest: Manifest | None
) -> tuple[ChunkTable, dict[str, bytes]]:
    """Let planners sort the chunks of all ranks into parts of the manifest.

    Collective operation: all ranks must call it. Return the chunks of this rank that no part has,
    with its files, and on the coordinator the parts by name.

    Args:
        ranks: who saves together.
        table: what this rank writes.
        edges: of the keys in the manifest that each planner knows.
        manifest: of these keys; on the coordinator.
    """
    rest, encoded = split_chunks(table, edges)
    gathered = ranks.gather(chunks_message(rest, encoded))
    planners = planner_ranks(len(encoded), ranks.size)

    def hand_on() -> list[bytes]:
        assert manifest is not None
        return _by_rank(chunks_by_planner(gathered, manifest), planners, ranks.size)

    bundle = ranks.decide_each(_STEP, hand_on)
    parts: dict[str, bytes] = {}
    with ranks.telling(_STEP) as told:
        if bundle:
            told.payload = pack_parts(parts_of_chunks(bundle))
    with ranks.answering(told, _STEP):
        if ranks.is_coordinator:
            made = [unpack_parts(told.payloads[rank]) for rank in planners]
            parts = parts_by_name(itertools.chain(*made))
    return rest, parts


def _by_rank(of_planners: Sequence[bytes], planners: Sequence[int], num_ranks: int) -> list[bytes]:
    payloads = [b""] * num_ranks
    for rank, payload in zip(planners, of_planners, strict=True):
        payloads[rank] = payload
    return payloads


class _Found(NamedTuple):
    """What a planner tells the coordinator of its keys. Aliases are pairs of keys."""

    lines: Lines
    aliases: list[tuple[int, int]]
    num_replicated: int
    differing: Any

    def to_bytes(self) -> bytes:
        return pack_parts([self.lines.to_bytes(), json.dumps(self[1:]).encode()])

    @classmethod
    def from_bytes(cls, data: bytes) -> _Found:
        lines, others = unpack_parts(data)
        return cls(Lines.from_bytes(lines), *json.loads(others))


def _read_found(answers: Sequence[bytes]) -> list[_Found]:
    """Return what planners have found, or raise what they refuse."""
    refused = [answer[1:].decode() for answer in answers if answer[:1] == _INVALID]
    if refused:
        others = "\n- Other keys are wrong, too." if len(refused) > 1 else ""
        raise InvalidShardingError(refused[0] + others)
    return [_Found.from_bytes(answer[1:]) for answer in answers]


class PartPlanning:
    """The work of a planner."""

    def __init__(self, allow_gaps: bool, differences_are_errors: bool) -> None:
        self._allow_gaps = allow_gaps
        self._differences_are_errors = differences_are_errors
        self._sampled: Sequence[Sequence[int]] = ()

    def begin(self, bundle: bytes) -> bytes:
        """Validate what all ranks have of some keys; return what the coordinator shares out, or
        what is wrong.
        """
        keys, first, senders, *messages = unpack_parts(bundle)
        self._first_key = int.from_bytes(first, "little")
        sent_by = np.frombuffer(senders, np.int32).astype(np.int64)
        described = read_descriptions(keys, self._first_key, messages, sent_by)
        try:
            return _VALID + self._found(described).to_bytes()
        except InvalidShardingError as error:
            return _INVALID + str(error).encode()

    def _found(self, described: Described) -> _Found:
        table = described.table
        validate_shards(table, allow_gaps=self._allow_gaps)
        differences, differing = find_differences(table), None
        starts = described.row_starts[:-1].tolist()
        self._sampled = [()] * len(starts)
        if len(differences.rows):
            found = keep_different_whole(table, differences, starts, self._differences_are_errors)
            self._sampled, differing = found.rows_of_ranks, differences_to_json(found)
        self._planner = Planner(described)
        self._factors = replica_factors(table)
        first = self._first_key
        aliases = [(first + a, first + b) for a, b in self._planner.aliases.items()]
        num = num_replicated(self._factors)
        return _Found(self._planner.lines(), aliases, num, differing)

    def finish(self, cuts: Cuts) -> bytes:
        """Return what each rank learns, after the number of all pieces."""
        parts = self._planner.own(cuts)
        shares = self._planner.shares(parts, self._factors, self._sampled)
        return pack_parts([len(parts.rows).to_bytes(8, "little"), *shares])


class Coordinator:
    """What the coordinator knows and hands on. Elsewhere it knows nothing."""

    manifest: Manifest | None = None
    differing: ReplicasToCompare | None = None
    not_stored: Sequence[int] = ()
    _numbering: Numbering
    _cuts: list[Cuts]
    _shares: list[list[bytes]]

    def __init__(self, num_ranks: int, num_planners: int) -> None:
        self._num_ranks = num_ranks
        self._planners = planner_ranks(num_planners, num_ranks)

    def number_keys(self, kinds: list[bytes], ties: list[bytes]) -> list[bytes]:
        """Number the keys; return what each rank learns of them."""
        self._numbering = number_keys(kinds, ties, len(self._planners))
        return self._numbering.to_ranks()

    def hand_on(self, described: list[list[bytes]]) -> list[bytes]:
        """Return, by rank, what each planner gets. The list is emptied meanwhile."""
        bundles = []
        for number, messages in enumerate(described):
            place: dict[bytes, int] = {}
            senders = [place.setdefault(message, len(place)) for message in messages]
            first = self._numbering.edges[number].to_bytes(8, "little")
            keys = self._numbering.to_planner(number)
            bundles.append(pack_parts([keys, first, np.array(senders, np.int32).tobytes(), *place]))
            described[number] = []
        return _by_rank(bundles, self._planners, self._num_ranks)

    def share_out(self, payloads: Sequence[bytes]) -> bytes:
        """Even the bytes of ranks; return what all ranks learn of it.

        Raises:
            InvalidShardingError: that planners have found.
        """
        found = _read_found([payloads[rank] for rank in self._planners])
        self._cuts = share_lines([each.lines for each in found])
        aliases = list(itertools.chain.from_iterable(each.aliases for each in found))
        self.not_stored = [alias for alias, _ in aliases]
        self.manifest = self._manifest_of_keys(aliases)
        if differing := list(filter(None, (each.differing for each in found))):
            self.differing = join_differences(differing)
        number = 1 + secrets.randbits(61)
        stride = stride_of(sum(each.num_replicated for each in found))
        return json.dumps([number, stride, self.not_stored, bool(differing)]).encode()

    def _manifest_of_keys(self, aliases: Sequence[tuple[int, int]]) -> Manifest:
        numbering, not_stored = self._numbering, {alias for alias, _ in aliases}
        stored = [i for i in range(len(numbering.keys)) if i not in not_stored]
        return Manifest(
            keys=[numbering.keys[i] for i in stored],
            dtypes=[numbering.dtypes[i] for i in stored],
            global_shapes=[numbering.global_shapes[i] for i in stored],
            chunks=ChunkTable.empty(),
            aliases={numbering.keys[alias]: numbering.keys[key] for alias, key in aliases},
        )

    def cuts_by_rank(self) -> list[bytes]:
        """Return, by rank, the cuts of each planner."""
        cuts = [each.to_bytes() for each in self._cuts]
        return _by_rank(cuts, self._planners, self._num_ranks)

    def gather_shares(self, payloads: Sequence[bytes]) -> bool:
        """Keep what planners have made for ranks; tell whether checksums need files."""
        assert self.manifest is not None
        parts = [unpack_parts(payloads[rank]) for rank in self._planners]
        num_pieces = sum(int.from_bytes(count, "little") for count, *_ in parts)
        self._shares = [shares for _, *shares in parts]
        return needs_checksum_files(num_blocks_of(self.manifest) + num_pieces)

    def shares_by_rank(self) -> list[bytes]:
        """Return, by rank, what all planners have made for it."""
        return [pack_parts(shares) for shares in zip(*self._shares, strict=True)]


# --- Replicas that differ -------------------------------------------------------------------------


def differences_to_json(compared: ReplicasToCompare) -> Any:
    """Encode the replicas that differ among the keys of one planner, for `join_differences`."""
    num_rows = {str(i): len(rows) for i, rows in enumerate(compared.rows_of_ranks) if rows}
    return [compared.keys, compared.ranks, compared.pairs, num_rows, str(compared.error)]


def join_differences(parts: Sequence[Any]) -> ReplicasToCompare:
    """Join the differing replicas of all planners, in whose order samples of a rank are."""
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
    return ReplicasToCompare(keys, sorted(ranks), pairs, error=error)

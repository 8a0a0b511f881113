"""Sources of a move: the memories of all ranks, and a checkpoint."""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import LoadMismatchError
from distckpt._base.memory import overlapping
from distckpt._base.messages import summarize_keys
from distckpt._base.options import MoveOptions
from distckpt._base.tree import CONTAINERS, HOLE, dotted, map_leaves
from distckpt._checkpoint.shards import divide, in_order
from distckpt._checkpoint.stored_values import COMMON_STATE
from distckpt._format import codec
from distckpt._geometry.region import Region
from distckpt._io.read_values import warn_of_overflows
from distckpt._models import objects
from distckpt._models.bound_state import BoundState
from distckpt._models.dtensor import has_parts
from distckpt._models.optimizer.describe import OptimizerState
from distckpt._move.agreements import Agreements, reach
from distckpt._move.assignment import MoveSettings
from distckpt._move.carry import Staged, carry, check_arrival
from distckpt._move.host_memory import HostMemory
from distckpt._move.pieces import Piece, Pieces, packed, pieces_of, table_of, unpacked
from distckpt._move.plan import RankPlan, plan_moves
from distckpt._operations.shard_source import FamilyName, ShardSource
from distckpt._ranks.collectives import Ranks
from distckpt._state import flatten
from distckpt._state.shards import Shard, find_ties
from distckpt._state.stored_form import StoredEntry
from distckpt.mapping._base import OpenReplicaId
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedObject, ShardedStateDict
from distckpt.rules._rule import Rule
from distckpt.rules._rules import Tie

logger = logging.getLogger(__name__)


class GivenState(NamedTuple):
    """The tensors and values that this rank gives.

    Attributes:
        pieces: pieces of tensors, under the names of the move.
        values: objects by unique key, and values that are no shards, encoded; empty without any.
        description: description of both, without values.
    """

    pieces: Pieces
    values: bytes
    description: bytes


def describe_given(
    ranks: Ranks, state_dict: ShardedStateDict, rules: Sequence[Rule], family: FamilyName, at: str
) -> GivenState:
    """Describe this rank's state, under the names of rules or a family.

    Collective operation: all ranks must call it.
    """
    with ranks.phase("describe what is given") as vote:
        described = objects.describe_objects(ranks, with_shards(state_dict, ranks.rank))
        # Names of modules, which may differ, matter to checkpoints only.
        has_more = bool(described.settings) or described.has_stateful
        vote.number = 0
        if has_more:
            vote.number = described.digest()
    if not vote.are_equal:
        described = objects.united(ranks, described, first_has_all=False)
    with ranks.phase("describe what is given"):
        shards, common, _ = flatten.split(objects.completed(described))
        return _described(shards, common, rules, family, at)


def _described(
    shards: Sequence[Shard], common: Any, rules: Sequence[Rule], family: FamilyName, at: str
) -> GivenState:
    tensors = []
    cells = {}
    for shard in shards:
        if isinstance(shard, ShardedTensor):
            tensors.append(shard)
        else:
            cells[shard.unique_key] = shard
    if family is not None and tensors:
        keys = [shard.key for shard in tensors]
        from distckpt.families._config import config_for, rules_for

        family_rules = rules_for(config_for(family, at), keys)
        rules = [*rules, *_without_separate_ties(family_rules, tensors)]
    pieces = pieces_of(tensors, rules, drops=True)
    objects_by_key = {cell.key: cell.global_shape for cell in cells.values()}
    ties = [_keys_of(pieces, pair) for pair in _tied(pieces)]
    description = packed([objects_by_key, bool(common), ties, pieces.table])
    return GivenState(pieces, _encoded(cells, common), description)


def _without_separate_ties(rules: Sequence[Rule], tensors: Sequence[ShardedTensor]) -> list[Rule]:
    """Leave out ties of tensors that all have memory of their own."""
    firsts = find_ties(tensors)
    memory = {tensor.key: firsts.get(n, n) for n, tensor in enumerate(tensors)}
    remaining = []
    for rule in rules:
        names = (rule.key, rule.to) if isinstance(rule, Tie) else ()
        if len({memory[name] for name in names if name in memory}) < 2:
            remaining.append(rule)
    return remaining


def _encoded(cells: Mapping[str, ShardedObject], common: Any) -> bytes:
    """Encode values while all ranks can still learn of an error."""
    items = [(key, cell.data) for key, cell in cells.items()]
    if items or common:
        return codec.encode([items, codec.encode(common)])
    return b""


def _tied(pieces: Pieces) -> list[tuple[int, int]]:
    """Return pieces of different tensors in one memory, with the first."""
    starts = [view.data_ptr() for view in pieces.views]
    if len(set(starts)) == len(starts):
        return []
    first: dict[Any, int] = {}
    pairs = []
    for row, (start, view) in enumerate(zip(starts, pieces.views, strict=True)):
        other = first.setdefault((start, view.device, view.shape, view.stride(), view.dtype), row)
        if start and pieces.key(other) != pieces.key(row):
            pairs.append((other, row))
    return pairs


def _keys_of(pieces: Pieces, rows: Sequence[int]) -> list[str]:
    return [pieces.key(row) for row in rows]


def with_shards(state_dict: ShardedStateDict, rank: int) -> ShardedStateDict:
    """Describe a state dict's plain tensors as whole replicas."""

    def described(path: tuple[Any, ...], leaf: Any) -> Any:
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or has_parts(leaf):
            return leaf
        replica_id = OpenReplicaId((0, rank))
        return ShardedTensor.from_rank_offsets(dotted(path), leaf, replica_id=replica_id)

    state: ShardedStateDict = map_leaves(described, state_dict, _is_walked)
    return state


def _is_walked(node: Any) -> bool:
    """Whether the plain tensors in a container are moved.

    Containers are walked as in `state_dict()`.
    """
    return isinstance(node, CONTAINERS) and not isinstance(node, OptimizerState | BoundState)


@dataclass
class LiveSource(ShardSource):
    """The memories of all ranks.

    Attributes:
        ranks: the ranks that give and take.
        location: name of the move, for messages.
        given: the state that this rank gives.
        fallback: source of the tensors that no rank gives, or None.
        options: options of the caller.
        agreements: agreements of earlier moves.
        memory: buffers that the ranks share.
        compares: whether values that arrive are compared with the values that were sent.
        plan: plan of this rank, once `read` has filled the targets.
    """

    ranks: Ranks
    location: str
    given: GivenState
    fallback: ShardSource | None
    options: MoveOptions
    agreements: Agreements
    memory: HostMemory
    compares: bool = False
    directory: str = ""
    plan: RankPlan | None = None
    is_live = True
    marker: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Agree on the keys that all ranks give."""
        self._held = reach(
            self.agreements, self.ranks, "compare what is given", self.given.description, _join
        )
        kinds, self._has_values, self._ties = json.loads(self._held.result)
        self._entries: dict[str, StoredEntry] = {}
        for key, (dtype, shape) in kinds.items():
            stored_as = None if dtype is None else FROM_NAME[dtype]
            self._entries[key] = StoredEntry(stored_as, tuple(shape))
        self._values: dict[str, Any] | None = None

    def entries(self) -> dict[str, StoredEntry]:
        others = {}
        if self.fallback is not None:
            others = self.fallback.entries()
        return {**others, **self._entries}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {key: entry.shape for key, entry in self._entries.items()}

    def rules_of_family(self, family: FamilyName, keys: Sequence[str]) -> list[Rule]:
        if self._entries.keys() >= set(keys):
            # Both sides use the same names.
            return []
        return super().rules_of_family(family, keys)

    def read_objects(self, shards: Sequence[ShardedObject]) -> list[Any]:
        values = self._all_values()
        absent = {}
        for shard in shards:
            if shard.unique_key not in values:
                absent[shard.unique_key] = shard
        if self.fallback is not None and absent:
            loaded = self.fallback.read_objects(list(absent.values()))
            values = {**values, **dict(zip(absent, loaded, strict=True))}
        elif absent:
            keys = {shard.key for shard in absent.values()}
            raise LoadMismatchError(
                f"No rank holds {summarize_keys(keys)}: leave that out of what is to be filled, or "
                "name a checkpoint that has it as fallback.",
                unexpected=keys,
            )
        return [values[shard.unique_key] for shard in shards]

    def read(self, shards: Sequence[Shard], rules: Sequence[Rule]) -> list[Any]:
        tensors, cells = divide(shards)
        self._fill(pieces_of(tensors, rules))
        filled = [tensor.data for tensor in tensors]
        return in_order(shards, filled, self.read_objects(cells))

    def _all_values(self) -> dict[str, Any]:
        """Return all ranks' objects and common state, by unique key."""
        if self._values is None:
            self._values = {}
            first_with: dict[bytes, int] = {}
            sent = []
            if self._has_values:
                sent = self.ranks.all_gather(self.given.values)
            for rank, data in enumerate(sent):
                if not data:
                    continue
                decoded: Any = codec.decode(data)
                items, values = decoded
                self._values = {**dict(items), **self._values}
                first_with.setdefault(values, rank)
            values_by_rank = {rank: codec.decode(values) for values, rank in first_with.items()}
            if self.ranks.is_coordinator and len(values_by_rank) > 1:
                _warn_of_different_values(values_by_rank)
            common: Any = functools.reduce(_united, values_by_rank.values(), {})
            if common or self.fallback is None:
                self._values[COMMON_STATE.unique_key] = common
        return self._values

    def _fill(self, targets: Pieces) -> None:
        """Fill targets from ranks, and from the checkpoint."""
        ranks = self.ranks
        options = self.options
        memory = self.memory
        settings = MoveSettings(
            memory.hosts,
            memory.bucket_bytes,
            options.allow_dtype_cast,
            has_fallback=self.fallback is not None,
            compares=self.compares,
        )
        self.plan = plan = self._agree_on_plan(targets, settings)
        with ranks.phase("prepare the targets"):
            apart = self._to_compare(targets)
            # With `compares`, targets with different values are found as errors where they are
            # filled.
            fresh = set()
            if not self.compares:
                fresh = {row for _, row in apart}
            staged = Staged.of(self.given.pieces, targets, options.atomic, fresh)
        if plan.has_gaps and self.fallback is not None:
            gaps = _gaps(plan, targets, staged)
            self._check_fallback(gaps)
            self.fallback.read(gaps, ())
        carry(ranks, plan, memory, self.given.pieces, staged.views)
        if plan.compared:
            check_arrival(ranks, plan, self.given.pieces, targets, staged.views)
        warn_of_overflows(
            (piece.kind.key, self._entries[piece.kind.key].dtype, view.detach())
            for piece, view in zip(targets.table, staged.views, strict=True)
            if piece.kind.key in self._entries
        )
        for pair in staged.commit(apart):
            first, last = _keys_of(targets, pair)
            logger.warning(
                "%r and %r have different values, and were to be moved into memory that both have: "
                "it has that of %r now. Take one of them, or give each memory of its own.",
                first,
                last,
                last,
            )

    def _check_fallback(self, gaps: Sequence[ShardedTensor]) -> None:
        """Refuse tensors that neither a rank nor the fallback holds.

        Collective operation: all ranks must call it.
        """
        assert self.fallback is not None
        stored = self.fallback.entries()
        with self.ranks.phase("look for tensors in the fallback"):
            absent = {gap.key for gap in gaps} - stored.keys()
            if absent:
                raise LoadMismatchError(
                    f"No rank holds {summarize_keys(absent)}, and neither does the fallback: "
                    "correct the keys. Plain tensors that were saved are not among its tensors, "
                    "but in distckpt.open(path).common_state.",
                    unexpected=absent,
                )

    def _to_compare(self, targets: Pieces) -> list[tuple[int, int]]:
        """Return the targets (first, second) that share memory.

        Targets that are one tensor on the giving side, too, are left out.
        """
        tied = {pair for pair in _tied(targets) if _keys_of(targets, pair) in self._ties}
        return sorted(set(overlapping(targets.views)) - tied, key=lambda pair: pair[::-1])

    def _agree_on_plan(self, targets: Pieces, settings: MoveSettings) -> RankPlan:
        def decide(descriptions: Sequence[bytes]) -> list[bytes]:
            sources = [table_of(unpacked(given)[-1]) for given in self._held.descriptions]
            requests = [table_of(unpacked(taken)[-1]) for taken in descriptions]
            plans = list(map(packed, plan_moves(sources, requests, settings)))
            _warn_of_untaken(sources, requests, self._ties)
            return plans

        description = packed([self._held.number, settings, targets.table])
        agreed = reach(self.agreements, self.ranks, "plan the move", description, decide)
        return RankPlan(*unpacked(agreed.result))


def _join(descriptions: Sequence[bytes]) -> list[bytes]:
    """Return all given keys with dtypes and shapes, for each rank."""
    kinds: dict[str, tuple[str | None, Sequence[int]]] = {}
    has_values = False
    ties = []
    for description in descriptions:
        cells, has_common, tied, rows = unpacked(description)
        has_values |= bool(cells) or has_common
        ties += tied
        kinds.update({key: (None, shape) for key, shape in cells.items()})
        for (key, dtype, shape, _), *_ in rows:
            kinds.setdefault(key, (dtype, shape))
    return [json.dumps([kinds, has_values, ties]).encode()] * len(descriptions)


def _keys_of_tables(tables: Sequence[Sequence[Piece]]) -> set[str]:
    return {piece.kind.key for table in tables for piece in table}


def _warn_of_untaken(
    sources: Sequence[Sequence[Piece]],
    targets: Sequence[Sequence[Piece]],
    ties: Sequence[Sequence[str]],
) -> None:
    """Warn of given tensors that no rank takes under any name."""
    taken = _keys_of_tables(targets)
    for pair in ties:
        if taken.intersection(pair):
            taken.update(pair)
    untaken = _keys_of_tables(sources) - taken
    if untaken:
        logger.warning(
            "no rank takes %s, which is given. If the model on the other side needs it, as it does "
            "adapters that are not merged or a head that is not tied, give it the name there with "
            "rules=. Else leave it out of what is given: rules=[Drop(...)].",
            summarize_keys(untaken),
        )


def _gaps(plan: RankPlan, targets: Pieces, staged: Staged) -> list[ShardedTensor]:
    """Describe the regions of targets that no rank holds."""
    shards = []
    for row, at, shape in plan.gaps:
        kind, region, *_ = targets.table[row]
        part = staged.views[row][Region(at, shape).slices()]
        offset = tuple(map(int.__add__, region.offset, at))
        whole = kind.shape
        shards.append(ShardedTensor(kind.key, part, part.dtype, tuple(shape), whole, offset, None))
    return shards


# --- Values that are no tensors -------------------------------------------------------------------


def _united(first: Any, other: Any) -> Any:
    """Unite nested dicts of values; the first one counts."""
    if first is HOLE:
        return other
    if not (isinstance(first, dict) and isinstance(other, dict)):
        return first
    united = copy.copy(first)
    for key, value in other.items():
        united[key] = _united(united[key], value) if key in united else value
    return united


def _warn_of_different_values(values_by_rank: Mapping[int, Any]) -> None:
    """Warn of values that differ between ranks."""
    first_values: dict[str, tuple[int, str]] = {}
    differing: dict[tuple[int, int], list[str]] = {}
    for rank, values in values_by_rank.items():
        for path, (digest, value) in codec.leaves(values).items():
            if value is HOLE:
                continue
            first, digest_of_first = first_values.setdefault(path, (rank, digest))
            if digest != digest_of_first:
                differing.setdefault((first, rank), []).append(path)
    for (first, rank), paths in differing.items():
        logger.warning(
            "ranks %d and %d give different values for %s: all ranks get that of rank %d. Were "
            "they at the same step?",
            first,
            rank,
            summarize_keys(paths),
            first,
        )

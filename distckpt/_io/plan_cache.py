"""Plans of saves, made together by all ranks, and kept: saving the same structure again exchanges next to nothing.

What is kept says which region of which shard goes where; never a tensor, a pointer or a value.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from distckpt import validation
from distckpt._io.shard_writer import lay_out_files
from distckpt._plan.layout import FileLayout, LayoutRecord, ManifestLayout, lay_out_manifest
from distckpt._plan.save import Pieces, find_aliases, plan_owners
from distckpt._ranks.collectives import Ranks
from distckpt._state.shards import Shard, ShardTable, find_ties, merge_tables
from distckpt.mapping import ShardedObject

Structure: TypeAlias = tuple[Any, ...]
"""Everything about the shards of one rank that a plan depends on; equal structures have equal plans."""

MAX_PLANS = 4
"""So many are kept, for programs that save several state dicts in turn."""


class SavePlan(NamedTuple):
    """What one rank writes where; `number` names the plan on all ranks, `manifest` is there on the coordinator only."""

    number: int
    layouts: list[FileLayout]
    manifest: ManifestLayout | None


class PlanCache:
    """The latest plans of one strategy, by structure."""

    def __init__(self) -> None:
        self._plans: list[tuple[Structure, SavePlan]] = []
        self._lock = threading.Lock()

    def find(self, structure: Structure) -> SavePlan | None:
        """Return the plan that was kept for a structure."""
        with self._lock:
            return next((plan for known, plan in self._plans if known == structure), None)

    def keep(self, structure: Structure, plan: SavePlan) -> None:
        """Keep a plan, in the place of the one that was made or used longest ago."""
        with self._lock:
            others = [item for item in self._plans if item[0] != structure]
            self._plans = [(structure, plan), *others[: MAX_PLANS - 1]]


def structure_of(shards: Sequence[Shard], ranks: Ranks, *settings: object) -> Structure:
    """Return what a plan depends on: every shard but for its data, which of them share memory, who saves, and how."""
    of_tensor = attrgetter(
        "key", "dtype", "local_shape", "global_shape", "global_offset", "replica_id", "prepend_axis_num",
        "flattened_range",
    )  # fmt: skip
    of_object = attrgetter("key", "global_shape", "global_offset", "replica_id")
    # One isinstance for each class, not for each shard: there may be many.
    getters = {kind: of_object if issubclass(kind, ShardedObject) else of_tensor for kind in set(map(type, shards))}
    described = [getters[type(shard)](shard) for shard in shards]
    return (ranks.rank, ranks.size, settings, find_ties(shards), described)


def make_plan(ranks: Ranks, shards: Sequence[Shard], table: ShardTable, allow_gaps: bool) -> SavePlan:
    """Plan a save together.

    Collective: descriptions of shards go to the coordinator, pieces to write come back, layouts go to it.

    Args:
        ranks: who saves.
        shards: of this rank, objects encoded.
        table: describes them.
        allow_gaps: whether elements may be held by no rank.

    Raises:
        InvalidShardingError: shards overlap, leave gaps or disagree.
    """
    tables = ShardTable.all_from_bytes(ranks.gather(table.to_bytes()))
    # The coordinator validates, and gives every byte one owner.
    plans: list[bytes] = []
    with ranks.phase("plan", decision=True):
        if ranks.is_coordinator:
            merged = merge_tables(tables)
            validation.validate_shards(merged, allow_gaps=allow_gaps)
            aliases = find_aliases(merged)
            groups = [table.exchange_group for table in tables]
            owned = [pieces.to_bytes() for pieces in plan_owners(merged, ranks.size, aliases, groups)]
            number = f"{secrets.randbits(61):016x}".encode()
            plans = [number + pieces for pieces in owned]
    plan = ranks.scatter(plans)
    with ranks.phase("lay out files"):
        layouts = lay_out_files(ranks.rank, shards, table, Pieces.from_bytes(plan[16:]))
        record = LayoutRecord.of(layouts).to_bytes()
    records = [LayoutRecord.from_bytes(data) for data in ranks.gather(record)]
    manifest = None
    with ranks.phase("lay out the manifest", decision=True):
        if ranks.is_coordinator:
            manifest = lay_out_manifest(merged, aliases, records)
    return SavePlan(int(plan[:16], 16), layouts, manifest)

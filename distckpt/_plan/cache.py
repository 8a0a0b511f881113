"""Plans of saves, kept so that saving the same structure again exchanges next to nothing.

A plan has regions, names and sizes; never a tensor, a pointer or a value.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from distckpt._format.manifest import ChunkTable, Manifest
from distckpt._geometry.region import Region
from distckpt._mapping.wrappers import ShardedObject
from distckpt._plan.layout import PlannedChunk, PlannedFile
from distckpt._ranks.collectives import Ranks
from distckpt._state.shards import Shard, find_ties

Structure: TypeAlias = tuple[Any, ...]
"""Everything about the shards of one rank that a plan depends on; equal structures have equal
plans.
"""

MAX_PLANS = 4
"""So many are kept, for programs that save several state dicts in turn."""


class SavePlan(NamedTuple):
    """The plan of a save for one rank.

    Attributes:
        number: identifies the plan on all ranks.
        files: of tensors.
        objects: that this rank writes; their file is laid out when they are encoded.
        manifest: on the coordinator, the manifest without its chunks.
        tables: on the coordinator, the chunks of the tensors that each rank writes.
        replicas: regions of shards that other ranks hold too, and that must be equal; None where no
            rank has any.
        weights: one for each of these; those of the replicas of a region add up to 0, modulo 2**64.
    """

    number: int
    files: list[PlannedFile]
    objects: list[PlannedChunk]
    manifest: Manifest | None
    tables: list[ChunkTable]
    replicas: Sequence[tuple[int, Region]] | None = None
    weights: npt.NDArray[np.uint64] = np.empty(0, np.uint64)


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
    """Return what a plan depends on: every shard but for its data, which of them share memory, who
    saves, and how.
    """
    of_tensor = attrgetter(
        "key", "dtype", "local_shape", "global_shape", "global_offset", "replica_id", "prepend_axis_num",
        "flattened_range",
    )  # fmt: skip
    of_object = attrgetter("key", "global_shape", "global_offset", "replica_id")
    # One isinstance for each class, not for each shard: there may be many.
    getters = {
        kind: of_object if issubclass(kind, ShardedObject) else of_tensor
        for kind in set(map(type, shards))
    }
    described = [getters[type(shard)](shard) for shard in shards]
    # Equal to a replica id that was chosen by the author.
    copies = [type(shard.replica_id) for shard in shards]
    return (ranks.rank, ranks.size, settings, find_ties(shards), described, copies)

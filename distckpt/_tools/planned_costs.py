"""The costs of a load and a save under a layout.

One process takes the place of all ranks, one after the other, and calls what they call to plan.
Tensors are on the meta device, and nothing is read but what opening the checkpoint reads.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.options import LoadOptions, SaveOptions
from distckpt._base.threads import num_requests_within, num_threads_within
from distckpt._checkpoint.shards import ReadSettings, plan_requests
from distckpt._checkpoint.stored_values import COMMON_STATE, find_objects
from distckpt._format.manifest import OBJECT
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._io.planned_reads import ReadFigures, planned_reads
from distckpt._io.planned_shards import plan_for_all
from distckpt._io.shared_read import HELD_SHARE, OwnUnits, Wave
from distckpt._plan.decoded import decoded, hidden_keys
from distckpt._plan.layout import lay_out_files
from distckpt._plan.load import Copy
from distckpt._plan.share import (
    ReadCosts,
    SharePlan,
    UnitTable,
    describe_units,
    divide,
    unit_bytes_for,
)
from distckpt._plan.share_out import plan_shares
from distckpt._state.shards import ShardTable, shard_table
from distckpt._storage import locations
from distckpt._tools.layouts import DividedTensor, Layout, Place
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.rules._mapped import TensorSpec
from distckpt.rules._rule import Rule
from distckpt.rules._rules import Assemble

_CACHED_SHARDS = 1 << 19
"""Shards whose plans are kept for another look: about 1 GB."""


class NodeLoad(NamedTuple):
    """The reads of a node.

    Attributes:
        storage_bytes: the bytes that leave the storage. The cache of a file system has those that
            several ranks of the node read.
        sizes: how many requests there are of each size.
        ranks: the bytes that each of its ranks asks for, and the requests.
    """

    storage_bytes: int
    sizes: Counter[int]
    ranks: list[tuple[int, int]]


class LoadCosts(NamedTuple):
    """The costs of a load.

    Attributes:
        nodes: the reads of each node.
        tensor_bytes: the memory of each rank's tensors.
        inflight_bytes: the memory for data on its way, on each rank.
        num_parallel: the requests of a rank at the same time.
    """

    nodes: list[NodeLoad]
    tensor_bytes: list[int]
    inflight_bytes: int
    num_parallel: int


def tensors_in_memory(
    stored: StoredCheckpoint, rules: Sequence[Rule] = ()
) -> dict[str, TensorSpec]:
    """Describe the tensors of a model that is loaded.

    They have the names of the checkpoint, quantized ones with their values. With the rules of a
    family of transformers they have those of the model in memory.
    """
    view = decoded(stored)
    manifest = view.manifest
    hidden = hidden_keys(view)
    columns = zip(manifest.keys, manifest.global_shapes, manifest.dtypes, strict=True)
    tensors = {}
    for key, shape, dtype in columns:
        if dtype != OBJECT and key not in hidden:
            tensors[key] = TensorSpec(tuple(shape), dtype)
    for rule in rules:
        if isinstance(rule, Assemble) and not rule.optional:
            return _sources_of(rule, tensors)
    return tensors


def _sources_of(rule: Assemble, tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Describe the tensors that a rule reads."""
    dtypes = {}
    for name, mapped in rule.tensors.items():
        for part in mapped.parts:
            if name in tensors:
                dtypes[part.key] = tensors[name].dtype
    sources = {}
    for key, shape in rule.sources.items():
        if key in dtypes:
            sources[key] = TensorSpec(shape, dtypes[key])
    return sources


class Job:
    """The ranks of a job, which hold tensors under a layout.

    Ranks that follow one another are on a node.
    """

    def __init__(
        self, tensors: Sequence[DividedTensor], layout: Layout, num_nodes: int = 1
    ) -> None:
        num_ranks = layout.num_ranks
        if num_ranks % num_nodes:
            raise ValueError(
                f"{num_ranks} ranks are not the same number on each of {num_nodes} nodes: use a "
                f"multiple of the nodes, such as {-(-num_ranks // num_nodes) * num_nodes} ranks."
            )
        self.tensors = tensors
        self.layout = layout
        self.places = [layout.place(rank) for rank in range(num_ranks)]
        step = num_ranks // num_nodes
        self.nodes = [range(first, first + step) for first in range(0, num_ranks, step)]
        most = max(1, _CACHED_SHARDS // max(1, len(tensors)))
        self.shards_at = functools.lru_cache(most)(self._shards_at)

    def _shards_at(self, place: Place) -> list[ShardedTensor]:
        """Return the shards of the ranks of a place, without data."""
        shards = []
        for tensor in self.tensors:
            dtype = FROM_NAME[tensor.spec.dtype]
            for region in tensor.regions(self.layout, place):
                data = torch.empty(region.shape, dtype=dtype, device="meta")
                shape = tensor.spec.shape
                shards.append(
                    ShardedTensor(tensor.key, data, dtype, region.shape, shape, region.offset, None)
                )
        return shards

    def num_bytes_at(self, place: Place) -> int:
        """Return the memory of the tensors of a rank."""
        num_bytes = 0
        for shard in self.shards_at(place):
            assert shard.data is not None
            num_bytes += shard.data.nbytes
        return num_bytes


# --- Load -----------------------------------------------------------------------------------------


def load_costs(
    stored: StoredCheckpoint, job: Job, options: LoadOptions, rules: Sequence[Rule] = ()
) -> LoadCosts:
    """Plan a load on each rank, with `share_reads` on or off."""
    ranks = _LoadingRanks(stored, job, options, rules)
    num_parallel_within = num_threads_within if ranks.is_local else num_requests_within
    return LoadCosts(
        list(ranks.nodes_together() if options.share_reads == "on" else ranks.nodes_alone()),
        ranks.tensor_bytes,
        options.max_inflight_bytes,
        num_parallel_within(options.max_inflight_bytes),
    )


def _node_load(reads: Sequence[ReadFigures], is_local: bool) -> NodeLoad:
    """Sum up the reads of the ranks of a node."""
    of_node = ReadFigures.joined(reads)
    return NodeLoad(
        of_node.num_different_bytes() if is_local else of_node.num_bytes,
        of_node.sizes,
        [(each.num_bytes, each.sizes.total()) for each in reads],
    )


class _LoadingRanks:
    """The ranks of a job that load, imitated one after the other."""

    def __init__(
        self, stored: StoredCheckpoint, job: Job, options: LoadOptions, rules: Sequence[Rule]
    ) -> None:
        self.view = decoded(stored)
        self.is_local = locations.is_local(stored.location)
        self.tensor_bytes = list(map(job.num_bytes_at, job.places))
        self._job = job
        self._settings = ReadSettings(options, rules)
        self._common_chunks = find_objects(stored, [COMMON_STATE]).stored_chunks
        most = max(1, _CACHED_SHARDS // max(1, len(job.tensors)))
        self._planned_at = functools.lru_cache(most)(self._plan_at)
        self._reads_at = functools.lru_cache(most)(
            lambda place: planned_reads(self.view, *self._planned_at(place))
        )

    def nodes_alone(self) -> Iterator[NodeLoad]:
        """Yield the reads of each node whose ranks share none."""

        @functools.cache
        def load_of(places: tuple[Place, ...], objects: tuple[bool, ...]) -> NodeLoad:
            reads = []
            for place, has_objects in zip(places, objects, strict=True):
                own = [self._reads_at(place), self._reads_of_objects(has_objects)]
                reads.append(ReadFigures.joined(own))
            return _node_load(reads, self.is_local)

        for ranks in self._job.nodes:
            places = tuple(self._job.places[rank] for rank in ranks)
            yield load_of(places, tuple(map(self._reads_objects, ranks)))

    def nodes_together(self) -> Iterator[NodeLoad]:
        """Yield the reads of each node, some of them for other ranks."""
        costs = ReadCosts(self.view.manifest, self.is_local and not self.view.verifies)
        unit_bytes = unit_bytes_for(max(self.tensor_bytes))

        @functools.cache
        def table_at(place: Place) -> UnitTable:
            copies, targets = self._planned_at(place)
            divided = divide(costs.manifest, copies, unit_bytes)
            return describe_units(costs, divided, [target.dtype for target in targets], 0)

        messages = []
        for place in self._job.places:
            messages.append(table_at(place).to_bytes())
        table_at.cache_clear()
        held_bytes = self._settings.options.max_inflight_bytes // HELD_SHARE
        plans = plan_shares(messages, costs, held_bytes)
        for ranks in self._job.nodes:
            reads = []
            for rank in ranks:
                plan = SharePlan.from_bytes(next(plans))
                reads.append(ReadFigures.joined(self._reads_of_plan(rank, plan, unit_bytes)))
            yield _node_load(reads, self.is_local)

    def _reads_of_plan(self, rank: int, plan: SharePlan, unit_bytes: int) -> Iterator[ReadFigures]:
        """Yield the requests of each wave and of units not shared."""
        yield self._reads_of_objects(self._reads_objects(rank))
        place = self._job.places[rank]
        if not plan.num_waves:
            yield self._reads_at(place)
            return
        copies, targets = self._planned_at(place)
        units = divide(self.view.manifest, copies, unit_bytes)
        own = OwnUnits(plan, units, targets)
        held = torch.empty(int(own.held_bytes.sum()), dtype=torch.uint8, device="meta")
        for number in range(plan.num_waves):
            wave = Wave(own, number, held)
            direct = units.join(wave.direct_units)
            held_copies, memories = wave.held_copies(len(targets))
            yield planned_reads(self.view, [*direct, *held_copies], [*targets, *memories])
        left = np.flatnonzero(plan.readers < 0)
        yield planned_reads(self.view, units.join(left), targets)

    def _plan_at(self, place: Place) -> tuple[list[Copy], Sequence[torch.Tensor]]:
        """Return the copies of a rank, into targets, before they are shared."""
        planned = plan_requests(self.view, self._job.shards_at(place), self._settings)
        return planned.copies, planned.targets

    def _reads_objects(self, rank: int) -> bool:
        """Whether a rank reads common state; from a store, one does."""
        return self.is_local or rank == 0

    def _reads_of_objects(self, has_objects: bool) -> ReadFigures:
        return planned_reads(self.view, [], [], self._common_chunks if has_objects else [])


# --- Save -----------------------------------------------------------------------------------------


def save_costs(job: Job) -> list[tuple[int, int]]:
    """Plan a save; return the bytes and the files of tensors that each rank writes."""
    num_holders: Counter[tuple[str, Region]] = Counter()
    tables: list[ShardTable] = []
    for place in job.places:
        shards = job.shards_at(place)
        held = [(shard.key, Region(shard.global_offset, shard.local_shape)) for shard in shards]
        is_main = [not num_holders[region] for region in held]
        num_holders.update(held)
        if not tables:
            table = shard_table([*shards, COMMON_STATE], {})
            is_main.append(True)
        else:
            table = shard_table(shards, {})
        tables.append(table._replace(is_main=np.array(is_main, np.bool_)))
    costs = []
    shares = plan_for_all(list(tables), SaveOptions())[0]
    for rank, (table, share) in enumerate(zip(tables, shares, strict=True)):
        files, _ = lay_out_files(rank, table, share.pieces)
        num_bytes = sum(len(file.header) + sum(file.chunk_bytes) for file in files)
        costs.append((num_bytes, len(files)))
    return costs

"""The costs of a load and a save under a layout.

One process takes the place of all ranks, one after the other, and calls what they call to plan.
Tensors are on the meta device, and nothing is read but what opening the checkpoint reads.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
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
from distckpt._io.planned_reads import Call, ReadFigures, RequestCounter, meta_tensor
from distckpt._io.planned_shards import plan_for_all
from distckpt._io.shared_read import HELD_SHARE, OwnUnits, Wave
from distckpt._plan.decoded import hidden_keys
from distckpt._plan.layout import lay_out_files
from distckpt._plan.share import (
    SharePlan,
    Units,
    costs_of,
    describe_units,
    divide,
    unit_bytes_for,
)
from distckpt._plan.share_out import plan_shares
from distckpt._state.shards import ShardTable, shard_table
from distckpt._storage import locations
from distckpt._tools.layouts import DividedTensor, Layout, Place, regions_at
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


def tensors_in_memory(view: StoredCheckpoint, rules: Sequence[Rule]) -> dict[str, TensorSpec]:
    """Describe the tensors of a model that loads from a view.

    They have the names of the checkpoint, quantized ones with their values. With the rules of a
    family of transformers they have those of the model in memory.
    """
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

    def __init__(self, tensors: Sequence[DividedTensor], layout: Layout, num_nodes: int) -> None:
        num_ranks = layout.num_ranks
        if num_ranks % num_nodes:
            raise ValueError(
                f"{num_ranks} ranks are not the same number on each of {num_nodes} nodes: use a "
                f"multiple of the nodes, such as {-(-num_ranks // num_nodes) * num_nodes} ranks."
            )
        self.layout = layout
        self.places = [layout.place(rank) for rank in range(num_ranks)]
        step = num_ranks // num_nodes
        self.nodes = [range(first, first + step) for first in range(0, num_ranks, step)]
        self._tensors = tensors
        self._rows_of: dict[tuple[int, int | None], list[int]] = defaultdict(list)
        for row, tensor in enumerate(tensors):
            for stage in set(tensor.stages):
                self._rows_of[stage, tensor.expert].append(row)
        most_shards = max(len(self._rows_at(place)) for place in self.places)
        self.num_cached = max(1, _CACHED_SHARDS // max(1, most_shards))
        self.shards_at = functools.lru_cache(self.num_cached)(self._shards_at)

    def _rows_at(self, place: Place) -> list[int]:
        """Return the rows of the tensors at a place, in order."""
        rows_of = self._rows_of
        return sorted((*rows_of[place.stage, None], *rows_of[place.stage, place.expert]))

    def _shards_at(self, place: Place) -> list[ShardedTensor]:
        """Return the shards of the ranks of a place, without data."""
        shards = []
        for row in self._rows_at(place):
            tensor = self._tensors[row]
            dtype = FROM_NAME[tensor.spec.dtype]
            shape = tensor.spec.shape
            for offset, extent in regions_at(tensor.division, self.layout, place):
                data = meta_tensor(extent, dtype)
                shards.append(ShardedTensor(tensor.key, data, dtype, extent, shape, offset, None))
        return shards

    def num_bytes_at(self, place: Place) -> int:
        """Return the memory of the tensors of a rank."""
        num_bytes = 0
        for shard in self.shards_at(place):
            assert shard.data is not None
            num_bytes += shard.data.nbytes
        return num_bytes


# --- Load -----------------------------------------------------------------------------------------


class LoadingRanks:
    """The ranks of a job that load, imitated one after the other.

    Attributes:
        tensor_bytes: the memory of each rank's tensors.
        inflight_bytes: the memory for data on its way, on each rank.
        num_parallel: the requests of a rank at the same time.
    """

    def __init__(self, view: StoredCheckpoint, job: Job, rules: Sequence[Rule]) -> None:
        options = LoadOptions()
        self.tensor_bytes = list(map(job.num_bytes_at, job.places))
        self.inflight_bytes = options.max_inflight_bytes
        self._is_local = locations.is_local(view.location)
        num_parallel_within = num_threads_within if self._is_local else num_requests_within
        self.num_parallel = num_parallel_within(self.inflight_bytes)
        self._view = view
        self._job = job
        self._settings = ReadSettings(options, rules)
        self._costs = costs_of(view)
        self._requests = RequestCounter(self._view)
        self._objects = self._requests.reads([], find_objects(view, [COMMON_STATE]).stored_chunks)
        self._units_at = functools.lru_cache(job.num_cached)(self._divided_at)
        self._alone_at = functools.cache(self._planned_alone)

    def nodes_alone(self) -> Iterator[NodeLoad]:
        """Yield the reads of each node with `share_reads` off."""
        for ranks in self._job.nodes:
            yield self._load_of(ranks, [self._alone_at(self._job.places[r])[0] for r in ranks])

    def nodes_together(self) -> Iterator[NodeLoad]:
        """Yield the reads of each node with `share_reads` on."""
        messages = [self._alone_at(place)[1] for place in self._job.places]
        plans = plan_shares(messages, self._costs, self.inflight_bytes // HELD_SHARE)
        for ranks in self._job.nodes:
            reads = []
            for rank in ranks:
                plan = SharePlan.from_bytes(next(plans))
                reads.append(self._reads_of_plan(self._job.places[rank], plan))
            yield self._load_of(ranks, reads)

    def _divided_at(self, place: Place) -> tuple[Units, Sequence[torch.Tensor]]:
        """Return the units of a rank, and the targets of its requests."""
        planned = plan_requests(self._view, self._job.shards_at(place), self._settings)
        unit_bytes = unit_bytes_for(max(self.tensor_bytes))
        return divide(self._view.manifest, planned.copies, unit_bytes), planned.targets

    def _planned_alone(self, place: Place) -> tuple[ReadFigures, bytes]:
        """Return the requests of a rank alone, and its message."""
        units, targets = self._units_at(place)
        table = describe_units(self._costs, units, [target.dtype for target in targets], 0)
        return self._requests.reads([(units.copies, targets)]), table.to_bytes()

    def _reads_of_plan(self, place: Place, plan: SharePlan) -> ReadFigures:
        """Return the requests of all waves and for units not shared."""
        if not plan.num_waves:
            return self._alone_at(place)[0]
        units, targets = self._units_at(place)
        own = OwnUnits(plan, units, targets)
        held = torch.empty(int(own.held_bytes.sum()), dtype=torch.uint8, device="meta")
        calls: list[Call] = [(units.join(np.flatnonzero(plan.readers < 0)), targets)]
        for number in range(plan.num_waves):
            wave = Wave(own, number, held)
            copies, memories = wave.held_copies(len(targets))
            calls.append(([*units.join(wave.direct_units), *copies], [*targets, *memories]))
        return self._requests.reads(calls)

    def _load_of(self, ranks: range, reads: Sequence[ReadFigures]) -> NodeLoad:
        """Sum up the reads of a node, with those of common state."""
        with_objects = []
        for rank, own in zip(ranks, reads, strict=True):
            # From a store, one rank reads it.
            if self._is_local or rank == 0:
                own = ReadFigures.joined([own, self._objects])
            with_objects.append(own)
        of_node = ReadFigures.joined(with_objects)
        storage_bytes = int(of_node.num_bytes.sum())
        if self._is_local:
            storage_bytes = of_node.num_different_bytes()
        of_ranks = []
        for own in with_objects:
            of_ranks.append((int(own.num_bytes.sum()), own.requests().total()))
        return NodeLoad(storage_bytes, of_node.requests(), of_ranks)


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

"""The built-in format: safetensors shards, encoded objects and a columnar manifest (see docs/format.md)."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from distckpt._base.device import Copier
from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import CheckpointingException
from distckpt._base.memory import in_huge_pages, may_overlap
from distckpt._base.threads import NUM_DIRECT_THREADS, NUM_THREADS, UNIT_BYTES, num_requests_within, num_threads_within
from distckpt._commit import posix
from distckpt._foreign import opening
from distckpt._foreign.opening import BACKEND, VERSION
from distckpt._foreign.stored_values import load_objects
from distckpt._format.manifest import ChunkTable
from distckpt._format.marker import CheckpointingConfig
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import covering
from distckpt._io import aliases
from distckpt._io.direct_reads import files_to_read_directly
from distckpt._io.read_values import read_apart, read_values, warn_of_overflows
from distckpt._io.remove_tensors import remove_tensors
from distckpt._io.replicas import add_digests, weighted_digest
from distckpt._io.save import (
    encoded_objects,
    make_plan,
    object_file_of,
    ready_to_save,
    tensor_files_of,
    write_manifest,
)
from distckpt._io.shared_read import MIN_REQUESTED_BYTES, Sharing, read_sharing
from distckpt._io.staging import Staging
from distckpt._io.write import NewFile, WriteSettings, write_files
from distckpt._plan.cache import PlanCache, SavePlan, structure_of
from distckpt._plan.decoded import decoded, find, name_in_view
from distckpt._plan.layout import chunk_table
from distckpt._plan.load import Copy, Request, check_dtype, check_keys, plan_load
from distckpt._plan.translate import translate
from distckpt._ranks import exchanges
from distckpt._ranks.collectives import Ranks
from distckpt._state.common_state import COMMON_KEY
from distckpt._state.shards import Shard, ShardTable, describe, region_view, shard_regions
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles
from distckpt._storage.page_cache import MIN_DIRECT_BYTES
from distckpt.mapping import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from distckpt.strategies.base import LoadShardedStrategy, Options, PreparedSave, SaveShardedStrategy

__all__ = ["SafetensorsLoadStrategy", "SafetensorsSaveStrategy"]

logger = logging.getLogger(__name__)

_Addition: TypeAlias = tuple[torch.Tensor, float]
"""A target, and what to add to it when it is read."""


@dataclass
class SafetensorsSaveStrategy(SaveShardedStrategy):
    """Write one copy of every byte as safetensors, spread evenly over the ranks that hold it.

    Plans are kept: while no rank's shards change in anything but their data, later saves are not planned again.

    Attributes:
        options: settings of the call, see `configure`.
        direct_io: whether files are written around the page cache; None where it pays and the file system takes it,
            True insists.
    """

    options: Options = field(default_factory=Options)
    direct_io: bool | None = None
    backend: str = BACKEND
    version: int = VERSION
    _plans: PlanCache = field(default_factory=PlanCache, repr=False, compare=False)

    def configure(self, options: Options) -> SafetensorsSaveStrategy:
        return replace(self, options=options)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> Mapping[str, Any]:
        """Write all shards and the manifest; on the coordinator, return the marker fields that name the manifest.

        Collective operation: all ranks of the process group must call it. Raises what `prepare` raises.
        """
        ranks = Ranks(self.options.process_group)
        prepared = self.prepare(sharded_state_dict)
        with ranks.phase("save"):
            return prepared.write(locations.normalize(checkpoint_dir), ranks)

    def prepare(self, sharded_state_dict: ShardedStateDict) -> SafetensorsSave:
        """Give every byte an owner and a place in a file.

        Collective operation: all ranks of the process group must call it. They compare whether a kept plan fits; only
        when it does not on any of them, descriptions go to rank 0, and pieces to write come from it.

        Raises:
            InvalidShardingError: shards overlap, leave gaps or disagree.
        """
        options = self.options
        shards, plan, is_known = self._plan(Ranks(options.process_group), sharded_state_dict)
        num_requests = num_requests_within(options.max_inflight_bytes)
        settings = WriteSettings(
            durable=options.durable,
            direct=self.direct_io,
            num_threads=num_threads_within(options.max_inflight_bytes),
            num_requests=num_requests,
            max_part_bytes=options.max_inflight_bytes // num_requests - UNIT_BYTES,
            progress=options.progress,
        )
        encoded = encoded_objects(plan.objects, shards)
        num_bytes = sum(sum(file.chunk_bytes) for file in plan.files) + sum(map(len, encoded.values()))
        return SafetensorsSave(tensor_files_of(plan.files, shards), plan, encoded, settings, num_bytes, is_known)

    def _plan(self, ranks: Ranks, sharded_state_dict: ShardedStateDict) -> tuple[list[Shard], SavePlan, bool]:
        """Return the shards ready to save, their plan, and whether that was kept from an earlier save."""
        options = self.options
        known = table = None

        def described() -> ShardTable:
            table = describe(shards)._replace(exchange_group=group)
            if compares:
                add_digests(table, shards, of_samples=not options.validate_replicas)
            return table

        with ranks.phase("describe the shards") as vote:
            shards = [ready_to_save(shard, options.validate_replicas is True) for shard in sharded_state_dict.values()]
            group = exchanges.group_number(options.exchange_group)
            structure = structure_of(shards, ranks, options.validate_access_integrity, group)
            # Comparing the whole content of replicas takes an exchange each time.
            known = None if options.validate_replicas else self._plans.find(structure)
            compares = ranks.size > 1 if options.validate_replicas is None else options.validate_replicas
            vote.number = known.number if known else 0
            table = None if known else described()
            digest = weighted_digest(known, shards) if known and compares else 0
        if known and vote.are_equal and known.replicas is not None and compares:
            vote.are_equal = not ranks.all_gather_numbers([digest]).sum()
        if known and vote.are_equal:
            plan = known
        else:
            if vote.largest:  # Some ranks, though not all, know a plan, or replicas have become different.
                with ranks.phase("describe the shards again"):
                    table = table or described()
            assert table is not None
            plan = make_plan(ranks, table, not options.validate_access_integrity)
        self._plans.keep(structure, plan)
        return shards, plan, plan is known


@dataclass
class SafetensorsSave(PreparedSave):
    """The part of one rank in a planned save.

    Attributes:
        make_tensor_files: call it in the thread that computes, see `file_of_tensors`.
        plan: its objects are written after the tensors, into a file of their own.
        encoded: the objects, by unique key.
        settings: how files are written.
    """

    make_tensor_files: Callable[[], Sequence[NewFile]]
    plan: SavePlan
    encoded: Mapping[str, bytes]
    settings: WriteSettings
    num_bytes: int
    plan_reused: bool = False
    folder_suffix: str = ""
    written: Sequence[tuple[str, int]] = ()

    def stage(self, staging: Staging) -> SafetensorsSave:
        # Objects are copies already, encoded ones.
        staged = staging.copy(self.make_tensor_files())
        return replace(self, make_tensor_files=lambda: staged)

    def write(self, checkpoint_dir: str, ranks: Ranks) -> Mapping[str, Any]:
        """Write what this rank owns; the coordinator then notes what is where.

        Collective operation: all ranks must call it. Chunks of objects, and checksums, go to the coordinator.
        """
        plan, suffix, settings = self.plan, self.folder_suffix, self.settings
        with ranks.phase("write shard files"):
            files = [*self.make_tensor_files()]
            object_table = ChunkTable.empty()
            if plan.objects:
                planned, object_file = object_file_of(ranks.rank, plan.objects, self.encoded)
                object_table = chunk_table([planned])
                files.append(object_file)
            checksums = write_files([file.below(checkpoint_dir, suffix) for file in files], settings)
            written = object_table._replace(block_checksums=checksums).to_bytes()
        gathered = [ChunkTable.from_bytes(data) for data in ranks.gather(written)]
        if plan.manifest is None:
            return {}
        tables = list(itertools.chain(*zip(plan.tables, gathered, strict=True)))
        fields, self.written = write_manifest(checkpoint_dir, plan.manifest, tables, suffix, settings.durable)
        return fields


@dataclass
class SafetensorsLoadStrategy(LoadShardedStrategy):
    """Read exactly the requested regions of a checkpoint, of distckpt or of any format that has a reader.

    Attributes:
        options: settings of the call, see `configure`.
        ranks: who reads together; a strategy that was not configured reads alone.
    """

    options: Options = field(default_factory=Options)
    ranks: Ranks = field(default_factory=Ranks.alone)
    backend: str = BACKEND
    version: int = VERSION
    _opened: dict[str, tuple[Any, StoredCheckpoint]] = field(default_factory=dict, init=False, repr=False)

    def configure(self, options: Options) -> SafetensorsLoadStrategy:
        return replace(self, options=options, ranks=Ranks(options.process_group))

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> StateDict:
        """Read tensors in place and decode objects.

        Collective operation: all ranks of the configured group must call it; rank 0 reads the manifest and sends it to
        all.

        Raises:
            LoadMismatchError: a key, shape, dtype or object grid is not stored as requested.
            CorruptCheckpointError: files contradict the manifest or their checksums.
        """
        stored = self._open_together(locations.normalize(checkpoint_dir))
        tensors = {name: s for name, s in sharded_state_dict.items() if isinstance(s, ShardedTensor)}
        objects = {name: s for name, s in sharded_state_dict.items() if isinstance(s, ShardedObject)}
        loaded: dict[str, Any] = {**self._load_tensors(stored, tensors)}
        check_keys(stored, [shard.key for shard in objects.values() if shard.key != COMMON_KEY])
        loaded.update(zip(objects, load_objects(stored, list(objects.values())), strict=True))
        return {name: loaded[name] for name in sharded_state_dict}

    def _load_tensors(self, stored: StoredCheckpoint, tensors: Mapping[str, ShardedTensor]) -> dict[str, torch.Tensor]:
        options = self.options
        with self.ranks.phase("plan the reads") as vote:
            stored = decoded(stored)
            filled, requests, copies, targets, adds = self._plan_tensors(stored, tensors)
            apart = [number for number, request in enumerate(requests) if request.step]
            separated = aliases.separate(stored, requests, copies, targets)
            group = exchanges.group_number(options.exchange_group)
            vote.number = sum(target.nbytes for target in separated.targets)
        # Some of what follows is copied by other threads, whose streams know nothing of this thread's.
        Copier(separated.targets).wait_for_queued()
        self._read(stored, copies, separated.targets, group, vote.largest)
        pairs = [(requests[number], targets[number]) for number in apart]
        num_threads = num_threads_within if locations.is_local(stored.location) else num_requests_within
        read_apart(stored, pairs, num_threads(options.max_inflight_bytes), options.progress)
        aliases.join(requests, separated, stored.location)
        warn_of_overflows(stored, requests, targets)
        with torch.no_grad():
            # Once where targets share memory.
            for target, value in {(t.data_ptr(), t.shape, t.stride()): (t, v) for t, v in adds}.values():
                target.add_(value)
        return {
            name: aliases.settled(tensors[name], shard.data) for name, shard in filled.items() if shard.data is not None
        }

    def _read(
        self,
        stored: StoredCheckpoint,
        copies: Sequence[Copy],
        targets: Sequence[torch.Tensor],
        group: int,
        num_bytes: int,
    ) -> None:
        """Fill targets; no rank requests more than `num_bytes`."""
        options, is_local = self.options, locations.is_local(stored.location)
        is_little = options.parallel_load == "auto" and num_bytes < MIN_REQUESTED_BYTES
        mode = "off" if is_little else options.parallel_load
        sharing = Sharing(self.ranks, mode, group, is_local, options.max_inflight_bytes)
        may_be_direct = is_local and num_bytes >= MIN_DIRECT_BYTES
        direct = files_to_read_directly(self.ranks, stored, copies) if may_be_direct else frozenset()
        num_threads = num_requests_within(options.max_inflight_bytes)
        if is_local:
            most = NUM_DIRECT_THREADS if direct else NUM_THREADS
            num_threads = num_threads_within(options.max_inflight_bytes, most)
        with OpenFiles(direct=direct) as files:
            kept = stored.with_files(files)

            def read_share(share: Sequence[Copy]) -> None:
                read_values(kept, share, targets, num_threads, options.progress)

            read_sharing(sharing, stored.manifest, copies, targets, read_share)

    def _plan_tensors(
        self, stored: StoredCheckpoint, tensors: Mapping[str, ShardedTensor]
    ) -> tuple[dict[str, ShardedTensor], list[Request], list[Copy], Sequence[torch.Tensor], list[_Addition]]:
        """Return the shards with their tensors, what is requested, what to read into which parts of those, and add.

        Nothing is planned yet to be read for requests whose elements lie apart.
        """
        pieces = [(name, shard, region) for name, shard in tensors.items() for region in shard_regions(shard)]
        requests = [
            Request(shard.key, tuple(shard.global_shape), region, shard.allow_shape_mismatch)
            for _, shard, region in pieces
        ]
        copies: list[Copy] = []
        adds: list[float] = []
        if not self.options.rules:
            # Before memory is allocated: what is not stored may be of any size.
            dtypes = [shard.dtype if shard.data is None else shard.data.dtype for _, shard, _ in pieces]
            requests, copies = self._plan(stored, requests, dtypes)
        filled = dict(tensors)
        for name, shard in tensors.items():
            if shard.data is None or may_overlap(shard.data):
                filled[name] = shard.without_data()
                device = "cpu" if shard.data is None else shard.data.device
                filled[name].init_data(device, lambda *a, **k: in_huge_pages(torch.empty(*a, **k)))
        targets = [region_view(filled[name], region) for name, _, region in pieces]
        if self.options.rules:
            requests, targets, adds = translate(self.options.rules, requests, targets)
            requests, copies = self._plan(stored, requests, [target.dtype for target in targets])
        for request, target in zip(requests, targets, strict=True):
            if request.allow_shape_mismatch:
                target.zero_()
        additions = [(target, value) for target, value in zip(targets, adds, strict=False) if value]
        return filled, requests, copies, targets, additions

    def _plan(
        self, stored: StoredCheckpoint, requests: list[Request], dtypes: Sequence[torch.dtype]
    ) -> tuple[list[Request], list[Copy]]:
        """Find what fills the requests, whose targets have the given dtypes; `stored` is a view, see `decoded`."""
        if stored.quantized:
            pairs = zip(requests, dtypes, strict=True)
            requests = [r._replace(key=name_in_view(stored, r.key, dtype)) for r, dtype in pairs]
        check_keys(stored, [request.key for request in requests], bool(self.options.rules))
        for key, dtype in dict.fromkeys(zip((request.key for request in requests), dtypes, strict=True)):
            check_dtype(stored, key, dtype, self.options.allow_dtype_cast)
        dense = [request._replace(region=covering(request.region, request.step), step=()) for request in requests]
        return requests, [copy for copy in plan_load(stored, dense) if not requests[copy.request].step]

    def load_tensors_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, ShardedTensor]:
        stored = self._open(locations.normalize(checkpoint_dir))
        described = {}
        for key in stored.manifest.key_index:
            if not stored.is_object(key):
                described[key] = _whole(key, stored.dtype_name(key), stored.global_shape(key))
        return described

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, ShardedTensor | ShardedObject]:
        stored = self._open(locations.normalize(checkpoint_dir))
        described: dict[str, ShardedTensor | ShardedObject] = {**self.load_tensors_metadata(checkpoint_dir)}
        for key in filter(stored.is_object, stored.manifest.keys):
            for chunk in stored.chunks_of(key):
                offset = stored.manifest.chunk_region(chunk).offset
                shard = ShardedObject(key, None, stored.global_shape(key), offset)
                described[shard.unique_key] = shard
        return described

    def load_quantized_metadata(
        self, checkpoint_dir: str | os.PathLike[str]
    ) -> dict[str, tuple[ShardedTensor, tuple[str, ...]]]:
        found = find(self._open(locations.normalize(checkpoint_dir)))
        return {key: (_whole(key, each.dtype, each.model_shape), each.keys) for key, each in found.items()}

    def remove_sharded_tensors(self, checkpoint_dir: str | os.PathLike[str], key_prefix: str) -> None:
        checkpoint_dir = locations.normalize(checkpoint_dir)
        config = CheckpointingConfig(self.backend, self.version)
        manifest = self._open(checkpoint_dir).manifest
        if not manifest.has_checksums:
            raise CheckpointingException(f"{checkpoint_dir!r} was not written by distckpt: convert it first.")
        removed = remove_tensors(posix.resolve(checkpoint_dir), manifest, key_prefix, config)
        if not removed:
            logger.warning("no tensor in %s has a key that begins with %r: nothing removed", checkpoint_dir, key_prefix)

    def _open(self, checkpoint_dir: str) -> StoredCheckpoint:
        """Read the manifest, unless the same one was read before."""
        if self.options.stored is not None:
            return self.options.stored
        marker = opening.identify(checkpoint_dir)
        known = self._opened.get(checkpoint_dir)
        if known is None or known[0] != marker or not marker.get("manifest"):
            data = opening.manifest_bytes(checkpoint_dir, marker)
            stored = opening.decode_manifest(checkpoint_dir, data, self.options.verify)
            known = self._opened[checkpoint_dir] = (marker, stored)
        return known[1]

    def _open_together(self, checkpoint_dir: str) -> StoredCheckpoint:
        if self.ranks.size == 1 or self.options.stored is not None:
            return self._open(checkpoint_dir)

        def read() -> bytes:
            return opening.manifest_bytes(checkpoint_dir, opening.identify(checkpoint_dir))

        data = self.ranks.decide("read the manifest", read)
        return opening.decode_manifest(checkpoint_dir, data, self.options.verify)


def _whole(key: str, dtype: str, shape: tuple[int, ...]) -> ShardedTensor:
    return ShardedTensor(key, None, FROM_NAME[dtype], shape, shape, (0,) * len(shape), (1,) * len(shape))

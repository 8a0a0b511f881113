"""The engine of saves: plan shards together with the other ranks, write files of them, complete
the manifest.
"""

from __future__ import annotations

import copy
import enum
import importlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.errors import CheckpointingException
from distckpt._base.options import SaveOptions
from distckpt._base.threads import (
    DEFAULT_INFLIGHT_BYTES,
    UNIT_BYTES,
    ProgressCounter,
    num_requests_within,
    num_threads_within,
)
from distckpt._format.columns import pack, unpack
from distckpt._format.manifest import (
    MANIFEST_NAME,
    ChunkTable,
    Manifest,
    file_of_checksums,
    marker_fields,
    needs_checksum_files,
    num_blocks_of,
    version_of,
)
from distckpt._format.manifest_parts import with_parts
from distckpt._format.planned_manifest import PlannedManifest, planned_manifest, report_of
from distckpt._format.safetensors_file import ShardFile
from distckpt._geometry.region import IntArray
from distckpt._io.prepared_save import FileCopies, PreparedSave
from distckpt._io.replicas import add_digests, samples_of_rows, weighted_digest
from distckpt._io.write import NewFile, WriteSettings, file_of_tensors, in_folder, write_files
from distckpt._mapping.base import OpenReplicaId
from distckpt._mapping.sharded_tensor import ShardedTensor
from distckpt._mapping.wrappers import ShardedObject, is_main_replica
from distckpt._plan.layout import (
    LoadedPlan,
    PlanCache,
    PlannedChunk,
    PlannedFile,
    SavePlan,
    Structure,
    checksum_file_name,
    chunk_table,
    compared_replicas,
    forget_loaded_plan,
    lay_out_files,
    lay_out_object_file,
    loaded_plans,
    manifest_of_keys,
    open_object_file,
    structure_of,
    structure_of_all,
)
from distckpt._plan.save import Pieces, find_aliases, num_planners_for, plan_owners
from distckpt._ranks import exchanges
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.exchanges import pack_parts, unpack_parts
from distckpt._state.common_state import encoded as encode_object
from distckpt._state.shards import (
    GlobalTable,
    Shard,
    ShardTable,
    merge_tables,
    region_view,
    shard_table,
)
from distckpt._state.validation import (
    find_differences,
    num_replicated,
    replica_factors,
    stride_of,
    validate_shards,
)
from distckpt._storage import locations

if TYPE_CHECKING:
    from distckpt._io.divided_plan import DividedPlan
    from distckpt._io.replica_differences import ReplicasToCompare

_PLANS = PlanCache()


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """How shards are saved.

    Attributes:
        options: of the caller.
        exchange_group: process group within which replicas share the writing; None for all ranks.
        direct_io: write files around the page cache; None if that pays and the file system takes
            it, True insists.
        plans: plans of earlier saves. While nothing but the data of the shards changes on any rank,
            later saves are not planned again.
        leaves_out: warn of values that cannot be stored, and leave them out.
    """

    options: SaveOptions
    exchange_group: Any = None
    direct_io: bool | None = None
    plans: PlanCache = _PLANS
    leaves_out: bool = False

    def for_writing(self, num_bytes: int) -> WriteSettings:
        """Return how files of `num_bytes` in total are written."""
        limit = self.options.max_inflight_bytes
        limit = DEFAULT_INFLIGHT_BYTES if limit is None else limit
        num_requests = num_requests_within(limit)
        progress = self.options.progress
        return WriteSettings(
            durable=self.options.durable,
            direct=self.direct_io,
            num_threads=num_threads_within(limit),
            num_requests=num_requests,
            max_part_bytes=limit // num_requests - UNIT_BYTES,
            progress=ProgressCounter(progress, num_bytes).add if progress else None,
        )


class ReadyShards(NamedTuple):
    """Shards of one rank that can be saved, and what it knows of a plan for them.

    Attributes:
        shards: with encoded objects.
        settings: of the save.
        structure: what a plan is found by.
        table: describes the shards, where no plan was kept.
        plan: that was kept, or that a loaded checkpoint tells of; None if there is none.
        digest: of samples of replicas, see `weighted_digest`.
        num_bytes: how much this rank writes by that plan.
        description: digest of the shards, see `ShardTable.description`.
        loaded: where the plan is from, if it was not kept.
    """

    shards: list[Shard]
    settings: ShardSettings
    structure: Structure
    table: ShardTable | None
    plan: SavePlan | None = None
    digest: int = 0
    num_bytes: int = 0
    description: bytes = b""
    loaded: LoadedPlan | None = None

    def vote(self) -> bytes:
        """Return what the coordinator compares, see `KeptPlans`."""
        number = 0 if self.plan is None else self.plan.number
        numbers = [number, self.digest, self.num_bytes, len(self.shards)]
        encoded = np.array(numbers, np.int64).tobytes()
        return (encoded + self.description).ljust(_VOTE_BYTES, b"\0")

    @property
    def planned_structure(self) -> str | None:
        """The digest of the shards of all ranks for which the plan was made; None where it is not
        known.
        """
        planned = None if self.plan is None else self.plan.manifest
        note = None if planned is None else planned.manifest.plan
        return None if note is None else note["structure"]


_NUMBERS_BYTES = 32
_VOTE_BYTES = _NUMBERS_BYTES + 16
NO_VOTE = bytes(_VOTE_BYTES)
"""Of a rank that has not looked for a plan."""


class KeptPlans(NamedTuple):
    """What the coordinator finds out about plans that ranks have kept.

    Attributes:
        are_used: all know the same plan, and replicas are still equal.
        some_know: at least one knows a plan.
        structure: digest of the shards of all ranks.
        num_bytes: how much all ranks write by that plan; known to the coordinator.
        num_planners: how many ranks make a plan where none is used.
    """

    are_used: bool
    some_know: bool
    structure: bytes
    num_bytes: int = 0
    num_planners: int = 1

    @classmethod
    def compared(cls, votes: Sequence[bytes], own: ReadyShards | None) -> KeptPlans:
        """Compare the votes of all ranks, see `ReadyShards.vote`, of which the coordinator's `own`
        may know what shards its plan was made for.
        """
        columns = np.frombuffer(b"".join(votes), np.int64).reshape(len(votes), -1).T
        numbers, digests, sizes, num_shards, *_ = columns
        structure = structure_of_all([vote[_NUMBERS_BYTES:] for vote in votes])
        # The digests of all ranks add up to 0 modulo 2**64.
        is_same = bool((numbers == numbers[0]).all()) and not digests.sum()
        if own is not None and own.planned_structure is not None:
            is_same = is_same and own.planned_structure == structure.hex()
        are_used = is_same and bool(numbers[0])
        num_planners = num_planners_for(int(num_shards.sum()), len(votes))
        return cls(are_used, bool(numbers.any()), structure, int(sizes.sum()), num_planners)

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return bytes([self.are_used, self.some_know, self.num_planners]) + self.structure

    @classmethod
    def from_bytes(cls, data: bytes) -> KeptPlans:
        """Decode what `to_bytes` made."""
        are_used, some_know, num_planners, *_ = data
        return cls(bool(are_used), bool(some_know), data[3:], num_planners=num_planners)


def prepare_shards(
    ranks: Ranks,
    shards: Sequence[Shard],
    settings: ShardSettings,
) -> ShardSave:
    """Give every byte of the shards of all ranks an owner and a place in a file.

    Collective operation: all ranks must call it. They compare whether a kept plan fits. Only when
    it does not on any of them, descriptions go to rank 0, and pieces to write come from it.

    Raises:
        InvalidShardingError: shards overlap, leave gaps or contradict each other.
    """
    return plan_shards(ranks, *_compare_plans(ranks, shards, settings))


def _compare_plans(
    ranks: Ranks, shards: Sequence[Shard], settings: ShardSettings
) -> tuple[ReadyShards, KeptPlans]:
    with ranks.telling("describe the shards") as told:
        ready = ready_to_plan(ranks, shards, settings)
        told.payload = ready.vote()
    with ranks.answering(told, "describe the shards"):
        if ranks.is_coordinator:
            told.answer = KeptPlans.compared(told.payloads, ready).to_bytes()
    return ready, KeptPlans.from_bytes(told.answer)


def ready_to_plan(ranks: Ranks, shards: Sequence[Shard], settings: ShardSettings) -> ReadyShards:
    """Encode objects, and look for a plan that was kept, or that a loaded checkpoint tells of;
    otherwise describe the shards.
    """
    options = settings.options
    comparison = _comparison_of(ranks, options)
    ready = _all_ready(shards, comparison, settings.leaves_out)
    group = exchanges.group_number(settings.exchange_group)
    structure = structure_of(ready, ranks, options.validate_access_integrity, group)
    # Comparing the whole content of replicas takes an exchange each time.
    known = None if comparison is _Comparison.ALL else settings.plans.find(structure)
    if known is None:
        return _ready_without_plan(ranks, ready, settings, structure, comparison)
    digest = _digest_of(known, ready, comparison)
    num_bytes = _num_bytes_of(known, ready)
    return ReadyShards(
        ready, settings, structure, None, known, digest, num_bytes, known.description
    )


def _digest_of(plan: SavePlan, shards: Sequence[Shard], comparison: _Comparison) -> int:
    compares = comparison is _Comparison.SAMPLES and plan.replicas is not None
    return weighted_digest(plan, shards) if compares else 0


def _num_bytes_of(plan: SavePlan, shards: Sequence[Shard]) -> int:
    return plan.tensor_bytes + sum(map(len, encoded_objects(plan.objects, shards).values()))


def _ready_without_plan(
    ranks: Ranks,
    shards: list[Shard],
    settings: ShardSettings,
    structure: Structure,
    comparison: _Comparison,
) -> ReadyShards:
    """Describe the shards, and look for a plan in what loaded checkpoints tell."""
    table = _described(shards, settings)
    description = table.description() if ranks.size > 1 else b""
    ready = ReadyShards(shards, settings, structure, table, description=description)
    for loaded in [] if comparison is _Comparison.ALL else list(loaded_plans):
        if (loaded.rank, loaded.num_ranks) == (ranks.rank, ranks.size):
            found = _stored_plan().restored(loaded, table, description)
            if found is not None:
                return ready._replace(
                    table=None,
                    plan=found.plan,
                    digest=_digest_of(found.with_all_replicas, shards, comparison),
                    num_bytes=_num_bytes_of(found.plan, shards),
                    loaded=loaded,
                )
    _add_digests(table, shards, comparison)
    return ready


def plan_shards(ranks: Ranks, ready: ReadyShards, kept: KeptPlans) -> ShardSave:
    """Use the plan that all ranks have kept, or plan together. Collective operation: all ranks must
    call it.
    """
    shards, num_bytes = ready.shards, ready.num_bytes
    plan = _plan_of(ranks, ready, kept)
    encoded = encoded_objects(plan.objects, shards)
    if not kept.are_used:
        num_bytes = plan.tensor_bytes + sum(map(len, encoded.values()))
    measured = {}
    for name, (option, _) in _MEASURES.items():
        if getattr(ready.settings.options, option):
            with ranks.phase(f"compute {name}"):
                measured[name] = _measure(name).numbers_of(_owned_chunks(plan, shards))
    return ShardSave(
        make_tensor_files=tensor_files_of(plan.files, shards),
        plan=plan,
        encoded=encoded,
        settings=ready.settings.for_writing(num_bytes),
        num_bytes=num_bytes,
        plan_reused=kept.are_used,
        measured=measured,
    )


_MEASURES = {
    "fingerprints": ("fingerprint", "distckpt._io.fingerprints"),
    "statistics": ("stats", "distckpt._io.save_stats"),
}
"""What is computed from values, the option that asks for it, and the module that does it."""


def _measure(name: str) -> Any:
    # Imported when it is needed, by few saves.
    return importlib.import_module(_MEASURES[name][1])


def _plan_of(ranks: Ranks, ready: ReadyShards, kept: KeptPlans) -> SavePlan:
    shards, settings, table = ready.shards, ready.settings, ready.table
    if kept.are_used and ready.plan is not None:
        if ready.loaded is not None:
            settings.plans.keep(ready.structure, ready.plan)
            forget_loaded_plan(ready.loaded.number)
        return ready.plan
    if kept.some_know:
        # Some ranks, though not all, know a plan, or replicas have become different.
        with ranks.phase("describe the shards again"):
            if table is None:
                table = _described(shards, settings)
                _add_digests(table, shards, _comparison_of(ranks, settings.options))
    assert table is not None
    plan = _make_plan(ranks, table, shards, settings, kept)
    plan = plan._replace(description=ready.description)
    settings.plans.keep(ready.structure, plan)
    return plan


class OwnedChunk(NamedTuple):
    """A chunk of a tensor that this rank would write, and the values of its pieces, which are views
    of the tensors of the state dict.
    """

    chunk: PlannedChunk
    values: list[torch.Tensor]


def plan_chunks(
    ranks: Ranks, shards: Sequence[Shard], settings: ShardSettings
) -> tuple[list[OwnedChunk], Manifest | None]:
    """Give every element of the shards of all ranks an owner, as `prepare_shards` does; return the
    chunks of tensors of this rank, and on the coordinator the keys of all ranks.

    Collective operation: all ranks must call it.
    """
    ready, kept = _compare_plans(ranks, shards, settings)
    plan = _plan_of(ranks, ready, kept)
    owned = _owned_chunks(plan, ready.shards)
    return owned, plan.manifest.manifest if plan.manifest is not None else None


def _owned_chunks(plan: SavePlan, shards: Sequence[Shard]) -> list[OwnedChunk]:
    chunks = (chunk for file in plan.files for chunk in file.chunks)
    return [OwnedChunk(chunk, _tensors_of(chunk, shards)) for chunk in chunks]


def _all_ready(shards: Sequence[Shard], comparison: _Comparison, leaves_out: bool) -> list[Shard]:
    encode_copies = comparison is _Comparison.ALL
    return [ready_to_save(shard, encode_copies, leaves_out) for shard in shards]


class _Comparison(enum.Enum):
    """What of replicas is compared."""

    NOTHING = enum.auto()
    SAMPLES = enum.auto()
    ALL = enum.auto()


def _comparison_of(ranks: Ranks, options: SaveOptions) -> _Comparison:
    if options.validate_replicas:
        return _Comparison.ALL
    is_wanted = options.validate_replicas is None and ranks.size > 1
    return _Comparison.SAMPLES if is_wanted else _Comparison.NOTHING


def _described(shards: Sequence[Shard], settings: ShardSettings) -> ShardTable:
    group = exchanges.group_number(settings.exchange_group)
    return shard_table(shards)._replace(exchange_group=group)


def _add_digests(table: ShardTable, shards: Sequence[Shard], comparison: _Comparison) -> None:
    """Add hashes to a description if replicas are compared."""
    if comparison is not _Comparison.NOTHING:
        add_digests(table, shards, of_samples=comparison is _Comparison.SAMPLES)


@dataclass
class ShardSave(PreparedSave):
    """The part of one rank in a planned save.

    Attributes:
        make_tensor_files: call it in the thread that computes, see `file_of_tensors`.
        plan: its objects are written after the tensors, into a file of their own.
        encoded: the objects, by unique key.
        settings: how files are written.
        measured: what this rank adds to the fingerprints and statistics that are stored, if they
            are, see `numbers_of`.
    """

    make_tensor_files: Callable[[], Sequence[NewFile]]
    plan: SavePlan
    encoded: Mapping[str, bytes]
    settings: WriteSettings
    num_bytes: int
    plan_reused: bool = False
    folder_suffix: str = ""
    measured: Mapping[str, bytes] = field(default_factory=dict)
    exchanges_in_write = False
    written: Sequence[tuple[str, int]] = ()

    def __init_subclass__(cls) -> None:
        """Let a class that does more in `write` be written by that, as other strategies are."""
        if "write" in vars(cls):
            cls.exchanges_in_write = True
            cls.write_own = PreparedSave.write_own  # type: ignore[method-assign]
            cls.complete = PreparedSave.complete  # type: ignore[assignment, method-assign]

    def stage(self, copies: FileCopies) -> ShardSave:
        # Objects are copies already, encoded ones.
        staged = copies.copy(self.make_tensor_files())
        return replace(self, make_tensor_files=lambda: staged)

    def write(self, checkpoint_dir: str, ranks: Ranks) -> Mapping[str, Any]:
        """Write what this rank owns; the coordinator then notes what is where.

        Collective operation: all ranks must call it. Chunks of objects, and checksums, go to the
        coordinator.
        """
        fields: Mapping[str, Any] = {}
        with ranks.telling("write shard files") as told:
            told.payload = ShardSave.write_own(self, checkpoint_dir, ranks)
        with ranks.answering(told, "write the manifest"):
            if ranks.is_coordinator:
                fields = ShardSave.complete(self, checkpoint_dir, told.payloads)
        return fields

    def write_own(self, checkpoint_dir: str, ranks: Ranks) -> bytes:
        plan, suffix = self.plan, self.folder_suffix
        with ranks.part("write shard files"):
            files = [*self.make_tensor_files()]
            planned_objects = []
            if plan.objects:
                planned, object_file = object_file_of(ranks.rank, plan.objects, self.encoded)
                planned_objects.append(planned)
                files.append(object_file)
            placed = [file.below(checkpoint_dir, suffix) for file in files]
            checksums = write_files(placed, self.settings)
            objects, durable = chunk_table(planned_objects), self.settings.durable
            report = report_of_written(checkpoint_dir, plan, objects, checksums, suffix, durable)
        return pack_parts([report, *self.measured.values()]) if self.measured else report

    def complete(self, checkpoint_dir: str, told: Sequence[bytes]) -> Mapping[str, Any]:
        planned = self.plan.manifest
        assert planned is not None
        columns: dict[str, npt.NDArray[Any]] = {}
        if self.measured:
            told, *of_all = zip(*map(unpack_parts, told), strict=True)
            for name, numbers in zip(self.measured, of_all, strict=True):
                columns |= _measure(name).columns_of(planned.manifest, numbers)
        fields, self.written = write_manifest(
            checkpoint_dir,
            planned,
            told,
            self.folder_suffix,
            self.settings.durable,
            columns,
        )
        return fields


def report_of_written(
    checkpoint_dir: str,
    plan: SavePlan,
    objects: ChunkTable,
    checksums: npt.NDArray[np.uint64],
    suffix: str,
    durable: bool = True,
) -> bytes:
    """Return what the coordinator learns of what a rank has written. Where checksums have a file of
    their own, this writes it.

    Args:
        checkpoint_dir: where files are written, into the folders with the suffix.
        plan: of the rank.
        objects: the file of its objects, if there is one.
        checksums: of the blocks of all of its files.
        suffix: see `PreparedSave.folder_suffix`.
        durable: whether the file must have reached the disk on return.
    """
    name = plan.checksum_file
    if name is None:
        return report_of(objects.files, objects.num_bytes, checksums)
    data = checksums.astype("<u8").tobytes()
    locations.write_bytes(locations.join(checkpoint_dir, in_folder(name, suffix)), data, durable)
    file = file_of_checksums(name, data)
    return report_of([*objects.files, file], objects.num_bytes, checksums[:0])


def _gather_tables(
    ranks: Ranks, table: ChunkTable, factors: bytes
) -> tuple[list[ChunkTable], list[bytes]]:
    """Return the tables of all ranks on the coordinator, and their factors; empty lists
    elsewhere.
    """
    if ranks.size == 1:
        return [table], []
    if len(table.key_ids):
        message = _TABLE + table.to_bytes()
    else:
        message = _FILES + json.dumps(table.files).encode()
    gathered = [*map(unpack_parts, ranks.gather(pack_parts([message, factors])))]
    return [_read_table(message) for message, _ in gathered], [each for _, each in gathered]


_TABLE, _FILES = b"+", b"-"
"""How messages begin: that of a rank without chunks has only its files."""


def _read_table(message: bytes) -> ChunkTable:
    if message[:1] == _TABLE:
        return ChunkTable.from_bytes(message[1:])
    files = [ShardFile(*file) for file in json.loads(message[1:])]
    return _NO_CHUNKS._replace(files=files)


_NO_CHUNKS = ChunkTable.empty()


def ready_to_save(shard: Shard, encode_copies: bool, leaves_out: bool = False) -> Shard:
    """Check that a tensor can be read; replace the value of a main object (and of copies) by its
    encoding, in which what cannot be stored is an error, or left out.
    """
    if isinstance(shard, ShardedTensor):
        _check_tensor(shard)
        return shard
    is_main = is_main_replica(shard.replica_id) or isinstance(shard.replica_id, OpenReplicaId)
    if not (is_main or encode_copies):
        return shard
    encoded = copy.copy(shard)
    encoded.data = encode_object(shard.key, shard.data, leaves_out)
    return encoded


def _check_tensor(shard: ShardedTensor) -> None:
    data = shard.data
    if data is None:
        raise CheckpointingException(
            f"Key {shard.key!r} at offset {shard.global_offset} has no data, and needs its tensor "
            "to be saved."
        )
    if data.dtype != shard.dtype or data.shape != shard.local_shape:
        # A flat shard, or one that has been given another tensor since it was made.
        shard.validate_metadata_integrity()


# --- Planning -------------------------------------------------------------------------------------


class _Share(NamedTuple):
    """The part of one rank in a new plan: what it writes, and which of its rows are replicas.

    `factors` has a number for each row of its table, see `replica_factors`; `stride` is 0 if no
    rank has replicas; `have_differences` tells whether any of those differ. `sampled` are rows
    whose samples the coordinator needs. `has_checksum_file` tells whether each rank writes the
    checksums of its blocks into a file. `edges` are those of the keys of several planners.
    """

    number: int
    stride: int
    have_differences: bool
    sampled: list[int]
    has_checksum_file: bool
    factors: IntArray
    pieces: Pieces
    edges: Sequence[int] = ()

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        columns = {"factors": self.factors, **self.pieces._asdict()}
        return pack(self[:5], columns)

    @classmethod
    def from_bytes(cls, data: bytes) -> _Share:
        """Decode what `to_bytes` made."""
        (number, stride, have_differences, sampled, has_file), columns = unpack(data)
        factors = columns.pop("factors")
        pieces = Pieces(**columns)
        return cls(number, stride, have_differences, sampled, has_file, factors, pieces)


class _WholePlan(NamedTuple):
    """What the coordinator plans for all ranks; `differing` is None when replicas are equal."""

    manifest: Manifest
    differing: ReplicasToCompare | None
    shares: list[_Share]


def _make_plan(
    ranks: Ranks,
    table: ShardTable,
    shards: Sequence[Shard],
    settings: ShardSettings,
    kept: KeptPlans,
) -> SavePlan:
    """Plan a save together.

    Collective operation: all ranks must call it. Descriptions of shards go to the coordinator,
    pieces to write come back, tables of chunks go to it. Where replicas differ, it looks at samples
    of them.
    """
    options = settings.options
    whole: _WholePlan | None
    if ranks.size == 1:
        whole = _plan_for_all([table], options)
        (share,) = whole.shares
    elif kept.num_planners > 1:
        whole, share = _plan_divided(ranks, table, options, kept.num_planners)
    else:
        whole, share = _plan_together(ranks, table, options)
    if share.have_differences:
        _report_differences(ranks, samples_of_rows(table, shards, share.sampled), whole, settings)
    manifest = whole.manifest if whole is not None else None
    checksum_file = None
    if share.has_checksum_file and len(share.pieces.key_ids):
        checksum_file = checksum_file_name(ranks.rank)
    # A plan with gaps, or for replicas that differ, is no plan for the next job.
    is_sound = options.validate_access_integrity and not share.have_differences
    files, objects, planned = _lay_out(
        ranks, table, share, manifest, checksum_file, kept.structure if is_sound else None
    )
    replicas, weights = compared_replicas(table, share.factors, share.stride)
    return SavePlan(share.number, files, objects, planned, replicas, weights, checksum_file)


def _report_differences(
    ranks: Ranks, samples: Sequence[bytes], whole: _WholePlan | None, settings: ShardSettings
) -> None:
    """Let the coordinator look at samples of replicas that differ."""
    comparing = _replica_differences()
    gathered = ranks.gather(comparing.samples_to_bytes(samples))
    with ranks.phase("compare replicas", decision=True):
        if whole is not None:
            of_ranks = [comparing.samples_from_bytes(data) for data in gathered]
            known_keys = settings.plans.saved_keys()
            comparing.report_differences(whole.differing, of_ranks, known_keys)


def _plan_together(
    ranks: Ranks, table: ShardTable, options: SaveOptions
) -> tuple[_WholePlan | None, _Share]:
    """Let the coordinator plan for all ranks; only there the whole plan is returned."""
    is_alone = ranks.size == 1
    messages = [] if is_alone else ranks.gather_once(table.to_messages())
    plans: list[_WholePlan] = []

    def plan() -> list[bytes]:
        tables = [table] if is_alone else ShardTable.all_from_messages(*messages)
        # As large as what is made of them.
        messages.clear()
        plans.append(_plan_for_all(tables, options))
        return [share.to_bytes() for share in plans[0].shares]

    share = _Share.from_bytes(ranks.decide_each("plan", plan))
    return next(iter(plans), None), share


def _plan_divided(
    ranks: Ranks, table: ShardTable, options: SaveOptions, num_planners: int
) -> tuple[_WholePlan | None, _Share]:
    """Let several planners plan for all ranks, see `_plan_together`."""
    plan: DividedPlan = _divided_plan().plan_divided(
        ranks,
        table,
        num_planners,
        # Without validation, elements that no rank holds are accepted.
        allow_gaps=not options.validate_access_integrity,
        differences_are_errors=bool(options.validate_replicas),
    )
    share = _Share(
        plan.number,
        plan.stride,
        plan.sampled is not None,
        plan.sampled or [],
        plan.has_checksum_files,
        plan.factors,
        plan.pieces,
        plan.edges,
    )
    whole = None
    if plan.manifest is not None:
        whole = _WholePlan(plan.manifest, plan.differing, [])
    return whole, share


def _divided_plan() -> Any:
    # Imported when it is needed: few jobs have as many shards.
    return importlib.import_module("distckpt._io.divided_plan")


def _plan_for_all(tables: list[ShardTable], options: SaveOptions) -> _WholePlan:
    """Plan from the descriptions of all ranks, a list that is emptied."""
    groups = [table.exchange_group for table in tables]
    ends = np.cumsum([len(table.key_ids) for table in tables])[:-1]
    merged = merge_tables(tables)
    tables.clear()
    # Without validation, elements that no rank holds are accepted.
    validate_shards(merged, allow_gaps=not options.validate_access_integrity)
    starts = [0, *ends.tolist()]
    differing = _different_replicas(merged, starts, options)
    sampled_of_ranks = [[]] * len(starts) if differing is None else differing.rows_of_ranks
    aliases = find_aliases(merged)
    owned = plan_owners(merged, len(groups), aliases, groups)
    factors = replica_factors(merged)
    number, stride = 1 + secrets.randbits(61), stride_of(num_replicated(factors))
    manifest = manifest_of_keys(merged, aliases)
    has_files = needs_checksum_files(num_blocks_of(manifest) + sum(len(p[0]) for p in owned))
    shares = [
        _Share(number, stride, differing is not None, sampled, has_files, of_rank, pieces)
        for sampled, of_rank, pieces in zip(
            sampled_of_ranks, np.split(factors, ends), owned, strict=True
        )
    ]
    return _WholePlan(manifest, differing, shares)


def _different_replicas(
    merged: GlobalTable, starts: list[int], options: SaveOptions
) -> ReplicasToCompare | None:
    """Find replicas that differ, and see to it that one rank writes each of them whole; None when
    all are equal.

    Raises:
        InvalidShardingError: some differ, and `validate_replicas` is True.
    """
    differences = find_differences(merged)
    if not len(differences.rows):
        return None
    differing: ReplicasToCompare = _replica_differences().keep_different_whole(
        merged, differences, starts, bool(options.validate_replicas)
    )
    return differing


def _stored_plan() -> Any:
    # Imported when it is needed: one process alone plans without it.
    return importlib.import_module("distckpt._plan.stored_plan")


def _file_table() -> Any:
    # Imported when it is needed: few checkpoints are so large.
    return importlib.import_module("distckpt._format.file_table")


def _replica_differences() -> Any:
    # Imported when it is needed: replicas rarely differ.
    return importlib.import_module("distckpt._io.replica_differences")


def _lay_out(
    ranks: Ranks,
    table: ShardTable,
    share: _Share,
    manifest: Manifest | None,
    checksum_file: str | None,
    structure: bytes | None,
) -> tuple[list[PlannedFile], list[PlannedChunk], PlannedManifest | None]:
    """Lay out the files of this rank; return them, its objects, and on the coordinator the manifest
    of all ranks, with a note of the plan if `structure` is given. Planners make parts of it where
    there are several, and checksums have files.
    """
    error = None
    files: list[PlannedFile] = []
    objects: list[PlannedChunk] = []
    own = ChunkTable.empty()
    try:
        files, objects = lay_out_files(ranks.rank, table, share.pieces)
        own = chunk_table([*files, open_object_file(ranks.rank, objects)] if objects else files)
        if checksum_file is not None:
            own = own._replace(files=[*own.files, ShardFile(checksum_file, 0, 0, 0)])
    except Exception as caught:
        error = caught
    # Whether or not it has failed: the coordinator waits for it.
    parts: Mapping[str, bytes] = {}
    if share.edges and share.has_checksum_file:
        own, parts = _divided_plan().gather_parts(ranks, own, share.edges, manifest)
    tables, factors = _gather_tables(ranks, own, _stored_plan().factors_to_bytes(share.factors))
    planned = None
    with ranks.phase("lay out files", decision=True):
        if error is not None:
            raise error
        if manifest is not None:
            if factors and structure is not None:
                manifest.plan = _stored_plan().note_of_plan(structure, share.stride, factors)
            planned = planned_manifest(manifest, tables, parts)
    return files, objects, planned


# --- Files ----------------------------------------------------------------------------------------


def tensor_files_of(
    files: Sequence[PlannedFile], shards: Sequence[Shard]
) -> Callable[[], list[NewFile]]:
    """Look up the tensors that files consist of. The files themselves are made when the result is
    called.
    """
    contents = [[_tensors_of(chunk, shards) for chunk in file.chunks] for file in files]
    pairs = list(zip(files, contents, strict=True))
    return lambda: [file_of_tensors(file.name, file.header, tensors) for file, tensors in pairs]


def encoded_objects(objects: Sequence[PlannedChunk], shards: Sequence[Shard]) -> dict[str, bytes]:
    """Return the encodings of the objects that a rank writes, by unique key."""
    held = [shards[chunk.pieces[0][0]] for chunk in objects]
    return {shard.unique_key: shard.data for shard in held if isinstance(shard, ShardedObject)}


def object_file_of(
    rank: int, objects: Sequence[PlannedChunk], encoded: Mapping[str, bytes]
) -> tuple[PlannedFile, NewFile]:
    """Lay out the file of the encoded objects of one rank, and make it."""
    planned = lay_out_object_file(rank, objects, {key: len(data) for key, data in encoded.items()})
    contents = [[torch.frombuffer(bytearray(data), dtype=torch.uint8)] for data in encoded.values()]
    return planned, file_of_tensors(planned.name, planned.header, contents)


def write_manifest(
    checkpoint_dir: str,
    planned: PlannedManifest,
    reports: Sequence[bytes],
    suffix: str,
    durable: bool,
    columns: Mapping[str, npt.NDArray[Any]] | None = None,
) -> tuple[Mapping[str, Any], list[tuple[str, int]]]:
    """Write the manifest of what the ranks report; its files get the names that they have in the
    folders with the suffix, and it further columns.

    Returns the marker fields that name it, and the names and sizes of all files, its own included.
    On an object store, a manifest that is there is never replaced, since a marker may name it; the
    new one gets another name.
    """
    chunks, parts = with_parts(planned, planned.completed(reports))
    for part, content in parts.items():
        place = locations.join(checkpoint_dir, in_folder(part, suffix))
        locations.write_bytes(place, content, durable)
    if suffix:
        named = [file._replace(name=in_folder(file.name, suffix)) for file in chunks.files]
        chunks = chunks._replace(files=named)
    sizes = [(file.name, file.num_bytes) for file in chunks.files]
    if parts:
        chunks = chunks._replace(files=_file_table().FileTable.of(chunks.files))
    data = planned.manifest.to_bytes(chunks, columns)
    name = MANIFEST_NAME
    if not locations.create_bytes(locations.join(checkpoint_dir, name), data, durable):
        name = f"manifest{suffix or '-' + secrets.token_hex(8)}.safetensors"
        locations.write_bytes(locations.join(checkpoint_dir, name), data, durable)
    return marker_fields(data, name, version_of(chunks.files)), [*sizes, (name, len(data))]


def _tensors_of(chunk: PlannedChunk, shards: Sequence[Shard]) -> list[torch.Tensor]:
    tensors = []
    for shard_id, region in chunk.pieces:
        shard = shards[shard_id]
        assert isinstance(shard, ShardedTensor)
        tensors.append(region_view(shard, region))
    return tensors

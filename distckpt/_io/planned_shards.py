"""Planning a save together with the other ranks: use a plan that all have kept, or give every byte
of the shards of all ranks an owner and a place in a file.
"""

from __future__ import annotations

import copy
import enum
import importlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distckpt._base.errors import CheckpointingException
from distckpt._base.options import SaveOptions
from distckpt._base.threads import (
    DEFAULT_INFLIGHT_BYTES,
    UNIT_BYTES,
    ProgressCounter,
    num_requests_within,
    num_threads_within,
)
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.columns import pack, unpack
from distckpt._format.manifest import Manifest, needs_checksum_files, num_blocks_of
from distckpt._format.planned_manifest import PlannedManifest, planned_manifest
from distckpt._format.safetensors_file import ShardFile
from distckpt._geometry.region import IntArray
from distckpt._io.replicas import add_digests, samples_of_rows, weighted_digest
from distckpt._io.write import WriteSettings
from distckpt._mapping.base import OpenReplicaId
from distckpt._mapping.sharded_tensor import ShardedTensor
from distckpt._mapping.wrappers import ShardedObject, is_main_replica
from distckpt._plan.layout import (
    PlanCache,
    PlannedChunk,
    PlannedFile,
    SavePlan,
    Structure,
    checksum_file_name,
    chunk_table,
    compared_replicas,
    lay_out_files,
    manifest_of_keys,
    open_object_file,
    structure_of,
)
from distckpt._plan.save import Pieces, find_aliases, num_planners_for, plan_owners
from distckpt._ranks import exchanges
from distckpt._ranks.collectives import Ranks
from distckpt._state.common_state import encoded as encode_object
from distckpt._state.shards import (
    GlobalTable,
    Shard,
    ShardTable,
    merge_tables,
    shard_table,
)
from distckpt._state.validation import (
    find_differences,
    num_replicated,
    replica_factors,
    stride_of,
    validate_shards,
)

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
    """

    options: SaveOptions
    exchange_group: Any = None
    direct_io: bool | None = None
    plans: PlanCache = _PLANS

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
        plan: that was kept; None if there is none.
        digest: of samples of replicas, see `weighted_digest`.
        num_bytes: how much this rank writes by that plan.
    """

    shards: list[Shard]
    settings: ShardSettings
    structure: Structure
    table: ShardTable | None
    plan: SavePlan | None = None
    digest: int = 0
    num_bytes: int = 0

    def vote(self) -> bytes:
        """Return what the coordinator compares, see `KeptPlans`."""
        number = 0 if self.plan is None else self.plan.number
        numbers = [number, self.digest, self.num_bytes, len(self.shards)]
        return np.array(numbers, np.int64).tobytes()


NO_VOTE = np.array([0, 0, 0, -1], np.int64).tobytes()
"""Of a rank that has not looked for a plan."""


class KeptPlans(NamedTuple):
    """What the coordinator finds out about plans that ranks have kept.

    Attributes:
        are_used: all know the same plan, and replicas are still equal.
        some_know: at least one knows a plan.
        num_bytes: how much all ranks write by that plan; known to the coordinator.
        num_planners: how many ranks make a plan where none is used.
    """

    are_used: bool
    some_know: bool
    num_bytes: int = 0
    num_planners: int = 1

    @classmethod
    def compared(cls, votes: Sequence[bytes]) -> KeptPlans:
        """Compare the votes of all ranks, see `ReadyShards.vote`."""
        columns = np.frombuffer(b"".join(votes), np.int64).reshape(len(votes), -1).T
        numbers, digests, sizes, num_shards = columns
        # The digests of all ranks add up to 0 modulo 2**64.
        is_same = bool((numbers == numbers[0]).all()) and not digests.sum()
        are_used = is_same and bool(numbers[0])
        num_planners = num_planners_for(int(num_shards.sum()), len(votes))
        return cls(are_used, bool(numbers.any()), int(sizes.sum()), num_planners)

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return bytes([self.are_used, self.some_know, self.num_planners])

    @classmethod
    def from_bytes(cls, data: bytes) -> KeptPlans:
        """Decode what `to_bytes` made."""
        are_used, some_know, num_planners = data
        return cls(bool(are_used), bool(some_know), num_planners=num_planners)


def compare_plans(
    ranks: Ranks, shards: Sequence[Shard], settings: ShardSettings
) -> tuple[ReadyShards, KeptPlans]:
    with ranks.telling("describe the shards") as told:
        ready = ready_to_plan(ranks, shards, settings)
        told.payload = ready.vote()
    with ranks.answering(told, "describe the shards"):
        if ranks.is_coordinator:
            told.answer = KeptPlans.compared(told.payloads).to_bytes()
    return ready, KeptPlans.from_bytes(told.answer)


def ready_to_plan(ranks: Ranks, shards: Sequence[Shard], settings: ShardSettings) -> ReadyShards:
    """Encode objects, and look for a plan that was kept; otherwise describe the shards."""
    options = settings.options
    comparison = _comparison_of(ranks, options)
    ready = _all_ready(shards, comparison, options.unsupported == "warn")
    group = exchanges.group_number(settings.exchange_group)
    structure = structure_of(ready, ranks, options.validate_access_integrity, group)
    # Comparing the whole content of replicas takes an exchange each time.
    known = None if comparison is _Comparison.ALL else settings.plans.find(structure)
    if known is None:
        table = _described(ready, settings)
        _add_digests(table, ready, comparison)
        return ReadyShards(ready, settings, structure, table)
    digest = _digest_of(known, ready, comparison)
    num_bytes = _num_bytes_of(known, ready)
    return ReadyShards(ready, settings, structure, None, known, digest, num_bytes)


def _digest_of(plan: SavePlan, shards: Sequence[Shard], comparison: _Comparison) -> int:
    compares = comparison is _Comparison.SAMPLES and plan.replicas is not None
    return weighted_digest(plan, shards) if compares else 0


def _num_bytes_of(plan: SavePlan, shards: Sequence[Shard]) -> int:
    return plan.tensor_bytes + sum(map(len, encoded_objects(plan.objects, shards).values()))


def plan_of(ranks: Ranks, ready: ReadyShards, kept: KeptPlans) -> SavePlan:
    shards, settings, table = ready.shards, ready.settings, ready.table
    if kept.are_used and ready.plan is not None:
        return ready.plan
    if kept.some_know:
        # Some ranks, though not all, know a plan, or replicas have become different.
        with ranks.phase("describe the shards again"):
            if table is None:
                table = _described(shards, settings)
                _add_digests(table, shards, _comparison_of(ranks, settings.options))
    assert table is not None
    plan, have_differences = _make_plan(ranks, table, shards, settings, kept)
    if not have_differences:
        # Replicas that have drifted apart may have nothing in common at the next save.
        settings.plans.keep(ready.structure, plan)
    return plan


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


def encoded_objects(objects: Sequence[PlannedChunk], shards: Sequence[Shard]) -> dict[str, bytes]:
    """Return the encodings of the objects that a rank writes, by unique key."""
    held = [shards[chunk.pieces[0][0]] for chunk in objects]
    return {shard.unique_key: shard.data for shard in held if isinstance(shard, ShardedObject)}


# --- A new plan -----------------------------------------------------------------------------------


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
) -> tuple[SavePlan, bool]:
    """Plan a save together; return the plan, and whether replicas differ.

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
    files, objects, planned = _lay_out(ranks, table, share, manifest, checksum_file)
    replicas, weights = compared_replicas(table, share.factors, share.stride)
    plan = SavePlan(share.number, files, objects, planned, replicas, weights, checksum_file)
    return plan, share.have_differences


def _report_differences(
    ranks: Ranks, samples: Sequence[bytes], whole: _WholePlan | None, settings: ShardSettings
) -> None:
    """Let the coordinator look at samples of replicas that differ."""
    comparing = _replica_differences()
    gathered = ranks.gather(comparing.samples_to_bytes(samples))
    with ranks.phase("compare replicas", decision=True):
        if whole is not None:
            of_ranks = [comparing.samples_from_bytes(data) for data in gathered]
            warns = settings.options.unsupported == "warn"
            comparing.report_differences(whole.differing, of_ranks, warns)


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


def _replica_differences() -> Any:
    # Imported when it is needed: replicas rarely differ.
    return importlib.import_module("distckpt._io.replica_differences")


def _lay_out(
    ranks: Ranks,
    table: ShardTable,
    share: _Share,
    manifest: Manifest | None,
    checksum_file: str | None,
) -> tuple[list[PlannedFile], list[PlannedChunk], PlannedManifest | None]:
    """Lay out the files of this rank; return them, its objects, and on the coordinator the manifest
    of all ranks. Planners make parts of it where there are several, and checksums have files.
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
    tables = _gather_tables(ranks, own)
    planned = None
    with ranks.phase("lay out files", decision=True):
        if error is not None:
            raise error
        if manifest is not None:
            planned = planned_manifest(manifest, tables, parts)
    return files, objects, planned


def _gather_tables(ranks: Ranks, table: ChunkTable) -> list[ChunkTable]:
    """Return the tables of all ranks on the coordinator; an empty list elsewhere."""
    if ranks.size == 1:
        return [table]
    if len(table.key_ids):
        message = _TABLE + table.to_bytes()
    else:
        message = _FILES + json.dumps(table.files).encode()
    return [_read_table(data) for data in ranks.gather(message)]


_TABLE, _FILES = b"+", b"-"
"""How messages begin: that of a rank without chunks has only its files."""


def _read_table(message: bytes) -> ChunkTable:
    if message[:1] == _TABLE:
        return ChunkTable.from_bytes(message[1:])
    files = [ShardFile(*file) for file in json.loads(message[1:])]
    return _NO_CHUNKS._replace(files=files)


_NO_CHUNKS = ChunkTable.empty()

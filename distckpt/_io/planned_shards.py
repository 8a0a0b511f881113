"""Planning of a save together with the other ranks.

Ranks reuse their cached plan, or give every byte of their shards an owner and a place in a file.
The vote on the cached plan opens each save. A repeated save exchanges nothing else before it
writes, so the vote carries everything that the ranks must agree on.
"""

from __future__ import annotations

import copy
import enum
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distckpt._base.errors import CheckpointingException
from distckpt._base.options import SaveOptions
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import Manifest, needs_checksum_files, num_blocks_of
from distckpt._format.planned_manifest import PlannedManifest, planned_manifest
from distckpt._format.safetensors_file import ShardFile
from distckpt._io.replicas import add_digests, samples_of_rows, weighted_digest
from distckpt._io.shared_plan import Share, SharedPlan, num_planners_for
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
from distckpt._plan.save import find_aliases, plan_owners
from distckpt._ranks import groups
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.exchanges import pack_parts, unpack_parts
from distckpt._state.common_state import encoded as encode_object
from distckpt._state.shards import GlobalTable, Shard, ShardTable, merge_tables, shard_table
from distckpt._state.validation import (
    find_differences,
    num_replicated,
    replica_factors,
    stride_of,
    validate_shards,
)
from distckpt.mapping._base import OpenReplicaId
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedObject, is_main_replica

if TYPE_CHECKING:
    from distckpt._io.replica_differences import ReplicasToCompare

_PLANS = PlanCache()


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the built-in engine for a strategy.

    Attributes:
        exchange_group: process group within which replicas share work; None for all ranks.
        direct_io: see `SafetensorsSaveStrategy`.
        plans: cache for the plans of its saves; None for the cache of the process.
    """

    exchange_group: Any = None
    direct_io: bool | None = None
    plans: PlanCache | None = None


def plan_cache(engine: EngineSettings) -> PlanCache:
    """Return the plans of earlier saves.

    While only the data of shards changes on all ranks, later saves are not planned again.
    """
    if engine.plans is None:
        return _PLANS
    return engine.plans


class ReadyShards(NamedTuple):
    """Shards of one rank that can be saved, and their cached plan.

    Attributes:
        shards: the shards; objects are encoded.
        options: the options of the caller.
        engine: the settings of the engine.
        structure: the key of the plan in the cache.
        table: describes the shards; None if the cache has the structure.
        plan: the cached plan, if there is one.
        digest: a digest of samples of replicas, see `weighted_digest`.
        encoded: the encoded objects that this rank writes according to the plan.
        num_bytes: the bytes that this rank writes according to the plan.
    """

    shards: list[Shard]
    options: SaveOptions
    engine: EngineSettings
    structure: Structure
    table: ShardTable | None
    plan: SavePlan | None = None
    digest: int = 0
    encoded: Mapping[str, bytes] = {}
    num_bytes: int = 0

    def vote(self, state_digest: int = 0) -> bytes:
        """Return the vote of this rank, encoded.

        `state_digest` is a digest of everything that must be the same on all ranks.
        """
        plan_number = 0
        if self.plan is not None:
            plan_number = self.plan.number
        is_described = self.table is not None
        numbers = (plan_number, is_described, self.digest, self.num_bytes, len(self.shards))
        return encoded_vote(state_digest, numbers)


def encoded_vote(state_digest: int, numbers: Sequence[int] = (0, 0, 0, 0, 0)) -> bytes:
    """Return a vote for `PlanVerdict.of`; without numbers, no shards are ready."""
    return np.array([state_digest, *numbers], np.int64).tobytes()


class PlanVerdict(NamedTuple):
    """The result of the votes of all ranks.

    Attributes:
        is_same_state: whether all state digests are equal.
        reuses_plan: whether the state is the same, all ranks have the same cached plan, and
            replicas are still equal.
        are_described: whether all ranks have described their shards.
        num_shards: the number of shards on all ranks.
        num_bytes: the bytes that all ranks write according to the plan.
    """

    is_same_state: bool
    reuses_plan: bool
    are_described: bool
    num_shards: int
    num_bytes: int

    @classmethod
    def of(cls, votes: Sequence[bytes]) -> PlanVerdict:
        """Compare the votes of all ranks."""
        rows = np.frombuffer(b"".join(votes), np.int64).reshape(len(votes), -1)
        states, numbers, are_described, digests, sizes, counts = rows.T
        is_same_state = bool((states == states[0]).all())
        is_same_plan = bool(numbers[0]) and bool((numbers == numbers[0]).all())
        # The digests of equal replicas add up to 0 modulo 2**64.
        are_equal = not digests.sum()
        return cls(
            is_same_state=is_same_state,
            reuses_plan=is_same_state and is_same_plan and are_equal,
            are_described=bool(are_described.all()),
            num_shards=int(counts.sum()),
            num_bytes=int(sizes.sum()),
        )

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return json.dumps(self).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> PlanVerdict:
        """Decode the result of `to_bytes`."""
        return cls(*json.loads(data))


def compare_plans(
    ranks: Ranks, shards: Sequence[Shard], options: SaveOptions, engine: EngineSettings
) -> tuple[ReadyShards, PlanVerdict]:
    """Look for a cached plan that all ranks have.

    Collective operation: all ranks must call it.
    """
    with ranks.telling("describe the shards") as exchange:
        ready = ready_to_plan(ranks, shards, options, engine)
        exchange.payload = ready.vote()
    with ranks.answering(exchange, "describe the shards"):
        if ranks.is_coordinator:
            exchange.answer = PlanVerdict.of(exchange.payloads).to_bytes()
    return ready, PlanVerdict.from_bytes(exchange.answer)


def ready_to_plan(
    ranks: Ranks, shards: Sequence[Shard], options: SaveOptions, engine: EngineSettings
) -> ReadyShards:
    """Encode objects; look for a cached plan, or describe the shards."""
    comparison = _comparison_of(ranks, options)
    encode_copies = comparison is _Comparison.ALL
    leaves_out = options.unsupported == "warn"
    ready = [ready_to_save(shard, encode_copies, leaves_out) for shard in shards]
    group = groups.group_number(engine.exchange_group)
    settings = (options.validate_access_integrity, options.separate_optimizer, group)
    structure = structure_of(ready, ranks, *settings)
    # Comparing the whole content of replicas takes an exchange each time.
    is_known = False
    plan = None
    if comparison is not _Comparison.ALL:
        is_known, plan = plan_cache(engine).find(structure)
    if plan is None:
        table = None
        if not is_known:
            table = _describe(ready, group, comparison)
        return ReadyShards(ready, options, engine, structure, table)
    digest = 0
    if comparison is _Comparison.SAMPLES and plan.replicas is not None:
        digest = weighted_digest(plan, ready)
    encoded = encoded_objects(plan.objects, ready)
    num_bytes = plan.num_bytes(encoded)
    return ReadyShards(ready, options, engine, structure, None, plan, digest, encoded, num_bytes)


def plan_of(ranks: Ranks, ready: ReadyShards, verdict: PlanVerdict) -> SavePlan:
    """Return the cached plan of all ranks, or make one together.

    Collective operation: all ranks must call it.
    """
    table = ready.table
    if verdict.reuses_plan and ready.plan is not None:
        return ready.plan
    if not verdict.are_described:
        # Some ranks, though not all, know a plan, or replicas have become different.
        with ranks.phase("describe the shards again"):
            if table is None:
                group = groups.group_number(ready.engine.exchange_group)
                table = _describe(ready.shards, group, _comparison_of(ranks, ready.options))
    assert table is not None
    plan, have_differences = _make_plan(
        ranks, table, ready.shards, ready.options, verdict.num_shards
    )
    if not have_differences:
        # Replicas that have drifted apart may have nothing in common at the next save.
        plan_cache(ready.engine).keep(ready.structure, plan)
    return plan


class _Comparison(enum.Enum):
    """The part of replicas that is compared."""

    NOTHING = enum.auto()
    SAMPLES = enum.auto()
    ALL = enum.auto()


def _comparison_of(ranks: Ranks, options: SaveOptions) -> _Comparison:
    if options.validate_replicas:
        return _Comparison.ALL
    if options.validate_replicas is None and ranks.size > 1:
        return _Comparison.SAMPLES
    return _Comparison.NOTHING


def _describe(shards: Sequence[Shard], exchange_group: int, comparison: _Comparison) -> ShardTable:
    """Return the table of shards; with hashes if replicas are compared."""
    table = shard_table(shards)._replace(exchange_group=exchange_group)
    if comparison is not _Comparison.NOTHING:
        add_digests(table, shards, of_samples=comparison is _Comparison.SAMPLES)
    return table


def ready_to_save(shard: Shard, encode_copies: bool, leaves_out: bool = False) -> Shard:
    """Check a tensor, or encode a main object (and copies).

    A value that cannot be stored is an error, or is left out.
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
    """Return the encoded objects that a rank writes, by unique key."""
    encoded = {}
    for chunk in objects:
        shard = shards[chunk.pieces[0][0]]
        if isinstance(shard, ShardedObject):
            encoded[shard.unique_key] = shard.data
    return encoded


# --- A new plan -----------------------------------------------------------------------------------


def _make_plan(
    ranks: Ranks,
    table: ShardTable,
    shards: Sequence[Shard],
    options: SaveOptions,
    num_shards: int,
) -> tuple[SavePlan, bool]:
    """Plan a save together; return the plan, and whether replicas differ.

    Collective operation: all ranks must call it. They send descriptions of shards to the
    coordinator, receive the pieces to write, and send tables of chunks. Where replicas differ, the
    coordinator compares samples of them.
    """
    shared = _plan_together(ranks, table, options, num_shards)
    share = shared.share
    if share.sampled is not None:
        _report_differences(ranks, samples_of_rows(table, shards, share.sampled), shared, options)
    checksum_file = None
    if share.has_checksum_file and len(share.pieces.key_ids):
        checksum_file = checksum_file_name(ranks.rank)
    files, objects, planned = _lay_out(ranks, table, shared, checksum_file, options)
    replicas, weights = compared_replicas(table, share.factors, share.stride)
    plan = SavePlan(share.number, files, objects, planned, replicas, weights, checksum_file)
    return plan, share.sampled is not None


def _report_differences(
    ranks: Ranks, samples: Sequence[bytes], shared: SharedPlan, options: SaveOptions
) -> None:
    """Let the coordinator compare samples of replicas that differ."""
    # Imported when it is needed: replicas rarely differ.
    from distckpt._io import replica_differences as comparing

    messages = ranks.gather(pack_parts(samples))
    with ranks.phase("compare replicas", decision=True):
        if shared.differing is not None:
            samples_of_ranks = [unpack_parts(data) for data in messages]
            warns = options.unsupported == "warn"
            comparing.report_differences(shared.differing, samples_of_ranks, warns)


def _plan_together(
    ranks: Ranks, table: ShardTable, options: SaveOptions, num_shards: int
) -> SharedPlan:
    """Plan for all ranks on the coordinator, or on several ranks."""
    manifest: Manifest | None = None
    differing: ReplicasToCompare | None = None
    if ranks.size == 1:
        (share,), manifest, differing = plan_for_all([table], options)
        return SharedPlan(share, manifest, differing)
    num_planners = num_planners_for(num_shards, ranks.size)
    if num_planners > 1:
        # Imported when it is needed: few jobs have as many shards.
        from distckpt._io.divided.plan import plan_divided

        return plan_divided(ranks, table, options, num_planners)
    messages = ranks.gather_once(table.to_messages())

    def plan() -> list[bytes]:
        nonlocal manifest, differing
        tables = ShardTable.all_from_messages(*messages)
        # The messages are as large as the tables.
        messages.clear()
        shares, manifest, differing = plan_for_all(tables, options)
        return [share.to_bytes() for share in shares]

    share = Share.from_bytes(ranks.decide_each("plan", plan))
    return SharedPlan(share, manifest, differing)


def plan_for_all(
    tables: list[ShardTable], options: SaveOptions
) -> tuple[list[Share], Manifest, ReplicasToCompare | None]:
    """Plan from the descriptions of all ranks; the list is emptied.

    Return the share of each rank, the keys, and replicas that differ.
    """
    groups = [table.exchange_group for table in tables]
    ends = np.cumsum([len(table.key_ids) for table in tables])[:-1]
    merged = merge_tables(tables)
    tables.clear()
    # Without validation, elements that no rank holds are accepted.
    validate_shards(merged, allow_gaps=not options.validate_access_integrity)
    starts = [0, *ends.tolist()]
    differing = _different_replicas(merged, starts, options)
    samples: Sequence[list[int] | None] = [None] * len(starts)
    if differing is not None:
        samples = differing.rows_of_ranks
    aliases = find_aliases(merged)
    pieces_of_ranks = plan_owners(merged, len(groups), aliases, groups)
    factors = replica_factors(merged)
    number = 1 + secrets.randbits(61)
    stride = stride_of(num_replicated(factors))
    manifest = manifest_of_keys(merged, aliases)
    num_pieces = sum(len(pieces.key_ids) for pieces in pieces_of_ranks)
    has_files = needs_checksum_files(num_blocks_of(manifest) + num_pieces)
    shares = [
        Share(number, stride, sampled, has_files, own_factors, pieces)
        for sampled, own_factors, pieces in zip(
            samples, np.split(factors, ends), pieces_of_ranks, strict=True
        )
    ]
    return shares, manifest, differing


def _different_replicas(
    merged: GlobalTable, starts: list[int], options: SaveOptions
) -> ReplicasToCompare | None:
    """Find replicas that differ, if there are any.

    One rank then writes each of them whole.

    Raises:
        InvalidShardingError: some differ, and `validate_replicas` is True.
    """
    differences = find_differences(merged)
    if not len(differences.rows):
        return None
    # Imported when it is needed: replicas rarely differ.
    from distckpt._io.replica_differences import keep_different_whole

    return keep_different_whole(merged, differences, starts, bool(options.validate_replicas))


def _lay_out(
    ranks: Ranks,
    table: ShardTable,
    shared: SharedPlan,
    checksum_file: str | None,
    options: SaveOptions,
) -> tuple[list[PlannedFile], list[PlannedChunk], PlannedManifest | None]:
    """Lay out the files of this rank.

    Return the files, the objects of this rank, and on the coordinator the manifest of all ranks.
    """
    error = None
    files: list[PlannedFile] = []
    objects: list[PlannedChunk] = []
    own = ChunkTable.empty()
    try:
        pieces = shared.share.pieces
        files, objects = lay_out_files(ranks.rank, table, pieces, options.separate_optimizer)
        all_files = files
        if objects:
            all_files = [*files, open_object_file(ranks.rank, objects)]
        own = chunk_table(all_files)
        if checksum_file is not None:
            own = own._replace(files=[*own.files, ShardFile(checksum_file, 0, 0, 0)])
    except Exception as caught:
        error = caught
    # Even after an error, since the coordinator waits for this rank.
    parts: Mapping[str, bytes] = {}
    if shared.divide_chunks is not None:
        own, parts = shared.divide_chunks(ranks, own)
    tables = _gather_tables(ranks, own)
    planned = None
    with ranks.phase("lay out files", decision=True):
        if error is not None:
            raise error
        if shared.manifest is not None:
            planned = planned_manifest(shared.manifest, tables, parts)
    return files, objects, planned


def _gather_tables(ranks: Ranks, table: ChunkTable) -> list[ChunkTable]:
    """Return the tables of all ranks on the coordinator; elsewhere nothing."""
    if ranks.size == 1:
        return [table]
    if len(table.key_ids):
        message = _TABLE + table.to_bytes()
    else:
        message = _FILES + json.dumps(table.files).encode()
    return [_read_table(data) for data in ranks.gather(message)]


_TABLE = b"+"
"""First byte of a message with a table of chunks."""
_FILES = b"-"
"""First byte of a message without chunks: it lists only files."""


def _read_table(message: bytes) -> ChunkTable:
    if message[:1] == _TABLE:
        return ChunkTable.from_bytes(message[1:])
    files = [ShardFile(*file) for file in json.loads(message[1:])]
    return _NO_CHUNKS._replace(files=files)


_NO_CHUNKS = ChunkTable.empty()

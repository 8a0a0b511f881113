"""What the coordinator, a planner and another rank do when a save is planned, measured."""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from measure import peak_memory_bytes

from distckpt import InvalidShardingError
from distckpt._base.dtypes import ITEM_BYTES
from distckpt._format.checksum import BLOCK_BYTES
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.columns import pack
from distckpt._format.planned_manifest import planned_manifest
from distckpt._format.safetensors_file import ShardFile
from distckpt._geometry.region import IntArray
from distckpt._plan.layout import (
    checksum_file_name,
    chunk_table,
    lay_out_files,
    manifest_of_keys,
)
from distckpt._plan.save import Pieces, find_aliases, plan_owners
from distckpt._state.shards import ShardTable, merge_tables
from distckpt._state.validation import (
    find_differences,
    replica_factors,
    validate_shards,
)

_T = TypeVar("_T")

COORDINATOR, PLANNER, OTHER = "coordinator", "a planner", "another rank"
HEADER_BYTES = 1 << 16
"""Of the made-up files."""


class Plan:
    """What is planned, and what it has cost."""

    def __init__(self, tables: Sequence[ShardTable], num_planners: int) -> None:
        self.tables = tables
        self.num_planners = num_planners
        self.other = len(tables) // 2 + (num_planners > 1)
        self.seconds: dict[str, float] = defaultdict(float)
        self.peaks: dict[str, float] = defaultdict(float)
        self.received: dict[str, float] = defaultdict(float)
        self.sent: dict[str, float] = defaultdict(float)
        self.others: dict[str, Any] = {}
        self.pieces: list[Pieces] = []
        self.keys: list[str] = []
        self.num_blocks: list[int] = []
        self.manifest: Any = None

    def step(self, role: str, function: Callable[[], _T], held: Sequence[bytes] = ()) -> _T:
        """Call what a role does, with messages that it holds."""
        results: list[_T] = []

        def call() -> None:
            started = time.process_time()
            results.append(function())
            self.seconds[role] += time.process_time() - started

        peak = peak_memory_bytes(call) + sum({id(each): len(each) for each in held}.values())
        self.peaks[role] = max(self.peaks[role], peak / 1e6)
        return results[0]

    def figures(self) -> dict[str, Any]:
        """Return the figures of the first save."""
        figures: dict[str, Any] = {
            "shards of all ranks": sum(len(table.key_ids) for table in self.tables),
            "keys": len(self.keys),
            "planners": self.num_planners,
        }
        for role in (COORDINATOR, PLANNER, OTHER):
            if role not in self.seconds:
                continue
            figures[f"{role}: plan, s"] = self.seconds[role]
            figures[f"{role}: memory, MB"] = self.peaks[role]
            figures[f"{role}: receives, MB"] = self.received[role] / 1e6
            figures[f"{role}: sends, MB"] = self.sent[role] / 1e6
        return figures | self.others | self._check()

    def _check(self) -> dict[str, Any]:
        """Check that every byte has one owner; return what the plan is like."""
        item_bytes = {
            key: ITEM_BYTES.get(dtype, 1)
            for table in {id(table.keys): table for table in self.tables}.values()
            for key, dtype in zip(table.keys, table.dtypes, strict=True)
        }
        sizes = np.array([item_bytes[key] for key in self.keys], np.int64)
        loads = [
            int((np.prod(pieces.shapes.astype(np.int64), axis=1) * sizes[pieces.key_ids]).sum())
            for pieces in self.pieces
        ]
        shapes = {
            key: shape
            for table in {id(table.keys): table for table in self.tables}.values()
            for key, shape in zip(table.keys, table.global_shapes, strict=True)
        }
        stored = sum(int(np.prod(shapes[key])) * item_bytes[key] for key in self.keys)
        assert sum(loads) == stored, "not every byte has one owner"
        digest = hashlib.sha256()
        for pieces in self.pieces:
            for column in pieces:
                digest.update(np.ascontiguousarray(column, np.int64).tobytes())
        return {
            "bytes to write per rank, max / mean": max(loads) / (sum(loads) / len(loads)),
            "digest of the plan": digest.hexdigest()[:12],
        }

    def laid_out(self, rank: int) -> ChunkTable:
        """Describe the files of a rank; those of most ranks without making their headers."""
        checksum_file = ShardFile(checksum_file_name(rank), 0, 0, 0)
        pieces, table = self.pieces[rank], self.tables[rank]
        if rank in (0, self.other):
            own = chunk_table(lay_out_files(rank, table, pieces)[0])
            self.num_blocks.append(int((-(-own.num_bytes // BLOCK_BYTES)).sum()))
            return own._replace(files=[*own.files, checksum_file])
        dtypes = [ITEM_BYTES.get(dtype, 1) for dtype in table.dtypes]
        rows = np.searchsorted(table.shard_ids, pieces.shard_ids)
        shapes = pieces.shapes.astype(np.int64)
        sizes = np.prod(shapes, axis=1) * np.array(dtypes, np.int64)[table.key_ids[rows]]
        end = HEADER_BYTES + int(sizes.sum())
        self.num_blocks.append(int((-(-sizes // BLOCK_BYTES)).sum()))
        name = f"tensors/shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        return ChunkTable.empty()._replace(
            files=[ShardFile(name, end, HEADER_BYTES, 1 << 60), checksum_file],
            key_ids=pieces.key_ids,
            file_ids=np.zeros(len(sizes), np.int64),
            first_bytes=HEADER_BYTES + np.cumsum(sizes) - sizes,
            num_bytes=sizes,
            offsets=pieces.offsets.astype(np.int64),
            shapes=shapes,
        )


def plan_alone(tables: list[ShardTable]) -> Plan:
    """Plan with the coordinator alone."""
    plan = Plan(tables, 1)
    other = plan.other
    messages = [list(column) for column in zip(*(t.to_messages() for t in tables), strict=True)]
    for column in messages:
        known: dict[bytes, bytes] = {}
        column[:] = [known.setdefault(message, message) for message in column]
        plan.received[COORDINATOR] += sum(map(len, known))
    held = [message for column in messages for message in column]
    merged = plan.step(
        COORDINATOR, lambda: merge_tables(ShardTable.all_from_messages(*messages)), held
    )
    groups = [0] * len(tables)

    def owners() -> list[bytes]:
        validate_shards(merged)
        find_differences(merged)
        aliases = find_aliases(merged)
        plan.pieces = plan_owners(merged, len(tables), aliases, groups)
        ends = np.cumsum([len(table.key_ids) for table in tables])[:-1]
        factors = np.split(replica_factors(merged), ends)
        plan.others["manifest"] = manifest_of_keys(merged, aliases)
        return [
            pack([1, 1], {"factors": f, **p._asdict()})
            for f, p in zip(factors, plan.pieces, strict=True)
        ]

    shares = plan.step(COORDINATOR, owners, held)
    # The table is there all the while.
    columns = [column for column in merged if isinstance(column, np.ndarray)]
    plan.peaks[COORDINATOR] += sum(column.nbytes for column in columns) / 1e6
    plan.sent[COORDINATOR] = sum(map(len, shares))
    manifest = plan.others.pop("manifest")
    plan.keys = manifest.keys
    own, pieces = tables[other], plan.pieces[other]
    plan.step(OTHER, lambda: (own.to_messages(), lay_out_files(other, own, pieces)))
    plan.sent[OTHER] = max(map(len, messages[1]))
    plan.received[OTHER] = max(map(len, shares))
    encoded = [plan.laid_out(rank).to_bytes() for rank in range(len(tables))]
    plan.received[COORDINATOR] += sum(map(len, encoded))
    plan.manifest = plan.step(
        COORDINATOR,
        lambda: planned_manifest(manifest, [ChunkTable.from_bytes(data) for data in encoded]),
        encoded,
    )
    without_one = merge_tables(tables[:other] + tables[other + 1 :])
    started = time.process_time()
    try:
        # Where replicas have what the rank had, nothing is missing.
        validate_shards(without_one)
    except InvalidShardingError:
        plan.others["the error of a missing rank, s"] = time.process_time() - started
    return plan


def plan_divided(tables: list[ShardTable], num_planners: int | None) -> Plan:
    """Plan as many ranks do; by default, with as many planners as a save has."""
    from distckpt._io.shared_plan import num_planners_for

    num_shards = sum(len(table.key_ids) for table in tables)
    num_planners = num_planners or num_planners_for(num_shards, len(tables))
    if num_planners == 1:
        return plan_alone(tables)
    return _Divided(tables, num_planners).plan


class _Divided:
    """The steps of `distckpt._io.divided.plan`, one rank after the other."""

    def __init__(self, tables: list[ShardTable], num_planners: int) -> None:
        from distckpt._io.divided import descriptions, owners
        from distckpt._io.divided.plan import Coordinator, PartPlanning

        self._descriptions = descriptions
        self._owners = owners
        self._tables, self._num_planners = tables, num_planners
        self._planners = descriptions.planner_ranks(num_planners, len(tables))
        self._measured = self._planners[num_planners // 2]
        self.plan = Plan(tables, num_planners)
        self._other = self.plan.other
        self._coordinator = Coordinator(len(tables), num_planners)
        self._make_planning = lambda: PartPlanning(False, False)
        self._number_keys()
        self._find_owners()
        self._lay_out()

    def _step(self, role: str, function: Callable[[], _T], received: Sequence[bytes]) -> _T:
        self.plan.received[role] += sum({id(each): len(each) for each in received}.values())
        return self.plan.step(role, function, received)

    def _by_planner(
        self, payloads: Sequence[bytes], function: Callable[[int, bytes], bytes]
    ) -> list[bytes]:
        """Do what planners do; measure one of them. Return what ranks send."""
        answers = [b""] * len(self._tables)
        for rank in self._planners:
            if rank == self._measured:
                payload = payloads[rank]
                answers[rank] = self._step(
                    PLANNER, lambda rank=rank, payload=payload: function(rank, payload), [payload]
                )
                self.plan.sent[PLANNER] += len(answers[rank])
            else:
                answers[rank] = function(rank, payloads[rank])
        return answers

    def _number_keys(self) -> None:
        descriptions, tables = self._descriptions, self._tables
        by_keys: dict[int, bytes] = {}
        kinds = [by_keys.setdefault(id(t.keys), b"") or t.kinds_to_bytes() for t in tables]
        known: dict[bytes, bytes] = {}
        kinds = [known.setdefault(each, each) for each in kinds]
        ties = [descriptions.tied_keys(table) for table in tables]
        told = self._step(
            COORDINATOR, lambda: self._coordinator.number_keys(kinds, ties), [*known, *ties]
        )
        self._own_keys = [descriptions.KeysOfRank.from_bytes(data) for data in told]
        self._rows = [
            own.rows_of_planners(table) for own, table in zip(self._own_keys, tables, strict=True)
        ]
        of_ranks = [self._describe(rank) for rank in range(len(tables))]
        self.plan.step(OTHER, lambda: self._describe(self._other))
        self.plan.sent[OTHER] += sum(map(len, of_ranks[self._other]))
        described = [list(column) for column in zip(*of_ranks, strict=True)]
        for column in described:
            known = {}
            column[:] = [known.setdefault(message, message) for message in column]
        received = [message for column in described for message in column]
        self._bundles = self._step(
            COORDINATOR, lambda: self._coordinator.bundles_by_rank(described), received
        )
        self.plan.sent[COORDINATOR] += sum(map(len, told)) + sum(map(len, self._bundles))

    def _describe(self, rank: int) -> list[bytes]:
        table, own = self._tables[rank], self._own_keys[rank]
        return [self._descriptions.describe_rows(table, own, rows) for rows in self._rows[rank]]

    def _find_owners(self) -> None:
        from distckpt._ranks.exchanges import unpack_parts

        owners, coordinator = self._owners, self._coordinator
        plannings = {rank: self._make_planning() for rank in self._planners}
        found = self._by_planner(self._bundles, lambda rank, bundle: plannings[rank].begin(bundle))
        self._step(COORDINATOR, lambda: coordinator.balance(found), found)
        self._aliases = coordinator.not_stored
        cuts = self._step(COORDINATOR, coordinator.cuts_by_rank, [])
        finished = self._by_planner(
            cuts,
            lambda rank, data: plannings[rank].finish(owners.CutPoints(**owners.columns_of(data))),
        )
        plannings.clear()
        shares = self._step(COORDINATOR, lambda: coordinator.join_shares(finished), finished)
        self.plan.sent[COORDINATOR] += sum(map(len, shares)) + sum(map(len, cuts))

        def join(rank: int) -> tuple[Pieces, IntArray]:
            _, *answers = unpack_parts(shares[rank])
            pairs = zip(answers, self._rows[rank], strict=True)
            planned = [owners.PlannedRows.from_bytes(*each) for each in pairs]
            table, own = self._tables[rank], self._own_keys[rank]
            pieces = owners.join_pieces(table, planned, own.ids, self._aliases)
            return pieces, owners.join_factors(table, planned)

        for rank in range(len(self._tables)):
            pieces, _ = join(rank)
            self.plan.pieces.append(pieces)
        self.plan.keys = coordinator.manifest.keys
        table, pieces = self._tables[self._other], self.plan.pieces[self._other]
        self._step(
            OTHER,
            lambda: (join(self._other), lay_out_files(self._other, table, pieces)),
            [shares[self._other]],
        )

    def _lay_out(self) -> None:
        from distckpt._format.planned_manifest import parts_by_name
        from distckpt._ranks.exchanges import pack_parts, unpack_parts

        descriptions, edges = self._descriptions, self._own_keys[0].edges
        edges = [edge - sum(alias < edge for alias in self._aliases) for edge in edges]
        manifest = self._coordinator.manifest
        ndim = max(map(len, manifest.global_shapes), default=0)
        rests, messages = [], []
        for rank in range(len(self._tables)):
            rest, message = descriptions.split_chunks(self.plan.laid_out(rank), edges, ndim)
            rests.append(rest)
            messages.append(message)
        bundles = self._step(
            COORDINATOR,
            lambda: descriptions.chunks_by_planner(messages),
            messages,
        )
        payloads = [b""] * len(self._tables)
        for rank, bundle in zip(self._planners, bundles, strict=True):
            payloads[rank] = bundle
        made = self._by_planner(
            payloads, lambda _, bundle: pack_parts(descriptions.parts_of_chunks(bundle, ndim))
        )
        self.plan.manifest = self._step(
            COORDINATOR,
            lambda: planned_manifest(
                manifest,
                rests,
                parts_by_name(part for rank in self._planners for part in unpack_parts(made[rank])),
            ),
            made,
        )
        assert all(isinstance(each, bytes) for each in unpack_parts(made[self._planners[0]]))

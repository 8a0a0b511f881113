"""The engine of saves: write planned files, complete the manifest."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.options import FIGURES, SaveOptions
from distckpt._base.threads import (
    DEFAULT_INFLIGHT_BYTES,
    UNIT_BYTES,
    ProgressCounter,
    num_requests_within,
    num_threads_within,
)
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import (
    MANIFEST_NAME,
    KeyFigures,
    Manifest,
    marker_fields,
    version_of,
)
from distckpt._format.planned_manifest import PlannedManifest, report_of, with_parts
from distckpt._format.safetensors_file import ShardFile
from distckpt._io.planned_shards import (
    EngineSettings,
    PlanVerdict,
    ReadyShards,
    compare_plans,
    encoded_objects,
    plan_of,
)
from distckpt._io.write import NewFile, WriteSettings, file_of_tensors, in_folder, write_files
from distckpt._plan.layout import (
    PlannedChunk,
    PlannedFile,
    SavePlan,
    chunk_table,
    lay_out_object_file,
)
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.exchanges import pack_parts, unpack_parts
from distckpt._state.shards import Shard, region_view
from distckpt._storage import locations
from distckpt.mapping._sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from distckpt._io.figures import LiveRegion


class FileCopies(Protocol):
    """The interface of `HostCopies`, which copies data for background saves."""

    def copy(self, files: Sequence[NewFile]) -> Sequence[NewFile]:
        """Return the same files with copied data."""


def prepare_shards(
    ranks: Ranks, shards: Sequence[Shard], options: SaveOptions, engine: EngineSettings
) -> ShardSave:
    """Plan a save: every byte gets one owner and a place in a file.

    Collective operation: all ranks must call it. They vote whether a cached plan fits. Only if it
    does not fit on some rank, all ranks send descriptions to rank 0 and receive their pieces.

    Raises:
        InvalidShardingError: shards overlap, leave gaps or contradict each other.
    """
    return plan_shards(ranks, *compare_plans(ranks, shards, options, engine))


def plan_shards(ranks: Ranks, ready: ReadyShards, verdict: PlanVerdict) -> ShardSave:
    """Use the cached plan of all ranks, or plan together.

    Collective operation: all ranks must call it.
    """
    plan = plan_of(ranks, ready, verdict)
    encoded = ready.encoded
    num_bytes = ready.num_bytes
    if not verdict.reuses_plan:
        encoded = encoded_objects(plan.objects, ready.shards)
        num_bytes = plan.num_bytes(encoded)
    measured = {}
    for name in FIGURES:
        if getattr(ready.options, name):
            # Imported when it is needed: few saves compute figures.
            from distckpt._io import figures

            with ranks.phase(f"compute {figures.TITLES[name]}"):
                measured[name] = figures.numbers_of(name, live_regions(plan, ready.shards))
    return ShardSave(
        make_tensor_files=tensor_files_of(plan.files, ready.shards),
        plan=plan,
        encoded=encoded,
        settings=_write_settings(ready.options, ready.engine, num_bytes),
        num_bytes=num_bytes,
        plan_reused=verdict.reuses_plan,
        measured=measured,
    )


def _write_settings(options: SaveOptions, engine: EngineSettings, num_bytes: int) -> WriteSettings:
    """Return the settings for writing files of `num_bytes` in total."""
    limit = options.max_inflight_bytes
    if limit is None:
        limit = DEFAULT_INFLIGHT_BYTES
    num_requests = num_requests_within(limit)
    progress = None
    if options.progress:
        progress = ProgressCounter(options.progress, num_bytes).add
    return WriteSettings(
        durable=options.durable,
        direct=engine.direct_io,
        num_threads=num_threads_within(limit),
        num_requests=num_requests,
        max_part_bytes=limit // num_requests - UNIT_BYTES,
        progress=progress,
    )


def plan_regions(
    ranks: Ranks, shards: Sequence[Shard], options: SaveOptions, engine: EngineSettings
) -> tuple[list[LiveRegion], Manifest | None]:
    """Plan a save of which nothing is written.

    Collective operation: all ranks must call it. Return the regions of tensors of this rank, and on
    the coordinator the keys of all ranks.
    """
    ready, verdict = compare_plans(ranks, shards, options, engine)
    plan = plan_of(ranks, ready, verdict)
    regions = live_regions(plan, ready.shards)
    if plan.manifest is None:
        return regions, None
    return regions, plan.manifest.manifest


def live_regions(plan: SavePlan, shards: Sequence[Shard]) -> list[LiveRegion]:
    """Return the regions of tensors that this rank writes; slots are the numbers of their keys."""
    from distckpt._io.figures import LiveRegion

    regions = []
    for file in plan.files:
        for chunk in file.chunks:
            values = _tensors_of(chunk, shards)
            for (_, region), part in zip(chunk.pieces, values, strict=True):
                regions.append(LiveRegion(chunk.key_id, region, part))
    return regions


class PreparedSave(ABC):
    """A save that all ranks have planned and not yet written.

    Attributes:
        num_bytes: the bytes that this rank is going to write.
        plan_reused: whether the plan was made for an earlier save.
        folder_suffix: the end of the names of the folders `tensors` and `objects`. `save` sets it
            before `write` if several saves may write in one place, on object stores. None for a
            strategy that gives files fixed names: its saves are not kept apart there, and do not
            replace a checkpoint.
        exchanges_in_write: whether ranks exchange something within `write_own`.
        written: on the coordinator, after `complete`: the name and size of each file, which `save`
            checks before it commits.
    """

    num_bytes: int = 0
    plan_reused: bool = False
    folder_suffix: str | None = None
    exchanges_in_write = True
    written: Sequence[tuple[str, int]] = ()

    def stage(self, copies: FileCopies) -> PreparedSave | None:
        """Return the same save with copied tensors, so that training can continue.

        Not a collective operation. The default returns None: `async_save` finishes such a save
        before it returns.
        """
        del copies
        return None

    @abstractmethod
    def write(self, checkpoint_dir: str, ranks: Ranks) -> Mapping[str, Any] | None:
        """Write all shards into a directory of this save alone.

        See `SaveShardedStrategy.save`.

        After `stage` this runs in a background thread, and must use no process group except
        the one of `ranks`.
        """

    def write_own(self, checkpoint_dir: str, ranks: Ranks) -> bytes:
        """Write the files of this rank; return its report for `complete`.

        The default calls `write`.
        """
        fields = self.write(checkpoint_dir, ranks)
        if not ranks.is_coordinator:
            fields = None
        return json.dumps(fields).encode()

    def complete(self, checkpoint_dir: str, told: Sequence[bytes]) -> Mapping[str, Any] | None:
        """Return fields of the marker, on the coordinator.

        Args:
            checkpoint_dir: the directory of the files.
            told: the result of `write_own` on each rank.
        """
        del checkpoint_dir
        fields: Mapping[str, Any] | None = json.loads(told[0])
        return fields


@dataclass
class ShardSave(PreparedSave):
    """The part of one rank in a planned save.

    Attributes:
        make_tensor_files: call it in the thread that computes, see `file_of_tensors`.
        plan: the plan. Its objects are written after the tensors, into a file of their own.
        encoded: the objects, by unique key.
        settings: settings for writing files.
        measured: this rank's contribution to fingerprints and statistics, if they are stored, see
            `numbers_of`.
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
        """Call an overridden `write`, as for other strategies."""
        if "write" in vars(cls):
            cls.exchanges_in_write = True
            cls.write_own = PreparedSave.write_own  # type: ignore[method-assign]
            cls.complete = PreparedSave.complete  # type: ignore[assignment, method-assign]

    def stage(self, copies: FileCopies) -> ShardSave:
        # Encoded objects are copies already.
        staged = copies.copy(self.make_tensor_files())
        return replace(self, make_tensor_files=lambda: staged)

    def write(self, checkpoint_dir: str, ranks: Ranks) -> Mapping[str, Any]:
        """Write the files of this rank; the coordinator then writes the manifest.

        Collective operation: all ranks must call it. They send chunks of objects and checksums to
        the coordinator.
        """
        fields: Mapping[str, Any] = {}
        with ranks.telling("write shard files") as exchange:
            exchange.payload = ShardSave.write_own(self, checkpoint_dir, ranks)
        with ranks.answering(exchange, "write the manifest"):
            if ranks.is_coordinator:
                fields = ShardSave.complete(self, checkpoint_dir, exchange.payloads)
        return fields

    def write_own(self, checkpoint_dir: str, ranks: Ranks) -> bytes:
        plan = self.plan
        suffix = self.folder_suffix
        durable = self.settings.durable
        with ranks.part("write shard files"):
            files = [*self.make_tensor_files()]
            planned_objects = []
            if plan.objects:
                planned, object_file = object_file_of(ranks.rank, plan.objects, self.encoded)
                planned_objects.append(planned)
                files.append(object_file)
            placed = [file.below(checkpoint_dir, suffix) for file in files]
            checksums = write_files(placed, self.settings)
            objects = chunk_table(planned_objects)
            report = report_of_written(checkpoint_dir, plan, objects, checksums, suffix, durable)
        if not self.measured:
            return report
        return pack_parts([report, *self.measured.values()])

    def complete(self, checkpoint_dir: str, told: Sequence[bytes]) -> Mapping[str, Any]:
        planned = self.plan.manifest
        assert planned is not None
        figures: dict[str, npt.NDArray[Any]] = {}
        if self.measured:
            told, *columns = zip(*map(unpack_parts, told), strict=True)
            from distckpt._io.figures import columns_of

            for name, numbers in zip(self.measured, columns, strict=True):
                figures |= columns_of(name, planned.manifest, numbers)
        fields, self.written = write_manifest(
            checkpoint_dir,
            planned,
            told,
            self.folder_suffix,
            self.settings.durable,
            figures,
        )
        return fields


# --- Files ----------------------------------------------------------------------------------------


def report_of_written(
    checkpoint_dir: str,
    plan: SavePlan,
    objects: ChunkTable,
    checksums: npt.NDArray[np.uint64],
    suffix: str,
    durable: bool = True,
) -> bytes:
    """Return the report of a rank that has written its files.

    If checksums have a file of their own, this writes it.

    Args:
        checkpoint_dir: the directory of the save; files are in its folders with the suffix.
        plan: the plan of the rank.
        objects: the file of its objects, if there is one.
        checksums: the checksums of the blocks of all its files.
        suffix: see `PreparedSave.folder_suffix`.
        durable: whether the file must have reached the disk on return.
    """
    name = plan.checksum_file
    if name is None:
        return report_of(objects.files, objects.num_bytes, checksums)
    data = checksums.astype("<u8").tobytes()
    locations.write_bytes(locations.join(checkpoint_dir, in_folder(name, suffix)), data, durable)
    file = ShardFile.of(name, data)
    return report_of([*objects.files, file], objects.num_bytes, checksums[:0])


def tensor_files_of(
    files: Sequence[PlannedFile], shards: Sequence[Shard]
) -> Callable[[], list[NewFile]]:
    """Look up the tensors of files.

    The files themselves are made when the result is called.
    """
    pairs = []
    for file in files:
        pairs.append((file, [_tensors_of(chunk, shards) for chunk in file.chunks]))
    return lambda: [file_of_tensors(file.name, file.header, tensors) for file, tensors in pairs]


def object_file_of(
    rank: int, objects: Sequence[PlannedChunk], encoded: Mapping[str, bytes]
) -> tuple[PlannedFile, NewFile]:
    """Lay out and make the file of one rank's encoded objects."""
    planned = lay_out_object_file(rank, objects, {key: len(data) for key, data in encoded.items()})
    contents = [[torch.frombuffer(bytearray(data), dtype=torch.uint8)] for data in encoded.values()]
    return planned, file_of_tensors(planned.name, planned.header, contents)


def write_manifest(
    checkpoint_dir: str,
    planned: PlannedManifest,
    reports: Sequence[bytes],
    suffix: str,
    durable: bool,
    figures: KeyFigures | None = None,
) -> tuple[Mapping[str, Any], list[tuple[str, int]]]:
    """Write the manifest from the reports of all ranks.

    Files get their names in the folders with the suffix, and keys get figures. Returns the marker
    fields that name the manifest, and the names and sizes of all files, including its own. An
    existing manifest on an object store is never replaced, since a marker may name it; the new one
    gets another name.
    """
    chunks, parts = with_parts(planned.completed(reports), planned.parts)
    for part, content in parts.items():
        place = locations.join(checkpoint_dir, in_folder(part, suffix))
        locations.write_bytes(place, content, durable)
    if suffix:
        named = [file._replace(name=in_folder(file.name, suffix)) for file in chunks.files]
        chunks = chunks._replace(files=named)
    sizes = [(file.name, file.num_bytes) for file in chunks.files]
    if parts:
        # Imported when it is needed: few checkpoints are so large.
        from distckpt._format.file_table import FileTable

        chunks = chunks._replace(files=FileTable.of(chunks.files))
    known = {**planned.manifest.figures, **(figures or {})}
    data = planned.manifest.replaced(chunks=chunks, figures=known).to_bytes()
    name = put_manifest(checkpoint_dir, data, suffix, durable)
    return marker_fields(data, name, version_of(chunks.files)), [*sizes, (name, len(data))]


def put_manifest(checkpoint_dir: str, data: bytes, suffix: str, durable: bool = True) -> str:
    """Write a manifest under a name that is not taken; return the name."""
    name = MANIFEST_NAME
    if not locations.create_bytes(locations.join(checkpoint_dir, name), data, durable):
        name = f"manifest{suffix or '-' + secrets.token_hex(8)}.safetensors"
        locations.write_bytes(locations.join(checkpoint_dir, name), data, durable)
    return name


def _tensors_of(chunk: PlannedChunk, shards: Sequence[Shard]) -> list[torch.Tensor]:
    tensors = []
    for shard_id, region in chunk.pieces:
        shard = shards[shard_id]
        assert isinstance(shard, ShardedTensor)
        tensors.append(region_view(shard, region))
    return tensors

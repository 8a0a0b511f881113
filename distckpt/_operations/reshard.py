"""Rewriting a checkpoint as other ranks would have saved it, within bounded memory."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import CheckpointingException
from distckpt._base.garbage import paused_garbage_collection
from distckpt._base.messages import check_count, check_num_bytes
from distckpt._base.options import Progress, check_switch
from distckpt._base.threads import ProgressCounter
from distckpt._checkpoint.consistent_read import reading
from distckpt._checkpoint.opening import (
    BACKEND,
    VERSION,
    check_is_unchanged,
    open_undisturbed,
)
from distckpt._checkpoint.stored_values import object_keys, read_encoded
from distckpt._commit import posix
from distckpt._format.checksum import BLOCK_BYTES, checksum
from distckpt._format.manifest import OBJECT, Manifest, needs_checksum_files, take_figures
from distckpt._format.marker import (
    CheckpointingConfig,
    names_of_module,
    note_of_module,
    note_of_schedulers,
    schedulers_of,
)
from distckpt._format.planned_manifest import planned_manifest
from distckpt._format.safetensors_file import ShardFile
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region, whole
from distckpt._io import background
from distckpt._io.export import filling, num_export_threads
from distckpt._io.planned_shards import encoded_objects, ready_to_save
from distckpt._io.save_shards import ShardSave, object_file_of
from distckpt._io.tensor_source import TensorSource
from distckpt._io.write import NewFile, WriteSettings
from distckpt._mapping.sharded_tensor import ShardedTensor
from distckpt._mapping.wrappers import CommonStateDict, ShardedObject
from distckpt._operations.planned_save import PlannedSave, SaveRequest, write_and_commit
from distckpt._plan.decoded import decoded, hidden_keys
from distckpt._plan.export import OutputTensor, check_codes, is_for_all, plan_tensors
from distckpt._plan.layout import (
    PlannedChunk,
    PlannedFile,
    SavePlan,
    checksum_file_name,
    chunk_table,
    lay_out_files,
    manifest_of_keys,
)
from distckpt._plan.save import plan_held
from distckpt._plan.selection import matches, renamed, select_tensors
from distckpt._ranks.collectives import PhaseTimer, Ranks, collective
from distckpt._rules.mapped import TensorSpec, crop, identity
from distckpt._rules.rule import Rule
from distckpt._rules.rules import check_rules
from distckpt._state.common_state import COMMON_KEY
from distckpt._state.shards import GlobalTable, Shard, merge_tables, shard_table
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles


@dataclass(frozen=True)
class ReshardReport:
    """The content of a rewritten checkpoint.

    Attributes:
        location: location of the new checkpoint.
        num_tensors: stored tensors; tied ones count once.
        num_objects: stored objects, without common state.
        num_chunks: pieces that the tensors are stored in.
        num_files: number of files that hold them.
        num_bytes: size of tensors and objects.
        overflows: for each tensor with values that did not fit the dtype they were converted to,
            how many.
        seconds: duration of the call.
    """

    location: str
    num_tensors: int
    num_objects: int
    num_chunks: int
    num_files: int
    num_bytes: int
    overflows: Mapping[str, int]
    seconds: float


@collective()
@paused_garbage_collection()
def reshard(
    source_dir: str | os.PathLike[str],
    checkpoint_dir: str | os.PathLike[str],
    *,
    num_ranks: int | None = None,
    grids: Mapping[str, Sequence[int]] | None = None,
    keys: str | Sequence[str] | None = None,
    rules: Sequence[Rule] = (),
    rename: Mapping[str, str] | None = None,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    common_state: CommonStateDict | None = None,
    overwrite: bool = False,
    verify: bool = True,
    max_inflight_bytes: int = 256 << 20,
    process_group: Any = None,
    progress: Progress | None = None,
) -> ReshardReport:
    """Rewrite a checkpoint as other ranks would have saved it: in fewer files, or on another grid.

    A load needs none of this: it takes any division. Rewriting makes few files of many, lets a job
    of another layout read whole chunks, and makes a checkpoint of distckpt, which has checksums and
    opens faster, of what another program wrote. Objects and common state are kept. The new
    checkpoint appears in one step; memory is bounded whatever the size of a tensor.

        distckpt.reshard("checkpoints/step_100", "resharded/step_100", num_ranks=8,
        grids={"*.up.weight": (4, 1)})

    In its own place, it changes a checkpoint of distckpt, without the state of an optimizer for
    example:

        distckpt.reshard("checkpoints/step_100", "checkpoints/step_100", keys="!optimizer.",
        overwrite=True)

    Collective operation: all ranks must call it; each writes whole files. Works in one process as
    well. Arguments that are not described here are those of `consolidate`.

    Args:
        source_dir: what `load` reads: a checkpoint of distckpt, a Hugging Face directory, and those
            of others.
        checkpoint_dir: location of the new checkpoint.
        num_ranks: as many ranks' files are written, each with the same share of the bytes as far as
            grids allow. None for as many ranks as call.
        grids: pattern of new keys -> into how many parts each axis is divided. Part i (row-major)
            goes to rank i, from the first rank again after the last; with more ranks than parts,
            several share it as replicas do. The first pattern that fits counts. Other tensors are
            held by all ranks.
        rules: as in `consolidate`; what no rule matches is kept as it is.
        common_state: stored in the place of the source's, which is not read then: for sources whose
            common state is refused.
        overwrite: replace a checkpoint that is there.
        verify: compare the checksums of a source that has some.
        max_inflight_bytes: memory for data on its way; at least one window of 32 MiB is used.
            Objects are in memory whole.
        process_group: the ranks that work together; None for the default group, or for this process
            alone when torch.distributed is not initialized.
        progress: called with the bytes this rank has written so far and the bytes it will have.

    Returns:
        What was written.

    Raises:
        CheckpointNotFoundError: there is nothing that can be read.
        CheckpointExistsError: a complete checkpoint is there and `overwrite` is False.
        CheckpointingException: a grid fits no tensor, or not the one it is for.
        CorruptCheckpointError: the source is damaged. Nothing is committed.
        LoadMismatchError: `keys` or a rule matches nothing.
        UnsupportedObjectError: an object, or common state, needs a class that is not read from
            pickles.
        RankFailedError: raised on all ranks when any rank failed; nothing is committed.
    """
    started = time.perf_counter()
    ranks = Ranks(process_group)
    selection = Selection(keys, rules, rename or {}, dtype)
    division = Division(ranks.size if num_ranks is None else num_ranks, grids or {})
    same = {**vars(selection), **vars(division), "overwrite": overwrite, "verify": verify}
    with ranks.phase("check the arguments", decision=True, same=same):
        check_switch("overwrite", overwrite)
        check_switch("verify", verify)
        check_num_bytes("max_inflight_bytes", max_inflight_bytes)
        check_content(selection, division, common_state)
        location, target = locations.normalize(source_dir), posix.resolve(checkpoint_dir)
        background.wait_for_location(location)
        if ranks.is_coordinator:
            posix.check_target(target, overwrite, os.fspath(checkpoint_dir))

    # 1. What is written, and who writes it.
    timer = PhaseTimer("reshard", ranks.rank, target)
    with timer.phase("plan"):
        stored = open_undisturbed(ranks, location, verify=verify)
        with reading(ranks, [stored]):
            plan = plan_reshard(ranks, stored, target, selection, division, common_state)

    # 2. Write beside the target, and commit.
    request = SaveRequest(path=target, overwrite=overwrite, notes=notes_of(stored, selection))
    source = stored.marker if target == posix.resolve(location) else None
    overflows: dict[str, int] = {}
    with reading(ranks, [stored]):
        prepared = _prepare(ranks, plan, stored, overflows, max_inflight_bytes, progress)
        config = CheckpointingConfig(BACKEND, VERSION)
        write_and_commit(ranks, PlannedSave(target, request, config, prepared, timer, source))
    return report_of_reshard(target, plan, _sums(ranks, overflows), time.perf_counter() - started)


@dataclass(frozen=True)
class ReshardPlan:
    """What is written, from which checkpoint (or view of one), and where to; `save` is the part of
    this rank.
    """

    stored: StoredCheckpoint
    content: _Content
    layout: _Layout
    save: SavePlan


def plan_reshard(
    ranks: Ranks,
    stored: StoredCheckpoint,
    target: str,
    selection: Selection,
    division: Division,
    common_state: CommonStateDict | None,
) -> ReshardPlan:
    """Plan the same on all ranks, which must all call it."""
    with ranks.phase("plan the new checkpoint") as vote:
        _check_place(stored, target)
        if selection.is_of_values:
            stored = decoded(stored)
        content = _content_of(stored, selection, common_state)
        layout = _lay_out(content, division)
        save = _plan_save(ranks, layout)
        vote.number = layout.digest()
    if not vote.are_equal:
        raise CheckpointingException(
            f"{stored.location!r} was changed while it was read: nothing was written, try again."
        )
    return ReshardPlan(stored, content, layout, save)


def report_of_reshard(
    target: str, plan: ReshardPlan, overflows: Mapping[str, int], seconds: float
) -> ReshardReport:
    content, files = plan.content, plan.layout.all_files
    return ReshardReport(
        target,
        num_tensors=len(content.outputs),
        num_objects=len({shard.key for shard in content.objects} - {COMMON_KEY}),
        num_chunks=sum(len(file.chunks) for file in files) - len(content.objects),
        num_files=len(files),
        num_bytes=sum(map(_num_bytes, files)),
        overflows=overflows,
        seconds=seconds,
    )


def _num_bytes(file: PlannedFile) -> int:
    return sum(file.chunk_bytes)


def check_content(selection: Selection, division: Division, common_state: object) -> None:
    """Check the arguments that say what is written, and how it is divided.

    Raises:
        TypeError: one is of a wrong type.
    """
    check_rules(selection.rules)
    division.check()
    if not isinstance(common_state, Mapping | None):
        raise TypeError(f"common_state is a dict, or None, got {common_state!r:.100}.")


def _check_place(stored: StoredCheckpoint, target: str) -> None:
    """Refuse to rewrite files of other programs in their own place, where they would stay."""
    is_foreign = not stored.manifest.has_checksums
    if is_foreign and target == posix.resolve(stored.location):
        raise CheckpointingException(
            f"A checkpoint of another format cannot be rewritten in its own place "
            f"{stored.location!r}."
        )


def notes_of(stored: StoredCheckpoint, selection: Selection) -> dict[str, Any]:
    notes = note_of_schedulers(schedulers_of(stored.marker))
    if selection.rules or selection.rename:
        return notes
    return {**notes, **note_of_module(names_of_module(stored.marker))}


def _sums(ranks: Ranks, counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of all ranks together, by name."""
    total: Counter[str] = Counter()
    for text in ranks.all_gather(json.dumps(counts).encode()):
        total.update(json.loads(text))
    return dict(total)


# --- What is written ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """What of a checkpoint is written, and as what: arguments of `reshard`."""

    keys: str | Sequence[str] | None
    rules: Sequence[Rule]
    rename: Mapping[str, str]
    dtype: torch.dtype | Mapping[str, torch.dtype] | None

    @property
    def is_of_values(self) -> bool:
        """Tell whether quantized tensors become values."""
        return bool(self.rules) or is_for_all(self.dtype)

    def includes(self, key: str) -> bool:
        """Tell whether a key was chosen."""
        return self.keys is None or matches(key, self.keys)


@dataclass(frozen=True)
class _Content:
    """The content of the new checkpoint.

    Attributes:
        outputs: its tensors.
        aliases: further keys of tied tensors, and which of the tensors each is.
        objects: encoded, common state among them.
        quantization: what configurations say of it.
        source: the manifest of what is read.
        unchanged: for each tensor that stays as it is, which key of the source it is.
    """

    outputs: Sequence[OutputTensor]
    aliases: Mapping[str, str]
    objects: Sequence[ShardedObject]
    quantization: Mapping[str, Any] | None
    source: Manifest
    unchanged: Mapping[str, int]

    @cached_property
    def outputs_by_name(self) -> dict[str, OutputTensor]:
        """The tensors by their names."""
        return {output.name: output for output in self.outputs}


def _content_of(
    stored: StoredCheckpoint, selection: Selection, common_state: CommonStateDict | None
) -> _Content:
    outputs = _outputs(stored, selection)
    return _Content(
        outputs=outputs,
        aliases={} if selection.rules else _aliases(stored, selection),
        objects=_read_objects(stored, common_state),
        quantization=None if stored.quantized else _settings(stored, outputs),
        source=stored.manifest,
        unchanged=_unchanged(stored.manifest, outputs),
    )


def _unchanged(manifest: Manifest, outputs: Sequence[OutputTensor]) -> Mapping[str, int]:
    """Return the tensors that stay as they are, if figures of their values are stored."""
    if not manifest.figures:
        return {}
    found = {}
    for output in outputs:
        for part in output.mapped.parts[:1]:
            place = manifest.key_index[part.key]
            spec = TensorSpec(manifest.global_shapes[place], manifest.dtypes[place])
            if output.mapped == identity(part.key, spec) and output.dtype == spec.dtype:
                found[output.name] = place
    return found


def _settings(
    stored: StoredCheckpoint, outputs: Sequence[OutputTensor]
) -> Mapping[str, Any] | None:
    """Return what configurations say of codes, with the new keys of their shapes."""
    settings = stored.manifest.quantization
    if settings is None or "shapes" not in settings:
        return settings
    names = {part.key: output.name for output in outputs for part in output.mapped.parts}
    shapes = {names[key]: shape for key, shape in settings["shapes"].items() if key in names}
    return {**settings, "shapes": shapes}


def _outputs(stored: StoredCheckpoint, selection: Selection) -> list[OutputTensor]:
    """Return the tensors of the new checkpoint; one of objects alone has none."""
    manifest, rules = stored.manifest, selection.rules
    if selection.keys is None and all(name == OBJECT for name in manifest.dtypes):
        return []
    # Rules may make different tensors of tied ones, which are written one by one then.
    tensors = select_tensors(manifest, selection.keys, bool(rules), hidden_keys(stored))
    outputs = plan_tensors(
        tensors,
        rules,
        selection.rename,
        selection.dtype,
        keep_unmatched=True,
        tied=manifest.aliases,
    )
    check_codes(stored, outputs)
    return outputs


def _aliases(stored: StoredCheckpoint, selection: Selection) -> dict[str, str]:
    """Return the tied keys of the new checkpoint, under their new names."""
    manifest, rename = stored.manifest, selection.rename
    if not manifest.aliases:
        return {}
    hidden = hidden_keys(stored)
    chosen = select_tensors(manifest, selection.keys, False, hidden)
    names = {manifest.key_index[name]: name for name in chosen}
    left_out = hidden.union(chosen)
    return {
        renamed(alias, rename): renamed(names[manifest.key_index[alias]], rename)
        for alias in manifest.aliases
        if alias not in left_out and selection.includes(alias)
    }


def _read_objects(
    stored: StoredCheckpoint, common_state: CommonStateDict | None
) -> list[ShardedObject]:
    """Read the encoded objects; there is common state in any case."""
    shards = []
    keys = object_keys(stored)
    if common_state is not None:
        keys.remove(COMMON_KEY)
        given = ready_to_save(ShardedObject(COMMON_KEY, common_state, (1,), (0,)), False)
        assert isinstance(given, ShardedObject)
        shards.append(given)
    for key in keys:
        shape = (1,) if key == COMMON_KEY else stored.global_shape(key)
        cells = read_encoded(stored, key)
        shards += [ShardedObject(key, data, shape, offset) for offset, data in cells.items()]
    return shards


# --- Who writes it --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Division:
    """How tensors are divided among the ranks that would save them: arguments of `reshard`."""

    num_ranks: int
    grids: Mapping[str, Sequence[int]]

    def check(self) -> None:
        """Raise an error when there is no rank, or a grid is none."""
        check_count("num_ranks", self.num_ranks)
        if not isinstance(self.grids, Mapping):
            raise TypeError(
                f"grids is a dict of patterns of keys -> grids, got {self.grids!r:.200}"
            )
        for pattern, grid in self.grids.items():
            is_listed = isinstance(grid, list | tuple)
            if not is_listed or not all(isinstance(parts, int | np.integer) for parts in grid):
                raise TypeError(
                    f"grids has {grid!r:.100} for {pattern!r:.100}: a grid is a tuple with the "
                    "number of parts along each axis, such as (4, 1)."
                )


class _Held(NamedTuple):
    """A shard, without data for a tensor, and the new ranks that would hold it."""

    shard: Shard
    ranks: range


@dataclass(frozen=True)
class _Layout:
    """Where everything is written.

    Attributes:
        manifest: of the new checkpoint, without chunks.
        files: of each of the new ranks.
        objects: the files of objects among them, by name.
    """

    manifest: Manifest
    files: Sequence[Sequence[PlannedFile]]
    objects: Mapping[str, NewFile]

    @property
    def all_files(self) -> list[PlannedFile]:
        """The files of all new ranks."""
        return list(itertools.chain(*self.files))

    def share(self, rank: int, num_ranks: int) -> list[PlannedFile]:
        """Return the files that one of the ranks that work together writes."""
        return list(itertools.chain(*self.files[rank::num_ranks]))

    def digest(self) -> int:
        """Return a number that is the same on all ranks that have planned the same."""
        content = [(file.name, file.chunk_bytes) for file in self.all_files]
        return checksum(json.dumps([self.manifest.keys, content]).encode()) >> 3


def _lay_out(content: _Content, division: Division) -> _Layout:
    """Give every byte an owner among the new ranks, and a place in one of its files."""
    held = [*_hold_tensors(content.outputs, division), *_hold_objects(content.objects, division)]
    shards = [each.shard for each in held]
    described = shard_table(shards)
    table = _on_first_ranks(merge_tables([described]), [each.ranks for each in held])
    holders = [held[shard_id].ranks for shard_id in table.shard_ids.tolist()]
    manifest = manifest_of_keys(table, {})
    places = [content.unchanged.get(key, -1) for key in manifest.keys]
    manifest = manifest.replaced(
        aliases=content.aliases,
        quantization=content.quantization,
        figures=take_figures(content.source.figures, places),
    )
    files: list[list[PlannedFile]] = []
    object_files: dict[str, NewFile] = {}
    for rank, pieces in enumerate(plan_held(table, division.num_ranks, holders)):
        of_rank, objects = lay_out_files(rank, described, pieces)
        if objects:
            planned, new_file = object_file_of(rank, objects, encoded_objects(objects, shards))
            of_rank.append(planned)
            object_files[planned.name] = new_file
        files.append(of_rank)
    return _Layout(manifest, files, object_files)


def _hold_tensors(outputs: Iterable[OutputTensor], division: Division) -> Iterator[_Held]:
    """Divide tensors as their grids say."""
    num_ranks, grids = division.num_ranks, division.grids
    used: set[str] = set()
    for output in outputs:
        shape, dtype = output.mapped.shape, FROM_NAME[output.dtype]
        pattern = next((p for p in grids if matches(output.name, p)), None)
        regions = [whole(shape)]
        if pattern is not None:
            used.add(pattern)
            regions = _grid_regions(output.name, shape, tuple(grids[pattern]))
        for index, region in enumerate(regions):
            shard = ShardedTensor(
                output.name, None, dtype, region.shape, shape, region.offset, None
            )
            step = min(len(regions), num_ranks)
            yield _Held(shard, range(index % num_ranks, num_ranks, step))
    unused = sorted(grids.keys() - used)
    if unused:
        raise CheckpointingException(
            f"The grids for {unused} fit no tensor: no key matches, or an earlier one does."
        )


def _hold_objects(objects: Iterable[ShardedObject], division: Division) -> Iterator[_Held]:
    """Give each object to one rank."""
    for index, shard in enumerate(objects):
        first = index % division.num_ranks
        yield _Held(shard, range(first, first + 1))


def _grid_regions(key: str, shape: tuple[int, ...], grid: tuple[int, ...]) -> list[Region]:
    """Divide a tensor into a grid whose parts differ by at most one index along each axis."""
    if len(grid) != len(shape) or any(
        not 1 <= n <= max(1, size) for n, size in zip(grid, shape, strict=False)
    ):
        raise CheckpointingException(
            f"Key {key!r} of shape {shape} cannot be divided into a grid of {grid}: give one "
            "number of parts for each axis, from 1 to its size."
        )
    axes = [
        [(i * size // n, (i + 1) * size // n) for i in range(n)]
        for n, size in zip(grid, shape, strict=True)
    ]
    return [
        Region(tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell))
        for cell in itertools.product(*axes)
    ]


def _on_first_ranks(table: GlobalTable, holders: Sequence[range]) -> GlobalTable:
    """Give each shard of one rank to the first of the ranks that are to hold it."""
    ranks = np.array([holders[shard_id].start for shard_id in table.shard_ids.tolist()], np.int64)
    order = np.argsort(ranks, kind="stable")
    columns: dict[str, Any] = {
        name: getattr(table, name)[order]
        for name in ("key_ids", "shard_ids", "tie_ids", "is_buffer", "digests", "offsets", "shapes")
    }
    return table._replace(ranks=ranks[order], is_main=np.ones(len(order), bool), **columns)


# --- Writing it -----------------------------------------------------------------------------------


def _plan_save(ranks: Ranks, layout: _Layout) -> SavePlan:
    """Plan the files that describe what the ranks write."""
    tables = [chunk_table(layout.share(rank, ranks.size)) for rank in range(ranks.size)]
    num_blocks = sum(int((-(-table.num_bytes // BLOCK_BYTES)).sum()) for table in tables)
    names: dict[int, str] = {}
    if needs_checksum_files(num_blocks):
        names = {rank: checksum_file_name(rank) for rank, table in enumerate(tables) if table.files}
    for rank, name in names.items():
        files = [*tables[rank].files, ShardFile(name, 0, 0, 0)]
        tables[rank] = tables[rank]._replace(files=files)
    # On all ranks: it may refuse.
    manifest = planned_manifest(layout.manifest, tables)
    plan = SavePlan(0, [], [], manifest if ranks.is_coordinator else None)
    return plan._replace(checksum_file=names.get(ranks.rank))


@dataclass
class _Rewriting(ShardSave):
    """The part of one rank in a save that is made of another checkpoint, its `source`."""

    source: StoredCheckpoint | None = None
    open_files: OpenFiles = field(default_factory=OpenFiles)

    def write_own(self, checkpoint_dir: str, ranks: Ranks) -> bytes:
        # Closed before the commit, which may remove the source: NFS keeps the directory of an open
        # file.
        with self.open_files:
            return super().write_own(checkpoint_dir, ranks)

    def complete(self, checkpoint_dir: str, told: Sequence[bytes]) -> Mapping[str, Any]:
        # One with checksums was compared with them while it was read.
        if self.source is not None and not self.source.manifest.has_checksums:
            check_is_unchanged(self.source)
        return super().complete(checkpoint_dir, told)


def _prepare(
    ranks: Ranks,
    plan: ReshardPlan,
    source: StoredCheckpoint,
    overflows: dict[str, int],
    max_inflight_bytes: int,
    progress: Progress | None,
) -> ShardSave:
    """Prepare the share of this rank as a save; `overflows` gets, while it is written, the numbers
    of values that do not fit.
    """
    open_files = OpenFiles.for_many_reads()
    stored = plan.stored.with_files(open_files)
    files = [
        plan.layout.objects.get(file.name) or tensor_file(stored, plan, file, overflows)
        for file in plan.layout.share(ranks.rank, ranks.size)
    ]
    num_bytes = sum(map(_num_bytes, plan.layout.share(ranks.rank, ranks.size)))
    counter = ProgressCounter(progress, num_bytes)
    settings = WriteSettings(
        num_threads=num_export_threads(max_inflight_bytes), progress=counter.add
    )
    return _Rewriting(
        lambda: files, plan.save, {}, settings, num_bytes, source=source, open_files=open_files
    )


def tensor_file(
    stored: StoredCheckpoint,
    plan: ReshardPlan,
    file: PlannedFile,
    overflows: dict[str, int],
) -> NewFile:
    """Describe a file of tensors that is to be written, see `_prepare`."""
    outputs = plan.content.outputs_by_name
    tensors = [_cropped(outputs[chunk.key], chunk) for chunk in file.chunks]
    fill = filling(TensorSource(stored), tensors, overflows)
    return NewFile(file.name, file.header, file.chunk_bytes, fill)


def _cropped(output: OutputTensor, chunk: PlannedChunk) -> OutputTensor:
    """Return the part of an output tensor that a chunk holds."""
    is_whole = chunk.region == whole(output.mapped.shape)
    mapped = output.mapped if is_whole else crop(output.mapped, chunk.region)
    return output._replace(shape=chunk.region.shape, num_bytes=chunk.num_bytes, mapped=mapped)

"""Rewriting a checkpoint as other ranks would have saved it."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.options import Progress
from distckpt._base.threads import ProgressCounter
from distckpt._checkpoint.consistent_read import reading
from distckpt._checkpoint.opening import (
    BACKEND,
    VERSION,
    check_is_unchanged,
    open_undisturbed,
)
from distckpt._commit import posix
from distckpt._format.marker import CheckpointingConfig
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import whole
from distckpt._io import background
from distckpt._io.export import filling, num_export_threads
from distckpt._io.save_shards import ShardSave
from distckpt._io.tensor_source import TensorSource
from distckpt._io.write import NewFile, WriteSettings
from distckpt._operations.planned_save import PlannedSave, SaveRequest, write_and_commit
from distckpt._plan.export import OutputTensor
from distckpt._plan.layout import PlannedChunk, PlannedFile
from distckpt._ranks.collectives import PhaseTimer, Ranks, collective
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage.open_files import OpenFiles
from distckpt._tools.reshard_plan import ReshardPlan, plan_reshard, request_of
from distckpt.mapping._wrappers import CommonStateDict
from distckpt.rules._mapped import crop
from distckpt.rules._rule import Rule


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
    opens faster, of one that another program wrote. Objects and common state are kept. The new
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
        source_dir: any checkpoint that `load` reads: of distckpt, of Hugging Face, and others.
        checkpoint_dir: location of the new checkpoint.
        num_ranks: as many ranks' files are written, each with the same share of the bytes as far as
            grids allow. None for as many ranks as call.
        grids: pattern of new keys -> into how many parts each axis is divided. Part i (row-major)
            goes to rank i, from the first rank again after the last; with more ranks than parts,
            several share it as replicas do. The first pattern that fits counts. Other tensors are
            held by all ranks.
        rules: as in `consolidate`; tensors that no rule matches are kept as they are.
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
        Facts about the new checkpoint.

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
    request = request_of(
        ranks.size,
        source_dir,
        checkpoint_dir,
        num_ranks=num_ranks,
        grids=grids,
        keys=keys,
        rules=rules,
        rename=rename,
        dtype=dtype,
        common_state=common_state,
        overwrite=overwrite,
        verify=verify,
        max_inflight_bytes=max_inflight_bytes,
    )
    with ranks.phase("check the arguments", decision=True, same=request.of_all_ranks()):
        request.check()
        background.wait_for_location(request.source)
        if ranks.is_coordinator:
            posix.check_target(request.target, overwrite, os.fspath(checkpoint_dir))

    # 1. Plan the content, and its writers.
    timer = PhaseTimer("reshard", ranks.rank, request.target)
    with timer.phase("plan"):
        stored = open_undisturbed(ranks, request.source, verify=verify)
        with reading(ranks, [stored]):
            plan = plan_reshard(ranks, stored, request)

    # 2. Write beside the target, and commit.
    target = request.target
    save_request = SaveRequest(path=target, overwrite=overwrite, notes=plan.notes)
    source = stored.marker if request.is_in_place else None
    overflows: dict[str, int] = {}
    with reading(ranks, [stored]):
        prepared = _prepare(ranks, plan, stored, overflows, max_inflight_bytes, progress)
        config = CheckpointingConfig(BACKEND, VERSION)
        write_and_commit(ranks, PlannedSave(target, save_request, config, prepared, timer, source))
    return report_of_reshard(target, plan, _sums(ranks, overflows), time.perf_counter() - started)


def report_of_reshard(
    target: str, plan: ReshardPlan, overflows: Mapping[str, int], seconds: float
) -> ReshardReport:
    files = plan.layout.all_files
    return ReshardReport(
        target,
        num_tensors=len(plan.outputs),
        num_objects=len({shard.key for shard in plan.objects} - {COMMON_KEY}),
        num_chunks=sum(len(file.chunks) for file in files) - len(plan.objects),
        num_files=len(files),
        num_bytes=sum(map(_num_bytes, files)),
        overflows=overflows,
        seconds=seconds,
    )


def _num_bytes(file: PlannedFile) -> int:
    return sum(file.chunk_bytes)


def _sums(ranks: Ranks, counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of all ranks together, by name."""
    total: Counter[str] = Counter()
    for text in ranks.all_gather(json.dumps(counts).encode()):
        total.update(json.loads(text))
    return dict(total)


# --- Writing --------------------------------------------------------------------------------------


@dataclass
class _Rewriting(ShardSave):
    """One rank's part of a save that is made of another checkpoint."""

    source: StoredCheckpoint | None = None
    open_files: OpenFiles = field(default_factory=OpenFiles)

    def write_own(self, checkpoint_dir: str, ranks: Ranks) -> bytes:
        # Closed before the commit, which may remove the source: NFS keeps the directory of an open
        # file.
        with self.open_files:
            return super().write_own(checkpoint_dir, ranks)

    def complete(self, checkpoint_dir: str, told: Sequence[bytes]) -> Mapping[str, Any]:
        # One with checksums was compared with them while it was read.
        if self.source is not None and self.source.manifest.origin is not None:
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
    share = plan.layout.share(ranks.rank, ranks.size)
    files = [
        plan.layout.objects.get(file.name) or tensor_file(stored, plan, file, overflows)
        for file in share
    ]
    num_bytes = sum(map(_num_bytes, share))
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
    tensors = [_cropped(plan.outputs[chunk.key], chunk) for chunk in file.chunks]
    fill = filling(TensorSource(stored), tensors, overflows)
    return NewFile(file.name, file.header, file.chunk_bytes, fill)


def _cropped(output: OutputTensor, chunk: PlannedChunk) -> OutputTensor:
    """Return the part of an output tensor that a chunk holds."""
    is_whole = chunk.region == whole(output.mapped.shape)
    mapped = output.mapped if is_whole else crop(output.mapped, chunk.region)
    return output._replace(shape=chunk.region.shape, num_bytes=chunk.num_bytes, mapped=mapped)

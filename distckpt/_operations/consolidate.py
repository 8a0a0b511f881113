"""Merging of a checkpoint's shards into a Hugging Face checkpoint.

It needs no model and bounded memory: check, plan, write and commit.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.messages import summarize_keys
from distckpt._base.options import ExportOptions, with_changes
from distckpt._base.threads import ProgressCounter
from distckpt._checkpoint.consistent_read import reading
from distckpt._checkpoint.opening import check_is_unchanged
from distckpt._commit.output import Output, OutputSettings, new_output
from distckpt._format.hf_names import (
    INDEX_NAME,
    SINGLE_NAME,
    belongs_to_export,
    index_json,
)
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.export import export_settings, output_file
from distckpt._io.extra_files import write_extra_files
from distckpt._io.write import write_files
from distckpt._operations.export_plan import ExportPlan, plan_export, stored_source
from distckpt._operations.export_request import (
    ExportRequest,
    OpenedSources,
    check_export_options,
    check_request,
    locate_sources,
    open_sources,
)
from distckpt._plan.export import OutputFile, assign_files
from distckpt._ranks.collectives import PhaseTimer, Ranks, collective
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportReport:
    """The content of an export.

    It is compared with the headers of the written files.

    Attributes:
        num_tensors: number of tensors.
        num_bytes: size of their data.
        num_parameters: number of their elements.
        files: names of the files with tensors.
        dtypes: number of tensors of each safetensors dtype.
        left_out: keys of the tensors of optimizers that were left out, see `ExportOptions.keys`,
            and of the tensors that rules drop.
        overflows: for each tensor, the number of values that did not fit the dtype they were
            converted to (finite ones that became infinite or, in 8-bit floats without infinities,
            NaN; numbers beyond an integer's range).
        seconds: duration of the call.
    """

    num_tensors: int
    num_bytes: int
    num_parameters: int
    files: tuple[str, ...]
    dtypes: Mapping[str, int]
    overflows: Mapping[str, int]
    seconds: float
    left_out: tuple[str, ...] = ()


@collective()
@paused_garbage_collection()
def consolidate(
    checkpoint: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    process_group: Any = None,
    options: ExportOptions | None = None,
    **changes: Any,
) -> ExportReport:
    """Merge the shards of a checkpoint into a Hugging Face checkpoint.

    The model is not built.

    Everything is checked before a byte is written: shards must tile every tensor. The export is
    written next to `output_dir` and appears there in one step; an earlier one stays complete until
    then. Memory is bounded whatever the size of a tensor.

        distckpt.consolidate("checkpoints/step_100", "exports/step_100", dtype=torch.bfloat16)

    The state of optimizers is left out, see `ExportOptions.keys`.

    Collective operation: all ranks must call it; each writes whole files. Works in one process as
    well.

    Args:
        checkpoint: anything that `load` reads: a distckpt checkpoint, a folder of shards that
            torch's `HuggingFaceStorageWriter(save_distributed=True)` or NeMo Automodel wrote, or a
            checkpoint of `torch.distributed.checkpoint`, Megatron Core (`torch_dist`) or DeepSpeed.
        output_dir: gets `model.safetensors`, or several files and their index. Other files that are
            there stay.
        overwrite: replace an export that is there.
        process_group: the ranks that work together; None for the default group, or for this process
            alone when torch.distributed is not initialized.
        options: further options.
        changes: options by keyword, such as `dtype=torch.bfloat16`; see `ExportOptions` for all of
            them.

    Returns:
        The content of the export, after comparison with the headers of the written files.

    Raises:
        CheckpointNotFoundError: there is nothing to consolidate.
        CheckpointExistsError: `output_dir` holds an export and `overwrite` is False.
        CorruptCheckpointError: shards are missing, overlap, contradict each other or are damaged.
        CheckpointingException: an extra file must not be copied.
        LoadMismatchError: `keys` or a rule matches nothing, or no rule matches some tensor.
        RankFailedError: raised on all ranks when any rank failed; nothing is committed.
    """
    ranks = Ranks(process_group)
    export_options = with_changes(consolidate, ExportOptions, options, changes)
    request = check_request(ranks, [checkpoint], output_dir, overwrite, export_options)
    with PhaseTimer("consolidate", ranks.rank, request.target).phase("plan"):
        opened = open_sources(ranks, request.sources, export_options.verify)
        plan = plan_opened(ranks, opened, export_options)
    return write_and_commit(ranks, request, opened.all, plan)


def plan_consolidation(checkpoint: str | os.PathLike[str], options: ExportOptions) -> ExportPlan:
    """Return the plan of a `consolidate`, made in this process alone."""
    ranks = Ranks.alone()
    check_export_options(options)
    opened = open_sources(ranks, locate_sources([checkpoint], options), options.verify)
    return plan_opened(ranks, opened, options)


def plan_opened(ranks: Ranks, opened: OpenedSources, options: ExportOptions) -> ExportPlan:
    """Plan the export of an open checkpoint.

    Collective operation: all ranks must call it.
    """
    with reading(ranks, opened.all):
        source = stored_source(opened.checkpoints[0], options)
        return plan_export(ranks, opened, source, options)


def write_and_commit(
    ranks: Ranks, request: ExportRequest, opened: Sequence[StoredCheckpoint], plan: ExportPlan
) -> ExportReport:
    """Write an export next to its target, check and commit it.

    Collective operation: all ranks must call it; each writes whole files.

    Args:
        ranks: the ranks that write together.
        request: the target and the options.
        opened: the checkpoints that are read: they must be the same at the end.
        plan: plan of the export.
    """
    timer = PhaseTimer("consolidate", ranks.rank, request.target)
    mine = [plan.files[index] for index in assign_files(plan.files, ranks.size)[ranks.rank]]
    own_bytes = sum(file.num_bytes for file in mine)
    # On an object store files are in their final place; the index is written last.
    settings = OutputSettings(num_bytes=own_bytes, files=[file.name for file in plan.files])
    with reading(ranks, opened), new_output(ranks, request.target, settings) as output:
        with timer.phase("write") as details:
            details["bytes"] = own_bytes
            with output.being_written():
                overflows = _write_files(ranks, request, plan, mine, output)
        with timer.phase("commit"), ranks.phase("commit the export", decision=True):
            if ranks.is_coordinator:
                complete_export(plan, opened, output)
                output.commit_beside_others(belongs_to_export)
    if overflows and ranks.is_coordinator:
        logger.warning(
            "values did not fit the dtype they were converted to in %s", summarize_keys(overflows)
        )
    return report_of_export(plan, overflows, time.perf_counter() - request.started)


def report_of_export(
    plan: ExportPlan, overflows: Mapping[str, int], seconds: float
) -> ExportReport:
    """Return the report of an export that is written as planned."""
    return ExportReport(
        num_tensors=len(plan.outputs),
        num_bytes=sum(tensor.num_bytes for tensor in plan.outputs),
        num_parameters=sum(tensor.num_elements for tensor in plan.outputs),
        files=tuple(file.name for file in plan.files),
        dtypes=dict(Counter(tensor.dtype for tensor in plan.outputs)),
        overflows=overflows,
        seconds=seconds,
        left_out=(*plan.left_out, *plan.dropped),
    )


# --- Writing --------------------------------------------------------------------------------------


def _write_files(
    ranks: Ranks,
    request: ExportRequest,
    plan: ExportPlan,
    mine: Sequence[OutputFile],
    output: Output,
) -> dict[str, int]:
    """Write the files of this rank; return the overflows of all ranks by tensor."""
    overflows: dict[str, int] = {}
    counter = ProgressCounter(request.options.progress, sum(file.num_bytes for file in mine))
    settings = export_settings(request.num_threads, counter.add)
    with ranks.phase("write output files"), OpenFiles.for_many_reads() as open_files:
        output.check_is_seen()
        source = plan.source.with_files(open_files)
        for file in mine:
            path = locations.join(output.location, file.name)
            max_bytes = request.options.max_inflight_bytes
            write_files([output_file(source, file, path, overflows, max_bytes)], settings)
        output.sync()
        counter.finish()
    for other in ranks.all_gather(json.dumps(overflows).encode()):
        overflows |= json.loads(other)
    return overflows


# --- Committing -----------------------------------------------------------------------------------


def complete_export(plan: ExportPlan, opened: Sequence[StoredCheckpoint], output: Output) -> None:
    """Check the files of all ranks, and write the other files."""
    directory = output.location
    for stored in opened:
        check_is_unchanged(stored)
    sizes = [(file.name, file.file_bytes) for file in plan.files]
    output.check_files(sizes)
    for file in plan.files:
        _check_written(locations.join(directory, file.name), file)
    write_extra_files(plan.extra_files, directory)
    if any(file.name != SINGLE_NAME for file in plan.files):
        index = locations.join(directory, INDEX_NAME)
        locations.write_bytes(index, _index_of(plan))


def _check_written(path: str, file: OutputFile) -> None:
    """Compare the header of a written file with the plan."""
    header = file.laid_out[1]
    if locations.read_range(path, 0, len(header)) != header:
        raise CorruptCheckpointError(
            f"{path!r} was changed while the export was written: its header is not the planned one."
        )


def _index_of(plan: ExportPlan) -> bytes:
    """Return the content of the index of several files."""
    weight_map = {}
    for file in plan.files:
        for tensor in file.tensors:
            weight_map[tensor.name] = file.name
    num_parameters = sum(tensor.num_elements for tensor in plan.outputs)
    return index_json(weight_map, sum(file.num_bytes for file in plan.files), num_parameters)

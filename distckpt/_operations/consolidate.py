"""Merging of a checkpoint's shards into a Hugging Face checkpoint.

It needs no model and bounded memory.
"""

from __future__ import annotations

import os
from typing import Any

from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.options import ExportOptions, with_changes
from distckpt._checkpoint.consistent_read import reading
from distckpt._operations.export_plan import ExportPlan, plan_export, stored_source
from distckpt._operations.export_request import (
    OpenedSources,
    check_export_options,
    check_request,
    locate_sources,
    open_sources,
)
from distckpt._operations.export_write import ExportReport, write_and_commit
from distckpt._ranks.collectives import PhaseTimer, Ranks, collective


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

"""Saves of state dicts in the background; see `background_save` for the steps."""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.options import SaveOptions, with_changes
from distckpt._operations import background_save
from distckpt._operations.background_save import SaveHandle
from distckpt._operations.planned_save import SaveRequest, raising_pending_errors
from distckpt._operations.save import plan_save
from distckpt._ranks.collectives import Ranks, collective
from distckpt.mapping._wrappers import ShardedStateDict


@collective()
@paused_garbage_collection()
def async_save(
    state_dict: ShardedStateDict,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    process_group: Any = None,
    content_metadata: dict[str, Any] | None = None,
    options: SaveOptions | None = None,
    **changes: Any,
) -> SaveHandle:
    """Save a state dict in the background, while training continues.

    The tensors of this rank are copied before the call returns (into memory that the next save of
    the same structure reuses); a thread with its own process group writes and commits. Saves of one
    process follow each other. Two may be in progress; a third one waits for the first before it
    copies.

        handle = distckpt.async_save(state, "checkpoints/step_100")
        ...                      # train on
        report = handle.result()  # raises the error of any rank

    Collective operation: all ranks must call it. The first call also makes the process group of the
    background.

    Args:
        state_dict: as in `save`.
        path: a path or fsspec URL, as in `save`.
        overwrite: replace an existing complete checkpoint.
        process_group: the ranks that save together.
        content_metadata: describes the content.
        options: further options. With `max_inflight_bytes`, tensors that do not fit into it are
            copied while files are being written: wait for `staged` of the handle before changing
            any tensor. A save that a `strategy` cannot stage (`PreparedSave.stage`) is finished
            before this returns. With an `exit_timeout` of 0 the save is abandoned when the process
            ends.
        changes: options by keyword; see `SaveOptions` for all of them.

    Returns:
        A handle to wait for the save and to get its report. If the save fails, the error is logged.
        Unless the handle has reported it, the next save of these ranks raises it, after that save
        has been committed, or started in the background.

    Raises:
        CheckpointingException: as in `save`, for errors before anything is written.
    """
    ranks = Ranks(process_group)
    request = SaveRequest(
        path=path,
        process_group=process_group,
        overwrite=overwrite,
        content_metadata=content_metadata,
        options=with_changes(async_save, SaveOptions, options, changes),
        verb="async_save",
    )
    with raising_pending_errors(ranks, request):
        planned = plan_save(ranks, state_dict, background_save.in_background(request))
        save = background_save.prepare(ranks, planned)
        return background_save.start(ranks, save)


@collective()
@paused_garbage_collection()
def reserve_staging_memory(
    state_dict: ShardedStateDict,
    *,
    process_group: Any = None,
    options: SaveOptions | None = None,
    **changes: Any,
) -> Future[int]:
    """Prepare the first `async_save` of a state dict.

    That save then blocks training no longer than later ones. This call plans the save, makes the
    process group of the background, and returns; a thread then allocates the memory for the copies,
    which takes several times as long as copying. Call it when the state dict has all its tensors:
    after `load`, or after the first step of a new optimizer.

    Collective operation: all ranks must call it. A save that starts before the memory is complete
    uses the memory allocated so far, but waits for page-locked memory, which an accelerator copies
    to. A state dict whose structure has changed is saved as if no memory was reserved. The memory
    stays reserved until a save of another structure, or `release_staging_memory`.

    Args:
        state_dict: the state dict to save; it is neither copied nor kept.
        process_group: the ranks that will save together.
        options: the options of the later `async_save`.
        changes: options by keyword.

    Returns:
        A future whose result is the size of this rank's copies in bytes, once the memory is there.
        An error, such as too little memory, is logged, and raised by `result`; the save then
        allocates its memory itself.

    Raises:
        CheckpointingException: as in `async_save`, for a state dict that cannot be saved.
    """
    return reserve_for(
        state_dict,
        SaveRequest(
            path="",
            process_group=process_group,
            options=with_changes(reserve_staging_memory, SaveOptions, options, changes),
        ),
    )


def reserve_for(state_dict: ShardedStateDict, request: SaveRequest) -> Future[int]:
    """Reserve the memory for the copies of a save, see `reserve_staging_memory`."""
    ranks = Ranks(request.process_group)
    without_target = replace(request, has_target=False, verb="reserve_staging_memory")
    planned = plan_save(ranks, state_dict, background_save.in_background(without_target))
    return background_save.reserve(ranks, planned)

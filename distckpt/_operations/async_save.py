"""Save a state dict in the background; see `background_save` for the steps."""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.options import SaveOptions, with_changes
from distckpt._operations import background_save
from distckpt._operations.background_save import SaveHandle, raising_pending_errors
from distckpt._operations.planned_save import SaveRequest
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
    """Save like `save`, in the background: return as soon as training may change its tensors.

    Everything that this rank writes is copied before the call returns (into memory that the next
    save of the same structure reuses); a thread with a process group of its own writes and commits.
    Saves of one process follow each other. Two may be in progress; a third one waits for the first
    before it copies.

        handle = distckpt.async_save(state, "checkpoints/step_100")
        ...                      # train on
        report = handle.result()  # raises what went wrong on any rank

    Collective operation: all ranks must call it. The first call also makes the process group of the
    background.

    Args:
        state_dict: this and all others as in `save`.
        path: a path or fsspec URL.
        overwrite: replace a complete checkpoint that is there.
        process_group: the ranks that save together.
        content_metadata: describes the content.
        options: further options. With `max_inflight_bytes`, what does not fit into it is copied
            while files are being written: wait for `staged` of the handle before changing any
            tensor. A save that a `strategy` cannot stage (`PreparedSave.stage`) is finished before
            this returns. With an `exit_timeout` of 0 the save is abandoned when the process ends.
        changes: options by keyword; see `SaveOptions` for all of them.

    Returns:
        A handle to wait for the save and to get its report. When the save fails and nobody asks,
        the error is logged, and the next save of these ranks raises it, when that save has been
        committed, or started in the background.

    Raises:
        CheckpointingException: as `save` does, for errors that are found before anything is
            written.
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
        background = background_save.in_background(request)
        planned = plan_save(ranks, state_dict, background.request)
        save = background_save.prepare(ranks, background, planned)
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
    """Prepare the first `async_save` of a state dict, which then blocks training no longer than
    later ones.

    Plans the save, makes the process group of the background, and returns; a thread then allocates
    the memory for the copies, which takes several times as long as copying. Call it when the state
    dict has all its tensors: after `load`, or after the first step of a new optimizer.

    Collective operation: all ranks must call it. A save may come before the memory is there: it
    goes on at once with what there is, though page-locked memory, which an accelerator copies to,
    is waited for. A state dict whose structure has changed by then is saved as if nothing had been
    reserved. The memory is kept until a save of another structure, or `release_staging_memory`.

    Args:
        state_dict: what will be saved; nothing of it is copied or kept.
        process_group: the ranks that will save together.
        options: as `async_save` will be given.
        changes: options by keyword.

    Returns:
        A future: its result is how many bytes the copies of this rank take, when they are there. An
        error, such as that there is no memory, is logged, and raised by `result`; the save then
        tries for itself.

    Raises:
        CheckpointingException: as `async_save` does, for a state dict that cannot be saved.
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
    background = background_save.in_background(without_target)
    planned = plan_save(ranks, state_dict, background.request)
    return background_save.reserve(ranks, background, planned)

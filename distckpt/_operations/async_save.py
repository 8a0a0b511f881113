"""Save a state dict in the background; see `background_save` for the steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from distckpt._base.interrupts import operation
from distckpt._base.memory import paused_garbage_collection
from distckpt._operations import background_save
from distckpt._operations.background_save import SaveHandle
from distckpt._operations.planned_save import DEFAULT_EXIT_TIMEOUT, DEFAULT_TIMEOUT, SaveSettings
from distckpt._operations.save import plan_save
from distckpt._ranks.collectives import Ranks
from distckpt.mapping import CommonStateDict, ShardedStateDict, StateDict
from distckpt.strategies.base import SaveShardedStrategy


@operation
@paused_garbage_collection()
def async_save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict] | None = None,
    content_metadata: dict[str, Any] | None = None,
    *,
    overwrite: bool = False,
    process_group: Any = None,
    validate_replicas: bool | None = None,
    durable: bool = True,
    max_inflight_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    exit_timeout: float = DEFAULT_EXIT_TIMEOUT,
) -> SaveHandle:
    """Save like `save`, in the background: returns as soon as training may change its tensors.

    Everything that this rank writes is copied before the call returns (into memory that the next save of the same
    structure reuses); a thread with a process group of its own writes and commits. Saves of one process follow each
    other. Two may be in progress; a third one waits for the first before it copies.

        handle = distckpt.async_save(state, "checkpoints/step_100")
        ...                      # train on
        report = handle.result()  # raises what went wrong on any rank

    Collective operation: all ranks must call it. The first call also makes the process group of the background.

    Arguments that are not described here are those of `save`.

    Args:
        sharded_strategy: as in `save`. A save that a strategy cannot stage (`PreparedSave.stage`) is finished before
            this returns.
        max_inflight_bytes: memory that copies and data on its way to storage may take on each rank, at least two
            windows of 8 MiB; None for as much as this rank writes. With a limit, what does not fit is copied while
            files are being written: wait for `staged` of the handle before changing any tensor.
        progress: as in `save`; called in the background.
        timeout: seconds that ranks wait for each other in the background, and for memory that earlier saves use.
        exit_timeout: seconds that the end of the process waits for the save; then, or at once with 0, it is
            abandoned, and nothing of it is committed.

    Returns:
        A handle to wait for the save and to get its report. When the save fails and nobody asks, the error is logged,
        and the next save of these ranks raises it.

    Raises:
        CheckpointingException: as `save` does, for errors that are found before anything is written.
    """
    ranks = Ranks(process_group)
    settings = SaveSettings(
        process_group=process_group,
        validate_access_integrity=validate_access_integrity,
        validate_replicas=validate_replicas,
        durable=durable,
        progress=progress,
        sharded_strategy=sharded_strategy,
        overwrite=overwrite,
        content_metadata=content_metadata,
        preprocess_common=preprocess_common_before_consistancy_check,
        background_bytes=max_inflight_bytes,
        timeout=timeout,
        exit_timeout=exit_timeout,
    )
    background_save.raise_pending_errors(ranks, process_group)
    # 1. Flatten the state dict; decide who writes what.
    plan = partial(plan_save, ranks, sharded_state_dict, checkpoint_dir)
    save = background_save.prepare(ranks, settings, plan)
    # 2. Copy what this rank writes. 3. In the background: write everything beside the target, and commit.
    return background_save.start(ranks, save)


@operation
@paused_garbage_collection()
def reserve_staging_memory(
    sharded_state_dict: ShardedStateDict,
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    *,
    process_group: Any = None,
    validate_replicas: bool | None = None,
    max_inflight_bytes: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Future[int]:
    """Prepare the first `async_save` of a state dict, which then blocks training no longer than later ones.

    Plans the save, makes the process group of the background, and returns; a thread then allocates the memory for the
    copies, which takes several times as long as copying. Call it when the state dict has all its tensors: after `load`,
    or after the first step of a new optimizer.

    Collective operation: all ranks must call it. A save may come before the memory is there: it goes on at once with
    what there is, though page-locked memory, which an accelerator copies to, is waited for. A state dict whose
    structure has changed by then is saved as if nothing had been reserved. The memory is kept until a save of another
    structure, or `release_staging_memory`.

    Args:
        sharded_state_dict: what will be saved; nothing of it is copied or kept.
        sharded_strategy: this and the others as in `async_save`, with the values that it will be given.

    Returns:
        A future: its result is how many bytes the copies of this rank take, when they are there. An error, such as that
        there is no memory, is logged, and raised by `result`; the save then tries for itself.

    Raises:
        CheckpointingException: as `async_save` does, for a state dict that cannot be saved.
    """
    ranks = Ranks(process_group)
    settings = SaveSettings(
        process_group=process_group,
        validate_access_integrity=validate_access_integrity,
        validate_replicas=validate_replicas,
        sharded_strategy=sharded_strategy,
        background_bytes=max_inflight_bytes,
        timeout=timeout,
    )
    return background_save.reserve(ranks, settings, partial(plan_save, ranks, sharded_state_dict, "", has_target=False))

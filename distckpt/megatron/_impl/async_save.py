"""Background saves as requests that Megatron's queue of asynchronous calls can schedule."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._io import background
from distckpt._operations import background_save
from distckpt._operations.background_save import BackgroundSave
from distckpt._operations.planned_save import PlannedSave, SaveRequest
from distckpt._operations.save import plan_save
from distckpt._ranks.collectives import Ranks
from distckpt.mapping._wrappers import ShardedStateDict
from distckpt.megatron._impl.async_requests import AsyncRequest

_OTHER_QUEUE = (
    "The save to {!r} was not written: its queue calls requests in processes of their own. Import "
    "AsyncCallsQueue from distckpt.megatron.strategies.async_utils where requests are scheduled, "
    "too."
)


def request_of(
    ranks: Ranks,
    state_dict: ShardedStateDict,
    request: SaveRequest,
) -> AsyncRequest:
    """Plan a save, and return a request that Megatron's queue can schedule.

    Collective operation: all ranks must call it.
    """
    request = background_save.in_background(replace(request, verb="async_save"))
    planned = _without_limit_on_copies(plan_save(ranks, state_dict, request))
    save = background_save.prepare(ranks, planned)
    finalize: list[Callable[[], Any]] = [partial(_check_written, save)]
    return AsyncRequest(
        async_fn=_write_request,
        async_fn_args=(save, None, os.getpid()),
        finalize_fns=finalize,
        async_fn_kwargs={},
        preload_fn=partial(_stage_request, save, ranks),
    )


def _without_limit_on_copies(planned: PlannedSave) -> PlannedSave:
    """Let everything be copied while the request is scheduled.

    Programs change tensors after that, since a queue has nothing like `SaveHandle.staged`.
    """
    options = replace(planned.request.options, max_inflight_bytes=None)
    return replace(planned, request=replace(planned.request, options=options))


def _stage_request(save: BackgroundSave, ranks: Ranks) -> bool:
    if save.stage(ranks):
        return True
    save.write_now(ranks)
    return False


def _check_written(save: BackgroundSave) -> None:
    """Raise when another process has called the request.

    Ranks cannot write together there.
    """
    if save.planned is not None and save.ranks.size > 1:
        raise CheckpointingException(_OTHER_QUEUE.format(save.location))


def _write_request(save: BackgroundSave, is_staged: bool | None, process: int) -> None:
    if process != os.getpid() and save.ranks.size > 1:
        raise CheckpointingException(_OTHER_QUEUE.format(save.location))
    if is_staged is not False:
        background.run_in_order(save.write, f"the save to {save.location}", save.location)

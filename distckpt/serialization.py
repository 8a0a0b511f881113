"""The verbs: save, load, and what can be asked of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from distckpt._base.memory import paused_garbage_collection
from distckpt._base.public import set_public_home
from distckpt._base.threads import DEFAULT_INFLIGHT_BYTES
from distckpt._operations.async_save import (
    SaveHandle,
    async_save,
    raise_pending_errors,
    release_staging_memory,
    request_save,
)
from distckpt._operations.consolidate import consolidate
from distckpt._operations.load import load
from distckpt._operations.queries import (
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
)
from distckpt._operations.saving import SaveRequest, begin_save, finish_save
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.report import LoadReport, PhaseTimer, SaveReport
from distckpt._state.common_state import check_common_strategy
from distckpt.mapping import CommonStateDict, ShardedStateDict, StateDict
from distckpt.strategies.base import Options, ParallelLoad, SaveShardedStrategy, Verify
from distckpt.strategies.defaults import get_default_load_sharded_strategy, get_default_save_sharded_strategy
from distckpt.strategies.huggingface import ExportReport

__all__ = [
    "ExportReport",
    "LoadReport",
    "ParallelLoad",
    "SaveHandle",
    "SaveReport",
    "Verify",
    "async_save",
    "consolidate",
    "get_default_load_sharded_strategy",
    "get_default_save_sharded_strategy",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "release_staging_memory",
    "remove_sharded_tensors",
    "save",
]

set_public_home(globals())


@paused_garbage_collection()
def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict] | None = None,
    content_metadata: dict[str, Any] | None = None,
    async_strategy: str | None = None,
    verify_integrity: bool = False,
    *,
    common_strategy: None = None,
    overwrite: bool = False,
    process_group: Any = None,
    validate_replicas: bool = False,
    durable: bool = True,
    max_inflight_bytes: int = DEFAULT_INFLIGHT_BYTES,
    progress: Callable[[int], None] | None = None,
) -> SaveReport:
    """Save a state dict whose tensors are spread over the ranks.

    Every byte is written once, by one of the ranks that hold it. The checkpoint appears under its name in one step
    when all of it is on disk; until then an earlier one there stays in place.

        state = {"model": model.sharded_state_dict(), "step": 100}
        distckpt.save(state, "checkpoints/step_100")

    Collective: every rank of the process group calls. Ranks exchange descriptions of shards and outcomes, no data.

    Args:
        sharded_state_dict: nested dicts, lists and tuples. `ShardedTensor`, `ShardedObject` and
            `ShardedTensorFactory` leaves are the sharded part, `LocalNonpersistentObject` leaves are not saved, all
            else is common state, saved once. It is not changed.
        checkpoint_dir: a path or fsspec URL. It must not hold a complete checkpoint (see `overwrite`); what an
            unfinished save left there is moved aside, or removed from an object store when this one is complete.
        sharded_strategy: writes the shards; a strategy, `(backend, version)` of a registered one, or None for the
            built-in safetensors format.
        validate_access_integrity: refuse state dicts in which an element of a global tensor is held by no rank, and
            warn when common state differs between ranks. With False, gaps are not saved and cannot be loaded.
            Overlaps and contradictions are always refused.
        async_sharded_save: return an `AsyncRequest` for an `AsyncCallsQueue` (`distckpt.strategies.async_utils`), as
            Megatron does: the request copies the tensors when it is scheduled, and writes them in the background.
            `async_save` is simpler to use.
        preprocess_common_before_consistancy_check: returns what to compare of (a copy of) the common state.
        content_metadata: describes the content, see `load_content_metadata`.
        async_strategy: accepted for compatibility.
        verify_integrity: accepted for compatibility: checksums are always written.
        common_strategy: accepted for compatibility; must be None.
        overwrite: replace a complete checkpoint that is there. The earlier one stays until the new one is complete.
        process_group: the ranks that save together; None for the default group, or for this process alone when
            torch.distributed is not initialised.
        validate_replicas: also compare the content of replicas, and refuse to save when they differ. Reads all
            tensors once more.
        durable: whether everything must be on disk when this returns. With False the checkpoint appears in one step
            too, but a power failure shortly afterwards may leave it damaged; checksums tell.
        max_inflight_bytes: memory for data on its way to storage, on each rank; at least one window of 8 MiB is used.
        progress: told the number of bytes whenever this rank has written some, from several threads.

    Returns:
        What was saved and how long it took, the same on every rank; rank 0 logs it too.

    Raises:
        InvalidShardingError: shards overlap, leave gaps or contradict each other. Nothing is written.
        CheckpointExistsError: a complete checkpoint is there and `overwrite` is False.
        RankFailedError: raised on all ranks when any rank failed; nothing is committed. Also when an earlier background
            save failed and nobody has asked for its result.
    """
    check_common_strategy(common_strategy)
    ranks = Ranks(process_group)
    options = Options(
        process_group=process_group,
        validate_access_integrity=validate_access_integrity,
        validate_replicas=validate_replicas,
        durable=durable,
        max_inflight_bytes=max_inflight_bytes,
        progress=progress,
    )

    request = SaveRequest(
        sharded_state_dict,
        os.fspath(checkpoint_dir),
        sharded_strategy,
        overwrite,
        content_metadata,
        preprocess_common_before_consistancy_check,
    )
    if async_sharded_save:
        # Not in the annotation: it would burden everybody else with a case that programs for Megatron alone know.
        return request_save(ranks, options, request)  # type: ignore[return-value]
    raise_pending_errors(ranks, process_group)
    timer = PhaseTimer()
    # 1. Take the state dict apart; decide who writes what.
    target, prepared = begin_save(ranks, request, timer, options)
    # 2. Write everything beside the target. 3. Commit.
    return finish_save(ranks, timer, target, prepared)

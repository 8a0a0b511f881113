"""Save a state dict: plan, write, commit."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from distckpt._base.errors import CheckpointingException, InvalidShardingError
from distckpt._base.interrupts import operation
from distckpt._base.memory import paused_garbage_collection
from distckpt._base.threads import DEFAULT_INFLIGHT_BYTES
from distckpt._commit import posix
from distckpt._format.marker import CheckpointingConfig, note_of_module
from distckpt._objects import objects
from distckpt._operations import background_save
from distckpt._operations.planned_save import PlannedSave, SaveSettings, write_and_commit
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.report import PhaseTimer, SaveReport
from distckpt._state import common_state, flatten
from distckpt._state.common_state import COMMON_KEY, CONTENT_METADATA, check_common_strategy, take_common_strategy
from distckpt._state.shards import Shard
from distckpt.mapping import CommonStateDict, ShardedObject, ShardedStateDict, StateDict
from distckpt.strategies.async_utils import AsyncRequest
from distckpt.strategies.base import SaveShardedStrategy, prepare_save
from distckpt.strategies.defaults import save_strategy
from distckpt.utils import _clean_metadata_for_serialization


@operation
@take_common_strategy
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
    common_strategy: tuple[str, int] | None = None,
    overwrite: bool = False,
    process_group: Any = None,
    validate_replicas: bool | None = None,
    durable: bool = True,
    max_inflight_bytes: int = DEFAULT_INFLIGHT_BYTES,
    progress: Callable[[int], None] | None = None,
    on_report: Callable[[SaveReport], None] | None = None,
) -> AsyncRequest | None:
    """Save a state dict whose tensors are distributed over the ranks.

    Every byte is written once, by one of the ranks that hold it. A save is atomic: a reader sees a complete checkpoint
    or none, and an earlier one stays until it is replaced in one step.

        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 100}
        distckpt.save(state, "checkpoints/step_100")

    Collective operation: all ranks must call it. They exchange descriptions of shards and outcomes, no data.

    Args:
        sharded_state_dict: nested dicts, lists and tuples of modules, optimizers of their parameters, DTensors, other
            objects with `state_dict()` and `load_state_dict()` (data loaders and `RngState` are stored for each rank),
            `ShardedTensor`s, `ShardedObject`s, `ShardedTensorFactory`s, and values, which are common state and saved
            once. `LocalNonpersistentObject`s are not saved. Parameters of the module at `model` keep their names, those
            of other modules are prefixed with the path to them. Neither the dict nor the objects are changed.
        checkpoint_dir: a path or fsspec URL. It must not hold a complete checkpoint (see `overwrite`); what an
            unfinished save left there is moved aside, or removed from an object store when this one is complete. Other
            files that are there stay. A directory that holds other checkpoints is refused.
        sharded_strategy: writes the shards; a strategy, `(backend, version)` of a registered one, or None for the
            built-in safetensors format.
        validate_access_integrity: refuse state dicts in which an element of a global tensor is held by no rank, and
            tensors in common state that differ between ranks; warn about other values there that do. With False, gaps
            are not saved and cannot be loaded. Overlaps and contradictions are always refused.
        async_sharded_save: return an `AsyncRequest` for an `AsyncCallsQueue` (`distckpt.strategies.async_utils`), as
            Megatron does: the request copies the tensors when it is scheduled, and writes them in the background.
            `async_save` is simpler to use.
        preprocess_common_before_consistancy_check: called with a copy of the common state; returns what ranks compare.
        content_metadata: describes the content, see `load_content_metadata`.
        async_strategy: accepted for compatibility.
        verify_integrity: accepted for compatibility: checksums are always written.
        common_strategy: accepted for compatibility, as the fourth positional argument, too; None or `("torch", 1)`.
        overwrite: replace a complete checkpoint that is there. It stays until the new one is complete.
        process_group: the ranks that save together; None for the default group, or for this process alone when
            torch.distributed is not initialized.
        validate_replicas: None compares samples of tensors that several ranks hold (up to 1 KiB of each), and refuses
            to save when they differ; True compares all of them, and objects, which reads them once more; False nothing.
            Ranks share the writing of replicas: of different ones parts of each would be stored. Buffers of modules may
            differ: the main replica is stored.
        durable: return only when everything is on disk. With False the checkpoint appears in one step too, but a
            power failure shortly afterwards may leave it damaged, which checksums reveal.
        max_inflight_bytes: memory for data on its way to storage, on each rank; at least one window of 8 MiB is used.
        progress: called with the number of bytes whenever this rank has written some, from several threads.
        on_report: called with what was saved and how long it took, on every rank, when the checkpoint is committed
            (with `async_sharded_save` from the background thread); rank 0 logs it too.

    Returns:
        None, as Megatron does; with `async_sharded_save`, the request.

    Raises:
        InvalidShardingError: shards overlap, leave gaps or contradict each other. Nothing is written.
        CheckpointExistsError: a complete checkpoint is there and `overwrite` is False, or the directory cannot be
            replaced: it holds other checkpoints or a mount, or is the current directory. Nothing is written.
        RankFailedError: raised on all ranks when any rank failed; nothing is committed. Also when an earlier background
            save failed and nobody has asked for its result.
    """
    check_common_strategy(common_strategy)
    ranks = Ranks(process_group)
    settings = SaveSettings(
        process_group=process_group,
        validate_access_integrity=validate_access_integrity,
        validate_replicas=validate_replicas,
        durable=durable,
        max_inflight_bytes=max_inflight_bytes,
        progress=progress,
        on_report=on_report,
        sharded_strategy=sharded_strategy,
        overwrite=overwrite,
        content_metadata=content_metadata,
        preprocess_common=preprocess_common_before_consistancy_check,
    )
    plan = partial(plan_save, ranks, sharded_state_dict, checkpoint_dir)
    background_save.raise_pending_errors(ranks, process_group)
    if async_sharded_save:
        return background_save.async_request(ranks, background_save.prepare(ranks, settings, plan))
    # 1. Flatten the state dict; decide who writes what.
    planned = plan(settings)
    # 2. Write everything beside the target. 3. Commit.
    write_and_commit(ranks, planned)
    return None


def plan_save(
    ranks: Ranks,
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    settings: SaveSettings,
    *,
    has_target: bool = True,
) -> PlannedSave:
    """Decide everything about a save. The result refers to the tensors of the state dict.

    Without a target the location is not looked at, and common state, which may be another by then, is not compared.

    Collective operation: all ranks must call it.
    """
    timer = PhaseTimer(settings.verb, ranks.rank, str(checkpoint_dir))
    with timer.phase("describe"):
        with ranks.phase("check the arguments", decision=True, same=settings.of_all_ranks()):
            settings.check()
            location = timer.location = posix.resolve(checkpoint_dir) if has_target else ""
            strategy = save_strategy(settings.sharded_strategy).configure(settings)
            if ranks.is_coordinator and has_target:
                posix.check_target(location, settings.overwrite, os.fspath(checkpoint_dir))
        compares = settings.validate_access_integrity and ranks.size > 1 and has_target

        def flattened(described: objects.Described) -> tuple[list[Shard], CommonStateDict, StateDict, int]:
            shards, common = _flatten(objects.completed(described), settings.content_metadata)
            compared = common_state.comparable(common, settings.preprocess_common)
            return shards, common, compared, common_state.digest(compared) if compares else 0

        with ranks.phase("flatten the state dict") as vote:
            described = objects.describe(ranks, sharded_state_dict)
            shards, common, compared, digest = flattened(described)
            vote.number = digest ^ (described.digest() if ranks.size > 1 else 0)
        if not vote.are_equal:
            described = objects.united(ranks, described)
            with ranks.phase("flatten the state dict"):
                shards, common, compared, digest = flattened(described)
            if compares:
                common_state.check_differences(ranks, compared, digest)
        settings = replace(settings, notes={**settings.notes, **note_of_module(described.names)})
        sharded = {str(index): shard for index, shard in enumerate(shards)}
        if ranks.is_coordinator:
            sharded["common"] = ShardedObject(COMMON_KEY, common, (1,), (0,))
    with timer.phase("plan"):
        prepared = prepare_save(strategy, sharded)
    return PlannedSave(location, settings, CheckpointingConfig(strategy.backend, strategy.version), prepared, timer)


def _flatten(
    sharded_state_dict: ShardedStateDict, content_metadata: dict[str, Any] | None
) -> tuple[list[Shard], CommonStateDict]:
    shards, common, _ = flatten.split(sharded_state_dict)
    for shard in shards:
        if shard.key == COMMON_KEY:
            raise InvalidShardingError(f"The key {COMMON_KEY!r} is reserved: rename yours.")
    flatten.check_keys_are_different(sharded_state_dict, shards)
    if content_metadata is not None:
        if CONTENT_METADATA in sharded_state_dict:
            raise CheckpointingException(
                f"The state dict has an entry {CONTENT_METADATA!r} and content_metadata was given: both would be "
                "stored under this name. Rename the entry, or leave content_metadata out."
            )
        common = {**common, CONTENT_METADATA: _clean_metadata_for_serialization(content_metadata)}
    return shards, common

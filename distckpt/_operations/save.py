"""Save a state dict: describe it, plan, write and commit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from distckpt._base.errors import (
    CheckpointingException,
    InvalidShardingError,
    UnsupportedObjectError,
)
from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.options import FIGURES, SaveOptions, SaveReport, with_changes
from distckpt._commit import posix
from distckpt._commit.output import Output, new_output
from distckpt._format import codec
from distckpt._format.marker import (
    BUILT_IN,
    CheckpointingConfig,
    note_of_objects,
)
from distckpt._io.planned_shards import (
    EngineSettings,
    PlanVerdict,
    ReadyShards,
    encoded_vote,
    plan_cache,
    ready_to_plan,
)
from distckpt._io.save_shards import PreparedSave, plan_shards, prepare_shards
from distckpt._models import objects
from distckpt._operations.planned_save import (
    PlannedSave,
    SaveRequest,
    aim,
    raising_pending_errors,
    write_and_commit_to,
)
from distckpt._ranks.collectives import PhaseTimer, Ranks, collective
from distckpt._ranks.exchanges import pack_parts, unpack_parts
from distckpt._state import common_state, flatten
from distckpt._state.common_state import COMMON_KEY, CONTENT_METADATA
from distckpt._state.shards import Shard
from distckpt.mapping._wrappers import CommonStateDict, ShardedObject, ShardedStateDict, StateDict

if TYPE_CHECKING:
    from distckpt.strategies.base import SaveShardedStrategy


@collective()
@paused_garbage_collection()
def save(
    state_dict: ShardedStateDict,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    process_group: Any = None,
    content_metadata: dict[str, Any] | None = None,
    options: SaveOptions | None = None,
    **changes: Any,
) -> SaveReport:
    """Save a state dict with tensors distributed over ranks.

    Every byte is written once, by one of the ranks that hold it. A save is atomic: a reader sees a
    complete checkpoint or none, and an earlier one stays until it is replaced in one step.

        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 100}
        distckpt.save(state, "checkpoints/step_100")

    Collective operation: all ranks must call it. They exchange descriptions of shards and outcomes,
    no data.

    Args:
        state_dict: nested dicts, lists and tuples of modules, optimizers of their parameters,
            DTensors, other objects with `state_dict()` and `load_state_dict()` (data loaders and
            `RngState` are stored for each rank), `ShardedTensor`s, `ShardedObject`s,
            `ShardedTensorFactory`s, and values, which are common state and saved once.
            `LocalNonpersistentObject`s are not saved. Parameters of the module at `model` keep
            their names, keys of other modules are prefixed with their path. Neither the dict
            nor the objects are changed.
        path: a path or fsspec URL. It must not hold a complete checkpoint (see `overwrite`). Files
            of an unfinished save are moved aside, or removed from an object store when this save is
            complete. Other files stay. A directory that holds other checkpoints is refused.
        overwrite: replace an existing complete checkpoint. It stays until the new one is complete.
        process_group: the ranks that save together; None for the default group, or for this process
            alone when torch.distributed is not initialized.
        content_metadata: describes the content, see `Checkpoint.metadata`.
        options: further options.
        changes: options by keyword, such as `durable=False`; see `SaveOptions` for all of them.

    Returns:
        A report of the save, with sizes and durations; rank 0 logs it too.

    Raises:
        InvalidShardingError: shards overlap, leave gaps or contradict each other. Nothing is
            written.
        CheckpointExistsError: `overwrite` is False, and the path has a complete checkpoint or a
            Hugging Face model, which `load` would no longer find; or the directory cannot be
            replaced, since it holds other checkpoints or a mount, or is the current directory.
            Nothing is written.
        RankFailedError: raised on all ranks when any rank failed; nothing is committed. Once this
            save is committed, the error of an earlier background save is raised, unless its handle
            has already reported it.
    """
    ranks = Ranks(process_group)
    request = SaveRequest(
        path=path,
        process_group=process_group,
        overwrite=overwrite,
        content_metadata=content_metadata,
        options=with_changes(save, SaveOptions, options, changes),
    )
    with raising_pending_errors(ranks, request):
        return save_now(ranks, state_dict, request)


def save_now(ranks: Ranks, state_dict: ShardedStateDict, request: SaveRequest) -> SaveReport:
    """Save in this thread. Collective operation: all ranks must call it."""
    with new_output(ranks) as output:
        planned = plan_save(ranks, state_dict, request, output)
        return write_and_commit_to(ranks, planned, output)


class Target(NamedTuple):
    """The location of a save and its strategy; None is the built-in engine."""

    location: str
    strategy: SaveShardedStrategy | None
    engine: EngineSettings

    @property
    def config(self) -> CheckpointingConfig:
        if self.strategy is None:
            return CheckpointingConfig(BUILT_IN, 1)
        return CheckpointingConfig(self.strategy.backend, self.strategy.version)


@dataclass(frozen=True)
class LocalSave:
    """The part of this rank in a save, before the first exchange.

    Attributes:
        target: the target of the save.
        objects: the objects in the state dict.
        shards: shards of tensors and objects; those of the coordinator include the common state.
        common: the common state; the coordinator saves its own.
        compared: the part of the common state that ranks compare.
        digest: the digest of `compared`; 0 if ranks do not compare it.
        notes: about objects in the state dict, for the marker.
        ready: the shards for the built-in engine; None for a strategy, and without a plan.
    """

    target: Target
    objects: objects.Description
    shards: list[Shard]
    common: CommonStateDict
    compared: StateDict
    digest: int
    notes: Mapping[str, Any]
    ready: ReadyShards | None = None


def plan_save(
    ranks: Ranks,
    state_dict: ShardedStateDict,
    request: SaveRequest,
    output: Output | None = None,
) -> PlannedSave:
    """Plan a save; the result refers to the tensors of the state dict.

    Collective operation: all ranks must call it. If the ranks reuse their cached plan, this also
    creates the directory of the `output`.
    """
    timer = PhaseTimer(request.verb, ranks.rank, str(request.path))
    with timer.phase("describe"):
        own, verdict = describe_shards(ranks, state_dict, request, output, timer)
    with timer.phase("plan"):
        prepared = _prepare(ranks, own, verdict, request)
    request = replace(request, notes={**request.notes, **own.notes})
    return PlannedSave(own.target.location, request, own.target.config, prepared, timer)


def describe_shards(
    ranks: Ranks,
    state_dict: ShardedStateDict,
    request: SaveRequest,
    output: Output | None = None,
    timer: PhaseTimer | None = None,
) -> tuple[LocalSave, PlanVerdict]:
    """Describe a state dict in the same way on all ranks.

    The coordinator creates the directory of the output if the cached plans fit. The timer gets
    the location.

    Collective operation: all ranks must call it.
    """
    with ranks.telling("describe the state dict", same=request.of_all_ranks()) as exchange:
        own, exchange.payload = _describe_own(ranks, state_dict, request, timer)
    if output is not None:
        aim(output, own.target.location, request)
    with ranks.answering(exchange, "create directories"):
        if ranks.is_coordinator:
            verdict = PlanVerdict.of(exchange.payloads)
            place = b""
            if output is not None and verdict.reuses_plan:
                place = output.make(verdict.num_bytes)
            exchange.answer = pack_parts([verdict.to_bytes(), place])
    verdict_bytes, place = unpack_parts(exchange.answer)
    verdict = PlanVerdict.from_bytes(verdict_bytes)
    if output is not None and place:
        output.enter(place)
    if not verdict.is_same_state:
        if own.ready is not None and own.ready.plan is None:
            plan_cache(own.target.engine).keep(own.ready.structure, None)
        own = _united(ranks, own, request)
    return own, verdict


def _describe_own(
    ranks: Ranks, state_dict: ShardedStateDict, request: SaveRequest, timer: PhaseTimer | None
) -> tuple[LocalSave, bytes]:
    """Check the arguments and describe this rank's state dict, without exchanges.

    Return its description and its vote.
    """
    with ranks.part("check the arguments", decision=True):
        target = _check_target(ranks, request)
    if timer is not None:
        timer.location = target.location
    with ranks.part("flatten the state dict"):
        description, digest = _describe_objects(ranks, state_dict, request)
        own = _flatten(ranks, target, description, request)
    digest ^= own.digest
    if target.strategy is not None or not request.has_target:
        return own, encoded_vote(digest)
    with ranks.part("describe the shards"):
        ready = ready_to_plan(ranks, own.shards, request.options, target.engine)
    return replace(own, ready=ready), ready.vote(digest)


def _describe_objects(
    ranks: Ranks, state_dict: ShardedStateDict, request: SaveRequest
) -> tuple[objects.Description, int]:
    """Return the objects of this rank and their digest.

    Settings that cannot be stored are left out.
    """
    warns = request.options.unsupported == "warn"
    description = objects.describe_objects(ranks, state_dict, breaks_cycles=warns)
    try:
        return description, description.digest()
    except UnsupportedObjectError:
        if not warns:
            raise
    description = objects.with_storable_settings(description)
    return description, description.digest()


def _compares(ranks: Ranks, request: SaveRequest) -> bool:
    return request.options.validate_access_integrity and ranks.size > 1 and request.has_target


def _check_target(ranks: Ranks, request: SaveRequest) -> Target:
    request.check()
    location = ""
    if request.has_target:
        location = posix.resolve(request.path)
    strategy = None
    engine = EngineSettings()
    if request.options.strategy is not None:
        strategy, engine = _choose_strategy(request)
    if ranks.is_coordinator and request.has_target:
        path = os.fspath(request.path)
        posix.check_target(location, request.overwrite, path, is_step=request.is_step)
    return Target(location, strategy, engine)


def _choose_strategy(request: SaveRequest) -> tuple[SaveShardedStrategy | None, EngineSettings]:
    """Return the strategy of the caller and the engine's settings.

    The strategy is None for the built-in engine.
    """
    options = request.options
    from distckpt.strategies.base import choose_save_strategy

    strategy, engine = choose_save_strategy(options.strategy)
    if strategy is None:
        return None, engine
    figures = [name for name in FIGURES if getattr(options, name)]
    if figures:
        raise ValueError(f"{figures[0]}=True is for the built-in format: a strategy stores none.")
    return strategy.configure(options, request.process_group), engine


def _united(ranks: Ranks, own: LocalSave, request: SaveRequest) -> LocalSave:
    """Describe a state dict again, if it differs between ranks.

    Collective operation: all ranks must call it.
    """
    warns = request.options.unsupported == "warn"
    description = objects.united(ranks, own.objects, warns=warns)
    with ranks.phase("flatten the state dict"):
        own = _flatten(ranks, own.target, description, request)
    if _compares(ranks, request):
        from distckpt._state.common_differences import check_differences

        check_differences(ranks, own.compared, own.digest, warns)
    return own


def _flatten(
    ranks: Ranks, target: Target, description: objects.Description, request: SaveRequest
) -> LocalSave:
    """Take a state dict apart into shards and common state."""
    state_dict = objects.completed(description)
    warns = request.options.unsupported == "warn"
    split = flatten.split(state_dict, leaves_out=warns)
    shards, common, _ = split
    if any(shard.key == COMMON_KEY for shard in shards):
        raise InvalidShardingError(f"The key {COMMON_KEY!r} is reserved: rename yours.")
    modules = [place.path for place in description.places if place.kind is objects.Kind.MODULE]
    flatten.check_keys_are_different(split, modules)
    _check_metadata_entry(state_dict, request)
    if request.content_metadata is not None:
        metadata = common_state.storable_metadata(request.content_metadata)
        common = {**common, CONTENT_METADATA: metadata}
    compared = common_state.comparable(common, request.preprocess_common)
    digest = 0
    if _compares(ranks, request):
        try:
            digest = common_state.digest(compared)
        except UnsupportedObjectError:
            if not warns:
                raise
            # The coordinator logs the values that are left out when it encodes them.
            common = cast(CommonStateDict, codec.without_unsupported(common)[0])
            compared = common_state.comparable(common, request.preprocess_common)
            digest = common_state.digest(compared)
    if ranks.is_coordinator:
        shards = [*shards, ShardedObject(COMMON_KEY, common, (1,), (0,))]
    notes = note_of_objects(description.names, description.module_prefixes, description.schedulers)
    return LocalSave(target, description, shards, common, compared, digest, notes)


def _check_metadata_entry(state_dict: StateDict, request: SaveRequest) -> None:
    if CONTENT_METADATA in state_dict and not request.has_metadata_entry:
        raise CheckpointingException(
            f"The state dict has an entry {CONTENT_METADATA!r}, and what describes a checkpoint is "
            "stored under this name: rename the entry, or pass its value as content_metadata=."
        )


def _prepare(
    ranks: Ranks, own: LocalSave, verdict: PlanVerdict, request: SaveRequest
) -> PreparedSave:
    """Plan the writes of all ranks, with a strategy or without."""
    if own.ready is not None:
        return plan_shards(ranks, own.ready, verdict)
    if own.target.strategy is None:
        return prepare_shards(ranks, own.shards, request.options, own.target.engine)
    by_name = {str(number): shard for number, shard in enumerate(own.shards)}
    from distckpt.strategies.base import prepare_save

    return prepare_save(own.target.strategy, by_name)

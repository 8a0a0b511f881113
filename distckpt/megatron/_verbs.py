"""`save` and `load` with the arguments of Megatron Core."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, ParamSpec, TypeVar, overload

from distckpt._base.errors import CheckpointingException
from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.options import LoadOptions, SaveOptions, with_changes
from distckpt._io import background
from distckpt._operations import background_save
from distckpt._operations.background_save import BackgroundSave
from distckpt._operations.load import run_load
from distckpt._operations.load_request import LoadRequest
from distckpt._operations.planned_save import PlannedSave, SaveRequest, raising_pending_errors
from distckpt._operations.save import plan_save, save_now
from distckpt._ranks.collectives import Ranks, collective
from distckpt._state.strictness import StrictHandling, parse_strict_flag
from distckpt.mapping._wrappers import CommonStateDict, ShardedStateDict, StateDict
from distckpt.megatron.strategies.async_utils import AsyncRequest
from distckpt.rules._rule import Rule
from distckpt.strategies.base import LoadShardedStrategy, SaveShardedStrategy

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_OTHER_QUEUE = (
    "The save to {!r} was not written: its queue calls requests in processes of their own. Import "
    "AsyncCallsQueue from distckpt.megatron.strategies.async_utils where requests are scheduled, "
    "too."
)


def take_common_strategy(
    function: Callable[_Parameters, _Result],
) -> Callable[_Parameters, _Result]:
    """Let the fourth positional argument be `common_strategy`.

    It was that in Megatron Core up to 0.18.

    It is told from `validate_access_integrity`, which has that place since then, by its type.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> _Result:
        if len(args) > 3 and not isinstance(args[3], bool | int):
            kwargs["common_strategy"] = args[3]
            args = args[:3] + args[4:]
        return function(*args, **kwargs)

    return call


def _check_common_strategy(common_strategy: object) -> None:
    if common_strategy not in (None, ("torch", 1)):
        raise CheckpointingException(
            "common_strategy must be None or ('torch', 1), Megatron's default: common state is "
            "stored with the sharded objects by the sharded strategy."
        )


@collective()
@take_common_strategy
@paused_garbage_collection()
def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict]
    | None = None,
    content_metadata: dict[str, Any] | None = None,
    async_strategy: str | None = "nvrx",
    verify_integrity: bool = False,
    *,
    common_strategy: tuple[str, int] | None = None,
    overwrite: bool = False,
    process_group: Any = None,
    **changes: Any,
) -> AsyncRequest | None:
    """Save a distributed state dict, as `distckpt.save` does.

    Collective operation: all ranks must call it.

    Args:
        sharded_state_dict: see `distckpt.save`.
        checkpoint_dir: see `path` of `distckpt.save`; it need not exist.
        sharded_strategy: writes the shards; a strategy, `(backend, version)` of a registered one,
            or None for the built-in safetensors format.
        validate_access_integrity: see `SaveOptions`.
        async_sharded_save: return an `AsyncRequest` for an `AsyncCallsQueue` of
            `distckpt.megatron.strategies.async_utils`: the request copies the tensors when it is
            scheduled, and writes them in the background. `distckpt.async_save` is simpler to use.
        preprocess_common_before_consistancy_check: called with a copy of the common state; returns
            the value that ranks compare.
        content_metadata: describes the content, see `load_content_metadata`.
        async_strategy: accepted for compatibility.
        verify_integrity: accepted for compatibility: checksums are always written.
        common_strategy: accepted for compatibility, as the fourth positional argument, too; None or
            `("torch", 1)`.
        overwrite: replace a complete checkpoint that is there. It stays until the new one is
            complete.
        process_group: the ranks that save together; None for the default group, or for this process
            alone when torch.distributed is not initialized.
        changes: distckpt's own options by keyword, such as `durable=False`; see `SaveOptions` for
            all of them.

    Returns:
        None, as Megatron does; with `async_sharded_save`, the request.

    Raises:
        CheckpointingException: as `distckpt.save` does.
    """
    del async_strategy, verify_integrity
    _check_common_strategy(common_strategy)
    own = {"strategy": sharded_strategy, "validate_access_integrity": validate_access_integrity}
    ranks = Ranks(process_group)
    request = SaveRequest(
        path=checkpoint_dir,
        process_group=process_group,
        overwrite=overwrite,
        content_metadata=content_metadata,
        has_metadata_entry=content_metadata is None,
        options=with_changes(save, SaveOptions, None, {**own, **changes}),
        preprocess_common=preprocess_common_before_consistancy_check,
    )
    with raising_pending_errors(ranks, request):
        if async_sharded_save:
            return _request_of(ranks, sharded_state_dict, request)
        save_now(ranks, sharded_state_dict, request)
    return None


@overload
def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    *,
    strict: Literal[
        "return_unexpected",
        "return_all",
        StrictHandling.RETURN_UNEXPECTED,
        StrictHandling.RETURN_ALL,
    ],
    **others: Any,
) -> tuple[StateDict, set[str], set[str]]: ...


@overload
def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = False,
    process_group: Any = None,
    *,
    common_strategy: tuple[str, int] | None = None,
    rules: Sequence[Rule] = (),
    family: str | os.PathLike[str] | None = None,
    **changes: Any,
) -> StateDict: ...


@collective()
@take_common_strategy
@paused_garbage_collection()
def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = False,
    process_group: Any = None,
    *,
    common_strategy: tuple[str, int] | None = None,
    rules: Sequence[Rule] = (),
    family: str | os.PathLike[str] | None = None,
    **changes: Any,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load a checkpoint into the layout of a sharded state dict.

    It works as `distckpt.load` does.

    Collective operation: all ranks must call it.

    Args:
        sharded_state_dict: see `distckpt.load`. The dict itself is not changed.
        checkpoint_dir: see `path` of `distckpt.load`.
        sharded_strategy: reads the shards; a strategy, `(backend, version)` of a registered one, or
            None for the one that the checkpoint was saved with.
        validate_access_integrity: see `LoadOptions`. True, the default here, also refuses a part of
            a tensor in one process, as Megatron does; False loads it.
        strict: the treatment of keys that only the checkpoint or only the request has; a
            `StrictHandling` or its value. By default, modules are loaded whole: one that lacks a
            part that was saved for it is an error; "raise_unexpected" loads the parts it has. With
            rules or a family there are only these two.
        verify_integrity: compare checksums, which is the default: this overrules `verify=False`.
        process_group: the ranks that load together; None for the default group, or for this process
            alone when torch.distributed is not initialized.
        common_strategy: accepted for compatibility, as the fourth positional argument, too; None or
            `("torch", 1)`.
        rules: see `distckpt.load`.
        family: see `distckpt.load`.
        changes: distckpt's own options by keyword, such as `allow_dtype_cast=True`; see
            `LoadOptions` for all of them.

    Returns:
        The result of `distckpt.load`; when `strict` is one of the RETURN modes, a tuple `(state
        dict,
        missing keys, unexpected keys)`.

    Raises:
        CheckpointingException: as `distckpt.load` does.
    """
    _check_common_strategy(common_strategy)
    mode = parse_strict_flag(strict)
    own = {"strategy": sharded_strategy, "validate_access_integrity": validate_access_integrity}
    checks = {"verify": True} if verify_integrity else {}
    request = LoadRequest(
        path=checkpoint_dir,
        mode=mode,
        rules=rules,
        family=family,
        process_group=process_group,
        warns_of_values=mode is not StrictHandling.IGNORE_ALL,
        options=with_changes(load, LoadOptions, None, {**own, **changes, **checks}),
    )
    loaded, differences = run_load(Ranks(process_group), sharded_state_dict, request)
    if StrictHandling.requires_returning_mismatch_keys(mode):
        return loaded, set(differences.missing), set(differences.unexpected)
    return loaded


# ---- background saves as requests, which a queue of asynchronous calls schedules


def _request_of(
    ranks: Ranks,
    state_dict: ShardedStateDict,
    request: SaveRequest,
) -> AsyncRequest:
    """Plan a save, and return a request that Megatron's queue can schedule.

    Collective operation: all ranks must call it.
    """
    request = background_save.in_background(replace(request, verb="async_save"))
    planned = _without_limit_on_copies(plan_save(ranks, state_dict, request))
    save = BackgroundSave(ranks, planned)
    return AsyncRequest(
        async_fn=_write_request,
        async_fn_args=(save, None, os.getpid()),
        finalize_fns=[functools.partial(_check_written, save)],
        preload_fn=functools.partial(_stage_request, save, ranks),
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

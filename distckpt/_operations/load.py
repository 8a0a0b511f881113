"""Loads under any layout: find a checkpoint, describe targets, read, restore."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from distckpt._base.errors import LoadMismatchError
from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.messages import did_you_mean, summarize_keys
from distckpt._base.options import LoadOptions, LoadReport, publish, with_changes
from distckpt._base.tree import HOLE, dotted
from distckpt._checkpoint.consistent_read import read_attempts
from distckpt._checkpoint.opening import find_checkpoint
from distckpt._checkpoint.shards import filling
from distckpt._checkpoint.stored_values import COMMON_STATE
from distckpt._format.marker import schedulers_of
from distckpt._models.restore import Saved, restore_objects
from distckpt._operations.load_request import (
    Differences,
    LoadRequest,
    Targets,
    check_targets,
    describe_targets,
)
from distckpt._operations.load_values import (
    changes_of,
    refuse_absent,
    report_absent_values,
    tensor_paths,
    united,
    warn_of_unchanged,
)
from distckpt._operations.shard_source import ShardSource, source_of
from distckpt._ranks.collectives import Figures, PhaseTimer, Ranks, collective
from distckpt._state import flatten
from distckpt._state.common_state import CONTENT_METADATA
from distckpt._state.shards import Shard
from distckpt._state.strictness import StrictHandling
from distckpt._storage import locations
from distckpt.mapping._wrappers import ShardedObject, ShardedStateDict, StateDict
from distckpt.rules._rule import Rule

Strict = Literal["complete", "raise", "report"]
"""Handling of keys that only the checkpoint or only the request has."""

_MODES = {
    "complete": StrictHandling.ASSUME_OK_UNEXPECTED,
    "raise": StrictHandling.RAISE_ALL,
    "report": StrictHandling.LOG_ALL,
}
_WITH_RULES = {
    "complete": StrictHandling.ASSUME_OK_UNEXPECTED,
    "report": StrictHandling.RAISE_UNEXPECTED,
}


@collective()
@paused_garbage_collection()
def load(
    state_dict: ShardedStateDict,
    path: str | os.PathLike[str],
    *,
    strict: Strict = "complete",
    rules: Sequence[Rule] = (),
    family: str | os.PathLike[str] | None = None,
    process_group: Any = None,
    options: LoadOptions | None = None,
    **changes: Any,
) -> StateDict:
    """Load a checkpoint under the layout of a sharded state dict.

    It may have been saved under any layout.

        state = {"model": model, "optimizer": optimizer, "step": 0}
        distckpt.load(state, "checkpoints/step_100")
        step = state["step"]

    Collective operation: all ranks must call it. Rank 0 reads the manifest and sends it to the
    other ranks; every rank reads its own regions, or receives them from a rank that reads the same
    regions (see `LoadOptions.share_reads`).

    Args:
        state_dict: describes the values to load: objects as in `save`, which are filled and
            returned; `ShardedTensor`s (filled in place, or allocated on CPU when their data is
            None), `ShardedObject`s and `ShardedTensorFactory`s, which stay in the dict, so that it
            can be used for the next load. `LocalNonpersistentObject`s come back unwrapped. Other
            values, nested ones included, are replaced in the dict by the stored ones once nothing
            can fail any more; plain tensors, lists and dicts without shards and objects are filled
            in place. Entries of the dict for which nothing is stored are an error, unless they are
            None. Where a value next to shards or objects is in a tuple or a frozen dict, which
            cannot be changed, a warning says so.
        path: a path or fsspec URL of a checkpoint, of a Hugging Face directory, of a folder of
            shards that torch's `HuggingFaceStorageWriter(save_distributed=True)` or NeMo Automodel
            wrote, or of a checkpoint that `torch.distributed.checkpoint.save`, Megatron Core
            (`torch_dist`) or DeepSpeed wrote.
        strict: "complete" loads all that is requested, and modules whole: a key that is not stored
            is an error, as is a module that lacks a part of its saved state; keys that optimizers
            leave out are in `missing` of the `LoadReport`. "raise" also raises for every key of the
            checkpoint that no rank requests, and for tensors that are tied and were not when they
            were saved. "report" loads the keys that both have, warns about the rest and names it in
            `missing` and `unexpected` of the `LoadReport`; with rules or a family, all that is
            requested must be stored.
        rules: how the requested tensors are made from the stored ones, when the checkpoint has
            other names or shapes (a Hugging Face checkpoint, see `distckpt.rules`).
        family: afterwards, the rules of the model's family, for names of Megatron Core or of
            transformers in memory: "auto" reads the `config.json` of the checkpoint, a path another
            one, see `distckpt.families`.
        process_group: the ranks that load together; None for the default group, or for this process
            alone when torch.distributed is not initialized.
        options: further options.
        changes: options by keyword, such as `verify=False`; see `LoadOptions` for all of them.

    Returns:
        The structure of `state_dict` with loaded values, also for shards and values in tuples,
        together with all common state, including entries that were not requested, in which
        `UnknownObject`s stand for objects of classes that are not registered here.

    Raises:
        CheckpointNotFoundError: no complete checkpoint is there.
        LoadMismatchError: keys, shapes, dtypes or object grids do not match.
        UnsupportedObjectError: a requested object is of a class that is not registered.
        CorruptCheckpointError: files are missing, cut off or changed.
        RankFailedError: raised on all ranks when any rank failed. Errors after the reading began
            say that tensors may be partly filled.
    """
    request = LoadRequest(
        path=path,
        mode=_mode_of(strict, has_rules=bool(rules) or family is not None),
        strict=strict,
        rules=rules,
        family=family,
        process_group=process_group,
        fills_values=True,
        options=with_changes(load, LoadOptions, options, changes),
    )
    loaded, _ = run_load(Ranks(process_group), state_dict, request)
    # See `Checkpoint.metadata`. A module that is given in place of a dict comes back as it is.
    if isinstance(state_dict, dict) and CONTENT_METADATA not in state_dict:
        loaded.pop(CONTENT_METADATA, None)
    return loaded


def _mode_of(strict: Strict, has_rules: bool) -> StrictHandling:
    modes = _WITH_RULES if has_rules else _MODES
    if isinstance(strict, str) and strict in modes:
        return modes[strict]
    hint = did_you_mean(str(strict), modes)
    if isinstance(strict, bool):
        hint = f" (torch's {strict} is {'raise' if strict else 'report'!r} here)"
    where = "With rules or a family, strict" if has_rules else "strict"
    raise ValueError(f"{where} is one of {', '.join(map(repr, modes))}, got {strict!r}{hint}.")


def run_load(
    ranks: Ranks, state_dict: ShardedStateDict, request: LoadRequest
) -> tuple[StateDict, Differences]:
    """Load a state dict as a request says, see `load`.

    Collective operation: all ranks must call it.
    """
    with ranks.phase("check the arguments", same=request.of_all_ranks()):
        request.check()
        location = locations.normalize(request.path)
    options = request.options
    timer = PhaseTimer("load", ranks.rank, location)
    for attempt in read_attempts(ranks, location):
        with attempt, _putting_back(request):
            with timer.phase("plan"):
                found = find_checkpoint(ranks, location, verify=options.verify, attempt=attempt)
                choose_source = partial(source_of, ranks, found, options, request.process_group)
                targets = describe_targets(ranks, state_dict, request, choose_source)
                differences = check_targets(ranks, targets)
            with timer.phase("read") as details:
                read = read_targets(ranks, targets, differences)
                details["bytes"] = read.num_bytes
        # After a change, ranks may see different files for a while: each reads its own.
        options = replace(options, share_reads="off")
    with filling():
        restored, absent_of_all, figures = restore(ranks, state_dict, read, timer)
    report = LoadReport(
        location,
        *figures,
        missing=differences.missing | read.lost,
        unexpected=differences.unexpected_of_all | absent_of_all,
        **read.targets.source.figures,
    )
    publish(report, options.on_report, ranks.is_coordinator)
    return restored, differences


@contextlib.contextmanager
def _putting_back(request: LoadRequest) -> Iterator[None]:
    """On failure, put modules back on the meta device.

    Another load must not take their memory for values.
    """
    try:
        yield
    except BaseException:
        if request.made:
            from distckpt._models.materialize import put_back

            put_back(request.made)
            request.made.clear()
        raise


@dataclass(frozen=True)
class _Read:
    """The values that were read for the targets of a load.

    Attributes:
        targets: targets with their tensors filled.
        loaded: the state dict, with values instead of objects.
        num_bytes: size of the tensors.
        lost: keys whose values were overwritten on any rank.
    """

    targets: Targets
    loaded: StateDict
    num_bytes: int
    lost: frozenset[str]


def read_targets(ranks: Ranks, targets: Targets, differences: Differences) -> _Read:
    """Fill the tensors of a load's targets; objects and values are still as they were.

    Collective operation: all ranks must call it.
    """
    source = targets.source
    split = targets.split
    with ranks.phase("load") as vote:
        absent = _absent_keys(targets, differences)
        requested: dict[int, Shard] = {}
        for number, shard in enumerate(split.shards):
            if shard.key not in absent and number not in targets.ties:
                requested[number] = shard
        with _naming_plain_tensors(ranks, source):
            *read, common = source.read([*requested.values(), COMMON_STATE], targets.rules)
        num_bytes = sum(value.nbytes for value in read if isinstance(value, torch.Tensor))
        by_number = dict(zip(requested, read, strict=True))
        values = []
        for number, shard in enumerate(split.shards):
            number = targets.ties.get(number, number)
            values.append(by_number.get(number, absent.get(shard.key, HOLE)))
        loaded = flatten.put_together(split.skeleton, values, common)
        refuse_absent(targets, loaded)
        vote.number = len(source.overwritten)
    lost = _overwritten_of_all(ranks, targets) if vote.largest else frozenset()
    return _Read(targets, loaded, num_bytes, lost)


def _absent_keys(targets: Targets, differences: Differences) -> Mapping[str, Any]:
    """Return the values for shards that are not read, by key."""
    absent: dict[str, Any] = dict.fromkeys(differences.unexpected, HOLE)
    if targets.request.family is None:
        return absent
    # Objects of Transformer Engine, which no Hugging Face directory holds; modules accept None for
    # them.
    for shard in targets.split.shards:
        if isinstance(shard, ShardedObject) and shard.key.endswith("_extra_state"):
            absent.setdefault(shard.key, None)
    return absent


@contextlib.contextmanager
def _naming_plain_tensors(ranks: Ranks, source: ShardSource) -> Iterator[None]:
    """Say in errors of absent keys that common state has the tensors."""
    try:
        yield
    except LoadMismatchError as error:
        if ranks.size > 1 and not ranks.is_known_to_all(error):
            raise
        common = source.read_objects([COMMON_STATE])[0]
        names = {dotted(path[1:]): str(path[0]) for path in tensor_paths(common)}
        place = next((names[key] for key in sorted(error.unexpected) if key in names), None)
        if place is None:
            raise
        advice = (
            f"The common state has plain tensors of these names at {place!r}, which each rank gets "
            f"whole: module.load_state_dict(distckpt.open(path).common_state[{place!r}]) loads "
            "them."
        )
        if source.is_live:
            advice = (
                f"Plain tensors of these names are given at {place!r}: give the module itself "
                "there, in the place of its state_dict()."
            )
        raise LoadMismatchError(f"{error} {advice}", error.missing, error.unexpected) from error


def restore(
    ranks: Ranks,
    state_dict: ShardedStateDict,
    read: _Read,
    timer: PhaseTimer,
    moving: str = "read",
) -> tuple[StateDict, frozenset[str], Figures]:
    """Fill the objects and values of a state dict.

    Return it, the paths of values for which no rank has got anything, and the figures of all ranks.
    `moving` is the phase in which the bytes came. Collective operation: all ranks must call it.
    """
    targets = read.targets
    request = targets.request
    source = targets.source
    loaded = read.loaded
    absent_of_all = report_absent_values(ranks, targets, loaded)
    with ranks.telling("restore the objects of the state dict") as message:
        saved = Saved(source.location, schedulers_of(source.marker), source.shared_value)
        values = targets.split.common if request.fills_values else {}
        changes = changes_of(state_dict, values, loaded)
        restored = restore_objects(targets.resolved, loaded, saved, request.asks_for_all)
        message.payload = timer.figures(read.num_bytes)
    with ranks.answering(message, "report"):
        if ranks.is_coordinator:
            message.answer = json.dumps(timer.united(message.payloads, moving)).encode()
    # No rank has failed. Changes that cannot fail any more come last: values are changed all, or
    # none.
    changes.apply()
    if ranks.is_coordinator:
        warn_of_unchanged(changes, source.location)
    return restored, absent_of_all, tuple(json.loads(message.answer))


def _overwritten_of_all(ranks: Ranks, targets: Targets) -> frozenset[str]:
    """Name tensors that were overwritten on any rank.

    They are tied now, and were not tied when they were saved. LoadMismatchError where all of the
    checkpoint is to be loaded.
    """
    source = targets.source
    lost = united(ranks, source.overwritten)
    if targets.request.mode is StrictHandling.RAISE_ALL:
        raise LoadMismatchError(
            f"The checkpoint {source.location!r} holds {summarize_keys(lost)} with other values "
            "than the tensors of the state dict that they are tied to: what was saved was not "
            "tied. Untie them, or pass strict='complete' (StrictHandling.ASSUME_OK_UNEXPECTED in "
            "distckpt.megatron) to have the values of the others.",
            missing=lost,
        )
    return lost

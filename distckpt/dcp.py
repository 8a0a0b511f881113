"""The functions of torch.distributed.checkpoint, for programs that change their import and nothing else.

    import distckpt.dcp as dcp  # was: import torch.distributed.checkpoint as dcp

    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id="checkpoints/step_100")
    dcp.load({"app": AppState(model, optimizer)}, checkpoint_id="checkpoints/step_100")

Checkpoints are distckpt's own: tensors are stored under the dotted keys that PyTorch gives them, other values as common
state at their places in the nested dict. `load` reads those that PyTorch wrote, too. What differs is told in
`docs/migrating-from-dcp.md`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any, NamedTuple

import torch

from distckpt import serialization
from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.memory import paused_garbage_collection
from distckpt._base.messages import did_you_mean, summarize_keys
from distckpt._base.public import set_public_home
from distckpt._dcp_api import arguments, shards, tree
from distckpt._format.codec import HOLE
from distckpt._models.dtensor import local_part
from distckpt._operations.consistent_read import find_checkpoint, noticing_removal, read_unchanged
from distckpt._operations.load import stored_keys
from distckpt._ranks.collectives import Ranks, lone_group
from distckpt._state import flatten
from distckpt._state.common_state import COMMON_KEY
from distckpt.mapping import ShardedBase, ShardedObject
from distckpt.serialization import SaveHandle, SaveReport
from distckpt.strategies.base import Options
from distckpt.strategies.defaults import load_strategy

__all__ = ["async_save", "load", "save"]

set_public_home(globals())


def __getattr__(name: str) -> Any:
    return arguments.attribute(name)


# ---- saving


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> SaveReport:
    """Save a state dict that `torch.distributed.checkpoint.save` takes.

        dcp.save({"model": model.state_dict(), "step": 100}, checkpoint_id="checkpoints/step_100")

    A checkpoint that is there is replaced, as PyTorch's writer does by default; it stays until the new one is complete.

    Collective: every rank of the process group calls, unless `no_dist` is set.

    Args:
        state_dict: nested dicts and lists of DTensors, other tensors (the same on all ranks that have them), and values
            that are saved as objects. Values at the top that have `state_dict` and `load_state_dict` are asked for
            their state.
        checkpoint_id: a path or fsspec URL.
        storage_writer: a `FileSystemWriter` or `FsspecWriter` of PyTorch, whose path is used when `checkpoint_id` is
            not given; its `overwrite` and `sync_files` are used too.
        planner: None or a `DefaultSavePlanner`.
        process_group: the ranks that save together; None for the default group.
        no_dist: save from this process alone.
        use_collectives: must be True.

    Returns:
        What was saved and how long it took (PyTorch returns its metadata).

    Raises:
        InvalidShardingError: a DTensor is a sum that is yet to be made, or two values have one key.
        UnsupportedObjectError: a value is of a class that is not registered, see `distckpt.register_object_type`.
        CheckpointExistsError: a checkpoint is there and the writer's `overwrite` is False.
        RankFailedError: raised on all ranks when any rank failed; nothing is committed.
    """
    arguments.check_planner(planner, "DefaultSavePlanner")
    return serialization.save(
        **_arguments(state_dict, checkpoint_id, storage_writer, process_group, no_dist, use_collectives)
    )


def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    async_checkpointer_type: Any = None,
    async_stager: None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[SaveReport]:
    """Save like `save`, in the background. Tensors may change as soon as this returns.

        future = dcp.async_save(state, checkpoint_id="checkpoints/step_100")
        ...              # train on
        future.result()  # raises what went wrong on any rank

    Collective: every rank of the process group calls, unless `no_dist` is set.

    Args:
        state_dict: see `save`.
        checkpoint_id: see `save`.
        storage_writer: see `save`.
        planner: see `save`.
        process_group: see `save`.
        async_checkpointer_type: accepted, and means nothing: no process is started.
        async_stager: must be None: tensors are copied before this returns.
        no_dist: see `save`.
        use_collectives: must be True.

    Returns:
        The future of what `save` returns. When nobody asks it and the save fails, the next save raises the error.

    Raises:
        CheckpointingException: as `save` does, for what is found before anything is written.
    """
    del async_checkpointer_type
    arguments.check_planner(planner, "DefaultSavePlanner")
    if async_stager is not None:
        raise CheckpointingException(
            f"async_stager ({type(async_stager).__name__}) must be None: distckpt copies what it saves itself, into "
            "memory that it uses again. Leave it out; distckpt.async_save can limit that memory."
        )
    handle = serialization.async_save(
        **_arguments(state_dict, checkpoint_id, storage_writer, process_group, no_dist, use_collectives)
    )
    return _SaveFuture(handle)


class _SaveFuture(Future[SaveReport]):
    """A save that goes on in the background, as a future. It cannot be cancelled."""

    def __init__(self, handle: SaveHandle) -> None:
        super().__init__()
        self._handle = handle
        self.set_running_or_notify_cancel()
        handle.when_done(self._finish)

    def _finish(self) -> None:
        error = self._handle.error()
        if error is None:
            self.set_result(self._handle.result())
        else:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> SaveReport:
        try:
            return super().result(timeout)
        finally:
            self._note_asked()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            self._note_asked()

    def _note_asked(self) -> None:
        self._handle.was_asked = self._handle.was_asked or self.done()


def _arguments(
    state_dict: Mapping[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    storage_writer: Any,
    process_group: Any,
    no_dist: bool,
    use_collectives: bool,
) -> dict[str, Any]:
    """Return the arguments of `distckpt.save` that say the same."""
    if not use_collectives:
        raise CheckpointingException(
            "use_collectives must be True: ranks agree on what is saved and commit it together. To save from one "
            "process alone pass no_dist=True."
        )
    location = arguments.saved_location(checkpoint_id, storage_writer)
    group = lone_group() if no_dist else process_group
    ranks = Ranks(group)
    with ranks.phase("collect the state dicts"):
        asked = _asked(state_dict)
    return {
        "sharded_state_dict": shards.sharded(asked, ranks),
        "checkpoint_dir": location,
        "overwrite": getattr(storage_writer, "overwrite", True),
        "durable": getattr(storage_writer, "sync_files", True),
        "process_group": group,
    }


# ---- loading


@paused_garbage_collection()
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> None:
    """Load into a state dict that `torch.distributed.checkpoint.load` takes.

        state = {"model": model.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id="checkpoints/step_100")

    Tensors are filled in place (and converted to the dtypes that they have), other values are replaced in the dicts and
    lists that hold them. Values at the top that have `state_dict` and `load_state_dict` are asked for their state and
    given what was loaded.

    Collective: every rank of the process group calls, unless `no_dist` is set.

    Args:
        state_dict: says what to load; changed in place.
        checkpoint_id: a path or fsspec URL of what `distckpt.load` reads, checkpoints that PyTorch wrote included.
        storage_reader: a reader of PyTorch for files, whose path is used when `checkpoint_id` is not given.
        planner: None or a `DefaultLoadPlanner`; with its `allow_partial_load`, what is not stored stays as it is.
        process_group: the ranks that load together; None for the default group.
        no_dist: load into this process alone.

    Raises:
        CheckpointNotFoundError: no complete checkpoint is there.
        LoadMismatchError: something that is asked for is not in the checkpoint, or has another shape there. Nothing is
            changed.
        CorruptCheckpointError: files are missing, cut off or changed.
        RankFailedError: raised on all ranks when any rank failed. Tensors may be partly filled then.
    """
    arguments.check_planner(planner, "DefaultLoadPlanner")
    location = arguments.loaded_location(checkpoint_id, storage_reader)
    group = lone_group() if no_dist else process_group
    ranks = Ranks(group)
    # 1. Take the state dict apart.
    with ranks.phase("flatten the state dict"):
        target = _asked(state_dict, in_order=True)
        leaves = tree.leaves(target)
    # 2. Compare it with the checkpoint; fill the tensors.
    is_strict = not getattr(planner, "allow_partial_load", False)
    others = read_unchanged(ranks, location, lambda marker: _read(ranks, group, location, marker, leaves, is_strict))
    # 3. Put the other values in their places: nothing can go wrong any more.
    for path, value in others.items():
        tree.put(target, path, value)
    for key, value in target.items():
        if _is_stateful(state_dict[key]):
            state_dict[key].load_state_dict(value)
        else:
            state_dict[key] = value


def _read(
    ranks: Ranks,
    process_group: Any,
    checkpoint_dir: str | os.PathLike[str],
    marker: dict[str, Any] | None,
    leaves: Sequence[tree.Leaf],
    is_strict: bool,
) -> dict[tree.Path, Any]:
    """Fill the tensors among some values from a checkpoint, and return the others, by path.

    Collective: every rank calls.
    """
    location, marker = find_checkpoint(ranks, checkpoint_dir, marker)
    options = Options(process_group, allow_dtype_cast=True, marker=marker)
    strategy = load_strategy(None, marker, location).configure(options)
    known = stored_keys(ranks, strategy, location)
    with ranks.phase("read common state"):
        common = strategy.load({"common": ShardedObject(COMMON_KEY, None, (1,), (0,))}, location)["common"]
    with ranks.phase("compare with the checkpoint"):
        request = _request(leaves, known, common, ranks.rank, location)
    if is_strict:
        _refuse_absent(ranks, request.absent, known, location)
    with ranks.phase("load"), noticing_removal(ranks, location):
        tensors, _, _ = flatten.split({"tensors": request.tensors})
        wanted: list[Any] = [*request.objects.values(), *tensors]
        values = strategy.load({str(i): shard for i, shard in enumerate(wanted)}, location)
    return {**request.common, **{path: values[str(i)] for i, path in enumerate(request.objects)}}


class _Request(NamedTuple):
    """What a rank asks for.

    Attributes:
        tensors: shards to fill.
        objects: to read, by path.
        common: values that common state has, by path.
        absent: keys that are not stored.
    """

    tensors: list[ShardedBase]
    objects: dict[tree.Path, ShardedBase]
    common: dict[tree.Path, Any]
    absent: list[str]


def _request(leaves: Sequence[tree.Leaf], known: set[str], common: Any, rank: int, location: str) -> _Request:
    request = _Request([], {}, {}, [])
    by_key = cache(lambda: tree.by_key(common))
    for key, path, value in leaves:
        if key in known:
            if isinstance(value, torch.Tensor):
                _check_memory(key, value)
                request.tensors.extend(shards.shards_of(key, value, rank))
            else:
                (request.objects[path],) = shards.shards_of(key, None, rank)
            continue
        in_common = tree.find(common, path)
        if in_common is HOLE:
            in_common = by_key().get(key, HOLE)
        if in_common is HOLE:
            request.absent.append(key)
        elif isinstance(value, torch.Tensor):
            kind = "part of an object" if isinstance(in_common, torch.Tensor) else f"of type {type(in_common).__name__}"
            raise LoadMismatchError(
                f"Key {key!r} is {kind} in {location!r} and was asked for as a tensor. Ask for it as it was saved; "
                "distckpt.load_common_state_dict shows what is not stored as tensors.",
                unexpected=[key],
            )
        else:
            request.common[path] = in_common
    return request


def _check_memory(key: str, tensor: torch.Tensor) -> None:
    if local_part(tensor).is_meta:
        raise CheckpointingException(
            f"{key!r} is on the meta device, where nothing can be loaded: call model.to_empty(device=...) first."
        )


def _refuse_absent(ranks: Ranks, absent: Sequence[str], known: set[str], location: str) -> None:
    """Raise the same error on every rank when any of them asks for what is not stored.

    Collective: every rank calls.
    """
    if ranks.all_equal(len(absent)) and not absent:
        return
    asked = sorted(set().union(*map(json.loads, ranks.all_gather(json.dumps(absent).encode()))))
    raise LoadMismatchError(
        f"Not in the checkpoint {location!r}: {summarize_keys(asked)}{did_you_mean(asked[0], known)}. Correct the "
        "state dict, or pass planner=DefaultLoadPlanner(allow_partial_load=True), which leaves these as they are.",
        unexpected=asked,
    )


# ---- values that have state dicts of their own


def _asked(state_dict: Mapping[str, Any], *, in_order: bool = False) -> dict[str, Any]:
    """Return a state dict in which the values that have a state dict of their own are replaced by that."""
    if not isinstance(state_dict, Mapping):
        raise CheckpointingException(
            f"state_dict is a {type(state_dict).__name__} and must be a dict: pass " + '{"model": model}, say.'
        )
    values = ((key, state_dict[key]) for key in (sorted(state_dict) if in_order else state_dict))
    return {key: value.state_dict() if _is_stateful(value) else value for key, value in values}


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")

"""Load with the arguments of torch.distributed.checkpoint."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.messages import did_you_mean, summarize_keys
from distckpt._base.options import LoadOptions
from distckpt._base.tree import HOLE, Position, at, compacted
from distckpt._checkpoint.consistent_read import read_attempts
from distckpt._checkpoint.opening import open_checkpoint
from distckpt._checkpoint.shards import ReadSettings, load_shards
from distckpt._checkpoint.stored_values import load_common_state
from distckpt._format.codec import refuse_unknown
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._models.dtensor import local_part
from distckpt._plan.decoded import find
from distckpt._plan.load import forgotten
from distckpt._ranks.collectives import Ranks, collective
from distckpt._state import flatten
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage import locations
from distckpt.dcp import _arguments as arguments
from distckpt.dcp import _state_dicts as state_dicts
from distckpt.mapping._base import ShardedBase


@collective(arguments.group_of)
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

    Tensors are filled in place (and converted to the dtypes that they have), other values are
    replaced in the dicts and lists that hold them. Values at the top that have `state_dict` and
    `load_state_dict` are loaded through these.

    Collective operation: all ranks of the process group must call it, unless `no_dist` is set.

    Args:
        state_dict: values to load into; changed in place.
        checkpoint_id: a path or fsspec URL of any checkpoint that `distckpt.load` reads, PyTorch's
            own included.
        storage_reader: a reader of PyTorch for files, whose path is used when `checkpoint_id` is
            not given.
        planner: None or a `DefaultLoadPlanner`; with its `allow_partial_load`, values that are not
            stored are left as they are.
        process_group: the ranks that load together; None for the default group.
        no_dist: load into this process alone.

    Raises:
        CheckpointNotFoundError: no complete checkpoint is there.
        LoadMismatchError: a requested key is not in the checkpoint, or has another shape there.
            Nothing is changed.
        CorruptCheckpointError: files are missing, cut off or changed.
        RankFailedError: raised on all ranks when any rank failed. Tensors may be partly filled
            then.
    """
    ranks = Ranks(arguments.group_of(process_group=process_group, no_dist=no_dist))
    # 1. Flatten the state dict.
    with ranks.phase("flatten the state dict"):
        arguments.check_planner(planner, "DefaultLoadPlanner")
        location = locations.normalize(
            arguments.location_in(checkpoint_id, storage_reader, "storage_reader")
        )
        target = state_dicts.unwrap_stateful(state_dict, in_order=True)
        leaves = state_dicts.leaves(target)
    # 2. Compare it with the checkpoint; fill the tensors.
    is_strict = not getattr(planner, "allow_partial_load", False)
    for attempt in read_attempts(ranks, location):
        with attempt:
            stored = open_checkpoint(ranks, location, attempt=attempt)
            others = _read(ranks, stored, leaves, is_strict)
    # 3. Put the other values in their places; nothing can fail any more.
    for path, value in others.items():
        *above, last = path
        container: Any = target
        for part in above:
            container = container[part]
        container[last] = value
    for key, value in target.items():
        if state_dicts.is_stateful(state_dict[key]):
            state_dict[key].load_state_dict(value)
        else:
            state_dict[key] = value


def _read(
    ranks: Ranks, stored: StoredCheckpoint, leaves: Sequence[state_dicts.Leaf], is_strict: bool
) -> dict[Position, Any]:
    """Fill the tensors among leaves, and return other values by path.

    Collective operation: all ranks must call it.
    """
    with ranks.phase("read common state"):
        keys = {*stored.manifest.key_index, *find(stored)} - {COMMON_KEY}
        common = load_common_state(stored)
        common_by_key = functools.cache(partial(state_dicts.by_key, common))
    tensors: list[ShardedBase] = []
    objects: dict[Position, ShardedBase] = {}
    values: dict[Position, Any] = {}
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    missing: list[str] = []
    with ranks.phase("compare with the checkpoint"):
        for leaf in leaves:
            is_tensor = isinstance(leaf.value, torch.Tensor)
            if leaf.key in keys and is_tensor:
                tensors += _shards_of(leaf, ranks.rank)
                continue
            if leaf.key in keys:
                (objects[leaf.path],) = state_dicts.shards_of(leaf.key, None, ranks.rank)
                continue
            value = compacted(at(common, leaf.path, HOLE))
            if value is HOLE:
                value = common_by_key().get(leaf.key, HOLE)
            if value is HOLE:
                missing.append(leaf.key)
            elif is_tensor:
                copies += _copies_of(leaf, value, ranks.rank, stored.location)
            else:
                refuse_unknown(value)
                values[leaf.path] = value
    if is_strict:
        _refuse_missing(ranks, missing, keys, stored)
    settings = ReadSettings(LoadOptions(allow_dtype_cast=True))
    with ranks.phase("load"):
        shards, _, _ = flatten.split({"tensors": tensors})
        requested: list[Any] = [*objects.values(), *shards]
        loaded = load_shards(ranks, stored, requested, settings)
        for target, value in copies:
            target.detach().copy_(value)
    return {**values, **dict(zip(objects, loaded, strict=False))}


def _shards_of(leaf: state_dicts.Leaf, rank: int) -> list[Any]:
    if local_part(leaf.value).is_meta:
        raise CheckpointingException(
            f"{leaf.key!r} is on the meta device, which has no memory to load into: call "
            "model.to_empty(device=...) first."
        )
    return list(state_dicts.shards_of(leaf.key, leaf.value, rank))


def _copies_of(
    leaf: state_dicts.Leaf, value: Any, rank: int, location: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tensors to fill from common state, with their values."""
    if not isinstance(value, torch.Tensor):
        raise LoadMismatchError(
            f"Key {leaf.key!r} is of type {type(value).__name__} in {location!r} but a "
            "tensor was requested. Request it as it was saved; "
            "distckpt.open(path).common_state shows what is not stored as tensors.",
            unexpected=[leaf.key],
        )
    for shard in _shards_of(leaf, rank):
        yield shard.data, _part_of(value, shard, location)


def _part_of(value: torch.Tensor, shard: Any, location: str) -> torch.Tensor:
    """Return the region of a whole tensor that a shard holds."""
    if tuple(value.shape) != tuple(shard.global_shape):
        raise LoadMismatchError(
            f"Key {shard.key!r} has shape {tuple(value.shape)} in {location!r} but "
            f"{tuple(shard.global_shape)} was requested.",
            unexpected=[shard.key],
        )
    sizes = zip(shard.global_offset, shard.local_shape, strict=True)
    return value[tuple(slice(offset, offset + size) for offset, size in sizes)]


def _refuse_missing(
    ranks: Ranks, missing: Sequence[str], keys: Collection[str], stored: StoredCheckpoint
) -> None:
    """Raise one error on all ranks if any requests missing keys.

    Collective operation: all ranks must call it.
    """
    if ranks.all_equal(len(missing)) and not missing:
        return
    keys_of_ranks = map(json.loads, ranks.all_gather(json.dumps(missing).encode()))
    requested = sorted(set().union(*keys_of_ranks))
    about_index = forgotten(stored, requested)
    advice = "Correct"
    if about_index:
        advice = f"{about_index} Correct"
    raise LoadMismatchError(
        f"Not in the checkpoint {stored.location!r}: "
        f"{summarize_keys(requested)}{did_you_mean(requested[0], keys)}. {advice} the "
        "state dict, or pass planner=DefaultLoadPlanner(allow_partial_load=True), which leaves "
        "them as they are.",
        unexpected=requested,
    )

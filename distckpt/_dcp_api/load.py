"""Load with the arguments of torch.distributed.checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.interrupts import operation
from distckpt._base.memory import paused_garbage_collection
from distckpt._base.messages import did_you_mean, summarize_keys
from distckpt._dcp_api import arguments, shards, tree
from distckpt._format.codec import HOLE, refuse_unknown
from distckpt._mapping.wrappers import ShardedBase, ShardedObject
from distckpt._models.dtensor import local_part
from distckpt._operations.consistent_read import find_checkpoint, noticing_removal, read_unchanged
from distckpt._operations.load_request import stored_entries
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.exchanges import lone_group
from distckpt._state import flatten
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage import locations
from distckpt.strategies.base import Options
from distckpt.strategies.defaults import load_strategy


@operation
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
        checkpoint_id: a path or fsspec URL of what `distckpt.load` reads, checkpoints that PyTorch
            wrote included.
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
    group = lone_group() if no_dist else process_group
    ranks = Ranks(group)
    # 1. Flatten the state dict.
    with ranks.phase("flatten the state dict"):
        arguments.check_planner(planner, "DefaultLoadPlanner")
        location = locations.normalize(
            arguments.location_in(checkpoint_id, storage_reader, "storage_reader")
        )
        target = tree.unwrap_stateful(state_dict, in_order=True)
        leaves = tree.leaves(target)
    # 2. Compare it with the checkpoint; fill the tensors.
    is_strict = not getattr(planner, "allow_partial_load", False)
    others = read_unchanged(
        ranks, location, partial(_read, ranks, group, location, leaves, is_strict)
    )
    # 3. Put the other values in their places; nothing can fail any more.
    for path, value in others.items():
        tree.put(target, path, value)
    for key, value in target.items():
        if tree.is_stateful(state_dict[key]):
            state_dict[key].load_state_dict(value)
        else:
            state_dict[key] = value


def _read(
    ranks: Ranks,
    process_group: Any,
    location: str,
    leaves: Sequence[tree.Leaf],
    is_strict: bool,
    found: dict[str, Any] | None,
) -> dict[tree.Path, Any]:
    """Fill the tensors among some leaves from a checkpoint, and return the other values, by path.

    Collective operation: all ranks must call it.
    """
    marker, opened = find_checkpoint(ranks, location, found, "read")
    options = Options(process_group, allow_dtype_cast=True, stored=opened)
    strategy = load_strategy(None, marker, location).configure(options)
    stored = set(stored_entries(ranks, strategy, location))
    with ranks.phase("read common state"):
        common = strategy.load({"common": ShardedObject(COMMON_KEY, None, (1,), (0,))}, location)[
            "common"
        ]
    with ranks.phase("compare with the checkpoint"):
        request = _make_request(leaves, stored, common, ranks.rank, location)
    if is_strict:
        _refuse_missing(ranks, request.missing, stored, location)
    with ranks.phase("load"), noticing_removal(ranks, location):
        tensors, _, _ = flatten.split({"tensors": request.tensors})
        requested: list[Any] = [*request.objects.values(), *tensors]
        values = strategy.load({str(i): shard for i, shard in enumerate(requested)}, location)
    return {**request.common, **{path: values[str(i)] for i, path in enumerate(request.objects)}}


class _Request(NamedTuple):
    """The request of one rank: shards to fill, objects to read and values of common state by path,
    and missing keys.
    """

    tensors: list[ShardedBase]
    objects: dict[tree.Path, ShardedBase]
    common: dict[tree.Path, Any]
    missing: list[str]


def _make_request(
    leaves: Sequence[tree.Leaf], stored: set[str], common: Any, rank: int, location: str
) -> _Request:
    request = _Request([], {}, {}, [])
    by_key = cache(lambda: tree.by_key(common))
    for key, path, value in leaves:
        is_tensor = isinstance(value, torch.Tensor)
        if key in stored and is_tensor:
            if local_part(value).is_meta:
                raise CheckpointingException(
                    f"{key!r} is on the meta device, which has no memory to load into: call "
                    "model.to_empty(device=...) first."
                )
            request.tensors.extend(shards.shards_of(key, value, rank))
            continue
        if key in stored:
            (request.objects[path],) = shards.shards_of(key, None, rank)
            continue
        in_common = tree.find(common, path)
        if in_common is HOLE:
            in_common = by_key().get(key, HOLE)
        if in_common is HOLE:
            request.missing.append(key)
        elif is_tensor:
            kind = (
                "part of an object"
                if isinstance(in_common, torch.Tensor)
                else f"of type {type(in_common).__name__}"
            )
            raise LoadMismatchError(
                f"Key {key!r} is {kind} in {location!r} but a tensor was requested. Request it as "
                "it was saved; distckpt.load_common_state_dict shows what is not stored as "
                "tensors.",
                unexpected=[key],
            )
        else:
            refuse_unknown(in_common)
            request.common[path] = in_common
    return request


def _refuse_missing(ranks: Ranks, missing: Sequence[str], stored: set[str], location: str) -> None:
    """Raise the same error on all ranks when any of them requests keys that are not stored.

    Collective operation: all ranks must call it.
    """
    if ranks.all_equal(len(missing)) and not missing:
        return
    requested = sorted(
        set().union(*map(json.loads, ranks.all_gather(json.dumps(missing).encode())))
    )
    raise LoadMismatchError(
        f"Not in the checkpoint {location!r}: "
        f"{summarize_keys(requested)}{did_you_mean(requested[0], stored)}. Correct the state "
        "dict, or pass planner=DefaultLoadPlanner(allow_partial_load=True), which leaves them as "
        "they are.",
        unexpected=requested,
    )

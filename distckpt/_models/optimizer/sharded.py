"""Optimizer state as shards, derived from the sharded state dict of the model.

`distckpt.optimizer` is the public path and shows its use.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from distckpt._base.errors import InvalidShardingError, LoadMismatchError
from distckpt._base.interrupts import operation
from distckpt._base.messages import summarize_keys
from distckpt._mapping.base import OpenReplicaId
from distckpt._mapping.sharded_tensor import ShardedTensor
from distckpt._mapping.wrappers import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensorFactory,
    StateDict,
)
from distckpt._models.dtensor import local_part
from distckpt._models.optimizer.description import (
    OwnState,
    describe_optimizer,
    fill_gaps,
    sections_at,
)
from distckpt._models.optimizer.ids import (
    KEEP_VARS_HINT,
    get_param_id_to_sharded_param_map,
)
from distckpt._models.optimizer.restore import restored_section, untrained_names
from distckpt._models.optimizer.state import Entry, stored_rest, unite
from distckpt._models.optimizer.view import bare_optimizer, owned_parameters, write_sections
from distckpt._ranks.collectives import Ranks

logger = logging.getLogger(__name__)


def zero1_shards(
    params: Iterable[torch.Tensor],
    model_sharded_state_dict: ShardedStateDict,
    states: Mapping[str, torch.Tensor],
    start: int,
    stop: int,
    prefix: str = "optimizer",
) -> list[ShardedTensor | ShardedTensorFactory]:
    """Describe the part of a ZeRO-1 optimizer's state that this rank has: a run of elements of all
    parameters, one after another.

        moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        start = dp_rank * len(exp_avg)
        stop = start + len(exp_avg)
        state["zero1"] = zero1_shards(model.parameters(), state["model"], moments, start, stop)

    A part may begin and end anywhere, and loads under every other layout, flattened or not: keys
    are the same as in `sharded_optimizer_state_dict`.

    Args:
        params: the parameters of a flat buffer, in its order.
        model_sharded_state_dict: holds the shards of all of them, which are found by their memory.
        states: by name of the state a 1-D tensor with the elements `start` to `stop` of the buffer.
        start: number of the first element of this rank's part.
        stop: number of the element after the last one. Elements past the parameters are padding,
            and not stored.
        prefix: what keys begin with.

    Returns:
        A flat shard of each state of each parameter of which this rank has elements, with views of
        `states` as data.

    Raises:
        InvalidShardingError: a parameter without a shard.
    """
    params = list(params)
    by_number = get_param_id_to_sharded_param_map(model_sharded_state_dict, params)
    described: list[ShardedTensor | ShardedTensorFactory] = []
    end = 0
    for number, param in enumerate(params):
        first, end = end, end + local_part(param).numel()
        low, high = max(start, first), min(stop, end)
        if low >= high:
            continue
        if number not in by_number:
            raise InvalidShardingError(
                f"parameter {number} has no shard of the model.{KEEP_VARS_HINT}"
            )
        # Ranks that turn out to have the same elements have copies of them.
        own = replace(by_number[number], replica_id=OpenReplicaId((0,)))
        for name, values in states.items():
            data = values[low - start : high - start]
            flat = {"data": data, "flattened_range": slice(low - first, high - first)}
            flat |= {"dtype": data.dtype} if isinstance(own, ShardedTensor) else {}
            key = f"{prefix}.state.{name}.{own.key}"
            described.append(replace(own, key=key, **flat))  # type: ignore[arg-type]
    return described


@operation
def sharded_optimizer_state_dict(
    optimizer: torch.optim.Optimizer,
    model_sharded_state_dict: ShardedStateDict,
    prefix: str = "optimizer",
    *,
    process_group: Any = None,
) -> ShardedStateDict:
    """Describe the state of a torch optimizer, to save it or to load into it.

        state = {"model": sharded_state_dict(model)}
        state["optimizer"] = sharded_optimizer_state_dict(optimizer, state["model"])

    A tensor that belongs to a parameter gets the key `<prefix>.state.<name>.<key of the parameter>`
    and the parameter's place. Options of parameter groups, numbers such as `step`, and whatever
    else the optimizer's `state_dict()` holds become one small object of the key
    `<prefix>.settings`, in which parameters go by their keys.

    No step is made, and the optimizer is not changed. What a new optimizer is going to hold is
    taken from the checkpoint, when `load` is given this dict itself.

    Collective operation: all ranks of the process group must call it. Hashes of the options are
    exchanged, and the options themselves only if ranks hold different parameters.

    Args:
        optimizer: of `torch.optim`, or any that keeps tensors per parameter. A tensor that is not
            divided like its parameter may have another shape if it is a DTensor, if this rank has
            the whole parameter, or if it has size 1 along some axes of this rank's part.
        model_sharded_state_dict: holds the shards of all parameters of the optimizer, which are
            found by their memory.
        prefix: what keys begin with; optimizers in one checkpoint need different ones.
        process_group: the ranks that save or load together; None for the default group, or for this
            process alone when torch.distributed is not initialized.

    Returns:
        What to put in the state dict for `save` or `load`.

    Raises:
        InvalidShardingError: a parameter without a shard, a tensor whose place is unknown, or ranks
            that keep different values for one parameter.
        RankFailedError: on all ranks, when any failed.
    """
    ranks = Ranks(process_group)
    with ranks.phase("describe the optimizer"):
        described, settings = describe_optimizer(optimizer, model_sharded_state_dict, prefix)
    united = unite(ranks, {prefix: settings})[prefix]
    described["settings"] = ShardedObject(f"{prefix}.settings", united, (1,), (0,), ranks.rank)
    with ranks.phase("describe states that are missing"):
        fill_gaps(described, united)
    return described


def load_sharded_optimizer_state_dict(optimizer: torch.optim.Optimizer, loaded: StateDict) -> None:
    """Give a torch optimizer what was loaded into its sharded state dict.

    States are set even in a new optimizer that has made no step. Groups get the options (learning
    rate and so on) that their parameters were saved with, except the choice of an implementation
    (`foreach`, `fused`, `capturable`, `differentiable`). Parameters that are not in the checkpoint
    keep what they have, with a warning.

    Args:
        optimizer: the one whose `sharded_optimizer_state_dict` was loaded.
        loaded: what `load` returned in its place.

    Raises:
        LoadMismatchError: tensors of the state were not loaded; the optimizer that was saved has
            other options; or parameters of one group were saved in groups with different options.
            Nothing is changed then.
    """
    if "settings" not in loaded or "own" not in loaded:
        raise LoadMismatchError(
            "This holds no settings of an optimizer: pass what load() returned in the place of "
            "sharded_optimizer_state_dict(optimizer, ...), from a checkpoint that was saved with "
            "it."
        )
    optimizer = bare_optimizer(optimizer)
    settings: list[Entry] = loaded["settings"]
    own: OwnState = loaded["own"]
    owned = owned_parameters(optimizer)
    sections = sections_at(optimizer, [(path, by_number) for path, by_number, _ in own.sections])
    restored = []
    for section, (*_, described) in zip(sections, own.sections, strict=True):
        sizes = [len(group["params"]) for group in section.groups]
        if sizes != described:
            raise LoadMismatchError(
                f"The optimizer has groups of {sizes} parameters, the one that was described had "
                f"{described}: describe this optimizer before loading."
            )
        restored.append(restored_section(section, own, settings, loaded.get("state", {}), owned))
    fresh = [name for section in sections for name in untrained_names(section, own, settings)]
    write_sections(optimizer, sections, restored, stored_rest(settings))
    if fresh:
        logger.warning(
            "the checkpoint has no state of the optimizer for %s, which were not trained when it "
            "was saved: they start with what the optimizer has for them, nothing if it is new",
            summarize_keys(fresh),
        )

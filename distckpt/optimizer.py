"""Optimizer state as shards, derived from the model's sharded state dict.

For a torch optimizer, whatever it keeps:

    model_state = sharded_state_dict(model)
    optimizer_state = sharded_optimizer_state_dict(optimizer, model_state)
    distckpt.save({"model": model_state, "optimizer": optimizer_state}, "checkpoints/step_100")
    ...
    state = {"model": model_state, "optimizer": optimizer_state}
    loaded = distckpt.load(state, "checkpoints/step_100")
    load_sharded_optimizer_state_dict(optimizer, loaded["optimizer"])

Megatron's functions make shards of an optimizer's own state dict. The tensors in it are divided
among ranks as the parameters are, so a model's sharded state dict describes them, too:

    model_state = model.sharded_state_dict(keep_vars=True)
    id_map = get_param_id_to_sharded_param_map(model_state, model.parameters())
    optimizer_state = optimizer.state_dict()
    optim_state_to_sharding_state(optimizer_state, id_map, exclude_keys=("step",))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from distckpt._base.errors import InvalidShardingError
from distckpt._base.interrupts import operation
from distckpt._base.public import set_public_home
from distckpt._base.tree import leaves
from distckpt._models.dtensor import TensorShard, local_part
from distckpt._models.optimizer.describe import (
    describe_optimizer,
    fill_gaps,
    make_sharded_optimizer_tensor,
)
from distckpt._models.optimizer.read import (
    KEEP_VARS_HINT,
    get_optim_param_to_id_map,
    shards_by_number,
)
from distckpt._models.optimizer.restore import load_sharded_optimizer_state_dict
from distckpt._models.optimizer.settings import unite
from distckpt._ranks.collectives import Ranks
from distckpt.mapping._base import OpenReplicaId
from distckpt.mapping._wrappers import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    StateDict,
)

__all__ = [
    "get_optim_param_to_id_map",
    "get_param_id_to_sharded_param_map",
    "load_sharded_optimizer_state_dict",
    "make_sharded_optimizer_tensor",
    "optim_state_to_sharding_state",
    "sharded_optimizer_state_dict",
    "zero1_shards",
]


set_public_home(globals())


@operation
def sharded_optimizer_state_dict(
    optimizer: torch.optim.Optimizer,
    model_sharded_state_dict: ShardedStateDict,
    prefix: str = "optimizer",
    *,
    process_group: Any = None,
) -> ShardedStateDict:
    """Describe the state of a torch optimizer, to save or load it.

        state = {"model": sharded_state_dict(model)}
        state["optimizer"] = sharded_optimizer_state_dict(optimizer, state["model"])

    A tensor that belongs to a parameter gets the key `<prefix>.state.<name>.<key of the parameter>`
    and the parameter's place. Options of parameter groups, numbers such as `step`, and whatever
    else the optimizer's `state_dict()` holds become one small object of the key
    `<prefix>.settings`, in which parameters go by their keys.

    No step is made, and the optimizer is not changed. The states of a new optimizer are taken from
    the checkpoint, when `load` is given this dict itself.

    Collective operation: all ranks of the process group must call it. Hashes of the options are
    exchanged, and the options themselves only if ranks hold different parameters.

    Args:
        optimizer: of `torch.optim`, or any that keeps tensors per parameter. A tensor that is not
            divided like its parameter may have another shape if it is a DTensor, if this rank has
            the whole parameter, or if it has size 1 along some axes of this rank's part.
        model_sharded_state_dict: holds the shards of all parameters of the optimizer, which are
            found by their memory.
        prefix: beginning of keys; optimizers in one checkpoint need different ones.
        process_group: the ranks that save or load together; None for the default group, or for this
            process alone when torch.distributed is not initialized.

    Returns:
        An entry of the state dict for `save` or `load`.

    Raises:
        InvalidShardingError: a parameter without a shard, a tensor whose place is unknown, or ranks
            that keep different values for one parameter.
        RankFailedError: on all ranks, when any failed.
    """
    ranks = Ranks(process_group)
    with ranks.phase("describe the optimizer"):
        shards = [shard for _, shard in leaves(model_sharded_state_dict)]
        description, settings = describe_optimizer(optimizer, shards, prefix)
    united = unite(ranks, {prefix: settings})[prefix]
    description["settings"] = ShardedObject(f"{prefix}.settings", united, (1,), (0,), ranks.rank)
    with ranks.phase("describe states that are missing"):
        fill_gaps(description, united)
    return description


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.Tensor]
) -> dict[int, TensorShard]:
    """Find the shards of an optimizer's parameters in the model's state dict.

    A shard belongs to a parameter when its `data` is that very object, or has the same shape and
    strides on the same memory. If there is no such shard, a warning is logged.

    Args:
        model_sharded_state_dict: nested dicts and lists with the model's shards.
        optim_params_iter: the parameters, in the order in which the optimizer got them.

    Returns:
        The shard or factory, by the number that the parameter has in the optimizer's state dict.
        Parameters without a shard are left out.
    """
    shards = [shard for _, shard in leaves(model_sharded_state_dict)]
    return shards_by_number(shards, list(optim_params_iter))


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: dict[int, TensorShard],
    exclude_keys: str | tuple[str, ...] = (),
) -> None:
    """Wrap the tensors in an optimizer's state dict, in place.

    The tensor `state[param][name]` becomes a shard of key `optimizer.state.<name>.<key of the
    parameter>`, and `params` of each group, which numbers this rank's parameters, a
    `LocalNonpersistentObject`.

    A value that cannot be divided as the parameter is, because it is not a tensor or has no axes
    while the parameter has some (`step` of Adam), stays as it is and thus becomes common state, of
    which a checkpoint keeps one rank's version. As it stays under this rank's parameter number,
    that is right only while all ranks hold the same parameters. Otherwise exclude it, store it once
    under a key of your own, and put it back after loading.

    Args:
        optim_state_dict: the result of `optimizer.state_dict()`. Its entries `state` and
            `param_groups` are replaced.
        id_to_sharded_param_map: see `get_param_id_to_sharded_param_map`.
        exclude_keys: one name or several; values of that name are left out of the result.

    Raises:
        InvalidShardingError: a tensor of another shape than its parameter, or of a parameter that
            is not in the map. Nothing is changed then.
    """
    excluded = exclude_keys
    if isinstance(exclude_keys, str):
        excluded = (exclude_keys,)
    state: dict[Any, dict[Any, Any]] = {}
    for param_id, values in optim_state_dict["state"].items():
        stored = {name: value for name, value in values.items() if name not in excluded}
        if stored and param_id not in id_to_sharded_param_map:
            raise InvalidShardingError(
                f"optimizer parameter {param_id!r} has state {sorted(map(str, stored))}, but there "
                f"is no shard of the model for it.{KEEP_VARS_HINT}"
            )
        state[param_id] = {
            name: _wrap_state(id_to_sharded_param_map[param_id], value, str(name))
            for name, value in stored.items()
        }
    optim_state_dict["param_groups"] = [
        {**group, "params": LocalNonpersistentObject(group["params"])}
        for group in optim_state_dict["param_groups"]
    ]
    optim_state_dict["state"] = state


def _wrap_state(model_param: TensorShard, value: Any, name: str) -> Any:
    param_shape = getattr(model_param, "local_shape", None)
    if not isinstance(value, torch.Tensor) or (value.ndim == 0 and param_shape != ()):
        return value
    try:
        return make_sharded_optimizer_tensor(model_param, value, f"optimizer.state.{name}")
    except InvalidShardingError as error:
        raise InvalidShardingError(
            f"{error}; name {name!r} in exclude_keys if it does not have the shape of its parameter"
        ) from error


def zero1_shards(
    params: Iterable[torch.Tensor],
    model_sharded_state_dict: ShardedStateDict,
    states: Mapping[str, torch.Tensor],
    start: int,
    stop: int,
    prefix: str = "optimizer",
) -> list[TensorShard]:
    """Describe this rank's part of the state of a ZeRO-1 optimizer.

    It is a run of elements of all parameters, one after another.

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
        prefix: beginning of keys.

    Returns:
        A flat shard of each state of each parameter of which this rank has elements, with views of
        `states` as data.

    Raises:
        InvalidShardingError: a parameter without a shard.
    """
    params = list(params)
    by_number = get_param_id_to_sharded_param_map(model_sharded_state_dict, params)
    shards: list[TensorShard] = []
    end = 0
    for number, param in enumerate(params):
        first = end
        end += local_part(param).numel()
        low = max(start, first)
        high = min(stop, end)
        if low >= high:
            continue
        if number not in by_number:
            raise InvalidShardingError(
                f"parameter {number} has no shard of the model.{KEEP_VARS_HINT}"
            )
        # Ranks that turn out to have the same elements have copies of them.
        own: Any = replace(
            by_number[number].without_data(),
            replica_id=OpenReplicaId((0,)),
            flattened_range=slice(low - first, high - first),
        )
        for name, values in states.items():
            data = values[low - start : high - start]
            shards.append(make_sharded_optimizer_tensor(own, data, f"{prefix}.state.{name}"))
    return shards

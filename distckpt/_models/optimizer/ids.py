"""Shards of parameters by the numbers that an optimizer has for them, as in Megatron Core."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from distckpt._base.errors import InvalidShardingError
from distckpt._base.tree import leaves
from distckpt._mapping.sharded_tensor import ShardedTensor
from distckpt._mapping.wrappers import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensorFactory,
    StateDict,
)
from distckpt._models.dtensor import local_part
from distckpt._models.optimizer.shards import make_sharded_optimizer_tensor
from distckpt._state.megatron_shards import adopt

logger = logging.getLogger(__name__)

KEEP_VARS_HINT = (
    " The state dict must hold the torch.nn.Parameter objects themselves, which "
    "`.state_dict(keep_vars=True)` gives, or views of the whole of them, but not copies. A "
    "parameter that is stored in another form needs a ShardedTensorFactory. FSDP1 flattens "
    "parameters: use torch.distributed.fsdp.fully_shard instead."
)


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.Tensor]) -> dict[int, int]:
    """Number the parameters of an optimizer the way its state dict does.

    Args:
        optim_params_iter: the parameters, in the order in which the optimizer got them.

    Returns:
        The position in the order, by `id()` of the parameter (of its local part for a DTensor). A
        parameter that comes up twice has its first position.
    """
    positions: dict[int, int] = {}
    for position, param in enumerate(optim_params_iter):
        positions.setdefault(id(local_part(param)), position)
    return positions


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.Tensor]
) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    """Find the shard of each parameter of an optimizer in the model's state dict.

    A shard belongs to a parameter when its `data` is that very object, or has the same shape and
    strides on the same memory. If there is no such shard, a warning is logged.

    Args:
        model_sharded_state_dict: nested dicts and lists with the model's shards.
        optim_params_iter: the parameters, in the order in which the optimizer got them.

    Returns:
        The shard or factory, by the number that the parameter has in the optimizer's state dict.
        Parameters without a shard are left out.
    """
    params = list(optim_params_iter)
    by_object = get_optim_param_to_id_map(params)
    by_memory = {memory_of(params[position]): position for position in by_object.values()}
    by_memory.pop(None, None)
    sharded_params: dict[int, ShardedTensor | ShardedTensorFactory] = {}
    for _, shard in leaves(model_sharded_state_dict):
        if not isinstance(shard, ShardedTensor | ShardedTensorFactory):
            continue
        position = by_object.get(id(shard.data))
        if position is None and shard.data is not None:
            position = by_memory.get(memory_of(shard.data))
        if position is None:
            logger.debug("the optimizer has no parameter for key %r", shard.key)
        else:
            # Of tied parameters the first: it is the one that the checkpoint stores.
            sharded_params.setdefault(position, adopt(shard))
    if not sharded_params:
        logger.warning(
            "no tensor of the model state dict is a parameter of the optimizer.%s", KEEP_VARS_HINT
        )
    return sharded_params


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: dict[int, ShardedTensor | ShardedTensorFactory],
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
        optim_state_dict: what `optimizer.state_dict()` gave. Its entries `state` and `param_groups`
            are replaced.
        id_to_sharded_param_map: see `get_param_id_to_sharded_param_map`.
        exclude_keys: one name or several; values of that name are left out of the result.

    Raises:
        InvalidShardingError: a tensor of another shape than its parameter, or of a parameter that
            is not in the map. Nothing is changed then.
    """
    excluded = (exclude_keys,) if isinstance(exclude_keys, str) else exclude_keys
    state: dict[Any, dict[Any, Any]] = {}
    for param_id, values in optim_state_dict["state"].items():
        kept = {name: value for name, value in values.items() if name not in excluded}
        if kept and param_id not in id_to_sharded_param_map:
            raise InvalidShardingError(
                f"optimizer parameter {param_id!r} has state {sorted(map(str, kept))}, but there "
                f"is no shard of the model for it.{KEEP_VARS_HINT}"
            )
        state[param_id] = {
            name: _wrap_state(id_to_sharded_param_map[param_id], value, str(name))
            for name, value in kept.items()
        }
    optim_state_dict["param_groups"] = [
        {**group, "params": LocalNonpersistentObject(group["params"])}
        for group in optim_state_dict["param_groups"]
    ]
    optim_state_dict["state"] = state


def _wrap_state(model_param: ShardedTensor | ShardedTensorFactory, value: Any, name: str) -> Any:
    param_shape = getattr(model_param, "local_shape", None)
    if not isinstance(value, torch.Tensor) or (value.ndim == 0 and param_shape != ()):
        return value
    try:
        return make_sharded_optimizer_tensor(model_param, value, f"optimizer.state.{name}")
    except InvalidShardingError as error:
        raise InvalidShardingError(
            f"{error}; name {name!r} in exclude_keys if it does not have the shape of its parameter"
        ) from error


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what all views of the whole of a tensor have in common; None for a tensor without
    memory.
    """
    local = local_part(tensor)
    if local.data_ptr() == 0:
        return None
    return local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride()

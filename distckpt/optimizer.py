"""Optimizer state as shards, derived from the sharded state dict of the model.

For a torch optimizer, whatever it keeps:

    model_state = sharded_state_dict(model)
    optimizer_state = sharded_optimizer_state_dict(optimizer, model_state)
    distckpt.save({"model": model_state, "optimizer": optimizer_state}, "checkpoints/step_100")
    ...
    loaded = distckpt.load({"model": model_state, "optimizer": optimizer_state}, "checkpoints/step_100")
    load_sharded_optimizer_state_dict(optimizer, loaded["optimizer"])

Megatron's functions make shards of an optimizer's own state dict. The tensors in it are divided among ranks as the
parameters are, so a model's sharded state dict describes them, too:

    model_state = model.sharded_state_dict(keep_vars=True)
    id_map = get_param_id_to_sharded_param_map(model_state, model.parameters())
    optimizer_state = optimizer.state_dict()
    optim_state_to_sharding_state(optimizer_state, id_map, exclude_keys=("step",))
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from distckpt._base.errors import InvalidShardingError, LoadMismatchError
from distckpt._base.interrupts import operation
from distckpt._base.public import set_public_home
from distckpt._models.dtensor import is_dtensor, is_in_mesh, local_part
from distckpt._models.optimizer_state import (
    BlankStates,
    ParamState,
    describe,
    make_sharded_optimizer_tensor,
    options_of,
    param_name,
    set_options,
    state_shard,
    unite,
)
from distckpt._ranks.collectives import Ranks
from distckpt._state.megatron_shards import adopt
from distckpt.dict_utils import nested_values
from distckpt.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)
from distckpt.utils import extract_sharded_tensors_and_factories

__all__ = [
    "get_optim_param_to_id_map",
    "get_param_id_to_sharded_param_map",
    "load_sharded_optimizer_state_dict",
    "make_sharded_optimizer_tensor",
    "optim_state_to_sharding_state",
    "sharded_optimizer_state_dict",
]

set_public_home(globals())

logger = logging.getLogger(__name__)

KEEP_VARS_HINT = (
    " The state dict must hold the torch.nn.Parameter objects themselves, which `.state_dict(keep_vars=True)` gives,"
    " or views of the whole of them, but not copies. A parameter that is stored in another form needs a"
    " ShardedTensorFactory. FSDP1 flattens parameters: use torch.distributed.fsdp.fully_shard instead."
)


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.Tensor]) -> dict[int, int]:
    """Number the parameters of an optimizer the way its state dict does.

    Args:
        optim_params_iter: the parameters, in the order in which the optimizer got them.

    Returns:
        The position in the order, by `id()` of the parameter (of its local part for a DTensor). A parameter that
        comes up twice has its first position.
    """
    positions: dict[int, int] = {}
    for position, param in enumerate(optim_params_iter):
        positions.setdefault(id(local_part(param)), position)
    return positions


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.Tensor]
) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    """Find the shard of each parameter of an optimizer in the model's state dict.

    A shard belongs to a parameter when its `data` is that very object, or has the same shape and strides on
    the same memory. If none does, a warning is logged.

    Args:
        model_sharded_state_dict: nested dicts and lists with the model's shards.
        optim_params_iter: the parameters, in the order in which the optimizer got them.

    Returns:
        The shard or factory, by the number that the parameter has in the optimizer's state dict. Parameters without
        a shard are left out.
    """
    wrapped, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    params = list(optim_params_iter)
    by_object = get_optim_param_to_id_map(params)
    by_memory = {_memory(params[position]): position for position in by_object.values()}
    sharded_params: dict[int, ShardedTensor | ShardedTensorFactory] = {}
    for shard in nested_values(wrapped):
        position = by_object.get(id(shard.data))
        if position is None and shard.data is not None and (memory := _memory(shard.data)) is not None:
            position = by_memory.get(memory)
        if position is None:
            logger.debug("the optimizer has no parameter for key %r", shard.key)
        else:
            # Of tied parameters the first: it is the one that the checkpoint stores.
            sharded_params.setdefault(position, adopt(shard))
    if not sharded_params:
        logger.warning("no tensor of the model state dict is a parameter of the optimizer.%s", KEEP_VARS_HINT)
    return sharded_params


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: dict[int, ShardedTensor | ShardedTensorFactory],
    exclude_keys: str | tuple[str, ...] = (),
) -> None:
    """Wrap the tensors in an optimizer's state dict, in place.

    The tensor `state[param][name]` becomes a shard of key `optimizer.state.<name>.<key of the parameter>`, and
    `params` of each group, which numbers this rank's parameters, a `LocalNonpersistentObject`.

    A value that cannot be divided as the parameter is, because it is no tensor or has no axes while the
    parameter has some (`step` of Adam), stays as it is and thus becomes common state, of which a
    checkpoint keeps one rank's version. As it stays under this rank's parameter number, that is right only while
    all ranks hold the same parameters. Otherwise exclude it, store it once under a key of your own, and put
    it back after loading.

    Args:
        optim_state_dict: what `optimizer.state_dict()` gave. Its entries `state` and `param_groups` are replaced.
        id_to_sharded_param_map: see `get_param_id_to_sharded_param_map`.
        exclude_keys: one name or several; values of that name are left out of the result.

    Raises:
        InvalidShardingError: a tensor of another shape than its parameter, or of a parameter that is not in the
            map. Nothing is changed then.
    """
    excluded = (exclude_keys,) if isinstance(exclude_keys, str) else exclude_keys
    state: dict[Any, dict[Any, Any]] = {}
    for param_id, values in optim_state_dict["state"].items():
        kept = {name: value for name, value in values.items() if name not in excluded}
        if kept and param_id not in id_to_sharded_param_map:
            raise InvalidShardingError(
                f"optimizer parameter {param_id!r} has state {sorted(map(str, kept))}, but there is no shard of the "
                f"model for it.{KEEP_VARS_HINT}"
            )
        state[param_id] = {
            name: _wrap_state(id_to_sharded_param_map[param_id], value, str(name)) for name, value in kept.items()
        }
    optim_state_dict["param_groups"] = [
        {**group, "params": LocalNonpersistentObject(group["params"])} for group in optim_state_dict["param_groups"]
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

    A tensor that belongs to a parameter gets the key `<prefix>.state.<name>.<key of the parameter>` and the
    parameter's place. Options of parameter groups and numbers such as `step` become one small object of the key
    `<prefix>.settings`, in which parameters go by their keys.

    A trainable parameter without a state, because the optimizer is new or it never had a gradient, gets a
    blank one here, and has none again after loading. The optimizer is not changed.

    Collective operation: all ranks of the process group must call it. Hashes of the options are exchanged; only where
    ranks hold different parameters, the options are.

    Args:
        optimizer: of `torch.optim`, or any that keeps tensors per parameter in `state`. Besides tensors divided
            like the parameter these may have another shape if they are DTensors, if this rank has the whole
            parameter, or if they have size 1 along some axes of its part.
        model_sharded_state_dict: holds the shards of all parameters of the optimizer, which are found by
            their memory.
        prefix: what keys begin with; optimizers in one checkpoint need different ones.
        process_group: the ranks that save or load together; None for the default group, or for this process
            alone when torch.distributed is not initialised.

    Returns:
        What to put in the state dict for `save` or `load`.

    Raises:
        InvalidShardingError: a parameter without a shard, or a tensor whose place is unknown.
        CheckpointingException: a parameter has no state, and a step of the optimizer with zeros does not show one.
        RankFailedError: on all ranks, when any failed.
    """
    ranks = Ranks(process_group)
    with ranks.phase("describe the optimizer"):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        shards = get_param_id_to_sharded_param_map(model_sharded_state_dict, params)
        # A parameter that comes twice has the number of its first place in the map.
        first = get_optim_param_to_id_map(params)
        own: list[list[ParamState | None]] = []
        state: dict[int, Any] = {}
        blanks, position = BlankStates(optimizer), 0
        for group in optimizer.param_groups:
            own.append([])
            for param in group["params"]:
                shard = shards.get(first[id(local_part(param))])
                kept = None
                if shard is not None:
                    kept = _state_of(optimizer, group, param, param_name(shard), blanks)
                    state[position] = {
                        name: state_shard(shard, param, tensor, name, f"{prefix}.state.{name}")
                        for name, tensor in kept.tensors.items()
                    }
                elif not is_dtensor(param) or is_in_mesh(param):
                    raise InvalidShardingError(
                        f"parameter {position} of the optimizer, of shape {tuple(param.shape)}, has no shard in the "
                        f"state dict of the model.{KEEP_VARS_HINT}"
                    )
                own[-1].append(kept)
                position += 1
        known = [[kept for kept in group if kept is not None] for group in own]
        settings = describe(zip(optimizer.param_groups, known, strict=True))
    return {
        "state": state,
        "settings": ShardedObject(f"{prefix}.settings", unite(ranks, settings), (1,), (0,), ranks.rank),
        "own": LocalNonpersistentObject(own),
    }


def load_sharded_optimizer_state_dict(optimizer: torch.optim.Optimizer, loaded: StateDict) -> None:
    """Give a torch optimizer what was loaded into its sharded state dict.

    States are set, also in a new optimizer that has made no step. Options of groups (learning rate and so on) become
    those that the parameters were saved with, except the choice of an implementation (`foreach`, `fused`,
    `capturable`, `differentiable`). Parameters that are not in the checkpoint keep what they have.

    Args:
        optimizer: the one whose `sharded_optimizer_state_dict` was loaded.
        loaded: what `load` returned in its place.

    Raises:
        LoadMismatchError: something that the optimizer keeps was not saved, or the other way round; or parameters of
            one group were saved in groups with different options. The options stay as they are then.
    """
    if "settings" not in loaded or "own" not in loaded:
        raise LoadMismatchError(
            "This holds no settings of an optimizer: pass what load() returned in the place of "
            "sharded_optimizer_state_dict(optimizer, ...), from a checkpoint that was saved with it."
        )
    if [len(group["params"]) for group in optimizer.param_groups] != list(map(len, loaded["own"])):
        raise LoadMismatchError(
            f"The optimizer has groups of {[len(group['params']) for group in optimizer.param_groups]} parameters, the "
            f"one that was described had {list(map(len, loaded['own']))}: describe this optimizer before loading."
        )
    settings = {name: entry for entry in loaded["settings"] for name in entry["params"]}
    states: dict[torch.Tensor, dict[str, Any] | None] = {}
    options: list[dict[str, Any] | None] = []
    position = 0
    for group, own in zip(optimizer.param_groups, loaded["own"], strict=True):
        for param, kept in zip(group["params"], own, strict=True):
            if kept is not None and kept.name in settings and (param.requires_grad or kept.tensors or kept.values):
                states[param] = _restored(kept, settings[kept.name], loaded.get("state", {}).get(position, {}))
            position += 1
        options.append(options_of(loaded["settings"], [kept.name for kept in own if kept is not None]))
    for param, state in states.items():
        optimizer.state.pop(param, None)
        if state is not None:
            optimizer.state[param] = state
    for group, found in zip(optimizer.param_groups, options, strict=True):
        set_options(group, found or {})


def _state_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], param: torch.Tensor, name: str, blanks: BlankStates
) -> ParamState:
    # Not state[param], which would make an entry.
    state = optimizer.state.get(param)
    has_state = bool(state)
    if not state:
        state = blanks.make(group, param) if param.requires_grad else {}
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.ndim}
    values = {key: value for key, value in state.items() if key not in tensors}
    return ParamState(name, tensors, values, has_state)


def _restored(kept: ParamState, entry: dict[str, Any], tensors: StateDict) -> dict[str, Any] | None:
    """Return the state of a parameter made of what was loaded; None when it had none."""
    if sorted(kept.tensors) != entry["tensors"] or sorted(tensors) != entry["tensors"]:
        raise LoadMismatchError(
            f"For the parameter {kept.name!r} the optimizer keeps {sorted(kept.tensors)}, saved were "
            f"{entry['tensors']}, loaded {sorted(tensors)}. Make the optimizer with the options it was saved "
            f"with: {entry['options']}.",
            unexpected=[kept.name],
        )
    if not entry["has_state"]:
        return None
    for name, tensor in kept.tensors.items():
        target = local_part(tensor).detach()
        if _memory(target) is None or _memory(target) != _memory(tensors[name]):
            target.copy_(local_part(tensors[name]))
    values = dict(entry["values"])
    for name, value in values.items():
        # In the form that the optimizer uses, where it has one.
        if isinstance(own := kept.values.get(name), torch.Tensor):
            values[name] = torch.full_like(own, value)
    return {**values, **kept.tensors}


def _memory(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what all views of the whole of a tensor have in common; None for a tensor without memory."""
    local = local_part(tensor)
    if local.data_ptr() == 0:
        return None
    return local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride()

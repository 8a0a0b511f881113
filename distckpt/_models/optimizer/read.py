"""The content of an optimizer: sections of state, parameters and their shards.

Optimizers of the plain form (`state` and `param_groups` of `torch.optim.Optimizer`, with its
`state_dict`) are read and written in place. Those that make a state dict of their own, such as
Lookahead, which wraps another optimizer, are asked for it and given one. The sections of it, which
have values for each parameter, are found by their form.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch

from distckpt._base.dtypes import memory_order
from distckpt._base.errors import InvalidShardingError
from distckpt._base.tree import (
    HOLE,
    Position,
    dotted,
    is_dict,
    is_plain_container,
    leaves,
    map_leaves,
    map_nodes,
    without_holes,
)
from distckpt._models.dtensor import TensorShard, is_dtensor, is_in_mesh, local_part
from distckpt._state.flatten import adopt
from distckpt.mapping._sharded_tensor import ShardedTensor

logger = logging.getLogger(__name__)

_DELEGATES = frozenset({"AcceleratedOptimizer", "_FabricOptimizer"})
"""Wrappers of accelerate and Fabric, without state of their own."""


_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


SectionPath: TypeAlias = tuple[str, ...]


class Section(NamedTuple):
    """Part of an optimizer's state dict with values for each parameter.

    `path` are the keys that lead to it. With `by_number` it is `{"state": ..., "param_groups":
    ...}`, else a dict with parameters as keys. `groups` hold options and, as `params`, parameters;
    `state` is by parameter.
    """

    path: tuple[str, ...]
    by_number: bool
    groups: list[dict[str, Any]]
    state: dict[torch.Tensor, Any]


class ParamState(NamedTuple):
    """The state of one parameter.

    `tensors` are those with axes, or of a parameter without axes, by name. Those in lists and dicts
    have names such as `Q.0`, and leave `HOLE`s in their places in `values`, the rest of the state.
    `scalars` are the other tensors without axes. A parameter without `has_state` has not been used
    yet. `forms` are dtype and global shape of the tensors, for parameters that share a key;
    `orders` the axes of transposed tensors, in the order in which they lie in memory; `pairs` the
    dtypes of complex tensors that are stored as pairs.
    """

    name: str
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]
    scalars: dict[str, torch.Tensor]
    has_state: bool
    is_frozen: bool = False
    forms: Mapping[str, Any] = MappingProxyType({})
    orders: Mapping[str, Any] = MappingProxyType({})
    pairs: Mapping[str, torch.dtype] = MappingProxyType({})


ITSELF = ""
"""The name of a state that is not a dict."""


def is_optimizer(value: Any) -> bool:
    """Tell whether a value is an optimizer: it has groups of parameters, and a state dict."""
    return all(hasattr(value, name) for name in ("param_groups", "state_dict", "load_state_dict"))


def bare_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of training libraries."""
    while _DELEGATES & {base.__name__ for base in type(optimizer).__mro__}:
        optimizer = optimizer.optimizer
    return optimizer


def sharded_inner(optimizer: Any) -> Any:
    """Return the optimizer inside a ZeroRedundancyOptimizer, which has this rank's parameters; None
    for other classes.
    """
    is_sharded = hasattr(optimizer, "consolidate_state_dict") and hasattr(optimizer, "optim")
    if not is_sharded:
        return None
    return optimizer.optim


def owned_parameters(optimizer: Any) -> set[int] | None:
    """Return the `id()` of those parameters whose state this rank keeps; None for all."""
    inner = sharded_inner(optimizer)
    if inner is None:
        return None
    return {id(param) for param in params_of(inner.param_groups)}


def params_of(groups: Iterable[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Return the parameters of all groups."""
    params: list[torch.Tensor] = []
    for group in groups:
        params += group["params"]
    return params


def read_sections(optimizer: Any) -> tuple[list[Section], Any]:
    """Return the sections of an optimizer's state, and the rest or `HOLE`."""
    inner = sharded_inner(optimizer)
    groups = optimizer.param_groups
    if inner is None and not is_plain(optimizer):
        return _take_sections(optimizer.state_dict(), groups)
    by_param, others = _by_param((inner or optimizer).state)
    sections = [Section((), True, groups, by_param)]
    if not others:
        return sections, HOLE
    return sections, {"state": others}


def sections_at(optimizer: Any, places: Iterable[tuple[SectionPath, bool]]) -> list[Section]:
    """Return sections of an optimizer's state, empty where it has none yet."""
    current = {section.path: section for section in read_sections(optimizer)[0]}
    return [
        current.get(path, Section(path, by_number, optimizer.param_groups, {}))
        for path, by_number in places
    ]


def places_of(section: Section) -> Iterator[tuple[int, Any, torch.Tensor]]:
    """Yield group number, place of the state, and parameter for each parameter.

    Places are numbers, with the path of the section if it has one.
    """
    position = 0
    for number, group in enumerate(section.groups):
        for param in group["params"]:
            place: Any = position
            if section.path:
                place = (section.path, position)
            yield number, place, param
            position += 1


def is_plain(optimizer: Any) -> bool:
    base = torch.optim.Optimizer
    cls = type(optimizer)
    names = ("state_dict", "load_state_dict")
    return (
        isinstance(optimizer, base)
        and all(
            getattr(cls, name) is getattr(base, name) and name not in vars(optimizer)
            for name in names
        )
        and not any(getattr(optimizer, hooks, None) for hooks in _HOOKS)
    )


def _take_sections(tree: Any, groups: list[dict[str, Any]]) -> tuple[list[Section], Any]:
    """Return the sections of a state dict, and the rest or `HOLE`."""
    sections: list[Section] = []

    def take(path: Position, node: Any) -> Any:
        if not isinstance(node, dict) or not all(isinstance(key, str) for key in path):
            return node
        section, rest = _divide(node, path, groups)
        if section is not None:
            sections.append(section)
        if node and not rest:
            return HOLE
        return rest

    rest = map_nodes(take, tree, is_dict)
    return sections, map_leaves(lambda _, leaf: leaf, rest, is_dict, join=without_holes)


def _divide(
    node: dict[Any, Any], path: tuple[str, ...], groups: list[dict[str, Any]]
) -> tuple[Section | None, dict[Any, Any]]:
    """Divide a dict into a section, if any, and other entries."""
    params = _numbered_params(node, groups)
    if params is None:
        by_param, rest = _by_param(node)
        if not by_param:
            return None, node
        return Section(path, False, [{"params": params_of(groups)}], by_param), rest
    rest = dict(node)
    own_groups = []
    for group, current in zip(rest.pop("param_groups"), groups, strict=True):
        own_groups.append({**group, "params": current["params"]})
    state: dict[torch.Tensor, Any] = {}
    others = dict(rest.pop("state"))
    for number, param in params.items():
        if number in others:
            state[param] = others.pop(number)
    if others:
        rest["state"] = others
    return Section(path, True, own_groups, state), rest


def _by_param(state: Mapping[Any, Any]) -> tuple[dict[torch.Tensor, Any], dict[Any, Any]]:
    """Divide a dict into entries of parameters and others."""
    by_param: dict[torch.Tensor, Any] = {}
    others: dict[Any, Any] = {}
    for key, value in state.items():
        if isinstance(key, torch.Tensor):
            by_param[key] = value
        else:
            others[key] = value
    return by_param, others


def _numbered_params(
    node: Mapping[Any, Any], groups: list[dict[str, Any]]
) -> dict[int, torch.Tensor] | None:
    """Return the parameters by their numbers in a state dict.

    None stands for a dict of another form.
    """
    own = node.get("param_groups")
    if not isinstance(own, list) or not isinstance(node.get("state"), dict):
        return None
    numbers = [group.get("params") for group in own]
    params = [group["params"] for group in groups]
    if not all(isinstance(some, list) for some in numbers):
        return None
    if list(map(len, numbers)) != list(map(len, params)):
        return None
    flat = itertools.chain.from_iterable
    return dict(zip(flat(numbers), flat(params), strict=True))


def param_state(name: str, state: Any, param: torch.Tensor) -> ParamState:
    """Separate tensors in the state of a parameter from other values."""
    is_frozen = not param.requires_grad
    named = state
    if state is None:
        named = {}
    elif not isinstance(state, dict):
        named = {ITSELF: state}
    separated = ParamState(name, {}, {}, {}, bool(named), is_frozen)
    for key, value in named.items():
        if isinstance(value, torch.Tensor) and not value.ndim and (param.ndim or key == "step"):
            separated.scalars[key] = value
        elif isinstance(value, torch.Tensor) and isinstance(key, str):
            _add(separated.tensors, key, value)
        else:
            separated.values[key] = _without_tensors(value, str(key), separated.tensors)
    return separated


def _add(tensors: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    if name in tensors:
        raise InvalidShardingError(
            f"The state of an optimizer has two tensors that would be stored as {name!r}, one of "
            "them in a list or dict: rename an entry of its state."
        )
    tensors[name] = tensor


def orders_of(tensors: Mapping[str, torch.Tensor], param: torch.Tensor) -> dict[str, list[int]]:
    """Return the orders in memory of the axes of transposed tensors.

    Computed results depend on them.
    """
    orders = {}
    for name, tensor in tensors.items():
        if not is_dtensor(tensor) and tensor.stride() != param.stride():
            order = memory_order(tensor)
            if order:
                orders[name] = order
    return orders


def _without_tensors(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Move tensors with axes out of a value to `tensors`, by position."""

    def take_out(position: Position, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not leaf.ndim:
            return local_part(leaf).detach()
        _add(tensors, dotted(position), leaf)
        return HOLE

    return map_leaves(take_out, value, is_plain_container, (name,))


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


def shards_by_number(
    shards: Iterable[Any], params: Sequence[torch.Tensor]
) -> dict[int, TensorShard]:
    """Find the shards of parameters, by the numbers of these."""
    by_object = get_optim_param_to_id_map(params)
    by_memory = {memory_of(params[position]): position for position in by_object.values()}
    by_memory.pop(None, None)
    sharded_params: dict[int, TensorShard] = {}
    for shard in shards:
        if not isinstance(shard, TensorShard):
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


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return the identity of a tensor's memory, None without memory.

    All views of the whole of a tensor have it in common.
    """
    local = local_part(tensor)
    if local.data_ptr() == 0:
        return None
    return local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride()


def shards_of_parameters(optimizer: Any, model: Iterable[Any]) -> dict[int, TensorShard]:
    """Find the shards of an optimizer's parameters, by `id()` of local parts."""
    params = params_of(optimizer.param_groups)
    if not params:
        return {}
    by_position = shards_by_number(model, params)
    shards: dict[int, TensorShard] = {}
    for param_id, position in get_optim_param_to_id_map(params).items():
        param = params[position]
        shard = by_position.get(position)
        if shard is not None:
            shards[param_id] = shard
        elif not is_dtensor(param) or is_in_mesh(param):
            raise InvalidShardingError(
                f"parameter {position} of the optimizer, of shape {tuple(param.shape)}, has no "
                "shard in the state dict of the model: put the module that has it there. "
                "An optimizer that was made before fully_shard, before a load with materialize=, "
                "or for another model, has other parameters: make it afterwards. One that was made "
                "after a forward has the gathered parameters of FSDP2, and trains these in vain: "
                f"call model.reshard() before making it.{KEEP_VARS_HINT}"
            )
    return shards


def param_name(shard: TensorShard) -> str:
    """Name a parameter by its key, under any layout.

    Where several layers share a key, the name has the place among them, too.
    """
    part = first_part(shard)
    if part is None or not part.prepend_axis_num:
        return shard.key
    return f"{shard.key}[{','.join(map(str, part.global_offset[: part.prepend_axis_num]))}]"


def first_part(shard: TensorShard) -> ShardedTensor | None:
    """Return a shard itself, or the first one that a factory makes."""
    if isinstance(shard, ShardedTensor):
        return shard
    parts = (part for _, part in leaves(shard.build()) if isinstance(part, ShardedTensor))
    return next(parts, None)

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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from distckpt._base.errors import InvalidShardingError, LoadMismatchError
from distckpt._base.interrupts import operation
from distckpt._base.messages import summarize_keys
from distckpt._base.public import set_public_home
from distckpt._format.codec import HOLE
from distckpt._mapping.base import OpenReplicaId
from distckpt._models.dtensor import is_dtensor, is_in_mesh, local_part
from distckpt._models.optimizer_shards import (
    StoredEntry,
    form_of,
    make_sharded_optimizer_tensor,
    param_name,
    state_shard,
    state_target,
)
from distckpt._models.optimizer_state import (
    Entry,
    ParamState,
    SectionPath,
    by_name,
    describe,
    entries_of,
    forms_by_key,
    joined_state,
    options_of,
    orders_of,
    param_state,
    rest_entry,
    stored_rest,
    stored_sections,
    unite,
)
from distckpt._models.optimizer_view import (
    Section,
    bare_optimizer,
    owned_parameters,
    read_sections,
    write_sections,
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
    "zero1_shards",
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


_Shard: TypeAlias = ShardedTensor | ShardedTensorFactory


class _Own(NamedTuple):
    """What of an optimizer this rank has: sections with the sizes of their groups; by place, names and tensors."""

    sections: list[tuple[SectionPath, bool, list[int]]]
    names: dict[Any, str]
    tensors: dict[Any, dict[str, torch.Tensor]]


class OptimizerState(dict[str, Any]):
    """What `sharded_optimizer_state_dict` returns; `load` asks the checkpoint what to load in its place.

    Attributes:
        optimizer: the optimizer, without wrappers.
        prefix: what keys begin with.
        shards: of its parameters, by `id()` of their local parts.
    """

    def __init__(self, optimizer: Any, prefix: str, shards: dict[int, _Shard]) -> None:
        self.optimizer, self.prefix, self.shards = optimizer, prefix, shards
        self._owned = owned_parameters(optimizer)
        self.own = _Own([], {}, {})
        super().__init__(state={}, own=LocalNonpersistentObject(self.own))

    def places(self, section: Section) -> Iterator[tuple[int, Any, torch.Tensor, _Shard]]:
        """Yield number of the group, place of the state, parameter and its shard, for those that this rank has."""
        for number, place, param in _places(section):
            shard = self.shards.get(id(local_part(param)))
            if shard is not None:
                if place not in self.own.names:
                    self.own.names[place] = param_name(shard)
                yield number, place, param, shard

    def owns(self, param: torch.Tensor) -> bool:
        """Tell whether this rank keeps the state of a parameter."""
        return self._owned is None or id(param) in self._owned

    def key(self, path: SectionPath, name: str) -> str:
        """Return what the key of a tensor in the state of a parameter begins with."""
        return ".".join((self.prefix, *path, "state", name))

    def add(
        self, path: SectionPath, place: Any, param: torch.Tensor, shard: _Shard, tensors: dict[str, torch.Tensor]
    ) -> dict[str, _Shard]:
        """Describe the tensors in the state of a parameter."""
        shards = {
            name: state_shard(shard, param, tensor, name, self.key(path, name)) for name, tensor in tensors.items()
        }
        self.own.tensors[place], self["state"][place] = tensors, shards
        return shards


def _places(section: Section) -> Iterator[tuple[int, Any, torch.Tensor]]:
    """Yield number of the group, place of the state, and each parameter; without a path, places are numbers."""
    params = ((number, param) for number, group in enumerate(section.groups) for param in group["params"])
    for position, (number, param) in enumerate(params):
        yield number, (section.path, position) if section.path else position, param


def zero1_shards(
    params: Iterable[torch.Tensor],
    model_sharded_state_dict: ShardedStateDict,
    states: Mapping[str, torch.Tensor],
    start: int,
    stop: int,
    prefix: str = "optimizer",
) -> list[ShardedTensor | ShardedTensorFactory]:
    """Describe the part of a ZeRO-1 optimizer's state that this rank has: elements of all parameters end to end.

        first = dp_rank * len(exp_avg)
        moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        state["zero1"] = zero1_shards(model.parameters(), state["model"], moments, first, first + len(exp_avg))

    A part may begin and end anywhere, and loads under every other layout, flattened or not: keys are those of
    `sharded_optimizer_state_dict`.

    Args:
        params: the parameters of a flat buffer, in its order.
        model_sharded_state_dict: holds the shards of all of them, which are found by their memory.
        states: by name of the state a 1-D tensor with the elements `start` to `stop` of the buffer.
        start: number of the first element of this rank's part.
        stop: that of the element after the last; elements past those of the parameters are padding, and not stored.
        prefix: what keys begin with.

    Returns:
        A flat shard of each state of each parameter of which this rank has elements, with views of `states` as data.

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
            raise InvalidShardingError(f"parameter {number} has no shard of the model.{KEEP_VARS_HINT}")
        # Other ranks have other elements, unless they turn out to have the same ones.
        own = replace(by_number[number], replica_id=OpenReplicaId((0,)))
        for name, values in states.items():
            data = values[low - start : high - start]
            flat = {"data": data, "flattened_range": slice(low - first, high - first)}
            flat |= {"dtype": data.dtype} if isinstance(own, ShardedTensor) else {}
            described.append(replace(own, key=f"{prefix}.state.{name}.{own.key}", **flat))  # type: ignore[arg-type]
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

    A tensor that belongs to a parameter gets the key `<prefix>.state.<name>.<key of the parameter>` and the
    parameter's place. Options of parameter groups, numbers such as `step`, and whatever else the optimizer's
    `state_dict()` holds become one small object of the key `<prefix>.settings`, in which parameters go by their keys.

    No step is made, and the optimizer is not changed. What a new optimizer is going to hold is taken from the
    checkpoint, when `load` is given this dict itself.

    Collective operation: all ranks of the process group must call it. Hashes of the options are exchanged; only where
    ranks hold different parameters, the options are.

    Args:
        optimizer: of `torch.optim`, or any that keeps tensors per parameter. Besides tensors divided like the parameter
            these may have another shape if they are DTensors, if this rank has the whole parameter, or if they have
            size 1 along some axes of its part.
        model_sharded_state_dict: holds the shards of all parameters of the optimizer, which are found by
            their memory.
        prefix: what keys begin with; optimizers in one checkpoint need different ones.
        process_group: the ranks that save or load together; None for the default group, or for this process
            alone when torch.distributed is not initialised.

    Returns:
        What to put in the state dict for `save` or `load`.

    Raises:
        InvalidShardingError: a parameter without a shard, a tensor whose place is unknown, or ranks that keep different
            values for one parameter.
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


def describe_optimizer(
    optimizer: Any, model_sharded_state_dict: ShardedStateDict, prefix: str
) -> tuple[OptimizerState, list[Entry]]:
    """Describe the optimizer on this rank, without its `settings`, which are returned besides."""
    optimizer = bare_optimizer(optimizer)
    described = OptimizerState(optimizer, prefix, _shards_of(optimizer, model_sharded_state_dict))
    settings: list[Entry] = []
    sections, rest = read_sections(optimizer)
    for section in sections:
        known: list[list[ParamState]] = [[] for _ in section.groups]
        described.own.sections.append((section.path, section.by_number, [len(g["params"]) for g in section.groups]))
        for number, place, param, shard in described.places(section):
            # Not state[param], which would make an entry.
            kept = param_state(described.own.names[place], section.state.get(param), not param.requires_grad)
            shards = described.add(section.path, place, param, shard, kept.tensors)
            kept = kept._replace(orders=orders) if (orders := orders_of(kept.tensors, param)) else kept
            if kept.name != shard.key:
                kept = kept._replace(forms={key: form_of(part) for key, part in shards.items()})
            known[number].append(kept)
        settings += describe(zip(section.groups, known, strict=True), section.path)
    if rest is not HOLE or [section.path for section in sections] != [()]:
        settings.append(rest_entry(rest, [(section.path, section.by_number) for section in sections]))
    return described, settings


def fill_gaps(described: OptimizerState, settings: list[Entry]) -> None:
    """Add zeros for parameters without a state that share a key with others that have one: a tensor is saved whole."""
    for section in read_sections(described.optimizer)[0]:
        forms = forms_by_key(settings, section.path)
        for _, place, param, shard in described.places(section) if forms else ():
            if shard.key in forms and not described["state"][place] and described.owns(param):
                blank = {}
                for name, form in forms[shard.key].items():
                    key = described.key(section.path, name)
                    blank[name] = state_target(
                        shard, param, None, key, {f"{key}.{shard.key}": StoredEntry(*form)}
                    ).zero_()
                described.add(section.path, place, param, shard, blank)


def _shards_of(
    optimizer: Any, model_sharded_state_dict: ShardedStateDict
) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    by_position = get_param_id_to_sharded_param_map(model_sharded_state_dict, params) if params else {}
    first = get_optim_param_to_id_map(params)
    shards: dict[int, ShardedTensor | ShardedTensorFactory] = {}
    for position, param in enumerate(params):
        shard = by_position.get(first[id(local_part(param))])
        if shard is not None:
            shards[id(local_part(param))] = shard
        elif not is_dtensor(param) or is_in_mesh(param):
            raise InvalidShardingError(
                f"parameter {position} of the optimizer, of shape {tuple(param.shape)}, has no shard in the "
                f"state dict of the model: put the module that has it there.{KEEP_VARS_HINT}"
            )
    return shards


def optimizer_targets(
    described: OptimizerState, settings: list[Entry], stored: Mapping[str, StoredEntry]
) -> OptimizerState:
    """Return what to load in the place of a described optimizer, given its stored settings and the stored keys."""
    targets = OptimizerState(described.optimizer, described.prefix, described.shards)
    for section in _sections_at(described.optimizer, stored_sections(settings)):
        path = section.path
        entries, forms = by_name(settings, path), forms_by_key(settings, path)
        targets.own.sections.append((path, section.by_number, [len(group["params"]) for group in section.groups]))
        for _, place, param, shard in targets.places(section):
            entry = entries.get(targets.own.names[place])
            # What is requested of a tensor is all of it, so zeros that were saved for no state are loaded, too.
            names = () if entry is None else entry["tensors"] or sorted(forms.get(shard.key, ()))
            if names and targets.owns(param):
                kept = param_state("", section.state.get(param), False).tensors
                orders = {} if entry is None else entry.get("orders", {})
                tensors = {
                    name: state_target(shard, param, kept.get(name), targets.key(path, name), stored, orders.get(name))
                    for name in names
                }
                targets.add(path, place, param, shard, tensors)
    targets["settings"] = LocalNonpersistentObject(settings)
    return targets


def _sections_at(optimizer: Any, wanted: Iterable[tuple[SectionPath, bool]]) -> list[Section]:
    """Return sections of an optimizer's state, those that it does not have yet without state."""
    current = {section.path: section for section in read_sections(optimizer)[0]}
    return [current.get(path, Section(path, by_number, optimizer.param_groups, {})) for path, by_number in wanted]


def load_sharded_optimizer_state_dict(optimizer: torch.optim.Optimizer, loaded: StateDict) -> None:
    """Give a torch optimizer what was loaded into its sharded state dict.

    States are set, also in a new optimizer that has made no step. Options of groups (learning rate and so on) become
    those that the parameters were saved with, except the choice of an implementation (`foreach`, `fused`,
    `capturable`, `differentiable`). Parameters that are not in the checkpoint keep what they have, with a warning.

    Args:
        optimizer: the one whose `sharded_optimizer_state_dict` was loaded.
        loaded: what `load` returned in its place.

    Raises:
        LoadMismatchError: tensors of the state were not loaded; the optimizer that was saved has other options; or
            parameters of one group were saved in groups with different options. Nothing is changed then.
    """
    if "settings" not in loaded or "own" not in loaded:
        raise LoadMismatchError(
            "This holds no settings of an optimizer: pass what load() returned in the place of "
            "sharded_optimizer_state_dict(optimizer, ...), from a checkpoint that was saved with it."
        )
    optimizer = bare_optimizer(optimizer)
    settings: list[Entry] = loaded["settings"]
    own: _Own = loaded["own"]
    owned = owned_parameters(optimizer)
    fresh: list[str] = []
    sections = _sections_at(optimizer, [(path, by_number) for path, by_number, _ in own.sections])
    restored = []
    for section, (*_, described) in zip(sections, own.sections, strict=True):
        sizes = [len(group["params"]) for group in section.groups]
        if sizes != described:
            raise LoadMismatchError(
                f"The optimizer has groups of {sizes} parameters, the one that was described had {described}: describe "
                "this optimizer before loading."
            )
        restored.append(_restored(section, own, settings, loaded.get("state", {}), owned, fresh))
    write_sections(optimizer, restored, stored_rest(settings))
    if fresh:
        logger.warning(
            "the checkpoint has no state of the optimizer for %s, which were not trained when it was saved: they start "
            "with what the optimizer has for them, nothing if it is new",
            summarize_keys(fresh),
        )


def _restored(
    section: Section,
    own: _Own,
    settings: list[Entry],
    loaded: Mapping[Any, Mapping[str, torch.Tensor]],
    owned: set[int] | None,
    fresh: list[str],
) -> Section:
    """Return a section with what was loaded. Names of parameters that have nothing in the checkpoint go to `fresh`."""
    entries = by_name(settings, section.path)
    state: dict[torch.Tensor, Any] = {}
    names: list[list[str]] = [[] for _ in section.groups]
    for number, place, param in _places(section):
        name = own.names.get(place)
        entry = entries.get(name)
        if name is not None:
            names[number].append(name)
            if param.requires_grad and (entry is None or entry.get("frozen")):
                fresh.append(name)
        if entry is None:
            state |= {param: section.state[param]} if param in section.state else {}
        elif entry["has_state"] and (owned is None or id(param) in owned):
            tensors = own.tensors.get(place, {})
            _fill(str(name), tensors, loaded.get(place, {}), entry)
            scalar = partial(_scalar, section.groups[number], param, section.state.get(param))
            state[param] = joined_state(entry, tensors, scalar, local_part(param).device)
    given = entries_of(settings, section.path)
    groups = [options_of(given, group, known) for group, known in zip(section.groups, names, strict=True)]
    return Section(section.path, section.by_number, groups, state)


def _fill(name: str, tensors: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor], entry: Entry) -> None:
    """Put what was loaded for a parameter into the tensors of the optimizer, where it is not there already."""
    if sorted(tensors) != entry["tensors"] or sorted(loaded) != entry["tensors"]:
        raise LoadMismatchError(
            f"For the parameter {name!r} the tensors {entry['tensors']} of the optimizer were saved, loaded were "
            f"{sorted(loaded)}. Pass the dict of sharded_optimizer_state_dict itself to load, without copying it.",
            unexpected=[name],
        )
    for key, tensor in tensors.items():
        target, value = local_part(tensor), local_part(loaded[key])
        if target is not value and (_memory(target) is None or _memory(target) != _memory(value)):
            target.detach().copy_(value)


def _scalar(
    group: Mapping[str, Any], param: Any, present: Any, name: str, number: Any, dtype: torch.dtype
) -> torch.Tensor:
    """Make a tensor without axes, where torch's own `load_state_dict` would have it."""
    own = present.get(name) if isinstance(present, dict) else None
    if isinstance(own, torch.Tensor):
        # In the form that the optimizer uses, where it has one.
        return torch.full_like(own, number)
    if name == "step" and not (group.get("capturable") or group.get("fused")):
        return torch.tensor(number, dtype=dtype)
    if name != "step" and not param.ndim and is_dtensor(param):
        return torch.full_like(param.detach(), number, dtype=dtype)
    return torch.tensor(number, dtype=dtype, device=local_part(param).device)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what all views of the whole of a tensor have in common; None for a tensor without memory."""
    local = local_part(tensor)
    if local.data_ptr() == 0:
        return None
    return local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride()

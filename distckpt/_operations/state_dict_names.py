"""Names of PyTorch's state dicts, translated for the objects that a load fills.

`torch.distributed.checkpoint` stores a module at `model` with the prefix `model.`, the state of an
optimizer at `optim` as `optim.state.<parameter>.<state>`, and its options as `optim.param_groups`.
Parameters go by name or number there, and by their keys here: `optim.state.<state>.<key>`.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import summarize_keys
from distckpt._base.tree import HOLE, at, dotted, leaves
from distckpt._checkpoint.model_keys import names_of_values, parameter_groups
from distckpt._checkpoint.stored_values import load_common_state, read_tensors
from distckpt._format import codec
from distckpt._format.foreign_formats import TORCH_DIST, is_export
from distckpt._format.manifest import Manifest
from distckpt._format.marker import names_of_module
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._mapping.sharded_tensor import ShardedTensor
from distckpt._mapping.wrappers import ShardedTensorFactory
from distckpt._models.dtensor import local_part
from distckpt._models.objects import Described, Kind
from distckpt._models.optimizer.description import OptimizerState
from distckpt._models.optimizer.shards import param_name
from distckpt._models.optimizer.state import Entry, ParamState, group_entries, rest_entry
from distckpt._models.optimizer.view import params_of, sharded_inner
from distckpt._operations.state_dict_values import (
    joined_value,
    nested_by_name,
    unknown_keys_error,
)
from distckpt._ranks.collectives import Ranks

logger = logging.getLogger(__name__)

_MODEL = "model."
_LIKE_PARAMETERS = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "exp_inf"),
    *("acc_delta", "grad_avg", "prev", "step_size", "sum", "ax", "variance"),
}
"""Names of states that have the shape of their parameter in all optimizers of torch."""
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Parts of the names that parameters have in wrappers of their module."""


@dataclass
class _Optimizer:
    """An optimizer of the request that a state dict is stored for.

    Attributes:
        path: in the state dict.
        prefix: of its keys here.
        params: its parameters: by key, their names there, and their numbers.
        count: of its parameters.
        own_names: the keys of its parameters, by the names that it was given with them.
        is_of_torch: its states have the shapes that torch's optimizers give them.
        by_number: whether parameters go by number there.
        states: the stored keys, by key of the parameter and name of the state.
    """

    path: tuple[Any, ...]
    prefix: str
    params: dict[str, tuple[str, int]]
    count: int
    own_names: dict[str, str] = field(default_factory=dict)
    is_of_torch: bool = True
    by_number: bool = False
    states: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def beginning(self) -> str:
        """What its keys begin with there."""
        return f"{dotted(self.path)}." if self.path else ""

    def number(self, numbers: Mapping[str, int]) -> None:
        """Number the parameters, by their keys, as they are there."""
        for key, (name, _) in self.params.items():
            self.params[key] = name, numbers[key]


@dataclass(frozen=True)
class Translation:
    """A checkpoint under the names of a request.

    Attributes:
        stored: a view of it.
        settings: of optimizers, by key.
        hidden: keys whose values are in the settings.
    """

    stored: StoredCheckpoint
    settings: Mapping[str, list[Entry]] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()


def translated(
    ranks: Ranks, stored: StoredCheckpoint, described: Described, has_optimizers: bool
) -> Translation:
    """Return a checkpoint under the names of a request's objects.

    `has_optimizers` is the same on all ranks: whether any of them requests some.

    Collective operation: all ranks must call it.

    Raises:
        LoadMismatchError: parameters go by number, and the optimizer has others.
    """
    if not _may_hold_state_dicts(stored, has_optimizers):
        return Translation(stored)
    has_model_prefix, united = _list_objects(ranks, stored, described)

    def settings_of_all() -> bytes:
        return codec.encode(_settings(stored, united))

    names = _names_of_module(stored) if has_model_prefix else {}
    if not names and not united:
        return Translation(stored)
    encoded = ranks.decide("read the settings of optimizers", settings_of_all)
    with ranks.phase("translate the names of the checkpoint"):
        settings: dict[str, list[Entry]] = {}
        hidden: set[str] = set()
        for optimizer, found in zip(united, cast(Any, codec.decode(encoded)), strict=True):
            if found is not None:
                path, optimizer.by_number, numbers, keys, entries = found
                hidden.update(keys)
                optimizer.path = tuple(path)
                optimizer.number(numbers)
                names.update(_names_of_states(stored, optimizer, hidden))
                settings.setdefault(f"{optimizer.prefix}.settings", []).extend(entries)
        view = replace(stored, manifest=_with_names(stored.manifest, names))
        return Translation(view, settings, frozenset(hidden))


def _may_hold_state_dicts(stored: StoredCheckpoint, has_optimizers: bool) -> bool:
    """Tell whether a checkpoint may hold state dicts of PyTorch: it was not made of objects."""
    manifest = stored.manifest
    if names_of_module(stored.marker) or is_export((manifest.origin or {}).get("format")):
        return False
    if any(key.endswith(".settings") for key in manifest.key_index):
        return False
    return has_optimizers or any(key.startswith(_MODEL) for key in manifest.key_index)


# --- The request ----------------------------------------------------------------------------------


def _list_objects(
    ranks: Ranks, stored: StoredCheckpoint, described: Described
) -> tuple[bool, list[_Optimizer]]:
    """Gather whether `model` has its prefix there, and all ranks' optimizers.

    Collective operation: all ranks must call it.
    """
    with ranks.phase("list the names of objects"):
        has_prefix = _has_model_prefix(stored, described)
        own = [vars(optimizer) for optimizer in _own_optimizers(described)]
    sent = map(json.loads, ranks.all_gather(json.dumps([has_prefix, own]).encode()))
    prefixes, listed = zip(*sent, strict=True)
    optimizers = (_Optimizer(**each) for each in itertools.chain.from_iterable(listed))
    return any(prefixes), _united(optimizers)


def _has_model_prefix(stored: StoredCheckpoint, described: Described) -> bool:
    """Tell whether the module at `model` is stored with that prefix."""
    known = stored.manifest.key_index
    for place in described.places:
        if place.is_model and place.path:
            keys = set(_keys_in(at(described.state_dict, place.path)))
            if not keys & known.keys():
                return any(f"{_MODEL}{key}" in known for key in keys)
    return False


def _keys_in(tree: Any) -> Iterator[str]:
    for _, shard in leaves(tree):
        if isinstance(shard, ShardedTensor | ShardedTensorFactory):
            yield shard.key


def _own_optimizers(described: Described) -> Iterator[_Optimizer]:
    """Yield the optimizers of this rank, with their parameters by key."""
    modules = [place.prefix for place in described.places if place.kind is Kind.MODULE]
    prefixes = sorted((f"{prefix}." for prefix in modules if prefix), key=len, reverse=True)
    for path, state in described.optimizers:
        groups = state.optimizer.param_groups
        params = params_of(groups)
        named = dict(_named_params(state, params, prefixes))
        numbers = _numbers_of_names(groups, range(len(params)))
        keys = {number: key for key, (_, number) in named.items()}
        own_names = {name: keys[number] for name, number in numbers.items() if number in keys}
        inner = sharded_inner(state.optimizer) or state.optimizer
        is_of_torch = type(inner).__module__.startswith("torch.optim.")
        yield _Optimizer(path, state.prefix, named, len(params), own_names, is_of_torch)


def _named_params(
    state: OptimizerState, params: Sequence[torch.Tensor], prefixes: Sequence[str]
) -> Iterator[tuple[str, tuple[str, int]]]:
    for number, param in enumerate(params):
        shard = state.shards.get(id(local_part(param)))
        if shard is not None:
            key = param_name(shard)
            prefix = next((each for each in prefixes if key.startswith(each)), "")
            yield key, (key.removeprefix(prefix), number)


def _united(optimizers: Iterable[_Optimizer]) -> list[_Optimizer]:
    """Return the optimizers of all ranks, by place, with the parameters of all."""
    united: dict[tuple[Any, ...], _Optimizer] = {}
    for each in optimizers:
        first = united.setdefault(tuple(each.path), replace(each, path=tuple(each.path)))
        first.params.update(each.params)
        first.own_names.update(each.own_names)
    return list(united.values())


# --- The checkpoint -------------------------------------------------------------------------------


def _names_of_module(stored: StoredCheckpoint) -> dict[str, str]:
    """Return the names of the module at `model` here, by those there."""
    known = stored.manifest.key_index
    names = {key: key.removeprefix(_MODEL) for key in known if key.startswith(_MODEL)}
    return {key: name for key, name in names.items() if name not in known}


def _settings(stored: StoredCheckpoint, optimizers: Sequence[_Optimizer]) -> list[Any]:
    """Return for each optimizer where its state dict is, whether parameters go by number, and the
    settings; None where no state dict is stored.
    """
    known = parameter_groups(_names_of_values(stored))
    for each in optimizers:
        # `get_state_dict(model, [first, second])` makes one of several.
        while each.path and isinstance(each.path[-1], int) and each.beginning not in known:
            each.path = each.path[:-1]
    if not any(each.beginning in known for each in optimizers):
        return [None] * len(optimizers)
    common = load_common_state(stored)
    return [
        _settings_of(stored, each, at(common, each.path, {})) if each.beginning in known else None
        for each in optimizers
    ]


def _names_of_values(stored: StoredCheckpoint) -> Iterable[str]:
    """Return the dotted paths of the values beside the tensors."""
    if _has_common_file(stored):
        return (dotted(path) for path, _ in leaves(load_common_state(stored)))
    return names_of_values(stored)


def _has_common_file(stored: StoredCheckpoint) -> bool:
    """Tell whether common state is in a file, as in exports and Megatron Core's checkpoints."""
    origin = stored.manifest.origin or {}
    return origin.get("format") == TORCH_DIST.name and not origin.get("paths")


def _has_states_of_others(stored: StoredCheckpoint, optimizer: _Optimizer) -> bool:
    """Tell whether Megatron Core has stored states, which are not those of one parameter."""
    start = f"{optimizer.beginning}state."
    has_states = any(key.startswith(start) for key in stored.manifest.key_index)
    return has_states and not optimizer.states and _has_common_file(stored)


def _settings_of(
    stored: StoredCheckpoint, optimizer: _Optimizer, tree: Any
) -> tuple[Sequence[Any], bool, dict[str, int], list[str], list[Entry]] | None:
    """Return where an optimizer is, whether parameters go by number, their numbers by key, the keys
    of tensors in the settings, and these; None where its states are in another order, as in
    Megatron Core's checkpoints.

    `tree` has what is stored of it besides tensors.
    """
    scalars = _scalars_of(stored, optimizer)
    groups = _groups(tree, optimizer, scalars)
    _find_states(stored, optimizer, groups)
    if _has_states_of_others(stored, optimizer):
        return None
    entries = _entries_of_groups(stored, optimizer, tree, groups, scalars)
    keys_of_rest: list[str] = []
    if optimizer.by_number and optimizer.beginning:
        rest, keys_of_rest = _rest_of(stored, optimizer, tree, groups)
        entries += [rest_entry(rest, [((), True)])] if rest else []
    numbers = {key: number for key, (_, number) in optimizer.params.items()}
    hidden = _keys_of_options(stored, optimizer) + keys_of_rest
    return list(optimizer.path), optimizer.by_number, numbers, hidden, entries


def _entries_of_groups(
    stored: StoredCheckpoint,
    optimizer: _Optimizer,
    tree: Any,
    groups: Iterable[dict[str, Any]],
    scalars: Mapping[str, torch.Tensor],
) -> list[Entry]:
    keys = {pair[optimizer.by_number]: key for key, pair in optimizer.params.items()}
    pairs = []
    for group in groups:
        own = [name for name in group["params"] if name in keys]
        states = [_state_of(stored, optimizer, tree, keys[name], scalars) for name in own]
        pairs.append((group, states))
    if not optimizer.is_of_torch:
        _warn_of_nested(optimizer, pairs)
    return group_entries(pairs, {})


def _warn_of_nested(
    optimizer: _Optimizer, pairs: Iterable[tuple[dict[str, Any], Sequence[ParamState]]]
) -> None:
    """Warn of lists and dicts that are told by names alone: an own name may have dots, too."""
    states = itertools.chain.from_iterable(of_group for _, of_group in pairs)
    names: set[str] = set()
    for state in states:
        names.update(name for name, value in state.values.items() if _holds_tensors_alone(value))
    if names:
        logger.warning(
            "the states %s of the optimizer at %r are loaded as lists and dicts, since PyTorch "
            "names their tensors with dots. If these are whole names of states, load the state "
            "dict itself, and give it to load_state_dict",
            summarize_keys(sorted(names)),
            dotted(optimizer.path),
        )


def _holds_tensors_alone(value: Any) -> bool:
    found = [leaf for _, leaf in leaves(value)]
    return bool(found) and all(leaf is HOLE for leaf in found)


def _find_states(
    stored: StoredCheckpoint, optimizer: _Optimizer, groups: Sequence[Mapping[str, Any]]
) -> None:
    """Find the keys of states, for parameters by name or by number."""
    names = [name for group in groups for name in group["params"]]
    optimizer.by_number = any(type(name) is int for name in names)
    has_names = optimizer.by_number and _number_by_name(optimizer, groups, names)
    optimizer.states = _states_of(stored, optimizer)
    if optimizer.by_number:
        if not has_names:
            _check_numbers(optimizer, len(names))
        _check_shapes(stored, optimizer)


def _number_by_name(
    optimizer: _Optimizer, groups: Sequence[Mapping[str, Any]], numbers: Sequence[Any]
) -> bool:
    """Give parameters the numbers that were stored with their names; return whether there are any.
    A parameter without a stored name gets -1.
    """
    stored = _numbers_of_names(groups, numbers)
    of_model = {_without_wrappers(name): key for key, (name, _) in optimizer.params.items()}
    for keys in (optimizer.own_names, of_model):
        if stored.keys() & keys.keys():
            found = {key: stored[name] for name, key in keys.items() if name in stored}
            optimizer.number({key: found.get(key, -1) for key in optimizer.params})
            return True
    if stored and optimizer.params:
        logger.warning(
            "the state of the optimizer at %r names its parameters %s, and none of these is here: "
            "it is loaded in the order of the parameters",
            dotted(optimizer.path),
            summarize_keys(stored),
        )
    return False


def _numbers_of_names(
    groups: Sequence[Mapping[str, Any]], numbers: Sequence[Any]
) -> dict[str, Any]:
    """Return the numbers of parameters by the names that an optimizer was given with them, if it
    was.
    """
    names = [name for group in groups for name in group.get("param_names") or ()]
    if len(names) != len(numbers):
        return {}
    return dict(zip(map(_without_wrappers, names), numbers, strict=True))


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _states_of(stored: StoredCheckpoint, optimizer: _Optimizer) -> dict[str, dict[str, str]]:
    """Return which keys hold the states of the parameters of an optimizer."""
    found: dict[str, dict[str, str]] = {}
    keys = {str(pair[optimizer.by_number]): key for key, pair in optimizer.params.items()}
    start = f"{optimizer.beginning}state."
    for there in stored.manifest.key_index:
        if there.startswith(start):
            rest = there.removeprefix(start)
            ends = (place for place, sign in enumerate(rest) if sign == ".")
            end = next((place for place in ends if rest[:place] in keys), None)
            if end is not None:
                found.setdefault(keys[rest[:end]], {})[rest[end + 1 :]] = there
    return found


def _is_scalar(stored: StoredCheckpoint, key: str) -> bool:
    return not stored.global_shape(key)


def _scalars_of(stored: StoredCheckpoint, optimizer: _Optimizer) -> dict[str, torch.Tensor]:
    """Read the options of an optimizer that are tensors, and the tensors without axes of its
    states, by key.
    """
    start = f"{optimizer.beginning}state."
    known = stored.manifest.key_index
    keys = [key for key in known if key.startswith(start) and _is_scalar(stored, key)]
    return _read(stored, keys + _keys_of_options(stored, optimizer))


def _keys_of_options(stored: StoredCheckpoint, optimizer: _Optimizer) -> list[str]:
    start = f"{optimizer.beginning}param_groups."
    return [key for key in stored.manifest.key_index if key.startswith(start)]


def _read(stored: StoredCheckpoint, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    return dict(zip(keys, read_tensors(stored, keys), strict=True))


def _rest_of(
    stored: StoredCheckpoint, optimizer: _Optimizer, tree: Any, groups: Iterable[Any]
) -> tuple[dict[Any, Any], list[str]]:
    """Return the values that belong to no parameter, of a state dict by number, and the keys of
    those that are tensors.
    """
    numbers = {str(number) for group in groups for number in group["params"]}
    kept = {key: value for key, value in tree.items() if key not in ("state", "param_groups")}
    states = _states_in(tree)
    if others := {key: value for key, value in states.items() if str(key) not in numbers}:
        kept["state"] = others
    keys = _keys_of_rest(stored, optimizer, numbers)
    tensors = _read(stored, keys)
    names = {key.removeprefix(optimizer.beginning): tensors[key] for key in keys}
    what = f"optimizer at {dotted(optimizer.path)!r}"
    return joined_value(kept, nested_by_name(names), what), keys


def _keys_of_rest(
    stored: StoredCheckpoint, optimizer: _Optimizer, numbers: Container[str]
) -> list[str]:
    found = []
    for key in stored.manifest.key_index if optimizer.beginning else ():
        first, *others = key.removeprefix(optimizer.beginning).split(".")
        is_of_parameter = first == "param_groups" or (first == "state" and others[0] in numbers)
        if key.startswith(optimizer.beginning) and not (is_of_parameter or stored.is_object(key)):
            found.append(key)
    return found


def _groups(
    tree: Any, optimizer: _Optimizer, scalars: Mapping[str, torch.Tensor]
) -> list[dict[str, Any]]:
    """Return parameter groups; where options are stored for each parameter, one for each."""
    start = f"{optimizer.beginning}param_groups."
    options = {key.removeprefix(start): v for key, v in scalars.items() if key.startswith(start)}
    if isinstance(tree.get("param_groups"), list):
        nested = nested_by_name(options)
        return [
            joined_value(group, nested.get(str(number), {}), "param_groups")
            for number, group in enumerate(tree["param_groups"])
        ]
    flat = {key.removeprefix("param_groups."): value for key, value in tree.items()}
    names = [name for name, _ in optimizer.params.values()]
    found = {name: {**_options(flat, name), **_options(options, name)} for name in names}
    return [{"params": [name], **values} for name, values in found.items() if values]


def _options(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the values whose keys are a name and one more, by the latter."""
    pairs = ((key.rpartition("."), value) for key, value in values.items())
    return {last: value for (first, _, last), value in pairs if first == name}


def _state_of(
    stored: StoredCheckpoint,
    optimizer: _Optimizer,
    tree: Any,
    key: str,
    scalars: Mapping[str, torch.Tensor],
) -> ParamState:
    """Return the state of a parameter, without the values of tensors that have axes."""
    keys = optimizer.states.get(key, {})
    own: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    for state, there in keys.items():
        if _is_setting(stored, state, there):
            own[state] = scalars[there]
            continue
        shape, dtype = stored.global_shape(there), _dtype(stored, there)
        tensors[state] = torch.empty(shape, dtype=dtype, device="meta")
    values = _values_of(tree, optimizer.params[key][optimizer.by_number])
    nested = nested_by_name({state: HOLE for state in tensors})
    for name, parts in nested.items():
        if name.isdecimal():
            raise unknown_keys_error(f"state of {key!r}")
        if isinstance(parts, dict):
            values[name] = joined_value(values.get(name), parts, f"{name!r} of {key!r}")
    return ParamState(key, tensors, values, own, has_state=bool(keys or values))


def _is_setting(stored: StoredCheckpoint, state: str, key: str) -> bool:
    """Tell whether a state is a tensor without axes that is in no list or dict."""
    return _is_scalar(stored, key) and "." not in state


def _values_of(tree: Any, name: str | int) -> dict[str, Any]:
    """Return the values of the state of a parameter that are no tensors."""
    values = _options({k: v for k, v in tree.items() if k.startswith("state.")}, f"state.{name}")
    states = _states_in(tree)
    # torch turns the keys of dicts into text.
    kept = states.get(name, states.get(str(name)))
    return {**values, **kept} if isinstance(kept, dict) else values


def _states_in(tree: Any) -> dict[Any, Any]:
    states = tree.get("state", {})
    # Where the numbers of parameters were taken for places.
    return dict(enumerate(states)) if isinstance(states, list) else states


def _dtype(stored: StoredCheckpoint, key: str) -> torch.dtype:
    return FROM_NAME[stored.dtype_name(key)]


def _check_numbers(optimizer: _Optimizer, count: int) -> None:
    """Check that an optimizer has as many parameters as were numbered."""
    numbers = {number for _, number in optimizer.params.values()}
    if count != optimizer.count or len(numbers) != len(optimizer.params):
        raise LoadMismatchError(
            f"The state of the optimizer at {dotted(optimizer.path)!r} goes by the numbers of "
            f"{count} parameters, and this optimizer has {optimizer.count} on a rank: create the "
            "optimizer that was saved, or leave it out of the state dict."
        )


def _check_shapes(stored: StoredCheckpoint, optimizer: _Optimizer) -> None:
    """Check that states have the shapes of their parameters, or size 1 along some axes. Optimizers
    that are not torch's may have others under the same names: then a warning says so.
    """
    for key, states in optimizer.states.items():
        shape = _shape_of(stored, key)
        for state in sorted(_LIKE_PARAMETERS & states.keys()):
            found = stored.global_shape(states[state])
            if shape is None or _are_alike(found, shape):
                continue
            number = optimizer.params[key][1]
            text = (
                f"{state!r} of parameter {number} of the optimizer at {dotted(optimizer.path)!r} "
                f"has shape {found}, and parameter {number} here is {key!r} of shape {shape}: "
                "create the optimizer with its parameters in the order in which it was saved."
            )
            if optimizer.is_of_torch:
                raise LoadMismatchError(text)
            logger.warning("%s Unless this optimizer keeps states of other shapes.", text)
            return


def _are_alike(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    pairs = zip(found, shape, strict=False)
    return len(found) == len(shape) and all(size in (1, whole) for size, whole in pairs)


def _shape_of(stored: StoredCheckpoint, key: str) -> tuple[int, ...] | None:
    """Return the shape of a parameter, if it is stored."""
    known = stored.manifest.key_index
    name = next((each for each in (key, f"{_MODEL}{key}") if each in known), None)
    return None if name is None else stored.global_shape(name)


# --- The view -------------------------------------------------------------------------------------


def _names_of_states(
    stored: StoredCheckpoint, optimizer: _Optimizer, hidden: set[str]
) -> dict[str, str]:
    """Return the names of an optimizer's tensors here, by those there; add keys to `hidden` whose
    values are in the settings.
    """
    names = {}
    for key, states in _states_of(stored, optimizer).items():
        for state, there in states.items():
            if _is_setting(stored, state, there):
                hidden.add(there)
            else:
                names[there] = f"{optimizer.prefix}.state.{state}.{key}"
    return names


def _with_names(manifest: Manifest, names: Mapping[str, str]) -> Manifest:
    """Return a manifest with other names for some keys."""
    aliases = manifest.aliases.items()
    return manifest.replaced(
        keys=[names.get(key, key) for key in manifest.keys],
        aliases={names.get(alias, alias): names.get(key, key) for alias, key in aliases},
    )

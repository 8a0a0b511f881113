"""States of optimizers in PyTorch's state dicts, read as settings.

Parameters go by name or number there. `state_dict_names` translates the keys of their tensors.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import summarize_keys
from distckpt._base.tree import HOLE, at, dotted, leaves
from distckpt._checkpoint.model_keys import names_of_values, parameter_groups
from distckpt._checkpoint.stored_values import load_common_state, read_tensors
from distckpt._foreign.state_dicts.values import (
    joined_value,
    nested_by_name,
    unknown_keys_error,
)
from distckpt._format.foreign_formats import TORCH_DIST
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._models.optimizer.read import ParamState
from distckpt._models.optimizer.settings import Entry, group_entries, rest_entry

logger = logging.getLogger(__name__)

MODEL = "model."
"""Prefix of the tensors of a module at `model`."""
_ELSEWHERE = torch.empty(0, device="meta")
"""Placeholder of a tensor with values outside the settings."""
_LIKE_PARAMETERS = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "exp_inf"),
    *("acc_delta", "grad_avg", "prev", "step_size", "sum", "ax", "variance"),
}
"""Names of states with the shape of their parameter in torch's optimizers."""
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Parts of the names that parameters have in wrappers of their module."""


@dataclass
class OptimizerNames:
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
        """Beginning of its keys there."""
        if not self.path:
            return ""
        return f"{dotted(self.path)}."


def read_settings(
    stored: StoredCheckpoint, optimizers: Sequence[OptimizerNames]
) -> tuple[dict[str, str], dict[str, list[Entry]], list[str]]:
    """Read the stored settings of optimizers.

    Returns the names here of the tensors of their states, the settings by their key, and the keys
    whose values are in the settings.
    """
    names: dict[str, str] = {}
    settings: dict[str, list[Entry]] = {}
    hidden: list[str] = []
    if not optimizers:
        return names, settings, hidden
    known = parameter_groups(_names_of_values(stored))
    common = None
    for optimizer in optimizers:
        if not _is_stored(optimizer, known):
            continue
        if common is None:
            common = load_common_state(stored)
        entries = _settings_of(stored, optimizer, at(common, optimizer.path, {}), hidden)
        if entries is None:
            continue
        settings.setdefault(f"{optimizer.prefix}.settings", []).extend(entries)
        for key, states in optimizer.states.items():
            for state, there in states.items():
                if _is_setting(stored, state, there):
                    hidden.append(there)
                else:
                    names[there] = f"{optimizer.prefix}.state.{state}.{key}"
    return names, settings, hidden


def _is_stored(optimizer: OptimizerNames, known: Container[str]) -> bool:
    """Whether an optimizer, or several together, has a state dict."""
    # `get_state_dict(model, [first, second])` makes one of several.
    while optimizer.path and isinstance(optimizer.path[-1], int):
        if optimizer.beginning in known:
            break
        optimizer.path = optimizer.path[:-1]
    return optimizer.beginning in known


def _names_of_values(stored: StoredCheckpoint) -> Iterable[str]:
    """Return the dotted paths of the values beside the tensors."""
    if _has_common_file(stored):
        return (dotted(path) for path, _ in leaves(load_common_state(stored)))
    return names_of_values(stored)


def _has_common_file(stored: StoredCheckpoint) -> bool:
    """Tell whether common state is in a file.

    It is in exports, and in checkpoints of Megatron Core.
    """
    origin = stored.manifest.notes
    return origin.get("format") == TORCH_DIST.name and not origin.get("paths")


def _keys_below(stored: StoredCheckpoint, optimizer: OptimizerNames, name: str) -> list[str]:
    """Return the stored keys of one entry of an optimizer's state dict."""
    start = f"{optimizer.beginning}{name}."
    return [key for key in stored.manifest.key_index if key.startswith(start)]


def _settings_of(
    stored: StoredCheckpoint, optimizer: OptimizerNames, tree: Any, hidden: list[str]
) -> list[Entry] | None:
    """Read the settings of an optimizer.

    The keys of tensors in them are appended to `hidden`. None where its states are in another
    order, as in Megatron Core's checkpoints. `tree` has its stored values other than tensors.
    """
    keys_of_states = _keys_below(stored, optimizer, "state")
    keys_of_options = _keys_below(stored, optimizer, "param_groups")
    numbers = [key for key in keys_of_states if not stored.global_shape(key)]
    scalars = _read(stored, numbers + keys_of_options)
    groups = _groups(tree, optimizer, scalars)
    _find_states(stored, optimizer, groups)
    if keys_of_states and not optimizer.states and _has_common_file(stored):
        # Megatron Core has stored states of several parameters together.
        return None
    entries = _entries_of_groups(stored, optimizer, tree, groups, scalars)
    hidden += keys_of_options
    if optimizer.by_number and optimizer.beginning:
        rest, keys_of_rest = _rest_of(stored, optimizer, tree, groups)
        hidden += keys_of_rest
        if rest:
            entries.append(rest_entry(rest, [((), True)]))
    return entries


def _entries_of_groups(
    stored: StoredCheckpoint,
    optimizer: OptimizerNames,
    tree: Any,
    groups: Iterable[dict[str, Any]],
    scalars: Mapping[str, torch.Tensor],
) -> list[Entry]:
    keys = {pair[optimizer.by_number]: key for key, pair in optimizer.params.items()}
    values = _values_of_states(tree, keys)
    pairs = []
    for group in groups:
        own = [name for name in group["params"] if name in keys]
        states = []
        for name in own:
            states.append(_state_of(stored, optimizer, keys[name], values.get(name, {}), scalars))
        pairs.append((group, states))
    if not optimizer.is_of_torch:
        _warn_of_nested(optimizer, pairs, is_flat=not _has_groups(tree))
    return group_entries(pairs, {})


def _warn_of_nested(
    optimizer: OptimizerNames,
    pairs: Iterable[tuple[dict[str, Any], Sequence[ParamState]]],
    is_flat: bool,
) -> None:
    """Warn of lists and dicts that are told by names alone: a state's own name may have dots.

    In a flattened state dict, all are.
    """
    names: set[str] = set()
    for state in itertools.chain.from_iterable(of_group for _, of_group in pairs):
        for name, value in state.values.items():
            kinds = {leaf is HOLE for _, leaf in leaves(value)}
            if kinds == {True} or (is_flat and isinstance(value, dict)):
                names.add(name)
    if names:
        logger.warning(
            "the states %s of the optimizer at %r are loaded as lists and dicts, since PyTorch "
            "names their items with dots. If these are whole names of states, load the state "
            "dict itself, and give it to load_state_dict",
            summarize_keys(sorted(names)),
            dotted(optimizer.path),
        )


def _find_states(
    stored: StoredCheckpoint, optimizer: OptimizerNames, groups: Sequence[Mapping[str, Any]]
) -> None:
    """Find the keys of states, for parameters by name or by number."""
    names: list[Any] = []
    for group in groups:
        names += group["params"]
    optimizer.by_number = any(type(name) is int for name in names)
    has_names = optimizer.by_number and _number_by_name(optimizer, groups, names)
    optimizer.states = _states_of(stored, optimizer)
    if optimizer.by_number:
        if not has_names:
            _check_numbers(optimizer, len(names))
        _check_shapes(stored, optimizer)


def _number_by_name(
    optimizer: OptimizerNames, groups: Sequence[Mapping[str, Any]], numbers: Sequence[Any]
) -> bool:
    """Give parameters the numbers that were stored with their names; return whether there are any.
    A parameter without a stored name gets -1.
    """
    stored = numbers_of_names(groups, numbers)
    of_model = {_without_wrappers(name): key for key, (name, _) in optimizer.params.items()}
    for keys in (optimizer.own_names, of_model):
        if stored.keys() & keys.keys():
            by_key = {key: stored[name] for name, key in keys.items() if name in stored}
            for key, (name, _) in optimizer.params.items():
                optimizer.params[key] = name, by_key.get(key, -1)
            return True
    if stored and optimizer.params:
        logger.warning(
            "the state of the optimizer at %r names its parameters %s, and none of these is here: "
            "it is loaded in the order of the parameters",
            dotted(optimizer.path),
            summarize_keys(stored),
        )
    return False


def numbers_of_names(groups: Sequence[Mapping[str, Any]], numbers: Sequence[Any]) -> dict[str, Any]:
    """Return the numbers of parameters by the names in the groups, if there are any."""
    names: list[str] = []
    for group in groups:
        names += group.get("param_names") or ()
    if len(names) != len(numbers):
        return {}
    return dict(zip(map(_without_wrappers, names), numbers, strict=True))


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _states_of(stored: StoredCheckpoint, optimizer: OptimizerNames) -> dict[str, dict[str, str]]:
    """Return the keys of states, by parameter and name of the state."""
    states: dict[str, dict[str, str]] = {}
    keys = {str(pair[optimizer.by_number]): key for key, pair in optimizer.params.items()}
    for there in _keys_below(stored, optimizer, "state"):
        rest = there.removeprefix(f"{optimizer.beginning}state.")
        name, state = _divided(rest, keys)
        if state:
            states.setdefault(keys[name], {})[state] = there
    return states


def _divided(name: str, params: Container[Any]) -> tuple[str, str]:
    """Divide a name into that of a parameter and that of its state, "" for another's state."""
    for place, sign in enumerate(name):
        if sign == "." and name[:place] in params:
            return name[:place], name[place + 1 :]
    return name, ""


def _read(stored: StoredCheckpoint, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    return dict(zip(keys, read_tensors(stored, keys), strict=True))


def _rest_of(
    stored: StoredCheckpoint, optimizer: OptimizerNames, tree: Any, groups: Iterable[Any]
) -> tuple[dict[Any, Any], list[str]]:
    """Return the values that belong to no parameter, and the keys of tensors in them.

    Parameters of the state dict go by number.
    """
    numbers: set[str] = set()
    for group in groups:
        numbers.update(map(str, group["params"]))
    rest = {key: value for key, value in tree.items() if key not in ("state", "param_groups")}
    states = _states_in(tree)
    if others := {key: value for key, value in states.items() if str(key) not in numbers}:
        rest["state"] = others
    keys = _keys_of_rest(stored, optimizer, numbers)
    tensors = _read(stored, keys)
    names = {key.removeprefix(optimizer.beginning): tensors[key] for key in keys}
    what = f"optimizer at {dotted(optimizer.path)!r}"
    return joined_value(rest, nested_by_name(names), what), keys


def _keys_of_rest(
    stored: StoredCheckpoint, optimizer: OptimizerNames, numbers: Container[str]
) -> list[str]:
    keys = []
    for key in stored.manifest.key_index:
        first, *others = key.removeprefix(optimizer.beginning).split(".")
        is_of_parameter = first == "param_groups" or (first == "state" and others[0] in numbers)
        if key.startswith(optimizer.beginning) and not (is_of_parameter or stored.is_object(key)):
            keys.append(key)
    return keys


def _groups(
    tree: Any, optimizer: OptimizerNames, scalars: Mapping[str, torch.Tensor]
) -> list[dict[str, Any]]:
    """Return parameter groups; where options are stored for each parameter, one for each."""
    start = f"{optimizer.beginning}param_groups."
    options = {key.removeprefix(start): v for key, v in scalars.items() if key.startswith(start)}
    if _has_groups(tree):
        nested = nested_by_name(options)
        return [
            joined_value(group, nested.get(str(number), {}), "param_groups")
            for number, group in enumerate(tree["param_groups"])
        ]
    flat = {key.removeprefix("param_groups."): value for key, value in tree.items()}
    names = [name for name, _ in optimizer.params.values()]
    groups = []
    for name in names:
        if values := _options(flat, name) | _options(options, name):
            groups.append({"params": [name], **values})
    return groups


def _has_groups(tree: Any) -> bool:
    """Tell whether options are stored by group, not for each parameter (flattened)."""
    return isinstance(tree.get("param_groups"), list)


def _options(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the values whose keys are a name and one more part, by that part."""
    pairs = ((key.rpartition("."), value) for key, value in values.items())
    return {last: value for (first, _, last), value in pairs if first == name}


def _state_of(
    stored: StoredCheckpoint,
    optimizer: OptimizerNames,
    key: str,
    values: dict[str, Any],
    scalars: Mapping[str, torch.Tensor],
) -> ParamState:
    """Return the state of a parameter; tensors with axes are `_ELSEWHERE`.

    `values` are its other values, to which tensors in lists and dicts are added.
    """
    keys = optimizer.states.get(key, {})
    own: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    for state, there in keys.items():
        if _is_setting(stored, state, there):
            own[state] = scalars[there]
        else:
            tensors[state] = _ELSEWHERE
    nested = nested_by_name({state: HOLE for state in tensors})
    for name, parts in nested.items():
        if name.isdecimal():
            raise unknown_keys_error(f"state of {key!r}")
        if isinstance(parts, dict):
            values[name] = joined_value(values.get(name), parts, f"{name!r} of {key!r}")
    return ParamState(key, tensors, values, own, has_state=bool(keys or values))


def _is_setting(stored: StoredCheckpoint, state: str, key: str) -> bool:
    """Whether a state is a scalar outside of lists and dicts."""
    return not stored.global_shape(key) and "." not in state


def _values_of_states(tree: Any, params: Container[Any]) -> dict[Any, dict[str, Any]]:
    """Return the values in states other than tensors, by name of the parameter and of the state."""
    flat: dict[Any, dict[str, Any]] = {}
    for key, value in tree.items():
        name, state = _divided(str(key).removeprefix("state."), params)
        if state and str(key).startswith("state."):
            flat.setdefault(name, {})[state] = value
    values: dict[Any, dict[str, Any]] = {}
    for name, states in flat.items():
        values[name] = nested_by_name(states)
    for name, states in _states_in(tree).items():
        # torch turns the keys of dicts into text.
        own = int(name) if name not in params and str(name).isdecimal() else name
        if isinstance(states, dict):
            values[own] = {**values.get(own, {}), **states}
    return values


def _states_in(tree: Any) -> dict[Any, Any]:
    states = tree.get("state", {})
    # Where the numbers of parameters were taken for places.
    return dict(enumerate(states)) if isinstance(states, list) else states


def _check_numbers(optimizer: OptimizerNames, count: int) -> None:
    """Check that an optimizer has as many parameters as were numbered."""
    numbers = {number for _, number in optimizer.params.values()}
    if count != optimizer.count or len(numbers) != len(optimizer.params):
        raise LoadMismatchError(
            f"The state of the optimizer at {dotted(optimizer.path)!r} goes by the numbers of "
            f"{count} parameters, and this optimizer has {optimizer.count} on a rank: create the "
            "optimizer that was saved, or leave it out of the state dict."
        )


def _check_shapes(stored: StoredCheckpoint, optimizer: OptimizerNames) -> None:
    """Check that states have the shapes of their parameters.

    They may have size 1 along some axes. Optimizers that are not torch's may have other states
    under the same names: then a warning says so.
    """
    for key, states in optimizer.states.items():
        shape = _shape_of(stored, key)
        for state in sorted(_LIKE_PARAMETERS & states.keys()):
            own = stored.global_shape(states[state])
            if shape is None or _has_shape(own, shape):
                continue
            number = optimizer.params[key][1]
            text = (
                f"{state!r} of parameter {number} of the optimizer at {dotted(optimizer.path)!r} "
                f"has shape {own}, and parameter {number} here is {key!r} of shape {shape}: "
                "create the optimizer with its parameters in the order in which it was saved."
            )
            if optimizer.is_of_torch:
                raise LoadMismatchError(text)
            logger.warning("%s Unless this optimizer keeps states of other shapes.", text)
            return


def _has_shape(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    pairs = zip(own, shape, strict=False)
    return len(own) == len(shape) and all(size in (1, whole) for size, whole in pairs)


def _shape_of(stored: StoredCheckpoint, key: str) -> tuple[int, ...] | None:
    """Return the shape of a parameter, if it is stored."""
    known = stored.manifest.key_index
    for name in (key, f"{MODEL}{key}"):
        if name in known:
            return stored.global_shape(name)
    return None

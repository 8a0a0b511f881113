"""What an optimizer keeps for each parameter: read from it without a step, and put back.

Optimizers of the plain form (`state` and `param_groups` of `torch.optim.Optimizer`, with its
`state_dict`) are read and written in place. Those that make a state dict of their own, such as
Lookahead, which wraps another optimizer, are asked for it and given one. The sections of it, which
have values for each parameter, are found by their form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from distckpt._base.tree import HOLE, Position, fold, is_dict, map_nodes, without_holes

_DELEGATES = frozenset({"AcceleratedOptimizer", "_FabricOptimizer"})
"""Classes of accelerate and Fabric around an optimizer, which keep nothing of their own."""
_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class Section(NamedTuple):
    """A part of an optimizer's state dict that has values for each parameter.

    `path` are the keys that lead to it. With `by_number` it is `{"state": ..., "param_groups":
    ...}`, else a dict with parameters as keys. `groups` hold options and, as `params`, parameters;
    `state` is by parameter.
    """

    path: tuple[str, ...]
    by_number: bool
    groups: list[dict[str, Any]]
    state: dict[torch.Tensor, Any]


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
    return optimizer.optim if is_sharded else None


def owned_parameters(optimizer: Any) -> set[int] | None:
    """Return the `id()` of those parameters whose state this rank keeps; None for all."""
    inner = sharded_inner(optimizer)
    if inner is None:
        return None
    return {id(param) for param in params_of(inner.param_groups)}


def read_sections(optimizer: Any) -> tuple[list[Section], Any]:
    """Return the sections of an optimizer's state, and the rest of its state dict (or `HOLE`)."""
    inner = sharded_inner(optimizer)
    groups = optimizer.param_groups
    if inner is None and not _is_plain(optimizer):
        return _take_sections(optimizer.state_dict(), groups)
    state = (inner or optimizer).state
    others = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
    if not others:
        return [Section((), True, groups, state)], HOLE
    by_param = {key: value for key, value in state.items() if key not in others}
    return [Section((), True, groups, by_param)], {"state": others}


def write_sections(
    optimizer: Any, own: Iterable[Section], given: Iterable[Section], rest: Any
) -> None:
    """Replace the `own` sections of an optimizer, and the rest of its state dict.

    Parameters of the groups that have no state in the given ones lose theirs.
    """
    inner = sharded_inner(optimizer)
    if inner is None and not _is_plain(optimizer):
        _load_sections(optimizer, own, given, rest)
        return
    state = (inner or optimizer).state
    shared = {} if rest is HOLE else rest.get("state", {})
    for section in given:
        for param in params_of(section.groups):
            state.pop(param, None)
        state.update({**section.state, **shared})
        for holder in filter(None, (optimizer, inner)):
            _set_groups(holder, section.groups)
    pairs = zip(optimizer.param_groups, inner.param_groups, strict=True) if inner else ()
    for outer, below in pairs:
        _set_options(outer, below)


def _load_sections(
    optimizer: Any, own: Iterable[Section], given: Iterable[Section], rest: Any
) -> None:
    """Give an optimizer sections by its `load_state_dict`."""
    tree = {} if rest is HOLE else rest
    for section, replaced in zip(given, own, strict=True):
        _put_section(tree, section, replaced)
    optimizer.load_state_dict(tree)


def params_of(groups: Iterable[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Return the parameters of all groups."""
    return [param for group in groups for param in group["params"]]


def _is_plain(optimizer: Any) -> bool:
    base, cls = torch.optim.Optimizer, type(optimizer)
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
    """Return the sections of a state dict, and the rest of it, `HOLE` for nothing."""
    found: list[Section] = []

    def take(path: Position, node: Any) -> Any:
        if not isinstance(node, dict) or not all(isinstance(key, str) for key in path):
            return node
        section, rest = _divide(node, path, groups)
        if section is not None:
            found.append(section)
        return rest if rest or not node else HOLE

    rest = map_nodes(take, tree, is_dict)
    return found, fold(lambda leaf: leaf, without_holes, rest, is_dict)


def _divide(
    node: dict[Any, Any], path: tuple[str, ...], groups: list[dict[str, Any]]
) -> tuple[Section | None, dict[Any, Any]]:
    """Divide a dict into the section that it is, if it is one, and its other entries."""
    params = _numbered_params(node, groups)
    if params is not None:
        return _divide_numbered(node, path, params)
    by_param = {key: value for key, value in node.items() if isinstance(key, torch.Tensor)}
    if not by_param:
        return None, node
    rest = {key: value for key, value in node.items() if key not in by_param}
    return Section(path, False, [{"params": params_of(groups)}], by_param), rest


def _divide_numbered(
    node: dict[Any, Any], path: tuple[str, ...], params: dict[int, torch.Tensor]
) -> tuple[Section, dict[Any, Any]]:
    rest = dict(node)
    groups = [
        {**group, "params": [params[number] for number in group["params"]]}
        for group in rest.pop("param_groups")
    ]
    state: dict[torch.Tensor, Any] = {}
    others: dict[Any, Any] = {}
    for key, value in rest.pop("state").items():
        if key in params:
            state[params[key]] = value
        else:
            others[key] = value
    if others:
        rest["state"] = others
    return Section(path, True, groups, state), rest


def _numbered_params(
    node: Mapping[Any, Any], groups: list[dict[str, Any]]
) -> dict[int, torch.Tensor] | None:
    """Return the parameters by their numbers in a state dict of the usual form; None for a dict of
    another form.
    """
    own, state = node.get("param_groups"), node.get("state")
    if not isinstance(own, list) or not isinstance(state, dict) or len(own) != len(groups):
        return None
    pairs = [
        (group.get("params"), given["params"]) for group, given in zip(own, groups, strict=True)
    ]
    if any(
        not isinstance(numbers, list) or len(numbers) != len(params) for numbers, params in pairs
    ):
        return None
    return {
        number: param
        for numbers, params in pairs
        for number, param in zip(numbers, params, strict=True)
    }


def _put_section(tree: dict[Any, Any], section: Section, own: Section) -> None:
    """Put a section to where `_take_sections` took an optimizer's `own` one from."""
    node = tree
    for key in section.path:
        node = node.setdefault(key, {})
    if not section.by_number:
        node.update(section.state)
        return
    numbers: dict[torch.Tensor, int] = {}
    position, groups = 0, []
    for group, before in zip(section.groups, own.groups, strict=True):
        for param in group["params"]:
            numbers.setdefault(param, position)
            position += 1
        params = [numbers[param] for param in group["params"]]
        groups.append({**before, **group, "params": params})
    state = {numbers[param]: value for param, value in section.state.items()}
    node.update(param_groups=groups, state={**state, **node.get("state", {})})


def _set_groups(optimizer: torch.optim.Optimizer, given: list[dict[str, Any]]) -> None:
    """Give the groups of an optimizer options, with `__setstate__` afterwards as torch has it,
    which knows what those of earlier releases lack. What is lacking then stays as it was.
    """
    before = [dict(group) for group in optimizer.param_groups]
    for group, options in zip(optimizer.param_groups, given, strict=True):
        for name in group.keys() - options.keys():
            del group[name]
        _set_options(group, options)
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    for group, own in zip(optimizer.param_groups, before, strict=True):
        for name in own.keys() - group.keys():
            group[name] = own[name]


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set options of a group of an optimizer, in the form (number or tensor) that the group has
    them in.
    """
    for name, value in options.items():
        own = group.get(name)
        if name == "params" or own is value:
            continue
        if isinstance(own, torch.Tensor):
            # In place: captured graphs read this memory.
            own.detach().copy_(torch.as_tensor(value))
        elif isinstance(own, float | int) and isinstance(value, torch.Tensor):
            group[name] = value.item()
        else:
            group[name] = value


def class_name(optimizer: Any) -> str:
    """Return the name of the class of an optimizer without wrappers, or of the one in a
    ZeroRedundancyOptimizer.
    """
    return type(sharded_inner(optimizer) or optimizer).__name__

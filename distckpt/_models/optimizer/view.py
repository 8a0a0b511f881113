"""What an optimizer keeps, by parameter: read from it without running any of its steps, and put
back.

Optimizers of the plain form (`state` and `param_groups` of `torch.optim.Optimizer`, with its
`state_dict`) are read and written in place. Those that make a state dict of their own, such as
Lookahead, which wraps another optimizer, are asked for it and given one; the parts of it that go by
parameters are found by their form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from distckpt._format.codec import HOLE

_DELEGATES = frozenset({"AcceleratedOptimizer", "_FabricOptimizer"})
"""Classes of accelerate and Fabric around an optimizer, which keep nothing of their own."""
_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class Section(NamedTuple):
    """A part of an optimizer's state dict that goes by parameters.

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
    """Return the optimizer in the wrappers of training libraries."""
    while _DELEGATES & {base.__name__ for base in type(optimizer).__mro__}:
        optimizer = optimizer.optimizer
    return optimizer


def sharded_inner(optimizer: Any) -> Any:
    """Return the optimizer that has this rank's parameters in a ZeroRedundancyOptimizer; None for
    other classes.
    """
    return (
        optimizer.optim
        if hasattr(optimizer, "consolidate_state_dict") and hasattr(optimizer, "optim")
        else None
    )


def owned_parameters(optimizer: Any) -> set[int] | None:
    """Return the `id()` of those parameters whose state this rank keeps; None for all."""
    inner = sharded_inner(optimizer)
    return (
        None
        if inner is None
        else {id(param) for group in inner.param_groups for param in group["params"]}
    )


def read_sections(optimizer: Any) -> tuple[list[Section], Any]:
    """Return the parts of an optimizer's state that go by parameters, and the rest of its state
    dict (or `HOLE`).
    """
    inner = sharded_inner(optimizer)
    if inner is not None or _is_plain(optimizer):
        state = (inner or optimizer).state
        others = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        by_param = (
            {key: value for key, value in state.items() if isinstance(key, torch.Tensor)}
            if others
            else state
        )
        return [Section((), True, optimizer.param_groups, by_param)], {
            "state": others
        } if others else HOLE
    sections: list[Section] = []
    rest = _take_sections(optimizer.state_dict(), (), optimizer.param_groups, sections)
    return sections, rest


def write_sections(optimizer: Any, sections: Iterable[Section], rest: Any) -> None:
    """Give an optimizer what `read_sections` describes; parameters of the groups without a state
    have none.
    """
    inner = sharded_inner(optimizer)
    if inner is None and not _is_plain(optimizer):
        tree = {} if rest is HOLE else rest
        for section in sections:
            _put_section(tree, section)
        optimizer.load_state_dict(tree)
        return
    for section in sections:
        target = (inner or optimizer).state
        for group in section.groups:
            for param in group["params"]:
                target.pop(param, None)
        target.update(section.state)
        for holder in filter(None, (optimizer, inner)):
            for group, given in zip(holder.param_groups, section.groups, strict=True):
                _set_options(group, given)
        if rest is not HOLE:
            target.update(rest["state"])


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


def _take_sections(
    node: Any, path: tuple[str, ...], groups: list[dict[str, Any]], found: list[Section]
) -> Any:
    """Add the sections of a state dict to `found`; return what else it holds, `HOLE` for
    nothing.
    """
    if not isinstance(node, dict):
        return node
    rest = dict(node)
    by_param = {key: value for key, value in node.items() if isinstance(key, torch.Tensor)}
    params = _numbered_params(node, groups)
    if params is not None:
        own = [
            {**group, "params": [params[number] for number in group["params"]]}
            for group in rest.pop("param_groups")
        ]
        state = rest.pop("state")
        found.append(
            Section(path, True, own, {params[key]: v for key, v in state.items() if key in params})
        )
        if others := {key: value for key, value in state.items() if key not in params}:
            rest["state"] = others
    elif by_param:
        every = [param for group in groups for param in group["params"]]
        found.append(Section(path, False, [{"params": every}], by_param))
        rest = {key: value for key, value in node.items() if key not in by_param}
    kept = {
        key: below
        for key, value in rest.items()
        if (
            below := _take_sections(value, (*path, key), groups, found)
            if isinstance(key, str)
            else value
        )
        is not HOLE
    }
    return HOLE if node and not kept else kept


def _numbered_params(
    node: Mapping[Any, Any], groups: list[dict[str, Any]]
) -> dict[int, torch.Tensor] | None:
    """Return the parameters by their numbers in a state dict of the common form; None for a dict of
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


def _put_section(tree: dict[Any, Any], section: Section) -> None:
    """Put a section back to where `_take_sections` took it from."""
    node = tree
    for key in section.path:
        node = node.setdefault(key, {})
    if not section.by_number:
        node.update(section.state)
        return
    numbers: dict[torch.Tensor, int] = {}
    position, groups = 0, []
    for group in section.groups:
        for param in group["params"]:
            numbers.setdefault(param, position)
            position += 1
        groups.append({**group, "params": [numbers[param] for param in group["params"]]})
    state = {numbers[param]: value for param, value in section.state.items()}
    node.update(param_groups=groups, state={**state, **node.get("state", {})})


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Give a group of an optimizer options, in the form (number or tensor) in which it has its
    own.
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

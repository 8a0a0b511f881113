"""What an optimizer keeps besides large tensors: the options of parameter groups, and numbers such as `step`.

Parameters with the same options and numbers, which are nearly always all of a group, share one entry:

    {"options": {"lr": 0.001, ...}, "values": {"step": 100.0}, "tensors": ["exp_avg", "exp_avg_sq"], "has_state": True,
     "params": ["embedding.weight", "norm.weight", ...]}

A list of such entries is small, and is stored once, as an object. Parameters go by name, so that the number of
groups and their order may change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from distckpt._base.errors import LoadMismatchError
from distckpt._format import codec
from distckpt._format.checksum import checksum
from distckpt._models.dtensor import local_part
from distckpt._ranks.collectives import Ranks

Entry: TypeAlias = dict[str, Any]

_NOT_STORED = ("params", "param_names")
# How to compute, and on which device numbers live: for the one who computes to say.
_OWN_CHOICE = frozenset({"foreach", "fused", "capturable", "differentiable"})


class ParamState(NamedTuple):
    """What an optimizer keeps for one parameter: tensors divided as it is, and numbers or other values.

    Without `has_state` they are blank; the optimizer will make its own at the parameter's first step.
    """

    name: str
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]
    has_state: bool


def describe(groups: Iterable[tuple[dict[str, Any], Sequence[ParamState]]]) -> list[Entry]:
    """Describe parameter groups, given as `(group, states of its parameters)`."""
    entries: dict[Any, Entry] = {}
    for number, (group, states) in enumerate(groups):
        options = {name: value for name, value in group.items() if name not in _NOT_STORED}
        for state, values in zip(states, _plain_values(states), strict=True):
            values = values if state.has_state else {}
            kind = (number, state.has_state, tuple(state.tensors), repr(values))
            entry = entries.setdefault(
                kind,
                {
                    "options": options,
                    "values": values,
                    "tensors": sorted(state.tensors),
                    "has_state": state.has_state,
                    "params": [],
                },
            )
            entry["params"].append(state.name)
    return list(entries.values())


def _plain_values(states: Sequence[ParamState]) -> list[dict[str, Any]]:
    """Return the values of parameters with Python numbers in place of 0-D tensors."""
    plain = [dict(state.values) for state in states]
    # All of a kind at once, since each transfer from a GPU waits for it.
    scalars: dict[Any, list[tuple[dict[str, Any], str, torch.Tensor]]] = {}
    for values in plain:
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                local = local_part(value).detach()
                scalars.setdefault((local.device, local.dtype), []).append((values, name, local))
    for found in scalars.values():
        numbers = torch.stack([tensor for _, _, tensor in found]).tolist()
        for (values, name, _), number in zip(found, numbers, strict=True):
            values[name] = number
    return plain


def unite(ranks: Ranks, entries: list[Entry]) -> list[Entry]:
    """Return the entries of all ranks together, the same on each; nothing but a hash is sent where they are the same.

    Where ranks disagree about a parameter, one for which it has a state is believed, and then the lowest.
    """
    if ranks.size == 1:
        return entries
    with ranks.phase("encode the settings of the optimizer"):
        payload = codec.encode(entries)
    digests = ranks.all_gather(f"{checksum(payload):016x}".encode())
    if len(set(digests)) == 1:
        return entries
    is_first = digests.index(digests[ranks.rank]) == ranks.rank
    gathered = ranks.gather(payload if is_first else b"")
    united = b""
    with ranks.phase("unite the settings of the optimizer", decision=True):
        if ranks.is_coordinator:
            lists = [cast(list[Entry], codec.decode(data)) for data in gathered if data]
            united = codec.encode(_merged([entry for entries in lists for entry in entries]))
    return cast(list[Entry], codec.decode(ranks.broadcast(united)))


def _merged(entries: list[Entry]) -> list[Entry]:
    merged: dict[bytes, Entry] = {}
    taken: set[str] = set()
    # The sort is stable: ranks stay in order.
    for entry in sorted(entries, key=lambda entry: not entry["has_state"]):
        kind = codec.encode({**entry, "params": []})
        known = merged.setdefault(kind, {**entry, "params": []})
        known["params"] += [name for name in entry["params"] if name not in taken]
        taken.update(entry["params"])
    return [entry for entry in merged.values() if entry["params"]]


def by_param(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Return the entry of each parameter."""
    return {name: entry for entry in entries for name in entry["params"]}


def options_of(entries: Iterable[Entry], names: Sequence[str]) -> dict[str, Any] | None:
    """Return the stored options of a group with these parameters; None when none of them was stored.

    Raises:
        LoadMismatchError: they were in groups with different options.
    """
    wanted = set(names)
    found: dict[bytes, tuple[dict[str, Any], str]] = {}
    for entry in entries:
        name = next((name for name in entry["params"] if name in wanted), None)
        if name is not None:
            found.setdefault(codec.encode(entry["options"]), (entry["options"], name))
    if len(found) > 1:
        (first, name), (second, other) = list(found.values())[:2]
        differing = sorted(key for key in {**first, **second} if repr(first.get(key)) != repr(second.get(key)))
        raise LoadMismatchError(
            f"The parameters {name!r} and {other!r} are in one group of the optimizer, but were saved in groups that "
            f"differ in {differing}. Make the optimizer with the groups it was saved with.",
            unexpected=[name, other],
        )
    return next((options for options, _ in found.values()), None)


def set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Give a group of an optimizer stored options, in the form (number or tensor) in which it has its own."""
    for name, value in options.items():
        own = group.get(name)
        if name in _OWN_CHOICE and name in group:
            continue
        if isinstance(own, torch.Tensor):
            # In place: captured graphs read this memory.
            own.detach().copy_(torch.as_tensor(value))
        elif isinstance(own, float | int) and isinstance(value, torch.Tensor):
            group[name] = value.item()
        else:
            group[name] = value


def restored_value(own: Any, value: Any) -> Any:
    """Return a stored value in the form that the optimizer uses: a tensor like its own, or as it is."""
    return torch.full_like(own, value) if isinstance(own, torch.Tensor) else value

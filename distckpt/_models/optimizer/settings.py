"""Settings of an optimizer: options of groups, and values for parameters.

Parameters with the same options and numbers, which are nearly always all of a group, share one
entry:

    {
        "options": {"lr": 0.001, ...},
        "values": {"step": 100.0},
        "scalars": {"step": torch.float32},
        "tensors": ["exp_avg", "exp_avg_sq"],
        "has_state": True,
        "class": "AdamW",
        "params": ["embedding.weight", "norm.weight", ...],
    }

The list of these entries is small, and is stored once, as an object. It names parameters, so that
the number of groups and their order may change; a group without parameters has its number in their
place. `class` is the optimizer's, which early checkpoints lack. An entry has `path` where it is
about a section of the optimizer's state dict, and `frozen` where its parameters were not trained;
`complex` has the dtypes of tensors that are stored as pairs of real numbers. Parameters that
share a key (layers, experts) have `forms`, dtype and global shape of each tensor; transposed
tensors have `orders`, of their axes in memory. One entry without parameters has the `rest` of the
state dict, and names its sections in `sections`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch

from distckpt._base.errors import InvalidShardingError, LoadMismatchError, UnsupportedObjectError
from distckpt._base.messages import summarize_keys
from distckpt._base.tree import HOLE, leaves
from distckpt._format import codec
from distckpt._format.checksum import checksum
from distckpt._models.dtensor import local_part
from distckpt._models.optimizer.read import (
    ParamState,
    SectionPath,
    sharded_inner,
)
from distckpt._ranks.collectives import Ranks

logger = logging.getLogger(__name__)

Entry: TypeAlias = dict[str, Any]


_NOT_STORED = ("params", "param_names")


_OWN_CHOICE = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options of computing and of devices, which the loading program chooses."""


_OF_SCHEDULERS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)


_OF_NEWER_RELEASES = frozenset({"amsgrad", "decoupled_weight_decay", "maximize"})
"""Options that `__setstate__` of torch's optimizers adds to old state dicts."""


_BASIC = (bool, int, float, str, type(None), torch.dtype)


_NO_STATE = ParamState("", {}, {}, {}, has_state=False)


_NEEDED = {
    "ASGD": {"ax", "eta", "mu"},
    "Adadelta": {"acc_delta", "square_avg"},
    "Adagrad": {"sum"},
    "Adam": {"exp_avg", "exp_avg_sq"},
    "AdamW": {"exp_avg", "exp_avg_sq"},
    "Adamax": {"exp_avg", "exp_inf"},
    "LBFGS": {"func_evals", "n_iter"},
    "Muon": {"momentum_buffer"},
    "NAdam": {"exp_avg", "exp_avg_sq", "mu_product"},
    "RAdam": {"exp_avg", "exp_avg_sq"},
    "RMSprop": {"square_avg"},
    "Rprop": {"prev", "step_size"},
    "SparseAdam": {"exp_avg", "exp_avg_sq"},
}
"""Entries of a parameter's state that a step of torch's optimizers reads."""


def group_entries(
    groups: Iterable[tuple[dict[str, Any], Sequence[ParamState]]], about: Mapping[str, Any]
) -> list[Entry]:
    """Return the entries of parameter groups.

    `groups` are pairs of a group and the states of its parameters; `about` has fields about the
    optimizer and the section for all entries.
    """
    entries: dict[Any, Entry] = {}
    for number, (group, states) in enumerate(groups):
        options = {name: value for name, value in group.items() if name not in _NOT_STORED}
        if not group["params"]:
            entries[number] = _new_entry(options, _NO_STATE, {}, about) | {"params": [number]}
        for state, values in zip(states, _plain_values(states), strict=True):
            traits = (number, *_traits(state, values))
            entry = entries.get(traits)
            if entry is None:
                entry = entries[traits] = _new_entry(options, state, values, about)
            entry["params"].append(state.name)
    return list(entries.values())


def _traits(state: ParamState, values: dict[str, Any]) -> tuple[Any, ...]:
    """Return the traits that parameters of one entry have in common."""
    text = state.name
    # Other values may have the same text and differ.
    if all(isinstance(leaf, _BASIC) for _, leaf in leaves(list(values.values()), _is_plain)):
        text = repr(values)
    scalars = tuple((name, tensor.dtype) for name, tensor in state.scalars.items())
    forms = repr((state.forms, state.orders, state.pairs))
    return state.has_state, state.is_frozen, tuple(state.tensors), scalars, forms, text


def _new_entry(
    options: dict[str, Any], state: ParamState, values: dict[str, Any], about: Mapping[str, Any]
) -> Entry:
    entry = {
        "options": options,
        "values": values,
        "tensors": sorted(state.tensors),
        "has_state": state.has_state,
        "params": [],
    }
    only_where_needed = {
        "scalars": {name: tensor.dtype for name, tensor in state.scalars.items()},
        "frozen": state.is_frozen,
        "forms": dict(state.forms),
        "orders": dict(state.orders),
        "complex": dict(state.pairs),
        **about,
    }
    return entry | {name: value for name, value in only_where_needed.items() if value}


def _is_plain(value: Any) -> bool:
    return type(value) in (list, tuple)


def _plain_values(states: Sequence[ParamState]) -> list[dict[str, Any]]:
    """Return the values of parameters, with Python numbers for tensors without axes."""
    plain = [dict(state.values) for state in states]
    # All of a kind at once, since each transfer from a GPU waits for it.
    scalars: dict[Any, list[tuple[dict[str, Any], str, torch.Tensor]]] = {}
    for values, state in zip(plain, states, strict=True):
        for name, value in state.scalars.items():
            local = local_part(value).detach()
            scalars.setdefault((local.device, local.dtype), []).append((values, name, local))
    for kind in scalars.values():
        numbers = torch.stack([tensor for _, _, tensor in kind]).tolist()
        for (values, name, _), number in zip(kind, numbers, strict=True):
            values[name] = number
    return plain


def rest_entry(rest: Any, sections: Sequence[tuple[SectionPath, bool]]) -> Entry:
    """Return the entry for the `rest` of a state dict.

    `sections` are `(path, by number)` of all of them.
    """
    return {
        "params": [""],
        "has_state": True,
        "rest": rest,
        "sections": [[list(path), by] for path, by in sections],
    }


def storable_entries(prefix: str, entries: Sequence[Entry]) -> list[Entry]:
    """Leave out options and values that cannot be stored, with a warning."""
    storable = []
    problems = set[str]()
    for entry in entries:
        stored = dict(entry)
        for field in {"options", "values"} & entry.keys():
            stored[field] = {}
            for name, value in entry[field].items():
                try:
                    codec.encode({name: value}, refuses_left_out=True)
                    stored[field][name] = value
                except UnsupportedObjectError as error:
                    problems.add(f"{name!r}: {error}")
        storable.append(stored)
    if problems:
        logger.warning(
            "the optimizer %r is stored without %d of its options or values, which cannot be "
            "stored: %s",
            prefix,
            len(problems),
            "; ".join(sorted(problems)),
        )
    return storable


def unite(
    ranks: Ranks, settings: dict[str, list[Entry]], warns: bool = False
) -> dict[str, list[Entry]]:
    """Return the entries of all ranks together, the same on each.

    They go by the prefix of the optimizer. Where they are the same, only a hash is sent. If only
    some ranks have a state for a parameter, theirs counts.

    InvalidShardingError where ranks disagree, unless `warns`: then those of the first rank count.
    """
    if ranks.size == 1:
        return settings
    with ranks.phase("encode the settings of the optimizer"):
        payload = codec.encode(settings)
    digests = ranks.all_gather(f"{checksum(payload):016x}".encode())
    if len(set(digests)) == 1:
        return settings
    is_first = digests.index(digests[ranks.rank]) == ranks.rank
    if not is_first:
        payload = b""
    gathered = ranks.gather(payload)
    united = b""
    with ranks.phase("unite the settings of the optimizer", decision=True):
        if ranks.is_coordinator:
            by_prefix: dict[str, list[Entry]] = {}
            for data in filter(None, gathered):
                received: Any = codec.decode(data)
                for prefix, entries in received.items():
                    by_prefix.setdefault(prefix, []).extend(entries)
            for prefix, entries in by_prefix.items():
                by_prefix[prefix] = _merged(entries, warns)
            united = codec.encode(by_prefix)
    return cast(dict[str, list[Entry]], codec.decode(ranks.broadcast(united)))


def _merged(entries: list[Entry], warns: bool) -> list[Entry]:
    merged: dict[bytes, Entry] = {}
    taken: dict[Any, tuple[bytes, Entry]] = {}
    # The sort is stable: ranks stay in order.
    for entry in sorted(entries, key=lambda entry: not entry["has_state"]):
        kind = codec.encode({**entry, "params": []})
        own = merged.setdefault(kind, {**entry, "params": []})["params"]
        for name in entry["params"]:
            place = (tuple(entry.get("path", ())), name)
            first_kind, first = taken.setdefault(place, (kind, entry))
            if first is entry:
                own.append(name)
                continue
            is_used_alike = first["has_state"] == entry["has_state"]
            # A number is a group without parameters, with whose options nobody computes.
            if is_used_alike and first_kind != kind and isinstance(name, str):
                _refuse_disagreement(name, first, entry, warns)
    return [entry for entry in merged.values() if entry["params"]]


def _refuse_disagreement(name: str | int, first: Entry, second: Entry, warns: bool) -> None:
    """Refuse entries that differ between ranks, or warn of numbers that do.

    Without states that the first rank lacks, a checkpoint would be wrong.
    """
    whose = ""
    if name:
        whose = f" for the parameter {name!r}"
    names = []
    details = []
    for key in sorted((first.keys() | second.keys()) - {"params"}):
        one = first.get(key)
        other = second.get(key)
        if _differ(one, other):
            names.append(key)
            details.append(f"{key}: {_unlike(one, other)!r:.200} and {_unlike(other, one)!r:.200}")
    text = (
        f"Ranks disagree about what the optimizer keeps{whose}, of which one value is stored "
        f"({'; '.join(details)}). Make these equal on all ranks (LBFGS keeps the loss of its "
        "closure: average it over the ranks), or pass unsupported='warn' to store the first. "
        "Values that each rank has for its own part of a parameter can be stored as tensors that "
        "are divided as the parameter is."
    )
    if not (warns and {"options", "values"}.issuperset(names)):
        raise InvalidShardingError(text)
    logger.warning("%s The first of these is stored.", text)


def _unlike(value: Any, other: Any) -> Any:
    """Return the items of a dict that another one does not have; any other value as it is."""
    if not (isinstance(value, dict) and isinstance(other, dict)):
        return value
    return {key: item for key, item in value.items() if _differ(item, other.get(key))}


def _differ(first: Any, second: Any) -> bool:
    return codec.encode(first) != codec.encode(second)


def entries_of(settings: Iterable[Entry], path: SectionPath) -> list[Entry]:
    """Return the entries about parameters of one section of an optimizer's state."""
    return [
        entry for entry in settings if tuple(entry.get("path", ())) == path and "rest" not in entry
    ]


def by_name(settings: Iterable[Entry], path: SectionPath) -> dict[str | None, Entry]:
    """Return the entries about one section by the names of their parameters."""
    named: dict[str | None, Entry] = {}
    for entry in entries_of(settings, path):
        named.update(dict.fromkeys(entry["params"], entry))
    return named


def forms_by_key(settings: Iterable[Entry], path: SectionPath) -> dict[str, Mapping[str, Any]]:
    """Return the forms of tensors by the key that parameters share."""
    forms: dict[str, Mapping[str, Any]] = {}
    for entry in entries_of(settings, path):
        if "forms" in entry:
            for name in entry["params"]:
                forms[name[: name.rindex("[")]] = entry["forms"]
    return forms


def stored_rest(settings: Iterable[Entry]) -> Any:
    """Return the rest of the state dict beside its sections, or `HOLE`."""
    return next((entry["rest"] for entry in settings if "rest" in entry), HOLE)


def check_one_rest(prefix: str, settings: Iterable[Entry]) -> None:
    """Refuse optimizers of one name with different values beside those of parameters."""
    rests = {codec.encode(entry["rest"]) for entry in settings if "rest" in entry}
    if len(rests) > 1:
        raise InvalidShardingError(
            f"Several optimizers at {prefix!r} keep values that belong to no parameter, of which "
            "one optimizer's would be stored: put them into a dict, {'first': optimizer, 'second': "
            "other}, in place of a list."
        )


def stored_sections(settings: Iterable[Entry]) -> list[tuple[SectionPath, bool]]:
    """Return `(path, by number)` of each section of an optimizer's state."""
    sections: list[Any] = next(
        (entry["sections"] for entry in settings if "rest" in entry), [[[], True]]
    )
    return [(tuple(path), by_number) for path, by_number in sections]


def options_of(
    entries: Iterable[Entry], group: Mapping[str, Any], names: Sequence[str | int]
) -> dict[str, Any]:
    """Return the options of a group, by the names of its parameters.

    They are the stored ones, and its own choice of computing. Other options of its own are left out
    if any are stored.

    LoadMismatchError when they were in groups with different options, or when an optimizer of
    another kind saved them.
    """
    stored = _stored_options(entries, set(names))
    if stored is None:
        return dict(group)
    options, name = stored
    added = options.keys() - group.keys() - _OF_SCHEDULERS
    ignored = _OF_SCHEDULERS.union(_OF_NEWER_RELEASES, _OWN_CHOICE, _NOT_STORED)
    # torch's state dicts are stored without dicts that are empty.
    present = {name for name, value in group.items() if value != {}}
    lacking = present - options.keys() - ignored
    if added and lacking:
        raise LoadMismatchError(
            f"An optimizer of another kind was saved: its options for {name!r} have "
            f"{summarize_keys(added)}, and the options of this one {summarize_keys(lacking)}. "
            "Create the optimizer that was saved, or leave it out.",
            unexpected=[str(name)],
        )
    own = _OWN_CHOICE.union(_NOT_STORED) & group.keys()
    return {**copy.deepcopy(options), **{key: group[key] for key in own}}


def _stored_options(
    entries: Iterable[Entry], names: Collection[str | int]
) -> tuple[dict[str, Any], str | int] | None:
    """Return the saved options of parameters, and the name of one parameter.

    None stands for parameters that were not saved.
    """
    choices: dict[bytes, tuple[dict[str, Any], str | int]] = {}
    for entry in entries:
        name = next((name for name in entry["params"] if name in names), None)
        if name is not None:
            choices.setdefault(codec.encode(entry["options"]), (entry["options"], name))
    if len(choices) > 1 and not all(isinstance(name, str) for _, name in choices.values()):
        logger.warning(
            "group %s of several optimizers has no parameters, and has different options in each: "
            "those of the checkpoint are left out, since it is unknown whose they are",
            next(iter(choices.values()))[1],
        )
        return None
    if len(choices) > 1:
        (first, name), (second, other) = list(choices.values())[:2]
        differing = {**_unlike(first, second), **_unlike(second, first)}
        raise LoadMismatchError(
            f"The parameters {name!r} and {other!r} are in one group of the optimizer, but were "
            f"saved in groups that differ in {sorted(differing)}. Create the optimizer with the "
            "groups it was saved with.",
            unexpected=[str(name), str(other)],
        )
    return next(iter(choices.values()), None)


def class_name(optimizer: Any) -> str:
    """Return the name of the class of an optimizer without wrappers.

    For a ZeroRedundancyOptimizer, it is the class of the optimizer in it.
    """
    return type(sharded_inner(optimizer) or optimizer).__name__


def check_class(
    optimizer: Any, prefix: str, settings: Iterable[Entry], names: Collection[str]
) -> None:
    """Warn of an optimizer that gets the state of another class.

    `names` are those of its parameters. State dicts of PyTorch do not name the class.

    LoadMismatchError when its next step would fail.
    """
    own_names = set(names)
    known = [entry for entry in settings if not own_names.isdisjoint(entry["params"])]
    own = class_name(optimizer)
    stored = sorted({entry["class"] for entry in known if "class" in entry})
    if own in stored:
        return
    text = f"The optimizer that was saved at {prefix!r} is of class {', '.join(stored)}, "
    if lacking := _lacking(optimizer, known):
        keeps = f"The state that was saved at {prefix!r} has"
        if stored:
            keeps = f"{text}which keeps"
        raise LoadMismatchError(
            f"{keeps} no {summarize_keys(lacking)}: {own} cannot go on from there. "
            "Create the optimizer that was saved, or leave it out of the state dict."
        )
    if stored:
        logger.warning("%sand is loaded into one of class %s, which trains otherwise.", text, own)


def _lacking(optimizer: Any, known: Iterable[Entry]) -> set[str]:
    """Return entries that the next step reads and some parameters lack."""
    used = [entry for entry in known if entry["has_state"]]
    used = [entry for entry in used if "path" not in entry] or used
    needed = _needed_by(optimizer)
    lacking: set[str] = set()
    for entry in used:
        lacking |= needed - {*entry["tensors"], *entry["values"]}
    return lacking


def _needed_by(optimizer: Any) -> set[str]:
    bases = type(sharded_inner(optimizer) or optimizer).__mro__
    names = (base.__name__ for base in bases if base.__module__.startswith("torch.optim."))
    return next((_NEEDED[name] for name in names if name in _NEEDED), set())

"""What a rank keeps of an optimizer's state, described to save it or to load into it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from distckpt._base.errors import InvalidShardingError
from distckpt._base.tree import HOLE
from distckpt._mapping.sharded_tensor import ShardedTensor
from distckpt._mapping.wrappers import (
    LocalNonpersistentObject,
    ShardedTensorFactory,
)
from distckpt._models.dtensor import is_dtensor, is_in_mesh, local_part
from distckpt._models.optimizer.ids import (
    KEEP_VARS_HINT,
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
)
from distckpt._models.optimizer.shards import (
    form_of,
    param_name,
    state_shard,
    state_target,
)
from distckpt._models.optimizer.state import (
    Entry,
    ParamState,
    SectionPath,
    by_name,
    forms_by_key,
    group_entries,
    orders_of,
    param_state,
    rest_entry,
    stored_sections,
)
from distckpt._models.optimizer.view import (
    Section,
    bare_optimizer,
    class_name,
    owned_parameters,
    params_of,
    read_sections,
)
from distckpt._state.stored_form import StoredEntry, is_stored_as_pairs

_Shard: TypeAlias = ShardedTensor | ShardedTensorFactory


class OwnState(NamedTuple):
    """What this rank has of an optimizer: sections with the sizes of their groups; by place, the
    name of the parameter and the tensors of its state.
    """

    sections: list[tuple[SectionPath, bool, list[int]]]
    names: dict[Any, str]
    tensors: dict[Any, dict[str, torch.Tensor]]


class OptimizerState(dict[str, Any]):
    """What `sharded_optimizer_state_dict` returns. `load` asks the checkpoint what to load in its
    place.

    Attributes:
        optimizer: the optimizer, without wrappers.
        prefix: what keys begin with.
        shards: of its parameters, by `id()` of their local parts.
        own: what this rank has of it.
    """

    def __init__(self, optimizer: Any, prefix: str, shards: dict[int, _Shard]) -> None:
        self.optimizer, self.prefix, self.shards = optimizer, prefix, shards
        self._owned = owned_parameters(optimizer)
        self.own = OwnState([], {}, {})
        super().__init__(state={}, own=LocalNonpersistentObject(self.own))

    def note(self, section: Section) -> None:
        """Note the size of the groups of a section."""
        sizes = [len(group["params"]) for group in section.groups]
        self.own.sections.append((section.path, section.by_number, sizes))

    def places(self, section: Section) -> Iterator[tuple[int, Any, torch.Tensor, _Shard]]:
        """Yield the number of the group, the place of the state, parameter and shard, for the
        parameters that this rank has.
        """
        for number, place, param in places_of(section):
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
        self,
        path: SectionPath,
        place: Any,
        param: torch.Tensor,
        shard: _Shard,
        tensors: dict[str, torch.Tensor],
    ) -> dict[str, _Shard]:
        """Describe the tensors in the state of a parameter."""
        shards = {
            name: state_shard(shard, param, tensor, name, self.key(path, name))
            for name, tensor in tensors.items()
        }
        self.own.tensors[place] = tensors
        if shards:
            # An empty dict would be a value, which other ranks may not have.
            self["state"][place] = shards
        return shards


def places_of(section: Section) -> Iterator[tuple[int, Any, torch.Tensor]]:
    """Yield, for each parameter, the number of its group, the place of its state, and itself.

    Places are numbers, with the path of the section if it has one.
    """
    params = (
        (number, param) for number, group in enumerate(section.groups) for param in group["params"]
    )
    for position, (number, param) in enumerate(params):
        yield number, (section.path, position) if section.path else position, param


def describe_optimizer(
    optimizer: Any, model_sharded_state_dict: Any, prefix: str
) -> tuple[OptimizerState, list[Entry]]:
    """Describe the optimizer on this rank, without its settings, and return these as well."""
    optimizer = bare_optimizer(optimizer)
    described = OptimizerState(optimizer, prefix, _shards_of(optimizer, model_sharded_state_dict))
    settings: list[Entry] = []
    sections, rest = read_sections(optimizer)
    for section in sections:
        described.note(section)
        known: list[list[ParamState]] = [[] for _ in section.groups]
        for number, place, param, shard in described.places(section):
            known[number].append(_described_param(described, section, place, param, shard))
        about = {"class": class_name(optimizer), "path": list(section.path)}
        settings += group_entries(zip(section.groups, known, strict=True), about)
    forms = [(section.path, section.by_number) for section in sections]
    if rest is not HOLE or [path for path, _ in forms] != [()]:
        settings.append(rest_entry(rest, forms))
    return described, settings


def _described_param(
    described: OptimizerState, section: Section, place: Any, param: torch.Tensor, shard: _Shard
) -> ParamState:
    """Describe the tensors in the state of a parameter; return the state."""
    # Not state[param], which would make an entry.
    state = section.state.get(param)
    kept = param_state(described.own.names[place], state, param)
    shards = described.add(section.path, place, param, shard, kept.tensors)
    if orders := orders_of(kept.tensors, param):
        kept = kept._replace(orders=orders)
    dtypes = ((key, value.dtype) for key, value in kept.tensors.items())
    if pairs := {key: dtype for key, dtype in dtypes if is_stored_as_pairs(dtype)}:
        kept = kept._replace(pairs=pairs)
    if kept.name != shard.key:
        kept = kept._replace(forms={key: form_of(part) for key, part in shards.items()})
    return kept


def fill_gaps(described: OptimizerState, settings: list[Entry]) -> None:
    """Add zeros for parameters without a state that share a key with others that have one, since a
    tensor is saved whole.
    """
    for section in read_sections(described.optimizer)[0]:
        forms = forms_by_key(settings, section.path)
        for _, place, param, shard in described.places(section) if forms else ():
            if shard.key in forms and place not in described["state"] and described.owns(param):
                zeros: dict[str, torch.Tensor] = {}
                for name, form in forms[shard.key].items():
                    prefix = described.key(section.path, name)
                    entries = {f"{prefix}.{shard.key}": StoredEntry(*form)}
                    zeros[name] = state_target(shard, param, None, prefix, entries).zero_()
                described.add(section.path, place, param, shard, zeros)


def _shards_of(
    optimizer: Any, model_sharded_state_dict: Any
) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    params = params_of(optimizer.param_groups)
    if not params:
        return {}
    by_position = get_param_id_to_sharded_param_map(model_sharded_state_dict, params)
    first = get_optim_param_to_id_map(params)
    shards: dict[int, ShardedTensor | ShardedTensorFactory] = {}
    for position, param in enumerate(params):
        shard = by_position.get(first[id(local_part(param))])
        if shard is not None:
            shards[id(local_part(param))] = shard
        elif not is_dtensor(param) or is_in_mesh(param):
            raise InvalidShardingError(
                f"parameter {position} of the optimizer, of shape {tuple(param.shape)}, has no "
                "shard in the state dict of the model: put the module that has it there. "
                "An optimizer that was made before fully_shard, or for another model, has other "
                "parameters: make it afterwards. One that was made after a forward has the "
                "gathered parameters of FSDP2, and trains these in vain: call model.reshard() "
                f"before making it.{KEEP_VARS_HINT}"
            )
    return shards


def optimizer_targets(
    described: OptimizerState, settings: list[Entry], stored: Mapping[str, StoredEntry]
) -> OptimizerState:
    """Return what to load in the place of a described optimizer, given its stored settings and
    keys.

    LoadMismatchError when the optimizer cannot go on from what one of another class has saved.
    """
    targets = OptimizerState(described.optimizer, described.prefix, described.shards)
    for section in sections_at(described.optimizer, stored_sections(settings)):
        path = section.path
        targets.note(section)
        entries, forms = by_name(settings, path), forms_by_key(settings, path)
        for _, place, param, shard in targets.places(section):
            entry = entries.get(targets.own.names[place])
            # A tensor is requested whole, so zeros that were saved in place of a state are loaded,
            # too.
            names = () if entry is None else entry["tensors"] or sorted(forms.get(shard.key, ()))
            if names and targets.owns(param):
                kept = param_state("", section.state.get(param), param).tensors
                orders = {} if entry is None else entry.get("orders", {})
                pairs = _pairs_in(entry, param, names)
                tensors = {
                    name: state_target(
                        shard,
                        param,
                        kept.get(name),
                        targets.key(path, name),
                        stored,
                        orders.get(name),
                        pairs.get(name),
                    )
                    for name in names
                }
                targets.add(path, place, param, shard, tensors)
    names = targets.own.names.values()
    # Imported when it is needed: no save does.
    classes = importlib.import_module("distckpt._models.optimizer.classes")
    classes.check_class(described.optimizer, described.prefix, settings, names)
    targets["settings"] = LocalNonpersistentObject(settings)
    return targets


def sections_at(optimizer: Any, wanted: Iterable[tuple[SectionPath, bool]]) -> list[Section]:
    """Return the wanted sections of an optimizer's state, empty ones where it has none yet."""
    current = {section.path: section for section in read_sections(optimizer)[0]}
    return [
        current.get(path, Section(path, by_number, optimizer.param_groups, {}))
        for path, by_number in wanted
    ]


def _pairs_in(
    entry: Entry | None, param: torch.Tensor, names: Iterable[str]
) -> Mapping[str, torch.dtype]:
    """Return the dtypes of the complex tensors that are stored as pairs; early checkpoints do not
    name them.
    """
    if entry is None or "class" in entry:
        return {} if entry is None else entry.get("complex", {})
    return dict.fromkeys(names, param.dtype) if is_stored_as_pairs(param.dtype) else {}

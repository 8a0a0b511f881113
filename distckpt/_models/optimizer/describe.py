"""Optimizer state as shards, derived from those of the model.

`distckpt.optimizer` is the public path and shows its use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from distckpt._base.errors import InvalidShardingError
from distckpt._base.tree import HOLE
from distckpt._models.dtensor import TensorShard, is_dtensor, local_part, shard_of_dtensor
from distckpt._models.optimizer.read import (
    ParamState,
    Section,
    SectionPath,
    bare_optimizer,
    first_part,
    orders_of,
    owned_parameters,
    param_name,
    param_state,
    places_of,
    read_sections,
    sections_at,
    shards_of_parameters,
)
from distckpt._models.optimizer.restore import OwnState, state_target
from distckpt._models.optimizer.settings import (
    Entry,
    by_name,
    check_class,
    class_name,
    forms_by_key,
    group_entries,
    rest_entry,
    stored_sections,
)
from distckpt._state.stored_form import StoredEntry, is_stored_as_pairs, shard_at
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import (
    LocalNonpersistentObject,
    ShardedTensorFactory,
)


class OptimizerState(dict[str, Any]):
    """Sharded state dict of an optimizer, see `sharded_optimizer_state_dict`.

    `load` replaces it with targets for the states that the checkpoint has.

    Attributes:
        optimizer: the optimizer, without wrappers.
        prefix: beginning of its keys.
        shards: of its parameters, by `id()` of their local parts.
        own: this rank's part of it.
    """

    def __init__(self, optimizer: Any, prefix: str, shards: dict[int, TensorShard]) -> None:
        self.optimizer = optimizer
        self.prefix = prefix
        self.shards = shards
        self._owned = owned_parameters(optimizer)
        self.own = OwnState([], {}, {})
        super().__init__(state={}, own=LocalNonpersistentObject(self.own))

    def note(self, section: Section) -> None:
        """Note the size of the groups of a section."""
        sizes = [len(group["params"]) for group in section.groups]
        self.own.sections.append((section.path, section.by_number, sizes))

    def places(self, section: Section) -> Iterator[tuple[int, Any, torch.Tensor, TensorShard]]:
        """Yield the parameters that this rank has.

        Each comes as the number of its group, the place of its state, itself, and its shard.
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
        """Return the beginning of the key of a tensor in a state."""
        return ".".join((self.prefix, *path, "state", name))

    def add(
        self,
        path: SectionPath,
        place: Any,
        param: torch.Tensor,
        shard: TensorShard,
        tensors: dict[str, torch.Tensor],
    ) -> dict[str, TensorShard]:
        """Describe the tensors in the state of a parameter."""
        shards = {}
        for name, tensor in tensors.items():
            shards[name] = state_shard(shard, param, tensor, name, self.key(path, name))
        self.own.tensors[place] = tensors
        if shards:
            # An empty dict would be a value, which other ranks may not have.
            self["state"][place] = shards
        return shards


def describe_optimizer(
    optimizer: Any, model: Iterable[Any], prefix: str
) -> tuple[OptimizerState, list[Entry]]:
    """Describe an optimizer on this rank; return its settings separately."""
    optimizer = bare_optimizer(optimizer)
    shards = shards_of_parameters(optimizer, model)
    description = OptimizerState(optimizer, prefix, shards)
    settings: list[Entry] = []
    sections, rest = read_sections(optimizer)
    for section in sections:
        description.note(section)
        known: list[list[ParamState]] = [[] for _ in section.groups]
        for number, place, param, shard in description.places(section):
            known[number].append(_describe_param(description, section, place, param, shard))
        about = {"class": class_name(optimizer), "path": list(section.path)}
        settings += group_entries(zip(section.groups, known, strict=True), about)
    forms = [(section.path, section.by_number) for section in sections]
    if rest is not HOLE or [path for path, _ in forms] != [()]:
        settings.append(rest_entry(rest, forms))
    return description, settings


def _describe_param(
    description: OptimizerState,
    section: Section,
    place: Any,
    param: torch.Tensor,
    shard: TensorShard,
) -> ParamState:
    """Describe the tensors in the state of a parameter; return the state."""
    # Not state[param], which would make an entry.
    state = section.state.get(param)
    content = param_state(description.own.names[place], state, param)
    shards = description.add(section.path, place, param, shard, content.tensors)
    pairs = {}
    for key, tensor in content.tensors.items():
        if is_stored_as_pairs(tensor.dtype):
            pairs[key] = tensor.dtype
    forms = {}
    if content.name != shard.key:
        for key, described in shards.items():
            part = first_part(described)
            assert part is not None
            forms[key] = (part.dtype, tuple(part.global_shape))
    orders = orders_of(content.tensors, param)
    return content._replace(forms=forms, orders=orders, pairs=pairs)


def fill_gaps(description: OptimizerState, settings: list[Entry]) -> None:
    """Add zeros for lacking states of parameters that share a key.

    Other parameters of the key have states, and a tensor is saved whole.
    """
    for section in read_sections(description.optimizer)[0]:
        forms = forms_by_key(settings, section.path)
        if not forms:
            continue
        for _, place, param, shard in description.places(section):
            if shard.key in forms and place not in description["state"] and description.owns(param):
                zeros: dict[str, torch.Tensor] = {}
                for name, form in forms[shard.key].items():
                    prefix = description.key(section.path, name)
                    entries = {f"{prefix}.{shard.key}": StoredEntry(*form)}
                    zeros[name] = state_target(shard, param, None, prefix, entries).zero_()
                description.add(section.path, place, param, shard, zeros)


def optimizer_targets(
    description: OptimizerState, settings: list[Entry], stored: Mapping[str, StoredEntry]
) -> OptimizerState:
    """Return the targets of an optimizer, given its stored settings and keys.

    LoadMismatchError when the optimizer cannot go on from the state of one of another class.
    """
    targets = OptimizerState(description.optimizer, description.prefix, description.shards)
    for section in sections_at(description.optimizer, stored_sections(settings)):
        path = section.path
        targets.note(section)
        entries = by_name(settings, path)
        forms = forms_by_key(settings, path)
        for _, place, param, shard in targets.places(section):
            entry = entries.get(targets.own.names[place])
            # A tensor is requested whole, so zeros that were saved in place of a state are loaded,
            # too.
            if entry is None or not targets.owns(param):
                continue
            names = entry["tensors"] or sorted(forms.get(shard.key, ()))
            own_tensors = param_state("", section.state.get(param), param).tensors
            orders = entry.get("orders", {})
            pairs = _pairs_in(entry, param, names)
            tensors = {}
            for name in names:
                tensors[name] = state_target(
                    shard,
                    param,
                    own_tensors.get(name),
                    targets.key(path, name),
                    stored,
                    orders.get(name),
                    pairs.get(name),
                )
            if tensors:
                targets.add(path, place, param, shard, tensors)
    names = targets.own.names.values()
    check_class(description.optimizer, description.prefix, settings, names)
    targets["settings"] = LocalNonpersistentObject(settings)
    return targets


def _pairs_in(entry: Entry, param: torch.Tensor, names: Iterable[str]) -> Mapping[str, torch.dtype]:
    """Return the dtypes of the complex tensors that are stored as pairs; early checkpoints do not
    name them.
    """
    if "class" in entry:
        pairs: Mapping[str, torch.dtype] = entry.get("complex", {})
        return pairs
    if is_stored_as_pairs(param.dtype):
        return dict.fromkeys(names, param.dtype)
    return {}


def state_shard(
    shard: TensorShard,
    param: torch.Tensor,
    tensor: torch.Tensor,
    name: str,
    prefix: str,
) -> TensorShard:
    """Describe a tensor in the state of a parameter.

    Its key is that of the parameter's shard behind the prefix.
    """
    if _is_alike(tensor, param):
        if type(shard) is not ShardedTensor:
            return make_sharded_optimizer_tensor(shard, tensor, prefix)
        # Not with `replace`, which repeats checks: this is most of the time that describing takes.
        alike = object.__new__(ShardedTensor)
        data = local_part(tensor)
        vars(alike).update(vars(shard), key=f"{prefix}.{shard.key}", data=data, dtype=data.dtype)
        return alike
    if isinstance(shard, ShardedTensor) and shard.flattened_range is None:
        other = _divided_otherwise(shard, param, tensor, f"{prefix}.{shard.key}")
        if other is not None:
            return other
    if tuple(local_part(tensor).shape) == tuple(local_part(param).shape):
        return make_sharded_optimizer_tensor(shard, tensor, prefix)
    raise InvalidShardingError(
        f"The optimizer's {name!r} for the parameter {shard.key!r} has shape "
        f"{tuple(tensor.shape)}, the parameter {tuple(param.shape)}, of which this rank has a "
        "part: how it is divided is unknown. Keep it in a shape with size 1 along the axes that "
        "it lacks, or make a ShardedTensor of it yourself."
    )


def make_sharded_optimizer_tensor(
    model_param: TensorShard, optim_param: torch.Tensor, prefix: str
) -> TensorShard:
    """Wrap an optimizer tensor like the parameter that it belongs to.

    Args:
        model_param: shard or factory of the parameter.
        optim_param: tensor of the shape of the parameter's shard (1-D if that is flat), of any
            dtype.
        prefix: put before the parameter's key, with a dot between them.

    Returns:
        A shard or factory like `model_param`, of the new key, with `optim_param` as its data.

    Raises:
        InvalidShardingError: the shapes differ.
    """
    data = local_part(optim_param)
    key = f"{prefix}.{model_param.key}"
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=data)
    return replace(model_param, key=key, data=data, dtype=data.dtype)


def _is_alike(tensor: Any, param: Any) -> bool:
    """Tell whether a tensor has the shape and distribution of a parameter."""
    if tensor.shape != param.shape:
        return False
    if not is_dtensor(param):
        return not is_dtensor(tensor)
    if not is_dtensor(tensor) or tensor.device_mesh != param.device_mesh:
        return False
    return bool(tensor.placements == param.placements)


def _divided_otherwise(
    shard: ShardedTensor, param: torch.Tensor, tensor: torch.Tensor, key: str
) -> TensorShard | None:
    """Describe a tensor that is not divided as its parameter is; None if its place is unknown."""
    if not is_dtensor(tensor):
        return _reduced(shard, tensor, key)
    num_prepended = shard.prepend_axis_num
    if not is_dtensor(param) or shard.global_shape[num_prepended:] != tuple(param.shape):
        return None
    outer = shard.replica_id
    if not isinstance(outer, tuple):
        outer = (outer,)
    num_outer = max(0, len(outer) - param.device_mesh.ndim)  # type: ignore[attr-defined]
    outer = type(outer)(outer[:num_outer])
    axes = range(num_prepended)
    place = list(zip(axes, shard.global_offset, shard.global_shape, strict=False))
    return shard_of_dtensor(key, tensor, place, num_prepended, outer)


def _reduced(shard: ShardedTensor, tensor: torch.Tensor, key: str) -> ShardedTensor | None:
    """Describe a tensor that has size 1 along axes of its parameter.

    None stands for other tensors.
    """
    num_prepended = shard.prepend_axis_num
    parts = shard.axis_fragmentations
    shape = tuple(tensor.shape)
    sizes = shard.global_shape[num_prepended:]
    if shape == shard.local_shape:
        return None
    if shard.local_shape == sizes:
        return shard_at(shard, key, tensor, [(size, 0, 1) for size in shape])
    if parts is None or len(shape) != len(sizes):
        return None
    offset = shard.global_offset[num_prepended:]
    axes = zip(shape, shard.local_shape, sizes, offset, parts[num_prepended:], strict=True)
    place = []
    for n, local, size, start, count in axes:
        if n == local:
            place.append((size, start, count))
        elif n == 1:
            # Each part of the parameter has a value of its own.
            place.append((count, start // local, count))
        else:
            return None
    return shard_at(shard, key, tensor, place)

"""Targets for the stored states of an optimizer, and restoring it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from distckpt._base.errors import LoadMismatchError
from distckpt._base.memory import fill, in_huge_pages
from distckpt._base.messages import summarize_keys
from distckpt._base.tree import HOLE, Position, dotted, is_plain_container, map_leaves
from distckpt._models.dtensor import TensorShard, has_parts, is_dtensor, local_part
from distckpt._models.optimizer.read import (
    ITSELF,
    Section,
    SectionPath,
    bare_optimizer,
    first_part,
    is_plain,
    memory_of,
    owned_parameters,
    params_of,
    places_of,
    sections_at,
    sharded_inner,
)
from distckpt._models.optimizer.settings import (
    Entry,
    by_name,
    entries_of,
    options_of,
    stored_rest,
)
from distckpt._state.stored_form import StoredEntry
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedTensorFactory, StateDict

logger = logging.getLogger(__name__)


class OwnState(NamedTuple):
    """Part of an optimizer that this rank has.

    `sections` come with the sizes of their groups; `names` of parameters and `tensors` of their
    states are by place.
    """

    sections: list[tuple[SectionPath, bool, list[int]]]
    names: dict[Any, str]
    tensors: dict[Any, dict[str, torch.Tensor]]


def state_target(
    shard: TensorShard,
    param: torch.Tensor,
    own: torch.Tensor | None,
    prefix: str,
    stored: Mapping[str, StoredEntry],
    order: Sequence[int] | None = None,
    of_pairs: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the target of a stored state: the optimizer's own tensor if it fits.

    `prefix` is the beginning of the key, see `state_shard`; `order` is the order of the axes in
    memory, `of_pairs` the dtype of complex numbers that are stored as pairs. Without a stored form
    the target is like the parameter.
    """
    key = f"{prefix}.{shard.key}"
    if f"{key}.tensor_type" in stored:
        if own is None:
            raise LoadMismatchError(
                f"The state {key!r} was saved as a tensor that is made of others, which only the "
                "optimizer can make: have it make a step (with any gradients) before loading.",
                unexpected=[key],
            )
        return own
    entry = _stored_entry(shard, key, stored)
    if entry is None or entry.dtype is None:
        return _new_like(param, param.dtype)
    # A state that was saved with the dtype of the parameter has the dtype of the new parameter.
    is_like_param = getattr(stored.get(shard.key), "dtype", None) == entry.dtype
    saved = of_pairs or entry.dtype
    is_like_param &= saved.is_complex == param.dtype.is_complex
    dtype = saved
    if is_like_param:
        dtype = param.dtype
    stored_shape = entry.shape
    if of_pairs:
        stored_shape = entry.shape[:-1]
    shape = _target_shape(shard, param, stored_shape, key)
    if own is not None and _has_form(own, dtype, shape, param):
        return own
    return _new_target(param, shape, dtype, order)


def _has_form(
    tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], param: torch.Tensor
) -> bool:
    is_same_kind = is_dtensor(tensor) == is_dtensor(param)
    return is_same_kind and tensor.dtype == dtype and tuple(tensor.shape) == shape


def _new_target(
    param: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, order: Sequence[int] | None
) -> torch.Tensor:
    if order is not None and len(order) == len(shape) and not is_dtensor(param):
        return _new_transposed(shape, dtype, param.device, order)
    if shape == tuple(param.shape):
        new = _new_like(param, dtype)
        if has_parts(param):
            # Elements in no part are not loaded, and steps compute with them.
            new.zero_()
        return new
    blank = in_huge_pages(torch.empty(shape, dtype=dtype, device=local_part(param).device))
    if is_dtensor(param):
        return _distributed_like(param, blank)
    return blank


def _stored_entry(
    shard: TensorShard, key: str, stored: Mapping[str, StoredEntry]
) -> StoredEntry | None:
    """Return the stored form of a key, or of its first part."""
    if key in stored or isinstance(shard, ShardedTensor):
        return stored.get(key)
    part = first_part(replace(shard, key=key))
    if part is None:
        return None
    return stored.get(part.key)


def _new_transposed(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, order: Sequence[int]
) -> torch.Tensor:
    """Make a tensor whose axes lie in memory in another order."""
    in_memory = torch.empty([shape[axis] for axis in order], dtype=dtype, device=device)
    return in_huge_pages(in_memory).permute([order.index(axis) for axis in range(len(order))])


def _new_like(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    new = torch.empty_like(param.detach(), dtype=dtype)
    in_huge_pages(local_part(new))
    return new


def _target_shape(
    shard: TensorShard,
    param: torch.Tensor,
    stored: tuple[int, ...],
    key: str,
) -> tuple[int, ...]:
    """Return the shape of this rank's part of a stored tensor."""
    if isinstance(shard, ShardedTensorFactory) or stored == tuple(shard.global_shape):
        return tuple(param.shape)
    num_prepended = shard.prepend_axis_num
    shape = stored[num_prepended:]
    if is_dtensor(param) or shard.local_shape == tuple(shard.global_shape[num_prepended:]):
        return shape
    part = _reduced_shape(shard, shape)
    if part is None:
        raise LoadMismatchError(
            f"The state {key} was saved with shape {stored}, its parameter has "
            f"{shard.global_shape}, of which this rank has a part: what of the state belongs to "
            "it is unknown. Load it under the layout it was saved under, or without dividing "
            "this parameter.",
            unexpected=[key],
        )
    return part


def _reduced_shape(shard: ShardedTensor, stored: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of this rank's part of a reduced tensor.

    It has size 1 along some axes, see `_reduced_place` in `describe`; None if it is unknown.
    """
    num_prepended = shard.prepend_axis_num
    parts = shard.axis_fragmentations
    sizes = shard.global_shape[num_prepended:]
    if parts is None or len(stored) != len(sizes):
        return None
    shape = []
    for n, local, size, count in zip(
        stored, shard.local_shape, sizes, parts[num_prepended:], strict=True
    ):
        if n not in (size, count):
            return None
        shape.append(local if n == size else 1)
    return tuple(shape)


def _distributed_like(param: Any, whole: torch.Tensor) -> torch.Tensor:
    """Distribute a tensor like a DTensor.

    It is divided along the axes that both have, and copied along the others.
    """
    copied = type(param).from_local(whole, param.device_mesh, run_check=False)
    [copy] = set(copied.placements)

    placements = []
    for placement in param.placements:
        axis: Any = getattr(placement, "dim", None)
        has_axis = axis is not None and whole.ndim == param.ndim
        is_shared = has_axis and whole.shape[axis] == param.shape[axis]
        placements.append(placement if is_shared else copy)
    distributed: torch.Tensor = copied.redistribute(placements=placements)
    return distributed


def load_sharded_optimizer_state_dict(optimizer: torch.optim.Optimizer, loaded: StateDict) -> None:
    """Restore a torch optimizer from its loaded sharded state dict.

    States are set even in a new optimizer that has made no step. Groups get the options (learning
    rate and so on) that their parameters were saved with, except the choice of an implementation
    (`foreach`, `fused`, `capturable`, `differentiable`). Parameters that are not in the checkpoint
    keep their states, with a warning.

    Args:
        optimizer: the one whose `sharded_optimizer_state_dict` was loaded.
        loaded: the entry that `load` returned in its place.

    Raises:
        LoadMismatchError: tensors of the state were not loaded; the optimizer that was saved has
            other options; or parameters of one group were saved in groups with different options.
            Nothing is changed then.
    """
    if "settings" not in loaded or "own" not in loaded:
        raise LoadMismatchError(
            "This holds no settings of an optimizer: pass what load() returned in the place of "
            "sharded_optimizer_state_dict(optimizer, ...), from a checkpoint that was saved with "
            "it."
        )
    optimizer = bare_optimizer(optimizer)
    settings: list[Entry] = loaded["settings"]
    own: OwnState = loaded["own"]
    owned = owned_parameters(optimizer)
    sections = sections_at(optimizer, [(path, by_number) for path, by_number, _ in own.sections])
    restored = []
    fresh: list[str] = []
    for section, (*_, described_sizes) in zip(sections, own.sections, strict=True):
        sizes = [len(group["params"]) for group in section.groups]
        if sizes != described_sizes:
            raise LoadMismatchError(
                f"The optimizer has groups of {sizes} parameters, the one that was described had "
                f"{described_sizes}: describe this optimizer before loading."
            )
        state = _restored_state(section, own, settings, loaded.get("state", {}), owned)
        groups, untrained = _restored_groups(section, own, settings)
        fresh += untrained
        restored.append(Section(section.path, section.by_number, groups, state))
    _write_sections(optimizer, sections, restored, stored_rest(settings))
    if fresh:
        logger.warning(
            "the checkpoint has no state of the optimizer for %s, which were not trained when it "
            "was saved: they start with what the optimizer has for them, nothing if it is new",
            summarize_keys(fresh),
        )


def _restored_state(
    section: Section,
    own: OwnState,
    settings: list[Entry],
    loaded: Mapping[Any, Mapping[str, torch.Tensor]],
    owned: set[int] | None,
) -> dict[torch.Tensor, Any]:
    """Return the states of a section's parameters, with loaded tensors."""
    entries = by_name(settings, section.path)
    state: dict[torch.Tensor, Any] = {}
    for number, place, param in places_of(section):
        entry = entries.get(own.names.get(place))
        if entry is None:
            if param in section.state:
                state[param] = section.state[param]
        elif entry["has_state"] and (owned is None or id(param) in owned):
            tensors = own.tensors.get(place, {})
            # Values of a state by number are at its place in common state, and are in the entry.
            values = loaded.get(place, {})
            of_state = {name: values[name] for name in entry["tensors"] if name in values}
            _fill(own.names[place], tensors, of_state, entry)
            group = section.groups[number]
            state[param] = _joined_state(entry, tensors, group, param, section.state.get(param))
    return state


def _restored_groups(
    section: Section, own: OwnState, settings: list[Entry]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the groups of a section with their stored options.

    The names of trained parameters that were frozen in the save come second.
    """
    names: list[list[str | int]] = []
    for number, group in enumerate(section.groups):
        # A group without parameters goes by its number.
        names.append([] if group["params"] else [number])
    untrained = []
    entries = by_name(settings, section.path)
    for number, place, param in places_of(section):
        name = own.names.get(place)
        if name is None:
            continue
        names[number].append(name)
        entry = entries.get(name)
        if param.requires_grad and (entry is None or entry.get("frozen")):
            untrained.append(name)
    stored = entries_of(settings, section.path)
    groups = []
    for group, known in zip(section.groups, names, strict=True):
        groups.append(options_of(stored, group, known))
    return groups, untrained


def _joined_state(
    entry: Entry,
    tensors: Mapping[str, torch.Tensor],
    group: Mapping[str, Any],
    param: torch.Tensor,
    present: Any,
) -> Any:
    """Return the state of a parameter in the optimizer's form.

    It is the reverse of `param_state`; `present` is the state that the optimizer has.
    """
    left = dict(tensors)

    def put_back(position: Position, leaf: Any) -> Any:
        name = dotted(position)
        # An export has None for `HOLE`.
        if leaf is HOLE or (leaf is None and name in left):
            return left.pop(name)
        if isinstance(leaf, torch.Tensor):
            return leaf.to(local_part(param).device)
        return leaf

    scalars: dict[str, torch.dtype] = {}
    # Early checkpoints do not name them.
    if type(entry["values"].get("step")) is float:
        scalars["step"] = torch.float32
    scalars = entry.get("scalars", scalars)
    state: dict[str, Any] = {}
    for name, value in entry["values"].items():
        if name in scalars:
            own = present.get(name) if isinstance(present, dict) else None
            state[name] = _scalar(group, param, own, name, value, scalars[name])
        else:
            state[name] = map_leaves(put_back, value, is_plain_container, (name,))
    state |= left
    return state.get(ITSELF, state)


def _fill(
    name: str, tensors: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor], entry: Entry
) -> None:
    """Copy loaded tensors into those of the optimizer."""
    if sorted(tensors) != entry["tensors"] or sorted(loaded) != entry["tensors"]:
        raise LoadMismatchError(
            f"For the parameter {name!r} the tensors {entry['tensors']} of the optimizer were "
            f"saved, loaded were {sorted(loaded)}. Pass the dict of sharded_optimizer_state_dict "
            "itself to load, without copying it.",
            unexpected=[name],
        )
    for key, tensor in tensors.items():
        target = local_part(tensor)
        value = local_part(loaded[key])
        if target is not value and (
            memory_of(target) is None or memory_of(target) != memory_of(value)
        ):
            fill(name, target, value)


def _scalar(
    group: Mapping[str, Any], param: Any, own: Any, name: str, number: Any, dtype: torch.dtype
) -> torch.Tensor:
    """Make a tensor without axes, where torch's own `load_state_dict` would have it."""
    if isinstance(own, torch.Tensor):
        # In the form that the optimizer uses, where it has one.
        return torch.full_like(own, number)
    if name == "step" and not (group.get("capturable") or group.get("fused")):
        return torch.tensor(number, dtype=dtype)
    if name != "step" and not param.ndim and is_dtensor(param):
        return torch.full_like(param.detach(), number, dtype=dtype)
    return torch.tensor(number, dtype=dtype, device=local_part(param).device)


def _write_sections(
    optimizer: Any, own: Iterable[Section], new: Iterable[Section], rest: Any
) -> None:
    """Replace the sections of an optimizer, and the rest.

    Parameters of the groups that have no state in the new sections lose theirs.
    """
    inner = sharded_inner(optimizer)
    others: dict[Any, Any] = {}
    if rest is not HOLE:
        others = rest
    if inner is None and not is_plain(optimizer):
        _put_sections(others, new, own)
        optimizer.load_state_dict(others)
        return
    state = (inner or optimizer).state
    for section in new:
        for param in params_of(section.groups):
            state.pop(param, None)
        state.update({**section.state, **others.get("state", {})})
        for holder in filter(None, (optimizer, inner)):
            _set_groups(holder, section.groups)
    if inner:
        for outer, below in zip(optimizer.param_groups, inner.param_groups, strict=True):
            _set_options(outer, below)


def _put_sections(tree: dict[Any, Any], new: Iterable[Section], own: Iterable[Section]) -> None:
    """Put sections to where `read_sections` took an optimizer's `own` ones from."""
    for section, old in zip(new, own, strict=True):
        node = tree
        for key in section.path:
            node = node.setdefault(key, {})
        if not section.by_number:
            node.update(section.state)
            continue
        numbers: dict[torch.Tensor, int] = {}
        for position, param in enumerate(params_of(section.groups)):
            numbers.setdefault(param, position)
        groups = []
        for group, before in zip(section.groups, old.groups, strict=True):
            params = [numbers[param] for param in group["params"]]
            groups.append({**before, **group, "params": params})
        state = {numbers[param]: value for param, value in section.state.items()}
        node.update(param_groups=groups, state={**state, **node.get("state", {})})


def _set_groups(optimizer: torch.optim.Optimizer, new: list[dict[str, Any]]) -> None:
    """Set the options of the groups of an optimizer.

    `__setstate__` follows, as in torch: it adds options that earlier releases lacked. Others that
    are lacking stay as they were.
    """
    before = [dict(group) for group in optimizer.param_groups]
    for group, options in zip(optimizer.param_groups, new, strict=True):
        for name in group.keys() - options.keys():
            del group[name]
        _set_options(group, options)
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    for group, own in zip(optimizer.param_groups, before, strict=True):
        for name in own.keys() - group.keys():
            group[name] = own[name]


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set options of a group, as numbers or tensors like its own."""
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

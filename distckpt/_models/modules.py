"""Sharded state dicts of torch modules. `distckpt.modules` is the public path."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.nn.modules.module import _IncompatibleKeys

from distckpt._base.errors import InvalidShardingError, LoadMismatchError
from distckpt._base.memory import fill
from distckpt._base.messages import summarize_keys
from distckpt._base.tree import Position, map_leaves
from distckpt._models.dtensor import is_dtensor, is_in_mesh, local_part, shard_of_dtensor
from distckpt._models.layers import (
    EXTRA_STATE,
    Group,
    Offsets,
    make_sharded_object_for_checkpoint,
    make_sharded_tensor_for_checkpoint,
    make_sharded_tensors_for_checkpoint,
    prepended_axes,
)
from distckpt._ranks.groups import own_rank
from distckpt._state.stored_form import StoredEntry
from distckpt.mapping._base import BufferReplicaId, OpenReplicaId, ReplicaId
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedStateDict, StateDict, is_main_replica

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_original_module")
"""Names of the module in wrappers of torch.compile, activation checkpointing and Fabric.

A module of any class may have such a child, see `_wrapped_name`.
"""
_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "DeepSpeedEngine"})
"""Classes that have the module itself as `module`."""
_Place: TypeAlias = tuple[str, torch.nn.Module | None]
"""Prefix of names without those of wrappers, and the module there."""


def sharded_state_dict(
    module: torch.nn.Module,
    prefix: str = "",
    sharded_offsets: Offsets = (),
    metadata: dict[str, Any] | None = None,
    *,
    replica_id: ReplicaId | None = None,
) -> ShardedStateDict:
    """Describe the parameters, persistent buffers and extra state of a module.

        state = {"model": sharded_state_dict(model), "step": step}

    Wrappers are seen through: torch.compile, activation checkpointing, DistributedDataParallel,
    DataParallel, Fabric's. Modules in `module` that define `sharded_state_dict` are described by
    that method. The method of `module` itself is not called, so that it may call this function.

    A DTensor becomes the part of the global tensor that this rank holds, or several, with a replica
    id made from its mesh. Tied parameters appear under each of their names; `save` stores them
    once. Names are the same as in `state_dict()` of the module without wrappers.

    Args:
        module: any module.
        prefix: put before every name.
        sharded_offsets: axes in front of every tensor's own, `(axis, position, number of parts)`
            each: the number of a layer or expert among all of them, say.
        metadata: passed on to the `sharded_state_dict` of other modules.
        replica_id: which copy of the module this rank has, see `is_main_replica`. By default ranks
            that turn out to have the same part of a tensor (all ranks, the ranks of a pipeline
            stage, or of two stages with a tied weight) have copies of it, and the lowest of them
            has the main replica.

    Returns:
        By name a `ShardedTensor` or `ShardedTensorFactory` for tensors, with the parameters and
        buffers themselves (the local parts of DTensors) as data; a `ShardedObject` for extra state.
        DTensors on a mesh without this rank are left out.

    Raises:
        InvalidShardingError: a DTensor that is not made of parts and copies, see its placements.
    """
    offsets = tuple(sharded_offsets)
    copy: ReplicaId = OpenReplicaId((0, own_rank()))
    buffer_copy: ReplicaId = BufferReplicaId((0, own_rank()))
    if replica_id is not None:
        copy = buffer_copy = replica_id
    prepended_axes(offsets, "sharded_offsets")
    state: ShardedStateDict = {}
    entries, delegates = _entries(module)
    for name, (_, value) in entries.items():
        key = prefix + name
        if name.endswith(EXTRA_STATE) or not isinstance(value, torch.Tensor):
            state[key] = make_sharded_object_for_checkpoint(value, key, offsets, copy)
        elif not is_dtensor(value):
            is_param = isinstance(value, torch.nn.Parameter)
            own = copy if is_param else buffer_copy
            state[key] = make_sharded_tensor_for_checkpoint(value, key, offsets, own)
        elif is_in_mesh(value):
            state[key] = shard_of_dtensor(key, value, offsets, len(offsets), replica_id)
    for name, child in delegates:
        below = sharded_state_dict_default(child, prefix + name, offsets, metadata)
        if replica_id is not None:
            below = _with_replica_id(below, replica_id)
        _add(state, below)
    return state


def _check_delegates(module: torch.nn.Module) -> None:
    """Refuse Megatron Core's modules inside Megatron-FSDP."""
    if any(type(below).__name__ == "MegatronFSDP" for below in module.modules()):
        raise InvalidShardingError(
            f"Modules in the {type(module).__name__} describe themselves, and do not know how "
            "Megatron-FSDP has divided them: pass the state dict of Megatron-LM, the result of "
            "preprocess_fsdp_dtensor_state_dict, to distckpt.dcp.save and load."
        )


def _add(state: ShardedStateDict, description: ShardedStateDict) -> None:
    """Add the sharded state dict of a module inside.

    Raises:
        InvalidShardingError: another tensor has the same name.
    """
    for name, part in description.items():
        other = state.setdefault(name, part)
        if getattr(other, "data", other) is not getattr(part, "data", part):
            raise InvalidShardingError(
                f"Two modules describe different tensors under the name {name!r}: let "
                "sharded_state_dict(prefix) of each put its prefix before every name."
            )


def _with_replica_id(description: ShardedStateDict, replica_id: ReplicaId) -> ShardedStateDict:
    """Number the copy of a sharded state dict, where that is open."""
    first = int(not is_main_replica(replica_id))

    def changed(_: Position, part: Any) -> Any:
        own = getattr(part, "replica_id", None)
        if not isinstance(own, OpenReplicaId):
            return part
        return replace(part, replica_id=OpenReplicaId((first, *own[1:])))

    state: ShardedStateDict = map_leaves(changed, description)
    return state


def sharded_state_dict_default(
    module: torch.nn.Module,
    prefix: str = "",
    sharded_offsets: Offsets = (),
    metadata: dict[str, Any] | None = None,
    tp_group: Group | None = None,
) -> ShardedStateDict:
    """Call a module's `sharded_state_dict`, or describe its state as copies.

    Tensor and data parallel ranks have the copies.

    Args:
        module: a module, usually part of another one that puts its sharded state dict together.
        prefix: put before every name.
        sharded_offsets: axes in front of each tensor's own, see `sharded_state_dict`.
        metadata: passed on; its entry `dp_cp_group`, if any, is the group of the ranks with copies.
        tp_group: the tensor parallel ranks.
    """
    offsets = tuple(sharded_offsets)
    own = getattr(module, "sharded_state_dict", None)
    if callable(own):
        _check_delegates(module)
        own_state: ShardedStateDict = own(prefix=prefix, sharded_offsets=offsets, metadata=metadata)
        return own_state
    entries, delegates = _entries(module)
    values = {name: value for name, (_, value) in entries.items()}
    copies = (metadata or {}).get("dp_cp_group")
    state = make_sharded_tensors_for_checkpoint(
        values, prefix, {}, offsets, tp_group=tp_group, dp_cp_group=copies
    )
    for name, child in delegates:
        _add(state, sharded_state_dict_default(child, prefix + name, offsets, metadata, tp_group))
    return state


def with_stored_buffers(
    module: torch.nn.Module, description: ShardedStateDict, entries: Mapping[str, StoredEntry]
) -> ShardedStateDict:
    """Request buffers in their stored shapes, where their module may take any.

    Observers of ranges do.
    """
    resized = _resized_buffers(module)
    changed = {}
    for name, shard in description.items():
        if type(shard) is not ShardedTensor or id(shard.data) not in resized:
            continue
        shape = tuple(shard.global_shape)
        stored = entries.get(shard.key)
        if shard.dtype.is_complex or tuple(shard.local_shape) != shape:
            continue
        if stored is not None and stored.dtype is not None and stored.shape != shape:
            data = torch.empty(stored.shape, dtype=shard.dtype)
            changed[name] = ShardedTensor.from_rank_offsets(
                shard.key, data, replica_id=shard.replica_id
            )
    if not changed:
        return description
    return {**description, **changed}


def _resized_buffers(module: torch.nn.Module) -> set[int]:
    """Return the `id()` of buffers whose modules customize loading."""
    plain = torch.nn.Module._load_from_state_dict
    buffers: set[int] = set()
    for owner in module.modules():
        if type(owner)._load_from_state_dict is not plain or owner._load_state_dict_pre_hooks:
            buffers.update(id(buffer) for buffer in owner._buffers.values() if buffer is not None)
    return buffers


def load_sharded_state_dict(
    module: torch.nn.Module, loaded: StateDict, prefix: str = "", *, strict: bool = True
) -> tuple[set[str], set[str]]:
    """Restore a module from its loaded sharded state dict.

    Tensors that were loaded in place, as happens with `sharded_state_dict`, are left alone; others
    are copied. Extra state is handed to `set_extra_state`.

    Args:
        module: the module whose `sharded_state_dict` was loaded.
        loaded: the entry that `load` returned in its place: tensors (the local parts of DTensors)
            and objects, by name.
        prefix: beginning of the names; other names are ignored.
        strict: whether names that only one side has are an error.

    Returns:
        Names that only the module has, and names that only `loaded` has. A parameter that is tied
        to a loaded one is not missing, nor is one that this rank has no part of.

    Raises:
        LoadMismatchError: names differ and `strict` is set, in which case nothing is changed; or a
            tensor has another shape.
    """
    entries, _ = _entries(module, delegate=False)
    by_name = {
        name[len(prefix) :]: value for name, value in loaded.items() if name.startswith(prefix)
    }
    missing = {prefix + name for name in _missing(entries, by_name)}
    unexpected = {prefix + name for name in by_name.keys() - entries.keys()}
    if strict and (missing or unexpected):
        raise LoadMismatchError(
            _mismatch(type(module).__name__, missing, unexpected), missing, unexpected
        )
    _fill(module, entries, by_name, prefix)
    return missing, unexpected


def _fill(
    module: torch.nn.Module,
    entries: Mapping[str, tuple[str, Any]],
    by_name: StateDict,
    prefix: str,
) -> None:
    owned = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    owned -= _resized_now(module, entries, by_name)
    others: StateDict = {}
    for name, value in by_name.items():
        if name not in entries:
            continue
        own_name, target = entries[name]
        if id(target) in owned and isinstance(value, torch.Tensor):
            _copy_into(prefix + name, target, value)
        else:
            others[own_name] = value
    if not others:
        _call_hooks(module)
        return
    try:
        # Extra state, and whatever else only the module can load.
        module.load_state_dict(others, strict=False)
    except RuntimeError as error:
        raise LoadMismatchError(
            f"{type(module).__name__} does not take what was loaded for it: {error}",
            unexpected=[prefix + name for name in others],
        ) from error


def _call_hooks(module: torch.nn.Module) -> None:
    """Call hooks of `load_state_dict`, where Megatron-FSDP renews its copies of parameters."""
    for below in module.modules():
        for hook in below._load_state_dict_post_hooks.values():
            # Those of torch look for parameters that were replaced.
            if not getattr(hook, "__module__", "").startswith("torch."):
                hook(below, _IncompatibleKeys([], []))


def _resized_now(
    module: torch.nn.Module, entries: Mapping[str, tuple[str, Any]], by_name: StateDict
) -> set[int]:
    """Return the `id()` of the buffers that were stored in other shapes.

    Their modules get them with the rest of their state.
    """
    targets = {name: entries[name][1] for name in by_name.keys() & entries.keys()}
    owners = set()
    possible: set[int] | None = None
    for name, target in targets.items():
        if _is_resized(target, by_name[name]):
            possible = possible or _resized_buffers(module)
            if id(target) in possible:
                owners.add(name.rpartition(".")[0])
    return {id(target) for name, target in targets.items() if name.rpartition(".")[0] in owners}


def _is_resized(target: Any, value: Any) -> bool:
    are_tensors = isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor)
    return are_tensors and not is_dtensor(target) and target.shape != value.shape


def _missing(entries: Mapping[str, tuple[str, Any]], by_name: Collection[str]) -> set[str]:
    """Return the names of entries that are not loaded, under any name."""
    values = [entries[name][1] for name in by_name if name in entries]
    reached = {id(value) for value in values if isinstance(value, torch.Tensor)}
    missing = set()
    for name, (_, value) in entries.items():
        is_of_other_ranks = is_dtensor(value) and not is_in_mesh(value)
        if name not in by_name and id(value) not in reached and not is_of_other_ranks:
            missing.add(name)
    return missing


def _mismatch(module: str, missing: set[str], unexpected: set[str]) -> str:
    lines = [f"What was loaded does not fit the module {module}:"]
    if missing:
        lines.append(f"  not loaded: {summarize_keys(missing)}")
    if unexpected:
        lines.append(f"  not in the module: {summarize_keys(unexpected)}")
    lines.append("Load into the sharded state dict of this module, or pass strict=False.")
    return "\n".join(lines)


def _copy_into(name: str, target: torch.Tensor, value: torch.Tensor) -> None:
    local = local_part(target).detach()
    value = local_part(value).detach()
    if (
        value.device == local.device
        and value.data_ptr() == local.data_ptr()
        and value.shape == local.shape
    ):
        return
    if local.is_meta:
        raise LoadMismatchError(
            f"{name!r} is on the meta device, where nothing can be loaded: call "
            "module.to_empty(device=...) before sharded_state_dict(module), or give load the "
            "module itself, and materialize='cpu' or another device.",
            missing=[name],
        )
    if value.shape != local.shape:
        raise LoadMismatchError(
            f"{name!r} has shape {tuple(local.shape)} on this rank, but {tuple(value.shape)} was "
            "loaded for it: load the sharded state dict of this very module.",
            unexpected=[name],
        )
    fill(name, local, value)


def _entries(
    module: torch.nn.Module, delegate: bool = True
) -> tuple[dict[str, tuple[str, Any]], list[tuple[str, torch.nn.Module]]]:
    """Return the state of a module by name, with original names.

    With `delegate`, the modules in it that define `sharded_state_dict` are left out and returned
    besides, with their prefixes.
    """
    module = bare_module(module)
    delegates = list(_delegates(module)) if delegate else []
    if delegates:
        _check_delegates(module)
    places: dict[str, _Place] = {"": ("", module)}
    entries: dict[str, tuple[str, Any]] = {}
    # Not walked by hand: hooks rename entries, and FSDP takes its parameters apart again in one.
    for name, value in module.state_dict(keep_vars=True).items():
        path, _, last = name.rpartition(".")
        plain_name = _place_at(path, places)[0] + last
        other_name, other = entries.setdefault(plain_name, (name, value))
        if other is not value:
            raise InvalidShardingError(
                f"Two entries of the {type(module).__name__} would have the name {plain_name!r}, "
                f"from which names of wrappers are removed: {other_name!r} and {name!r}. Rename "
                "one in its module."
            )
    if delegates:
        prefixes = tuple(name for name, _ in delegates)
        entries = {name: entry for name, entry in entries.items() if not name.startswith(prefixes)}
    return entries, delegates


def _delegates(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the outermost modules that define `sharded_state_dict`, by prefix."""
    # A module that is in two places has two names, so not named_modules().
    for name, child in module._modules.items():
        if child is None:
            continue
        below = f"{prefix}{name}."
        inner = bare_module(child)
        if callable(getattr(inner, "sharded_state_dict", None)):
            yield below, inner
        else:
            yield from _delegates(inner, below)


def bare_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside the wrappers of torch and of training libraries."""
    while name := _wrapped_name(module):
        module = module._modules[name]  # type: ignore[assignment]
    return module


def _wrapped_name(module: torch.nn.Module) -> str | None:
    """Return the name of the module in a wrapper, or None.

    A wrapper stores nothing but that module. Any other module that has a child of such a name is
    a layer with state of its own.
    """
    names: tuple[str, ...] = _WRAPPED
    if "module" in module._modules and _WRAPPERS & {cls.__name__ for cls in type(module).__mro__}:
        names = (*_WRAPPED, "module")
    for name in names:
        inner = module._modules.get(name)
        if inner is not None and _stores_only(module, inner):
            return name
    return None


def _stores_only(module: torch.nn.Module, inner: torch.nn.Module) -> bool:
    """Tell whether all state of a module is in one child."""
    if _has_own_state(module):
        return False
    # Fabric has the module a second time, as it is called in forward().
    inside: set[int] = set()
    if len(module._modules) > 1:
        inside.update(map(id, inner.modules()))
    for child in module._modules.values():
        if child is None or child is inner:
            continue
        if any(_has_own_state(below) for below in child.modules() if id(below) not in inside):
            return False
    return True


def _has_own_state(module: torch.nn.Module) -> bool:
    """Tell whether a module stores more than its children do."""
    plain = torch.nn.Module
    if type(module).get_extra_state is not plain.get_extra_state:
        return True
    if type(module)._save_to_state_dict is not plain._save_to_state_dict:
        return True
    transient = module._non_persistent_buffers_set
    buffers = [value for name, value in module._buffers.items() if name not in transient]
    return any(value is not None for value in (*module._parameters.values(), *buffers))


def _place_at(path: str, places: dict[str, _Place]) -> _Place:
    """Return the place at a path; `places` has earlier ones."""
    if path not in places:
        above, _, part = path.rpartition(".")
        places[path] = _below(*_place_at(above, places), part)
    return places[path]


def _below(prefix: str, module: torch.nn.Module | None, part: str) -> _Place:
    """Return the place of a child."""
    while module is not None and (name := _wrapped_name(module)):
        module = module._modules[name]
        if part == name:
            return prefix, module
        # A hook of the wrapper has removed its name already.
    child = None
    if module is not None:
        child = module._modules.get(part)
    return f"{prefix}{part}.", child

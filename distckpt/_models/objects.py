"""Objects in a state dict: described before a save or load as what the rest of the package knows,
and filled after it.

An `nn.Module` becomes its sharded state dict, an optimizer that of its parameters' states, a
DTensor its shards, and whatever has `state_dict()` and `load_state_dict()` what the former returns.
What iterates (data loaders, samplers), and the state of random number generators, is stored once
for each rank.

Names: those of the module at the entry `model` are its own; what is at another entry has the path
to it in front, as in `ema.layers.0.weight`. Positions in lists do not count, so that the stages of
a pipeline may be a list.
"""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch

from distckpt._base.errors import InvalidShardingError, LoadMismatchError, UnsupportedObjectError
from distckpt._base.messages import summarize_keys
from distckpt._base.tree import nested_values
from distckpt._format import codec
from distckpt._format.checksum import checksum
from distckpt._format.codec import HOLE
from distckpt._format.codec.tree import REGISTERED
from distckpt._mapping.base import OpenReplicaId
from distckpt._mapping.wrappers import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    StateDict,
)
from distckpt._models.dtensor import is_dtensor, is_in_mesh, shard_of_dtensor
from distckpt._models.materialize import materialize_module
from distckpt._models.modules import (
    bare_module,
    load_sharded_state_dict,
    sharded_state_dict,
    sharded_state_dict_default,
)
from distckpt._models.optimizer.description import (
    OptimizerState,
    describe_optimizer,
    fill_gaps,
    optimizer_targets,
)
from distckpt._models.optimizer.sharded import load_sharded_optimizer_state_dict
from distckpt._models.optimizer.shards import StoredEntry
from distckpt._models.optimizer.state import unite
from distckpt._models.optimizer.view import is_optimizer
from distckpt._models.per_rank import PerRank, cell_of, state_of
from distckpt._ranks.collectives import Ranks

logger = logging.getLogger(__name__)

Path: TypeAlias = tuple[Any, ...]
DTENSOR, MODULE, OPTIMIZER, PER_RANK, STATEFUL = range(5)
"""Kinds of objects, in the order in which they are filled: schedulers come after what they
schedule.
"""
_OF_ALL_SCHEDULERS = {
    "_step_count",
    "_last_lr",
    "_is_initial",
    "_get_lr_called_within_step",
    "verbose",
}
"""Not the same in all releases of PyTorch."""
# Looked up first, as these are the most.
_VALUES = frozenset(
    {
        bool,
        int,
        float,
        str,
        bytes,
        type(None),
        torch.Tensor,
        torch.Size,
        ShardedTensor,
        OptimizerState,
    }
)


class Place(NamedTuple):
    """An object in a state dict."""

    path: Path
    kind: int
    value: Any

    @property
    def name(self) -> str:
        """The path as text."""
        return ".".join(map(str, self.path))

    @property
    def prefix(self) -> str:
        """What the names of its tensors begin with, without a dot at the end; empty for `model`."""
        parts = [str(part) for part in self.path if not isinstance(part, int)]
        return "" if parts == ["model"] else ".".join(parts)


class Described(NamedTuple):
    """A state dict without objects, and where these were.

    For a save, `names` are the first names in the keys of the module at `model`, and `settings`
    those of optimizers, by prefix.
    """

    state_dict: Any
    places: list[Place]
    names: Sequence[str] = ()
    settings: Mapping[str, list[Any]] = MappingProxyType({})

    def digest(self) -> int:
        """Return a hash of 61 bits of what is the same on all ranks in the end."""
        return checksum(codec.encode([list(self.names), dict(self.settings)])) >> 3


def describe(
    ranks: Ranks, state_dict: Any, *, loads: bool = False, materialize: Any = None
) -> Described:
    """Describe the objects in a state dict, which is not changed.

    For a load, settings of optimizers and values are left out: they come from the checkpoint.
    Modules on the meta device get memory on the device `materialize`, if it is given.
    """
    places: list[Place] = []
    settings: dict[str, list[Any]] = {}
    try:
        tree = _Walk(ranks, loads, materialize, places).describe(state_dict, ())
    except RecursionError as error:
        raise UnsupportedObjectError(
            "The state dict contains itself, or is nested too deeply."
        ) from error
    meshes = _meshes(places)
    for place in places:
        if place.kind == PER_RANK:
            tree = _replaced(
                tree, place.path, cell_of(place.value, place.name, ranks, meshes, loads)
            )
        if place.kind == OPTIMIZER:
            described, entries = describe_optimizer(place.value, {"": tree}, place.prefix)
            if loads or place.prefix not in settings:
                described["settings"] = ShardedObject(
                    f"{place.prefix}.settings", None, (1,), (0,), ranks.rank
                )
            settings.setdefault(place.prefix, []).extend(entries)
            tree = _replaced(tree, place.path, described)
    if loads:
        return Described(tree, places)
    modules = [
        _at(tree, place.path) for place in places if place.kind == MODULE and not place.prefix
    ]
    names = {
        first_name(shard.key) for shard in nested_values(modules) if isinstance(shard, ShardedBase)
    }
    return Described(tree, places, sorted(names), settings)


def united(ranks: Ranks, described: Described) -> Described:
    """Give what was described for a save the names and settings of all ranks.

    Collective operation: all ranks must call it.
    """
    stateful = [place.name for place in described.places if place.kind == STATEFUL]
    sent = [
        json.loads(text)
        for text in ranks.all_gather(json.dumps([described.names, stateful]).encode())
    ]
    for rank, (_, others) in enumerate(sent):
        if lost := sorted({*others} - {*sent[0][1]}):
            raise InvalidShardingError(
                f"Rank {rank} has {summarize_keys(lost)}, and rank 0, whose states of such objects "
                "are saved, has not: have the same objects on all ranks, or a distckpt.PerRank."
            )
    settings = unite(ranks, dict(described.settings))
    for place in described.places:
        state = _at(described.state_dict, place.path)
        if place.kind == OPTIMIZER and "settings" in state:
            # Rank 0 may have no such optimizer.
            state["settings"].replica_id = OpenReplicaId((0, ranks.rank))
    return described._replace(
        names=sorted({name for names, _ in sent for name in names}), settings=settings
    )


def completed(described: Described) -> Any:
    """Return the state dict of a save with the settings of optimizers, and zeros for states that
    only others have.
    """
    for place in described.places:
        if place.kind == OPTIMIZER:
            state = _at(described.state_dict, place.path)
            fill_gaps(state, described.settings[place.prefix])
            if "settings" in state:
                state["settings"].data = described.settings[place.prefix]
    return described.state_dict


def first_name(key: str) -> str:
    """Return the first name in a key, `#` for the number of a layer."""
    first = key.partition(".")[0]
    return "#" if first.isdigit() else first


class _Walk(NamedTuple):
    """The settings of a description, and the objects found so far."""

    ranks: Ranks
    loads: bool
    materialize: Any
    places: list[Place]

    def describe(self, node: Any, path: Path) -> Any:
        """Return a part of the state dict without objects; what needs the modules stays."""
        if type(node) in _VALUES:
            return node
        if isinstance(node, dict):
            return _rebuilt(
                node, {key: self.describe(value, (*path, key)) for key, value in node.items()}
            )
        if isinstance(node, list | tuple):
            return _rebuilt(
                node, [self.describe(value, (*path, i)) for i, value in enumerate(node)]
            )
        kind = _kind_of(node)
        if isinstance(node, torch.utils.data.DataLoader) and kind is None:
            raise UnsupportedObjectError(
                f"{'.'.join(map(str, path))!r} is a torch.utils.data.DataLoader, which has no "
                "state: leave it out, or use torchdata's StatefulDataLoader, which goes on where "
                "it was."
            )
        if kind is None:
            return node
        place = Place(path, kind, node)
        self.places.append(place)
        if kind == MODULE:
            module, prefix = bare_module(node), place.prefix and f"{place.prefix}."
            if self.materialize is not None:
                materialize_module(module, self.materialize)
            # Its own method is called here, unlike by sharded_state_dict.
            has_own = callable(getattr(module, "sharded_state_dict", None))
            return (sharded_state_dict_default if has_own else sharded_state_dict)(module, prefix)
        if kind == DTENSOR:
            shard = shard_of_dtensor(place.name, node, (), 0, None) if is_in_mesh(node) else None
            return LocalNonpersistentObject(node) if shard is None else shard
        if kind == STATEFUL:
            described = self.describe(state_of(node, place.name), path)
            return _only_shards(described) if self.loads else described
        return node


def _kind_of(node: Any) -> int | None:
    if isinstance(node, torch.Tensor):
        return DTENSOR if is_dtensor(node) else None
    if isinstance(node, torch.nn.Module):
        return MODULE
    if isinstance(node, type | ShardedBase) or type(node) in REGISTERED:
        return None
    if is_optimizer(node):
        return OPTIMIZER
    if not (
        callable(getattr(node, "state_dict", None))
        and callable(getattr(node, "load_state_dict", None))
    ):
        return None
    return PER_RANK if isinstance(node, PerRank) or hasattr(node, "__iter__") else STATEFUL


def _meshes(places: list[Place]) -> list[str]:
    """Name the device meshes of the modules in a state dict, by their axes and sizes."""
    modules = [
        place.value
        for place in places
        if place.kind == MODULE and any(p.kind == PER_RANK for p in places)
    ]
    meshes = {
        param.device_mesh
        for module in modules
        for param in module.parameters()
        if is_dtensor(param)
    }
    return sorted({f"{mesh.mesh_dim_names or ''}{tuple(mesh.shape)}" for mesh in meshes})


def _rebuilt(node: Any, children: Any) -> Any:
    """Return a container with other children, or itself when they are the same objects."""
    if isinstance(node, dict):
        return node if all(children[key] is value for key, value in node.items()) else children
    if all(map(operator.is_, node, children)):
        return node
    if isinstance(node, tuple):
        return type(node)(*children) if hasattr(node, "_fields") else tuple(children)
    return children


def _only_shards(tree: Any) -> Any:
    """Return what of a described tree is sharded; None for nothing."""
    if isinstance(tree, dict) and not isinstance(tree, OptimizerState):
        kept = {
            key: below for key, value in tree.items() if (below := _only_shards(value)) is not None
        }
        return kept or None
    if isinstance(tree, list | tuple):
        items = [_only_shards(value) for value in tree]
        return _rebuilt(tree, items) if any(item is not None for item in items) else None
    # An optimizer is described when all modules have been.
    is_kept = isinstance(
        tree, ShardedBase | LocalNonpersistentObject | OptimizerState
    ) or is_optimizer(tree)
    return tree if is_kept else None


def needs_stored(described: Described) -> int:
    """Tell whether a load needs to know the keys of the checkpoint: 1 for yes, 2 if it also has
    optimizers.
    """
    return (
        2
        if _optimizer_states(described.state_dict)
        else any(place.kind != DTENSOR for place in described.places)
    )


def _optimizer_states(tree: Any) -> list[tuple[Path, OptimizerState]]:
    if isinstance(tree, OptimizerState):
        return [((), tree)]
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list | tuple)
        else ()
    )
    return [
        ((key, *path), state) for key, value in items for path, state in _optimizer_states(value)
    ]


def settings_of(
    described: Described, stored: Mapping[str, StoredEntry]
) -> dict[str, ShardedObject]:
    """Return the stored settings of the optimizers of a load, which `resolve` needs."""
    keys = {f"{state.prefix}.settings" for _, state in _optimizer_states(described.state_dict)}
    return {key: ShardedObject(key, None, (1,), (0,)) for key in sorted(keys & stored.keys())}


def resolve(
    rank: int, described: Described, stored: Mapping[str, StoredEntry], settings: StateDict
) -> Described:
    """Complete what `describe` made for a load by what the checkpoint holds, and the settings in
    it.
    """
    tree, places = described.state_dict, described.places
    keys = set(settings)
    for path, state in _optimizer_states(tree):
        key = f"{state.prefix}.settings"
        if key in settings:
            targets = optimizer_targets(state, settings[key], stored)
            if key in keys:
                # Requested once more, by the first with this prefix, as all that is loaded is.
                keys.remove(key)
                targets["settings"] = ShardedObject(key, None, (1,), (0,), OpenReplicaId((0, rank)))
            tree = _replaced(tree, path, targets)
    for place in places:
        entry, cell = stored.get(place.name), _at(tree, place.path)
        if place.kind == PER_RANK and entry is not None and entry.shape != cell.global_shape:
            _warn_of_skipped(cell, f"grid {tuple(entry.shape)}", f"grid {cell.global_shape}")
            tree = _replaced(tree, place.path, LocalNonpersistentObject(place.value))
            places = [other for other in places if other is not place]
    return Described(tree, places)


def restore(described: Described, loaded: StateDict, is_strict: bool) -> StateDict:
    """Put what was loaded into the objects; return it with the objects in their places.

    Raises:
        LoadMismatchError: nothing was loaded for an object, unless `is_strict` is False.
    """
    for place in sorted(described.places, key=lambda place: (place.kind, -len(place.path))):
        value = _at(loaded, place.path)
        if value is HOLE:
            if is_strict:
                raise LoadMismatchError(
                    f"The checkpoint has nothing at {place.name!r}, where the state dict has a "
                    f"{type(place.value).__name__}: leave it out, or load under the names that "
                    "were saved.",
                    unexpected=[place.name],
                )
            continue
        if place.kind == MODULE:
            _restore_module(place, value, is_strict)
        elif place.kind == OPTIMIZER:
            if is_strict or "settings" in value:
                load_sharded_optimizer_state_dict(place.value, value)
        elif place.kind == PER_RANK:
            cell = _at(described.state_dict, place.path)
            if value["layout"] == cell.data["layout"]:
                place.value.load_state_dict(value["value"])
            else:
                _warn_of_skipped(cell, f"layout {value['layout']}", f"layout {cell.data['layout']}")
        elif place.kind != DTENSOR:
            if isinstance(place.value, torch.optim.lr_scheduler.LRScheduler):
                _check_scheduler(place, value, is_strict)
            place.value.load_state_dict(value)
        loaded = _replaced(loaded, place.path, place.value)
    return loaded


def _restore_module(place: Place, value: StateDict, is_strict: bool) -> None:
    module, prefix = bare_module(place.value), place.prefix and f"{place.prefix}."
    try:
        load_sharded_state_dict(module, value, prefix, strict=is_strict)
    except LoadMismatchError as error:
        if place.path or not error.unexpected:
            raise
        raise LoadMismatchError(
            f"The checkpoint holds more than the {type(module).__name__}: "
            f"{summarize_keys(error.unexpected)}. To load the module alone, put it into a state "
            f"dict: load({{'model': model}}, path).",
            unexpected=error.unexpected,
        ) from error


def _check_scheduler(place: Place, state: Mapping[str, Any], is_strict: bool) -> None:
    """Refuse the state of a scheduler of another class, which `load_state_dict` takes; other
    releases may add to it.
    """
    own = place.value.state_dict().keys() - _OF_ALL_SCHEDULERS
    stored = state.keys() - _OF_ALL_SCHEDULERS
    if own == stored:
        return
    text = (
        f"the state that was saved at {place.name!r} has "
        f"{summarize_keys(stored - own) or 'nothing'} in place of {type(place.value).__name__}'s "
        f"{summarize_keys(own - stored) or 'nothing'}"
    )
    if is_strict and own - stored and stored - own:
        raise LoadMismatchError(
            f"A scheduler of another kind: {text}. Create the one that was saved, or leave it out."
        )
    logger.warning("%s: is it of another scheduler?", text)


def _warn_of_skipped(cell: ShardedObject, saved: str, own: str) -> None:
    if not any(cell.replica_id):  # type: ignore[arg-type]  # Of rank 0.
        logger.warning(
            "%r is not restored: each rank has its own, and it was saved under the %s, while "
            "this load has the %s. A data loader begins anew, random numbers go on from where "
            "they are.",
            cell.key, saved, own,
        )  # fmt: skip


def _at(tree: Any, path: Path) -> Any:
    """Return what is at a path, `HOLE` for nothing."""
    for key in path:
        is_there = (
            key in tree
            if isinstance(tree, dict)
            else isinstance(tree, list | tuple) and key < len(tree)
        )
        if not is_there:
            return HOLE
        tree = tree[key]
    return tree


def _replaced(tree: Any, path: Path, value: Any) -> Any:
    """Return a tree with another value at a path; containers on the way are copied."""
    if not path:
        return value
    key, *below = path
    if isinstance(tree, dict):
        return {**tree, key: _replaced(tree[key], tuple(below), value)}
    return _rebuilt(
        tree,
        [_replaced(item, tuple(below), value) if i == key else item for i, item in enumerate(tree)],
    )

"""Objects in a state dict: described before a save or load as what the rest of the package knows.

An `nn.Module` becomes its sharded state dict, an optimizer the sharded state dict of its state, a
DTensor its shards, and any other object that has `state_dict()` and `load_state_dict()` what
`state_dict()` returns. What iterates (data loaders, samplers), and the state of random number
generators, is stored once for each rank. `restore` fills the objects after a load.

The names in the module at the entry `model` stay as they are. At another entry they get the path to
it in front, as in `ema.layers.0.weight`. Positions in lists do not count, so that the stages of a
pipeline may be a list.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from distckpt._base.errors import InvalidShardingError, UnsupportedObjectError
from distckpt._base.messages import summarize_keys
from distckpt._base.tree import (
    CONTAINERS,
    HOLE,
    Position,
    at,
    dotted,
    leaves,
    map_leaves,
    replaced,
)
from distckpt._format import codec
from distckpt._format.checksum import checksum
from distckpt._format.codec.encode import is_object_of_state, nodes_of_any
from distckpt._format.codec.tree import REGISTERED
from distckpt._format.marker import first_name
from distckpt._mapping.base import OpenReplicaId, ShardedBase
from distckpt._mapping.sharded_tensor import ShardedTensor
from distckpt._mapping.wrappers import LocalNonpersistentObject, ShardedObject, StateDict
from distckpt._models.bound_state import BoundState
from distckpt._models.dtensor import (
    has_parts,
    is_dtensor,
    is_in_mesh,
    shard_of_dtensor,
    shard_of_parts,
)
from distckpt._models.modules import (
    bare_module,
    sharded_state_dict,
    sharded_state_dict_default,
    with_stored_buffers,
)
from distckpt._models.optimizer.description import (
    OptimizerState,
    describe_optimizer,
    fill_gaps,
    optimizer_targets,
)
from distckpt._models.optimizer.state import check_one_rest, storable_entries, unite
from distckpt._models.optimizer.view import is_optimizer
from distckpt._models.per_rank import PerRank, cell_of, state_of, warn_of_shared, warn_of_skipped
from distckpt._ranks.collectives import Ranks
from distckpt._state.stored_form import StoredEntry

# The most frequent types, looked up first.
_VALUES = frozenset(
    {bool, int, float, str, bytes, type(None), torch.Tensor, torch.Size, ShardedTensor}
)


class Kind(IntEnum):
    """Kinds of objects, in the order in which they are filled: schedulers come after what they
    schedule.
    """

    DTENSOR = 0
    MODULE = 1
    OPTIMIZER = 2
    PER_RANK = 3
    STATEFUL = 4


class Place(NamedTuple):
    """An object in a state dict."""

    path: Position
    kind: Kind
    value: Any

    @property
    def name(self) -> str:
        """The path as text."""
        return dotted(self.path)

    @property
    def prefix(self) -> str:
        """What the names of its tensors begin with, without a dot at the end; empty for `model`."""
        parts = [str(part) for part in self.path if not isinstance(part, int)]
        return "" if parts == ["model"] else ".".join(parts)

    @property
    def is_model(self) -> bool:
        """Tell whether this is the module whose tensors have no path in their names."""
        return self.kind is Kind.MODULE and not self.prefix


@dataclass(frozen=True)
class Described:
    """A state dict without objects, and where these were.

    Attributes:
        state_dict: of descriptions, and of values other than objects.
        places: of the objects.
        optimizers: the descriptions of optimizers, with their positions in `state_dict`.
        names: for a save, the first names in the keys of the module at `model`.
        settings: for a save, the settings of the optimizers by prefix.
    """

    state_dict: Any
    places: list[Place]
    optimizers: list[tuple[Position, OptimizerState]]
    names: Sequence[str] = ()
    settings: Mapping[str, list[Any]] = field(default_factory=dict)

    @property
    def schedulers(self) -> dict[str, str]:
        """The classes of learning rate schedulers, by place."""
        stateful = [place for place in self.places if place.kind is Kind.STATEFUL]
        if not stateful:
            return {}
        from distckpt._models.schedulers import scheduler_class

        classes = {place.name: scheduler_class(place.value) for place in stateful}
        return {name: text for name, text in classes.items() if text}

    @property
    def has_stateful(self) -> bool:
        """Whether there are objects whose states all ranks have in common."""
        return any(place.kind is Kind.STATEFUL for place in self.places)

    def digest(self) -> int:
        """Return a hash, of 61 bits, of what all ranks agree on in the end."""
        return checksum(codec.encode([list(self.names), dict(self.settings)])) >> 3


def with_storable_settings(described: Described) -> Described:
    """A description without settings of optimizers that cannot be stored."""
    settings = dict(described.settings)
    for prefix, entries in settings.items():
        try:
            codec.encode(entries, refuses_left_out=True)
        except UnsupportedObjectError:
            settings[prefix] = storable_entries(prefix, entries)
    return replace(described, settings=settings)


# --- Describing -----------------------------------------------------------------------------------


def describe_objects(
    ranks: Ranks,
    state_dict: Any,
    *,
    loads: bool = False,
    materialize: Any = None,
    made: list[Any] | None = None,
    breaks_cycles: bool = False,
) -> Described:
    """Describe the objects in a state dict, which is not changed.

    For a load, settings of optimizers and values are left out: they come from the checkpoint.
    Modules on the meta device get memory on the device `materialize`, if it is given; what has
    no values then is added to `made`. With `breaks_cycles`, containers that hold themselves are
    left out.
    """
    walk = _Walk(ranks, loads, materialize, [] if made is None else made, breaks_cycles)
    try:
        tree = walk.described(state_dict, ())
    except RecursionError as error:
        raise UnsupportedObjectError(
            "The state dict contains itself, or is nested too deeply."
        ) from error
    tree = walk.with_cells(tree)
    tree, settings = walk.with_optimizers(tree)
    if loads:
        return Described(tree, walk.places, walk.optimizers)
    names = _names_of_model(tree, walk.places)
    return Described(tree, walk.places, walk.optimizers, names, settings)


@dataclass
class _Walk:
    """The settings of a description, and the objects found so far."""

    ranks: Ranks
    loads: bool
    materialize: Any
    made: list[Any]
    breaks_cycles: bool
    places: list[Place] = field(default_factory=list)
    optimizers: list[tuple[Position, OptimizerState]] = field(default_factory=list)

    def described(self, node: Any, path: Position) -> Any:
        """Return a part of the state dict without objects, except optimizers and what each rank has
        of its own.
        """
        num_places, num_optimizers = len(self.places), len(self.optimizers)
        try:
            return map_leaves(self._described_leaf, node, _is_walked, path)
        except RecursionError:
            if not self.breaks_cycles:
                raise
        del self.places[num_places:], self.optimizers[num_optimizers:]
        return map_leaves(self._described_leaf, codec.without_cycles(node), _is_walked, path)

    def _described_leaf(self, path: Position, leaf: Any) -> Any:
        if type(leaf) in _VALUES and not has_parts(leaf):
            return leaf
        if isinstance(leaf, OptimizerState):
            self.optimizers.append((path, leaf))
            return leaf
        if isinstance(leaf, BoundState):
            leaf.check_memory()
            return dict(leaf)
        kind = _kind_of(leaf)
        if kind is None:
            _refuse_plain_loader(path, leaf)
            if self.loads:
                _refuse_hidden_objects(path, leaf)
            return leaf
        place = Place(path, kind, leaf)
        self.places.append(place)
        return self._description_of(place)

    def _description_of(self, place: Place) -> Any:
        if place.kind is Kind.MODULE:
            return self._described_module(place)
        if place.kind is Kind.DTENSOR:
            if has_parts(place.value):
                copy = OpenReplicaId((0, self.ranks.rank))
                return shard_of_parts(place.name, place.value, (), 0, copy)
            if not is_in_mesh(place.value):
                return LocalNonpersistentObject(place.value)
            return shard_of_dtensor(place.name, place.value, (), 0, None)
        if place.kind is Kind.STATEFUL:
            described = self.described(state_of(place.value, place.name), place.path)
            return _only_shards(described) if self.loads else described
        return place.value

    def _described_module(self, place: Place) -> Any:
        module, prefix = bare_module(place.value), place.prefix and f"{place.prefix}."
        if self.materialize is not None:
            # Imported when it is needed: most modules have memory.
            from distckpt._models.materialize import materialize_module

            self.made += materialize_module(module, self.materialize)
        # Its own method is called here, unlike by sharded_state_dict.
        has_own = callable(getattr(module, "sharded_state_dict", None))
        return (sharded_state_dict_default if has_own else sharded_state_dict)(module, prefix)

    def with_cells(self, tree: Any) -> Any:
        """Return a tree with descriptions of the values that each rank has of its own."""
        places = [place for place in self.places if place.kind is Kind.PER_RANK]
        meshes = _meshes(self.places) if places else []
        for place in places:
            cell = cell_of(place.value, place.name, self.ranks, meshes, self.loads)
            tree = replaced(tree, place.path, cell)
        return tree

    def with_optimizers(self, tree: Any) -> tuple[Any, dict[str, list[Any]]]:
        """Return a tree with descriptions of the optimizers, and their settings by prefix."""
        settings: dict[str, list[Any]] = {}
        for place in self.places:
            if place.kind is not Kind.OPTIMIZER:
                continue
            described, entries = describe_optimizer(place.value, tree, place.prefix)
            if self.loads or place.prefix not in settings:
                key, rank = f"{place.prefix}.settings", self.ranks.rank
                # A load may have several optimizers of one prefix.
                copy = OpenReplicaId((1, rank)) if place.prefix in settings else rank
                described["settings"] = ShardedObject(key, None, (1,), (0,), copy)
            settings.setdefault(place.prefix, []).extend(entries)
            self.optimizers.append((place.path, described))
            tree = replaced(tree, place.path, described)
        for prefix, entries in () if self.loads else settings.items():
            check_one_rest(prefix, entries)
        return tree, settings


def _is_walked(node: Any) -> bool:
    return isinstance(node, CONTAINERS) and not isinstance(node, OptimizerState | BoundState)


def _kind_of(node: Any) -> Kind | None:
    if isinstance(node, torch.Tensor):
        return Kind.DTENSOR if is_dtensor(node) or has_parts(node) else None
    if isinstance(node, torch.nn.Module):
        return Kind.MODULE
    if isinstance(node, type | ShardedBase) or type(node) in REGISTERED:
        return None
    if is_optimizer(node):
        return Kind.OPTIMIZER
    return _kind_of_stateful(node)


def _kind_of_stateful(node: Any) -> Kind | None:
    names = ("state_dict", "load_state_dict")
    if not all(callable(getattr(node, name, None)) for name in names):
        return None
    is_per_rank = isinstance(node, PerRank) or hasattr(node, "__iter__")
    return Kind.PER_RANK if is_per_rank else Kind.STATEFUL


def _refuse_plain_loader(path: Position, leaf: Any) -> None:
    if isinstance(leaf, torch.utils.data.DataLoader):
        raise UnsupportedObjectError(
            f"{dotted(path)!r} is a torch.utils.data.DataLoader, which has no state: leave it "
            "out, or use torchdata's StatefulDataLoader, which goes on where it was."
        )


def _refuse_hidden_objects(path: Position, leaf: Any) -> None:
    """Refuse a target of a load that holds objects where none are looked for, such as a deque. A
    save refuses these when it encodes them.
    """
    for place, node in nodes_of_any(leaf, path):
        if node is not leaf and is_object_of_state(node):
            raise UnsupportedObjectError(
                f"{dotted(place)!r} holds an object of type {type(node).__name__} in a container "
                f"of type {type(leaf).__name__}, in which no objects are looked for: keep it in a "
                "list, tuple or dict of the state dict."
            )


def _only_shards(described: Any) -> Any:
    """Return a described tree with None for all values that are not sharded."""
    return map_leaves(_shard_or_none, described, _is_walked)


def _shard_or_none(_: Position, leaf: Any) -> Any:
    kept = (ShardedBase, LocalNonpersistentObject, OptimizerState)
    # Optimizers are described when all modules have been.
    return leaf if isinstance(leaf, kept) or is_optimizer(leaf) else None


def _meshes(places: list[Place]) -> list[str]:
    """Name the device meshes of the modules in a state dict, by their axes and sizes."""
    modules = [place.value for place in places if place.kind is Kind.MODULE]
    params = (param for module in modules for param in module.parameters())
    meshes = {param.device_mesh for param in params if is_dtensor(param)}
    return sorted({f"{mesh.mesh_dim_names or ''}{tuple(mesh.shape)}" for mesh in meshes})


def _names_of_model(tree: Any, places: list[Place]) -> list[str]:
    """Return the first names in the keys of the module at `model`."""
    models = [at(tree, place.path) for place in places if place.is_model]
    if not models:
        return []
    shards = [shard for _, shard in leaves(models) if isinstance(shard, ShardedBase)]
    return sorted({first_name(shard.key) for shard in shards})


# --- Saving ---------------------------------------------------------------------------------------


def united(
    ranks: Ranks, described: Described, *, first_has_all: bool = True, warns: bool = False
) -> Described:
    """Unite the names and settings of all ranks for a save.

    `first_has_all` refuses objects that rank 0, which saves their states, does not have. `warns`
    takes the first of settings that differ, with a warning.

    Collective operation: all ranks must call it.
    """
    stateful = [place.name for place in described.places if place.kind is Kind.STATEFUL]
    own = json.dumps([described.names, stateful]).encode()
    sent = map(json.loads, ranks.all_gather(own))
    names, stateful_names = zip(*sent, strict=True)
    if first_has_all:
        _check_first_has_all(stateful_names)
    settings = unite(ranks, dict(described.settings), warns)
    for place in described.places:
        state = at(described.state_dict, place.path)
        if place.kind is Kind.OPTIMIZER and "settings" in state:
            # Rank 0 may have no such optimizer.
            state["settings"].replica_id = OpenReplicaId((0, ranks.rank))
    united_names = sorted(set(itertools.chain.from_iterable(names)))
    return replace(described, names=united_names, settings=settings)


def _check_first_has_all(stateful: Sequence[list[str]]) -> None:
    """Refuse objects that rank 0, which saves their states, does not have."""
    for rank, names in enumerate(stateful):
        if lost := sorted({*names} - {*stateful[0]}):
            raise InvalidShardingError(
                f"Rank {rank} has {summarize_keys(lost)}, and rank 0 does not, whose states of "
                "such objects are saved: have the same objects on all ranks, or a distckpt.PerRank."
            )


def completed(described: Described) -> Any:
    """Return the state dict of a save with the settings of optimizers, and zeros for states that
    only others have.
    """
    for place in described.places:
        if place.kind is Kind.OPTIMIZER:
            state = at(described.state_dict, place.path)
            fill_gaps(state, described.settings[place.prefix])
            if "settings" in state:
                state["settings"].data = described.settings[place.prefix]
            if not state["state"]:
                # An empty dict would be a value, which ranks with other parameters do not have.
                state["state"] = LocalNonpersistentObject({})
    return described.state_dict


# --- Loading --------------------------------------------------------------------------------------


def needs_stored(described: Described) -> int:
    """Return 1 when a load needs to know the keys of the checkpoint, 2 when it also needs the
    settings of optimizers, else 0.
    """
    if described.optimizers:
        return 2
    return int(any(place.kind is not Kind.DTENSOR for place in described.places))


def settings_of(
    described: Described, stored: Mapping[str, StoredEntry]
) -> dict[str, ShardedObject]:
    """Return the stored settings of the optimizers of a load, which `resolve` needs."""
    keys = {f"{state.prefix}.settings" for _, state in described.optimizers}
    return {key: ShardedObject(key, None, (1,), (0,)) for key in sorted(keys & stored.keys())}


def resolve(
    rank: int,
    described: Described,
    stored: Mapping[str, StoredEntry],
    settings: StateDict,
    shared_value: Callable[[str], Any],
) -> Described:
    """Complete the description of a load from stored entries and settings."""
    tree = _with_optimizer_targets(rank, described, stored, settings)
    for place in described.places:
        if place.kind is Kind.MODULE:
            module, shards = bare_module(place.value), at(tree, place.path)
            requested = with_stored_buffers(module, shards, stored)
            tree = tree if requested is shards else replaced(tree, place.path, requested)
    places = []
    for place in described.places:
        entry, cell = stored.get(place.name), at(tree, place.path, HOLE)
        if place.kind is not Kind.PER_RANK or entry is None or entry.shape == cell.global_shape:
            places.append(place)
            continue
        shared = shared_value(place.name)
        if shared is not HOLE:
            warn_of_shared(place.value, cell)
            # From now on a state that all ranks have in common.
            places.append(place._replace(kind=Kind.STATEFUL))
            tree = replaced(tree, place.path, LocalNonpersistentObject(shared["value"]))
        else:
            grids = f"grid {tuple(entry.shape)}", f"grid {cell.global_shape}"
            warn_of_skipped(place.value, cell, *grids)
            tree = replaced(tree, place.path, LocalNonpersistentObject(place.value))
    return Described(tree, places, described.optimizers)


def _with_optimizer_targets(
    rank: int,
    described: Described,
    stored: Mapping[str, StoredEntry],
    settings: StateDict,
) -> Any:
    """Return the state dict with targets for stored optimizer states."""
    tree = described.state_dict
    unrequested = set(settings)
    for path, state in described.optimizers:
        key = f"{state.prefix}.settings"
        if key not in settings:
            continue
        targets = optimizer_targets(state, settings[key], stored)
        if key in unrequested:
            # Requested once more, by the first with this prefix, as all that is loaded is.
            unrequested.remove(key)
            targets["settings"] = ShardedObject(key, None, (1,), (0,), OpenReplicaId((0, rank)))
        tree = replaced(tree, path, targets)
    return tree

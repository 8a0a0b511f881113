"""Descriptions of the objects in a state dict.

An `nn.Module` becomes its sharded state dict, an optimizer the sharded state dict of its state, a
DTensor its shards, and any other object that has `state_dict()` and `load_state_dict()` the return
value of `state_dict()`. Iterables (data loaders, samplers), and the state of random number
generators, are stored once for each rank. `restore` fills the objects after a load.

The names in the module at the entry `model` stay as they are. At another entry they get the path to
it in front, as in `ema.layers.0.weight`. Positions in lists do not count, so that the stages of a
pipeline may be a list.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import torch

from distckpt._base.errors import InvalidShardingError, UnsupportedObjectError
from distckpt._base.messages import summarize_keys
from distckpt._base.tree import Position, at, dotted, is_container, leaves, map_leaves, replaced
from distckpt._format import codec
from distckpt._format.checksum import checksum
from distckpt._format.codec.encode import is_object_of_state
from distckpt._format.codec.tree import REGISTERED, nodes_of_any
from distckpt._format.marker import first_name
from distckpt._models.bound_state import BoundState
from distckpt._models.dtensor import (
    has_parts,
    is_dtensor,
    is_in_mesh,
    mesh_names,
    shard_of_dtensor,
    shard_of_parts,
)
from distckpt._models.modules import bare_module, sharded_state_dict, sharded_state_dict_default
from distckpt._models.optimizer.describe import OptimizerState, describe_optimizer, fill_gaps
from distckpt._models.optimizer.read import is_optimizer
from distckpt._models.optimizer.settings import check_one_rest, storable_entries, unite
from distckpt._models.per_rank import PerRank, cell_of, state_of
from distckpt._ranks.collectives import Ranks
from distckpt.mapping._base import OpenReplicaId, ReplicaId, ShardedBase
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import LocalNonpersistentObject, ShardedObject

# The most frequent types, looked up first.
_VALUES = frozenset(
    {bool, int, float, str, bytes, type(None), torch.Tensor, torch.Size, ShardedTensor}
)
# These dicts are described as a whole.
_is_walked = partial(is_container, opaque=(OptimizerState, BoundState))
_SHARDED = (ShardedBase, LocalNonpersistentObject, OptimizerState)


class Kind(IntEnum):
    """Kinds of objects, in the order in which they are filled.

    Schedulers come after their optimizers.
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
        """Beginning of the names of its tensors, without a dot; empty for `model`."""
        parts = [str(part) for part in self.path if not isinstance(part, int)]
        if parts == ["model"]:
            return ""
        return ".".join(parts)

    @property
    def is_model(self) -> bool:
        """Whether this is the module whose tensors have no path in front."""
        return self.kind is Kind.MODULE and not self.prefix


@dataclass(frozen=True)
class Description:
    """State dict with descriptions of objects, and their places.

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
        classes = {}
        for place in self.places:
            if place.kind is Kind.STATEFUL and (text := scheduler_class(place.value)):
                classes[place.name] = text
        return classes

    @property
    def module_prefixes(self) -> list[str]:
        """Prefixes of modules elsewhere than at `model`, with a dot."""
        prefixes = set()
        for place in self.places:
            if place.kind is Kind.MODULE and place.prefix:
                prefixes.add(f"{place.prefix}.")
        return sorted(prefixes)

    @property
    def has_stateful(self) -> bool:
        """Whether there are objects whose states all ranks have in common."""
        return any(place.kind is Kind.STATEFUL for place in self.places)

    def digest(self) -> int:
        """Return a hash of 61 bits of names and settings."""
        return checksum(codec.encode([list(self.names), dict(self.settings)])) >> 3


def scheduler_class(value: Any) -> str:
    """Name the class of a scheduler, and those in it.

    An example is `SequentialLR[LinearLR, StepLR]`; the name is empty for other objects.
    """
    if type(value).__name__ == "AcceleratedScheduler":
        value = value.scheduler
    if not isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return ""
    inner = ", ".join(map(scheduler_class, getattr(value, "_schedulers", ())))
    if inner:
        return f"{type(value).__name__}[{inner}]"
    return type(value).__name__


def with_storable_settings(description: Description) -> Description:
    """A description without settings of optimizers that cannot be stored."""
    settings = {}
    for prefix, entries in description.settings.items():
        settings[prefix] = storable_entries(prefix, entries)
    return replace(description, settings=settings)


# --- Describing -----------------------------------------------------------------------------------


def describe_objects(
    ranks: Ranks,
    state_dict: Any,
    *,
    loads: bool = False,
    materialize: Any = None,
    made: list[Any] | None = None,
    breaks_cycles: bool = False,
) -> Description:
    """Describe the objects in a state dict, which is not changed.

    For a load, settings of optimizers and values are left out: they come from the checkpoint.
    Modules on the meta device get memory on the device `materialize`, if it is given; tensors that
    have no values then are added to `made`. With `breaks_cycles`, containers that hold themselves
    are left out.
    """
    if made is None:
        made = []
    describer = _Describer(ranks, loads, materialize, made, breaks_cycles)
    try:
        tree = describer.describe(state_dict, ())
    except RecursionError as error:
        raise UnsupportedObjectError(
            "The state dict contains itself, or is nested too deeply."
        ) from error
    places = describer.places
    shards = _list_shards(tree, places)
    names: list[str] = []
    if not loads:
        names = _names_of_model(tree, places)
    for path, cell in describer.per_rank():
        tree = replaced(tree, path, cell)
    states, settings = describer.states_of_optimizers(shards)
    for path, state in states:
        tree = replaced(tree, path, state)
    optimizers = describer.optimizers + states
    if loads:
        return Description(tree, places, optimizers)
    return Description(tree, places, optimizers, names, settings)


@dataclass
class _Describer:
    """Describes a tree; the arguments are those of `describe_objects`.

    Attributes:
        places: of the objects so far. Optimizers, and objects that each rank has of its own, are
            still in the tree: their descriptions depend on all modules of the state dict.
        optimizers: descriptions that are in the state dict itself.
    """

    ranks: Ranks
    loads: bool
    materialize: Any
    made: list[Any]
    breaks_cycles: bool
    places: list[Place] = field(default_factory=list)
    optimizers: list[tuple[Position, OptimizerState]] = field(default_factory=list)

    def describe(self, tree: Any, path: Position, *, is_state: bool = False) -> Any:
        """Describe the objects in a tree: a state dict, or an object's state."""
        tree, items = _list_leaves(tree, path, self.breaks_cycles)
        given = [leaf for _, leaf in items]
        values = list(given)
        places = self._find_places(items, values)
        self.places += places.values()
        # Stateful objects after the modules, whose tensors may be in their states.
        for kind in (Kind.MODULE, Kind.DTENSOR, Kind.STATEFUL):
            for number, place in places.items():
                if place.kind is kind:
                    values[number] = self._description(place)
        if is_state and self.loads:
            values = [map_leaves(_only_shards, value, _is_walked) for value in values]
        if all(map(operator.is_, values, given)):
            return tree
        described = iter(values)
        return map_leaves(lambda *_: next(described), tree, _is_walked)

    def _find_places(
        self, items: Iterable[tuple[Position, Any]], values: list[Any]
    ) -> dict[int, Place]:
        """Return the places of objects by number; describe all others."""
        places: dict[int, Place] = {}
        for number, (position, leaf) in enumerate(items):
            if type(leaf) in _VALUES and not has_parts(leaf):
                continue
            if isinstance(leaf, OptimizerState):
                self.optimizers.append((position, leaf))
            elif isinstance(leaf, BoundState):
                leaf.check_memory()
                values[number] = dict(leaf)
            elif (kind := _kind_of(leaf)) is not None:
                places[number] = Place(position, kind, leaf)
            else:
                _check_value(position, leaf, self.loads)
        return places

    def _description(self, place: Place) -> Any:
        if place.kind is Kind.MODULE:
            return self._describe_module(place)
        if place.kind is Kind.STATEFUL:
            state = state_of(place.value, place.name)
            return self.describe(state, place.path, is_state=True)
        if has_parts(place.value):
            open_copy = OpenReplicaId((0, self.ranks.rank))
            return shard_of_parts(place.name, place.value, (), 0, open_copy)
        if not is_in_mesh(place.value):
            return LocalNonpersistentObject(place.value)
        return shard_of_dtensor(place.name, place.value, (), 0, None)

    def _describe_module(self, place: Place) -> Any:
        module = bare_module(place.value)
        prefix = place.prefix and f"{place.prefix}."
        if self.materialize is not None:
            # Imported when it is needed: most modules have memory.
            from distckpt._models.materialize import materialize_module

            self.made.extend(materialize_module(module, self.materialize))
        if callable(getattr(module, "sharded_state_dict", None)):
            # Its own method is called here, unlike by sharded_state_dict.
            return sharded_state_dict_default(module, prefix)
        return sharded_state_dict(module, prefix)

    def per_rank(self) -> Iterator[tuple[Position, ShardedObject]]:
        """Describe the values that each rank has of its own."""
        own = [place for place in self.places if place.kind is Kind.PER_RANK]
        meshes: list[str] = []
        if own:
            modules = (place.value for place in self.places if place.kind is Kind.MODULE)
            meshes = mesh_names(modules)
        for place in own:
            yield place.path, cell_of(place.value, place.name, self.ranks, meshes, self.loads)

    def states_of_optimizers(
        self, model: Sequence[Any]
    ) -> tuple[list[tuple[Position, OptimizerState]], dict[str, list[Any]]]:
        """Describe the optimizers: states with their paths, settings by prefix.

        `model` are the shards of all modules.
        """
        states: list[tuple[Position, OptimizerState]] = []
        settings: dict[str, list[Any]] = {}
        for place in self.places:
            if place.kind is not Kind.OPTIMIZER:
                continue
            state, entries = describe_optimizer(place.value, model, place.prefix)
            is_first = place.prefix not in settings
            if self.loads or is_first:
                # A load may have several optimizers of one prefix.
                key = f"{place.prefix}.settings"
                replica_id: ReplicaId = self.ranks.rank
                if not is_first:
                    replica_id = OpenReplicaId((1, self.ranks.rank))
                state["settings"] = ShardedObject(key, None, (1,), (0,), replica_id)
            settings.setdefault(place.prefix, []).extend(entries)
            states.append((place.path, state))
        if not self.loads:
            for prefix, entries in settings.items():
                check_one_rest(prefix, entries)
        return states, settings


def _list_leaves(
    tree: Any, path: Position, breaks_cycles: bool
) -> tuple[Any, list[tuple[Position, Any]]]:
    """Return a tree without cycles, and its leaves with their paths."""
    try:
        return tree, leaves(tree, _is_walked, path)
    except RecursionError:
        if not breaks_cycles:
            raise
    tree = codec.without_cycles(tree)
    return tree, leaves(tree, _is_walked, path)


def _list_shards(tree: Any, places: Iterable[Place]) -> list[Any]:
    """List shards, if there are optimizers."""
    if all(place.kind is not Kind.OPTIMIZER for place in places):
        return []
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, ShardedBase)]


def _kind_of(node: Any) -> Kind | None:
    if isinstance(node, torch.Tensor):
        if is_dtensor(node) or has_parts(node):
            return Kind.DTENSOR
        return None
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
    if isinstance(node, PerRank) or hasattr(node, "__iter__"):
        return Kind.PER_RANK
    return Kind.STATEFUL


def _check_value(path: Position, leaf: Any, loads: bool) -> None:
    """Refuse a value that is, or holds, an object without a description."""
    if isinstance(leaf, torch.utils.data.DataLoader):
        raise UnsupportedObjectError(
            f"{dotted(path)!r} is a torch.utils.data.DataLoader, which has no state: leave it "
            "out, or use torchdata's StatefulDataLoader, which goes on where it was."
        )
    if not loads:
        # A save refuses the objects in containers of other types when it encodes them.
        return
    for place, node in nodes_of_any(leaf, path):
        if node is not leaf and is_object_of_state(node):
            raise UnsupportedObjectError(
                f"{dotted(place)!r} holds an object of type {type(node).__name__} in a container "
                f"of type {type(leaf).__name__}, in which no objects are looked for: keep it in a "
                "list, tuple or dict of the state dict."
            )


def _only_shards(_: Position, leaf: Any) -> Any:
    """Return None for a value of a description that is not sharded."""
    # Optimizers are described when all modules have been.
    if isinstance(leaf, _SHARDED) or is_optimizer(leaf):
        return leaf
    return None


def _names_of_model(tree: Any, places: Iterable[Place]) -> list[str]:
    """Return the first names in the keys of the module at `model`."""
    names: set[str] = set()
    for place in places:
        if place.is_model:
            for _, leaf in leaves(at(tree, place.path)):
                if isinstance(leaf, ShardedBase):
                    names.add(first_name(leaf.key))
    return sorted(names)


# --- Saving ---------------------------------------------------------------------------------------


def united(
    ranks: Ranks, description: Description, *, first_has_all: bool = True, warns: bool = False
) -> Description:
    """Unite the names and settings of all ranks for a save.

    `first_has_all` refuses objects that rank 0, which saves their states, does not have. `warns`
    takes the first of settings that differ, with a warning.

    Collective operation: all ranks must call it.
    """
    stateful = [place.name for place in description.places if place.kind is Kind.STATEFUL]
    own = json.dumps([description.names, stateful]).encode()
    sent = map(json.loads, ranks.all_gather(own))
    names, stateful_names = zip(*sent, strict=True)
    if first_has_all:
        _check_first_has_all(stateful_names)
    settings = unite(ranks, dict(description.settings), warns)
    for place in description.places:
        state = at(description.state_dict, place.path)
        if place.kind is Kind.OPTIMIZER and "settings" in state:
            # Rank 0 may have no such optimizer.
            state["settings"].replica_id = OpenReplicaId((0, ranks.rank))
    united_names = sorted(set(itertools.chain.from_iterable(names)))
    return replace(description, names=united_names, settings=settings)


def _check_first_has_all(stateful: Sequence[list[str]]) -> None:
    """Refuse objects that rank 0, which saves their states, does not have."""
    for rank, names in enumerate(stateful):
        if lost := sorted({*names} - {*stateful[0]}):
            raise InvalidShardingError(
                f"Rank {rank} has {summarize_keys(lost)}, and rank 0 does not, whose states of "
                "such objects are saved: have the same objects on all ranks, or a distckpt.PerRank."
            )


def completed(description: Description) -> Any:
    """Return the state dict of a save, with the settings of optimizers.

    Zeros stand for states that only other ranks have.
    """
    for place in description.places:
        if place.kind is Kind.OPTIMIZER:
            state = at(description.state_dict, place.path)
            fill_gaps(state, description.settings[place.prefix])
            if "settings" in state:
                state["settings"].data = description.settings[place.prefix]
            if not state["state"]:
                # An empty dict would be a value, which ranks with other parameters do not have.
                state["state"] = LocalNonpersistentObject({})
    return description.state_dict

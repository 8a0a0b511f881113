"""Values of a load that are neither shards nor objects: absent ones, and changes of given ones.

Changes turn the values of the state dict given to `load` into the loaded ones, in place. A dict or
list that holds no shards and no objects is one value: it gets exactly the stored items. A container
with shards or objects gets the stored values of its own keys. The values that `load` returns have
no list, dict or tensor in common with them: the next load does not change the result of this one.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from distckpt._base.dtypes import flat_bytes
from distckpt._base.errors import LoadMismatchError
from distckpt._base.memory import addresses, overlapping, repeats_memory
from distckpt._base.messages import summarize_keys
from distckpt._base.tree import (
    CONTAINERS,
    HOLE,
    Position,
    at,
    children_of,
    dotted,
    is_container,
    is_copy,
    is_dict,
    leaves,
    on_the_way,
    rebuilt,
)
from distckpt._format import codec
from distckpt._format.codec.tree import nodes
from distckpt._models.objects import Kind
from distckpt._operations.load_request import Targets
from distckpt._ranks.collectives import Ranks
from distckpt._state.strictness import StrictHandling
from distckpt.mapping._wrappers import StateDict

logger = logging.getLogger(__name__)

_SETTERS = {cls.__setitem__ for cls in (dict, list, OrderedDict, deque)}
_LISTS = (list, deque)
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


# --- Absent values --------------------------------------------------------------------------------


def refuse_absent(targets: Targets, loaded: StateDict) -> None:
    """Refuse requested plain tensors and values that were not loaded.

    Values that are None may be absent, as may objects, which check for themselves whether they were
    loaded completely.

    Raises:
        LoadMismatchError: a tensor or value is missing.
    """
    request = targets.request
    if not request.asks_for_all:
        return
    location = targets.source.location
    values = targets.split.common
    lost = _absent(tensor_paths(values), loaded)
    if lost:
        raise LoadMismatchError(
            f"The tensors {summarize_keys(lost)} of the state dict are not sharded, and the "
            f"common state of the checkpoint {location!r} has none there: nothing can be "
            "loaded for them. Give load the module itself, {'model': model}, or its "
            "sharded_state_dict(model), in the place of model.state_dict()."
            + _way_to_read(targets, lost),
            unexpected=lost,
        )
    if request.warns_of_values:
        return
    objects = {place.path for place in targets.described.places}
    absent = _absent(_value_paths(values, objects), loaded)
    if absent:
        holder = f"The checkpoint {location!r}"
        if targets.source.is_live:
            holder = "What is given"
        raise LoadMismatchError(
            f"{holder} holds no value for {summarize_keys(absent)}, which the state dict asks for: "
            "leave that out of the state dict, and set it yourself afterwards."
            + _way_to_read(targets, absent),
            unexpected=absent,
        )


def _way_to_read(targets: Targets, absent: Iterable[str]) -> str:
    """Name the call that reads a stored tensor of an absent name."""
    names = tuple(f"{name}." for name in absent)
    for key in targets.stored:
        if f"{key}.".startswith(names):
            return f" A tensor is there: distckpt.open({targets.source.location!r}).read({key!r})."
    return ""


def report_absent_values(ranks: Ranks, targets: Targets, loaded: StateDict) -> frozenset[str]:
    """Warn about plain tensors, values and objects for which nothing was loaded.

    Return their names on all ranks. Collective operation: all ranks must call it.
    """
    request = targets.request
    if request.mode is not StrictHandling.LOG_ALL and not request.warns_of_values:
        return frozenset()
    objects = set()
    for place in targets.described.places:
        if request.asks_for_all or place.kind is not Kind.STATEFUL:
            objects.add(place.path)
    values = targets.split.common
    paths = itertools.chain(tensor_paths(values), _value_paths(values, objects))
    absent = united(ranks, _absent(paths, loaded))
    if absent and ranks.is_coordinator:
        logger.warning(
            "the checkpoint %r holds nothing for %s, which the state dict asks for: not loaded",
            request.path,
            summarize_keys(sorted(absent)),
        )
    return absent


def united(ranks: Ranks, names: Iterable[str]) -> frozenset[str]:
    """Return the names of all ranks. Collective operation: all ranks must call it."""
    sent = ranks.all_gather(json.dumps(sorted(names)).encode())
    return frozenset[str]().union(*map(json.loads, sent))


def _absent(paths: Iterable[Position], loaded: StateDict) -> list[str]:
    absent = []
    for path in paths:
        if at(loaded, path, HOLE) is HOLE:
            absent.append(dotted(path))
    return absent


def tensor_paths(tree: Any) -> Iterator[Position]:
    """Yield the position of each tensor in nested dicts."""
    for path, leaf in leaves(tree, is_dict):
        if isinstance(leaf, torch.Tensor):
            yield path


def _value_paths(tree: Any, objects: Collection[Position]) -> Iterator[Position]:
    """Yield the position of each value that is not None.

    A dict or list that contains no objects counts as one value.
    """
    above = itertools.chain([tree], *(on_the_way(tree, place[:-1]) for place in objects))
    holders = set(map(id, filter(is_container, above)))

    def is_holder(node: Any) -> bool:
        is_list = isinstance(node, list | tuple)
        return id(node) in holders or (is_list and any(item is HOLE for item in node))

    for position, value in leaves(tree, is_holder):
        is_value = value is not None and value is not HOLE
        if is_value and position not in objects and id(value) not in holders:
            yield position


# --- Changes of the given state dict --------------------------------------------------------------


@dataclass
class Changes:
    """Changes to make in a given state dict.

    Nothing is changed before `apply`, which cannot fail.

    Attributes:
        tensors: pairs of a tensor to fill and its values.
        filled: positions of these tensors.
        items: triples of a dict or list, a key or index, and its new value.
        contents: pairs of a dict or list and its new items by key or index.
        fixed: positions of values in containers that cannot be changed.
        not_filled: positions of tensors that keep their values, since the stored values do not fit
            into them.
    """

    tensors: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    filled: set[Position] = field(default_factory=set)
    items: list[tuple[Any, Any, Any]] = field(default_factory=list)
    contents: list[tuple[Any, Any]] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    not_filled: list[str] = field(default_factory=list)
    neighbors: Mapping[int, Sequence[torch.Tensor]] = field(default_factory=dict)
    """`id()` of a tensor -> the tensors with common elements."""
    taken: dict[int, torch.Tensor] = field(default_factory=dict)
    """`id()` of a tensor -> the values that it has or gets."""
    stored: dict[int, Any] = field(default_factory=dict)
    """`id()` of a dict or list -> its stored value."""

    @torch.no_grad()
    def apply(self) -> None:
        """Make the changes."""
        for target, values in self.tensors:
            target.copy_(values)
        for container, new in self.contents:
            container.clear()
            if isinstance(container, _LISTS):
                container.extend(new.values())
            else:
                for key in new:
                    container[key] = new[key]
        for container, key, value in self.items:
            container[key] = value


def changes_of(given: Any, values: Any, loaded: Any) -> Changes:
    """Find the changes to make in a state dict.

    Args:
        given: the state dict.
        values: the state dict without its shards and objects, see `flatten.SplitState.common`.
        loaded: the loaded values in its places.
    """
    # An object of a registered class is one value with all its content.
    tensors: list[tuple[Position, torch.Tensor]] = []
    for position, node in nodes(values):
        if isinstance(node, torch.Tensor):
            tensors.append((position, node))
    changes = _with_neighbors([tensor for _, tensor in tensors], loaded)
    _change_holder(changes, (), given, values, loaded)
    changes.not_filled = [dotted(place) for place, _ in tensors if place not in changes.filled]
    return changes


def _with_neighbors(given: Sequence[torch.Tensor], loaded: Any) -> Changes:
    """Find the tensors that share memory with other or filled ones."""
    changes = Changes()
    targets = list(filter(_has_memory, given))
    if not targets:
        return changes
    filled = [leaf for _, leaf in leaves(loaded) if _has_memory(leaf)]
    tensors = [*targets, *filled]
    neighbors = defaultdict(list)
    for first, second in overlapping(tensors):
        if first < len(targets):
            neighbors[id(tensors[first])].append(tensors[second])
            neighbors[id(tensors[second])].append(tensors[first])
    changes.neighbors = neighbors
    changes.taken.update((id(tensor), tensor) for tensor in filled)
    return changes


def _has_memory(value: Any) -> bool:
    is_plain = type(value) in _PLAIN_TENSORS and not value.is_meta
    return is_plain and value.layout == torch.strided


def _change_holder(
    changes: Changes, position: Position, given: Any, values: Any, loaded: Any
) -> None:
    """Find the changes in a container of shards and objects."""
    if not _are_alike(given, values, loaded):
        if isinstance(values, list | tuple) and any(value is not HOLE for value in values):
            changes.fixed.append(dotted(position))
        return
    is_changeable = _is_changeable(given)
    items = dict(children_of(loaded))
    for key, value in children_of(values):
        new = items.get(key, HOLE)
        if value is HOLE or new is HOLE:
            continue
        old = given[key]
        place = (*position, key)
        # Shards and objects are missing, or other values, among its values.
        if not is_copy(old, value):
            _change_holder(changes, place, old, value, new)
            continue
        result = _changed(changes, place, old, new)
        if is_changeable:
            changes.items.append((given, key, result))
        elif result is not old:
            changes.fixed.append(dotted(place))


def _are_alike(given: Any, values: Any, loaded: Any) -> bool:
    """Return whether three containers have their items at the same positions.

    A list closes up where a value is not stored.
    """
    if isinstance(given, dict):
        return isinstance(values, dict) and isinstance(loaded, dict)
    is_sequence = isinstance(given, list | tuple) and isinstance(values, list | tuple)
    return is_sequence and isinstance(loaded, list | tuple) and len(loaded) == len(given)


def _changed(changes: Changes, position: Position, given: Any, new: Any) -> Any:
    """Return the replacement of a value.

    It is the given container or tensor, with other contents, or else the new value.
    """
    if isinstance(given, torch.Tensor):
        return _changed_tensor(changes, position, given, new)
    if _is_rebuilt(given) and type(given) is type(new):
        items = list(_changed_items(changes, position, given, new).values())
        if [*map(id, given)] == [*map(id, items)]:
            return given
        return rebuilt(given, items)
    if not _takes_contents(given, new):
        return _own(new)
    if id(given) not in changes.stored:
        changes.stored[id(given)] = new
        changes.contents.append((given, _changed_items(changes, position, given, new)))
        return given
    # It came before, and gets one content.
    first = changes.stored[id(given)]
    if first is new or codec.encode(first) == codec.encode(new):
        return given
    return _own(new)


def _changed_items(changes: Changes, position: Position, given: Any, new: Any) -> dict[Any, Any]:
    olds = dict(children_of(given))
    changed = {}
    for key, item in children_of(new):
        changed[key] = _changed(changes, (*position, key), olds.get(key, HOLE), item)
    return changed


def _is_rebuilt(container: Any) -> bool:
    return type(container) is tuple or (
        isinstance(container, tuple) and hasattr(container, "_fields")
    )


def _changed_tensor(changes: Changes, position: Position, given: torch.Tensor, new: Any) -> Any:
    if _takes_values(given, new) and _is_free(changes, given, new):
        changes.taken[id(given)] = new
        changes.tensors.append((given, new))
        changes.filled.add(position)
        return given
    return _own(new)


def _takes_values(given: torch.Tensor, new: Any) -> bool:
    """Return whether a tensor can be filled.

    A tensor whose elements share memory cannot, for example.
    """
    if not _has_memory(given) or given.is_inference() or not isinstance(new, torch.Tensor):
        return False
    return (given.shape, given.dtype) == (new.shape, new.dtype) and not repeats_memory(given)


def _is_free(changes: Changes, given: torch.Tensor, new: torch.Tensor) -> bool:
    """Return whether a tensor can be filled without changing another one."""
    for other in changes.neighbors.get(id(given), ()):
        values = changes.taken.get(id(other))
        if values is not None and not _agree(given, new, other, values):
            return False
    return True


def _agree(
    first: torch.Tensor, its_values: torch.Tensor, second: torch.Tensor, others: torch.Tensor
) -> bool:
    """Return whether two tensors with elements in common have equal values there."""
    if first.dtype != second.dtype or first.is_conj() != second.is_conj():
        return False
    places = addresses(first), addresses(second)
    _, here, there = np.intersect1d(*places, return_indices=True)
    own = its_values.detach().reshape(-1).cpu()[torch.from_numpy(here)]
    other = others.detach().reshape(-1).cpu()[torch.from_numpy(there)]
    return len(here) > 0 and torch.equal(flat_bytes(own), flat_bytes(other))


def _takes_contents(given: Any, new: Any) -> bool:
    if isinstance(given, dict):
        return type(new) in (dict, OrderedDict, type(given)) and _is_changeable(given)
    is_sequence = isinstance(given, _LISTS) and type(new) in (list, type(given))
    has_room = getattr(given, "maxlen", None) == getattr(new, "maxlen", None)
    return is_sequence and has_room and _is_changeable(given)


def _is_changeable(container: Any) -> bool:
    """Return whether items of a dict, list or deque can be replaced.

    Derived classes may be frozen, or have behavior of their own.
    """
    return getattr(type(container), "__setitem__", None) in _SETTERS


def _own(value: Any) -> Any:
    """Copy the dicts, lists and tensors of a value."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if not isinstance(value, (*CONTAINERS, deque)):
        return value
    if type(value) is tuple:
        return tuple(map(_own, value))
    if not _is_changeable(value):
        return value
    new: Any = copy.copy(value)
    for key, item in children_of(value):
        new[key] = _own(item)
    return new


def warn_of_unchanged(changes: Changes, location: str) -> None:
    if changes.fixed:
        logger.warning(
            "what the checkpoint %r holds for %s is in the dict that load returns, and not in the "
            "one that was given: tuples, frozen dicts, and lists of objects that have another "
            "length cannot be changed",
            location,
            summarize_keys(changes.fixed),
        )
    if changes.not_filled:
        logger.warning(
            "the tensors %s of the state dict are not filled: what the checkpoint %r holds there "
            "has other shapes, dtypes, memory or containers, or is no tensor, and takes their "
            "places in the dict. A module that they belong to keeps its own values",
            summarize_keys(changes.not_filled),
            location,
        )

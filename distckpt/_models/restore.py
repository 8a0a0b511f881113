"""The objects of a load: completed with stored entries, and restored from loaded values."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.messages import summarize_keys
from distckpt._base.tree import HOLE, at, replaced
from distckpt._models.modules import bare_module, load_sharded_state_dict, with_stored_buffers
from distckpt._models.objects import Description, Kind, Place, scheduler_class
from distckpt._models.optimizer.describe import optimizer_targets
from distckpt._models.optimizer.restore import load_sharded_optimizer_state_dict
from distckpt._models.per_rank import warn_of_shared, warn_of_skipped
from distckpt._state.stored_form import StoredEntry
from distckpt.mapping._base import OpenReplicaId
from distckpt.mapping._wrappers import LocalNonpersistentObject, ShardedObject, StateDict

logger = logging.getLogger(__name__)

_OF_RELEASES = {
    "_step_count",
    "_last_lr",
    "_is_initial",
    "_get_lr_called_within_step",
    "verbose",
}
"""States of schedulers that not all releases of PyTorch have."""


# --- Completing -----------------------------------------------------------------------------------


def needs_stored(description: Description) -> int:
    """Return how much a load needs to know of the checkpoint.

    It is 1 for its keys, 2 for the settings of optimizers as well, else 0.
    """
    if description.optimizers:
        return 2
    return int(any(place.kind is not Kind.DTENSOR for place in description.places))


def settings_of(
    description: Description, stored: Mapping[str, StoredEntry]
) -> dict[str, ShardedObject]:
    """Return the stored settings of optimizers, which `resolve` needs."""
    keys = {f"{state.prefix}.settings" for _, state in description.optimizers}
    return {key: ShardedObject(key, None, (1,), (0,)) for key in sorted(keys & stored.keys())}


def resolve(
    rank: int,
    description: Description,
    stored: Mapping[str, StoredEntry],
    settings: StateDict,
    shared_value: Callable[[str], Any],
) -> Description:
    """Complete the description of a load from stored entries and settings."""
    tree = _with_optimizer_targets(rank, description, stored, settings)
    places = []
    for place in description.places:
        cell = at(tree, place.path)
        if place.kind is Kind.MODULE:
            requested = with_stored_buffers(bare_module(place.value), cell, stored)
            if requested is not cell:
                tree = replaced(tree, place.path, requested)
        entry = stored.get(place.name)
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
    return Description(tree, places, description.optimizers)


def _with_optimizer_targets(
    rank: int,
    description: Description,
    stored: Mapping[str, StoredEntry],
    settings: StateDict,
) -> Any:
    """Return the state dict with targets for stored optimizer states."""
    tree = description.state_dict
    unrequested = set(settings)
    for path, state in description.optimizers:
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


# --- Restoring ------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """The checkpoint that objects are restored from.

    Attributes:
        location: its path or URL.
        schedulers: the classes of learning rate schedulers, by place.
        shared_value: the value that several ranks have stored under a key, `HOLE` if theirs differ.
    """

    location: str
    schedulers: Mapping[str, str]
    shared_value: Callable[[str], Any]


def restore_objects(
    description: Description, loaded: StateDict, saved: Saved, is_strict: bool
) -> StateDict:
    """Put loaded values into the objects.

    Returns the loaded state dict with the objects in their places, those for which nothing was
    loaded included.

    Raises:
        LoadMismatchError: nothing was loaded for an object, unless `is_strict` is False; or an
            object does not take the values.
    """
    for place in sorted(description.places, key=lambda place: (place.kind, -len(place.path))):
        value = at(loaded, place.path, HOLE)
        if value is not HOLE:
            _restore(place, value, at(description.state_dict, place.path), saved, is_strict)
            loaded = replaced(loaded, place.path, place.value)
        elif not is_strict:
            loaded = _with_object(loaded, place)
        else:
            raise LoadMismatchError(
                f"The checkpoint has nothing at {place.name!r}, where the state dict has a "
                f"{type(place.value).__name__}: leave it out, or load under the names that "
                "were saved.",
                unexpected=[place.name],
            )
    return loaded


def _with_object(loaded: StateDict, place: Place) -> StateDict:
    """Put an object where nothing was loaded; in lists it is left out."""
    if any(isinstance(step, int) for step in place.path):
        return loaded
    missing: Any = place.value
    for depth in range(len(place.path) - 1, -1, -1):
        above = at(loaded, place.path[:depth], HOLE)
        siblings: dict[Any, Any] = {}
        if isinstance(above, dict):
            siblings = above
        missing = {**siblings, place.path[depth]: missing}
    whole: StateDict = missing
    return whole


def _restore(place: Place, value: Any, description: Any, saved: Saved, is_strict: bool) -> None:
    if place.kind is Kind.MODULE:
        _restore_module(place, value, is_strict)
    elif place.kind is Kind.OPTIMIZER:
        if is_strict or "settings" in value:
            with _naming(place, "the state of an optimizer", saved):
                load_sharded_optimizer_state_dict(place.value, value)
    elif place.kind is Kind.PER_RANK:
        _restore_per_rank(place, value, description, saved)
    elif place.kind is Kind.STATEFUL:
        if isinstance(value, Mapping):
            stored = saved.schedulers.get(place.name, "")
            _check_scheduler(place.name, place.value, stored, value, is_strict)
        _load_state(place, value, saved, isinstance(description, dict))


def _load_state(place: Place, state: Any, saved: Saved, has_dict: bool) -> None:
    content = repr(state)
    if isinstance(state, dict):
        content = f"a dict of {_named(map(str, state))}"
    elif has_dict and state is not None:
        raise _refused_state(place, content, saved, "its own state is a dict")
    with _naming(place, content, saved):
        place.value.load_state_dict(state)


def _named(keys: Iterable[str]) -> str:
    return summarize_keys(keys) or "nothing"


@contextlib.contextmanager
def _naming(place: Place, content: str, saved: Saved) -> Iterator[None]:
    """Name an object that does not take its saved content."""
    try:
        yield
    except CheckpointingException:
        raise
    except (TypeError, LookupError, AttributeError, ValueError, RuntimeError) as error:
        reason = f"its load_state_dict() failed: {type(error).__name__}: {error}"
        raise _refused_state(place, content, saved, reason) from error


def _refused_state(place: Place, content: str, saved: Saved, reason: str) -> LoadMismatchError:
    return LoadMismatchError(
        f"The {type(place.value).__name__} at {place.name!r} does not take what the checkpoint "
        f"{saved.location!r} holds there, {content:.500} ({reason}): create the object that "
        "was saved, or leave it out of the state dict.",
        unexpected=[place.name],
    )


def _restore_module(place: Place, value: StateDict, is_strict: bool) -> None:
    module = bare_module(place.value)
    prefix = place.prefix and f"{place.prefix}."
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


def _restore_per_rank(
    place: Place, value: Mapping[str, Any], cell: ShardedObject, saved: Saved
) -> None:
    stored = value["layout"]
    own = cell.data["layout"]
    is_known = stored == own or cell.data["is_of_all"]
    is_shared = not is_known and saved.shared_value(place.name) is not HOLE
    if is_shared:
        warn_of_shared(place.value, cell)
    if is_known or is_shared:
        _load_state(place, value["value"], saved, has_dict=False)
    else:
        warn_of_skipped(place.value, cell, f"layout {stored}", f"layout {own}")


# --- Schedulers, whose states do not name their classes -------------------------------------------


def _check_scheduler(
    name: str, scheduler: Any, stored: str, state: Mapping[str, Any], is_strict: bool
) -> None:
    """Warn of a scheduler that gets the state of another class.

    `stored` is that class, if it is known.

    LoadMismatchError when each has something that the other lacks. Other releases may add to a
    state, so that less than that is no mistake where the class is not known.
    """
    own = scheduler_class(scheduler)
    if not own:
        return
    expected = scheduler.state_dict().keys() - _OF_RELEASES
    loaded = state.keys() - _OF_RELEASES
    if stored == own or (not stored and expected == loaded):
        return
    lacking = expected - loaded
    more = loaded - expected
    text = (
        f"the state that was saved at {name!r} has {_named(more)} in place of {own}'s "
        f"{_named(lacking)}"
    )
    if is_strict and lacking and more:
        raise LoadMismatchError(
            f"A scheduler of another kind: {text}. Create the one that was saved"
            f"{stored and f', {stored}'}, or leave it out."
        )
    if stored:
        text = (
            f"the scheduler that was saved at {name!r} is of class {stored}, and is loaded into "
            f"one of class {own}, which computes other learning rates"
        )
    else:
        text = f"{text}: is it of another scheduler?"
    logger.warning("%s", text)

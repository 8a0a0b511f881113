"""Whether a load takes all that a checkpoint holds for its objects."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import NamedTuple

import numpy as np

from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import summarize_keys
from distckpt._format.code_names import places_of
from distckpt._format.marker import first_name
from distckpt._models.objects import Description, Kind
from distckpt._ranks.collectives import Ranks
from distckpt._state.stored_form import StoredEntry

logger = logging.getLogger(__name__)


class Coverage(NamedTuple):
    """Keys of a checkpoint that a rank requests and leaves out.

    `unclaimed` tensors may belong to the module at `model`: the checkpoint does not say which
    module was saved there.
    """

    taken: set[str]
    of_modules: set[str]
    of_optimizers: set[str]
    unclaimed: set[str]


def coverage_of(
    description: Description,
    requested: Collection[str],
    codes: Collection[str],
    entries: Mapping[str, StoredEntry],
    wanted: Collection[str],
    names: Collection[str],
    optimizer_keys: Callable[[], Set[str]],
) -> Coverage:
    """Find the keys that a rank leaves out of its objects.

    `codes` are the requested keys whose tensors have 8 bits: as codes of a quantized tensor, they
    do not take its scales. `wanted` are keys that are not left out on purpose; `optimizer_keys`
    returns those of optimizers, where that is of interest.

    Keys begin with the path of the object. The module at `model` has no path in its keys. It is
    taken to have the keys whose first name is among `names`, which it was saved with, and keys that
    begin like a requested one, as `layers.9.weight` begins like `layers.0.weight`.
    """
    taken = set(requested)
    for key in entries.keys() & (taken - set(codes)):
        taken.update(entries[key].parts)
    left = _without_taken(wanted, taken, entries)
    of_optimizers = _below(_prefixes(description, Kind.OPTIMIZER), left)
    prefixes = _prefixes(description, Kind.MODULE, Kind.STATEFUL, Kind.OPTIMIZER)
    own = _below(prefixes, left)
    unclaimed: set[str] = set()
    if any(place.is_model for place in description.places):
        of_model = set(requested) - _below(prefixes, requested)
        beginnings = {*names, *map(first_name, of_model)}
        own |= {key for key in left if first_name(key) in beginnings}
        if not names:
            unclaimed = {key for key in left - own if entries[key].dtype is not None}
        if unclaimed:
            unclaimed -= optimizer_keys()
    return Coverage(taken, own - of_optimizers, of_optimizers, unclaimed)


def _without_taken(
    wanted: Iterable[str], taken: Collection[str], entries: Mapping[str, StoredEntry]
) -> set[str]:
    """Return the stored keys that are not taken."""
    left = set()
    for key in wanted:
        if key in taken:
            continue
        parts = entries[key].parts
        # Others are computed from their parts.
        if not parts or key in parts:
            left.add(key)
    return left


def _prefixes(description: Description, *kinds: Kind) -> tuple[str, ...]:
    """Return the beginnings of the keys of objects of some kinds."""
    prefixes = []
    for place in description.places:
        if place.kind in kinds and place.prefix:
            prefixes.append(f"{place.prefix}.")
    return tuple(prefixes)


def _below(prefixes: tuple[str, ...], keys: Iterable[str]) -> set[str]:
    return {key for key in keys if key.startswith(prefixes)}


def left_out_of_all(
    ranks: Ranks, coverage: Coverage, entries: Mapping[str, StoredEntry]
) -> tuple[list[str], list[str], list[str]]:
    """Return keys that no rank takes: of modules, of optimizers, unclaimed ones.

    Collective operation: all ranks must call it. A key that one rank leaves out another may take.
    """
    keys = sorted(entries)
    rows = []
    for some in coverage:
        rows.append([key in some for key in keys])
    bits = np.array(rows, np.bool_)
    gathered = ranks.all_gather(np.packbits(bits).tobytes())
    of_all = np.bitwise_or.reduce([np.frombuffer(sent, np.uint8) for sent in gathered])
    unpacked = np.unpackbits(of_all, count=bits.size).reshape(bits.shape)
    is_taken, *is_own = unpacked.astype(np.bool_)
    of_modules, of_optimizers, unclaimed = (
        list(itertools.compress(keys, has & ~is_taken)) for has in is_own
    )
    return of_modules, of_optimizers, unclaimed


def refuse_left_out(
    ranks: Ranks,
    coverage: Coverage,
    entries: Mapping[str, StoredEntry],
    location: str,
    is_live: bool = False,
) -> frozenset[str]:
    """Refuse a load that leaves out stored tensors of a module.

    Returns the other keys that it leaves out, of which a warning is logged. With `is_live`, other
    ranks give the tensors: the plan of the move knows those that nobody takes.

    Collective operation: all ranks must call it.
    """
    of_modules, of_optimizers, unclaimed = left_out_of_all(ranks, coverage, entries)
    with ranks.phase("compare the keys of objects", decision=True):
        if of_modules and ranks.is_coordinator:
            if is_live:
                raise LoadMismatchError(
                    f"What is given has {summarize_keys(of_modules)}, which the modules that take "
                    "do not have. To leave the rest out, take tensors in the place of modules: "
                    "distckpt.modules.sharded_state_dict(module).",
                    of_modules,
                )
            absent = sorted(coverage.taken - entries.keys())
            raise _left_out_of_modules(of_modules, absent, location)
        if ranks.is_coordinator and not is_live:
            _warn_of_left_out(of_optimizers, unclaimed, location)
    return frozenset([*of_optimizers, *unclaimed])


def _left_out_of_modules(
    left_out: list[str], absent: list[str], location: str
) -> LoadMismatchError:
    scales = next((key for key in left_out if any(places_of(key))), None)
    or_quantized = ""
    if scales:
        or_quantized = f", or a quantized one in a form that distckpt does not decode ({scales!r})"
    besides = other_names = ""
    if absent:
        besides = f", and does not hold {summarize_keys(absent)}, which they have"
        other_names = (
            " Names of another program need rules=, or family='auto' for those of Megatron Core "
            "and transformers."
        )
    return LoadMismatchError(
        f"The checkpoint {location!r} holds {summarize_keys(left_out)}, which the objects of the "
        f"state dict do not have{besides}: was a larger model saved{or_quantized}? Create the "
        "objects that were saved; to leave the rest out, pass strict='report' ('raise_unexpected' "
        f"in distckpt.megatron). A tensor alone is read by "
        f"distckpt.open({location!r}).read({left_out[0]!r}).{other_names}",
        left_out,
        absent,
    )


def _warn_of_left_out(of_optimizers: list[str], unclaimed: list[str], location: str) -> None:
    if of_optimizers:
        logger.warning(
            "the checkpoint %r holds %s, for parameters that the optimizer does not have: left out",
            location,
            summarize_keys(of_optimizers),
        )
    if unclaimed:
        logger.warning(
            "the checkpoint %r holds %s, which no module of the state dict has: was a larger model "
            "saved?",
            location,
            summarize_keys(unclaimed),
        )

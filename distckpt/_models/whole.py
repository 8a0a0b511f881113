"""Whether a load takes all that a checkpoint holds for its objects."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import summarize_keys
from distckpt._models.objects import (
    MODULE,
    OPTIMIZER,
    STATEFUL,
    Described,
    first_name,
)
from distckpt._models.optimizer.shards import StoredEntry
from distckpt._ranks.collectives import Ranks

logger = logging.getLogger(__name__)


class Parts(NamedTuple):
    """Keys of a checkpoint: those that a rank requests, and those that it leaves out of modules and
    optimizers.

    `unclaimed` tensors may belong to the module at `model`: the checkpoint does not say with which
    module it was saved.
    """

    taken: set[str]
    of_modules: set[str]
    of_optimizers: set[str]
    unclaimed: set[str]


def refuse_parts(
    ranks: Ranks, parts: Parts, entries: Mapping[str, StoredEntry], location: str
) -> None:
    """Refuse a load that leaves out a part of what is stored for a module; warn of what else it
    leaves out.

    Collective operation: all ranks must call it. What one rank leaves out another may request.
    """
    keys = sorted(entries)
    bits = np.array([[key in some for key in keys] for some in parts], np.bool_)
    gathered = ranks.gather(np.packbits(bits).tobytes())
    with ranks.phase("compare the keys of objects", decision=True):
        if not ranks.is_coordinator:
            return
        of_all = np.bitwise_or.reduce([np.frombuffer(sent, np.uint8) for sent in gathered])
        is_taken, *is_own = (
            np.unpackbits(of_all, count=bits.size).reshape(bits.shape).astype(np.bool_)
        )
        missing, without, others = (
            [keys[i] for i in np.flatnonzero(has & ~is_taken)] for has in is_own
        )
        if missing:
            absent = sorted(parts.taken - entries.keys())
            besides = (
                f", and does not hold {summarize_keys(absent)}, which they have" if absent else ""
            )
            raise LoadMismatchError(
                f"The checkpoint {location!r} holds {summarize_keys(missing)}, which the objects "
                f"of the state dict do not have{besides}: was a larger model saved? Create the "
                "objects that were saved; to leave the rest out, pass strict='report'.",
                missing,
                absent,
            )
        if without:
            logger.warning(
                "the checkpoint %r holds %s, for parameters that the optimizer does not have: "
                "left out",
                location, summarize_keys(without),
            )  # fmt: skip
        if others:
            logger.warning(
                "the checkpoint %r holds %s, which no module of the state dict has: was a larger "
                "model saved?",
                location, summarize_keys(others),
            )  # fmt: skip


def parts_of(
    described: Described,
    requested: Collection[str],
    entries: Mapping[str, StoredEntry],
    wanted: Collection[str],
    names: Collection[str],
) -> Parts:
    """Find what a rank leaves out of its objects, of the keys that are `wanted`: not left out on
    purpose.

    Keys begin with the path of the object. The module at `model` has no path in its keys: those
    belong to it whose first name is among `names`, those it was saved with, or that begin like a
    requested one, as `layers.9.weight` does like `layers.0.weight`.
    """
    taken = {
        *requested,
        *(part for key in requested if key in entries for part in entries[key].parts),
    }
    # What is only computed from its parts is not stored.
    left = [
        key
        for key in wanted
        if key not in taken and (not entries[key].parts or key in entries[key].parts)
    ]
    below = {
        kind: tuple(
            f"{place.prefix}." for place in described.places if place.kind == kind and place.prefix
        )
        for kind in (MODULE, STATEFUL, OPTIMIZER)
    }
    with_path = (*below[MODULE], *below[STATEFUL], *below[OPTIMIZER])
    beginnings: set[str] = set()
    has_model = any(place.kind == MODULE and not place.prefix for place in described.places)
    if has_model:
        beginnings = {
            *names,
            *(first_name(key) for key in requested if not key.startswith(with_path)),
        }
    of_optimizers = {key for key in left if key.startswith(below[OPTIMIZER])}
    own = {key for key in left if key.startswith(with_path) or first_name(key) in beginnings}
    unclaimed: set[str] = set()
    if has_model and not names:
        unclaimed = {
            key for key in left if entries[key].dtype is not None and not key.startswith("optim")
        } - own
    return Parts(taken, own - of_optimizers, of_optimizers, unclaimed)

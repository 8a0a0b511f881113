"""Names of PyTorch's state dicts under those of the objects of a load.

`torch.distributed.checkpoint` stores a module at `model` with the prefix `model.`, the state of an
optimizer at `optim` as `optim.state.<parameter>.<state>`, and its options as `optim.param_groups`.
Parameters go by name or number there, and by their keys here: `optim.state.<state>.<key>`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from distckpt._base.tree import at, leaves
from distckpt._foreign.state_dicts.optimizers import (
    MODEL,
    OptimizerNames,
    numbers_of_names,
    read_settings,
)
from distckpt._format import codec
from distckpt._format.manifest import Manifest
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._models.dtensor import TensorShard, local_part
from distckpt._models.objects import Description, Kind
from distckpt._models.optimizer.read import param_name, params_of, sharded_inner
from distckpt._models.optimizer.settings import Entry
from distckpt._ranks.collectives import Ranks


def translated(
    ranks: Ranks, stored: StoredCheckpoint, description: Description
) -> tuple[StoredCheckpoint, dict[str, list[Entry]], frozenset[str]]:
    """Return a checkpoint under the names of a request's objects.

    The settings of optimizers by key come second, and the keys whose values are in them third.

    Collective operation: all ranks must call it.

    Raises:
        LoadMismatchError: parameters go by number, and the optimizer has others.
    """
    with ranks.phase("list the names of objects"):
        has_prefix = _has_model_prefix(stored, description)
        own = [vars(optimizer) for optimizer in _own_optimizers(description)]
    sent = ranks.gather(json.dumps([has_prefix, own]).encode())

    def read() -> bytes:
        prefixes, listed = zip(*map(json.loads, sent), strict=True)
        united = _united(OptimizerNames(**own) for own in itertools.chain.from_iterable(listed))
        return codec.encode([any(prefixes), *read_settings(stored, united)])

    of_all: Any = codec.decode(ranks.decide("read the settings of optimizers", read))
    has_prefix, names, settings, hidden = of_all
    with ranks.phase("translate the names of the checkpoint"):
        if has_prefix:
            names = _names_of_module(stored) | names
        if names:
            stored = replace(stored, manifest=_with_names(stored.manifest, names))
    return stored, settings, frozenset(hidden)


def _has_model_prefix(stored: StoredCheckpoint, description: Description) -> bool:
    """Tell whether the module at `model` is stored with that prefix."""
    known = stored.manifest.key_index
    for place in description.places:
        if place.is_model and place.path:
            keys = set()
            for _, shard in leaves(at(description.state_dict, place.path)):
                if isinstance(shard, TensorShard):
                    keys.add(shard.key)
            if not keys & known.keys():
                return any(f"{MODEL}{key}" in known for key in keys)
    return False


def _own_optimizers(description: Description) -> Iterator[OptimizerNames]:
    """Yield the optimizers of this rank, with their parameters by key."""
    prefixes = []
    for place in description.places:
        if place.kind is Kind.MODULE and place.prefix:
            prefixes.append(f"{place.prefix}.")
    prefixes.sort(key=len, reverse=True)
    for path, state in description.optimizers:
        groups = state.optimizer.param_groups
        params = params_of(groups)
        named: dict[str, tuple[str, int]] = {}
        keys: dict[int, str] = {}
        for number, param in enumerate(params):
            shard = state.shards.get(id(local_part(param)))
            if shard is not None:
                key = keys[number] = param_name(shard)
                prefix = next(filter(key.startswith, prefixes), "")
                named[key] = key.removeprefix(prefix), number
        numbers = numbers_of_names(groups, range(len(params)))
        own_names = {name: keys[numbers[name]] for name in numbers if numbers[name] in keys}
        inner = sharded_inner(state.optimizer) or state.optimizer
        is_of_torch = type(inner).__module__.startswith("torch.optim.")
        yield OptimizerNames(path, state.prefix, named, len(params), own_names, is_of_torch)


def _united(optimizers: Iterable[OptimizerNames]) -> list[OptimizerNames]:
    """Unite the parameters of optimizers at the same path on several ranks."""
    united: dict[tuple[Any, ...], OptimizerNames] = {}
    for optimizer in optimizers:
        path = tuple(optimizer.path)
        first = united.setdefault(path, replace(optimizer, path=path))
        first.params.update(optimizer.params)
        first.own_names.update(optimizer.own_names)
    return list(united.values())


def _names_of_module(stored: StoredCheckpoint) -> dict[str, str]:
    """Return the names of the module at `model` here, by those there."""
    known = stored.manifest.key_index
    names = {}
    for key in known:
        name = key.removeprefix(MODEL)
        if name not in known:
            names[key] = name
    return names


def _with_names(manifest: Manifest, names: Mapping[str, str]) -> Manifest:
    """Return a manifest with other names for some keys."""
    aliases = manifest.aliases.items()
    return manifest.replaced(
        keys=[names.get(key, key) for key in manifest.keys],
        aliases={names.get(alias, alias): names.get(key, key) for alias, key in aliases},
    )

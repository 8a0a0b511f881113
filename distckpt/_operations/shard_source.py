"""Where a load gets shards from: a checkpoint that is open, or a strategy of the user."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from distckpt._base.dtypes import FROM_NAME, TO_NAME
from distckpt._base.errors import CheckpointingException
from distckpt._base.options import LoadOptions
from distckpt._base.tree import HOLE
from distckpt._checkpoint.opening import FoundCheckpoint
from distckpt._checkpoint.shards import describe_quantized, load_shards
from distckpt._checkpoint.stored_values import has_equal_cells, load_objects
from distckpt._format.manifest import OBJECT
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.load_shards import ReadSettings
from distckpt._mapping.sharded_tensor import ShardedTensor
from distckpt._mapping.wrappers import ShardedObject
from distckpt._models.objects import Description
from distckpt._operations.on_demand import on_demand
from distckpt._ranks.collectives import Ranks
from distckpt._rules.rule import Rule
from distckpt._state.common_state import COMMON_KEY
from distckpt._state.shards import Shard
from distckpt._state.stored_form import StoredEntry
from distckpt.strategies.base import (
    EngineSettings,
    LoadShardedStrategy,
    choose_load_strategy,
)

FamilyName: TypeAlias = str | os.PathLike[str] | None
"""See `family` of `load`."""


class ShardSource(ABC):
    """A checkpoint, or memory of ranks, that shards are read from.

    Attributes:
        marker: the fields of its marker.
        overwritten: keys that were read in vain, since the tensors of others have their memory.
        is_live: it is memory of ranks, and targets may be anything that it can fill: overlapping,
            of several dtypes.
    """

    marker: Mapping[str, Any]
    is_live = False
    overwritten: Collection[str] = frozenset()

    def for_objects(self, described: Description, has_optimizers: bool) -> ShardSource:
        """Return the source under the names of the described objects, if it has others for them;
        some rank `has_optimizers`, or none.

        Collective operation: all ranks must call it.
        """
        del described, has_optimizers
        return self

    def optimizer_keys(self) -> set[str]:
        """Return the keys of optimizers, where they are known without a request."""
        return set()

    @abstractmethod
    def entries(self) -> dict[str, StoredEntry]:
        """Return what is stored, without common state, by key.

        Collective operation: all ranks must call it.
        """

    @abstractmethod
    def read(self, shards: Sequence[Shard], rules: Sequence[Rule]) -> list[Any]:
        """Fill tensors in place and decode objects; return both in the order of the shards.

        Collective operation: all ranks must call it.
        """

    @abstractmethod
    def read_objects(self, shards: Sequence[ShardedObject]) -> list[Any]:
        """Decode objects, the same ones on all ranks, which must all call it."""

    def shared_value(self, key: str) -> Any:
        """Return the object that several ranks have stored, if it is known that all have stored the
        same; else `HOLE`.
        """
        return HOLE

    def rules_of_family(self, family: FamilyName, location: str, keys: Sequence[str]) -> list[Rule]:
        """Return the rules from the names of requested tensors to those of this source."""
        families = on_demand("families")
        config = families.config_for(family, location)
        rules: list[Rule] = families.rules_for(config, keys, self.shapes())
        return rules

    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        """Return the shapes of what is stored by key, where they are known without reading."""
        return None


def source_of(
    ranks: Ranks,
    location: str,
    found: FoundCheckpoint,
    options: LoadOptions,
    process_group: Any,
) -> ShardSource:
    """Return what a load reads the checkpoint at a location from.

    Raises:
        CheckpointingException: what `options.strategy` gives is no strategy, or none that reads
            this checkpoint is registered.
    """
    strategy, engine = _choose(location, options.strategy, found.marker)
    if strategy is not None:
        configured = strategy.configure(options, process_group)
        return _UserStrategy(ranks, configured, location, found.marker)
    if found.stored is None:
        raise CheckpointingException(
            f"{location!r} was written by the strategy {found.marker['sharded_backend']!r}, which "
            "the built-in one does not read: pass that strategy."
        )
    return _OpenCheckpoint(ranks, found.stored, options, engine)


def _choose(
    location: str, given: Any, marker: Mapping[str, Any]
) -> tuple[LoadShardedStrategy | None, EngineSettings]:
    if given is None:
        given = (marker["sharded_backend"], marker.get("sharded_backend_version", 1))
    try:
        return choose_load_strategy(given)
    except CheckpointingException as error:
        raise CheckpointingException(f"Cannot read {location!r}: {error}") from error


@dataclass(frozen=True)
class _OpenCheckpoint(ShardSource):
    """A checkpoint of distckpt, or of a format that has a reader.

    Attributes:
        settings: objects that are read already, by key.
        hidden: keys that were read for them.
    """

    ranks: Ranks
    stored: StoredCheckpoint
    options: LoadOptions
    engine: EngineSettings
    overwritten: set[str] = field(default_factory=set)
    settings: Mapping[str, Any] = field(default_factory=dict)
    hidden: Collection[str] = ()

    @property
    def marker(self) -> Mapping[str, Any]:  # type: ignore[override]
        return self.stored.marker

    def entries(self) -> dict[str, StoredEntry]:
        with self.ranks.phase("read the keys of the checkpoint"):
            entries = entries_of(self.stored)
        entries |= dict.fromkeys(self.settings, StoredEntry(None, (1,)))
        return {key: entry for key, entry in entries.items() if key not in self.hidden}

    def for_objects(self, described: Description, has_optimizers: bool) -> ShardSource:
        names = on_demand("state_dict_names")
        found = names.translated(self.ranks, self.stored, described, has_optimizers)
        return replace(self, stored=found.stored, settings=found.settings, hidden=found.hidden)

    def optimizer_keys(self) -> set[str]:
        keys: set[str] = on_demand("model_keys").optimizer_keys(self.stored)
        return keys

    def read(self, shards: Sequence[Shard], rules: Sequence[Rule]) -> list[Any]:
        settings = ReadSettings(self.options, rules, self.engine.exchange_group, self.overwritten)
        asked = [shard for shard in shards if shard.key not in self.settings]
        return self._with_settings(shards, load_shards(self.ranks, self.stored, asked, settings))

    def read_objects(self, shards: Sequence[ShardedObject]) -> list[Any]:
        asked = [shard for shard in shards if shard.key not in self.settings]
        return self._with_settings(shards, load_objects(self.stored, asked))

    def _with_settings(self, shards: Sequence[Shard], read: Iterable[Any]) -> list[Any]:
        """Return the values of all shards, given those that were read now."""
        values = iter(read)
        return [
            self.settings[shard.key] if shard.key in self.settings else next(values)
            for shard in shards
        ]

    def shared_value(self, key: str) -> Any:
        if not has_equal_cells(self.stored, key):
            return HOLE
        shape = self.stored.global_shape(key)
        return self.read_objects([ShardedObject(key, None, shape, (0,) * len(shape))])[0]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.stored.manifest.shapes_by_key


def entries_of(stored: StoredCheckpoint) -> dict[str, StoredEntry]:
    """Return what is stored, without common state, by key."""
    manifest = stored.manifest
    entries = {}
    for key, number in manifest.key_index.items():
        dtype = manifest.dtypes[number]
        tensor_dtype = None if dtype == OBJECT else FROM_NAME[dtype]
        entries[key] = StoredEntry(tensor_dtype, manifest.global_shapes[number])
    entries.pop(COMMON_KEY, None)
    for key, (shard, parts) in describe_quantized(stored).items():
        entries[key] = StoredEntry(shard.dtype, tuple(shard.global_shape), parts)
    return entries


@dataclass(frozen=True)
class _UserStrategy(ShardSource):
    """A checkpoint that a strategy of the user reads."""

    ranks: Ranks
    strategy: LoadShardedStrategy
    location: str
    marker: Mapping[str, Any]

    def entries(self) -> dict[str, StoredEntry]:
        found = self.ranks.decide_json("read the keys of the checkpoint", self._listed_entries)
        return {
            key: StoredEntry(None if dtype is None else FROM_NAME[dtype], tuple(shape))
            for key, dtype, shape in found
        }

    def _listed_entries(self) -> list[tuple[str, str | None, tuple[int, ...]]]:
        shards = self.strategy.load_sharded_metadata(self.location).values()
        by_key = {shard.key: shard for shard in shards if shard.key != COMMON_KEY}
        return [(key, _dtype_name(shard), shard.global_shape) for key, shard in by_key.items()]

    def read(self, shards: Sequence[Shard], rules: Sequence[Rule]) -> list[Any]:
        if rules:
            raise CheckpointingException(
                f"{type(self.strategy).__name__} reads {self.location!r}: rules and families work "
                "with the built-in strategy only."
            )
        by_name = {str(number): shard for number, shard in enumerate(shards)}
        values = self.strategy.load(dict(by_name), self.location)
        return [values[name] for name in by_name]

    def read_objects(self, shards: Sequence[ShardedObject]) -> list[Any]:
        return self.read(shards, ())


def _dtype_name(shard: Shard) -> str | None:
    return TO_NAME[shard.dtype] if isinstance(shard, ShardedTensor) else None

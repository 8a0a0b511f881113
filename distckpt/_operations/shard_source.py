"""Sources of a load: an open checkpoint, or a user's strategy."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from distckpt._base.dtypes import FROM_NAME, TO_NAME
from distckpt._base.errors import CheckpointingException
from distckpt._base.options import LoadOptions
from distckpt._base.tree import HOLE
from distckpt._base.wings import wing
from distckpt._checkpoint.opening import is_built_in
from distckpt._checkpoint.shards import ReadSettings, load_shards
from distckpt._checkpoint.stored_values import has_equal_cells, load_objects
from distckpt._format.foreign_formats import is_export
from distckpt._format.manifest import OBJECT
from distckpt._format.marker import names_of_module
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._models.objects import Description
from distckpt._plan.decoded import find
from distckpt._ranks.collectives import Ranks
from distckpt._state.common_state import COMMON_KEY
from distckpt._state.shards import Shard
from distckpt._state.stored_form import StoredEntry
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedObject
from distckpt.rules._rule import Rule

if TYPE_CHECKING:
    from distckpt.strategies.base import LoadShardedStrategy

FamilyName: TypeAlias = str | os.PathLike[str] | None
"""Model family, see `family` of `load`."""


class ShardSource(ABC):
    """A checkpoint, or memory of ranks, that shards are read from.

    Attributes:
        location: its location, for messages.
        directory: location of the model's configuration, if that is another one.
        marker: the fields of its marker.
        overwritten: keys whose values were overwritten, since other keys' tensors have their
            memory.
        is_live: whether it is memory of ranks, which can fill any targets: overlapping ones, and
            several dtypes.
    """

    location: str
    directory = ""
    marker: Mapping[str, Any]
    is_live = False
    overwritten: Collection[str] = frozenset()
    figures: Mapping[str, Any] = MappingProxyType({})

    def for_objects(self, described: Description, has_optimizers: bool) -> ShardSource:
        """Return the source under the names of the described objects.

        It is another one if the source has other names for them; some rank `has_optimizers`, or
        none. Collective operation: all ranks must call it.
        """
        del described, has_optimizers
        return self

    def optimizer_keys(self) -> set[str]:
        """Return the optimizers' keys, if they are known without a request."""
        return set()

    @abstractmethod
    def entries(self) -> dict[str, StoredEntry]:
        """Return the stored entries by key, without common state.

        Collective operation: all ranks must call it.
        """

    @abstractmethod
    def read(self, shards: Sequence[Shard], rules: Sequence[Rule]) -> list[Any]:
        """Fill tensors in place and decode objects; return both in the order of the shards.

        Collective operation: all ranks must call it.
        """

    @abstractmethod
    def read_objects(self, shards: Sequence[ShardedObject]) -> list[Any]:
        """Decode objects, which must be the same on all ranks.

        Collective operation: all ranks must call it.
        """

    def shared_value(self, key: str) -> Any:
        """Return an object that several ranks have stored equally.

        Return `HOLE` if it is not known that all have stored the same.
        """
        return HOLE

    def rules_of_family(self, family: FamilyName, keys: Sequence[str]) -> list[Rule]:
        """Return the rules from requested names to names of this source."""
        from distckpt.families._config import config_for, rules_for

        return rules_for(config_for(family, self.directory or self.location), keys, self.shapes())

    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        """Return stored shapes by key, if known without reading."""
        return None


def source_of(
    ranks: Ranks, stored: StoredCheckpoint, options: LoadOptions, process_group: Any
) -> ShardSource:
    """Return the source of a load for a checkpoint that was found.

    Raises:
        CheckpointingException: `options.strategy` gives no strategy, or none that reads this
            checkpoint is registered.
    """
    marker = stored.marker
    location = stored.location
    choice = options.strategy
    if choice is None and is_built_in(marker):
        return _OpenCheckpoint(ranks, location, marker, stored, options)
    if choice is None:
        choice = (marker["sharded_backend"], marker.get("sharded_backend_version", 1))
    from distckpt.strategies.base import choose_load_strategy

    try:
        strategy, engine = choose_load_strategy(choice)
    except CheckpointingException as error:
        raise CheckpointingException(f"Cannot read {location!r}: {error}") from error
    if strategy is not None:
        configured = strategy.configure(options, process_group)
        return _UserStrategy(ranks, location, marker, configured)
    if not is_built_in(marker):
        raise CheckpointingException(
            f"{location!r} was written by the strategy {marker['sharded_backend']!r}, which the "
            "built-in one does not read: pass that strategy."
        )
    return _OpenCheckpoint(ranks, location, marker, stored, options, engine.exchange_group)


@dataclass(frozen=True)
class _OpenCheckpoint(ShardSource):
    """A checkpoint of distckpt, or of a format that has a reader.

    Attributes:
        exchange_group: process group within which replicas share work; None for all ranks.
        settings: objects that are read already, by key.
        hidden: keys that were read for the settings.
    """

    ranks: Ranks
    location: str
    marker: Mapping[str, Any]
    stored: StoredCheckpoint
    options: LoadOptions
    exchange_group: Any = None
    overwritten: set[str] = field(default_factory=set)
    figures: dict[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    hidden: Collection[str] = ()

    def entries(self) -> dict[str, StoredEntry]:
        with self.ranks.phase("read the keys of the checkpoint"):
            entries = entries_of(self.stored)
        entries |= dict.fromkeys(self.settings, StoredEntry(None, (1,)))
        for key in self.hidden:
            entries.pop(key, None)
        return entries

    def for_objects(self, described: Description, has_optimizers: bool) -> ShardSource:
        if not _may_hold_state_dicts(self.stored, has_optimizers):
            return self
        names = wing("state_dicts")
        stored, settings, hidden = names.translated(self.ranks, self.stored, described)
        return replace(self, stored=stored, settings=settings, hidden=hidden)

    def optimizer_keys(self) -> set[str]:
        from distckpt._checkpoint.model_keys import optimizer_keys

        return optimizer_keys(self.stored)

    def read(self, shards: Sequence[Shard], rules: Sequence[Rule]) -> list[Any]:
        settings = ReadSettings(
            self.options, rules, self.exchange_group, self.overwritten, self.figures
        )
        asked = [shard for shard in shards if shard.key not in self.settings]
        return self._with_settings(shards, load_shards(self.ranks, self.stored, asked, settings))

    def read_objects(self, shards: Sequence[ShardedObject]) -> list[Any]:
        asked = [shard for shard in shards if shard.key not in self.settings]
        return self._with_settings(shards, load_objects(self.stored, asked))

    def _with_settings(self, shards: Sequence[Shard], values: list[Any]) -> list[Any]:
        """Add the values of settings to the values that were read."""
        for number, shard in enumerate(shards):
            if shard.key in self.settings:
                values.insert(number, self.settings[shard.key])
        return values

    def shared_value(self, key: str) -> Any:
        if not has_equal_cells(self.stored, key):
            return HOLE
        shape = self.stored.global_shape(key)
        return self.read_objects([ShardedObject(key, None, shape, (0,) * len(shape))])[0]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.stored.manifest.shapes_by_key


def _may_hold_state_dicts(stored: StoredCheckpoint, has_optimizers: bool) -> bool:
    """Tell whether a checkpoint may hold state dicts of PyTorch: it was not made of objects."""
    manifest = stored.manifest
    if names_of_module(stored.marker) or is_export((manifest.origin or {}).get("format")):
        return False
    if any(key.endswith(".settings") for key in manifest.key_index):
        return False
    return has_optimizers or any(key.startswith("model.") for key in manifest.key_index)


def entries_of(stored: StoredCheckpoint) -> dict[str, StoredEntry]:
    """Return the stored entries by key, without common state."""
    manifest = stored.manifest
    entries = {}
    for key, number in manifest.key_index.items():
        dtype = manifest.dtypes[number]
        tensor_dtype = None
        if dtype != OBJECT:
            tensor_dtype = FROM_NAME[dtype]
        entries[key] = StoredEntry(tensor_dtype, manifest.global_shapes[number])
    entries.pop(COMMON_KEY, None)
    for key, tensor in find(stored).items():
        entries[key] = StoredEntry(FROM_NAME[tensor.dtype], tensor.model_shape, tensor.keys)
    return entries


@dataclass(frozen=True)
class _UserStrategy(ShardSource):
    """A checkpoint that a strategy of the user reads."""

    ranks: Ranks
    location: str
    marker: Mapping[str, Any]
    strategy: LoadShardedStrategy

    def entries(self) -> dict[str, StoredEntry]:
        listed = self.ranks.decide_json("read the keys of the checkpoint", self._listed_entries)
        entries = {}
        for key, dtype, shape in listed:
            entries[key] = StoredEntry(None if dtype is None else FROM_NAME[dtype], tuple(shape))
        return entries

    def _listed_entries(self) -> list[tuple[str, str | None, tuple[int, ...]]]:
        listed = {}
        for shard in self.strategy.load_sharded_metadata(self.location).values():
            dtype = TO_NAME[shard.dtype] if isinstance(shard, ShardedTensor) else None
            listed[shard.key] = (shard.key, dtype, shard.global_shape)
        listed.pop(COMMON_KEY, None)
        return list(listed.values())

    def read(self, shards: Sequence[Shard], rules: Sequence[Rule]) -> list[Any]:
        if rules:
            raise CheckpointingException(
                f"{type(self.strategy).__name__} reads {self.location!r}: rules and families work "
                "with the built-in strategy only."
            )
        by_name = {str(number): shard for number, shard in enumerate(shards)}
        values = self.strategy.load(by_name, self.location)
        return [values[str(number)] for number in range(len(shards))]

    def read_objects(self, shards: Sequence[ShardedObject]) -> list[Any]:
        return self.read(shards, ())

"""The built-in format as a strategy (see docs/format.md).

The format has safetensors shards, encoded objects and a columnar manifest.

`save` and `load` use it by default, without a strategy. These classes are for programs that pass
strategies around, or set how files are written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from distckpt._base.options import LoadOptions, SaveOptions
from distckpt._base.public import set_public_home
from distckpt._checkpoint.consistent_read import reading_unchanged
from distckpt._checkpoint.opening import open_undisturbed
from distckpt._checkpoint.shards import (
    ReadSettings,
    describe_objects,
    describe_tensors,
    load_shards,
)
from distckpt._format.marker import BUILT_IN
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.save_shards import ShardSave, prepare_shards
from distckpt._plan.layout import PlanCache
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedObject, ShardedStateDict, StateDict
from distckpt.strategies.base import (
    BUILT_IN_STRATEGIES,
    EngineSettings,
    LoadShardedStrategy,
    SaveShardedStrategy,
    StrategyAction,
)

__all__ = ["SafetensorsLoadStrategy", "SafetensorsSaveStrategy", "ShardSave"]

set_public_home(globals())


@dataclass
class SafetensorsSaveStrategy(SaveShardedStrategy):
    """Write every byte once as safetensors, spread over the ranks.

    Each byte is written by one of the ranks that hold it, evenly. Plans are kept: while no rank's
    shards change in anything but their data, later saves are not planned again.

    Attributes:
        options: options of the call, see `configure`.
        process_group: the ranks that save together, see `configure`.
        exchange_group: process group within which replicas share the writing; None for all ranks.
        direct_io: whether files are written around the page cache; None where it pays and the file
            system takes it, True insists.
    """

    options: SaveOptions = field(default_factory=SaveOptions)
    process_group: Any = None
    exchange_group: Any = None
    direct_io: bool | None = None
    backend: str = BUILT_IN
    version: int = 1
    _plans: PlanCache = field(default_factory=PlanCache, repr=False, compare=False)

    def configure(
        self, options: SaveOptions | LoadOptions, process_group: Any
    ) -> SafetensorsSaveStrategy:
        assert isinstance(options, SaveOptions)
        return replace(self, options=options, process_group=process_group)

    def engine_settings(self) -> EngineSettings | None:
        if type(self) is not SafetensorsSaveStrategy:
            return None
        return EngineSettings(self.exchange_group, self.direct_io, self._plans)

    def save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> Mapping[str, Any]:
        """Write all shards and the manifest; return the marker's fields.

        The coordinator returns the fields that name the manifest. Collective operation: all ranks
        of the process group must call it. Raises the errors of `prepare`.
        """
        ranks = Ranks(self.process_group)
        prepared = self.prepare(sharded_state_dict)
        with ranks.phase("save"):
            return prepared.write(locations.normalize(checkpoint_dir), ranks)

    def prepare(self, sharded_state_dict: ShardedStateDict) -> ShardSave:
        """Give every byte an owner and a place in a file.

        Collective operation: all ranks of the process group must call it.

        Raises:
            InvalidShardingError: shards overlap, leave gaps or disagree.
        """
        engine = EngineSettings(self.exchange_group, self.direct_io, self._plans)
        shards = list(sharded_state_dict.values())
        return prepare_shards(Ranks(self.process_group), shards, self.options, engine)


@dataclass
class SafetensorsLoadStrategy(LoadShardedStrategy):
    """Read exactly the requested regions of a checkpoint.

    The checkpoint is one of distckpt, or of any format that has a reader.

    Attributes:
        options: options of the call, see `configure`.
        process_group: the ranks that load together, see `configure`.
        exchange_group: process group whose ranks may share reads; None for all ranks.
    """

    options: LoadOptions = field(default_factory=LoadOptions)
    process_group: Any = None
    exchange_group: Any = None
    backend: str = BUILT_IN
    version: int = 1
    _is_configured: bool = field(default=False, repr=False)

    def configure(
        self, options: SaveOptions | LoadOptions, process_group: Any
    ) -> SafetensorsLoadStrategy:
        assert isinstance(options, LoadOptions)
        return replace(self, options=options, process_group=process_group, _is_configured=True)

    def engine_settings(self) -> EngineSettings | None:
        if type(self) is not SafetensorsLoadStrategy:
            return None
        return EngineSettings(self.exchange_group)

    def load(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> StateDict:
        """Read tensors in place and decode objects.

        Collective operation: all ranks of the configured group must call it. A strategy that was
        not configured reads alone.

        Raises:
            LoadMismatchError: a key, shape, dtype or object grid is not stored as requested.
            CorruptCheckpointError: files contradict the manifest or their checksums.
        """
        ranks = Ranks(self.process_group) if self._is_configured else Ranks.alone()
        location = locations.normalize(checkpoint_dir)
        # Each rank opens it alone: while one may have failed, ranks can vote, but not send data.
        stored = open_undisturbed(Ranks.alone(), location, verify=self.options.verify)
        settings = ReadSettings(self.options, (), self.exchange_group)
        # Several ranks are in a phase of `distckpt.load`, which notices removals itself.
        alone = reading_unchanged(ranks, [stored]) if ranks.size == 1 else contextlib.nullcontext()
        with alone:
            values = load_shards(ranks, stored, list(sharded_state_dict.values()), settings)
        return dict(zip(sharded_state_dict, values, strict=True))

    def load_tensors_metadata(
        self, checkpoint_dir: str | os.PathLike[str]
    ) -> dict[str, ShardedTensor]:
        return describe_tensors(_open_alone(checkpoint_dir))

    def load_sharded_metadata(
        self, checkpoint_dir: str | os.PathLike[str]
    ) -> dict[str, ShardedTensor | ShardedObject]:
        stored = _open_alone(checkpoint_dir)
        return {**describe_tensors(stored), **describe_objects(stored)}


def _open_alone(checkpoint_dir: str | os.PathLike[str]) -> StoredCheckpoint:
    return open_undisturbed(Ranks.alone(), locations.normalize(checkpoint_dir))


BUILT_IN_STRATEGIES[StrategyAction.SAVE_SHARDED] = SafetensorsSaveStrategy()
BUILT_IN_STRATEGIES[StrategyAction.LOAD_SHARDED] = SafetensorsLoadStrategy()

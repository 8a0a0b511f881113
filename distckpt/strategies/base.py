"""The interface of storage formats: a strategy moves shards between memory and one directory.

`save` and `load` do the work that is the same for every format: flattening the state dict, common
state, the transaction around a save, strictness and the exchange of outcomes. A strategy that they
are given is used, never replaced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from distckpt._base.errors import CheckpointingException
from distckpt._base.options import LoadOptions, SaveOptions
from distckpt._base.public import set_public_home
from distckpt._format.foreign_formats import FORMATS
from distckpt._format.marker import BUILT_IN
from distckpt._io.planned_shards import EngineSettings
from distckpt._io.save_shards import PreparedSave
from distckpt._ranks.collectives import Ranks
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedObject, ShardedStateDict, StateDict

__all__ = [
    "ConsolidationStrategy",
    "EngineSettings",
    "LoadShardedStrategy",
    "LoadStrategyBase",
    "PreparedSave",
    "SaveShardedStrategy",
    "SaveStrategyBase",
    "StrategyAction",
    "StrategyBase",
    "get_default_strategy",
    "register_default_strategy",
]

set_public_home(globals())

_Strategy = TypeVar("_Strategy", bound="StrategyBase")


class StrategyAction(Enum):
    """The tasks that strategies are registered for."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"
    CONSOLIDATE = "consolidate"


class StrategyBase(ABC):
    """Base class of all strategies.

    Attributes:
        backend: name of the format, recorded in the marker.
        version: version of the format.
    """

    backend: str
    version: int

    def configure(
        self: _Strategy, options: SaveOptions | LoadOptions, process_group: Any
    ) -> _Strategy:
        """Return this strategy with the options and ranks of one call.

        The call is one of `save` or `load`. The default ignores them.
        """
        del options, process_group
        return self

    def engine_settings(self) -> EngineSettings | None:
        """Return the built-in engine's settings, if this strategy uses it alone.

        `save` and `load` then call the engine themselves, with the files they have opened already.
        """
        return None


class SaveShardedStrategy(StrategyBase):
    """Writes the sharded part of a state dict."""

    def prepare(self, sharded_state_dict: ShardedStateDict) -> PreparedSave:
        """Plan the save, as far as possible without writing.

        Collective operation: all ranks must call it. The default decides nothing and leaves
        everything to `save`, as does any class that overrides `save` alone.
        """
        return _Unprepared(self, sharded_state_dict)

    @abstractmethod
    def save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str
    ) -> Mapping[str, Any] | None:
        """Write all shards into a directory of this save's own; it is committed afterwards.

        Collective operation: all ranks must call it.

        Args:
            sharded_state_dict: a flat dict of `ShardedTensor` and `ShardedObject`; common state is
                one of the objects of the coordinator.
            checkpoint_dir: exists and is empty but for `tensors/` and `objects/`.

        Returns:
            JSON fields to add to the marker (only the coordinator's count), or None.
        """


def prepare_save(
    strategy: SaveShardedStrategy, sharded_state_dict: ShardedStateDict
) -> PreparedSave:
    """Call `prepare`, unless the class of the strategy overrides `save` alone."""
    for known in type(strategy).__mro__:
        if "prepare" in vars(known):
            break
        if "save" in vars(known):
            return _Unprepared(strategy, sharded_state_dict)
    return strategy.prepare(sharded_state_dict)


class _Unprepared(PreparedSave):
    """A save by a strategy that does not prepare."""

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        sharded_state_dict: ShardedStateDict,
    ) -> None:
        self._strategy = strategy
        self._sharded_state_dict = sharded_state_dict

    def write(self, checkpoint_dir: str, ranks: Ranks) -> Mapping[str, Any] | None:
        return self._strategy.save(self._sharded_state_dict, checkpoint_dir)


class LoadShardedStrategy(StrategyBase):
    """Reads shards of a checkpoint."""

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str) -> StateDict:
        """Read the shards in a flat dict of `ShardedTensor` and `ShardedObject`.

        Collective operation: all ranks must call it. Returns the same dict with tensors and objects
        instead of shards; tensors are filled in place.
        """

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: str) -> dict[str, ShardedTensor]:
        """Describe every stored tensor unsharded, by key. Not a collective operation."""

    @abstractmethod
    def load_sharded_metadata(
        self, checkpoint_dir: str
    ) -> dict[str, ShardedTensor | ShardedObject]:
        """Describe every stored tensor, by key, and object, by unique key.

        Not a collective operation.
        """

    def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
        """Remove the tensors whose keys begin with a prefix. Called by one rank."""
        raise CheckpointingException(
            f"{type(self).__name__} cannot remove tensors ({key_prefix!r}, {checkpoint_dir!r})."
        )


LoadStrategyBase = SaveStrategyBase = StrategyBase


class ConsolidationStrategy(StrategyBase):
    """Merges the shards of a checkpoint into files that hold whole tensors."""

    @abstractmethod
    def consolidate(self, checkpoint_dir: str, output_dir: str) -> object:
        """Write the merged files; may return a report."""


BUILT_IN_STRATEGIES: dict[StrategyAction, StrategyBase] = {}
"""Those of `distckpt.strategies.safetensors`, which the package imports."""

_registry: dict[StrategyAction, dict[tuple[str, int], StrategyBase]] = defaultdict(dict)


def register_default_strategy(
    action: StrategyAction, backend: str, version: int, strategy: StrategyBase
) -> None:
    """Register a strategy under the name and version of its backend.

    Raises:
        CheckpointingException: another strategy has this name and version.
    """
    known = _registry[action].setdefault((backend, version), strategy)
    if known is not strategy and type(known) is not type(strategy):
        raise CheckpointingException(
            f"Backend {backend!r} version {version} already has {type(known).__name__} for "
            f"{action.value}: choose another name or version."
        )


def get_default_strategy(
    action: StrategyAction,
    backend: str,
    version: int,
) -> StrategyBase:
    """Return the strategy registered for a backend and version.

    Raises:
        CheckpointingException: there is none; the message lists the registered strategies.
    """
    strategy = _registry[action].get((backend, version))
    if strategy is None and is_built_in(action, backend, version):
        strategy = BUILT_IN_STRATEGIES[action]
    if strategy is None:
        names = {*_registry[action], *((name, 1) for name in _BUILT_IN_NAMES.get(action, ()))}
        known = ", ".join(f"{name!r} version {number}" for name, number in sorted(names))
        raise CheckpointingException(
            f"No strategy for {action.value} with backend {backend!r} version {version} (there is: "
            f"{known or 'none'}). Register one with register_default_strategy, or pass a strategy "
            "object."
        )
    return strategy


_BUILT_IN_NAMES = {
    StrategyAction.SAVE_SHARDED: (
        BUILT_IN,
        *(known.name for known in FORMATS.values() if known.is_given_to_save),
    ),
    StrategyAction.LOAD_SHARDED: (BUILT_IN, *FORMATS),
}
"""Names of built-in strategies: programs name the format of a checkpoint to load, and some pass
that name to a save, too.
"""


def is_built_in(action: StrategyAction, backend: str, version: int) -> bool:
    """Whether a name stands for the built-in strategy."""
    return version == 1 and backend in _BUILT_IN_NAMES.get(action, ())


def choose_save_strategy(choice: Any) -> tuple[SaveShardedStrategy | None, EngineSettings]:
    """Return a caller's strategy, or None for the built-in engine.

    The caller gives a strategy, or its `(backend, version)`. The settings are for the built-in
    engine.

    Raises:
        CheckpointingException: it is no strategy that saves, or none has this name.
    """
    return _choose(StrategyAction.SAVE_SHARDED, SaveShardedStrategy, choice)


def choose_load_strategy(choice: Any) -> tuple[LoadShardedStrategy | None, EngineSettings]:
    """Return a caller's strategy for loading, like `choose_save_strategy`."""
    return _choose(StrategyAction.LOAD_SHARDED, LoadShardedStrategy, choice)


def _choose(action: StrategyAction, kind: Any, choice: Any) -> tuple[Any, EngineSettings]:
    if choice == (BUILT_IN, 1):
        return None, EngineSettings()
    strategy = choice
    if isinstance(choice, tuple):
        strategy = get_default_strategy(action, *choice)
    if not isinstance(strategy, kind):
        raise CheckpointingException(
            f"strategy must be a {kind.__name__}, (backend, version) or None, got "
            f"{type(choice).__name__}."
        )
    engine = strategy.engine_settings()
    if engine is None:
        return strategy, EngineSettings()
    return None, engine

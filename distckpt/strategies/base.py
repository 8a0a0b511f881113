"""The interface of storage formats: a strategy moves shards between memory and one directory.

`save` and `load` keep what is the same for every format: flattening the state dict, common state, the transaction
around a save, strictness and the exchange of outcomes. A strategy that they are given is used, never replaced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeVar

from distckpt._base.errors import CheckpointingException
from distckpt._base.threads import DEFAULT_INFLIGHT_BYTES
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.staging import Staging
from distckpt._ranks.collectives import Ranks
from distckpt.mapping import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from distckpt.rules import Rule
from distckpt.strategies.async_utils import AsyncRequest

__all__ = [
    "AsyncSaveShardedStrategy",
    "ConsolidationStrategy",
    "LoadShardedStrategy",
    "LoadStrategyBase",
    "Options",
    "ParallelLoad",
    "PreparedSave",
    "SaveShardedStrategy",
    "SaveStrategyBase",
    "StrategyAction",
    "StrategyBase",
    "Verify",
    "get_default_strategy",
    "register_default_strategy",
]

Verify = Literal["none", "read", "full"]
ParallelLoad = Literal["auto", "on", "off"]

_Strategy = TypeVar("_Strategy", bound="StrategyBase")


@dataclass(frozen=True)
class Options:
    """The settings of one call of `save` or `load` that concern strategies; each uses those it supports.

    Attributes that are not described here are arguments of `save` or `load`.

    Attributes:
        exchange_group: when set, replicas share work only with ranks of this group.
        stored: the checkpoint that is loaded, opened by all ranks together; None where it has not been read yet.
    """

    process_group: Any = None
    exchange_group: Any = None
    validate_access_integrity: bool = True
    validate_replicas: bool | None = None
    verify: str = "read"
    allow_dtype_cast: bool = False
    parallel_load: str = "auto"
    rules: Sequence[Rule] = ()
    durable: bool = True
    max_inflight_bytes: int = DEFAULT_INFLIGHT_BYTES
    progress: Callable[[int], None] | None = None
    stored: StoredCheckpoint | None = None


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
        version: its version.
    """

    backend: str
    version: int

    def configure(self: _Strategy, options: Options) -> _Strategy:
        """Return this strategy with the settings of one call of `save` or `load`; the default ignores them."""
        del options
        return self


class PreparedSave(ABC):
    """A save of which everything is decided, on all ranks, and nothing written.

    Attributes:
        num_bytes: how much this rank is going to write.
        plan_reused: True when the plan is that of an earlier save.
        folder_suffix: the end of the names of the folders `tensors` and `objects`. `save` sets it before `write` where
            several saves may write in one place, on object stores. None for a strategy that gives files fixed names:
            such saves are not kept apart there, and do not replace a checkpoint.
        written: on the coordinator, after `write`: name and size of each file. `save` looks at them before it commits.
    """

    num_bytes: int = 0
    plan_reused: bool = False
    folder_suffix: str | None = None
    written: Sequence[tuple[str, int]] = ()

    def stage(self, staging: Staging) -> PreparedSave | None:
        """Return the same save with copies of all that it writes, so that the caller's tensors may change.

        Not a collective operation. The default returns None: `async_save` finishes such a save before it returns.
        """
        del staging
        return None

    @abstractmethod
    def write(self, checkpoint_dir: str, ranks: Ranks) -> Mapping[str, Any] | None:
        """Write all shards into a directory that nobody else uses, see `SaveShardedStrategy.save`.

        After `stage` this runs in a background thread, and must use no other process group than that of `ranks`.
        """


class SaveShardedStrategy(StrategyBase):
    """Writes the sharded part of a state dict."""

    def prepare(self, sharded_state_dict: ShardedStateDict) -> PreparedSave:
        """Decide who writes what, as far as that can be done without writing.

        Collective operation: all ranks must call it. The default decides nothing and leaves everything to `save`, as
        does any class that overrides `save` alone.
        """
        return _Unprepared(self, sharded_state_dict)

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str) -> Mapping[str, Any] | None:
        """Write all shards into a directory that nobody else uses; it is committed afterwards.

        Collective operation: all ranks must call it.

        Args:
            sharded_state_dict: a flat dict of `ShardedTensor` and `ShardedObject`; common state is one of the objects
                of the coordinator.
            checkpoint_dir: exists and is empty but for `tensors/` and `objects/`.

        Returns:
            JSON fields to add to the marker (only the coordinator's count), or None.
        """


def prepare_save(strategy: SaveShardedStrategy, sharded_state_dict: ShardedStateDict) -> PreparedSave:
    """Call `prepare`, unless the class of the strategy overrides `save` alone."""
    for known in type(strategy).__mro__:
        if "prepare" in vars(known):
            break
        if "save" in vars(known):
            return _Unprepared(strategy, sharded_state_dict)
    return strategy.prepare(sharded_state_dict)


class _Unprepared(PreparedSave):
    """A save by a strategy that does not prepare."""

    def __init__(self, strategy: SaveShardedStrategy, sharded_state_dict: ShardedStateDict) -> None:
        self._strategy = strategy
        self._sharded_state_dict = sharded_state_dict

    def write(self, checkpoint_dir: str, ranks: Ranks) -> Mapping[str, Any] | None:
        return self._strategy.save(self._sharded_state_dict, checkpoint_dir)


class LoadShardedStrategy(StrategyBase):
    """Reads shards of a checkpoint."""

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str) -> StateDict:
        """Read the shards in a flat dict of `ShardedTensor` and `ShardedObject`.

        Collective operation: all ranks must call it. Returns the same dict with tensors and objects in the place of
        shards; tensors are filled in place.
        """

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: str) -> dict[str, ShardedTensor]:
        """Describe every stored tensor unsharded, by key. Not a collective operation."""

    @abstractmethod
    def load_sharded_metadata(self, checkpoint_dir: str) -> dict[str, ShardedTensor | ShardedObject]:
        """Describe every stored tensor, by key, and every object, by unique key. Not a collective operation."""

    def load_quantized_metadata(self, checkpoint_dir: str) -> dict[str, tuple[ShardedTensor, tuple[str, ...]]]:
        """Describe the tensors that can be loaded but are stored as codes and scales, with the keys of these, by key.

        Not a collective operation. The default knows none.
        """
        del checkpoint_dir
        return {}

    def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
        """Remove the tensors whose keys begin with a prefix. Called by one rank."""
        raise CheckpointingException(
            f"{type(self).__name__} cannot remove tensors ({key_prefix!r}, {checkpoint_dir!r})."
        )


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """A strategy that gives its work as a request, as Megatron's do; it is done before `save` returns."""

    @abstractmethod
    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str) -> AsyncRequest:
        """Return a request that writes all shards, see `save`."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str) -> None:
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()


LoadStrategyBase = SaveStrategyBase = StrategyBase


class ConsolidationStrategy(StrategyBase):
    """Merges the shards of a checkpoint into files that hold whole tensors."""

    @abstractmethod
    def consolidate(self, checkpoint_dir: str, output_dir: str) -> object:
        """Write the merged files; may return a report."""


_registry: dict[StrategyAction, dict[tuple[str, int], StrategyBase]] = defaultdict(dict)


def register_default_strategy(action: StrategyAction, backend: str, version: int, strategy: StrategyBase) -> None:
    """Register a strategy under the name and version of its backend.

    Raises:
        CheckpointingException: another strategy has this name and version.
    """
    known = _registry[action].setdefault((backend, version), strategy)
    if known is not strategy and type(known) is not type(strategy):
        raise CheckpointingException(
            f"Backend {backend!r} version {version} already has {type(known).__name__} for {action.value}: "
            "choose another name or version."
        )


def get_default_strategy(action: StrategyAction, backend: str, version: int) -> StrategyBase:
    """Return the strategy registered for a backend and version.

    Raises:
        CheckpointingException: there is none; the message lists those there are.
    """
    strategy = _registry[action].get((backend, version))
    if strategy is None:
        known = ", ".join(f"{name!r} version {number}" for name, number in sorted(_registry[action])) or "none"
        raise CheckpointingException(
            f"No strategy for {action.value} with backend {backend!r} version {version} (there is: {known}). Register "
            "one with register_default_strategy, or pass a strategy object."
        )
    return strategy

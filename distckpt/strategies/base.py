"""The seam for other formats: a strategy given to `save` or `load` is the one that is used, never replaced.

`save` and `load` keep what is the same for every format: taking state dicts apart, common state, the transaction
around a save, strictness and the exchange of outcomes. A strategy moves shards between memory and one directory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from distckpt.core import CheckpointingException
from distckpt.mapping import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from distckpt.rules import Rule

_Strategy = TypeVar("_Strategy", bound="StrategyBase")


@dataclass(frozen=True)
class Options:
    """The settings of one call of `save` or `load` that concern strategies; each takes what it knows.

    Attributes:
        process_group: the ranks that take part; None for the default group, or for one process without any.
        exchange_group: when set, replicas share work only with ranks of this group.
        validate_access_integrity: see `save`.
        validate_replicas: see `save`.
        verify: see `load`.
        allow_dtype_cast: see `load`.
        rules: see `load`.
    """

    process_group: Any = None
    exchange_group: Any = None
    validate_access_integrity: bool = True
    validate_replicas: bool = False
    verify: str = "read"
    allow_dtype_cast: bool = False
    rules: Sequence[Rule] = ()


class StrategyAction(Enum):
    """What a registered strategy does."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"
    CONSOLIDATE = "consolidate"


class StrategyBase(ABC):
    """Base of all strategies.

    Attributes:
        backend: name of the format, recorded in the marker.
        version: its version.
    """

    backend: str
    version: int

    def configure(self: _Strategy, options: Options) -> _Strategy:
        """Return this strategy set up for one call of `save` or `load`; the default ignores the settings."""
        del options
        return self


class SaveShardedStrategy(StrategyBase):
    """Writes the sharded part of a state dict."""

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str) -> Mapping[str, Any] | None:
        """Write all shards into a directory that nobody else uses.

        Collective: every rank of the group calls.

        Args:
            sharded_state_dict: a flat dict of `ShardedTensor` and `ShardedObject`; common state is one of the objects
                of the coordinator.
            checkpoint_dir: exists and is empty but for `tensors/` and `objects/`; it is committed afterwards.

        Returns:
            JSON fields to add to the marker (only the coordinator's count), or None.
        """


class LoadShardedStrategy(StrategyBase):
    """Reads shards of a checkpoint."""

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str) -> StateDict:
        """Read what is asked for.

        Collective: every rank of the group calls.

        Args:
            sharded_state_dict: a flat dict of `ShardedTensor` and `ShardedObject`.
            checkpoint_dir: of a checkpoint.

        Returns:
            The same dict with tensors and objects in the place of shards; tensors are filled in place.
        """

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: str) -> dict[str, ShardedTensor]:
        """Describe every stored tensor as one whole, by key. Any rank may call, alone."""

    @abstractmethod
    def load_sharded_metadata(self, checkpoint_dir: str) -> dict[str, ShardedTensor | ShardedObject]:
        """Describe every stored tensor, by key, and every stored object, by unique key. Any rank may call, alone."""

    def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
        """Remove the tensors whose keys begin with a prefix. One rank calls."""
        raise CheckpointingException(
            f"{type(self).__name__} cannot remove tensors ({key_prefix!r}, {checkpoint_dir!r})."
        )


class ConsolidationStrategy(StrategyBase):
    """Merges a checkpoint into files without shards."""

    @abstractmethod
    def consolidate(self, checkpoint_dir: str, output_dir: str) -> object:
        """Write the merged files; may return a report."""


_registry: dict[StrategyAction, dict[tuple[str, int], StrategyBase]] = defaultdict(dict)


def register_default_strategy(action: StrategyAction, backend: str, version: int, strategy: StrategyBase) -> None:
    """Make a strategy available by the name and version of its backend.

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

"""Megatron Core's `dist_checkpointing.strategies.base`.

Its classes come from `distckpt.strategies.base`; some serve only programs for Megatron.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from distckpt.mapping._wrappers import CommonStateDict, ShardedStateDict
from distckpt.megatron.strategies.async_utils import AsyncRequest
from distckpt.strategies.base import (
    LoadShardedStrategy,
    LoadStrategyBase,
    SaveShardedStrategy,
    SaveStrategyBase,
    StrategyAction,
    StrategyBase,
    get_default_strategy,
    register_default_strategy,
)

__all__ = [
    "AsyncSaveShardedStrategy",
    "LoadCommonStrategy",
    "LoadShardedStrategy",
    "LoadStrategyBase",
    "SaveCommonStrategy",
    "SaveShardedStrategy",
    "SaveStrategyBase",
    "StrategyAction",
    "get_default_strategy",
    "register_default_strategy",
]


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """A strategy that returns its work as a request, as Megatron's do.

    The work is done before `save` returns.
    """

    @abstractmethod
    def async_save(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: str,
    ) -> AsyncRequest:
        """Return a request that writes all shards, see `save`."""

    def save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str
    ) -> Mapping[str, Any] | None:
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()
        return None


class LoadCommonStrategy(StrategyBase):
    """Reads common state; `load` uses the sharded strategy for that."""

    @abstractmethod
    def load_common(self, checkpoint_dir: str) -> CommonStateDict:
        """Load common state."""


class SaveCommonStrategy(StrategyBase):
    """Writes common state; `save` uses the sharded strategy for that."""

    @abstractmethod
    def save_common(self, common_state_dict: CommonStateDict, checkpoint_dir: str) -> Any:
        """Save common state."""

"""Megatron's wrappers that parallelise saving and loading within a group.

distckpt's strategies always spread the work over replicas. The wrappers are accepted so that programs written for
Megatron run unchanged; they keep the sharing of work inside the given group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distckpt.mapping import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from distckpt.strategies.base import LoadShardedStrategy, Options, PreparedSave, SaveShardedStrategy, prepare_save


class FullyParallelSaveStrategyWrapper(SaveShardedStrategy):
    """Let replicas share writing only with the ranks of a group.

    Args:
        strategy: does the work.
        parallelization_group: process group to share within; None for all ranks that save.
        do_cache_distribution: accepted and not needed: plans of saves are always kept.
    """

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
    ) -> None:
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.backend = strategy.backend
        self.version = strategy.version

    def configure(self, options: Options) -> FullyParallelSaveStrategyWrapper:
        """Return this strategy with the settings of one call."""
        inner = self.base_strategy.configure(replace(options, exchange_group=self.parallelization_group))
        return FullyParallelSaveStrategyWrapper(inner, self.parallelization_group, self.do_cache_distribution)

    def prepare(self, sharded_state_dict: ShardedStateDict) -> PreparedSave:
        """Decide who writes what, see `SaveShardedStrategy.prepare`."""
        return prepare_save(self.base_strategy, sharded_state_dict)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str) -> Mapping[str, Any] | None:
        """Write all shards, see `SaveShardedStrategy.save`."""
        return self.base_strategy.save(sharded_state_dict, checkpoint_dir)


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy):
    """Let ranks that request the same data share reading only with the ranks of a group.

    `parallel_load` of `distckpt.load` decides whether they share; its default shares where that saves time.

    Args:
        strategy: does the work.
        parallelization_group: process group whose ranks may share reads; None for all ranks that load.
        do_cache_distribution: accepted and not needed: planning is cheap.
        exchange_algo: accepted and not needed: ranks send each other the data they have read.
    """

    def __init__(
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
    ) -> None:
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.exchange_algo = exchange_algo
        self.backend = strategy.backend
        self.version = strategy.version

    def configure(self, options: Options) -> FullyParallelLoadStrategyWrapper:
        """Return this strategy with the settings of one call."""
        inner = self.base_strategy.configure(replace(options, exchange_group=self.parallelization_group))
        return FullyParallelLoadStrategyWrapper(
            inner, self.parallelization_group, self.do_cache_distribution, self.exchange_algo
        )

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str) -> StateDict:
        """Read the given shards, see `LoadShardedStrategy.load`."""
        return self.base_strategy.load(sharded_state_dict, checkpoint_dir)

    def load_tensors_metadata(self, checkpoint_dir: str) -> dict[str, ShardedTensor]:
        """Describe every stored tensor, see `LoadShardedStrategy.load_tensors_metadata`."""
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: str) -> dict[str, ShardedTensor | ShardedObject]:
        """Describe everything stored, see `LoadShardedStrategy.load_sharded_metadata`."""
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
        """Remove tensors by key prefix, see `LoadShardedStrategy.remove_sharded_tensors`."""
        self.base_strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)

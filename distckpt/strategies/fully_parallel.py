"""Megatron's wrappers that parallelise saving and loading within a group.

distckpt's strategies always spread the work over replicas. The wrappers are accepted so that programs written for
Megatron run unchanged; they keep the sharing of work inside the given group.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from distckpt.mapping import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from distckpt.strategies.base import LoadShardedStrategy, Options, PreparedSave, SaveShardedStrategy, prepare_save

__all__ = ["FullyParallelLoadStrategyWrapper", "FullyParallelSaveStrategyWrapper"]


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
        return _configured(self, options)

    def prepare(self, sharded_state_dict: ShardedStateDict) -> PreparedSave:
        return prepare_save(self.base_strategy, sharded_state_dict)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str) -> Mapping[str, Any] | None:
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
        return _configured(self, options)

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str) -> StateDict:
        return self.base_strategy.load(sharded_state_dict, checkpoint_dir)

    def load_tensors_metadata(self, checkpoint_dir: str) -> dict[str, ShardedTensor]:
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: str) -> dict[str, ShardedTensor | ShardedObject]:
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
        self.base_strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)


_Wrapper = TypeVar("_Wrapper", FullyParallelSaveStrategyWrapper, FullyParallelLoadStrategyWrapper)


def _configured(wrapper: _Wrapper, options: Options) -> _Wrapper:
    """Return a copy whose strategy has the options, and shares work only within the group of the wrapper."""
    configured = copy.copy(wrapper)
    options = replace(options, exchange_group=wrapper.parallelization_group)
    configured.base_strategy = wrapper.base_strategy.configure(options)
    return configured

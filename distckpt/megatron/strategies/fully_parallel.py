"""Megatron's wrappers that parallelize saving and loading within a group.

distckpt's strategies always spread the work over replicas. The wrappers are accepted so that
programs written for Megatron run unchanged; they keep the sharing of work inside the given group.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from distckpt._base.errors import CheckpointingException
from distckpt._base.options import LoadOptions, SaveOptions
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedObject, ShardedStateDict, StateDict
from distckpt.megatron._forwarding import forward, installed, taking_ours
from distckpt.megatron._verbs import save
from distckpt.megatron.serialization import get_default_save_sharded_strategy
from distckpt.megatron.strategies.async_utils import AsyncRequest
from distckpt.megatron.strategies.base import AsyncSaveShardedStrategy
from distckpt.strategies.base import (
    EngineSettings,
    LoadShardedStrategy,
    PreparedSave,
    SaveShardedStrategy,
    StrategyBase,
    prepare_save,
)

__all__ = ["FullyParallelLoadStrategyWrapper", "FullyParallelSaveStrategyWrapper"]

__getattr__ = forward(
    "strategies.fully_parallel", "distribute_main_replicas_with_precomputed_distribution"
)


_Wrapper = TypeVar("_Wrapper", bound="_WithinGroup")


class _WithinGroup(StrategyBase):
    """A wrapper whose strategy shares work with the ranks of a group."""

    def __init__(self, strategy: Any, group: Any, caches: bool) -> None:
        self.base_strategy = strategy
        self.parallelization_group = group
        self.do_cache_distribution = caches
        self.backend = strategy.backend
        self.version = strategy.version

    def configure(
        self: _Wrapper, options: SaveOptions | LoadOptions, process_group: Any
    ) -> _Wrapper:
        configured = copy.copy(self)
        configured.base_strategy = self.base_strategy.configure(options, process_group)
        return configured

    def engine_settings(self) -> EngineSettings | None:
        engine: EngineSettings | None = self.base_strategy.engine_settings()
        # The methods of a class derived from a wrapper are to be called.
        if engine is None or type(self) not in _WRAPPERS:
            return None
        return replace(engine, exchange_group=self.parallelization_group)

    def _of_megatron(self, method: str) -> Any:
        """Return a method of Megatron's own wrapper of the same group."""
        name = type(self).__name__
        kind = installed("strategies.fully_parallel", name)
        theirs = kind(self.base_strategy, self.parallelization_group)
        return taking_ours(getattr(theirs, method), f"{name}.{method}")


class FullyParallelSaveStrategyWrapper(_WithinGroup, AsyncSaveShardedStrategy):
    """Let replicas share writing only with the ranks of a group.

    Args:
        strategy: does the work; None for the default one.
        parallelization_group: process group to share within; None for all ranks that save.
        do_cache_distribution: accepted, as all that follow: plans of saves are always kept, in
            memory alone, and `distckpt.save` decides about checks.
    """

    base_strategy: SaveShardedStrategy

    def __init__(
        self,
        strategy: SaveShardedStrategy | None,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
        backend: str = "torch_dist",
        version: int = 1,
        validate_access_integrity: bool = True,
        pg_cache_path: str | None = None,
        pg_cache_create: bool = False,
    ) -> None:
        del backend, version, validate_access_integrity, pg_cache_path, pg_cache_create
        base = get_default_save_sharded_strategy() if strategy is None else strategy
        if not isinstance(base, SaveShardedStrategy):
            raise CheckpointingException(
                f"strategy must be a SaveShardedStrategy or None, got {type(base).__name__}."
            )
        super().__init__(base, parallelization_group, do_cache_distribution)

    def prepare(self, sharded_state_dict: ShardedStateDict) -> PreparedSave:
        return prepare_save(self.base_strategy, sharded_state_dict)

    def save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str
    ) -> Mapping[str, Any] | None:
        return self.base_strategy.save(sharded_state_dict, checkpoint_dir)

    def async_save(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: str | os.PathLike[str],
        async_strategy: str = "nvrx",
    ) -> AsyncRequest:
        """Return a request that saves a state dict.

        Collective operation: all ranks must call it.
        """
        del async_strategy
        request = save(sharded_state_dict, checkpoint_dir, self, async_sharded_save=True)
        assert request is not None
        return request

    def apply_saving_parallelization(self, sharded_state_dict: ShardedStateDict) -> None:
        """Give shards the replica ids of Megatron's distribution of a save.

        `distckpt.save` does not need it: it divides replicas among the ranks that hold them.
        """
        self._of_megatron("apply_saving_parallelization")(sharded_state_dict)


class FullyParallelLoadStrategyWrapper(_WithinGroup, LoadShardedStrategy):
    """Share reads only between the ranks of a group.

    Ranks that request the same data do so.

    `share_reads` of `distckpt.load` decides whether they share; its default shares where that
    saves time.

    Args:
        strategy: does the work.
        parallelization_group: process group whose ranks may share reads; None for all ranks that
            load.
        do_cache_distribution: accepted, as all that follow: planning is cheap, ranks send each
            other the data they have read, and each reads the objects that it requests.
    """

    base_strategy: LoadShardedStrategy

    def __init__(
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
        per_rank_object_load: bool = False,
        pg_cache_path: str | None = None,
        pg_cache_create: bool = False,
    ) -> None:
        del per_rank_object_load, pg_cache_path, pg_cache_create
        super().__init__(strategy, parallelization_group, do_cache_distribution)
        self.exchange_algo = exchange_algo

    def load(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: str | os.PathLike[str],
        async_strategy: str = "mcore",
    ) -> StateDict:
        del async_strategy
        return self.base_strategy.load(sharded_state_dict, os.fspath(checkpoint_dir))

    def apply_loading_parallelization(self, sharded_state_dict: ShardedStateDict) -> Any:
        """Return Megatron's distribution of the loads of a state dict.

        `distckpt.load` does not need it: it chooses itself the rank that reads data for several.
        """
        return self._of_megatron("apply_loading_parallelization")(sharded_state_dict)

    def load_tensors_metadata(
        self, checkpoint_dir: str | os.PathLike[str]
    ) -> dict[str, ShardedTensor]:
        return self.base_strategy.load_tensors_metadata(os.fspath(checkpoint_dir))

    def load_sharded_metadata(
        self, checkpoint_dir: str | os.PathLike[str]
    ) -> dict[str, ShardedTensor | ShardedObject]:
        return self.base_strategy.load_sharded_metadata(os.fspath(checkpoint_dir))

    def remove_sharded_tensors(
        self, checkpoint_dir: str | os.PathLike[str], key_prefix: str
    ) -> None:
        self.base_strategy.remove_sharded_tensors(os.fspath(checkpoint_dir), key_prefix)


_WRAPPERS = (FullyParallelSaveStrategyWrapper, FullyParallelLoadStrategyWrapper)

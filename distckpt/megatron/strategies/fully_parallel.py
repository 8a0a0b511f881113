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
    prepare_save,
)

__all__ = ["FullyParallelLoadStrategyWrapper", "FullyParallelSaveStrategyWrapper"]

__getattr__ = forward(
    "strategies.fully_parallel", "distribute_main_replicas_with_precomputed_distribution"
)


class FullyParallelSaveStrategyWrapper(AsyncSaveShardedStrategy):
    """Let replicas share writing only with the ranks of a group.

    Args:
        strategy: does the work; None for the default one.
        parallelization_group: process group to share within; None for all ranks that save.
        do_cache_distribution: accepted, as all that follow: plans of saves are always kept, in
            memory alone, and `distckpt.save` decides about checks.
    """

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
        self.base_strategy = get_default_save_sharded_strategy() if strategy is None else strategy
        if not isinstance(self.base_strategy, SaveShardedStrategy):
            raise CheckpointingException(
                "strategy must be a SaveShardedStrategy or None, got "
                f"{type(self.base_strategy).__name__}."
            )
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.backend = self.base_strategy.backend
        self.version = self.base_strategy.version

    def configure(
        self, options: SaveOptions | LoadOptions, process_group: Any
    ) -> FullyParallelSaveStrategyWrapper:
        return _configured(self, options, process_group)

    def engine_settings(self) -> EngineSettings | None:
        return _engine_within_group(self, FullyParallelSaveStrategyWrapper)

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
        _megatron_method(self, "apply_saving_parallelization")(sharded_state_dict)


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy):
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
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.exchange_algo = exchange_algo
        self.backend = strategy.backend
        self.version = strategy.version

    def configure(
        self, options: SaveOptions | LoadOptions, process_group: Any
    ) -> FullyParallelLoadStrategyWrapper:
        return _configured(self, options, process_group)

    def engine_settings(self) -> EngineSettings | None:
        return _engine_within_group(self, FullyParallelLoadStrategyWrapper)

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
        return _megatron_method(self, "apply_loading_parallelization")(sharded_state_dict)

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


_Wrapper = TypeVar("_Wrapper", FullyParallelSaveStrategyWrapper, FullyParallelLoadStrategyWrapper)


def _configured(
    wrapper: _Wrapper, options: SaveOptions | LoadOptions, process_group: Any
) -> _Wrapper:
    """Return a copy whose strategy is configured."""
    configured = copy.copy(wrapper)
    configured.base_strategy = wrapper.base_strategy.configure(options, process_group)
    return configured


def _engine_within_group(wrapper: _Wrapper, kind: type[_Wrapper]) -> EngineSettings | None:
    """Return the engine's settings for sharing work within the group.

    None if the wrapped strategy does not use it.

    None for a class derived from a wrapper, too: its methods are to be called.
    """
    engine = wrapper.base_strategy.engine_settings()
    if engine is None or type(wrapper) is not kind:
        return None
    return replace(engine, exchange_group=wrapper.parallelization_group)


def _megatron_method(wrapper: Any, method: str) -> Any:
    """Return a method of Megatron's own wrapper of the same group."""
    name = type(wrapper).__name__
    kind = installed("strategies.fully_parallel", name)
    theirs = kind(wrapper.base_strategy, wrapper.parallelization_group)
    return taking_ours(getattr(theirs, method), f"{name}.{method}")

"""Megatron's strategies of the format `torch_dist`.

Here they save in distckpt's format and load all formats.
"""

from __future__ import annotations

import os
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._base.options import LoadOptions, SaveOptions
from distckpt._format.marker import BUILT_IN
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedObject, ShardedStateDict
from distckpt.megatron._forwarding import forward, installed
from distckpt.megatron._queries import remove_sharded_tensors
from distckpt.megatron._verbs import load, save
from distckpt.megatron.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from distckpt.megatron.strategies.base import AsyncSaveShardedStrategy
from distckpt.strategies.base import (
    EngineSettings,
    LoadShardedStrategy,
    StrategyAction,
    is_built_in,
)
from distckpt.strategies.safetensors import SafetensorsLoadStrategy, SafetensorsSaveStrategy

__all__ = ["TorchDistLoadShardedStrategy", "TorchDistSaveShardedStrategy", "get_async_strategy"]

__getattr__ = forward(
    "strategies.torch",
    "MCoreLoadPlanner",
    "MCoreMetadata",
    "MCoreSavePlan",
    "MCoreSavePlanner",
    "_get_filesystem_reader",
    "flatten_state_dict",
    "mcore_to_pyt_state_dict",
    "sharded_tensor_to_torch_sharded_tensor",
)

_FORWARDED = {
    "CachedMetadataFileSystemReader": "cached_metadata_filesystem_reader",
    "FileSystemWriterAsync": "filesystem_async",
    "save_state_dict_async_finalize": "state_dict_saver",
    "save_state_dict_async_plan": "state_dict_saver",
}


class TorchDistSaveShardedStrategy(AsyncSaveShardedStrategy):
    """Save in distckpt's format.

    The arguments are Megatron's, and none is needed.

    Args:
        backend: "torch_dist" or "safetensors".
        version: 1.
        keep_only_main_replica: accepted, as all that follow: every byte is written once,
            `max_inflight_bytes` of `save` limits threads and memory, plans are kept while the
            structure stays the same, and no process is started.
    """

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        keep_only_main_replica: bool = True,
        thread_count: int = 1,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
        cpu_shm_mode: bool = False,
    ) -> None:
        if not is_built_in(StrategyAction.SAVE_SHARDED, backend, version):
            raise CheckpointingException(
                f"There is no strategy that saves {backend!r} version {version}."
            )
        self.backend = BUILT_IN
        self.version = 1
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.use_cached_ckpt_structure = cached_metadata
        self.cached_global_metadata = None
        self.separation_hint = separation_hint
        self.cpu_shm_mode = cpu_shm_mode

    def configure(  # type: ignore[override]
        self, options: SaveOptions | LoadOptions, process_group: Any
    ) -> SafetensorsSaveStrategy:
        # For classes derived from the wrappers, which call strategies themselves.
        return SafetensorsSaveStrategy().configure(options, process_group)

    def engine_settings(self) -> EngineSettings:
        return EngineSettings()

    def save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> None:
        """Save a state dict, as `distckpt.save` does.

        Collective operation: all ranks must call it.
        """
        save(sharded_state_dict, checkpoint_dir, self)

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


class TorchDistLoadShardedStrategy(LoadShardedStrategy):
    """Load a checkpoint of any format that distckpt reads.

    The arguments are Megatron's, and none is needed.
    """

    def __init__(
        self,
        cache_metadata: bool = False,
        stream_ckpt_dequant: bool = True,
        checkpoint_name: str | None = None,
    ) -> None:
        self.backend = BUILT_IN
        self.version = 1
        self.cache_metadata = cache_metadata
        self.stream_ckpt_dequant = stream_ckpt_dequant
        self.checkpoint_name = checkpoint_name
        self.cached_global_metadata = None

    def configure(  # type: ignore[override]
        self, options: SaveOptions | LoadOptions, process_group: Any
    ) -> SafetensorsLoadStrategy:
        # For classes derived from the wrappers, which call strategies themselves.
        return SafetensorsLoadStrategy().configure(options, process_group)

    def engine_settings(self) -> EngineSettings:
        return EngineSettings()

    def load(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: str | os.PathLike[str],
        async_strategy: str = "mcore",
    ) -> Any:
        """Load a state dict, as `distckpt.load` does.

        Collective operation: all ranks must call it.
        """
        del async_strategy
        return load(sharded_state_dict, checkpoint_dir, self)

    def load_tensors_metadata(
        self, checkpoint_dir: str | os.PathLike[str], metadata: None = None
    ) -> dict[str, ShardedTensor]:
        del metadata
        return SafetensorsLoadStrategy().load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(
        self, checkpoint_dir: str | os.PathLike[str]
    ) -> dict[str, ShardedTensor | ShardedObject]:
        return SafetensorsLoadStrategy().load_sharded_metadata(checkpoint_dir)

    def remove_sharded_tensors(
        self, checkpoint_dir: str | os.PathLike[str], key_prefix: str
    ) -> None:
        remove_sharded_tensors(checkpoint_dir, key_prefix)


class _AsyncModules(dict[str, Any]):
    """The result of `get_async_strategy`.

    Megatron's own writers and readers of its files are imported when used.
    """

    def __missing__(self, name: str) -> Any:
        if name not in _FORWARDED:
            raise KeyError(name)
        return installed(f"strategies.{_FORWARDED[name]}", name)


def get_async_strategy(async_strategy: str = "nvrx", module: str | None = None) -> tuple[str, Any]:
    """Return the classes for background saves.

    With them comes the name that was asked for; the classes are the same for both of Megatron's
    ways.

    Args:
        async_strategy: "nvrx" or "mcore"; nvidia-resiliency-ext is not needed.
        module: name of a single module; None for all.

    Raises:
        TypeError: another `async_strategy`.
    """
    if async_strategy not in ("nvrx", "mcore"):
        raise TypeError(
            f"async_strategy {async_strategy!r} is not supported: use 'nvrx' or 'mcore', which "
            "mean the same."
        )
    modules = _AsyncModules(
        AsyncCallsQueue=AsyncCallsQueue, AsyncRequest=AsyncRequest, _results_queue=None,
        get_write_results_queue=get_write_results_queue,
    )  # fmt: skip
    return async_strategy, modules if module is None else modules[module]


def get_write_results_queue(mp_mode: str = "spawn") -> None:
    """Return None: data is written in this process, and no results come from another one."""
    del mp_mode

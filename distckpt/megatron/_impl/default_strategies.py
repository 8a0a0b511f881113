"""The strategies that Megatron's programs look up by format or checkpoint."""

from __future__ import annotations

import os

from distckpt._checkpoint.opening import find_checkpoint, is_built_in
from distckpt._format.marker import BUILT_IN
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.megatron._impl.queries import registered_strategy
from distckpt.megatron._impl.torch_dist import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from distckpt.strategies.base import (
    LoadShardedStrategy,
    SaveShardedStrategy,
    choose_save_strategy,
)


def get_default_save_sharded_strategy(
    backend: str = BUILT_IN, version: int = 1
) -> SaveShardedStrategy:
    """Return the strategy that saves in a format.

    It is distckpt's, which Megatron's "torch_dist" stands for, too, or a registered one.

    Raises:
        CheckpointingException: there is none of this name and version.
    """
    name = (backend, version)
    strategy, _ = choose_save_strategy(name)
    return strategy or TorchDistSaveShardedStrategy()


def get_default_load_sharded_strategy(
    checkpoint_dir: str | os.PathLike[str] | None = None,
) -> LoadShardedStrategy:
    """Return the strategy that reads a checkpoint, by default distckpt's.

    Raises:
        CheckpointNotFoundError: no complete checkpoint is there.
        CheckpointingException: the strategy that wrote it is not registered.
    """
    if checkpoint_dir is None:
        return TorchDistLoadShardedStrategy()
    location = locations.normalize(checkpoint_dir)
    checkpoint = find_checkpoint(Ranks.alone(), location)
    if is_built_in(checkpoint.marker):
        return TorchDistLoadShardedStrategy()
    return registered_strategy(location, checkpoint.marker)

"""Saving, loading and reading metadata, as Megatron Core names them.

The names belong to its `dist_checkpointing.serialization`.
"""

from __future__ import annotations

import logging
import os

from distckpt._base.public import set_public_home
from distckpt._checkpoint.opening import find_checkpoint, is_built_in
from distckpt._format.marker import BUILT_IN
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.mapping._wrappers import CommonStateDict, ShardedStateDict, StateDict
from distckpt.megatron._queries import (
    CkptShardedMetadata,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    registered_strategy,
    remove_sharded_tensors,
)
from distckpt.megatron._verbs import load, save
from distckpt.megatron.strategies.common import COMMON_STATE_FNAME as COMMON_STATE_FNAME
from distckpt.megatron.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from distckpt.strategies.base import (
    LoadShardedStrategy,
    SaveShardedStrategy,
    choose_save_strategy,
)

__all__ = [
    "CkptShardedMetadata",
    "CommonStateDict",
    "ShardedStateDict",
    "StateDict",
    "get_default_load_sharded_strategy",
    "get_default_save_sharded_strategy",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]

set_public_home(globals())

logger = logging.getLogger(__name__)


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

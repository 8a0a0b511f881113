"""Megatron Core's `dist_checkpointing`: its paths, names and arguments, with distckpt behind them.

A program for Megatron Core changes one import and nothing else:

    # was: from megatron.core import dist_checkpointing
    from distckpt import megatron as dist_checkpointing

    dist_checkpointing.save(sharded_state_dict, checkpoint_dir, async_sharded_save=True)
"""

from typing import TYPE_CHECKING

from distckpt.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from distckpt.megatron._forwarding import import_submodules
from distckpt.megatron.core import check_is_distributed_checkpoint
from distckpt.megatron.serialization import (
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)

__all__ = [
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedTensor",
    "check_is_distributed_checkpoint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]

if not TYPE_CHECKING:  # else a type checker believes that the package has every name
    __getattr__ = import_submodules(__name__)

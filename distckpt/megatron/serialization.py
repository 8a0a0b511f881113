"""Saving, loading and reading metadata, as Megatron Core names them.

The names belong to its `dist_checkpointing.serialization`.
"""

import logging

from distckpt._base.public import set_public_home
from distckpt.mapping._wrappers import CommonStateDict, ShardedStateDict, StateDict
from distckpt.megatron._impl.common import COMMON_STATE_FNAME as COMMON_STATE_FNAME
from distckpt.megatron._impl.default_strategies import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from distckpt.megatron._impl.queries import (
    CkptShardedMetadata,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
)
from distckpt.megatron._impl.serialization import load, save

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

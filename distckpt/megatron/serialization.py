"""Saving, loading, exporting and reading metadata, under the names of Megatron Core's
`dist_checkpointing`.
"""

from typing import TypeAlias

from distckpt._base.public import set_public_home
from distckpt._base.reports import LoadReport, SaveReport
from distckpt._mapping.wrappers import (
    CommonStateDict,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from distckpt._operations.async_save import async_save, reserve_staging_memory
from distckpt._operations.background_save import SaveHandle, release_staging_memory
from distckpt._operations.consolidate import ExportReport, consolidate
from distckpt._operations.load import load
from distckpt._operations.merge import merge
from distckpt._operations.queries import (
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
)
from distckpt._operations.save import save
from distckpt.strategies.base import ParallelLoad, Verify
from distckpt.strategies.defaults import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)

CkptShardedMetadata: TypeAlias = dict[str, ShardedTensor | ShardedObject]

__all__ = [
    "CkptShardedMetadata",
    "CommonStateDict",
    "ExportReport",
    "LoadReport",
    "ParallelLoad",
    "SaveHandle",
    "SaveReport",
    "ShardedStateDict",
    "StateDict",
    "Verify",
    "async_save",
    "consolidate",
    "get_default_load_sharded_strategy",
    "get_default_save_sharded_strategy",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "merge",
    "release_staging_memory",
    "remove_sharded_tensors",
    "reserve_staging_memory",
    "save",
]

set_public_home(globals())

"""distckpt: checkpoints for models trained on many processes.

Save under one parallel layout, load under any other; every byte written once, as safetensors, with checksums.
"""

from distckpt._codec import register_object_type
from distckpt._verify import VerifyReport, verify
from distckpt.core import (
    CheckpointExistsError,
    CheckpointingConfig,
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidShardingError,
    LoadMismatchError,
    RankFailedError,
    UnsupportedObjectError,
    check_is_distributed_checkpoint,
)
from distckpt.manager import CheckpointManager, PreemptionGuard
from distckpt.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from distckpt.serialization import (
    ExportReport,
    LoadReport,
    SaveHandle,
    SaveReport,
    async_save,
    consolidate,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    release_staging_memory,
    remove_sharded_tensors,
    save,
)
from distckpt.validation import StrictHandling

__version__ = "0.1.0"

__all__ = [
    "CheckpointExistsError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointingConfig",
    "CheckpointingException",
    "CorruptCheckpointError",
    "ExportReport",
    "InvalidShardingError",
    "LoadMismatchError",
    "LoadReport",
    "LocalNonpersistentObject",
    "PreemptionGuard",
    "RankFailedError",
    "SaveHandle",
    "SaveReport",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StrictHandling",
    "UnsupportedObjectError",
    "VerifyReport",
    "async_save",
    "check_is_distributed_checkpoint",
    "consolidate",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "register_object_type",
    "release_staging_memory",
    "remove_sharded_tensors",
    "save",
    "verify",
]

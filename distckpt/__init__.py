"""distckpt: checkpoints for models trained on many processes.

Save under one parallel layout, load under any other; every byte written once, as safetensors, with checksums.
"""

from distckpt._codec import register_object_type
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
from distckpt.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from distckpt.serialization import (
    ExportReport,
    consolidate,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)
from distckpt.validation import StrictHandling

__version__ = "0.1.0"

__all__ = [
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointingConfig",
    "CheckpointingException",
    "CorruptCheckpointError",
    "ExportReport",
    "InvalidShardingError",
    "LoadMismatchError",
    "LocalNonpersistentObject",
    "RankFailedError",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StrictHandling",
    "UnsupportedObjectError",
    "check_is_distributed_checkpoint",
    "consolidate",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "register_object_type",
    "remove_sharded_tensors",
    "save",
]

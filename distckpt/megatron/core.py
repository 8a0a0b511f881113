"""Errors and the marker file, under Megatron Core's `dist_checkpointing.core` names."""

from distckpt._base.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidShardingError,
    LoadMismatchError,
    RankFailedError,
    UnsupportedObjectError,
)
from distckpt._base.public import set_public_home
from distckpt._format.marker import (
    CONFIG_FNAME,
    CheckpointingConfig,
    check_is_distributed_checkpoint,
    file_size,
    maybe_load_config,
    parse_config,
    read_file,
    read_marker,
    save_config,
    write_marker,
)

__all__ = [
    "CONFIG_FNAME",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointingConfig",
    "CheckpointingException",
    "CorruptCheckpointError",
    "InvalidShardingError",
    "LoadMismatchError",
    "RankFailedError",
    "UnsupportedObjectError",
    "check_is_distributed_checkpoint",
    "file_size",
    "maybe_load_config",
    "parse_config",
    "read_file",
    "read_marker",
    "save_config",
    "write_marker",
]

set_public_home(globals())

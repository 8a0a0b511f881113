"""Errors and the marker file of a checkpoint, under the names of Megatron Core's `dist_checkpointing.core`."""

from distckpt._base.errors import (
    CheckpointExistsError as CheckpointExistsError,
)
from distckpt._base.errors import (
    CheckpointingException as CheckpointingException,
)
from distckpt._base.errors import (
    CheckpointNotFoundError as CheckpointNotFoundError,
)
from distckpt._base.errors import (
    CorruptCheckpointError as CorruptCheckpointError,
)
from distckpt._base.errors import (
    InvalidShardingError as InvalidShardingError,
)
from distckpt._base.errors import (
    LoadMismatchError as LoadMismatchError,
)
from distckpt._base.errors import (
    RankFailedError as RankFailedError,
)
from distckpt._base.errors import (
    UnsupportedObjectError as UnsupportedObjectError,
)
from distckpt._format.marker import (
    CONFIG_FNAME as CONFIG_FNAME,
)
from distckpt._format.marker import (
    CheckpointingConfig as CheckpointingConfig,
)
from distckpt._format.marker import (
    check_is_distributed_checkpoint as check_is_distributed_checkpoint,
)
from distckpt._format.marker import (
    file_size as file_size,
)
from distckpt._format.marker import (
    maybe_load_config as maybe_load_config,
)
from distckpt._format.marker import (
    parse_config as parse_config,
)
from distckpt._format.marker import (
    read_file as read_file,
)
from distckpt._format.marker import (
    read_marker as read_marker,
)
from distckpt._format.marker import (
    save_config as save_config,
)
from distckpt._format.marker import (
    write_marker as write_marker,
)

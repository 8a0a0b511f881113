"""distckpt: checkpoints for models trained on many processes.

Save under one parallel layout, load under any other; every byte written once, as safetensors, with
checksums.

Nothing is loaded before it is used, so that `import distckpt` takes no time that a process does not
need.
"""

from __future__ import annotations

import importlib
import sys as _sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from distckpt._format.codec import UnknownObject, register_object_type
    from distckpt._format.marker import CheckpointingConfig, check_is_distributed_checkpoint
    from distckpt._manager.manager import (
        CheckpointInfo,
        CheckpointManager,
        PreemptionGuard,
        list_checkpoints,
    )
    from distckpt._mapping.wrappers import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
    )
    from distckpt._megatron.validation import StrictHandling
    from distckpt._models.per_rank import PerRank
    from distckpt._models.random_state import RngState
    from distckpt._operations.async_save import async_save, reserve_staging_memory
    from distckpt._operations.background_save import SaveHandle, release_staging_memory
    from distckpt._operations.consolidate import ExportReport, consolidate
    from distckpt._operations.diff import DiffReport, diff
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
    from distckpt._operations.reshard import ReshardReport, reshard
    from distckpt._operations.save import save
    from distckpt._operations.verify import VerifyReport, verify
    from distckpt._ranks.report import LoadReport, SaveReport

if _sys.platform == "win32":
    raise ImportError(
        "distckpt does not run on Windows: use it on Linux, or in WSL (the Windows Subsystem for "
        "Linux)"
    )

__version__ = "0.1.0"

__all__ = [
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointingConfig",
    "CheckpointingException",
    "CorruptCheckpointError",
    "DiffReport",
    "ExportReport",
    "InvalidShardingError",
    "LoadMismatchError",
    "LoadReport",
    "LocalNonpersistentObject",
    "PerRank",
    "PreemptionGuard",
    "RankFailedError",
    "ReshardReport",
    "RngState",
    "SaveHandle",
    "SaveReport",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StrictHandling",
    "UnknownObject",
    "UnsupportedObjectError",
    "VerifyReport",
    "async_save",
    "check_is_distributed_checkpoint",
    "consolidate",
    "diff",
    "list_checkpoints",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "merge",
    "register_object_type",
    "release_staging_memory",
    "remove_sharded_tensors",
    "reserve_staging_memory",
    "reshard",
    "save",
    "verify",
]

_HOMES = (
    "_base.errors",
    "_format.marker",
    "mapping",
    "_format.codec",
    "_models.per_rank",
    "_models.random_state",
    "_operations.save",
    "_operations.load",
    "_operations.async_save",
    "_operations.background_save",
    "_operations.consolidate",
    "_operations.merge",
    "_operations.queries",
    "_operations.verify",
    "_state.strictness",
    "manager",
    "_operations.diff",
    "_operations.reshard",
)
"""Modules that define public names, from low to high: to import one is to have imported most of
those before it.
"""

if not TYPE_CHECKING:  # else a type checker believes that the package has every name

    def __getattr__(name: str) -> Any:
        if name in __all__:
            modules = (importlib.import_module(f"{__name__}.{home}") for home in _HOMES)
            globals()[name] = value = next(
                getattr(module, name) for module in modules if hasattr(module, name)
            )
            importlib.import_module("distckpt._base.public").give_home(value, __name__)
            return value
        full_name = f"{__name__}.{name}"
        try:
            return importlib.import_module(full_name)
        except ModuleNotFoundError as error:
            if error.name != full_name:
                raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

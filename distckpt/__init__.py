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
    from distckpt._base.options import (
        ExportOptions,
        LoadOptions,
        LoadReport,
        MoveOptions,
        MoveReport,
        SaveOptions,
        SaveReport,
    )
    from distckpt._base.version import __version__ as __version__
    from distckpt._compute.merge import merge
    from distckpt._format.codec import register_object_type
    from distckpt._format.codec.encode import UnknownObject
    from distckpt._format.fingerprint import Fingerprint
    from distckpt._models.per_rank import PerRank, RngState
    from distckpt._move.record_loader import record_loader
    from distckpt._move.redistribute import redistribute
    from distckpt._move.route import Route
    from distckpt._operations.background_save import (
        SaveHandle,
        async_save,
        release_staging_memory,
        reserve_staging_memory,
    )
    from distckpt._operations.checkpoint import Checkpoint, TensorInfo, open
    from distckpt._operations.consolidate import ExportReport, consolidate
    from distckpt._operations.fingerprint import fingerprint
    from distckpt._operations.load import load
    from distckpt._operations.save import save
    from distckpt._operations.verify import VerifyReport, verify
    from distckpt._tools.diff import DiffReport, diff
    from distckpt._tools.reshard import ReshardReport, reshard
    from distckpt._tools.seal import SealReport, seal
    from distckpt.manager._checkpoint_manager import CheckpointManager
    from distckpt.manager._listing import CheckpointInfo, list_checkpoints
    from distckpt.manager._preemption import PreemptionGuard
    from distckpt.mapping._sharded_tensor import ShardedTensor
    from distckpt.mapping._wrappers import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensorFactory,
    )

if _sys.platform == "win32":
    raise ImportError(
        "distckpt does not run on Windows: use it on Linux, or in WSL (the Windows Subsystem for "
        "Linux)"
    )

__all__ = [
    "Checkpoint",
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointingException",
    "CorruptCheckpointError",
    "DiffReport",
    "ExportOptions",
    "ExportReport",
    "Fingerprint",
    "InvalidShardingError",
    "LoadMismatchError",
    "LoadOptions",
    "LoadReport",
    "LocalNonpersistentObject",
    "MoveOptions",
    "MoveReport",
    "PerRank",
    "PreemptionGuard",
    "RankFailedError",
    "ReshardReport",
    "RngState",
    "Route",
    "SaveHandle",
    "SaveOptions",
    "SaveReport",
    "SealReport",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "TensorInfo",
    "UnknownObject",
    "UnsupportedObjectError",
    "VerifyReport",
    "async_save",
    "consolidate",
    "diff",
    "fingerprint",
    "list_checkpoints",
    "load",
    "merge",
    "open",
    "record_loader",
    "redistribute",
    "register_object_type",
    "release_staging_memory",
    "reserve_staging_memory",
    "reshard",
    "save",
    "seal",
    "verify",
]

_HOMES = {
    "__version__": "_base.version",
    "CheckpointExistsError": "_base.errors",
    "CheckpointNotFoundError": "_base.errors",
    "CheckpointingException": "_base.errors",
    "CorruptCheckpointError": "_base.errors",
    "InvalidShardingError": "_base.errors",
    "LoadMismatchError": "_base.errors",
    "RankFailedError": "_base.errors",
    "UnsupportedObjectError": "_base.errors",
    "ExportOptions": "_base.options",
    "LoadOptions": "_base.options",
    "MoveOptions": "_base.options",
    "SaveOptions": "_base.options",
    "UnknownObject": "_format.codec.encode",
    "register_object_type": "_format.codec",
    "CheckpointInfo": "manager._listing",
    "CheckpointManager": "manager._checkpoint_manager",
    "PreemptionGuard": "manager._preemption",
    "list_checkpoints": "manager._listing",
    "LocalNonpersistentObject": "mapping._wrappers",
    "ShardedObject": "mapping._wrappers",
    "ShardedTensor": "mapping._sharded_tensor",
    "ShardedTensorFactory": "mapping._wrappers",
    "PerRank": "_models.per_rank",
    "RngState": "_models.per_rank",
    "async_save": "_operations.background_save",
    "reserve_staging_memory": "_operations.background_save",
    "SaveHandle": "_operations.background_save",
    "release_staging_memory": "_operations.background_save",
    "Checkpoint": "_operations.checkpoint",
    "TensorInfo": "_operations.checkpoint",
    "open": "_operations.checkpoint",
    "ExportReport": "_operations.consolidate",
    "consolidate": "_operations.consolidate",
    "DiffReport": "_tools.diff",
    "diff": "_tools.diff",
    "Fingerprint": "_format.fingerprint",
    "fingerprint": "_operations.fingerprint",
    "load": "_operations.load",
    "merge": "_compute.merge",
    "redistribute": "_move.redistribute",
    "ReshardReport": "_tools.reshard",
    "record_loader": "_move.record_loader",
    "reshard": "_tools.reshard",
    "Route": "_move.route",
    "save": "_operations.save",
    "SealReport": "_tools.seal",
    "seal": "_tools.seal",
    "VerifyReport": "_operations.verify",
    "verify": "_operations.verify",
    "LoadReport": "_base.options",
    "MoveReport": "_base.options",
    "SaveReport": "_base.options",
}
"""Modules that define the public names, imported on first use."""

if not TYPE_CHECKING:  # else a type checker believes that the package has every name

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            from distckpt._base.interrupts import paused_garbage_collection
            from distckpt._base.public import give_home

            with paused_garbage_collection():
                module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
            globals()[name] = value = getattr(module, name)
            give_home(value, __name__)
            return value
        full_name = f"{__name__}.{name}"
        try:
            return importlib.import_module(full_name)
        except ModuleNotFoundError as error:
            if error.name != full_name:
                raise
        from distckpt._base.public import used_here

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{used_here(name)}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

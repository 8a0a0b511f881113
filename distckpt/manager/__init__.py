"""Manage the checkpoints of a training run in one directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distckpt._base.public import first_use

if TYPE_CHECKING:
    from distckpt.manager._checkpoint_manager import CheckpointManager
    from distckpt.manager._listing import CheckpointInfo, list_checkpoints
    from distckpt.manager._preemption import PreemptionGuard
    from distckpt.manager._tiers._run_files import StepState

__all__ = [
    "CheckpointInfo",
    "CheckpointManager",
    "PreemptionGuard",
    "StepState",
    "list_checkpoints",
]

if not TYPE_CHECKING:  # else a type checker believes that the package has every name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Imported when it is needed: other modules of the package need one of these files.
        from distckpt.manager import _checkpoint_manager, _listing, _preemption
        from distckpt.manager._tiers import _run_files

        return first_use(name, globals(), _checkpoint_manager, _listing, _preemption, _run_files)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

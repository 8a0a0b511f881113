"""Manage the checkpoints of a training run in one directory."""

from distckpt._base.public import set_public_home
from distckpt._manager.manager import (
    CheckpointInfo,
    CheckpointManager,
    PreemptionGuard,
    list_checkpoints,
)

__all__ = [
    "CheckpointInfo",
    "CheckpointManager",
    "PreemptionGuard",
    "list_checkpoints",
]

set_public_home(globals())

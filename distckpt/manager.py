"""Manage the checkpoints of a training run in one directory."""

from distckpt._base.public import set_public_home
from distckpt._manager.listing import CheckpointInfo, list_checkpoints
from distckpt._manager.manager import CheckpointManager
from distckpt._manager.preemption import PreemptionGuard

__all__ = [
    "CheckpointInfo",
    "CheckpointManager",
    "PreemptionGuard",
    "list_checkpoints",
]

set_public_home(globals())

"""The functions of `torch.distributed.checkpoint`: a program changes its import and nothing else.

    import distckpt.dcp as dcp  # was: import torch.distributed.checkpoint as dcp

    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id="checkpoints/step_100")
    dcp.load({"app": AppState(model, optimizer)}, checkpoint_id="checkpoints/step_100")

Checkpoints are distckpt's own: tensors are stored under the dotted keys that PyTorch gives them,
other values as common state at their places in the nested dict. `load` also reads checkpoints that
PyTorch wrote. `docs/migrating-from-dcp.md` lists the differences.
"""

from __future__ import annotations

from typing import Any

from distckpt._base.public import set_public_home
from distckpt.dcp._load import load
from distckpt.dcp._names import torch_name
from distckpt.dcp._save import async_save, save

__all__ = ["async_save", "load", "save"]

set_public_home(globals())


def __getattr__(name: str) -> Any:
    return torch_name(name)

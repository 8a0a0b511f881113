"""Modules that are imported at their first use.

`import torch` takes seconds, which listing and inspecting checkpoints need not wait for. Modules
that they import get torch from here:

from distckpt._base.lazy import torch
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from distckpt._base.interrupts import paused_garbage_collection


class LazyModule:
    """A module that is imported at the first use of its names."""

    __slots__ = ("__dict__", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._imported(), name)

    def __dir__(self) -> list[str]:
        return dir(self._imported())

    def _imported(self) -> ModuleType:
        with paused_garbage_collection():
            module = importlib.import_module(self._name)
        # From now on its names are attributes of this object, as fast as in the module.
        self.__dict__ = module.__dict__
        return module


if TYPE_CHECKING:
    import torch as torch
else:
    torch = LazyModule("torch")

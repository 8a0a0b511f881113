"""Modules and tables that are imported, or made, at their first use.

`import torch` takes seconds, which listing and inspecting checkpoints need not wait for. Modules
that they import get torch from here:

from distckpt._base.lazy import torch
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from distckpt._base.interrupts import paused_garbage_collection

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


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


class LazyTable(Mapping[_Key, _Value]):
    """A table that is made when it is first looked at."""

    def __init__(self, make: Callable[[], dict[_Key, _Value]]) -> None:
        self._make = make

    @functools.cached_property
    def _table(self) -> dict[_Key, _Value]:
        return self._make()

    def __getitem__(self, key: _Key) -> _Value:
        return self._table[key]

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

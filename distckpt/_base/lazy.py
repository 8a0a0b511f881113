"""What is imported, or made, when it is first used.

`import torch` takes seconds, which listing and inspecting checkpoints need not wait for. Modules
that they import get torch from here:

    from distckpt._base.lazy import torch
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from distckpt._base.garbage import paused_garbage_collection

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class LazyModule:
    """A module that is imported when a name in it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(_imported(self._name), name)

    def __dir__(self) -> list[str]:
        return dir(_imported(self._name))


@functools.cache
def _imported(name: str) -> Any:
    with paused_garbage_collection():
        return importlib.import_module(name)


if TYPE_CHECKING:
    import torch as torch
else:
    torch = LazyModule("torch")


class LazyTable(Mapping[_Key, _Value]):
    """A table that is made when it is first looked at."""

    def __init__(self, make: Callable[[], dict[_Key, _Value]]) -> None:
        self._table = functools.cache(make)

    def __getitem__(self, key: _Key) -> _Value:
        return self._table()[key]

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._table())

    def __len__(self) -> int:
        return len(self._table())

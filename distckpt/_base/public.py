"""Public names that tell their public module."""

from __future__ import annotations

import typing
from collections.abc import MutableMapping
from typing import Any


def set_public_home(module: MutableMapping[str, Any]) -> None:
    """Set the `__module__` of a public module's names to it.

    This concerns the names in its `__all__` that a private module defines. Call it with `globals()`
    below the imports. The first public module that lists a name is its home.
    """
    for name in module["__all__"]:
        give_home(module.get(name), module["__name__"])


def give_home(value: Any, home: str) -> None:
    """Set `home` as the module of a value from a private module.

    Tracebacks, `help()` and pickles then show the name that programs import.
    """
    if "._" not in getattr(value, "__module__", ""):
        return
    if isinstance(value, type):
        # `typing.get_type_hints` would look up the names in them in the new home.
        hints = typing.get_type_hints(value)
        value.__annotations__ = {
            name: hints[name] for name in vars(value).get("__annotations__", ())
        }
    value.__module__ = home

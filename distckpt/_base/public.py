"""Public names say which public module they are imported from."""

from __future__ import annotations

import typing
from collections.abc import MutableMapping
from typing import Any


def set_public_home(module: MutableMapping[str, Any]) -> None:
    """Make what a public module lists in `__all__` and a private one defines name the public one as
    its `__module__`.

    Call it with `globals()` below the imports; the first public module that lists a name is its
    home.
    """
    for name in module["__all__"]:
        give_home(module.get(name), module["__name__"])


def give_home(value: Any, home: str) -> None:
    """Make what a private module defines name `home`; tracebacks, `help()` and pickles show what
    programs import.
    """
    if "._" not in getattr(value, "__module__", ""):
        return
    if isinstance(value, type):
        # `typing.get_type_hints` would look the names in them up in the new home.
        hints = typing.get_type_hints(value)
        value.__annotations__ = {
            name: hints[name] for name in vars(value).get("__annotations__", ())
        }
    value.__module__ = home

"""Public names say which public module they are imported from."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any


def set_public_home(module: MutableMapping[str, Any]) -> None:
    """Make what a public module lists in `__all__` and a private one defines name the public one as its `__module__`.

    Tracebacks, `help()` and pickles then show the path that programs import. Call it with `globals()` below the
    imports; the first public module that lists a name is its home.
    """
    for name in module["__all__"]:
        if "._" in getattr(module.get(name), "__module__", ""):
            module[name].__module__ = module["__name__"]

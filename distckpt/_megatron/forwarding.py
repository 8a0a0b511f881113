"""Names that are taken from the installed Megatron Core: they concern its own files, or state dicts
in memory.

Nothing of Megatron is imported before such a name is used.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._mapping.base import ShardedBase
from distckpt._mapping.wrappers import LocalNonpersistentObject
from distckpt._megatron.dict_utils import nested_values


def forward(path: str, *names: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for the module `distckpt.<path>` that takes some names from Megatron's
    of that path.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module 'distckpt.{path}' has no attribute {name!r}")
        return installed(path, name)

    return get


def import_submodules(package: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package whose modules are there without an import of each, as
    those of Megatron are.
    """

    def get(name: str) -> Any:
        full_name = f"{package}.{name}"
        try:
            return importlib.import_module(full_name)
        except ModuleNotFoundError as error:
            if error.name != full_name:
                raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


def installed(path: str, name: str) -> Any:
    """Return a name of the installed `megatron.core.dist_checkpointing.<path>`.

    Raises:
        ImportError: Megatron Core is not installed, or this version has no such name.
    """
    try:
        module = importlib.import_module(f"megatron.core.dist_checkpointing.{path}")
        if module.__name__.startswith("distckpt."):
            raise ImportError("the module of that name is distckpt's")
        value = getattr(module, name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{name!r} of distckpt.{path} is Megatron's own, and the installed Megatron Core does "
            f"not have it: {error}. Install a version of megatron-core that has it, with the "
            "packages that it needs."
        ) from error
    return _refusing_others(value, path) if inspect.isfunction(value) else value


def _refusing_others(function: Callable[..., Any], path: str) -> Callable[..., Any]:
    """Let a function of Megatron refuse objects of distckpt, with which it would do nothing."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            refuse_own_objects(given, f"{path}.{function.__name__}")
        return function(*args, **kwargs)

    return call


def refuse_own_objects(given: Any, name: str) -> None:
    """Raise CheckpointingException where a state dict for Megatron's own function holds objects of
    distckpt.
    """
    values = nested_values(given) if isinstance(given, dict | list) else ()
    if any(isinstance(value, ShardedBase | LocalNonpersistentObject) for value in values):
        raise CheckpointingException(
            f"{name} is Megatron's own, and takes state dicts of Megatron's objects. This one "
            "holds objects of distckpt, which it would not recognize."
        )

"""Names from the installed Megatron Core, for its files or state dicts.

Nothing of Megatron is imported before such a name is used.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from distckpt._base.errors import CheckpointingException, megatron_error
from distckpt._state.flatten import adopt
from distckpt._state.strictness import StrictHandling
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensorFactory,
)
from distckpt.megatron.dict_utils import dict_list_map_outplace, nested_values


def forward(path: str, *names: str) -> Callable[[str], Any]:
    """Return a `__getattr__` that takes some names from Megatron.

    It is for the module `distckpt.<path>`, and Megatron's of that path.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module 'distckpt.{path}' has no attribute {name!r}")
        return installed(path, name)

    return get


def import_submodules(package: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports its modules on use.

    Megatron's modules are there without an import of each, too.
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
    if inspect.isfunction(value):
        return taking_ours(value, f"{path}.{name}")
    return value


def taking_ours(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Let a function of Megatron take distckpt's objects, raising distckpt's errors."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        theirs = [_as_megatron(value, name) for value in values]
        named = dict(zip(kwargs, theirs[len(args) :], strict=True))
        try:
            result = function(*theirs[: len(args)], **named)
        except Exception as error:
            if isinstance(error, megatron_error() or ()):
                raise CheckpointingException(str(error)) from error
            raise
        if result is None:
            # It works in place.
            for value, changed in zip(values, theirs, strict=True):
                if value is not changed and isinstance(value, dict):
                    value.clear()
                    value.update(dict_list_map_outplace(adopt, changed))
        return result

    return call


def _as_megatron(value: Any, name: str) -> Any:
    """Return an argument with Megatron's objects instead of distckpt's.

    `name` is Megatron's function. Without any such object, it is the same value.

    Raises:
        CheckpointingException: it holds flattened shards, which Megatron has no more.
    """
    if isinstance(value, StrictHandling):
        return installed("validation", "StrictHandling")(value.value)
    if isinstance(value, dict | list) and any(map(_is_ours, nested_values(value))):
        return dict_list_map_outplace(functools.partial(_to_theirs, name=name), value)
    return _to_theirs(value, name)


_OURS = (LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory)


def _is_ours(value: Any) -> bool:
    # Megatron's objects are instances, too.
    return issubclass(type(value), _OURS)


def _to_theirs(value: Any, name: str) -> Any:
    if not _is_ours(value):
        return value
    if getattr(value, "flattened_range", None) is not None:
        raise CheckpointingException(
            f"{name} is Megatron's own, which has no flattened shards: {value.key!r} is one. "
            "Use save and load of distckpt.megatron for them."
        )
    (kind,) = [kind for kind in _OURS if isinstance(value, kind)]
    made = object.__new__(installed("mapping", kind.__name__))
    vars(made).update(vars(value))
    if kind is ShardedTensorFactory:

        def build(*args: Any) -> Any:
            return _as_megatron(value.build_fn(*args), name)

        made.build_fn = build
    return made

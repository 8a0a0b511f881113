"""Classes that the program registered with the codec; how enums, dataclasses and namedtuples are taken apart."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from distckpt._format.codec.tree import require, type_name


class Registration(NamedTuple):
    """A registered class, its name in checkpoints, and its way to a state that can be stored and back."""

    cls: type
    name: str
    to_state: Callable[[Any], object]
    from_state: Callable[[Any], object]


REGISTERED: dict[type, Registration] = {}
REGISTERED_NAMES: dict[str, Registration] = {}
"""The same registrations under their names. `register_object_type` of `_codec` fills both."""


def default_functions(cls: Any) -> tuple[Callable[[Any], object], Callable[[Any], object]]:
    """Return to_state and from_state of an Enum class, dataclass or namedtuple class; TypeError for another class."""
    if issubclass(cls, enum.Flag):
        return (lambda member: member.value), cls
    if issubclass(cls, enum.Enum):
        return (lambda member: member.name), lambda name: cls[name]
    if "__dataclass_fields__" in vars(cls):
        return _dataclass_functions(cls)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return _namedtuple_functions(cls)
    raise TypeError(
        f"{type_name(cls)} is no Enum class, dataclass or namedtuple class: give to_state, which turns an object "
        "into one that can be stored, and from_state, which turns it back"
    )


def _dataclass_functions(cls: Any) -> tuple[Callable[[Any], object], Callable[[Any], object]]:
    fields = dataclasses.fields(cls)
    names = [field.name for field in fields]
    factories = {f.name: f.default_factory for f in fields if f.default_factory is not dataclasses.MISSING}
    defaults = {f.name: (lambda f=f: f.default) for f in fields if f.default is not dataclasses.MISSING}

    def rebuild(state: types.SimpleNamespace) -> object:
        obj = object.__new__(cls)
        for name, value in _fill(names, {**defaults, **factories}, state).items():
            object.__setattr__(obj, name, value)  # Frozen dataclasses refuse setattr.
        return obj

    return (lambda obj: types.SimpleNamespace(**{name: getattr(obj, name) for name in names})), rebuild


def _namedtuple_functions(cls: Any) -> tuple[Callable[[Any], object], Callable[[Any], object]]:
    defaults = {name: (lambda value=value: value) for name, value in cls._field_defaults.items()}

    def rebuild(state: types.SimpleNamespace) -> object:
        return cls._make(_fill(cls._fields, defaults, state).values())

    return (lambda obj: types.SimpleNamespace(**dict(zip(cls._fields, obj, strict=True)))), rebuild


def _fill(names: Sequence[str], defaults: Mapping[str, Callable[[], object]], state: Any) -> dict[str, object]:
    stored = vars(state)
    unknown = [name for name in stored if name not in names]
    missing = [name for name in names if name not in stored and name not in defaults]
    require(not unknown and not missing, f"stored fields without a place: {unknown}; not stored: {missing}")
    return {name: stored[name] if name in stored else defaults[name]() for name in names}

"""The tree that the codec writes and reads: its vocabulary and its limits.

Also the classes that programs register, and texts about the others.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import enum
import functools
import json
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from distckpt._base.dtypes import LazyTable
from distckpt._base.errors import UnsupportedObjectError
from distckpt._base.lazy import torch

MAX_DEPTH = 128
"""Containers inside one another. Each takes up to four nested calls, of which Python allows 1000 by
default.
"""

ITEM = "[{}]"
"""Form of the step into an item of a container, in messages."""

Json = Any
Raw = bytes | bytearray | memoryview


_FACTORIES = (
    *(bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple),
    *(collections.Counter, collections.OrderedDict, collections.deque),
)
FACTORIES: dict[str | None, type | None] = {None: None}
FACTORIES |= {cls.__name__: cls for cls in _FACTORIES}
PATHS: dict[str, type[pathlib.PurePath]] = {
    cls.__name__: cls
    for cls in (
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
        pathlib.PosixPath,
        pathlib.WindowsPath,
    )
}

DTYPES: Mapping[str, torch.dtype] = LazyTable(
    lambda: {
        str(value).removeprefix("torch."): value
        for value in map(functools.partial(getattr, torch), dir(torch))
        if isinstance(value, torch.dtype)
    }
)
TENSOR_DTYPES: Mapping[str, torch.dtype] = LazyTable(
    lambda: {
        name: dtype
        for name, dtype in DTYPES.items()
        if re.fullmatch(r"bool|u?int(8|16|32|64)|b?float\d+(_\w+)?|b?complex\d+", name)
    }
)
"""Dtypes with ordinary items, without quantized and sub-byte integer types."""


def is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    """Return whether items mean the same on every machine.

    `dtype.str` must describe them fully.
    """
    ordinary = (
        dtype.kind in "biufcSUVmM"
        and dtype.char not in "gG"
        and dtype.names is None
        and dtype.itemsize > 0
    )
    return bool(ordinary and np.dtype(dtype.str) == dtype)


def to_text(tree: Json) -> str:
    """Write a tree as JSON, dicts in their own order."""
    # Cycles were found before.
    return json.dumps(
        tree, ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
    )


def entry_name(number: object) -> str:
    """Name the entry that the tree refers to by a number."""
    return f"{number:08}"


def is_tagged(node: Mapping[str, object]) -> bool:
    """Return whether a JSON object is `{"$<kind>": <payload>}`; dicts that look so are stored as
    pairs.
    """
    return len(node) == 1 and next(iter(node)).startswith("$")


def type_name(cls: type) -> str:
    """Return the name of a class with its module, unless builtin."""
    if cls.__module__ == "builtins":
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


class Registration(NamedTuple):
    """A registered class, its stored name, and its conversion functions.

    The functions turn its objects into states and back.
    """

    cls: type
    name: str
    to_state: Callable[[Any], object]
    from_state: Callable[[Any], object]


_PROGRAMS = ("__main__", "__mp_main__")
"""Modules whose classes another program does not find."""
REGISTERED: dict[type, Registration] = {}
REGISTERED_NAMES: dict[str, Registration] = {}
"""The same registrations by name. `register_object_type` fills both."""


def registration_of(cls: Any) -> Registration | None:
    """Return how objects of a class are stored; None for a class that is not registered.

    IntEnum classes, and the Enum classes, dataclasses and namedtuple classes of Megatron's packages
    are registered when they are first used.
    """
    if cls not in REGISTERED:
        name = type_name(cls)
        if name not in REGISTERED_NAMES and _imported(name) is cls:
            with contextlib.suppress(TypeError):
                REGISTERED[cls] = REGISTERED_NAMES[name] = Registration(
                    cls, name, *default_functions(cls)
                )
    return REGISTERED.get(cls)


def registration_named(name: Any) -> Registration | None:
    """Return how objects of the class with a name are stored; None if there is no such class."""
    if name not in REGISTERED_NAMES and (cls := _imported(name)) is not None:
        registration_of(cls)
    return REGISTERED_NAMES.get(name)


def _imported(name: Any) -> Any:
    """Return a class that needs no registration, from an imported module.

    None if there is none.
    """
    parts = name.split(".") if type(name) is str else []
    for count in range(len(parts) - 1, 0, -1):
        value: Any = sys.modules.get(".".join(parts[:count]))
        if value is None or value.__name__ in _PROGRAMS:
            continue
        for part in parts[count:]:
            # Not getattr, which may run code of the module.
            value = vars(value).get(part) if isinstance(value, types.ModuleType | type) else None
        is_class = isinstance(value, type) and type_name(value) == name
        return value if is_class and _needs_no_registration(value) else None
    return None


def _needs_no_registration(cls: type) -> bool:
    return issubclass(cls, enum.IntEnum) or cls.__module__.startswith("megatron.")


_Functions = tuple[Callable[[Any], object], Callable[[Any], object]]
"""`to_state` and `from_state` of a class."""


def default_functions(cls: Any) -> _Functions:
    """Return to_state and from_state of an Enum class, dataclass or namedtuple class.

    Raises:
        TypeError: it is another class.
    """
    if issubclass(cls, enum.Flag):
        return (lambda member: member.value), cls
    if issubclass(cls, enum.Enum):
        return (lambda member: member.name), lambda name: cls[name]
    if "__dataclass_fields__" in vars(cls):
        return _functions_of_dataclass(cls)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return _functions_of_namedtuple(cls)
    raise TypeError(
        f"{type_name(cls)} is not an Enum class, dataclass or namedtuple class: give to_state, "
        "which turns an object into one that can be stored, and from_state, which turns it back"
    )


def _functions_of_dataclass(cls: Any) -> _Functions:
    fields = {field.name: field for field in dataclasses.fields(cls)}

    def default_of(name: str) -> object:
        factory = fields[name].default_factory
        return fields[name].default if factory is dataclasses.MISSING else factory()

    def rebuild(values: dict[str, object]) -> object:
        obj = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(obj, name, value)  # Frozen dataclasses refuse setattr.
        return obj

    return _functions_of_fields(list(fields), default_of, rebuild)


def _functions_of_namedtuple(cls: Any) -> _Functions:
    def default_of(name: str) -> object:
        return cls._field_defaults.get(name, dataclasses.MISSING)

    return _functions_of_fields(cls._fields, default_of, lambda values: cls._make(values.values()))


def _functions_of_fields(
    names: Sequence[str],
    default_of: Callable[[str], object],
    rebuild: Callable[[dict[str, object]], object],
) -> _Functions:
    """Return to_state and from_state of a class stored by fields.

    A field without a default has the default `MISSING`.
    """

    def to_state(obj: object) -> object:
        return types.SimpleNamespace(**{name: getattr(obj, name) for name in names})

    def from_state(state: object) -> object:
        stored = vars(state)
        fields = {}
        for name in names:
            fields[name] = stored[name] if name in stored else default_of(name)
        unknown = [name for name in stored if name not in fields]
        missing = [name for name in names if fields[name] is dataclasses.MISSING]
        if unknown or missing:
            raise ValueError(f"stored fields without a place: {unknown}; not stored: {missing}")
        return rebuild(fields)

    return to_state, from_state


def registration_call(cls: type) -> str:
    """Return the call that registers a class."""
    try:
        default_functions(cls)
        arguments = cls.__name__
    except TypeError:
        arguments = f"{cls.__name__}, to_state=..., from_state=..."
    return f"distckpt.register_object_type({arguments})"


def nodes(
    obj: object, path: tuple[object, ...] = ()
) -> Iterator[tuple[tuple[object, ...], object]]:
    """Yield an object and its content, each after its path.

    The path consists of the keys and positions that lead to it.
    """
    yield path, obj
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield from nodes(key, path)
            yield from nodes(value, (*path, key))
    elif isinstance(obj, list | tuple | collections.deque):
        for index, value in enumerate(obj):
            yield from nodes(value, (*path, index))
    elif isinstance(obj, set | frozenset):
        for value in obj:
            yield from nodes(value, path)
    elif isinstance(obj, slice):
        yield from nodes((obj.start, obj.stop, obj.step), path)
    elif isinstance(obj, argparse.Namespace | types.SimpleNamespace):
        yield from nodes(vars(obj), path)


_WALKED = (dict, list, tuple, collections.deque)


def nodes_of_any(
    obj: object, path: tuple[object, ...] = ()
) -> Iterator[tuple[tuple[object, ...], object]]:
    """Yield an object and its content, including registered objects' states.

    See `nodes`.
    """
    for place, node in nodes(obj, path):
        yield place, node
        if type(node) in REGISTERED and not isinstance(node, _WALKED):
            state: object = None
            # The state of a given object may not be complete before the load.
            with contextlib.suppress(Exception):
                state = REGISTERED[type(node)].to_state(node)
            yield from nodes_of_any(state, place)


def segment_text(template: str, value: object) -> str:
    """Return a step into a container as text."""
    try:
        return template.format(f"{value!r:.60}" if template == ITEM else value)
    except Exception:
        # Whatever the repr of a key raises, the error that is being described matters more.
        return template.format("?")


NOT_STORED = "not stored: "
"""Beginning of the name of an `UnknownObject` for a left-out value. A save has left the value out.
"""


def error_about_classes(
    refusals: Mapping[type, tuple[str, UnsupportedObjectError]],
) -> UnsupportedObjectError:
    """Return the error about one or more classes that are not registered."""
    if len(refusals) == 1:
        return next(iter(refusals.values()))[1]
    places = ", ".join(f"{where} of type {type_name(cls)}" for cls, (where, _) in refusals.items())
    calls = "; ".join(map(registration_call, refusals))
    return UnsupportedObjectError(
        f"Cannot store {places}: their classes are not registered. Register them before saving and "
        f"before loading: {calls}."
    )

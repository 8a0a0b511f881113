"""Archives of `torch.save` read as data: the places of tensors, and plain objects.

Such an archive is a zip file with the entries `<name>/data.pkl`, a pickle that refers to storages,
and `<name>/data/<n>`, the bytes of a storage.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import io
import math
import pathlib
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from distckpt._base.dtypes import LazyTable
from distckpt._base.lazy import torch
from distckpt._foreign.torch_dist.archive import Archive, ReadRange
from distckpt._foreign.torch_dist.unpickle import (
    GlobalName,
    Made,
    Record,
    check_size,
    hashable,
    made,
    read_pickle,
)
from distckpt._format.codec.tree import (
    DTYPES,
    FACTORIES,
    PATHS,
    REGISTERED,
    is_plain_dtype,
    registration_named,
)
from distckpt._geometry.region import MAX_NDIM

_MAX_READ_BYTES = 16 << 20
"""Limit of an archive's directory, and of the pickle of one tensor."""
_EXTRA_VALUES = 1_000_000
"""Most values of an object, plus four per byte of its archive."""


class _Storage(NamedTuple):
    """A storage in a pickle: its entry below `data/`, and the dtype of its items or None."""

    name: str
    dtype: torch.dtype | None


class TensorView(NamedTuple):
    """A tensor as a pickle describes it; `offset` and `strides` count items."""

    storage: _Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def locate_tensor(read_range: ReadRange, size: int) -> tuple[TensorView, int]:
    """Find the one tensor in an archive, and its first byte.

    Raises:
        ValueError: the archive holds something else.
    """

    def read_small(start: int, stop: int) -> bytes:
        if stop - start > _MAX_READ_BYTES:
            raise ValueError(f"{stop - start} bytes that describe one tensor")
        return read_range(start, stop)

    archive = Archive(read_small, size)
    view = read_pickle(
        archive.read("data.pkl"), _tensor_table(lambda view: view), persistent=_storage
    )
    if type(view) is not TensorView:
        raise ValueError(f"a {type(view).__name__} where a tensor should be")
    return view, first_byte_of(archive, view, size)


def first_byte_of(archive: Archive, view: TensorView, size: int) -> int:
    """Return a tensor's first byte in an archive of `size` bytes.

    Raises:
        ValueError: it reaches outside its storage.
    """
    start, stop = archive.span(f"data/{view.storage.name}")
    item = view.dtype.itemsize
    first = start + view.offset * item
    reach = sum((n - 1) * stride for n, stride in zip(view.shape, view.strides, strict=True)) + 1
    num_bytes = (reach if math.prod(view.shape) else 0) * item
    # Elements that repeat take no room but must be read, so there may not be more of them than the
    # archive has bytes.
    if first + num_bytes > stop or math.prod(view.shape) > size:
        raise ValueError(
            f"a tensor of shape {view.shape} and strides {view.strides} in a storage of "
            f"{stop - start} bytes"
        )
    return first


def read_views(archive: Archive) -> Any:
    """Return the object in an archive, with a `TensorView` for each tensor.

    Objects of other than plain types become `Record`s, whose kind is the name of the class.

    Raises:
        ValueError: the archive is damaged, or its object too large.
    """
    pickled = archive.read("data.pkl")
    table = _AnyTable({**_OBJECTS, **_tensor_table(lambda view: view)})
    obj = read_pickle(pickled, table, persistent=_storage, set_state=_set_state)
    check_size(obj, 4 * len(pickled) + _EXTRA_VALUES)
    return obj


def read_object(blob: bytes) -> Any:
    """Return the object that an archive holds, with tensors on the CPU.

    It is built of plain types, tensors and arrays, and of the Enum classes, dataclasses and
    namedtuple classes that the program registered with `register_object_type`.

    Raises:
        RefusedGlobalError: it needs another class or function.
        ValueError: the archive is damaged, or its object too large.
    """
    archive = Archive(lambda start, stop: blob[start:stop], len(blob))

    @functools.cache
    def items_of(name: str) -> torch.Tensor:
        start, stop = archive.span(f"data/{name}")
        return torch.from_numpy(np.frombuffer(blob[start:stop], np.uint8).copy())

    def tensor_of(view: TensorView) -> torch.Tensor:
        items = items_of(view.storage.name)
        num_items = len(items) // view.dtype.itemsize
        if math.prod(view.shape) > max(num_items, _EXTRA_VALUES):
            raise ValueError(f"a tensor of shape {view.shape} in a storage of {num_items} items")
        if not num_items and not math.prod(view.shape):
            return torch.empty(view.shape, dtype=view.dtype, device="cpu")
        flat = items[: num_items * view.dtype.itemsize].view(view.dtype)
        return flat.as_strided(view.shape, view.strides, view.offset)

    table = _Table({**_OBJECTS, **_tensor_table(tensor_of)})
    obj = read_pickle(archive.read("data.pkl"), table, persistent=_storage, set_state=_set_state)
    check_size(obj, 4 * len(blob) + _EXTRA_VALUES)
    return obj


# ---- tensors


def _storage(persistent_id: Any) -> _Storage:
    match persistent_id:
        case ("storage", (None | torch.dtype()) as dtype, str(name), _, _):
            return _Storage(name, dtype)
    raise ValueError("a persistent id that is not a storage")


STORAGE_DTYPES: Mapping[str, torch.dtype] = LazyTable(
    lambda: {
        "Bool": torch.bool,
        "Byte": torch.uint8,
        "Char": torch.int8,
        "Short": torch.int16,
        "Int": torch.int32,
        "Long": torch.int64,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Float": torch.float32,
        "Double": torch.float64,
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
    }
)
"""Dtypes whose storages have classes, by the prefix of the class name."""


def _never(*args: Any) -> Any:
    raise ValueError("this class is only named, never called, in such files")


_TENSOR_TYPES = made({("torch", "Tensor"): _never, ("torch.nn.parameter", "Parameter"): _never})


def _tensor_table(finish: Callable[[TensorView], Any]) -> dict[GlobalName, Any]:
    """Return the names allowed in a tensor's pickle, with their functions.

    `finish` makes the result of the view.
    """

    def make_typed(*args: Any) -> Any:
        return make_untyped(*args[:6], args[0].dtype, *args[6:])

    def make_untyped(*args: Any) -> Any:
        # After the strides come the requirement of a gradient and the hooks.
        storage, offset, shape, strides, _, _, dtype, *flags = args
        are_of_tensor = type(storage) is _Storage and type(dtype) is torch.dtype
        if not are_of_tensor or len(shape) != len(strides) or len(flags) > 1:
            raise ValueError("not a tensor")
        numbers = (offset, *shape, *strides)
        if len(shape) > MAX_NDIM or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
            raise ValueError("a tensor with an impossible shape or strides")
        if any(flags):
            raise ValueError(
                "a tensor with a pending conjugation or negation: save its "
                "resolve_conj().resolve_neg()"
            )
        return finish(TensorView(storage, dtype, offset, tuple(shape), tuple(strides)))

    def of_type(function: Any, tensor_type: Any, args: Any, state: Any) -> Any:
        if tensor_type not in _TENSOR_TYPES.values() or type(function) is not Made:
            raise ValueError("a subclass of torch.Tensor")
        return function.make(*args)

    functions: dict[GlobalName, Callable[..., Any]] = {
        ("torch._utils", "_rebuild_tensor_v2"): make_typed,
        ("torch._utils", "_rebuild_tensor_v3"): make_untyped,
        ("torch._utils", "_rebuild_parameter"): lambda data, grad, hooks: data,
        ("torch._utils", "_rebuild_parameter_with_state"): lambda data, grad, hooks, state: data,
        ("torch._tensor", "_rebuild_from_type_v2"): of_type,
    }
    return {**_TENSOR_GLOBALS, **made(functions)}


def _size(values: Any) -> torch.Size:
    if not all(type(n) is int for n in values):
        raise ValueError("sizes that are not integers")
    return torch.Size(values)


def _ordered_dict(pairs: Iterable[Any] = ()) -> Any:
    return collections.OrderedDict((hashable(key), value) for key, value in pairs)


_TENSOR_GLOBALS: Mapping[GlobalName, Any] = LazyTable(
    lambda: {
        **_TENSOR_TYPES,
        **{("torch", f"{name}Storage"): dtype for name, dtype in STORAGE_DTYPES.items()},
        ("torch.storage", "UntypedStorage"): None,
        **{("torch", name): dtype for name, dtype in DTYPES.items()},
        **made({("torch", "Size"): _size, ("collections", "OrderedDict"): _ordered_dict}),
    }
)


# ---- other objects


class _Array(NamedTuple):
    """An array without its content, which comes as its state."""


def _bytes_of_text(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"the encoding {encoding!r:.50}")
    return text.encode("latin-1")


def _plain_dtype(name: str, *flags: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(name) if type(name) is str else np.dtype("O")
    if not is_plain_dtype(dtype):
        raise ValueError(f"an array of {name!r:.50}")
    return dtype


def _array_scalar(dtype: Any, raw: bytes) -> Any:
    if not isinstance(dtype, np.dtype) or len(raw) != dtype.itemsize:
        raise ValueError("a scalar whose size differs from its dtype")
    return np.frombuffer(raw, dtype)[0]


def _array(state: Any) -> Any:
    _, shape, dtype, is_fortran, raw = state
    if not isinstance(dtype, np.dtype) or not isinstance(raw, bytes):
        raise ValueError("an array of objects")
    if len(shape) > MAX_NDIM or math.prod(_size(shape)) * dtype.itemsize != len(raw):
        raise ValueError("an array whose size differs from its shape")
    return np.ndarray(shape, dtype, buffer=raw, order="F" if is_fortran else "C").copy()


def _bytearray(*args: Any) -> bytearray:
    # Not bytearray itself, which takes a number for a size.
    if len(args) == 2:
        return bytearray(_bytes_of_text(*args))
    return bytearray(b"".join(bytes(memoryview(arg)) for arg in args))


def _defaultdict(factory: Any = None) -> Any:
    name = factory
    if type(factory) is Made:
        name = factory.name.rpartition(".")[2]
    # Protocol 2 gives two types the names they had in Python 2.
    return collections.defaultdict(FACTORIES[{"unicode": "str", "long": "int"}.get(name, name)])


def _path(name: str) -> Callable[..., Any]:
    # A path of another platform can be looked at but not used.
    cls = PATHS[name]
    usable = not issubclass(cls, pathlib.Path) or cls is type(pathlib.Path())
    return lambda *parts: (cls if usable else PATHS[f"Pure{name}"])(*parts)


_BUILTINS: dict[str, Callable[..., Any]] = {
    "set": lambda items=(): set(map(hashable, items)),
    "frozenset": lambda items=(): frozenset(map(hashable, items)),
    "bytearray": _bytearray,
    "bytes": lambda: b"",
    "complex": complex,
    "slice": slice,
    "range": range,
    "xrange": range,
    **dict.fromkeys(
        ("bool", "dict", "float", "int", "list", "long", "str", "tuple", "unicode"), _never
    ),
}
_NUMPY: dict[GlobalName, Callable[..., Any]] = {
    ("multiarray", "_reconstruct"): lambda cls, shape, code: _Array(),
    ("multiarray", "scalar"): _array_scalar,
    ("numeric", "_frombuffer"): lambda raw, dtype, shape, order: _array(
        (1, shape, dtype, order == "F", bytes(raw))
    ),
}
_MAKERS: dict[GlobalName, Callable[..., Any]] = {
    ("numpy", "ndarray"): _never,
    ("numpy", "dtype"): _plain_dtype,
    ("_codecs", "encode"): _bytes_of_text,
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    ("collections", "defaultdict"): _defaultdict,
    ("_io", "BytesIO"): io.BytesIO,
    ("io", "BytesIO"): io.BytesIO,
    ("torch", "device"): lambda *arguments: torch.device(*arguments),
    ("datetime", "date"): datetime.date,
    ("datetime", "datetime"): datetime.datetime,
    ("datetime", "timedelta"): datetime.timedelta,
    ("datetime", "timezone"): datetime.timezone,
}


def _make_objects() -> dict[GlobalName, Any]:
    makers = dict(_MAKERS)
    for module in ("builtins", "__builtin__"):
        for name, make in _BUILTINS.items():
            makers[module, name] = make
    for core in ("core", "_core"):
        for (submodule, name), make in _NUMPY.items():
            makers[f"numpy.{core}.{submodule}", name] = make
    for module in ("pathlib", "pathlib._local"):
        for name in PATHS:
            makers[module, name] = _path(name)
    return made(makers)


_OBJECTS = _make_objects()


class _Table(dict[GlobalName, Any]):
    """The names allowed in an object's pickle: given functions, registered classes."""

    def __missing__(self, name: GlobalName) -> Any:
        full_name = ".".join(name)
        registration_named(full_name)
        for cls in REGISTERED:
            if (cls.__module__, cls.__qualname__) == name and (make := _maker_of(cls)) is not None:
                self[name] = Made(full_name, make)
                return self[name]
        raise KeyError(name)


class _AnyTable(dict[GlobalName, Any]):
    """The functions that a pickle may name, for objects read as records.

    Objects of all other classes become records.
    """

    def __missing__(self, name: GlobalName) -> Any:
        full_name = ".".join(name)
        return Made(full_name, lambda *args: Record(full_name))


def _maker_of(cls: Any) -> Callable[..., Any] | None:
    """Return the replacement of a registered class in pickles.

    None if they may not name it.
    """
    if issubclass(cls, enum.Enum):
        return lambda *value: cls(*value)
    if issubclass(cls, tuple) and hasattr(cls, "_make"):
        return lambda *values: cls._make(values)
    if hasattr(cls, "__dataclass_fields__"):
        return lambda: object.__new__(cls)
    return None


def _set_state(obj: Any, state: Any) -> Any:
    """Give an object the state that its pickle brings."""
    if type(obj) is _Array:
        return _array(state)
    if isinstance(obj, np.dtype):
        # (version, byte order, ...): the order is the one thing that its name does not say.
        return _with_byte_order(obj, state[1])
    if isinstance(obj, io.BytesIO):
        return io.BytesIO(memoryview(state[0]))
    if type(obj) in (argparse.Namespace, types.SimpleNamespace) and _are_texts(state):
        vars(obj).update(state)
        return obj
    if _is_registered_dataclass(obj) and _are_texts(state):
        _set_fields(obj, state)
        return obj
    if isinstance(obj, Record):
        obj.state = state
    if isinstance(obj, (collections.OrderedDict, torch.Tensor, Record)):
        # For the first two, the state is torch's own note about the items, and is not stored.
        return obj
    raise ValueError(f"a state for a {type(obj).__name__}")


def _with_byte_order(dtype: np.dtype[Any], order: Any) -> np.dtype[Any]:
    if order in ("|", "="):
        return dtype
    return dtype.newbyteorder(order)


def _are_texts(names: Iterable[Any]) -> bool:
    return all(type(name) is str for name in names)


def _is_registered_dataclass(obj: Any) -> bool:
    return type(obj) in REGISTERED and dataclasses.is_dataclass(obj)


def _set_fields(obj: Any, state: dict[str, Any]) -> None:
    fields = {field.name for field in dataclasses.fields(obj)}
    for name, value in state.items():
        if name in fields:
            object.__setattr__(obj, name, value)
        else:
            # Set by the class itself, as a rule; past any property of that name.
            vars(obj)[name] = value

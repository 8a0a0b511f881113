"""Objects as bytes, without pickle: one safetensors blob for whatever a state dict holds besides global tensors.

The blob's `__metadata__` holds `codec_version` and `tree`, a JSON text. Its U8 entries hold the raw bytes of tensors,
numpy arrays and large byte strings, in the order in which the tree refers to them. In the tree, None, bool, int, finite
floats, str, list and dict with str keys stand for themselves; anything else is `{"$<kind>": <payload>}`. Integers
that need more than 64 bits are tagged; JSON readers other than Python's may round those beyond 2**53.

What to expect:

- Supported: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, OrderedDict, defaultdict with a
  basic type as its factory, set, frozenset, slice, range, Namespace, SimpleNamespace, date, datetime (naive, or with a
  `datetime.timezone`), timedelta, paths of pathlib, dense tensors, torch.dtype, torch.device, torch.Size, numpy arrays
  and scalars of numbers, dates or text, and registered classes. No subclasses of these.
- The same values of the same types in the same order give the same bytes; the order of a set does not matter.
- A value that is referred to twice is written twice; a cycle is an error.
- Tensors come back as plain CPU tensors that do not require a gradient, Parameters too. Attributes set on a
  tensor or on an OrderedDict are not stored. Arrays come back in C order.
- Reading builds only the types listed in this module and those that the program registered itself.
"""

from __future__ import annotations

import argparse
import base64
import collections
import dataclasses
import datetime
import enum
import json
import math
import pathlib
import re
import struct
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from distckpt.core import CheckpointingException, CorruptCheckpointError, UnsupportedObjectError

CODEC_VERSION = "1"
MAX_DEPTH = 128
"""Containers inside one another. Each takes up to four Python calls, of 1000 that Python allows by default."""

_INLINE_BYTES = 256
_MAX_TREE_CHARS = 1 << 24
"""A longer tree becomes an entry, which keeps the header well under the size that safetensors readers accept."""
_MAX_HEADER_BYTES = 100_000_000
_TREE_ENTRY = "tree"

_Json = Any
_Raw = bytes | bytearray | memoryview
_Class = TypeVar("_Class", bound=type)


class _Hole:
    """Type of `HOLE`."""

    def __repr__(self) -> str:
        return "<hole>"

    def __reduce__(self) -> str:
        # A string names a global of this module: copies are the same object.
        return "HOLE"


HOLE = _Hole()
"""Stands in a list for a value that is kept elsewhere, so that the other items keep their positions."""


def encode(obj: object) -> bytes:
    """Encode an object as a complete safetensors file.

    Args:
        obj: made of the types that the module's docstring lists.

    Returns:
        The blob that `decode` reads. The bytes of dense CPU tensors are copied once.

    Raises:
        UnsupportedObjectError: naming where in the object which type stands, and what to do about it.
    """
    writer = _Writer()
    try:
        tree = _to_text(_encode_node(obj, writer))
    except RecursionError as error:
        raise writer.unsupported(obj, "the call stack is too deep here", "Nest containers less deeply.") from error
    try:
        return _join_blob(tree, writer.entries)
    except ValueError as error:
        raise writer.unsupported(obj, str(error), "Keep large numbers of tensors outside of objects.") from error


def decode(blob: bytes | bytearray | memoryview) -> object:
    """Decode what `encode` made.

    Args:
        blob: the whole file. It is not kept: tensors and arrays own their memory and are writable.

    Returns:
        The object, its tensors on CPU.

    Raises:
        CorruptCheckpointError: the blob is not one that `encode` made.
        UnsupportedObjectError: it holds an object of a class that is not registered here.
    """
    view = memoryview(blob).cast("B")
    try:
        tree, entries = _split_blob(view)
        obj = _decode_node(_from_text(tree), entries, 0)
        _require(not entries, f"nothing refers to the entries {sorted(entries)[:3]}")
        return obj
    except (CheckpointingException, MemoryError):
        # Sizes are checked against the blob, so a lack of memory says nothing about it.
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise CorruptCheckpointError(
            f"An encoded object of {len(view)} bytes is damaged ({what[:500]}). "
            "Load another checkpoint, or restore the file that holds it from a copy."
        ) from error


def fingerprints(obj: object) -> dict[str, str]:
    """Hash every leaf of nested dicts and lists, to tell which entries of two objects differ.

    Args:
        obj: what `encode` takes. Anything but a non-empty dict or list is a leaf.

    Returns:
        Path -> xxh3-64 of the encoded leaf, as 16 hex digits. Items of lists read `rng[2]`, of dicts `args.lr` or
        `state.0` (int key), other keys stand in their encoded form: `args["a.b"]`, `args[null]`. Different places
        have different paths, the same on every rank. The path of a leaf `obj` is `""`.

    Raises:
        UnsupportedObjectError: as `encode` does.
    """
    digests: dict[str, str] = {}
    writer = _Writer()
    try:
        _collect_fingerprints(obj, "", writer, digests)
    except RecursionError as error:
        raise writer.unsupported(obj, "the call stack is too deep here", "Nest containers less deeply.") from error
    return digests


# --- Registered classes ---------------------------------------------------------------------------------------------


class _Registration(NamedTuple):
    cls: type
    name: str
    to_state: Callable[[Any], object]
    from_state: Callable[[Any], object]


_REGISTERED: dict[type, _Registration] = {}
_REGISTERED_NAMES: dict[str, _Registration] = {}


def register_object_type(
    cls: _Class,
    name: str | None = None,
    *,
    to_state: Callable[[Any], object] | None = None,
    from_state: Callable[[Any], object] | None = None,
) -> _Class:
    """Let objects of a class be saved in checkpoints and be rebuilt on load.

        @distckpt.register_object_type
        @dataclasses.dataclass
        class Schedule: ...

    Enum classes, dataclasses and namedtuple classes need no functions: members are stored by name (flags by value), the
    others by their fields. Such objects are rebuilt from the fields without calling `__init__`; a field that an older
    checkpoint lacks gets its default. Subclasses are registered on their own.

    Args:
        cls: the class. Register it before saving and before loading, on every rank.
        name: what identifies the class in checkpoints, default `<module>.<qualified name>`. Give one that stays when
            the class moves.
        to_state: turns an object into one that can be stored: dicts, lists, tensors and so on.
        from_state: turns such a state back into an object.

    Returns:
        `cls`, so that this can be used as a decorator.

    Raises:
        TypeError: `cls` is not a class, or it needs both functions and they are not given.
        ValueError: `name` belongs to another class, `cls` has another name already, or distckpt stores it anyway.
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_object_type takes a class, not {cls!r}")
    if (to_state is None) != (from_state is None):
        raise TypeError(f"{_type_name(cls)}: give both to_state and from_state, or neither")
    if cls in _ENCODERS or issubclass(cls, np.generic):
        raise ValueError(f"{_type_name(cls)} is stored without being registered")
    if to_state is None or from_state is None:
        to_state, from_state = _default_functions(cls)
    name = _type_name(cls) if name is None else name
    by_name, by_class = _REGISTERED_NAMES.get(name), _REGISTERED.get(cls)
    if by_name is not None and by_name.cls is not cls:
        raise ValueError(f"the name {name!r} is registered for another class, {by_name.cls!r}; give another name=")
    if by_class is not None and by_class.name != name:
        raise ValueError(f"{_type_name(cls)} is registered under the name {by_class.name!r} already, not {name!r}")
    _REGISTERED[cls] = _REGISTERED_NAMES[name] = _Registration(cls, name, to_state, from_state)
    return cls


def _default_functions(cls: Any) -> tuple[Callable[[Any], object], Callable[[Any], object]]:
    if issubclass(cls, enum.Flag):
        return (lambda member: member.value), cls
    if issubclass(cls, enum.Enum):
        return (lambda member: member.name), lambda name: cls[name]
    if "__dataclass_fields__" in vars(cls):
        return _dataclass_functions(cls)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return _namedtuple_functions(cls)
    raise TypeError(
        f"{_type_name(cls)} is no Enum class, dataclass or namedtuple class: give to_state, which turns an object "
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
    _require(not unknown and not missing, f"stored fields without a place: {unknown}; not stored: {missing}")
    return {name: stored[name] if name in stored else defaults[name]() for name in names}


# --- Writing: object -> tree and entries ----------------------------------------------------------------------------

_ITEM, _ATTRIBUTE, _ELEMENT, _KEY, _SAME = "[{}]", ".{}", "<element>", "<key>", ""


class _Writer:
    """State of one encoding.

    Attributes:
        path: for each container around the current value, how and under what that value stands in it.
        enclosing: ids of these containers, to find cycles.
        entries: bytes found so far that stand outside of the tree.
        inline: keep bytes in the tree. Set in keys and sets: the arbitrary order of a set would number the entries.
    """

    def __init__(self) -> None:
        self.path: list[tuple[str, object]] = []
        self.enclosing: set[int] = set()
        self.entries: list[_Raw] = []
        self.inline = False

    def enter(self, container: object) -> None:
        if id(container) in self.enclosing:
            raise self.unsupported(container, "it contains itself", "Break the cycle before saving.")
        if len(self.path) >= MAX_DEPTH:
            raise self.unsupported(container, f"it lies in more than {MAX_DEPTH} containers", "Nest less deeply.")
        self.enclosing.add(id(container))
        self.path.append((_SAME, None))

    def leave(self, container: object) -> None:
        self.path.pop()
        self.enclosing.discard(id(container))

    def unsupported(self, obj: object, reason: str, advice: str) -> UnsupportedObjectError:
        where = "".join(_segment_text(template, value) for template, value in self.path) or "the object"
        return UnsupportedObjectError(f"Cannot store {where} of type {_type_name(type(obj))}: {reason}. {advice}")

    def add_entry(self, obj: object, raw: _Raw) -> int:
        if self.inline:
            raise self.unsupported(obj, "it stands in a set or in a dict key", "Keep it in a list or a dict value.")
        self.entries.append(raw)
        return len(self.entries) - 1


_Encoder = Callable[[Any, _Writer], _Json]


def _encode_node(obj: object, writer: _Writer) -> _Json:
    return _encoder_of(obj, writer)(obj, writer)


def _encoder_of(obj: object, writer: _Writer) -> _Encoder:
    cls = type(obj)
    encoder = _ENCODERS.get(cls)
    if encoder is not None:
        return encoder
    if cls in _REGISTERED:
        return _encode_registered
    if isinstance(obj, np.generic) and obj.dtype.type is cls:
        return _encode_scalar
    raise writer.unsupported(obj, *_refusal(obj))


def _refusal(obj: object) -> tuple[str, str]:
    cls = type(obj)
    if isinstance(obj, torch.Tensor):
        return "it is a subclass of torch.Tensor", "Wrap it in distckpt.ShardedTensor, or take its plain local tensor."
    if isinstance(obj, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType | types.ModuleType):
        return "classes, functions and modules are not stored", "Store a name instead, or drop it before saving."
    try:
        _default_functions(cls)
        arguments = cls.__name__
    except TypeError:
        arguments = f"{cls.__name__}, to_state=..., from_state=..."
    advice = f"Register its class before saving and before loading: distckpt.register_object_type({arguments})."
    base = next((base for base in cls.__mro__ if base in _ENCODERS), None)
    if base is None:
        return "its class is not registered", advice
    return f"its class, a subclass of {base.__name__}, is not registered", f"{advice} Or convert it to {base.__name__}."


def _encode_children(owner: object, children: Iterable[tuple[str, object, object]], writer: _Writer) -> list[_Json]:
    writer.enter(owner)
    nodes = []
    for template, name, child in children:
        writer.path[-1] = (template, name)
        nodes.append(_encoder_of(child, writer)(child, writer))
    writer.leave(owner)
    return nodes


def _encode_inline(owner: Iterable[object], template: str, writer: _Writer) -> list[_Json]:
    outer, writer.inline = writer.inline, True
    nodes = _encode_children(owner, ((template, child, child) for child in owner), writer)
    writer.inline = outer
    return nodes


def _encode_list(obj: Iterable[object], writer: _Writer) -> _Json:
    return _encode_children(obj, ((_ITEM, i, item) for i, item in enumerate(obj)), writer)


def _encode_dict(obj: Mapping[Any, object], writer: _Writer, template: str = _ITEM) -> _Json:
    values = _encode_children(obj, ((template, key, value) for key, value in obj.items()), writer)
    if all(type(key) is str and _is_unicode(key) for key in obj) and not _is_tagged(obj):
        return dict(zip(obj, values, strict=True))
    pairs = zip(_encode_inline(obj, _KEY, writer), values, strict=True)
    return {"$dict": [node for pair in pairs for node in pair]}


def _encode_defaultdict(obj: collections.defaultdict[Any, object], writer: _Writer) -> _Json:
    name = next((name for name, factory in _FACTORIES.items() if factory is obj.default_factory), "")
    if name == "":
        reason = f"its default_factory is none of {', '.join(map(str, _FACTORIES))}"
        raise writer.unsupported(obj, reason, "Convert it to a dict.")
    return {"$defaultdict": [name, _encode_dict(obj, writer)]}


def _encode_set(obj: Iterable[object], writer: _Writer) -> _Json:
    return {f"${type(obj).__name__}": sorted(_encode_inline(obj, _ELEMENT, writer), key=_to_text)}


def _encode_int(obj: int, writer: _Writer) -> _Json:
    return obj if -(2**63) <= obj < 2**64 else {"$int": hex(obj)}


def _encode_float(obj: float, writer: _Writer) -> _Json:
    return obj if math.isfinite(obj) else {"$float": struct.pack(">d", obj).hex()}


def _encode_str(obj: str, writer: _Writer) -> _Json:
    # Lone surrogates: JSON would join two of them to one character, and a safetensors header is UTF-8.
    return obj if _is_unicode(obj) else {"$str": base64.b64encode(obj.encode("utf-8", "surrogatepass")).decode()}


def _encode_bytes(obj: bytes | bytearray, writer: _Writer) -> _Json:
    inline = writer.inline or len(obj) <= _INLINE_BYTES
    return {f"${type(obj).__name__}": base64.b64encode(obj).decode() if inline else writer.add_entry(obj, obj)}


def _encode_tensor(obj: torch.Tensor, writer: _Writer) -> _Json:
    name = _dtype_name(obj.dtype)
    if obj.layout is not torch.strided or name not in _TENSOR_DTYPES or obj.is_meta:
        reason = f"it is a tensor of dtype {name} and layout {obj.layout} on device {obj.device}"
        raise writer.unsupported(obj, reason, "Only dense tensors of plain dtypes that hold data can be stored.")
    plain = obj.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Tensors of at most one item count as contiguous whatever their stride, which view() refuses.
    raw = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data
    return {"$tensor": [name, list(obj.shape), writer.add_entry(obj, raw)]}


def _encode_array(obj: npt.NDArray[Any], writer: _Writer) -> _Json:
    dtype = _dtype_text(obj, writer)
    raw = np.ascontiguousarray(obj).reshape(-1).view(np.uint8).data
    return {"$ndarray": [dtype, list(obj.shape), writer.add_entry(obj, raw)]}


def _encode_scalar(obj: np.generic, writer: _Writer) -> _Json:
    # numpy's own conversions of these two drop trailing zeros.
    if isinstance(obj, np.bytes_):
        return {"$numpy": ["bytes_", _encode_bytes(bytes(obj), writer)]}
    if isinstance(obj, np.str_):
        return {"$numpy": ["str_", _encode_str("".join(obj), writer)]}
    return {"$numpy": [_dtype_text(obj, writer), _encode_node(obj.tobytes(), writer)]}


def _dtype_text(obj: npt.NDArray[Any] | np.generic, writer: _Writer) -> str:
    if not _is_plain_dtype(obj.dtype):
        advice = "Convert it to numbers, dates or text: object arrays to lists, structured arrays to a dict of fields."
        raise writer.unsupported(obj, f"its dtype {obj.dtype} has no portable bytes", advice)
    return str(obj.dtype.str)


def _encode_registered(obj: object, writer: _Writer) -> _Json:
    registration = _REGISTERED[type(obj)]
    (state,) = _encode_children(obj, [(_SAME, None, registration.to_state(obj))], writer)
    return {"$object": [registration.name, state]}


def _encode_state(kind: str, to_state: Callable[[Any], object]) -> _Encoder:
    """Make an encoder for a type that is stored as a state of simpler types."""
    return lambda obj, writer: {f"${kind}": _encode_node(to_state(obj), writer)}


def _encode_attributes(obj: object, writer: _Writer) -> _Json:
    return {f"${type(obj).__name__}": _encode_dict(vars(obj), writer, _ATTRIBUTE)}


def _datetime_state(obj: datetime.datetime) -> dict[str, object]:
    fields = [obj.year, obj.month, obj.day, obj.hour, obj.minute, obj.second, obj.microsecond]
    return {"fields": fields, "fold": obj.fold, "tzinfo": obj.tzinfo}


def _timezone_state(obj: datetime.timezone) -> list[object]:
    offset, name = obj.utcoffset(None), obj.tzname(None)
    return [offset] if datetime.timezone(offset).tzname(None) == name else [offset, name]


def _as_is(obj: object, writer: _Writer) -> _Json:
    return obj


_FACTORIES: dict[str | None, type | None] = {
    None: None,
    **{factory.__name__: factory for factory in (bool, dict, float, int, list, set, str, tuple)},
}
_PATHS: dict[str, type[pathlib.PurePath]] = {
    cls.__name__: cls
    for cls in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}

_ENCODERS: dict[type, _Encoder] = {
    type(None): _as_is,
    bool: _as_is,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    list: _encode_list,
    dict: _encode_dict,
    _Hole: _encode_state("hole", lambda obj: None),
    tuple: _encode_state("tuple", list),
    set: _encode_set,
    frozenset: _encode_set,
    collections.OrderedDict: lambda obj, writer: {"$OrderedDict": _encode_dict(obj, writer)},
    collections.defaultdict: _encode_defaultdict,
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
    complex: _encode_state("complex", lambda obj: [obj.real, obj.imag]),
    slice: _encode_state("slice", lambda obj: [obj.start, obj.stop, obj.step]),
    range: _encode_state("range", lambda obj: [obj.start, obj.stop, obj.step]),
    argparse.Namespace: _encode_attributes,
    types.SimpleNamespace: _encode_attributes,
    datetime.date: _encode_state("date", lambda obj: [obj.year, obj.month, obj.day]),
    datetime.datetime: _encode_state("datetime", _datetime_state),
    datetime.timedelta: _encode_state("timedelta", lambda obj: [obj.days, obj.seconds, obj.microseconds]),
    datetime.timezone: _encode_state("timezone", _timezone_state),
    **{cls: _encode_state("path", lambda obj: [type(obj).__name__, str(obj)]) for cls in _PATHS.values()},
    torch.Tensor: _encode_tensor,
    torch.nn.Parameter: _encode_tensor,
    torch.dtype: _encode_state("torch.dtype", lambda obj: _dtype_name(obj)),
    torch.device: _encode_state("torch.device", str),
    torch.Size: _encode_state("torch.Size", list),
    np.ndarray: _encode_array,
}


def _collect_fingerprints(obj: object, name: str, writer: _Writer, digests: dict[str, str]) -> None:
    if type(obj) not in (dict, list) or not obj:
        writer.entries.clear()
        digest = xxhash.xxh3_64(_to_text(_encode_node(obj, writer)).encode())
        for raw in writer.entries:
            digest.update(raw)
        digests[name] = digest.hexdigest()
        return
    items: list[tuple[object, object]]
    if isinstance(obj, dict):
        items, suffixes = list(obj.items()), [_key_suffix(node) for node in _encode_inline(obj, _KEY, writer)]
    else:
        items = list(enumerate(cast("list[object]", obj)))
        suffixes = [f"[{i}]" for i, _ in items]
    writer.enter(obj)
    for (key, child), suffix in zip(items, suffixes, strict=True):
        writer.path[-1] = (_ITEM, key)
        _collect_fingerprints(child, name + suffix if name else suffix.removeprefix("."), writer, digests)
    writer.leave(obj)


def _key_suffix(node: _Json) -> str:
    # From the encoded key, which is the same on all ranks, unlike the repr of a set.
    readable = type(node) is int or (type(node) is str and re.fullmatch(r"[^\W\d][\w-]*", node))
    return f".{node}" if readable else f"[{_to_text(node)}]"


# --- Reading: tree and entries -> object ----------------------------------------------------------------------------

_Entries = dict[str, memoryview]
"""Entries of a blob that the tree has not referred to yet. Each can be used once, so that no bytes multiply."""


def _decode_node(node: _Json, entries: _Entries, depth: int) -> Any:
    # One call per level of JSON: a container takes up to four levels, a leaf inside it up to three.
    _require(depth <= 4 * MAX_DEPTH + 3, f"more than {MAX_DEPTH} containers in one another")
    if type(node) is list:
        items = []
        for item in node:
            items.append(_decode_node(item, entries, depth + 1) if type(item) in (dict, list) else item)
        return items
    if type(node) is not dict:
        return node
    values = {}
    for key, item in node.items():
        values[key] = _decode_node(item, entries, depth + 1) if type(item) in (dict, list) else item
    if not _is_tagged(node):
        return values
    ((tag, payload),) = values.items()
    if tag in _ENTRY_DECODERS:
        return _ENTRY_DECODERS[tag](payload, entries)
    _require(tag in _DECODERS, f"unknown tag {tag[:50]!r}")
    payload_type, from_payload = _DECODERS[tag]
    _require(type(payload) is payload_type, f"{tag} takes a {payload_type.__name__}, not a {type(payload).__name__}")
    return from_payload(payload)


def _take(number: object, entries: _Entries) -> memoryview:
    raw = entries.pop(_entry_name(number), None) if type(number) is int else None
    if raw is None:
        raise ValueError(f"the tree refers to the entry {number!r:.50}, which is missing or used before")
    return raw


def _decode_bytes(payload: object, entries: _Entries) -> bytes:
    return base64.b64decode(payload, validate=True) if isinstance(payload, str) else bytes(_take(payload, entries))


def _decode_tensor(payload: Any, entries: _Entries) -> torch.Tensor:
    name, shape, number = payload
    dtype, raw = _find_dtype(name, _TENSOR_DTYPES), _take(number, entries)
    _check_size(shape, dtype.itemsize, raw)
    flat = torch.empty(len(raw), dtype=torch.uint8)
    flat.numpy()[:] = raw
    # Autograd does not take a detached tensor for a view.
    return flat.view(dtype).reshape(shape).detach()


def _decode_array(payload: Any, entries: _Entries) -> npt.NDArray[Any]:
    name, shape, number = payload
    dtype, raw = _find_plain_dtype(name), _take(number, entries)
    _check_size(shape, dtype.itemsize, raw)
    array: npt.NDArray[Any] = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = raw
    return array


def _check_size(shape: Any, item_bytes: int, raw: memoryview | bytes) -> None:
    _require(type(shape) is list and all(type(n) is int and n >= 0 for n in shape), f"invalid shape {shape!r:.100}")
    # The second: on some shapes without elements, numpy and torch overflow.
    _require(math.prod(shape) * item_bytes == len(raw), f"shape {shape!r:.100} contradicts {len(raw)} bytes")
    _require(math.prod(n for n in shape if n) * item_bytes < 2**63, f"shape {shape!r:.100} is too large")


def _decode_scalar(payload: list[Any]) -> object:
    name, value = payload
    if name == "str_":
        return np.str_(*_several(str, 1, [value]))
    _several(bytes, 1, [value])
    if name == "bytes_":
        return np.bytes_(value)
    dtype = _find_plain_dtype(name)
    _check_size([], dtype.itemsize, value)
    return np.frombuffer(value, dtype)[0]


def _decode_dict(payload: list[Any]) -> dict[Any, Any]:
    result = dict(zip(payload[::2], payload[1::2], strict=True))
    _require(2 * len(result) == len(payload), "a dict has a key twice")
    return result


def _decode_set(payload: list[Any]) -> set[Any]:
    result = set(payload)
    _require(len(result) == len(payload), "a set has an element twice")
    return result


def _decode_defaultdict(payload: list[Any]) -> object:
    name, items = payload
    _require(name in _FACTORIES and type(items) is dict, f"invalid defaultdict of {name!r:.50}")
    return collections.defaultdict(_FACTORIES[name], items)


def _decode_attributes(namespace: Any, attributes: dict[Any, Any]) -> object:
    _require(all(type(name) is str for name in attributes), "an attribute is not named by a text")
    vars(namespace).update(attributes)
    return namespace


def _decode_datetime(payload: dict[str, Any]) -> object:
    naive = datetime.datetime(*_several(int, 7, payload["fields"]))
    return naive.replace(fold=payload["fold"], tzinfo=payload["tzinfo"])


def _decode_path(payload: list[Any]) -> object:
    name, text = payload
    cls = _PATHS[name]
    if issubclass(cls, pathlib.Path) and cls is not type(pathlib.Path()):
        # A path of another platform can be looked at, not used.
        cls = _PATHS["Pure" + name]
    return cls(text)


def _decode_registered(payload: list[Any]) -> object:
    name, state = payload
    registration = _REGISTERED_NAMES.get(name)
    if registration is None:
        raise UnsupportedObjectError(
            f"The checkpoint holds an object whose class is registered as {name!r}, which is unknown here. Before "
            f"loading, call distckpt.register_object_type(cls, name={name!r}), with to_state= and from_state= "
            "unless cls is an Enum class, a dataclass or a namedtuple class."
        )
    try:
        return registration.from_state(state)
    except Exception as error:
        raise ValueError(f"an object {name!r} does not fit its class: {type(error).__name__}: {error}") from error


def _several(cls: type, count: int, values: Any) -> list[Any]:
    expected = type(values) is list and len(values) == count and all(type(value) is cls for value in values)
    _require(expected, f"{count} of type {cls.__name__} expected")
    return values  # type: ignore[no-any-return]


_ENTRY_DECODERS: dict[str, Callable[[Any, _Entries], object]] = {
    "$bytes": _decode_bytes,
    "$bytearray": lambda payload, entries: bytearray(_decode_bytes(payload, entries)),
    "$tensor": _decode_tensor,
    "$ndarray": _decode_array,
}

_DECODERS: dict[str, tuple[type, Callable[[Any], object]]] = {
    "$hole": (type(None), lambda payload: HOLE),
    "$int": (str, lambda payload: int(payload, 16)),
    "$float": (str, lambda payload: struct.unpack(">d", bytes.fromhex(payload))[0]),
    "$str": (str, lambda payload: base64.b64decode(payload, validate=True).decode("utf-8", "surrogatepass")),
    "$tuple": (list, tuple),
    "$dict": (list, _decode_dict),
    "$set": (list, _decode_set),
    "$frozenset": (list, lambda payload: frozenset(_decode_set(payload))),
    "$OrderedDict": (dict, collections.OrderedDict),
    "$defaultdict": (list, _decode_defaultdict),
    "$complex": (list, lambda payload: complex(*_several(float, 2, payload))),
    "$slice": (list, lambda payload: slice(*payload)),
    "$range": (list, lambda payload: range(*_several(int, 3, payload))),
    "$Namespace": (dict, lambda payload: _decode_attributes(argparse.Namespace(), payload)),
    "$SimpleNamespace": (dict, lambda payload: _decode_attributes(types.SimpleNamespace(), payload)),
    "$date": (list, lambda payload: datetime.date(*_several(int, 3, payload))),
    "$datetime": (dict, _decode_datetime),
    "$timedelta": (list, lambda payload: datetime.timedelta(*_several(int, 3, payload))),
    "$timezone": (list, lambda payload: datetime.timezone(*payload)),
    "$path": (list, _decode_path),
    "$torch.dtype": (str, lambda payload: _find_dtype(payload, _DTYPES)),
    "$torch.device": (str, torch.device),
    "$torch.Size": (list, lambda payload: torch.Size(_several(int, len(payload), payload))),
    "$numpy": (list, _decode_scalar),
    "$object": (list, _decode_registered),
}


# --- Dtypes ---------------------------------------------------------------------------------------------------------

_DTYPES: dict[str, torch.dtype] = {
    str(value)[len("torch.") :]: value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_TENSOR_DTYPES = {
    name: dtype
    for name, dtype in _DTYPES.items()
    if re.fullmatch(r"bool|u?int(8|16|32|64)|b?float\d+(_\w+)?|complex\d+", name)
}
"""Those with ordinary items: quantised and sub-byte integer types are left out."""


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _find_dtype(name: Any, table: Mapping[str, torch.dtype]) -> torch.dtype:
    _require(name in table, f"there is no such dtype in this torch: {name!r:.50}")
    return table[name]


def _find_plain_dtype(name: Any) -> np.dtype[Any]:
    _require(type(name) is str and bool(re.fullmatch(r"[<>|][a-zA-Z]\d+(\[\w+\])?", name)), f"dtype {name!r:.50}")
    dtype: np.dtype[Any] = np.dtype(name)
    _require(_is_plain_dtype(dtype), f"dtype {name!r:.50}")
    return dtype


def _is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    """Tell whether items are bytes that mean the same on every machine, and `dtype.str` says all about them."""
    ordinary = dtype.kind in "biufcSUVmM" and dtype.char not in "gG" and dtype.names is None and dtype.itemsize > 0
    return bool(ordinary and np.dtype(dtype.str) == dtype)


# --- Text and layout ------------------------------------------------------------------------------------------------


def _to_text(tree: _Json) -> str:
    # Cycles were found before.
    return json.dumps(tree, ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":"))


def _from_text(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_distinct_pairs)


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def _distinct_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    _require(len(result) == len(pairs), "a JSON object has a key twice")
    return result


def _join_blob(tree: str, entries: Sequence[_Raw]) -> bytes:
    """Lay out a safetensors file by hand: the library writes `__metadata__` in random order and copies data twice."""
    named: dict[str, _Raw] = {_entry_name(i): raw for i, raw in enumerate(entries)}
    metadata = {"codec_version": CODEC_VERSION, "tree": tree}
    if len(tree) > _MAX_TREE_CHARS:
        named[_TREE_ENTRY] = tree.encode()
        metadata = {"codec_version": CODEC_VERSION, "tree_entry": _TREE_ENTRY}
    header: dict[str, object] = {"__metadata__": metadata}
    position = 0
    for name, raw in named.items():
        header[name] = {"dtype": "U8", "shape": [len(raw)], "data_offsets": [position, position + len(raw)]}
        position += len(raw)
    text = _to_text(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise ValueError(f"its {len(entries)} tensors, arrays and large bytes need a header of {len(text)} bytes")
    return b"".join([len(text).to_bytes(8, "little"), text, *named.values()])


def _split_blob(blob: memoryview) -> tuple[str, _Entries]:
    header_bytes = int.from_bytes(blob[:8], "little")
    _require(len(blob) >= 8 and header_bytes <= min(len(blob) - 8, _MAX_HEADER_BYTES), "the header is cut off")
    header = _from_text(str(blob[8 : 8 + header_bytes], "utf-8"))
    metadata: Any = header.pop("__metadata__", None) if type(header) is dict else None
    version = metadata.get("codec_version") if type(metadata) is dict else None
    _require(version == CODEC_VERSION, f"codec version {version!r:.50}, this distckpt reads {CODEC_VERSION!r}")
    data = blob[8 + header_bytes :]
    entries: _Entries = {}
    position = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, end = _several(int, 2, entry["data_offsets"])
        consistent = first == position <= end <= len(data) and entry["shape"] == [end - first]
        _require(consistent and entry["dtype"] == "U8", f"the entry {name[:50]!r} does not fit the file")
        entries[name] = data[first:end]
        position = end
    _require(position == len(data), f"{len(data)} bytes of data, {position} described")
    tree = str(entries.pop(_TREE_ENTRY), "utf-8") if "tree_entry" in metadata else metadata["tree"]
    return tree, entries


def _entry_name(number: object) -> str:
    return f"{number:08}"


def _is_tagged(node: Mapping[str, object]) -> bool:
    """Tell whether a JSON object is `{"$<kind>": <payload>}`; a dict that looks like this is stored as pairs."""
    return len(node) == 1 and next(iter(node)).startswith("$")


def _is_unicode(text: str) -> bool:
    """Tell whether a text has no lone surrogates."""
    return text.isascii() or not re.search("[\ud800-\udfff]", text)


def _segment_text(template: str, value: object) -> str:
    try:
        return template.format(f"{value!r:.60}" if template == _ITEM else value)
    except Exception:  # Whatever the repr of a key raises, the error that is being described matters more.
        return template.format("?")


def _type_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)

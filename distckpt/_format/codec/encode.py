"""Writing side of the codec: an object becomes a tree and entries.

The tree refers to the entries.
"""

from __future__ import annotations

import argparse
import base64
import collections
import contextlib
import datetime
import functools
import itertools
import math
import re
import struct
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from distckpt._base.dtypes import flat_bytes, memory_order
from distckpt._base.errors import UnsupportedObjectError
from distckpt._base.lazy import torch
from distckpt._base.tree import Hole
from distckpt._format.codec.tree import (
    FACTORIES,
    ITEM,
    MAX_DEPTH,
    NOT_STORED,
    PATHS,
    REGISTERED,
    TENSOR_DTYPES,
    Json,
    Raw,
    is_plain_dtype,
    is_tagged,
    nodes,
    registration_call,
    registration_of,
    segment_text,
    to_text,
    type_name,
)

_INLINE_BYTES = 256
_ATTRIBUTE = ".{}"
_ELEMENT = "<element>"
KEY = "<key>"
_SAME = ""


class Writer:
    """State of one encoding.

    Attributes:
        path: for each container around the current value, the form and the name of the step that
            leads into it.
        enclosing: ids of these containers, to find cycles.
        entries: bytes that lie outside the tree, so far.
        orders: order of the axes of transposed tensors in memory, by the number of the entry.
        unregistered: by class that is not registered the place of the first object and its error;
            None to raise that at once.
        inline: whether bytes stay in the tree, as they do in keys and sets: otherwise the arbitrary
            order of a set would number the entries.
        refuses_left_out: whether the place of a value that an earlier save left out is an error.
    """

    def __init__(self) -> None:
        self.path: list[tuple[str, object]] = []
        self.enclosing: set[int] = set()
        self.entries: list[Raw] = []
        self.orders: dict[int, list[int]] = {}
        self.unregistered: dict[type, tuple[str, UnsupportedObjectError]] | None = None
        self.inline = False
        self.refuses_left_out = False

    def enter(self, container: object) -> None:
        """Begin a container."""
        if id(container) in self.enclosing:
            raise self.unsupported(
                container, "it contains itself", "Break the cycle before saving."
            )
        if len(self.path) >= MAX_DEPTH:
            raise self.unsupported(
                container, f"it lies in more than {MAX_DEPTH} containers", "Nest less deeply."
            )
        self.enclosing.add(id(container))
        self.path.append((_SAME, None))

    def leave(self, container: object) -> None:
        """End the container that was begun last."""
        self.path.pop()
        self.enclosing.discard(id(container))

    def unsupported(self, obj: object, reason: str, advice: str) -> UnsupportedObjectError:
        """Return the error that an object cannot be stored.

        It names the place, the reason and the way out.
        """
        return UnsupportedObjectError(
            f"Cannot store {self.where()} of type {type_name(type(obj))}: {reason}. {advice}"
        )

    def where(self) -> str:
        """Return the place of the current value as text."""
        steps = "".join(segment_text(template, value) for template, value in self.path)
        return steps or "the object"

    def add_entry(self, obj: object, raw: Raw) -> int:
        """Store the bytes of an object outside the tree.

        Return the number of their entry.
        """
        if self.inline:
            raise self.unsupported(
                obj, "it is in a set or in a dict key", "Keep it in a list or a dict value."
            )
        self.entries.append(raw)
        return len(self.entries) - 1


_Encoder = Callable[[Any, Writer], Json]


def encode_node(obj: object, writer: Writer) -> Json:
    """Return the tree of an object; other bytes go to `writer.entries`."""
    return _encoder_of(obj)(obj, writer)


def _encoder_of(obj: object) -> _Encoder:
    cls = type(obj)
    encoder = encoders().get(cls)
    if encoder is not None:
        return encoder
    if isinstance(obj, np.generic) and obj.dtype.type is cls:
        return _encode_scalar
    if registration_of(cls) is not None:
        return _encode_registered
    return _note_unregistered


def _note_unregistered(obj: object, writer: Writer) -> Json:
    """Refuse an object, or note its refusal and continue inside it.

    Other objects to refuse may be in it.
    """
    refusal = _refusal_of_kind(obj)
    if refusal is not None:
        raise writer.unsupported(obj, *refusal)
    error = writer.unsupported(obj, *_refusal_of_class(type(obj)))
    if writer.unregistered is None:
        raise error
    writer.unregistered.setdefault(type(obj), (writer.where(), error))
    # Its content would be refused next; it may also hold values that are not stored at all.
    depth = len(writer.path)
    enclosing = set(writer.enclosing)
    with contextlib.suppress(UnsupportedObjectError):
        attributes = getattr(obj, "__dict__", {})
        _encode_children(obj, ((_ATTRIBUTE, *item) for item in attributes.items()), writer)
    del writer.path[depth:]
    writer.enclosing = enclosing
    return None


def _refusal_of_kind(obj: object) -> tuple[str, str] | None:
    """Return why an object is refused, registered or not; else None."""
    if is_object_of_state(obj):
        return (
            "it is in a container in which no objects are looked for",
            "Keep it in a list, tuple or dict of the state dict.",
        )
    if isinstance(obj, torch.Tensor):
        return (
            "it is a subclass of torch.Tensor",
            "Wrap it in distckpt.ShardedTensor, or take its plain local tensor.",
        )
    if isinstance(
        obj,
        type | types.FunctionType | types.BuiltinFunctionType | types.MethodType | types.ModuleType,
    ):
        return (
            "classes, functions and modules are not stored",
            "Store a name instead, or drop it before saving.",
        )
    return None


def is_object_of_state(obj: object) -> bool:
    """Return whether an object is sharded, or has state as modules do."""
    if isinstance(obj, type) or type(obj) in encoders() or type(obj) in REGISTERED:
        return False
    methods = (getattr(obj, name, None) for name in ("state_dict", "load_state_dict"))
    is_sharded = all(hasattr(obj, name) for name in ("key", "data", "replica_id"))
    return is_sharded or all(map(callable, methods))


def _refusal_of_class(cls: type) -> tuple[str, str]:
    advice = f"Register its class before saving and before loading: {registration_call(cls)}."
    base = next((base for base in cls.__mro__ if base in encoders()), None)
    if base is None:
        return "its class is not registered", advice
    return (
        f"its class, a subclass of {base.__name__}, is not registered",
        f"{advice} Or convert it to {base.__name__}.",
    )


def _encode_children(
    owner: object, children: Iterable[tuple[str, object, object]], writer: Writer
) -> list[Json]:
    writer.enter(owner)
    nodes = []
    for template, name, child in children:
        writer.path[-1] = (template, name)
        nodes.append(_encoder_of(child)(child, writer))
    writer.leave(owner)
    return nodes


def encode_inline(owner: Iterable[object], template: str, writer: Writer) -> list[Json]:
    """Return the trees of keys or elements; their bytes stay in the tree."""
    outer = writer.inline
    writer.inline = True
    nodes = _encode_children(owner, ((template, child, child) for child in owner), writer)
    writer.inline = outer
    return nodes


def _encode_list(obj: Iterable[object], writer: Writer) -> Json:
    return _encode_children(obj, ((ITEM, i, item) for i, item in enumerate(obj)), writer)


def _encode_dict(obj: Mapping[Any, object], writer: Writer, template: str = ITEM) -> Json:
    values = _encode_children(obj, ((template, key, value) for key, value in obj.items()), writer)
    if all(type(key) is str and _is_unicode(key) for key in obj) and not is_tagged(obj):
        return dict(zip(obj, values, strict=True))
    pairs = zip(encode_inline(obj, KEY, writer), values, strict=True)
    return {"$dict": list(itertools.chain.from_iterable(pairs))}


def _encode_defaultdict(obj: collections.defaultdict[Any, object], writer: Writer) -> Json:
    name = next((name for name, factory in FACTORIES.items() if factory is obj.default_factory), "")
    if name == "":
        reason = f"its default_factory is not one of {', '.join(map(str, FACTORIES))}"
        raise writer.unsupported(obj, reason, "Convert it to a dict.")
    return {"$defaultdict": [name, _encode_dict(obj, writer)]}


def _encode_set(obj: Iterable[object], writer: Writer) -> Json:
    return {f"${type(obj).__name__}": sorted(encode_inline(obj, _ELEMENT, writer), key=to_text)}


def _encode_int(obj: int, writer: Writer) -> Json:
    if -(2**63) <= obj < 2**64:
        return obj
    return {"$int": hex(obj)}


def _encode_float(obj: float, writer: Writer) -> Json:
    if math.isfinite(obj):
        return obj
    return {"$float": struct.pack(">d", obj).hex()}


def _encode_str(obj: str, writer: Writer) -> Json:
    if _is_unicode(obj):
        return obj
    # JSON would join two lone surrogates to one character, and a safetensors header is UTF-8.
    return {"$str": base64.b64encode(obj.encode("utf-8", "surrogatepass")).decode()}


def _encode_bytes(obj: bytes | bytearray, writer: Writer) -> Json:
    tag = f"${type(obj).__name__}"
    if writer.inline or len(obj) <= _INLINE_BYTES:
        return {tag: base64.b64encode(obj).decode()}
    return {tag: writer.add_entry(obj, obj)}


def _encode_tensor(obj: torch.Tensor, writer: Writer) -> Json:
    name = str(obj.dtype).removeprefix("torch.")
    if obj.layout is not torch.strided or name not in TENSOR_DTYPES or obj.is_meta:
        reason = f"it is a tensor of dtype {name} and layout {obj.layout} on device {obj.device}"
        raise writer.unsupported(
            obj, reason, "Only dense tensors of plain dtypes that hold data can be stored."
        )
    number = writer.add_entry(obj, flat_bytes(obj.cpu()).numpy().data)
    if order := memory_order(obj):
        writer.orders[number] = order
    return {"$tensor": [name, list(obj.shape), number]}


def _encode_array(obj: npt.NDArray[Any], writer: Writer) -> Json:
    dtype = _dtype_text(obj, writer)
    raw = np.ascontiguousarray(obj).reshape(-1).view(np.uint8).data
    return {"$ndarray": [dtype, list(obj.shape), writer.add_entry(obj, raw)]}


def _encode_scalar(obj: np.generic, writer: Writer) -> Json:
    # numpy's own conversions of these two drop trailing zeros.
    if isinstance(obj, np.bytes_):
        return {"$numpy": ["bytes_", _encode_bytes(bytes(obj), writer)]}
    if isinstance(obj, np.str_):
        return {"$numpy": ["str_", _encode_str("".join(obj), writer)]}
    return {"$numpy": [_dtype_text(obj, writer), encode_node(obj.tobytes(), writer)]}


def _dtype_text(obj: npt.NDArray[Any] | np.generic, writer: Writer) -> str:
    if not is_plain_dtype(obj.dtype):
        advice = (
            "Convert it to numbers, dates or text: object arrays to lists, structured arrays to a "
            "dict of fields."
        )
        raise writer.unsupported(obj, f"its dtype {obj.dtype} has no portable bytes", advice)
    return str(obj.dtype.str)


def _encode_registered(obj: object, writer: Writer) -> Json:
    registration = REGISTERED[type(obj)]
    try:
        state = registration.to_state(obj)
    except Exception as error:
        reason = f"its to_state raised {type(error).__name__}: {error}"
        raise writer.unsupported(obj, reason, "Correct that function.") from error
    return _encode_as(registration.name, obj, state, writer)


def _encode_as(name: str, obj: object, state: object, writer: Writer) -> Json:
    return {"$object": [name, *_encode_children(obj, [(_SAME, None, state)], writer)]}


class UnknownObject:
    """A stored object that this program cannot make.

    Its class is not registered under the stored name, or its `from_state` does not take the stored
    state.

    It can only be saved again, as it was stored. Any other use raises an error that names the
    class.

    Attributes:
        name: name of the class in the checkpoint.
        state: the stored state of the object.
        fault: the error of `from_state`; empty for a class that is not registered.
    """

    def __init__(self, name: str, state: object, fault: str = "") -> None:
        self.name = name
        self.state = state
        self.fault = fault

    def __repr__(self) -> str:
        return f"<object of an unknown class, registered as {self.name!r}>"

    def __getattr__(self, attribute: str) -> NoReturn:
        if not vars(self):  # A copy that is being made.
            raise AttributeError(attribute)
        raise AttributeError(f"{attribute!r} of {self!r}: {how_to_register(self)}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UnknownObject):
            self._refuse()
        return self is other or self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())

    def _content(self) -> object:
        writer = Writer()
        return to_text(encode_node(self, writer)), tuple(map(bytes, writer.entries))

    def _refuse(self, *_: object) -> NoReturn:
        raise UnsupportedObjectError(f"{self!r} was used: {how_to_register(self)}")

    # The operations of enums and named tuples. By name, since Python looks these up in the class.
    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __getitem__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = _refuse


def unknown_objects(obj: object) -> Iterator[tuple[tuple[object, ...], UnknownObject]]:
    """Yield the unknown objects in a decoded object, with their paths. See `nodes`."""
    for path, node in nodes(obj):
        if isinstance(node, UnknownObject):
            yield path, node


def _encode_unknown(obj: UnknownObject, writer: Writer) -> Json:
    if writer.refuses_left_out and obj.name.startswith(NOT_STORED):
        raise UnsupportedObjectError(
            f"Cannot store {writer.where()}: its value, of type "
            f"{obj.name.removeprefix(NOT_STORED)!r}, was left out ({obj.state}). Give it a value, "
            "or drop it before saving."
        )
    return _encode_as(obj.name, obj, obj.state, writer)


def how_to_register(unknown: UnknownObject) -> str:
    """Return advice to register the class of an unknown object."""
    while inner := next(unknown_objects(unknown.state), None):
        _, unknown = inner
    name = unknown.name
    if name.startswith(NOT_STORED):
        return (
            f"the save left out this value, of type {name.removeprefix(NOT_STORED)!r}, and stored "
            f"all others ({unknown.state}). Leave it out of the load."
        )
    if unknown.fault:
        return (
            f"what is stored of {name!r} does not fit its class as it is registered here "
            f"({unknown.fault}). Before loading, register the class as it was saved, or a "
            "from_state that takes such a state."
        )
    if name.startswith("megatron."):
        return (
            f"its class is Megatron's {name!r}, which is unknown here. Before loading, import it, "
            "from a version of Megatron that has it."
        )
    return (
        f"its class is registered as {name!r}, which is unknown here. Before loading, call "
        f"distckpt.register_object_type(cls, name={name!r}), with to_state= and from_state= unless "
        "cls is an Enum class, a dataclass or a namedtuple class."
    )


def _encode_state(kind: str, to_state: Callable[[Any], object]) -> _Encoder:
    """Return an encoder for a type stored as a simpler state."""
    return lambda obj, writer: {f"${kind}": encode_node(to_state(obj), writer)}


def _encode_attributes(obj: object, writer: Writer) -> Json:
    return {f"${type(obj).__name__}": _encode_dict(vars(obj), writer, _ATTRIBUTE)}


def _datetime_state(obj: datetime.datetime) -> dict[str, object]:
    fields = [obj.year, obj.month, obj.day, obj.hour, obj.minute, obj.second, obj.microsecond]
    return {"fields": fields, "fold": obj.fold, "tzinfo": obj.tzinfo}


def _timezone_state(obj: datetime.timezone) -> list[object]:
    offset = obj.utcoffset(None)
    name = obj.tzname(None)
    return [offset] if datetime.timezone(offset).tzname(None) == name else [offset, name]


def _as_is(obj: object, writer: Writer) -> Json:
    return obj


@functools.cache
def encoders() -> dict[type, _Encoder]:
    """Return the functions that encode objects, by class."""
    return {
        type(None): _as_is,
        bool: _as_is,
        int: _encode_int,
        float: _encode_float,
        str: _encode_str,
        list: _encode_list,
        dict: _encode_dict,
        Hole: _encode_state("hole", lambda obj: None),
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
        datetime.timedelta: _encode_state(
            "timedelta", lambda obj: [obj.days, obj.seconds, obj.microseconds]
        ),
        datetime.timezone: _encode_state("timezone", _timezone_state),
        **{
            cls: _encode_state("path", lambda obj: [type(obj).__name__, str(obj)])
            for cls in PATHS.values()
        },
        torch.Tensor: _encode_tensor,
        torch.nn.Parameter: _encode_tensor,
        torch.dtype: _encode_state("torch.dtype", lambda obj: str(obj).removeprefix("torch.")),
        torch.device: _encode_state("torch.device", str),
        torch.Size: _encode_state("torch.Size", list),
        np.ndarray: _encode_array,
        UnknownObject: _encode_unknown,
    }


def _is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogates."""
    return text.isascii() or not re.search("[\ud800-\udfff]", text)

"""Writing archives as `torch.save` does, and pickles, without torch or pickle.

Both follow the table that reading has.

Only instructions of protocol 2 are written, which all unpicklers of torch read, the restricted one
included.
"""

from __future__ import annotations

import argparse
import collections
import copyreg
import datetime
import enum
import io
import itertools
import math
import pathlib
import struct
import types
import zipfile
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import torch

from distckpt._base.dtypes import flat_bytes
from distckpt._base.errors import UnsupportedObjectError
from distckpt._base.memory import Bytes
from distckpt._base.messages import KeyFault, summarize_faults
from distckpt._base.tree import Hole, dotted
from distckpt._foreign.torch_dist.objects import STORAGE_DTYPES
from distckpt._format.codec.encode import UnknownObject, how_to_register
from distckpt._format.codec.tree import nodes, registration_of, type_name

_STORAGE_NAMES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}


class Global(NamedTuple):
    """A class or function that a pickle names."""

    module: str
    name: str


class Call(NamedTuple):
    """An object that a pickle makes by calling a function.

    With `is_new`, it is a new object of a class. It then gets a state.
    """

    function: Global
    args: tuple[Any, ...] = ()
    state: Any = None
    is_new: bool = False


class Pairs(NamedTuple):
    """A dict as keys and values, whose keys need not be hashable."""

    items: list[tuple[Any, Any]]


class _Storage(NamedTuple):
    """The storage of a tensor, an entry of the archive."""

    persistent_id: tuple[Any, ...]


class TensorRecord(NamedTuple):
    """A tensor whose bytes are made when they are written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    content: Iterable[Bytes]


def record(module: str, name: str, /, **fields: Any) -> Call:
    """Describe an object by its class and fields."""
    return Call(Global(module, name), (), fields, True)


def write_archive(file: BinaryIO, obj: Any) -> int:
    """Append an archive with an object to a file; return its size.

    The object is a `TensorRecord`, or has passed `refuse_formless`.
    """
    pickled, tensors = encode_pickle(obj)
    start = file.tell()
    with zipfile.ZipFile(cast(Any, _RestOfFile(file, start)), "w") as archive:
        for name, data in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
        for number, tensor in enumerate(tensors):
            with archive.open(
                zipfile.ZipInfo(f"archive/data/{number}"), "w", force_zip64=True
            ) as entry:
                for content in _content_of(tensor):
                    entry.write(content)
    return file.seek(0, io.SEEK_END) - start


class _RestOfFile:
    """The rest of a file as its own file, for `zipfile`."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        self._file = file
        self._start = start
        self.write = file.write
        self.flush = file.flush

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_SET:
            offset += self._start
        return self._file.seek(offset, whence) - self._start

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seekable(self) -> bool:
        return True


def _content_of(tensor: TensorRecord | torch.Tensor) -> Iterable[Any]:
    if isinstance(tensor, TensorRecord):
        return tensor.content
    if tensor.numel():
        return [flat_bytes(tensor.cpu()).numpy().data]
    return []


def encode_pickle(obj: Any) -> tuple[bytes, list[Any]]:
    """Return the pickle of an object, and its tensors in storage order."""
    encoder = _Encoder()
    encoder.add(obj)
    return b"\x80\x02" + b"".join(encoder.instructions) + b".", encoder.tensors


class _Encoder:
    def __init__(self) -> None:
        self.instructions: list[bytes] = []
        self.tensors: list[Any] = []
        self._memo: dict[Global, bytes] = {}

    def add(self, obj: Any) -> None:
        """Append the instructions that make an object."""
        form = _FORMS.get(type(obj))
        if form is not None:
            form(self, obj)
        elif isinstance(obj, torch.Tensor):
            self.add_tensor(obj)
        else:
            description = _description_of(obj)
            assert description is not None, "refuse_formless comes first"
            self.add(description)

    def add_items(self, items: Iterable[Any], end: bytes) -> None:
        self.instructions.append(b"(")
        for item in items:
            self.add(item)
        self.instructions.append(end)

    def add_int(self, obj: int) -> None:
        if 0 <= obj < 256:
            self.instructions.append(b"K" + bytes([obj]))
        else:
            data = obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True)
            if len(data) > 255:
                raise UnsupportedObjectError(
                    "An integer of more than 255 bytes has no form in files of torch."
                )
            self.instructions.append(b"\x8a" + bytes([len(data)]) + data)

    def add_str(self, obj: str) -> None:
        data = obj.encode("utf-8", "surrogatepass")
        self.instructions.append(b"X" + _int32(len(data)) + data)

    def add_list(self, obj: list[Any]) -> None:
        self.instructions.append(b"]")
        self.add_items(obj, b"e")

    def add_pairs(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        self.instructions.append(b"}")
        self.add_items(itertools.chain.from_iterable(pairs), b"u")

    def add_global(self, obj: Global) -> None:
        known = self._memo.get(obj)
        if known is not None:
            self.instructions.append(b"j" + known)
            return
        self._memo[obj] = number = _int32(len(self._memo))
        self.instructions.append(f"c{obj.module}\n{obj.name}\n".encode() + b"r" + number)

    def add_call(self, obj: Call) -> None:
        self.add(obj.function)
        self.add_items(obj.args, b"t")
        self.instructions.append(b"\x81" if obj.is_new else b"R")
        if obj.state is not None:
            self.add(obj.state)
            self.instructions.append(b"b")

    def add_tensor(self, obj: Any) -> None:
        """Add a tensor, dense as `torch.save` stores it, and remember its bytes."""
        dtype = obj.dtype
        shape = tuple(obj.shape)
        count = math.prod(shape)
        name = _STORAGE_NAMES.get(dtype)
        version = "v2"
        kind = Global("torch", f"{name}Storage")
        more: tuple[Any, ...] = ()
        if name is None:
            version = "v3"
            kind = Global("torch.storage", "UntypedStorage")
            more = (dtype,)
            count *= dtype.itemsize
        storage = _Storage(("storage", kind, str(len(self.tensors)), "cpu", count))
        self.tensors.append(obj)
        strides = torch.empty(shape, device="meta").stride()
        hooks = Call(_ORDERED_DICT)
        args = (storage, 0, shape, strides, False, hooks, *more)
        self.add(Call(Global("torch._utils", f"_rebuild_tensor_{version}"), args))

    def add_storage(self, obj: _Storage) -> None:
        self.add(obj.persistent_id)
        self.instructions.append(b"Q")


def _int32(number: int) -> bytes:
    return number.to_bytes(4, "little")


_NAMES_OF_MODULES = {
    "builtins": "__builtin__",
    # The name that releases of numpy before 2 have, too.
    "numpy._core.multiarray": "numpy.core.multiarray",
}
"""Names of modules in pickles of protocol 2."""


def _global_of(value: Any) -> Global:
    module = value.__module__
    return Global(_NAMES_OF_MODULES.get(module, module), value.__qualname__)


def _reduced(obj: Any) -> Call:
    """Describe an object as it says itself that pickles make it."""
    reduce = copyreg.dispatch_table.get(type(obj))
    reduced = obj.__reduce_ex__(2) if reduce is None else reduce(obj)
    function, args, state = (*reduced, None)[:3]
    is_new = function.__name__ == "__newobj__"
    if is_new:
        function, *args = args
    args = tuple(_global_of(arg) if isinstance(arg, type) else arg for arg in args)
    return Call(_global_of(function), args, state, is_new)


def _description_of(obj: Any) -> Call | Global | None:
    """Describe an object without an instruction of its own.

    None if it has no form.
    """
    cls: Any = type(obj)
    if cls in _DESCRIPTIONS:
        return _DESCRIPTIONS[cls](obj)
    if isinstance(obj, np.generic | np.dtype):
        return _reduced(obj)
    if registration_of(cls) is None:
        return None
    name = Global(cls.__module__, cls.__qualname__)
    if isinstance(obj, enum.Enum):
        return Call(name, (obj.value,))
    if isinstance(obj, tuple) and hasattr(cls, "_fields"):
        return Call(name, tuple(obj), None, True)
    if hasattr(cls, "__dataclass_fields__"):
        return Call(name, (), dict(vars(obj)), True)
    return None


def refuse_formless(obj: Any, name: str, way_out: str = "") -> None:
    """Refuse an object with values that have no form in such files.

    `name` is the name of the object.

    Raises:
        UnsupportedObjectError: with the places and classes of all.
    """
    faults = []
    for path, node in nodes(obj):
        has_form = type(node) in _KNOWN or isinstance(node, torch.Tensor | np.generic)
        if not has_form and _description_of(node) is None:
            text = (
                f" of type {type_name(type(node))} has no form in files of torch: leave it out of "
                "the state dict, convert it to plain types, or register its class if that is an "
                "Enum class, a dataclass or a namedtuple class."
            )
            if isinstance(node, UnknownObject):
                text = f" has no form in files of torch: {how_to_register(node)}"
            faults.append(KeyFault(dotted(path), text, text))
    if faults:
        lines = "\n- ".join(summarize_faults(faults))
        raise UnsupportedObjectError(f"In {name}:\n- {lines}{way_out}")


def _path(obj: pathlib.PurePath) -> Call:
    return Call(Global("pathlib", type(obj).__name__), (str(obj),))


_ORDERED_DICT = Global("collections", "OrderedDict")
_REDUCED = (
    argparse.Namespace, bytearray, complex, datetime.date, datetime.datetime, datetime.timedelta,
    datetime.timezone, frozenset, np.ndarray, range, set, slice, torch.Size, torch.device,
    types.SimpleNamespace,
)  # fmt: skip
"""Classes whose objects say how pickles make them, on all platforms."""
_DESCRIPTIONS: dict[type, Callable[[Any], Call | Global]] = {
    bytes: lambda obj: Call(Global("_codecs", "encode"), (obj.decode("latin1"), "latin1")),
    collections.OrderedDict: lambda obj: Call(_ORDERED_DICT, (list(map(list, obj.items())),)),
    io.BytesIO: lambda obj: Call(Global("_io", "BytesIO"), (), (obj.getvalue(), 0, None), True),
    torch.dtype: lambda obj: Global("torch", str(obj).removeprefix("torch.")),
    **dict.fromkeys((pathlib.PosixPath, pathlib.PurePosixPath), _path),
    **dict.fromkeys(_REDUCED, _reduced),
}
_FORMS: dict[type, Callable[[_Encoder, Any], None]] = {
    type(None): lambda encoder, obj: encoder.instructions.append(b"N"),
    # Of a tensor in a list, which is stored by itself: loads put it there.
    Hole: lambda encoder, obj: encoder.instructions.append(b"N"),
    bool: lambda encoder, obj: encoder.instructions.append(b"\x88" if obj else b"\x89"),
    int: _Encoder.add_int,
    float: lambda encoder, obj: encoder.instructions.append(b"G" + struct.pack(">d", obj)),
    str: _Encoder.add_str,
    tuple: lambda encoder, obj: encoder.add_items(obj, b"t"),
    list: _Encoder.add_list,
    dict: lambda encoder, obj: encoder.add_pairs(obj.items()),
    Pairs: lambda encoder, obj: encoder.add_pairs(obj.items),
    Global: _Encoder.add_global,
    Call: _Encoder.add_call,
    _Storage: _Encoder.add_storage,
    TensorRecord: _Encoder.add_tensor,
}
"""Instructions for objects, by their types."""
_KNOWN = _FORMS.keys() | _DESCRIPTIONS.keys()

"""Reading side of the codec: a tree and entries become an object.

The object has the types listed here.
"""

from __future__ import annotations

import argparse
import base64
import collections
import datetime
import math
import pathlib
import re
import struct
import types
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from distckpt._base.dtypes import in_memory_order
from distckpt._base.lazy import torch
from distckpt._base.tree import HOLE
from distckpt._format.codec.encode import UnknownObject, unknown_objects
from distckpt._format.codec.tree import (
    DTYPES,
    FACTORIES,
    MAX_DEPTH,
    PATHS,
    TENSOR_DTYPES,
    Json,
    entry_name,
    is_plain_dtype,
    is_tagged,
    registration_named,
)

_MAX_NDIM = 1024
_MAX_COLLISIONS = 1024


class Entries(dict[str, memoryview]):
    """Entries of a blob that the tree has not referred to yet.

    Each can be used only once, so that a small blob cannot make a large object.
    """

    has_unknown = False
    """Whether the tree holds objects of unknown classes."""
    orders: Mapping[str, Any] = MappingProxyType({})
    """Entry number -> order of its transposed tensor's axes in memory."""


def require(condition: bool, message: str) -> None:
    """Raise ValueError, which `decode` reports as damage, unless a condition holds."""
    if not condition:
        raise ValueError(message)


def decode_node(node: Json, entries: Entries, depth: int) -> Any:
    """Return the object of a tree, `depth` levels deep in the JSON.

    The entries that it refers to are taken out of `entries`.
    """
    # One call per level of JSON: a container takes up to four levels, a leaf inside it up to three.
    require(depth <= 4 * MAX_DEPTH + 3, f"more than {MAX_DEPTH} containers in one another")
    if type(node) is list:
        items = []
        for item in node:
            items.append(
                decode_node(item, entries, depth + 1) if type(item) in (dict, list) else item
            )
        return items
    if type(node) is not dict:
        return node
    values = {}
    for key, item in node.items():
        values[key] = decode_node(item, entries, depth + 1) if type(item) in (dict, list) else item
    if not is_tagged(node):
        return values
    ((tag, payload),) = values.items()
    if tag in ENTRY_DECODERS:
        return ENTRY_DECODERS[tag](payload, entries)
    require(tag in DECODERS, f"unknown tag {tag[:50]!r}")
    payload_type, from_payload = DECODERS[tag]
    require(
        type(payload) is payload_type,
        f"{tag} takes a {payload_type.__name__}, not a {type(payload).__name__}",
    )
    return from_payload(payload)


def _take(number: object, entries: Entries) -> memoryview:
    raw = None
    if type(number) is int:
        raw = entries.pop(entry_name(number), None)
    if raw is None:
        raise ValueError(
            f"the tree refers to the entry {number!r:.50}, which is missing or used before"
        )
    return raw


def _decode_bytes(payload: object, entries: Entries) -> bytes:
    if isinstance(payload, str):
        return base64.b64decode(payload, validate=True)
    return bytes(_take(payload, entries))


def _decode_tensor(payload: Any, entries: Entries) -> torch.Tensor:
    name, shape, number = payload
    dtype = _find_dtype(name, TENSOR_DTYPES)
    raw = _take(number, entries)
    _check_size(shape, dtype.itemsize, raw)
    flat = torch.empty(len(raw), dtype=torch.uint8, device="cpu")
    flat.numpy()[:] = raw
    # Autograd does not take a detached tensor for a view.
    tensor = flat.view(dtype).reshape(shape).detach()
    order = entries.orders.get(str(number))
    if order is None:
        return tensor
    require(sorted(order) == list(range(tensor.ndim)), f"axes in the order {order!r:.100}")
    return in_memory_order(tensor, order)


def _decode_array(payload: Any, entries: Entries) -> npt.NDArray[Any]:
    name, shape, number = payload
    dtype = _find_plain_dtype(name)
    raw = _take(number, entries)
    _check_size(shape, dtype.itemsize, raw)
    array: npt.NDArray[Any] = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = raw
    return array


def _check_size(shape: Any, item_bytes: int, raw: memoryview | bytes) -> None:
    require(
        type(shape) is list and all(type(n) is int and n >= 0 for n in shape),
        f"invalid shape {shape!r:.100}",
    )
    # The product of very many sizes takes forever.
    require(len(shape) <= _MAX_NDIM, f"{len(shape)} axes")
    # The second: on some shapes without elements, numpy and torch overflow.
    require(
        math.prod(shape) * item_bytes == len(raw),
        f"shape {shape!r:.100} contradicts {len(raw)} bytes",
    )
    require(
        math.prod(n for n in shape if n) * item_bytes < 2**63, f"shape {shape!r:.100} is too large"
    )


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


def _check_hashes(keys: Sequence[Any]) -> None:
    # Numbers can be chosen so that their hashes are equal, and then every key is compared with
    # every other.
    hashes = set(map(hash, keys))
    require(2 * len(hashes) >= len(keys) - _MAX_COLLISIONS, "keys that were chosen to take forever")


def _decode_dict(payload: list[Any]) -> dict[Any, Any]:
    _check_hashes(payload[::2])
    result = dict(zip(payload[::2], payload[1::2], strict=True))
    require(2 * len(result) == len(payload), "a dict has a key twice")
    return result


def _decode_set(payload: list[Any]) -> set[Any]:
    _check_hashes(payload)
    result = set(payload)
    require(len(result) == len(payload), "a set has an element twice")
    return result


def _decode_defaultdict(payload: list[Any]) -> object:
    name, items = payload
    require(name in FACTORIES and type(items) is dict, f"invalid defaultdict of {name!r:.50}")
    return collections.defaultdict(FACTORIES[name], items)


def _decode_attributes(namespace: Any, attributes: dict[Any, Any]) -> object:
    require(
        all(type(name) is str for name in attributes),
        "an attribute has a name that is not a string",
    )
    vars(namespace).update(attributes)
    return namespace


def _decode_datetime(payload: dict[str, Any]) -> object:
    naive = datetime.datetime(*_several(int, 7, payload["fields"]))
    return naive.replace(fold=payload["fold"], tzinfo=payload["tzinfo"])


def _decode_path(payload: list[Any]) -> object:
    name, text = payload
    cls = PATHS[name]
    if issubclass(cls, pathlib.Path) and cls is not type(pathlib.Path()):
        # A path of another platform can be looked at, not used.
        cls = PATHS["Pure" + name]
    return cls(text)


def _decode_registered(payload: Any, entries: Entries) -> object:
    name, state = payload
    registration = registration_named(name)
    # The result of a class from a state with unknown objects could not be saved again as it was
    # stored.
    if registration is None or (entries.has_unknown and any(unknown_objects(state))):
        require(type(name) is str, f"a class named {name!r:.50}")
        entries.has_unknown = True
        return UnknownObject(name, state)
    try:
        return registration.from_state(state)
    except Exception as error:
        # The bytes are as they were saved: the class is another one than it was then, or wrong.
        entries.has_unknown = True
        return UnknownObject(name, state, f"{type(error).__name__}: {error}")


def _several(cls: type, count: int, values: Any) -> list[Any]:
    expected = (
        type(values) is list
        and len(values) == count
        and all(type(value) is cls for value in values)
    )
    require(expected, f"{count} of type {cls.__name__} expected")
    return values  # type: ignore[no-any-return]


ENTRY_DECODERS: dict[str, Callable[[Any, Entries], object]] = {
    "$bytes": _decode_bytes,
    "$bytearray": lambda payload, entries: bytearray(_decode_bytes(payload, entries)),
    "$tensor": _decode_tensor,
    "$ndarray": _decode_array,
    "$object": _decode_registered,
}

DECODERS: dict[str, tuple[type, Callable[[Any], object]]] = {
    "$hole": (type(None), lambda payload: HOLE),
    "$int": (str, lambda payload: int(payload, 16)),
    "$float": (str, lambda payload: struct.unpack(">d", bytes.fromhex(payload))[0]),
    "$str": (
        str,
        lambda payload: base64.b64decode(payload, validate=True).decode("utf-8", "surrogatepass"),
    ),
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
    "$SimpleNamespace": (
        dict,
        lambda payload: _decode_attributes(types.SimpleNamespace(), payload),
    ),
    "$date": (list, lambda payload: datetime.date(*_several(int, 3, payload))),
    "$datetime": (dict, _decode_datetime),
    "$timedelta": (list, lambda payload: datetime.timedelta(*_several(int, 3, payload))),
    "$timezone": (list, lambda payload: datetime.timezone(*payload)),
    "$path": (list, _decode_path),
    "$torch.dtype": (str, lambda payload: _find_dtype(payload, DTYPES)),
    "$torch.device": (str, lambda payload: torch.device(payload)),
    "$torch.Size": (list, lambda payload: torch.Size(_several(int, len(payload), payload))),
    "$numpy": (list, _decode_scalar),
}


def _find_dtype(name: Any, table: Mapping[str, torch.dtype]) -> torch.dtype:
    require(name in table, f"there is no such dtype in this torch: {name!r:.50}")
    return table[name]


def _find_plain_dtype(name: Any) -> np.dtype[Any]:
    require(
        type(name) is str and bool(re.fullmatch(r"[<>|][a-zA-Z]\d+(\[\w+\])?", name)),
        f"dtype {name!r:.50}",
    )
    dtype: np.dtype[Any] = np.dtype(name)
    require(is_plain_dtype(dtype), f"dtype {name!r:.50}")
    return dtype

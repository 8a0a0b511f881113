"""Registered classes, the exact comparison of objects, and blobs of the reference library."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import json
import struct
import types
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy
import torch

from distckpt import register_object_type


@register_object_type
class Color(enum.Enum):
    RED = 1
    BLUE = "b"


@register_object_type
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@register_object_type
class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@register_object_type
class Pair(NamedTuple):
    left: object
    right: object = 0


@register_object_type
@dataclasses.dataclass(frozen=True)
class Point:
    x: object
    y: object = dataclasses.field(default_factory=list)


class Box:
    def __init__(self, content: object) -> None:
        self.content = content


register_object_type(
    Box, "tests.Box", to_state=lambda box: [box.content], from_state=lambda state: Box(*state)
)


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bare(a) == bare(b)


def bare(obj: Any) -> Any:  # noqa: C901 one branch a type
    """Turn an object into nested tuples of types and bits, which `==` compares exactly."""
    parts: Any = obj
    if isinstance(obj, torch.Tensor):
        bits = torch.empty(obj.numel(), dtype=obj.dtype).copy_(obj.reshape(-1)).view(torch.uint8)
        parts = (obj.dtype, tuple(obj.shape), bits.numpy().tobytes())
    elif isinstance(obj, np.ndarray | np.generic) and not isinstance(obj, np.str_ | np.bytes_):
        parts = (obj.dtype.str, obj.shape, obj.tobytes())
    elif isinstance(obj, float | complex):
        parts = struct.pack("2d", obj.real, obj.imag)
    elif isinstance(obj, dict):
        parts = (
            getattr(obj, "default_factory", None),
            [(bare(key), bare(value)) for key, value in obj.items()],
        )
    elif isinstance(obj, collections.deque):
        parts = (obj.maxlen, [bare(item) for item in obj])
    elif isinstance(obj, list | tuple):
        parts = [bare(item) for item in obj]
    elif isinstance(obj, set | frozenset):
        parts = sorted(repr(bare(item)) for item in obj)
    elif isinstance(obj, argparse.Namespace | types.SimpleNamespace | Point | Box):
        parts = bare(vars(obj))
    elif isinstance(obj, slice):
        parts = bare([obj.start, obj.stop, obj.step])
    elif isinstance(obj, datetime.datetime):
        parts = (obj.replace(tzinfo=None), obj.fold, bare(obj.tzinfo))
    elif isinstance(obj, datetime.timezone):
        parts = repr(obj)  # Equality ignores the name.
    return type(obj), parts


def reference_blob(tree: object, entries: dict[str, bytes] | None = None, **metadata: str) -> bytes:
    """Make a blob with the reference library, so that what is read does not come from the code
    under test.
    """
    arrays = {name: np.frombuffer(raw, np.uint8) for name, raw in (entries or {}).items()}
    text = tree if isinstance(tree, str) else json.dumps(tree)
    return safetensors.numpy.save(arrays, {"tree": text, "codec_version": "1", **metadata})

"""What both directions of the codec share: the vocabulary of the tree, its text, and the limits on it."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

MAX_DEPTH = 128
"""Containers inside one another. Each takes up to four Python calls, of 1000 that Python allows by default."""

Json = Any
Raw = bytes | bytearray | memoryview


class Hole:
    """Type of `HOLE`."""

    def __repr__(self) -> str:
        return "<hole>"

    def __reduce__(self) -> str:
        # A string names a global of this module: copies are the same object.
        return "HOLE"


HOLE = Hole()
"""Stands in a list for a value that is kept elsewhere, so that the other items keep their positions."""


FACTORIES: dict[str | None, type | None] = {
    None: None,
    **{factory.__name__: factory for factory in (bool, dict, float, int, list, set, str, tuple)},
}
PATHS: dict[str, type[pathlib.PurePath]] = {
    cls.__name__: cls
    for cls in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}

DTYPES: dict[str, torch.dtype] = {
    str(value)[len("torch.") :]: value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
TENSOR_DTYPES = {
    name: dtype
    for name, dtype in DTYPES.items()
    if re.fullmatch(r"bool|u?int(8|16|32|64)|b?float\d+(_\w+)?|complex\d+", name)
}
"""Those with ordinary items: quantised and sub-byte integer types are left out."""


def is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    """Tell whether items are bytes that mean the same on every machine, and `dtype.str` says all about them."""
    ordinary = dtype.kind in "biufcSUVmM" and dtype.char not in "gG" and dtype.names is None and dtype.itemsize > 0
    return bool(ordinary and np.dtype(dtype.str) == dtype)


def to_text(tree: Json) -> str:
    """Write a tree as JSON, dicts in their own order."""
    # Cycles were found before.
    return json.dumps(tree, ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":"))


def entry_name(number: object) -> str:
    """Name the entry that the tree refers to by a number."""
    return f"{number:08}"


def is_tagged(node: Mapping[str, object]) -> bool:
    """Tell whether a JSON object is `{"$<kind>": <payload>}`; a dict that looks like this is stored as pairs."""
    return len(node) == 1 and next(iter(node)).startswith("$")


def type_name(cls: type) -> str:
    """Name a class with its module, a builtin one without."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def require(condition: bool, what: str) -> None:
    """Raise ValueError unless what is read fulfils a condition; `decode` turns it into CorruptCheckpointError."""
    if not condition:
        raise ValueError(what)

"""Tables as bytes: named numpy columns and one JSON value, in one safetensors blob. Used in messages and on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

Column = npt.NDArray[Any]

_JSON = "json"


def pack(fields: Any, columns: Mapping[str, Column]) -> bytes:
    """Encode a JSON-able value and arrays; the inverse of `unpack`."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    arrays = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    return safetensors.numpy.save({_JSON: np.frombuffer(text, np.uint8), **arrays})


def unpack(data: bytes, parse: Callable[[bytes], Any] = json.loads) -> tuple[Any, dict[str, Column]]:
    """Decode what `pack` made; a ValueError says that it is not such a table. `parse` makes the value of its JSON."""
    try:
        columns = safetensors.numpy.load(data)
        text = columns.pop(_JSON)
        return parse(text.tobytes()), columns
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a table of columns: {type(error).__name__}: {error}") from error

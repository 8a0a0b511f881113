"""Objects as JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np

from distckpt._base.lazy import torch
from distckpt._format.codec.encode import UnknownObject

_MAX_ELEMENTS = 1000
"""Of tensors whose values are shown."""
_MAX_DECIMAL_BITS = 1 << 12
"""Python prints longer integers as decimals slowly, and those over 4300 digits not at all; they are
shown in hex.
"""


def plain(value: Any) -> Any:
    """Convert an object to JSON values: other types become text, tensors and arrays a summary."""
    if isinstance(value, Mapping):
        return {_name(key): plain(item) for key, item in value.items()}
    if isinstance(value, UnknownObject):
        return {repr(value): plain(value.state)}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _plain_array(value)
    if isinstance(value, np.generic):
        return plain(value.item())
    if _is_json(value):
        return value
    # Last, since it may import torch, which most pages do without.
    return _plain_array(value) if isinstance(value, torch.Tensor) else _text(value)


def _plain_array(array: torch.Tensor | np.ndarray[Any, Any]) -> dict[str, Any]:
    is_small = math.prod(array.shape) <= _MAX_ELEMENTS
    return {
        "dtype": str(array.dtype).removeprefix("torch."),
        "shape": list(array.shape),
        "values": plain(array.tolist()) if is_small else None,
    }


def _name(key: object) -> str:
    return key if isinstance(key, str) else _text(key)


def _is_json(value: object) -> bool:
    is_scalar = value is None or isinstance(value, str | bool | int | float)
    return is_scalar and not _is_long(value)


def _text(value: object) -> str:
    return hex(value) if _is_long(value) else repr(value)


def _is_long(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and value.bit_length() > _MAX_DECIMAL_BITS

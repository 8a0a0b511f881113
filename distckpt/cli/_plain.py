"""Objects as JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from distckpt._base.lazy import torch
from distckpt._format.codec.encode import UnknownObject

_MAX_ELEMENTS = 1000
"""Largest number of elements of a tensor that is shown in full."""
_NUM_AT_EDGE = 3
_MAX_DECIMAL_BITS = 1 << 12
"""Show longer integers in hex.

Python prints them as decimals slowly, and over 4300 digits not at all.
"""


def plain(value: Any, max_elements: float = _MAX_ELEMENTS) -> Any:
    """Convert an object to JSON values.

    Other types become text. Tensors and arrays become a description and their values, or the first
    and last of them where there are more than `max_elements`.
    """
    if isinstance(value, Mapping):
        return {_name(key): plain(item, max_elements) for key, item in value.items()}
    if isinstance(value, UnknownObject):
        return {repr(value): plain(value.state, max_elements)}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, max_elements) for item in value]
    if isinstance(value, np.ndarray):
        return _plain_array(value, max_elements)
    if isinstance(value, np.generic):
        return plain(value.item())
    if _is_json(value):
        return value
    # Last, since it may import torch, which most pages do without.
    if isinstance(value, torch.Tensor):
        return _plain_array(value, max_elements)
    return _text(value)


def without_middle(values: Sequence[Any]) -> list[Any]:
    """Return the first and the last of some values."""
    return [*values[:_NUM_AT_EDGE], "...", *values[-_NUM_AT_EDGE:]]


def _plain_array(array: torch.Tensor | np.ndarray[Any, Any], max_elements: float) -> dict[str, Any]:
    if math.prod(array.shape) <= max_elements:
        values = array.tolist()
    else:
        flat = array.reshape(-1)
        values = without_middle([*flat[:_NUM_AT_EDGE].tolist(), *flat[-_NUM_AT_EDGE:].tolist()])
    return {
        "dtype": str(array.dtype).removeprefix("torch."),
        "shape": list(array.shape),
        "values": plain(values),
    }


def _name(key: object) -> str:
    if isinstance(key, str):
        return key
    return _text(key)


def _is_json(value: object) -> bool:
    is_scalar = value is None or isinstance(value, str | bool | int | float)
    return is_scalar and not _is_long(value)


def _text(value: object) -> str:
    if _is_long(value):
        return hex(value)
    return repr(value)


def _is_long(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and value.bit_length() > _MAX_DECIMAL_BITS

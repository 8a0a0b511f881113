"""Tensor-by-tensor building blocks with bounded memory."""

from __future__ import annotations

from typing import Any


def estimate_array_nbytes(array: Any) -> int:
    """Return the bytes of an array's elements."""
    return int(array.nbytes)

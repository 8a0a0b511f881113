"""Settings of quantized tensors that the manifest keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def are_settings(value: object) -> bool:
    """Return whether a value is a result of `settings_of`."""
    if not isinstance(value, dict):
        return False
    blocks = value.get("blocks")
    bits = value.get("num_bits")
    if not isinstance(blocks, list) or not isinstance(bits, list):
        return False
    if any(type(number) is not int for number in bits):
        return False
    shapes = value.get("shapes", {})
    if not isinstance(shapes, dict) or not all(map(is_shape, shapes.values())):
        return False
    for block in blocks:
        if not isinstance(block, list) or not block_of({"block_structure": block}):
            return False
    return True


def is_shape(value: object) -> bool:
    """Return whether a value is the shape of a non-empty tensor."""
    return isinstance(value, list) and all(type(size) is int and size > 0 for size in value)


def block_of(weights: Mapping[str, Any]) -> list[int] | None:
    """Return the rows and columns that share a scale, or None.

    A configuration names them, or something else.
    """
    block = weights.get("weight_block_size") or weights.get("block_structure")
    if not block:
        block = [1, weights.get("group_size")]
    if is_shape(block) and len(block) == 2:
        return list(block)
    return None

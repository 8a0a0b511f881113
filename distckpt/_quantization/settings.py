"""What the manifest keeps of a configuration of quantized tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def are_settings(value: object) -> bool:
    """Tell whether a value is what `settings_of` returns for quantized tensors."""
    if not isinstance(value, dict):
        return False
    blocks, bits = value.get("blocks"), value.get("num_bits")
    if not isinstance(blocks, list) or not isinstance(bits, list):
        return False
    if any(type(number) is not int for number in bits):
        return False
    shapes = value.get("shapes", {})
    if not isinstance(shapes, dict) or not all(map(is_shape, shapes.values())):
        return False
    return all(isinstance(each, list) and block_of({"block_structure": each}) for each in blocks)


def is_shape(value: object) -> bool:
    """Tell whether a value is the shape of a tensor that is not empty."""
    return isinstance(value, list) and all(type(size) is int and size > 0 for size in value)


def block_of(weights: Mapping[str, Any]) -> list[int] | None:
    """Return the rows and columns that share a scale, as a configuration says; None if it says
    something else.
    """
    named = weights.get("weight_block_size") or weights.get("block_structure")
    block = named or [1, weights.get("group_size")]
    is_pair = isinstance(block, list) and len(block) == 2
    return block if is_pair and all(type(n) is int and n > 0 for n in block) else None

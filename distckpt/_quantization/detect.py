"""Finding quantised tensors among stored ones: by names, dtypes and shapes, and by the configuration beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from distckpt._base.dtypes import FROM_NAME, TO_NAME
from distckpt._geometry.mapped import TensorInfo
from distckpt._quantization.numbers import NUMBERS
from distckpt._quantization.quantized import E8M0, QuantizedTensor, StoredPart


class Naming(NamedTuple):
    """How the parts of a tensor are named: endings of keys that stand in the place of the tensor's own ending."""

    ending: str
    codes: str
    others: Mapping[str, str]


NAMINGS = (
    Naming("", "_blocks", {"scale": "_scales"}),
    Naming("", "_packed", {"scale": "_scale", "global_scale": "_global_scale", "shape": "_shape"}),
    Naming("", "", {"scale": "_scale_inv"}),
    Naming("", "", {"scale": "_scale", "global_scale": "_scale_2"}),
    Naming("weight", "weight", {"scale": "scale"}),
)
_UNKNOWN = ("_zero_point", "_zero_points", "_zeros", "_offset", "_g_idx", "_zp")
_UNKNOWN_OF_MODULES = ("zero_point", "pre_quant_scale", "smooth_scale")
"""With one of these beside the codes, or in the module, values are more than codes times scales."""
_OF_ACTIVATIONS = ("input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale")
"""Scales of a module that belong to none of its weights."""
_BLOCKS = (128, 32)
_MODEL_DTYPES = {
    str(dtype).removeprefix("torch."): name
    for dtype, name in TO_NAME.items()
    if dtype.is_floating_point and dtype.itemsize > 1
}
"""What a configuration may name: looking any other name up in torch could import a module of it."""
_MAX_ELEMENTS = 1 << 62


def find_quantized(
    tensors: Mapping[str, TensorInfo], quantization: Mapping[str, Any] | None
) -> dict[str, QuantizedTensor]:
    """Find the quantised tensors among stored ones.

    Args:
        tensors: all stored tensors.
        quantization: what a configuration says: the "dtype" of the model, and what `settings_of` returns.

    Returns:
        Quantised tensors by the key that they have in the model.
    """
    quantization = quantization or {}
    dtype = _MODEL_DTYPES.get(str(quantization.get("dtype")), "BF16")
    blocks, num_bits = quantization.get("blocks", []), set(quantization.get("num_bits", []))
    found: dict[str, QuantizedTensor] = {}
    for key in tensors:
        for naming in NAMINGS:
            if not key.endswith(naming.codes):
                continue
            stem = key[: len(key) - len(naming.codes)]
            parts = {role: stem + ending for role, ending in naming.others.items() if stem + ending in tensors}
            module = key.rpartition(".")[0]
            unknown = [stem + ending for ending in _UNKNOWN] + [f"{module}.{name}" for name in _UNKNOWN_OF_MODULES]
            # What is stored under the name of the tensor itself is that tensor; of two kinds of scales, which?
            is_stored = naming.codes != naming.ending and stem + naming.ending in tensors
            is_ambiguous = all(f"{stem}{ending}" in tensors for ending in ("_scale", "_scale_inv"))
            if "scale" not in parts or is_stored or is_ambiguous or any(name in tensors for name in unknown):
                continue
            described = {
                role: StoredPart(name, tensors[name].dtype, tuple(tensors[name].shape))
                for role, name in {"codes": key, **parts}.items()
            }
            quantized = _describe(described, dtype, blocks, num_bits)
            if quantized is not None:
                names = [f"{module}.{each}" for each in _OF_ACTIVATIONS]
                companions = tuple(name for name in names if name in tensors)
                found[stem + naming.ending] = replace(quantized, companions=companions)
                break
    return found


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes of blocks that a `quantization_config` names (rows, columns), and numbers of bits of weights."""
    groups = config.get("config_groups")
    each_group = groups.values() if isinstance(groups, dict) else [{"weights": config}]
    weights = [group.get("weights") for group in each_group if isinstance(group, dict)]
    blocks: list[Sequence[int]] = []
    num_bits: list[int] = []
    for each in (each for each in weights if isinstance(each, dict)):
        block = each.get("weight_block_size") or each.get("block_structure")
        size = each.get("group_size")
        if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
            blocks.append(block)
        elif type(size) is int and size > 0:
            blocks.append((1, size))
        if type(each.get("num_bits")) is int:
            num_bits.append(each["num_bits"])
    return {"blocks": blocks, "num_bits": num_bits}


def _describe(
    parts: Mapping[str, StoredPart], dtype: str, blocks: Sequence[Sequence[int]], num_bits: set[int]
) -> QuantizedTensor | None:
    """Describe a tensor by its parts; None where they are of no form that is known."""
    codes, scale = parts["codes"], parts["scale"]
    number = _number(codes.dtype, scale.dtype, "global_scale" in parts)
    if number is None or not codes.shape or (number == "int4" and num_bits - {4}):
        return None
    has_groups = codes.key.endswith("_blocks") and len(codes.shape) > 2
    per_item = NUMBERS[number].per_byte * FROM_NAME[codes.dtype].itemsize
    shape = codes.shape[:-2] if has_groups else codes.shape[:-1]
    shape = (*shape, math.prod(codes.shape[len(shape) :]) * per_item)
    grid = (1,) * len(shape) if math.prod(scale.shape) == 1 else scale.shape + (1,) * (len(shape) - len(scale.shape))
    is_one = "global_scale" not in parts or math.prod(parts["global_scale"].shape) == 1
    if len(grid) != len(shape) or not is_one or max(shape) > _MAX_ELEMENTS:
        return None
    # A configuration that contradicts the scales must not be passed over.
    rows = [block[0] for block in blocks] or _BLOCKS
    columns = {"e2m1": [16 if scale.dtype == "F8_E4M3" else 32], "int4": [*(block[1] for block in blocks), 32, 64, 128]}
    default = [block[1] for block in blocks] or _BLOCKS
    axes = zip(shape, grid, [[]] * (len(shape) - 2) + [rows, columns.get(number, default)][-len(shape) :], strict=True)
    block = tuple(_block(size, count, candidates) for size, count, candidates in axes)
    if 0 in block:
        return None
    is_divided = "global_scale" in parts and parts["global_scale"].key.endswith("_global_scale")
    return QuantizedTensor(shape, dtype, number, block, parts, transposed=has_groups, divided=is_divided)


def _number(codes: str, scale: str, has_global: bool) -> str | None:
    """Return the number format of codes, given the dtypes of codes and scales; None for none that is known."""
    if codes in ("U8", "F4", "I8") and (scale in E8M0 or (scale == "F8_E4M3" and has_global)):
        return "e2m1"
    if scale not in ("F32", "BF16", "F16", *(E8M0 if codes == "F8_E4M3" else ())):
        return None
    return {"F8_E4M3": "e4m3", "I8": "int8", "I32": "int4"}.get(codes)


def _block(size: int, count: int, candidates: Iterable[int]) -> int:
    """Return how many of `size` indices share one of `count` scales; 0 where no known size fits."""
    if count == 1:
        return max(1, size)
    if count == size:
        return 1
    return next((block for block in candidates if -(-size // block) == count), 0)

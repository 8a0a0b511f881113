"""Finding quantized tensors among stored ones: by names, dtypes and shapes, and by the
configuration beside them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from distckpt._base.dtypes import FROM_NAME, TO_NAME
from distckpt._quantization.numbers import NUMBERS
from distckpt._quantization.quantized import E8M0, QuantizedTensor, StoredPart
from distckpt._rules.mapped import TensorInfo


class Naming(NamedTuple):
    """How the parts of a tensor are named: endings of keys that stand in the place of the tensor's
    own ending.
    """

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
_OF_ACTIVATIONS = (
    "input_scale",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "k_scale",
    "v_scale",
)
"""Scales of a module that belong to none of its weights."""
_BLOCKS = [128, 32]
FIELDS = ("quantization_config", "compression_config", "quantization")
"""Of a configuration, for what it says of quantized tensors."""
_MODEL_DTYPES = {
    str(dtype).removeprefix("torch."): name
    for dtype, name in TO_NAME.items()
    if dtype.is_floating_point and dtype.itemsize > 1
}
"""What a configuration may name: looking any other name up in torch could import a module of it."""
_MAX_ELEMENTS = 1 << 62
_MAX_AXES = 4
"""Of scales with fewer axes than the tensor: there may be very many ways in which they fit more."""


def find_quantized(
    tensors: Mapping[str, TensorInfo], quantization: Mapping[str, Any] | None
) -> dict[str, QuantizedTensor]:
    """Find the quantized tensors among stored ones.

    Args:
        tensors: all stored tensors.
        quantization: what `settings_of` returns; None without a configuration.

    Returns:
        Quantized tensors by the key that they have in the model.
    """
    settings = quantization or {}
    found: dict[str, QuantizedTensor] = {}
    if settings.get("transformed"):
        return found
    for key in tensors:
        for naming in NAMINGS:
            if not key.endswith(naming.codes):
                continue
            stem = key[: len(key) - len(naming.codes)]
            parts = {
                role: stem + ending
                for role, ending in naming.others.items()
                if stem + ending in tensors
            }
            module = key.rpartition(".")[0]
            unknown = [stem + ending for ending in _UNKNOWN] + [
                f"{module}.{name}" for name in _UNKNOWN_OF_MODULES
            ]
            # What is stored under the name of the tensor itself is that tensor; of two kinds of
            # scales, which?
            is_stored = naming.codes != naming.ending and stem + naming.ending in tensors
            is_ambiguous = all(f"{stem}{ending}" in tensors for ending in ("_scale", "_scale_inv"))
            if (
                "scale" not in parts
                or is_stored
                or is_ambiguous
                or any(name in tensors for name in unknown)
            ):
                continue
            described = {
                role: StoredPart(name, tensors[name].dtype, tuple(tensors[name].shape))
                for role, name in {"codes": key, **parts}.items()
            }
            quantized = _describe(described, settings)
            if quantized is not None:
                names = [f"{module}.{each}" for each in _OF_ACTIVATIONS]
                companions = tuple(name for name in names if name in tensors)
                found[stem + naming.ending] = replace(quantized, companions=companions)
                break
    return found


def parts_of(config: Mapping[str, Any]) -> list[Any]:
    """Return a configuration and those inside it, of text models and towers, without what is said
    of quantisation.
    """
    parts = [config]
    for part in parts:
        parts += [
            value
            for field, value in part.items()
            if isinstance(value, dict) and field not in FIELDS
        ]
    return parts


def settings_of(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return what configurations say about quantized tensors, wherever in them; None for nothing.

    Args:
        configs: by the name of the file.

    Returns:
        The "file" that says so, "dtype" of the model, "blocks" (rows, columns) and "num_bits" of
        weights that are named, the bits of those that are "asymmetric", and whether weights are
        "transformed" besides.
    """
    parts = [(file, part) for file, config in configs.items() for part in parts_of(config)]
    found = [
        (file, part, part[field])
        for file, part in parts
        for field in FIELDS
        if isinstance(part.get(field), dict)
    ]
    found = [each for each in found if each[2]]
    if not found:
        return None
    speakers = [*configs.values(), *(part for _, part, _ in found)]
    dtypes = (part.get(field) for part in speakers for field in ("dtype", "torch_dtype"))
    weights = [each for *_, quantization in found for each in _weights_of(quantization)]
    transforms = [quantization.get("transform_config") for *_, quantization in found]
    return {
        "file": found[0][0],
        "dtype": next((dtype for dtype in dtypes if isinstance(dtype, str)), None),
        "blocks": [block for block in map(_block_of, weights) if block],
        "num_bits": [each["num_bits"] for each in weights if type(each.get("num_bits")) is int],
        "asymmetric": [each.get("num_bits") for each in weights if each.get("symmetric") is False],
        "transformed": any(
            isinstance(each, dict) and each.get("config_groups", each) for each in transforms
        ),
    }


def are_settings(value: object) -> bool:
    """Tell whether a value is what `settings_of` returns, or None."""
    if not isinstance(value, dict):
        return value is None
    blocks, bits = value.get("blocks"), value.get("num_bits")
    if (
        not isinstance(blocks, list)
        or not isinstance(bits, list)
        or any(type(number) is not int for number in bits)
    ):
        return False
    return all(isinstance(each, list) and _block_of({"block_structure": each}) for each in blocks)


def _block_of(weights: Mapping[str, Any]) -> list[int] | None:
    block = (
        weights.get("weight_block_size")
        or weights.get("block_structure")
        or [1, weights.get("group_size")]
    )
    is_block = (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    )
    return block if is_block else None


def _weights_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a `quantization_config` says of weights: for all, or for each of its groups."""
    groups = config.get("config_groups")
    each_group = groups.values() if isinstance(groups, dict) else [{"weights": config}]
    weights = [group.get("weights") for group in each_group if isinstance(group, dict)]
    return [each for each in weights if isinstance(each, dict)]


def _describe(
    parts: Mapping[str, StoredPart], settings: Mapping[str, Any]
) -> QuantizedTensor | None:
    """Describe a tensor by its parts; None where they are of no form that is known."""
    codes, scale, overall = parts["codes"], parts["scale"], parts.get("global_scale")
    blocks = settings.get("blocks", [])
    number = _number(codes.dtype, scale.dtype, overall is not None)
    if (
        number is None
        or not codes.shape
        or (number == "int4" and set(settings.get("num_bits", [])) - {4})
    ):
        return None
    # The configuration says that there are zero points, and none are stored.
    if {"int4": 4, "int8": 8}.get(number, 0) in settings.get("asymmetric", []):
        return None
    has_groups = codes.key.endswith("_blocks") and len(codes.shape) > 2
    per_item = NUMBERS[number].per_byte * FROM_NAME[codes.dtype].itemsize
    shape = codes.shape[:-2] if has_groups else codes.shape[:-1]
    shape = (*shape, math.prod(codes.shape[len(shape) :]) * per_item)
    grid = _grid(scale.shape, shape, is_by_channel=bool(settings) and not blocks)
    # One scale of all scales, or one for each expert.
    of_experts = shape[:1] if len(shape) > 2 and grid[:1] == shape[:1] else (1,)
    is_fitting = overall is None or (math.prod(overall.shape), *overall.shape[:1]) in (
        (1,),
        (1, 1),
        2 * of_experts,
    )
    if len(grid) != len(shape) or not is_fitting or max(shape) > _MAX_ELEMENTS:
        return None
    # A configuration that contradicts the scales must not be passed over.
    rows, columns = ([block[axis] for block in blocks] for axis in (0, 1))
    widths = {"e2m1": [16 if scale.dtype == "F8_E4M3" else 32], "int4": columns or [32, 64, 128]}
    sizes: list[list[int]] = [[]] * (len(shape) - 2) + [
        rows or _BLOCKS,
        widths.get(number, columns or _BLOCKS),
    ]
    are_known = [True] * (len(shape) - 2) + [bool(rows), bool(columns) or number == "e2m1"]
    axes = zip(shape, grid, sizes[-len(shape) :], are_known[-len(shape) :], strict=True)
    block = tuple(_block(*axis) for axis in axes)
    # One scale for more than a group: these are no numbers of 4 bits.
    if 0 in block or (number == "e2m1" and block[-1] > widths["e2m1"][0]):
        return None
    is_divided = overall is not None and overall.key.endswith("_global_scale")
    dtype = _MODEL_DTYPES.get(str(settings.get("dtype")), "BF16")
    return QuantizedTensor(
        shape, dtype, number, block, parts, transposed=has_groups, divided=is_divided
    )


def _grid(scales: tuple[int, ...], shape: tuple[int, ...], is_by_channel: bool) -> tuple[int, ...]:
    """Return how many blocks there are along each axis; () where that cannot be known.

    Scales with fewer axes than the tensor are for its first ones. Where they fit others as well (a
    square matrix), a configuration without blocks must say that there is one for each channel.
    """
    if math.prod(scales) == 1:
        return (1,) * len(shape)
    if len(scales) >= len(shape) or len(shape) > _MAX_AXES:
        return scales
    while scales[-1] == 1:
        scales = scales[:-1]
    num_fits = sum(sizes == scales for sizes in itertools.combinations(shape, len(scales)))
    is_known = scales == shape[: len(scales)] and (num_fits == 1 or is_by_channel)
    return scales + (1,) * (len(shape) - len(scales)) if is_known else ()


def _number(codes: str, scale: str, has_global: bool) -> str | None:
    """Return the number format of codes, given the dtypes of codes and scales; None for none that
    is known.
    """
    if codes in ("U8", "F4", "I8") and (scale in E8M0 or (scale == "F8_E4M3" and has_global)):
        return "e2m1"
    if scale not in ("F32", "BF16", "F16", *(E8M0 if codes == "F8_E4M3" else ())):
        return None
    return {"F8_E4M3": "e4m3", "I8": "int8", "I32": "int4"}.get(codes)


def _block(size: int, count: int, candidates: Iterable[int], are_known: bool) -> int:
    """Return how many of `size` indices share one of `count` scales; 0 where not one known size
    fits.

    Candidates that no configuration names must divide the size: where the last block is smaller,
    others fit as well.
    """
    if count == 1:
        return max(1, size)
    if count == size:
        return 1
    fitting = {
        block
        for block in candidates
        if -(-size // block) == count and (are_known or size % block == 0)
    }
    return fitting.pop() if len(fitting) == 1 else 0

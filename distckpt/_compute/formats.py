"""Formats that exports are quantized to.

They define names, blocks and dtypes of the parts, and the fields of config.json.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distckpt._base.dtypes import ITEM_BYTES
from distckpt._quantization.numbers import NUMBERS
from distckpt._quantization.quantized import QuantizedTensor, StoredPart

_LINEAR = ".weight"
NOT_QUANTIZED = (
    "*embed*",
    "*lm_head*",
    "*output_layer*",
    "*norm*",
    "*router*",
    "*.gate.weight",
    "*shared_expert_gate*",
    "*conv1d*",
    "wte.*",
    "wpe.*",
    "*.wte.*",
    "*.wpe.*",
    "*score*",
    "*classifier*",
    "*vision*",
    "*visual*",
    "*patch*",
)
"""Weights that models with quantized ones keep as they are."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A form of quantized tensors.

    Attributes:
        number: the number format of codes.
        codes_dtype: safetensors name of the dtype of codes.
        scale_dtype: safetensors name of the dtype of scales.
        block: rows and columns of a block, 0 for all of them.
        names: endings of the parts that replace "weight" at the end of the name.
        method: `quant_method` of the configuration.
        details: other fields of the configuration; for compressed-tensors, the fields of the
            weights of a group.
        form: for compressed-tensors, the name of the form.
        experts: whether it is for stacks of experts with the axes of transformers in memory
            (gpt-oss).
    """

    number: str
    codes_dtype: str
    scale_dtype: str
    block: tuple[int, int]
    names: Mapping[str, str]
    method: str
    details: Mapping[str, Any]
    form: str = ""
    experts: bool = False


def _weights(num_bits: int, kind: str, strategy: str, **others: int) -> dict[str, Any]:
    return {
        "num_bits": num_bits,
        "type": kind,
        "strategy": strategy,
        **others,
        "symmetric": True,
        "dynamic": False,
    }


_DYNAMIC = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
_FP8 = {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_UE8M0 = {**_FP8, "scale_fmt": "ue8m0"}
_BLOCKS = Format(
    number="e4m3",
    codes_dtype="F8_E4M3",
    scale_dtype="F32",
    block=(128, 128),
    names={"codes": "weight", "scale": "weight_scale_inv"},
    method="fp8",
    details=_FP8,
)
_CHANNELS = Format(
    number="e4m3",
    codes_dtype="F8_E4M3",
    scale_dtype="F32",
    block=(1, 0),
    names={"codes": "weight", "scale": "weight_scale"},
    method="compressed-tensors",
    details=_weights(8, "float", "channel"),
    form="float-quantized",
)

FORMATS: dict[str, Format] = {
    "fp8-block": _BLOCKS,
    "fp8-block-ue8m0": replace(_BLOCKS, scale_dtype="F8_E8M0", details=_UE8M0),
    "fp8-tensor": replace(_CHANNELS, block=(0, 0), details=_weights(8, "float", "tensor")),
    "fp8-channel": _CHANNELS,
    "int8-channel": replace(
        _CHANNELS,
        number="int8",
        codes_dtype="I8",
        details=_weights(8, "int", "channel"),
        form="int-quantized",
    ),
    "mxfp4": Format(
        number="e2m1",
        codes_dtype="U8",
        scale_dtype="U8",
        block=(1, 32),
        names={"codes": "_blocks", "scale": "_scales"},
        method="mxfp4",
        details={},
        experts=True,
    ),
    "mxfp4-packed": Format(
        number="e2m1",
        codes_dtype="I8",
        scale_dtype="F8_E8M0",
        block=(1, 32),
        names={"codes": "weight", "scale": "scale"},
        method="fp8",
        details={**_UE8M0, "expert_dtype": "fp4"},
    ),
    "int4": Format(
        number="int4",
        codes_dtype="I32",
        scale_dtype="BF16",
        block=(1, 32),
        names={"codes": "weight_packed", "scale": "weight_scale", "shape": "weight_shape"},
        method="compressed-tensors",
        details=_weights(4, "int", "group", group_size=32),
        form="pack-quantized",
    ),
    "nvfp4": Format(
        number="e2m1",
        codes_dtype="U8",
        scale_dtype="F8_E4M3",
        block=(1, 16),
        names={
            "codes": "weight_packed",
            "scale": "weight_scale",
            "global_scale": "weight_global_scale",
        },
        method="compressed-tensors",
        details=_weights(4, "float", "tensor_group", group_size=16),
        form="nvfp4-pack-quantized",
    ),
}
"""Formats by the name that `quantize` takes."""


def takes(form: Format, name: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor can be quantized to a format.

    Its name and axes decide, and whole groups of columns.
    """
    if 0 in shape:
        return False
    if form.experts:
        return len(shape) == 3 and not name.endswith(_LINEAR) and shape[-2] % form.block[1] == 0
    per_item = NUMBERS[form.number].per_byte * ITEM_BYTES[form.codes_dtype]
    whole_groups = form.block[0] != 1 or shape[-1] % math.lcm(form.block[1] or 1, per_item) == 0
    return len(shape) == 2 and name.endswith(_LINEAR) and whole_groups


def quantized_as(form: Format, name: str, shape: tuple[int, ...], dtype: str) -> QuantizedTensor:
    """Describe the quantized form of a tensor that the format takes.

    Its shape and dtype are the ones in the model.
    """
    stem = name.removesuffix("weight")
    if form.experts:
        stem = name
        shape = (*shape[:-2], shape[-1], shape[-2])
    rows, columns = form.block
    block = (*(1,) * (len(shape) - 2), rows or shape[-2], columns or shape[-1])
    grid = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
    per_item = NUMBERS[form.number].per_byte * ITEM_BYTES[form.codes_dtype]
    codes = (*shape[:-1], shape[-1] // per_item)
    if form.experts:
        group = form.block[1] // per_item
        codes = (*shape[:-1], codes[-1] // group, group)
    scales = (1,) if form.block == (0, 0) else grid
    shapes = {"codes": codes, "scale": scales, "global_scale": (1,), "shape": (2,)}
    dtypes = {
        "codes": form.codes_dtype,
        "scale": form.scale_dtype,
        "global_scale": "F32",
        "shape": "I32",
    }
    parts = {}
    for role, ending in form.names.items():
        parts[role] = StoredPart(stem + ending, dtypes[role], shapes[role])
    return QuantizedTensor(
        shape,
        dtype,
        form.number,
        block,
        parts,
        transposed=form.experts,
        divided="global_scale" in parts,
    )


def quantization_config(formats: Collection[Format], kept: Sequence[str]) -> dict[str, Any] | None:
    """Return a model's `quantization_config`.

    `kept` are the names of the weights that are not quantized. None where no configuration can
    describe the formats together.
    """
    modules = [name.removesuffix(_LINEAR) for name in kept]
    first = next(iter(formats))
    if any(form.method != first.method for form in formats):
        return None
    if first.method != "compressed-tensors":
        details: dict[str, Any] = {}
        for form in formats:
            details |= form.details
        return {"quant_method": first.method, **details, "modules_to_not_convert": modules}
    if len(formats) > 1:
        return None
    activations = None
    if first.form in ("float-quantized", "int-quantized"):
        activations = {**_DYNAMIC, "type": first.details["type"]}
    group = {
        "targets": ["Linear"],
        "weights": dict(first.details),
        "input_activations": activations,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": first.form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": modules,
    }

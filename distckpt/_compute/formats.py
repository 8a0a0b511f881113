"""Formats of quantized exports, and the tensors that become codes.

Formats define names, blocks and dtypes of the parts, and the fields of config.json.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from distckpt._base.dtypes import FROM_NAME, ITEM_BYTES
from distckpt._base.errors import CheckpointingException
from distckpt._base.messages import check_choice
from distckpt._plan.export import OutputTensor
from distckpt._plan.selection import matches
from distckpt._quantization.numbers import NUMBERS
from distckpt._quantization.quantized import QuantizedTensor, StoredPart

_LINEAR = ".weight"
_NOT_QUANTIZED = (
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


class Format(NamedTuple):
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
    "fp8-block-ue8m0": _BLOCKS._replace(scale_dtype="F8_E8M0", details=_UE8M0),
    "fp8-tensor": _CHANNELS._replace(block=(0, 0), details=_weights(8, "float", "tensor")),
    "fp8-channel": _CHANNELS,
    "int8-channel": _CHANNELS._replace(
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


def _takes(form: Format, name: str, shape: Sequence[int]) -> bool:
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


def _quantized_as(form: Format, name: str, shape: tuple[int, ...], dtype: str) -> QuantizedTensor:
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


def _quantization_config(formats: Mapping[str, Format], kept: Sequence[str]) -> dict[str, Any]:
    """Return a model's `quantization_config`.

    `kept` are the names of the weights that are not quantized.

    Raises:
        CheckpointingException: no configuration can describe the formats together.
    """
    modules = [name.removesuffix(_LINEAR) for name in kept]
    first, *others = formats.values()
    is_compressed = first.method == "compressed-tensors"
    if any(is_compressed or form.method != first.method for form in others):
        raise CheckpointingException(
            f"No config.json can describe {sorted(formats)} in one model: choose one of them."
        )
    if not is_compressed:
        details: dict[str, Any] = {}
        for form in formats.values():
            details |= form.details
        return {"quant_method": first.method, **details, "modules_to_not_convert": modules}
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


# --- The tensors of an export ---------------------------------------------------------------------


_USUAL = ""
"""Pattern for the tensors that models usually quantize."""


class EncodedPart(NamedTuple):
    """A part of the quantized form of a tensor.

    Attributes:
        tensor: the tensor that is quantized.
        quantized: its form.
        role: codes, scales and so on, see `QuantizedTensor`.
    """

    tensor: OutputTensor
    quantized: QuantizedTensor
    role: str


def formats_by_pattern(quantize: str | Mapping[str, str]) -> dict[str, str]:
    """Return the names of formats by pattern.

    A single format is for the tensors that models usually quantize.

    Raises:
        TypeError: these are not names.
        ValueError: a format is unknown, or torch lacks a dtype for it.
    """
    if not isinstance(quantize, str | Mapping):
        raise TypeError(
            "quantize is the name of a format, such as 'fp8-block', or a dict of them by pattern, "
            f"got {quantize!r:.100}"
        )
    formats = {_USUAL: quantize} if isinstance(quantize, str) else dict(quantize)
    for name in formats.values():
        check_choice("quantize", name, tuple(FORMATS))
        for dtype in (FORMATS[name].codes_dtype, FORMATS[name].scale_dtype):
            if dtype not in FROM_NAME:
                raise ValueError(
                    f"quantize={name!r} needs the dtype {dtype}, which torch {torch.__version__} "
                    "lacks."
                )
    return formats


def quantize_outputs(
    outputs: Sequence[OutputTensor], formats: Mapping[str, str], model: Set[str] | None
) -> tuple[list[OutputTensor], dict[str, EncodedPart], Mapping[str, Any]]:
    """Replace tensors by the parts of their quantized form.

    Return all tensors, the parts among them by name, and the `quantization_config` of the model.

    Args:
        outputs: tensors of the export.
        formats: pattern of names -> name of a format; the first that matches counts. With the
            pattern "", the format is for the tensors that models usually quantize.
        model: names of the tensors to quantize, if the model lists them.

    Raises:
        CheckpointingException: a format is for no tensor, no configuration can describe the
            formats, or a part gets the name of another tensor.
    """
    result: list[OutputTensor] = []
    parts: dict[str, EncodedPart] = {}
    unquantized: list[str] = []
    used: dict[str, Format] = {}
    for output in outputs:
        name = _format_for(output, formats, model)
        if name is None:
            result.append(output)
            if len(output.shape) == 2 and output.name.endswith(".weight"):
                unquantized.append(output.name)
            continue
        used[name] = form = FORMATS[name]
        quantized = _quantized_as(form, output.name, output.shape, output.dtype)
        for role, part in quantized.parts.items():
            num_bytes = math.prod(part.shape) * ITEM_BYTES[part.dtype]
            result.append(OutputTensor(part.key, part.dtype, part.shape, num_bytes, output.mapped))
            parts[part.key] = EncodedPart(output, quantized, role)
    unused = sorted(set(formats.values()) - used.keys())
    if unused:
        raise CheckpointingException(
            f"No tensor can be quantized to {unused}: no name matches, or shapes do not fit. "
            "Formats other than mxfp4 are for weights with two axes named '*.weight' (4-bit ones "
            "with whole groups of columns), mxfp4 for '*.experts.*_proj' with three, as "
            "transformers has them in memory for gpt-oss."
        )
    config = _quantization_config(used, unquantized)
    _check_names(result)
    return result, parts, config


def _format_for(
    output: OutputTensor, formats: Mapping[str, str], model: Set[str] | None
) -> str | None:
    """Return the name of the format of a tensor; None when it is not quantized."""
    name = output.name
    dtype = FROM_NAME[output.mapped.dtype]
    fitting = (pattern for pattern in formats if pattern != _USUAL and matches(name, pattern))
    pattern = next(fitting, _USUAL)
    if pattern == _USUAL and (_USUAL not in formats or not _is_usual(name, model)):
        return None
    is_float = dtype.is_floating_point and dtype.itemsize > 1
    format_name = formats[pattern]
    if is_float and _takes(FORMATS[format_name], name, output.shape):
        return format_name
    return None


def _is_usual(name: str, model: Set[str] | None) -> bool:
    if model:
        return name in model
    return not matches(name, _NOT_QUANTIZED)


def _check_names(outputs: Collection[OutputTensor]) -> None:
    names = set()
    for tensor in outputs:
        if tensor.name in names:
            raise CheckpointingException(
                f"{tensor.name!r} is in the checkpoint, and quantizing makes another: rename it."
            )
        names.add(tensor.name)

"""Planning of quantization: tensors of an export become codes and scales."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from distckpt._base.dtypes import FROM_NAME, ITEM_BYTES
from distckpt._base.errors import CheckpointingException
from distckpt._base.messages import check_choice
from distckpt._compute.formats import (
    FORMATS,
    NOT_QUANTIZED,
    Format,
    quantization_config,
    quantized_as,
    takes,
)
from distckpt._plan.export import OutputTensor
from distckpt._plan.selection import matches
from distckpt._quantization.quantized import QuantizedTensor

_USUAL = ""
"""Pattern for the tensors that models usually quantize."""


@dataclass(frozen=True)
class EncodedPart:
    """A part of the quantized form of a tensor.

    Attributes:
        tensor: the tensor that is quantized.
        quantized: its form.
        role: codes, scales and so on, see `QuantizedTensor`.
    """

    tensor: OutputTensor
    quantized: QuantizedTensor
    role: str


@dataclass(frozen=True)
class QuantizedOutputs:
    """The tensors of an export, with quantized tensors replaced by parts.

    Attributes:
        outputs: all tensors.
        parts: parts among the outputs, by name.
        config: the `quantization_config` of the model.
    """

    outputs: list[OutputTensor]
    parts: Mapping[str, EncodedPart]
    config: Mapping[str, Any]


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
    outputs: Sequence[OutputTensor], formats: Mapping[str, str], model: Set[str] | None = None
) -> QuantizedOutputs:
    """Replace tensors by the parts of their quantized form.

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
    used: list[str] = []
    for output in outputs:
        name = _format_for(output, formats, model)
        if name is None:
            result.append(output)
            if len(output.shape) == 2 and output.name.endswith(".weight"):
                unquantized.append(output.name)
            continue
        used.append(name)
        quantized = quantized_as(FORMATS[name], output.name, output.shape, output.dtype)
        for role, part in quantized.parts.items():
            num_bytes = math.prod(part.shape) * ITEM_BYTES[part.dtype]
            result.append(OutputTensor(part.key, part.dtype, part.shape, num_bytes, output.mapped))
            parts[part.key] = EncodedPart(output, quantized, role)
    config = _config({name: FORMATS[name] for name in used}, formats, unquantized)
    _check_names(result)
    return QuantizedOutputs(result, parts, config)


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
    if is_float and takes(FORMATS[format_name], name, output.shape):
        return format_name
    return None


def _is_usual(name: str, model: Set[str] | None) -> bool:
    if model:
        return name in model
    return not matches(name, NOT_QUANTIZED)


def _config(
    used: Mapping[str, Format], formats: Mapping[str, str], unquantized: Sequence[str]
) -> Mapping[str, Any]:
    unused = sorted(set(formats.values()) - used.keys())
    if unused:
        raise CheckpointingException(
            f"No tensor can be quantized to {unused}: no name matches, or shapes do not fit. "
            "Formats other than mxfp4 are for weights with two axes named '*.weight' (4-bit ones "
            "with whole groups of columns), mxfp4 for '*.experts.*_proj' with three, as "
            "transformers has them in memory for gpt-oss."
        )
    config = quantization_config(list(used.values()), unquantized)
    if config is None:
        raise CheckpointingException(
            f"No config.json can describe {sorted(used)} in one model: choose one of them."
        )
    return config


def _check_names(outputs: Collection[OutputTensor]) -> None:
    counts = Counter(tensor.name for tensor in outputs)
    twice = []
    for name, count in counts.items():
        if count > 1:
            twice.append(name)
    if twice:
        raise CheckpointingException(
            f"{twice[0]!r} is in the checkpoint, and quantizing makes another: rename it."
        )

"""Settings of quantized tensors: read from configurations, kept in the manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distckpt._base.errors import CorruptCheckpointError
from distckpt._format.marker import read_file
from distckpt._storage import locations

CONFIG_NAMES = ("config.json", "hf_quant_config.json")
"""Files that may describe the quantization of tensors in their directory; NVIDIA ModelOpt writes
the second one.
"""
_MAX_CONFIG_BYTES = 64 << 20
_METHODS = (
    "fp8",
    "fbgemm_fp8",
    "mxfp4",
    "compressed-tensors",
    "modelopt",
    "modelopt_fp4",
    "quark",
    "w8a8_fp8",
    "w8a8_int8",
)
"""Values of `quant_method` for which values are codes times scales."""
_ALGORITHMS = frozenset({"rotation", "quarot", "svdquant"})
"""Algorithms of AMD Quark that change more than the weights. They change inputs of layers as well,
or add products of matrices.
"""
FIELDS = ("quantization_config", "compression_config", "quantization")
"""Fields of a configuration that describe quantized tensors."""


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


def read_settings(location: str) -> dict[str, Any] | None:
    """Return the settings of quantized tensors, see `settings_of`, or None.

    They are in files next to the tensors.
    """
    configs = {}
    for name in CONFIG_NAMES:
        path = locations.join(location, name)
        try:
            # Not as strict as for headers: models have infinite limits in their configurations.
            config = json.loads(read_file(path, _MAX_CONFIG_BYTES))
        except FileNotFoundError:
            continue
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(
                f"{path!r} is damaged ({error}): restore it from a copy."
            ) from error
        configs[name] = config if isinstance(config, dict) else {}
    return settings_of(configs)


def configurations_in(config: Mapping[str, Any]) -> list[Any]:
    """Return a configuration and those inside it, without quantization.

    Text models and towers have configurations inside.
    """
    parts = [config]
    for part in parts:
        for field, value in part.items():
            if isinstance(value, dict) and field not in FIELDS:
                parts.append(value)
    return parts


def settings_of(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the quantization settings of configurations, None for nothing.

    They may be anywhere in the configurations.

    Args:
        configs: by the name of the file.

    Returns:
        The "file" of the settings, "dtype" of the model, "blocks" (rows, columns) and "num_bits" of
        weights that are named, the bits of those that are "asymmetric", and whether weights are
        also "transformed": True, or the field that says so.
    """
    statements: list[_Statement] = []
    for file, config in configs.items():
        statements += _quantizations(file, config)
    if not statements:
        return None
    weights: list[Mapping[str, Any]] = []
    for statement in statements:
        weights += _weights_of(statement.quantization)
    inner_configs = [statement.config for statement in statements]
    return {
        "file": statements[0].file,
        "dtype": _dtype_in([*configs.values(), *inner_configs]),
        **_settings_of_weights(weights),
        "transformed": _transform_of([statement.quantization for statement in statements]),
    }


def _settings_of_weights(weights: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    num_bits = []
    asymmetric = []
    for weight in weights:
        if type(weight.get("num_bits")) is int:
            num_bits.append(weight["num_bits"])
        if weight.get("symmetric") is False:
            asymmetric.append(weight.get("num_bits"))
    return {
        "blocks": list(filter(None, map(block_of, weights))),
        "num_bits": num_bits,
        "asymmetric": asymmetric,
    }


@dataclass(frozen=True)
class _Statement:
    """A statement about quantized tensors in a file, and its configuration."""

    file: str
    config: Mapping[str, Any]
    quantization: Mapping[str, Any]


def _quantizations(file: str, config: Mapping[str, Any]) -> Iterator[_Statement]:
    for part in configurations_in(config):
        for field in FIELDS:
            quantization = part.get(field)
            if isinstance(quantization, dict) and quantization:
                yield _Statement(file, part, quantization)


def _dtype_in(configs: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the first dtype that configurations name."""
    for config in configs:
        for field in ("dtype", "torch_dtype"):
            dtype = config.get(field)
            if isinstance(dtype, str):
                return dtype
    return None


def _transform_of(quantizations: Sequence[Mapping[str, Any]]) -> bool | str:
    """Return whether values are more than codes times scales.

    If a `quant_method` is unknown, return that instead.
    """
    for quantization in quantizations:
        method = quantization.get("quant_method")
        if method is not None and method not in _METHODS:
            return f"quant_method: {method!s:.50}"
        if algorithms := sorted(_names_of_algorithms(quantization) & _ALGORITHMS):
            return f"algo_config: {algorithms[0]}"
    for quantization in quantizations:
        transform = quantization.get("transform_config")
        if isinstance(transform, dict) and transform.get("config_groups", transform):
            return True
    return False


def _names_of_algorithms(quantization: Mapping[str, Any]) -> set[str]:
    configs = quantization.get("algo_config")
    if not isinstance(configs, list):
        configs = [configs]
    return {str(config.get("name")).lower() for config in configs if isinstance(config, dict)}


def _weights_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the weights in a `quantization_config`: one for all, or by group."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        groups = {"": {"weights": config}}
    weights = []
    for group in groups.values():
        if isinstance(group, dict) and isinstance(group.get("weights"), dict):
            weights.append(group["weights"])
    return weights

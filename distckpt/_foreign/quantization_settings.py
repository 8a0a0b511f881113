"""Settings of quantized tensors, read from the configurations beside them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distckpt._base.errors import CorruptCheckpointError
from distckpt._format.code_names import CONFIG_NAMES, FIELDS, configurations_in, is_shape
from distckpt._format.marker import read_file
from distckpt._quantization.detect import GROUPS
from distckpt._storage import locations
from distckpt.rules._mapped import TensorSpec

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
    files: list[str] = []
    inner_configs: list[Mapping[str, Any]] = []
    quantizations: list[Mapping[str, Any]] = []
    for file, config in configs.items():
        for part, field in itertools.product(configurations_in(config), FIELDS):
            quantization = part.get(field)
            if isinstance(quantization, dict) and quantization:
                files.append(file)
                inner_configs.append(part)
                quantizations.append(quantization)
    if not files:
        return None
    num_bits = []
    asymmetric = []
    blocks = []
    for weight in itertools.chain.from_iterable(map(_weights_of, quantizations)):
        if type(weight.get("num_bits")) is int:
            num_bits.append(weight["num_bits"])
        if weight.get("symmetric") is False:
            asymmetric.append(weight.get("num_bits"))
        block = _block_of(weight)
        if block is not None:
            blocks.append(block)
    return {
        "file": files[0],
        "dtype": _dtype_in([*configs.values(), *inner_configs]),
        "blocks": blocks,
        "num_bits": num_bits,
        "asymmetric": asymmetric,
        "transformed": _transform_of(quantizations),
    }


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


def _block_of(weights: Mapping[str, Any]) -> list[int] | None:
    """Return the rows and columns that share a scale, or None.

    A configuration names them, or something else.
    """
    block = weights.get("weight_block_size") or weights.get("block_structure")
    if not block:
        block = [1, weights.get("group_size")]
    if is_shape(block) and len(block) == 2:
        return list(block)
    return None


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


def unclear_shapes(tensors: Mapping[str, TensorSpec], settings: Mapping[str, Any]) -> list[str]:
    """Return the keys of stored shapes that must be read.

    Packed columns may be padded.
    """
    sizes: Sequence[int] = [block[1] for block in settings.get("blocks", [])]
    if not sizes and "file" not in settings:
        sizes = GROUPS
    unclear = []
    for key, info in tensors.items():
        stem = key.removesuffix("_packed")
        if stem == key or info.dtype != "I32" or f"{stem}_shape" not in tensors:
            continue
        if not _are_whole_groups(info, tensors.get(f"{stem}_scale"), sizes):
            unclear.append(f"{stem}_shape")
    return unclear


def _are_whole_groups(codes: TensorSpec, scale: TensorSpec | None, sizes: Iterable[int]) -> bool:
    """Return whether packed columns are groups of a known size.

    There are several, so that none is padded.
    """
    if scale is None:
        return False
    columns = [8 * items for items in codes.shape[-1:]]
    for count in scale.shape[-1:]:
        if count > 1 and any([count * size] == columns for size in sizes):
            return True
    return False

"""Finding quantized tensors among stored ones: by names, dtypes and shapes, and by the
configuration beside them.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distckpt._base.dtypes import ITEM_BYTES
from distckpt._quantization.numbers import NUMBERS
from distckpt._quantization.quantized import E8M0, QuantizedTensor, StoredPart
from distckpt._quantization.settings import block_of
from distckpt._rules.mapped import TensorSpec


@dataclass(frozen=True)
class Naming:
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
_OF_ACTIVATIONS = (
    "input_scale",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "k_scale",
    "v_scale",
)
"""Scales of a module that belong to none of its weights."""
_OF_WEIGHTS = re.compile(
    r"scale|zero_?point|_zeros?$|_zp$|offset|shift|smooth|outlier|codebook|g_idx|perm$|rotat",
    re.ASCII,
)
"""In the name of a tensor beside codes: values are more than codes times scales, if it is none of
their scales.
"""
_OF_MODULES = ("zero_point", "pre_quant_scale", "smooth_scale")
"""Those of all weights of a module."""
_NOT_OF_WEIGHTS = re.compile(
    r"((in|out)put|act(ivation)?|[qkv]|kv|prob|bias)_(\w*_)?(scale(_ub)?|zero_point)", re.ASCII
)
"""Names of scales that belong to something else of the module."""
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
"""Values of `quant_method` of which it is known that values are codes times scales."""
_ALGORITHMS = frozenset({"rotation", "quarot", "svdquant"})
"""Of AMD Quark: they change inputs of layers as well, or add products of matrices."""
_BLOCKS = (128, 32)
_GROUPS = (32, 64, 128)
"""Usual sizes of blocks, and of groups of columns of 4-bit integers."""
FIELDS = ("quantization_config", "compression_config", "quantization")
"""Of a configuration, for what it says of quantized tensors."""
_MODEL_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
"""What a configuration may name: looking any other name up in torch could import a module of it."""
_MAX_ELEMENTS = 1 << 62
_MAX_AXES = 4
"""Of scales with fewer axes than the tensor: there may be very many ways in which they fit more."""


def find_quantized(
    tensors: Mapping[str, TensorSpec], quantization: Mapping[str, Any] | None
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
    beside = _names_of_weights(tensors)
    for key in tensors:
        for naming in NAMINGS:
            if key.endswith(naming.codes):
                stem = key[: len(key) - len(naming.codes)]
                others = beside.get(key.rpartition(".")[0], ())
                quantized = _find(key, stem, naming, tensors, settings, others)
                if quantized is not None:
                    found[stem + naming.ending] = quantized
                    break
    return found


def _names_of_weights(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return for each module the names in it by which values of codes may depend on tensors."""
    names: dict[str, list[str]] = {}
    for key in keys:
        module, _, name = key.rpartition(".")
        if _is_of_weights(name):
            names.setdefault(module, []).append(name)
    return names


@functools.lru_cache(maxsize=4096)
def _is_of_weights(name: str) -> bool:
    return bool(_OF_WEIGHTS.search(name)) and not _NOT_OF_WEIGHTS.fullmatch(name)


def _find(
    key: str,
    stem: str,
    naming: Naming,
    tensors: Mapping[str, TensorSpec],
    settings: Mapping[str, Any],
    beside: Iterable[str],
) -> QuantizedTensor | None:
    """Find the quantized tensor that has its codes at a key; None if that holds no codes.

    `beside` are names in its module by which values may depend on tensors.
    """
    is_stored = naming.codes != naming.ending and stem + naming.ending in tensors
    # What is stored under the name of the tensor itself is that tensor.
    if stem + naming.others["scale"] not in tensors or is_stored:
        return None
    names = {"codes": key, **{role: stem + ending for role, ending in naming.others.items()}}
    if _has_more(stem, names.values(), beside):
        return None
    parts = {role: _part(name, tensors[name]) for role, name in names.items() if name in tensors}
    quantized = _describe(parts, settings)
    return quantized and replace(quantized, companions=_companions(key, tensors))


def _has_more(stem: str, parts: Collection[str], beside: Iterable[str]) -> bool:
    """Tell whether values depend on more than the parts of a tensor.

    In a module with several weights, names begin with those of their weights.
    """
    module, dot, own = stem.rpartition(".")
    is_alone = own in ("", "weight")
    return any(
        f"{module}{dot}{name}" not in parts
        for name in beside
        if is_alone or name.startswith(own) or name in _OF_MODULES
    )


def _companions(key: str, tensors: Collection[str]) -> tuple[str, ...]:
    """Return the keys of the scales of activations in the module of codes."""
    module = key.rpartition(".")[0]
    names = [f"{module}.{each}" for each in _OF_ACTIVATIONS]
    return tuple(name for name in names if name in tensors)


def _part(key: str, info: TensorSpec) -> StoredPart:
    return StoredPart(key, info.dtype, tuple(info.shape))


# --- Configurations -------------------------------------------------------------------------------


def parts_of(config: Mapping[str, Any]) -> list[Any]:
    """Return a configuration and those inside it, of text models and towers, without what is said
    of quantization.
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
        "transformed" besides: True, or what says so.
    """
    found = [each for file, config in configs.items() for each in _quantizations(file, config)]
    if not found:
        return None
    weights = [each for said in found for each in _weights_of(said.quantization)]
    return {
        "file": found[0].file,
        "dtype": _dtype_in([*configs.values(), *(said.config for said in found)]),
        **_said_of_weights(weights),
        "transformed": _transform_of([said.quantization for said in found]),
    }


def _said_of_weights(weights: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    blocks = map(block_of, weights)
    return {
        "blocks": [block for block in blocks if block],
        "num_bits": [each["num_bits"] for each in weights if type(each.get("num_bits")) is int],
        "asymmetric": [each.get("num_bits") for each in weights if each.get("symmetric") is False],
    }


@dataclass(frozen=True)
class _Said:
    """What is said of quantized tensors: in which file, and in which configuration there."""

    file: str
    config: Mapping[str, Any]
    quantization: Mapping[str, Any]


def _quantizations(file: str, config: Mapping[str, Any]) -> Iterator[_Said]:
    for part in parts_of(config):
        for field in FIELDS:
            quantization = part.get(field)
            if isinstance(quantization, dict) and quantization:
                yield _Said(file, part, quantization)


def _dtype_in(configs: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the first dtype that configurations name."""
    named = (config.get(field) for config in configs for field in ("dtype", "torch_dtype"))
    return next((dtype for dtype in named if isinstance(dtype, str)), None)


def _transform_of(quantizations: Sequence[Mapping[str, Any]]) -> bool | str:
    """Return whether values are more than codes times scales, or the `quant_method` of which that
    is not known.
    """
    for quantization in quantizations:
        method = quantization.get("quant_method")
        if method is not None and method not in _METHODS:
            return f"quant_method: {method!s:.50}"
        if algorithms := sorted(_names_of_algorithms(quantization) & _ALGORITHMS):
            return f"algo_config: {algorithms[0]}"
    transforms = [quantization.get("transform_config") for quantization in quantizations]
    dicts = [each for each in transforms if isinstance(each, dict)]
    return any(bool(each.get("config_groups", each)) for each in dicts)


def _names_of_algorithms(quantization: Mapping[str, Any]) -> set[str]:
    configs = quantization.get("algo_config")
    listed = configs if isinstance(configs, list) else [configs]
    return {str(each.get("name")).lower() for each in listed if isinstance(each, dict)}


def _weights_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a `quantization_config` says of weights: for all, or for each of its groups."""
    groups = config.get("config_groups")
    each_group = groups.values() if isinstance(groups, dict) else [{"weights": config}]
    weights = [group.get("weights") for group in each_group if isinstance(group, dict)]
    return [each for each in weights if isinstance(each, dict)]


# --- Forms ----------------------------------------------------------------------------------------


def _describe(
    parts: Mapping[str, StoredPart], settings: Mapping[str, Any]
) -> QuantizedTensor | None:
    """Describe a tensor by its parts; None where they are of no form that is known."""
    codes, overall = parts["codes"], parts.get("global_scale")
    number = _number(codes.dtype, parts["scale"].dtype, overall is not None)
    if number is None or not codes.shape or not _is_known(parts, number, settings):
        return None
    has_groups = codes.key.endswith("_blocks") and len(codes.shape) > 2
    shape = _unpadded(_shape(codes, number, has_groups), parts, settings)
    block = _block_shape(parts, settings, number, shape)
    if block is None:
        return None
    dtype = _MODEL_DTYPES.get(str(settings.get("dtype")), "BF16")
    is_divided = overall is not None and overall.key.endswith("_global_scale")
    return QuantizedTensor(
        shape, dtype, number, block, parts, transposed=has_groups, divided=is_divided
    )


def _is_known(parts: Mapping[str, StoredPart], number: str, settings: Mapping[str, Any]) -> bool:
    """Tell whether names, dtypes and a configuration leave no doubt which numbers codes are."""
    codes, scale = parts["codes"], parts["scale"]
    if number == "int4" and not codes.key.endswith("_packed"):
        return False
    if number == "e2m1" and scale.dtype == "U8" and not scale.key.endswith("_scales"):
        # Any bytes beside any bytes, unless a configuration says which.
        return "file" in settings
    if number != "e2m1" and "global_scale" in parts:
        return False
    return not _contradicts(settings, number)


def _contradicts(settings: Mapping[str, Any], number: str) -> bool:
    """Tell whether a configuration says that codes are other numbers, or that there are zero points
    where none are stored.
    """
    if number == "int4" and set(settings.get("num_bits", [])) - {4}:
        return True
    return {"int4": 4, "int8": 8}.get(number, 0) in settings.get("asymmetric", [])


def _shape(codes: StoredPart, number: str, has_groups: bool) -> tuple[int, ...]:
    """Return the shape of the values, with the axes of the codes."""
    per_item = NUMBERS[number].per_byte * ITEM_BYTES[codes.dtype]
    lead = codes.shape[:-2] if has_groups else codes.shape[:-1]
    return (*lead, math.prod(codes.shape[len(lead) :]) * per_item)


def _unpadded(
    shape: tuple[int, ...], parts: Mapping[str, StoredPart], settings: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the shape that is stored beside codes, where it is smaller by padding of columns."""
    stored = settings.get("shapes", {}).get(parts["shape"].key) if "shape" in parts else None
    if not stored or len(stored) != len(shape) or list(shape[:-1]) != stored[:-1]:
        return shape
    per_item = shape[-1] // max(1, parts["codes"].shape[-1])
    return tuple(stored) if 0 <= shape[-1] - stored[-1] < per_item else shape


def unclear_shapes(tensors: Mapping[str, TensorSpec], settings: Mapping[str, Any]) -> list[str]:
    """Return the keys of stored shapes that must be read, since packed columns may be padded."""
    named = [block[1] for block in settings.get("blocks", [])]
    sizes = named or ([] if "file" in settings else _GROUPS)
    unclear = []
    for key, info in tensors.items():
        stem = key.removesuffix("_packed")
        if stem == key or info.dtype != "I32" or f"{stem}_shape" not in tensors:
            continue
        if not _are_whole_groups(info, tensors.get(f"{stem}_scale"), sizes):
            unclear.append(f"{stem}_shape")
    return unclear


def _are_whole_groups(codes: TensorSpec, scale: TensorSpec | None, sizes: Iterable[int]) -> bool:
    """Tell whether packed columns are several groups of a known size, so that none is padded."""
    counts = scale.shape[-1:] if scale is not None else ()
    columns = [8 * items for items in codes.shape[-1:]]
    return any([count * size] == columns for count in counts if count > 1 for size in sizes)


def _fits_all(overall: tuple[int, ...], shape: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Tell whether a scale of all scales is one, or one for each expert."""
    has_experts = len(shape) > 2 and grid[:1] == shape[:1]
    of_experts = shape[:1] if has_experts else (1,)
    return (math.prod(overall), *overall[:1]) in ((1,), (1, 1), 2 * of_experts)


def _block_shape(
    parts: Mapping[str, StoredPart],
    settings: Mapping[str, Any],
    number: str,
    shape: tuple[int, ...],
) -> tuple[int, ...] | None:
    """Return the size of blocks along each axis; None where that cannot be known."""
    scale, overall = parts["scale"], parts.get("global_scale")
    blocks = settings.get("blocks", [])
    grid = _grid(scale.shape, shape, is_by_channel="file" in settings and not blocks)
    if len(grid) != len(shape) or max(shape) > _MAX_ELEMENTS:
        return None
    if overall is not None and not _fits_all(overall.shape, shape, grid):
        return None
    columns = _sizes_of_columns(number, scale, blocks)
    rows = _sizes_of_rows(number, blocks)
    # A configuration that contradicts the scales must not be passed over.
    sizes = [*[_Sizes((), are_known=True)] * (len(shape) - 2), rows, columns]
    axes = zip(shape, grid, sizes[-len(shape) :], strict=True)
    block = tuple(_block(*axis) for axis in axes)
    # One scale for more than a group: these are not 4-bit numbers.
    is_too_wide = number == "e2m1" and block[-1] > columns.sizes[0]
    return None if 0 in block or is_too_wide else block


@dataclass(frozen=True)
class _Sizes:
    """Sizes that blocks may have along an axis.

    Attributes:
        sizes: the candidates.
        are_known: whether the format or a configuration names them. Then the last block may be
            smaller; else others would fit as well.
    """

    sizes: Sequence[int]
    are_known: bool


def _sizes_of_rows(number: str, blocks: Sequence[Sequence[int]]) -> _Sizes:
    rows = [block[0] for block in blocks]
    # Some programs store groups of columns of integers transposed.
    usual = () if number == "int8" else _BLOCKS
    return _Sizes(rows or usual, are_known=bool(rows))


def _sizes_of_columns(number: str, scale: StoredPart, blocks: Sequence[Sequence[int]]) -> _Sizes:
    if number == "e2m1":
        return _Sizes([16 if scale.dtype == "F8_E4M3" else 32], are_known=True)
    columns = [block[1] for block in blocks]
    usual = _GROUPS if number == "int4" else _BLOCKS
    return _Sizes(columns or usual, are_known=bool(columns))


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


def _block(size: int, count: int, candidates: _Sizes) -> int:
    """Return how many of `size` indices share one of `count` scales; 0 where not one known size
    fits.
    """
    if count == 1:
        return max(1, size)
    if count == size:
        return 1
    fitting = {block for block in candidates.sizes if -(-size // block) == count}
    if not candidates.are_known:
        fitting = {block for block in fitting if size % block == 0}
    return fitting.pop() if len(fitting) == 1 else 0

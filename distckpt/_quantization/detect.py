"""Detection of quantized tensors among stored ones.

Names, dtypes and shapes tell, and the configuration next to the tensors.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from distckpt._base.dtypes import ITEM_BYTES
from distckpt._quantization.numbers import NUMBERS
from distckpt._quantization.quantized import E8M0, QuantizedTensor, StoredPart
from distckpt.rules._mapped import TensorSpec


class Naming(NamedTuple):
    """Names of the parts of a tensor.

    They are endings of keys that replace the tensor's own ending.
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
_ACTIVATION_SCALES = (
    "input_scale",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "k_scale",
    "v_scale",
)
"""Names of a module's scales that belong to no weight."""
_DEPENDENCY_NAMES = re.compile(
    r"scale|zero_?point|_zeros?$|_zp$|offset|shift|smooth|outlier|codebook|g_idx|perm$|rotat",
    re.ASCII,
)
"""Names of tensors next to codes that change the codes' values. Unless they are among the codes'
scales, values are more than codes times scales.
"""
_MODULE_DEPENDENCIES = ("zero_point", "pre_quant_scale", "smooth_scale")
"""Names of tensors that all weights of a module depend on."""
_OTHER_SCALES = re.compile(
    r"((in|out)put|act(ivation)?|[qkv]|kv|prob|bias)_(\w*_)?(scale(_ub)?|zero_point)", re.ASCII
)
"""Names of scales that belong to other tensors of the module."""
_BLOCKS = (128, 32)
GROUPS = (32, 64, 128)
"""Usual sizes of groups of columns of 4-bit integers. Usual sizes of blocks are in `_BLOCKS`."""
_MODEL_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
"""Dtypes that a configuration may name. Looking any other name up in torch could import a module of
it.
"""
_MAX_ELEMENTS = 1 << 62
_MAX_AXES = 4
"""Maximum axes of a tensor whose scales have fewer axes. There may be very many ways in which they
fit more.
"""


def find_quantized(
    tensors: Mapping[str, TensorSpec], quantization: Mapping[str, Any] | None
) -> dict[str, QuantizedTensor]:
    """Find the quantized tensors among stored ones.

    Args:
        tensors: all stored tensors.
        quantization: the settings in the manifest; None without a configuration.

    Returns:
        Quantized tensors by their key in the model.
    """
    settings = quantization or {}
    quantized_tensors: dict[str, QuantizedTensor] = {}
    if settings.get("transformed"):
        return quantized_tensors
    dependencies = _names_of_weights(tensors)
    for key in tensors:
        for naming in NAMINGS:
            if key.endswith(naming.codes):
                stem = key[: len(key) - len(naming.codes)]
                names = dependencies.get(key.rpartition(".")[0], ())
                quantized = _find(key, stem, naming, tensors, settings, names)
                if quantized is not None:
                    quantized_tensors[stem + naming.ending] = quantized
                    break
    return quantized_tensors


def _names_of_weights(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return, by module, the names of tensors that values depend on.

    The dependency is possible, not certain.
    """
    names: dict[str, list[str]] = {}
    for key in keys:
        module, _, name = key.rpartition(".")
        if _is_dependency(name):
            names.setdefault(module, []).append(name)
    return names


@functools.lru_cache(maxsize=4096)
def _is_dependency(name: str) -> bool:
    return bool(_DEPENDENCY_NAMES.search(name)) and not _OTHER_SCALES.fullmatch(name)


def _find(
    key: str,
    stem: str,
    naming: Naming,
    tensors: Mapping[str, TensorSpec],
    settings: Mapping[str, Any],
    dependencies: Iterable[str],
) -> QuantizedTensor | None:
    """Find the quantized tensor with codes at a key, or None.

    `dependencies` are names in its module by which values may depend on tensors.
    """
    is_stored = naming.codes != naming.ending and stem + naming.ending in tensors
    # A tensor stored under the name of the tensor itself is that tensor.
    if stem + naming.others["scale"] not in tensors or is_stored:
        return None
    names = {"codes": key, **{role: stem + ending for role, ending in naming.others.items()}}
    if _has_more(stem, names.values(), dependencies):
        return None
    parts = {}
    for role, name in names.items():
        if name in tensors:
            parts[role] = StoredPart(name, tensors[name].dtype, tuple(tensors[name].shape))
    quantized = _describe(parts, settings)
    return quantized and replace(quantized, companions=_companions(key, tensors))


def _has_more(stem: str, parts: Collection[str], dependencies: Iterable[str]) -> bool:
    """Return whether values depend on more than the parts of a tensor.

    In a module with several weights, names begin with the names of their weights.
    """
    module, dot, own = stem.rpartition(".")
    is_alone = own in ("", "weight")
    for name in dependencies:
        concerns_tensor = is_alone or name.startswith(own) or name in _MODULE_DEPENDENCIES
        if concerns_tensor and f"{module}{dot}{name}" not in parts:
            return True
    return False


def _companions(key: str, tensors: Collection[str]) -> tuple[str, ...]:
    """Return the keys of the activation scales in the module of codes."""
    module = key.rpartition(".")[0]
    names = [f"{module}.{scale}" for scale in _ACTIVATION_SCALES]
    return tuple(name for name in names if name in tensors)


# --- Forms ----------------------------------------------------------------------------------------


def _describe(
    parts: Mapping[str, StoredPart], settings: Mapping[str, Any]
) -> QuantizedTensor | None:
    """Describe a tensor by its parts; None for unknown forms."""
    codes = parts["codes"]
    overall = parts.get("global_scale")
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
    """Return whether the number format of codes is beyond doubt.

    Names, dtypes and a configuration tell.
    """
    codes = parts["codes"]
    scale = parts["scale"]
    if number == "int4" and not codes.key.endswith("_packed"):
        return False
    if number == "e2m1" and scale.dtype == "U8" and not scale.key.endswith("_scales"):
        # Any bytes next to any bytes, unless a configuration says which.
        return "file" in settings
    if number != "e2m1" and "global_scale" in parts:
        return False
    return not _contradicts(settings, number)


def _contradicts(settings: Mapping[str, Any], number: str) -> bool:
    """Return whether a configuration contradicts the number format of codes.

    Zero points that are not stored are a contradiction, too.
    """
    if number == "int4" and set(settings.get("num_bits", [])) - {4}:
        return True
    return {"int4": 4, "int8": 8}.get(number, 0) in settings.get("asymmetric", [])


def _shape(codes: StoredPart, number: str, has_groups: bool) -> tuple[int, ...]:
    """Return the shape of the values, with the axes of the codes."""
    per_item = NUMBERS[number].per_byte * ITEM_BYTES[codes.dtype]
    num_lead = -2 if has_groups else -1
    lead = codes.shape[:num_lead]
    return (*lead, math.prod(codes.shape[len(lead) :]) * per_item)


def _unpadded(
    shape: tuple[int, ...], parts: Mapping[str, StoredPart], settings: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the shape that is stored next to codes, without padding.

    The stored shape is smaller by padding of columns.
    """
    if "shape" not in parts:
        return shape
    stored = settings.get("shapes", {}).get(parts["shape"].key)
    if not stored or len(stored) != len(shape) or list(shape[:-1]) != stored[:-1]:
        return shape
    per_item = shape[-1] // max(1, parts["codes"].shape[-1])
    if 0 <= shape[-1] - stored[-1] < per_item:
        return tuple(stored)
    return shape


def _fits_all(overall: tuple[int, ...], shape: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Return whether there is one global scale, or one per expert."""
    has_experts = len(shape) > 2 and grid[:1] == shape[:1]
    counts = shape[:1] if has_experts else (1,)
    return (math.prod(overall), *overall[:1]) in ((1,), (1, 1), 2 * counts)


def _block_shape(
    parts: Mapping[str, StoredPart],
    settings: Mapping[str, Any],
    number: str,
    shape: tuple[int, ...],
) -> tuple[int, ...] | None:
    """Return the size of blocks along each axis; None if unknown."""
    scale = parts["scale"]
    overall = parts.get("global_scale")
    blocks = settings.get("blocks", [])
    grid = _grid(scale.shape, shape, is_by_channel="file" in settings and not blocks)
    if len(grid) != len(shape) or max(shape) > _MAX_ELEMENTS:
        return None
    if overall is not None and not _fits_all(overall.shape, shape, grid):
        return None
    rows, columns = _sizes(number, scale, blocks)
    others: _Sizes = ((), ())
    # A configuration that contradicts the scales must not be passed over.
    sizes = [*[others] * (len(shape) - 2), rows, columns]
    axes = zip(shape, grid, sizes[-len(shape) :], strict=True)
    block = tuple(_block(*axis) for axis in axes)
    # One scale for more than a group: these are not 4-bit numbers.
    is_too_wide = number == "e2m1" and block[-1] > columns[0][0]
    if 0 in block or is_too_wide:
        return None
    return block


_Sizes: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Known and usual sizes of blocks along an axis.

The format or a configuration names the known ones, which are preferred. With them, the last block
may be smaller; else other sizes would fit as well.
"""


def _sizes(
    number: str, scale: StoredPart, blocks: Sequence[Sequence[int]]
) -> tuple[_Sizes, _Sizes]:
    """Return the sizes of blocks along rows and columns."""
    rows = [block[0] for block in blocks]
    columns = [block[1] for block in blocks]
    usual_rows: Sequence[int] = _BLOCKS
    usual_columns: Sequence[int] = _BLOCKS
    if number == "int8":
        # Some programs store groups of columns of integers transposed.
        usual_rows = ()
    elif number == "int4":
        usual_columns = GROUPS
    elif number == "e2m1":
        columns = [16 if scale.dtype == "F8_E4M3" else 32]
    return (rows, usual_rows), (columns, usual_columns)


def _grid(scales: tuple[int, ...], shape: tuple[int, ...], is_by_channel: bool) -> tuple[int, ...]:
    """Return the number of blocks along each axis; () if unknown.

    Scales with fewer axes than the tensor are for its first ones. Where they fit other axes as well
    (a square matrix), a configuration without blocks must say that there is one for each channel.
    """
    if math.prod(scales) == 1:
        return (1,) * len(shape)
    if len(scales) >= len(shape) or len(shape) > _MAX_AXES:
        return scales
    while scales[-1] == 1:
        scales = scales[:-1]
    num_fits = sum(sizes == scales for sizes in itertools.combinations(shape, len(scales)))
    is_known = scales == shape[: len(scales)] and (num_fits == 1 or is_by_channel)
    if not is_known:
        return ()
    return scales + (1,) * (len(shape) - len(scales))


def _number(codes: str, scale: str, has_global: bool) -> str | None:
    """Return the number format of codes, or None if it is unknown.

    The dtypes of codes and scales tell.
    """
    if codes in ("U8", "F4", "I8") and (scale in E8M0 or (scale == "F8_E4M3" and has_global)):
        return "e2m1"
    known_scales = {"F32", "BF16", "F16"}
    if codes == "F8_E4M3":
        known_scales.update(E8M0)
    if scale not in known_scales:
        return None
    return {"F8_E4M3": "e4m3", "I8": "int8", "I32": "int4"}.get(codes)


def _block(size: int, count: int, candidates: _Sizes) -> int:
    """Return the number of indices that share a scale.

    There are `size` indices and `count` scales; 0 unless exactly one known size fits.
    """
    if count == 1:
        return max(1, size)
    if count == size:
        return 1
    known, usual = candidates
    fitting = {block for block in known or usual if -(-size // block) == count}
    if not known:
        fitting = {block for block in fitting if size % block == 0}
    if len(fitting) != 1:
        return 0
    return fitting.pop()

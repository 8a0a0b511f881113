"""Names of stored tensors that hold codes, and of their scales.

They may be of any form. Also the settings of quantized tensors, in configurations and manifests.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from distckpt._base.dtypes import ITEM_BYTES

_SMALL_FLOATS = {name for name in ITEM_BYTES if name.startswith(("F8_", "F4"))}
SMALL_CODES = frozenset({*_SMALL_FLOATS, "I8", "U8"})
_PACKED_CODES = frozenset({"I32", "U32"})
"""Dtypes with several codes in an item. Such numbers may be anything else, unless names show that
they are codes.
"""
_INTEGER_WEIGHTS = _PACKED_CODES | {"I16", "U16"}
"""Dtypes of integers that no model has as weights."""
_SCALES = {
    "": ("_scale_inv", "_scale", "_scales", "_scale_2", ".scale", ".absmax"),
    "_blocks": ("_scales",),
    "_packed": ("_scale", "_global_scale"),
    "weight": ("scale", "scales", "SCB", "qscale_weight", "weights_scaling_factor"),
    "absmax": ("nested_absmax",),
    "qweight": ("scales",),
    "qzeros": ("scales",),
    "W_q": ("scale",),
    "_data": ("_scale",),
    "_qdata": ("_scale",),
    "codes": ("scales",),
}
"""Ending of a key of codes -> endings of their scales' keys."""
_NAMES_OF_CODES = (
    ".qweight",
    ".qzeros",
    ".W_q",
    ".compressed",
    "weight_packed",
    "._data",
    "_qdata",
    "__nf4",
    "__fp4",
)
"""Endings of keys that only codes have. They are the ones of AWQ and GPTQ, HQQ, compressed-tensors,
quanto, torchao and so on.
"""

MARKER = "scaled_fp8"
"""Key that marks all 8-bit floats as codes, as ComfyUI writes it."""
_NAMED_AS_SCALE = re.compile(
    r"(?<!logit_)(?<!layer_)scale|absmax|amax$|zero_?point|zeros$|quant_state|^SCB$", re.ASCII
)
"""Parts of keys that name scales and their like, in any program. CLIP's `logit_scale` and the
`layer_scale` of vision towers are parameters of models.
"""


def may_be_codes(dtype: str) -> bool:
    """Return whether tensors of a dtype may hold codes.

    The dtype is a safetensors name.
    """
    return dtype in SMALL_CODES or dtype in _PACKED_CODES


def is_named_as_codes(key: str) -> bool:
    """Return whether only codes have such a key."""
    return key.endswith(_NAMES_OF_CODES)


def are_integers_as_weights(key: str, dtype: str, is_matrix: bool) -> bool:
    """Return whether integers must be codes where the model has floats.

    Integers of 8 bits must be, matrices of a model, and tensors that are named as a weight.
    """
    is_weight = is_matrix or key.endswith("weight")
    return dtype in ("I8", "U8") or (dtype in _INTEGER_WEIGHTS and is_weight)


def are_codes_beside_scales(key: str, dtype: str) -> bool:
    """Return whether a tensor must be codes if a scale is near.

    A scale is any tensor next to it that is named like one.
    """
    if _is_named_as_scale(key.rpartition(".")[2]):
        return False
    is_float = dtype in SMALL_CODES and dtype.startswith("F")
    is_weight = key.endswith("weight") and (dtype in SMALL_CODES or dtype in _PACKED_CODES)
    return is_float or is_weight or is_named_as_codes(key)


@functools.lru_cache(maxsize=4096)
def _is_named_as_scale(part: str) -> bool:
    return _NAMED_AS_SCALE.search(part) is not None


def places_of_scales(keys: Iterable[str]) -> dict[str, str]:
    """Return the places of keys that are named like scales.

    Places are the modules around such a key, at any depth, and the keys that it ends with. Each
    place has the first such key.
    """
    places: dict[str, str] = {}
    for key in keys:
        for place in places_of(key):
            places.setdefault(place, key)
    return places


def places_of(key: str) -> Iterator[str]:
    """Yield the places of a key that is named like a scale.

    They are the modules around it, and the keys that it ends with; there are none for other keys.
    """
    parts = key.split(".")
    if key == MARKER or not any(map(_is_named_as_scale, parts)):
        return
    yield from itertools.accumulate(parts[:-1], "{}.{}".format)
    for begin in range(1, len(parts)):
        yield ".".join(parts[begin:])
    if len(parts) == 1:
        yield ""


def scale_beside(key: str, places: dict[str, str]) -> str | None:
    """Return a key named like a scale near another key, or None.

    It is in the module of `key`, or has `key` in its name.
    """
    return places.get(key.rpartition(".")[0]) or places.get(key)


def scales_of(key: str, keys: Container[str]) -> list[str]:
    """Find the keys of the scales of the codes at `key`."""
    scales = []
    for ending, replacements in _SCALES.items():
        if not key.endswith(ending):
            continue
        stem = key[: len(key) - len(ending)]
        scales += [stem + other for other in replacements if stem + other in keys]
    return scales


# --- Settings -------------------------------------------------------------------------------------


CONFIG_NAMES = ("config.json", "hf_quant_config.json")
"""Files that may describe the quantization of tensors in their directory; NVIDIA ModelOpt writes
the second one.
"""
FIELDS = ("quantization_config", "compression_config", "quantization")
"""Fields of a configuration that describe quantized tensors."""


def are_settings(value: object) -> bool:
    """Return whether a value is what a manifest keeps of configurations."""
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
    return all(is_shape(block) and len(block) == 2 for block in blocks)


def is_shape(value: Any) -> bool:
    """Return whether a value is the shape of a non-empty tensor."""
    return isinstance(value, list) and all(type(size) is int and size > 0 for size in value)


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

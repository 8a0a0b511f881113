"""What the names of stored tensors show: which hold codes, and which their scales, in whatever
form.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Container, Iterable, Iterator

from distckpt._base.dtypes import ITEM_BYTES

_SMALL_FLOATS = {name for name in ITEM_BYTES if name.startswith(("F8_", "F4"))}
SMALL_CODES = frozenset({*_SMALL_FLOATS, "I8", "U8"})
_PACKED_CODES = frozenset({"I32", "U32"})
"""Several codes in an item. Such numbers may be anything else, unless names show that they are
codes.
"""
_INTEGER_WEIGHTS = _PACKED_CODES | {"I16", "U16"}
"""Integers that no model has as weights."""
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
"""Ending of the key of codes -> what stands in its place in the keys of their scales."""
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
"""Endings that keys of nothing else have: those of AWQ and GPTQ, HQQ, compressed-tensors, quanto,
torchao and so on.
"""

MARKER = "scaled_fp8"
"""A key that says that all 8-bit floats are codes, as ComfyUI writes it."""
_NAMED_AS_SCALE = re.compile(
    r"(?<!logit_)(?<!layer_)scale|absmax|amax$|zero_?point|zeros$|quant_state|^SCB$", re.ASCII
)
"""Parts of keys by which scales and their like are named, whatever the program that wrote them.
CLIP's `logit_scale` and the `layer_scale` of vision towers are parameters of models.
"""


def may_be_codes(dtype: str) -> bool:
    """Tell whether tensors of a dtype (its safetensors name) may hold codes."""
    return dtype in SMALL_CODES or dtype in _PACKED_CODES


def is_named_as_codes(key: str) -> bool:
    """Tell whether only codes have such a key."""
    return key.endswith(_NAMES_OF_CODES)


def are_integers_as_weights(key: str, dtype: str, is_matrix: bool) -> bool:
    """Tell whether integers must be codes if the model has floating point values in their place:
    those of 8 bits, matrices of a model, and what is named as a weight.
    """
    is_weight = is_matrix or key.endswith("weight")
    return dtype in ("I8", "U8") or (dtype in _INTEGER_WEIGHTS and is_weight)


def are_codes_beside_scales(key: str, dtype: str) -> bool:
    """Tell whether a tensor must be codes if anything beside it is named like a scale."""
    if _is_named_as_scale(key.rpartition(".")[2]):
        return False
    is_float = dtype in SMALL_CODES and dtype.startswith("F")
    is_weight = key.endswith("weight") and (dtype in SMALL_CODES or dtype in _PACKED_CODES)
    return is_float or is_weight or is_named_as_codes(key)


@functools.lru_cache(maxsize=4096)
def _is_named_as_scale(part: str) -> bool:
    return _NAMED_AS_SCALE.search(part) is not None


def places_of_scales(keys: Iterable[str]) -> dict[str, str]:
    """Return where keys are that are named like scales: of each module that holds one, at any
    depth, and of each key that one ends with, the first.
    """
    places: dict[str, str] = {}
    for key in keys:
        for place in places_of(key):
            places.setdefault(place, key)
    return places


def places_of(key: str) -> Iterator[str]:
    """Yield the modules around a key that is named like a scale, and the keys that it ends with;
    nothing for others.
    """
    parts = key.split(".")
    if key == MARKER or not any(map(_is_named_as_scale, parts)):
        return
    yield from itertools.accumulate(parts[:-1], "{}.{}".format)
    yield from (".".join(parts[begin:]) for begin in range(1, len(parts)))
    if len(parts) == 1:
        yield ""


def scale_beside(key: str, places: dict[str, str]) -> str | None:
    """Return a key that is named like a scale, in the module of `key` or with it in its name; None
    if there is none.
    """
    return places.get(key.rpartition(".")[0]) or places.get(key)


def scales_of(key: str, keys: Container[str]) -> list[str]:
    """Find the keys of the scales that belong to the codes at `key`."""
    fitting = [
        (key[: len(key) - len(end)], others) for end, others in _SCALES.items() if key.endswith(end)
    ]
    return [stem + other for stem, others in fitting for other in others if stem + other in keys]

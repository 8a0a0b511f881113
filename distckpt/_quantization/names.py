"""What the names of stored tensors show: which hold codes, and which their scales, in whatever
form.
"""

from __future__ import annotations

from collections.abc import Container

from distckpt._base.dtypes import FROM_NAME

SMALL_CODES = frozenset(name for name in FROM_NAME if name.startswith(("F8_", "F4"))) | {"I8", "U8"}
_PACKED_CODES = frozenset({"I32", "U32"})
"""Several codes in an item. Such numbers may be anything else, unless names show that they are
codes.
"""
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
    "weight_packed",
    "._data",
    "_qdata",
    "__nf4",
    "__fp4",
)
"""Endings that keys of nothing else have: those of AWQ and GPTQ, HQQ, compressed-tensors, quanto,
torchao and so on.
"""


def may_be_codes(dtype: str) -> bool:
    """Tell whether tensors of a dtype (its safetensors name) may hold codes."""
    return dtype in SMALL_CODES or dtype in _PACKED_CODES


def is_named_as_codes(key: str) -> bool:
    """Tell whether only codes have such a key."""
    return key.endswith(_NAMES_OF_CODES)


def scales_of(key: str, keys: Container[str]) -> list[str]:
    """Find the keys of the scales that belong to the codes at `key`."""
    fitting = [
        (key[: len(key) - len(end)], others) for end, others in _SCALES.items() if key.endswith(end)
    ]
    return [stem + other for stem, others in fitting for other in others if stem + other in keys]

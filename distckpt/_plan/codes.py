"""Refusing conversions of codes as if they were values."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import LoadMismatchError
from distckpt._format.stored_checkpoint import StoredCheckpoint

CONFIG_NAMES = ("config.json", "hf_quant_config.json")
"""Files that may say how the tensors beside them are quantised; the second one is NVIDIA ModelOpt's."""

_SMALL_CODES = frozenset(name for name in FROM_NAME if name.startswith(("F8_", "F4"))) | {"I8", "U8"}
_PACKED_CODES = frozenset({"I32", "U32"})
"""Several codes in an item. Such numbers may be anything else, unless there are scales."""
_SCALES = {
    "": ("_scale_inv", "_scale", "_scales", "_scale_2", ".scale", ".absmax"),
    "_blocks": ("_scales",),
    "_packed": ("_scale",),
    "weight": ("scale", "scales", "SCB"),
    "qweight": ("scales",),
    "qzeros": ("scales",),
}
"""Ending of the key of codes -> what stands in its place in the key of their scales."""


def may_be_codes(dtype: str) -> bool:
    """Tell whether tensors of a dtype (its safetensors name) may hold codes."""
    return dtype in _SMALL_CODES or dtype in _PACKED_CODES


def scales_of(key: str, keys: Container[str]) -> str | None:
    """Find the key of the scales that belong to the codes at `key`."""
    for ending, others in _SCALES.items():
        if key.endswith(ending):
            stem = key[: len(key) - len(ending)]
            found = next((stem + other for other in others if stem + other in keys), None)
            if found is not None:
                return found
    return None


def check_cast(stored: StoredCheckpoint, key: str, requested: torch.dtype) -> None:
    """Refuse to convert codes, or their scales, as if they were values.

    Raises:
        LoadMismatchError: `key` holds codes, and `requested` is not the dtype that they are stored in.
    """
    name = stored.dtype_name(key)
    if not may_be_codes(name) or FROM_NAME[name] == requested:
        return
    scales = scales_of(key, stored.manifest.key_index)
    config = (stored.manifest.origin or {}).get("quantization")
    if scales is not None:
        why = f"{scales!r} holds their scales"
    elif config and name in _SMALL_CODES:
        why = f"its {config['file']} says that it is quantised"
    else:
        return
    raise LoadMismatchError(
        f"Key {key!r} is stored in {stored.location!r} as {FROM_NAME[name]} and was requested as {requested}, but its "
        f"values are codes of a quantised tensor ({why}): converted without scales they would be wrong weights, "
        "and how they belong together is no form that distckpt knows. "
        f"Request {FROM_NAME[name]} and the scales, which loads both as they are stored.",
        unexpected=[key],
    )


def check_scales_cast(stored: StoredCheckpoint, casts: Mapping[str, torch.dtype]) -> None:
    """Refuse to convert codes, or their scales alone, to other dtypes; `casts` has the dtype for each stored key.

    Raises:
        LoadMismatchError: a key holds codes or scales.
    """
    for key, requested in casts.items():
        check_cast(stored, key, requested)
    manifest = stored.manifest
    if not casts or not any(map(may_be_codes, manifest.dtypes)):
        return
    pairs = zip(manifest.keys, manifest.dtypes, strict=True)
    for codes in (key for key, dtype in pairs if may_be_codes(dtype)):
        scales = scales_of(codes, manifest.key_index)
        if scales is not None and scales in casts:
            raise LoadMismatchError(
                f"{scales!r} in {stored.location!r} holds the scales of the codes {codes!r}, which stay as they are "
                f"stored: converting the scales alone to {casts[scales]} would change the weights. Leave out `dtype`, "
                "or give patterns of names that do not match scales.",
                unexpected=[scales],
            )

"""Refusal to convert codes as if they were values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import LoadMismatchError
from distckpt._base.lazy import torch
from distckpt._base.messages import summarize_keys
from distckpt._format.code_names import (
    SMALL_CODES,
    are_codes_beside_scales,
    are_integers_as_weights,
    is_named_as_codes,
    may_be_codes,
    places_of,
    scale_beside,
    scales_of,
)
from distckpt._format.stored_checkpoint import StoredCheckpoint

AS_STORED = " (as stored)"
"""Suffix, in a view, of keys that are parts of quantized tensors."""


def check_cast(stored: StoredCheckpoint, key: str, requested: torch.dtype) -> None:
    """Refuse to convert codes, or their scales, as if they were values.

    Raises:
        LoadMismatchError: `key` holds codes, and is stored in another dtype than `requested`.
    """
    name = stored.dtype_name(key)
    if not may_be_codes(name) or FROM_NAME[name] == requested:
        return
    plain = key.removesuffix(AS_STORED)
    why = _why_codes(stored, key, requested)
    if why is None:
        return
    config = stored.manifest.quantization or {}
    way_out = "and distckpt does not know how they belong together"
    if isinstance(config.get("transformed"), str):
        way_out += f" ({config['file']} says {config['transformed']})"
    if plain != key:
        way_out = "request its values instead"
    raise LoadMismatchError(
        f"Key {plain!r} is stored in {stored.location!r} as {FROM_NAME[name]} and was requested "
        f"as {requested}, but its values are codes of a quantized tensor ({why}): converted "
        f"without scales they would be wrong weights, {way_out}. Request {FROM_NAME[name]} and "
        "the scales, which loads both as they are stored.",
        unexpected=[plain],
    )


def _why_codes(stored: StoredCheckpoint, key: str, requested: torch.dtype) -> str | None:
    """Return the reason why a tensor holds codes, or None."""
    manifest = stored.manifest
    name = stored.dtype_name(key)
    config = manifest.quantization or {}
    scales = scales_of(key, manifest.key_index)
    is_small = name in SMALL_CODES
    if config.get("transformed") is True:
        return f"the transform_config of its {config['file']} changes weights besides"
    if scales:
        return f"{scales[0]!r} holds their scales"
    scale = scale_beside(key, manifest.scale_places)
    if scale and are_codes_beside_scales(key.removesuffix(AS_STORED), name):
        return f"{scale.removesuffix(AS_STORED)!r} beside it is named like a scale"
    if "file" in config and is_small:
        return f"its {config['file']} says that it is quantized"
    if is_named_as_codes(key.removesuffix(AS_STORED)):
        return "no other tensors have such names"
    other = None
    if is_small and requested.is_floating_point:
        other = _key_of_scales(stored)
    if other:
        return f"other tensors there are, as {other!r} shows"
    return None


def _key_of_scales(stored: StoredCheckpoint) -> str | None:
    """Return the key of any stored scales, or None."""
    parts = (quantized.parts["scale"].key for quantized in stored.quantized.values())
    key = next(parts, stored.manifest.scales_key)
    return key and key.removesuffix(AS_STORED)


def check_integers(stored: StoredCheckpoint, key: str, requested: torch.dtype) -> None:
    """Refuse to load integers as floating-point values where they are codes.

    Raises:
        LoadMismatchError: `key` holds such integers.
    """
    name = stored.dtype_name(key)
    if not requested.is_floating_point or FROM_NAME[name].is_floating_point:
        return
    is_of_model = (stored.manifest.origin or {}).get("format") == "huggingface"
    is_matrix = is_of_model and len(stored.global_shape(key)) > 1
    if are_integers_as_weights(key, name, is_matrix):
        raise LoadMismatchError(
            f"Key {key!r} is stored in {stored.location!r} as {FROM_NAME[name]} and was requested "
            f"as {requested}: integers in the place of floating point values are codes of a "
            "quantized tensor, whose scales are not known. Request "
            f"{FROM_NAME[name]}, which loads what is stored; if that is the value, convert it "
            "afterwards.",
            unexpected=[key],
        )


def check_scales_cast(stored: StoredCheckpoint, casts: Mapping[str, torch.dtype]) -> None:
    """Refuse to convert codes, or their scales alone, to other dtypes.

    `casts` has a dtype for each stored key.

    Raises:
        LoadMismatchError: a key holds codes or scales.
    """
    if not casts:
        return
    for key, requested in casts.items():
        check_cast(stored, key, requested)
    pairs = zip(stored.manifest.keys, stored.manifest.dtypes, strict=True)
    codes = [(key, dtype) for key, dtype in pairs if may_be_codes(dtype)]
    separate = []
    for key, dtype in codes:
        for scales in scales_of(key, stored.manifest.key_index):
            if scales in casts:
                raise _scales_alone(stored, scales, key, casts[scales])
        if are_codes_beside_scales(key, dtype):
            separate.append(key)
    if separate:
        _check_scales_beside(stored, separate, casts)


def _check_scales_beside(
    stored: StoredCheckpoint, codes: Sequence[str], casts: Mapping[str, torch.dtype]
) -> None:
    """Refuse to convert tensors with names of scales for codes."""
    at = {}
    for key in codes:
        for place in (key, key.rpartition(".")[0]):
            at[place] = key
    for scales in casts:
        for place in places_of(scales):
            if place in at:
                raise _scales_alone(stored, scales, at[place], casts[scales])


def _scales_alone(
    stored: StoredCheckpoint, scales: str, codes: str, requested: torch.dtype
) -> LoadMismatchError:
    return LoadMismatchError(
        f"{scales!r} in {stored.location!r} holds the scales of the codes {codes!r}, "
        f"which stay as they are stored: converting the scales alone to {requested} "
        "would change the weights. Leave out `dtype`, or give patterns of names that do "
        "not match scales.",
        unexpected=[scales],
    )


def undecoded(stored: StoredCheckpoint, key: str) -> str:
    """Return a sentence about a tensor with codes that cannot be decoded.

    It is empty for other tensors.
    """
    known = stored.manifest.key_index
    module = key[: key.rfind(".") + 1]
    names = (
        f"{key}_packed",
        f"{key}_blocks",
        f"{key}._data",
        f"{module}qweight",
        f"{module}W_q",
        f"{module}_weight_qdata",
        f"{module}compressed",
    )
    codes = next((name for name in names if name in known), None)
    if codes is None:
        return ""
    config = stored.manifest.quantization or {}
    facts = _facts_of(config)
    why = f" ({config['file']} says {' and '.join(facts)})" if facts else ""
    parts = summarize_keys(name for name in known if name.startswith(module) and name != codes)
    return (
        f"{key!r} is stored as {codes!r} with {parts}: codes of a form that distckpt does not "
        f"decode{why}. Load these as they are stored, or decode them with the program that wrote "
        "them, and save the result."
    )


def _facts_of(config: Mapping[str, Any]) -> list[str]:
    """Return a configuration's properties that distckpt does not decode."""
    transformed = config.get("transformed")
    facts = []
    if config.get("asymmetric"):
        facts = ["symmetric: false"]
    if transformed:
        facts.append(transformed if isinstance(transformed, str) else "a transform")
    for bits in dict.fromkeys(config.get("num_bits", ())):
        facts.append(f"num_bits: {bits}")
    return facts

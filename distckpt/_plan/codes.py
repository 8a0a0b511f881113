"""Refusing conversions of codes as if they were values."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import summarize_keys
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._quantization.names import SMALL_CODES, is_named_as_codes, may_be_codes, scales_of

CONFIG_NAMES = ("config.json", "hf_quant_config.json")
"""Files that may say how the tensors beside them are quantized; the second one is NVIDIA
ModelOpt's.
"""

AS_STORED = " (as stored)"
"""What a view of a checkpoint adds to the keys of that which is stored only for its quantized
tensors.
"""


def check_cast(stored: StoredCheckpoint, key: str, requested: torch.dtype) -> None:
    """Refuse to convert codes, or their scales, as if they were values.

    Raises:
        LoadMismatchError: `key` holds codes, and `requested` is not the dtype that they are stored
            in.
    """
    name = stored.dtype_name(key)
    if not may_be_codes(name) or FROM_NAME[name] == requested:
        return
    manifest, plain = stored.manifest, key.removesuffix(AS_STORED)
    config, scales = manifest.quantization, scales_of(key, manifest.key_index)
    others = next(
        (each.parts["scale"].key for each in stored.quantized.values()), manifest.scales_key
    )
    if config and config.get("transformed"):
        why = f"the transform_config of its {config['file']} changes weights besides"
    elif scales:
        why = f"{scales[0]!r} holds their scales"
    elif config and name in SMALL_CODES:
        why = f"its {config['file']} says that it is quantized"
    elif is_named_as_codes(plain):
        why = "no other tensors have such names"
    elif others and name in SMALL_CODES and requested.is_floating_point:
        why = f"tensors beside it are, {others.removesuffix(AS_STORED)!r} holds scales"
    else:
        return
    way_out = (
        "request its values instead"
        if plain != key
        else "and distckpt does not know how they belong together"
    )
    raise LoadMismatchError(
        f"Key {plain!r} is stored in {stored.location!r} as {FROM_NAME[name]} and was requested "
        f"as {requested}, but its values are codes of a quantized tensor ({why}): converted "
        f"without scales they would be wrong weights, {way_out}. Request {FROM_NAME[name]} and "
        "the scales, which loads both as they are stored.",
        unexpected=[plain],
    )


def check_scales_cast(stored: StoredCheckpoint, casts: Mapping[str, torch.dtype]) -> None:
    """Refuse to convert codes, or their scales alone, to other dtypes; `casts` has the dtype for
    each stored key.

    Raises:
        LoadMismatchError: a key holds codes or scales.
    """
    for key, requested in casts.items():
        check_cast(stored, key, requested)
    index, manifest = stored.manifest.key_index, stored.manifest
    pairs = zip(manifest.keys, manifest.dtypes, strict=True) if casts else ()
    for codes in (key for key, dtype in pairs if may_be_codes(dtype)):
        scales = next((key for key in scales_of(codes, index) if key in casts), None)
        if scales is not None:
            raise LoadMismatchError(
                f"{scales!r} in {stored.location!r} holds the scales of the codes {codes!r}, "
                f"which stay as they are stored: converting the scales alone to {casts[scales]} "
                "would change the weights. Leave out `dtype`, or give patterns of names that do "
                "not match scales.",
                unexpected=[scales],
            )


def undecoded(stored: StoredCheckpoint, key: str) -> str:
    """Return a sentence on a tensor of which only codes are stored, in a form that is not decoded;
    "" for others.
    """
    known, module = stored.manifest.key_index, key[: key.rfind(".") + 1]
    names = (f"{key}_packed", f"{key}_blocks", f"{key}._data", f"{module}qweight", f"{module}W_q")
    codes = next((name for name in names if name in known), None)
    if codes is None:
        return ""
    config = stored.manifest.quantization or {}
    facts = ["symmetric: false"] * bool(config.get("asymmetric")) + ["a transform"] * bool(
        config.get("transformed")
    )
    facts += [f"num_bits: {bits}" for bits in dict.fromkeys(config.get("num_bits", ()))]
    why = f" ({config['file']} says {' and '.join(facts)})" if facts else ""
    parts = summarize_keys(name for name in known if name.startswith(module) and name != codes)
    return (
        f"{key!r} is stored as {codes!r} with {parts}: codes of a form that distckpt does not "
        f"decode{why}. Load these as they are stored, or decode them with the program that wrote "
        "them, and save the result."
    )

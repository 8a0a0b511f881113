"""Types of arguments: each converts a text, or refuses it.

Nothing here imports torch or numpy before it is needed.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

FORMATS = (
    "fp8-block",
    "fp8-block-ue8m0",
    "fp8-tensor",
    "fp8-channel",
    "int8-channel",
    "mxfp4",
    "mxfp4-packed",
    "int4",
    "nvfp4",
)
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def parse_part(text: str) -> tuple[int | None, int | None]:
    """Split `K/N`, `auto` or `auto/N`; None is left to the environment."""
    match = re.fullmatch(r"(?:auto|(\d+)(?=/))(?:/(\d+))?", text)
    index = count = None
    if match:
        index, count = (None if number is None else int(number) for number in match.groups())
    if not match or count == 0:
        raise ArgumentTypeError(f"{text!r} is no part; write 3/16, auto or auto/16")
    if index is not None and count is not None and index >= count:
        raise ArgumentTypeError(
            f"{text!r} is no part: they are counted from 0, and the last of {count} is "
            f"{count - 1}/{count}"
        )
    return index, count


def pair(text: str) -> tuple[str, str]:
    """Split `OLD=NEW`."""
    old, equals, new = text.partition("=")
    if not equals:
        raise ArgumentTypeError(f"{text!r} is not OLD=NEW")
    return old, new


def parse_size(text: str) -> int:
    """Convert `5GB`, `256MiB` or `1000` to bytes."""
    number = text.removesuffix("B").rstrip("kKMGTi")
    unit = text.removesuffix("B")[len(number) :].replace("k", "K")
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ArgumentTypeError(
            f"{text!r} is not a size; write 5GB, 256MiB or a number of bytes"
        ) from None


def _number(
    kind: Callable[[str], float], name: str, least: float = -math.inf, most: float = math.inf
) -> Callable[[str], float]:
    """Return a type of finite numbers within limits."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError, OverflowError):
            number = kind(text)
            if math.isfinite(number) and least <= number <= most:
                return number
        raise ArgumentTypeError(f"{text!r} is not {name}")

    return parse


positive = _number(int, "a positive integer", 1)
not_negative = _number(float, "a number of at least 0", 0)
parse_tolerance = _number(float, "a tolerance: use a number of at least 0", 0)
parse_weight = _number(float, "a finite number; --weights comes behind all paths")
parse_decay = _number(float, "a number from 0 to 1", 0, 1)


def parse_format(text: str) -> tuple[str, str]:
    """Split `[PATTERN=]FORMAT`."""
    pattern, _, name = text.rpartition("=")
    if name not in FORMATS:
        choices = ", ".join(FORMATS)
        raise ArgumentTypeError(f"{name!r} is no format: choose from {choices}")
    return pattern, name


def parse_grid(text: str) -> tuple[str, tuple[int, ...]]:
    """Split `PATTERN=AxB`."""
    pattern, equals, counts = text.rpartition("=")
    try:
        grid = tuple(int(count) for count in counts.split("x"))
    except ValueError:
        grid = ()
    if not equals or not grid or min(grid) < 1:
        raise ArgumentTypeError(f"{text!r} is not PATTERN=AxB, such as '*.up.weight=4x1'")
    return pattern, grid


def parse_layout(text: str) -> dict[str, int]:
    """Split `fsdp`, `tp=8,pp=2` or `fsdp=8,tp=8,ep=16`; `fsdp` alone is 0, for all other ranks."""
    degrees = {}
    for word in text.split(","):
        match = re.fullmatch(r"(tp|pp|ep|fsdp)=([1-9]\d{0,6})|(fsdp)", word)
        name = "" if match is None else match[1] or match[3]
        if match is None or name in degrees:
            raise ArgumentTypeError(
                f"{text!r} is not a layout: write fsdp, tp=8,pp=2 or fsdp,tp=8,ep=16; ranks that "
                "are left are replicas, and tp=1 is replicas alone"
            )
        degrees[name] = int(match[2] or 0)
    return degrees


def parse_storage(text: str) -> tuple[int, float]:
    """Split `2GB/s,1ms` into bytes for each second, and seconds for each request."""
    bandwidth, _, latency = text.partition(",")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", latency)
    if match and bandwidth.endswith("/s"):
        num_bytes = parse_size(bandwidth.removesuffix("/s"))
        if num_bytes > 0:
            return num_bytes, float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1}[match[2]]
    raise ArgumentTypeError(
        f"{text!r} is no bandwidth and latency: write 2GB/s,1ms or 500MB/s,200us"
    )


def parse_dtype(text: str) -> tuple[str, Any]:
    """Split `[PATTERN=]DTYPE`."""
    pattern, _, name = text.rpartition("=")
    torch = importlib.import_module("torch")
    dtype = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(f"torch has no dtype {name!r}; write bf16, fp32, float8_e4m3fn")
    return pattern, dtype

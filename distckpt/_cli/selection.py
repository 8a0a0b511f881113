"""Arguments that several verbs share: which tensors, under which names, in which dtype."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distckpt._cli.output import Output

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def add_keys(parser: ArgumentParser) -> None:
    """Declare `--keys`."""
    parser.add_argument(
        "--keys", action="append", metavar="PATTERN", help="beginning of keys, or pattern with *; repeat"
    )


def add_rename(parser: ArgumentParser) -> None:
    """Declare `--rename`."""
    parser.add_argument(
        "--rename",
        action="append",
        metavar="OLD=NEW",
        type=pair,
        default=[],
        help="replace a beginning of names; repeat",
    )


def add_dtype(parser: ArgumentParser) -> None:
    """Declare `--dtype`, see `dtype_option`."""
    parser.add_argument(
        "--dtype",
        action="append",
        metavar="[PATTERN=]DTYPE",
        type=_dtype,
        help="convert: bf16, or '*.norm.weight=fp32'; repeat",
    )


def pair(text: str) -> tuple[str, str]:
    """Divide `OLD=NEW`, for use as the type of an argument."""
    old, equals, new = text.partition("=")
    if not equals:
        raise ArgumentTypeError(f"{text!r} is not OLD=NEW")
    return old, new


def dtype_option(given: Sequence[tuple[str, torch.dtype]] | None) -> Any:
    """Return what functions take as `dtype` for what was given with `--dtype`."""
    if given is None:
        return None
    if len(given) == 1 and not given[0][0]:
        return given[0][1]
    # The first pattern that fits counts: the one for all others comes last.
    return {pattern or "*": dtype for pattern, dtype in sorted(given, key=lambda pair: not pair[0])}


def warn_of_overflows(overflows: Mapping[str, int], output: Output) -> None:
    """Tell of values that did not fit the dtype they were converted to."""
    for name, count in overflows.items():
        output.message(f"warning: {count} values of {name!r} did not fit the dtype they were converted to")


def _dtype(text: str) -> tuple[str, torch.dtype]:
    pattern, _, name = text.rpartition("=")
    dtype = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(f"torch has no dtype {name!r}; write bf16, fp32, float8_e4m3fn")
    return pattern, dtype

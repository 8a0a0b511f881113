"""Arguments that several verbs share: which tensors, under which names, in which dtype, and how to write them."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distckpt._cli.output import Output
from distckpt._cli.verb import parse_size

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def add_keys(parser: ArgumentParser) -> None:
    """Declare `--keys`."""
    parser.add_argument(
        "--keys", action="append", metavar="PATTERN", help="prefix of keys, or pattern with *; can be repeated"
    )


def add_rename(parser: ArgumentParser) -> None:
    """Declare `--rename`."""
    parser.add_argument(
        "--rename",
        action="append",
        metavar="OLD=NEW",
        type=pair,
        default=[],
        help="replace a prefix of keys; can be repeated",
    )


def add_dtype(parser: ArgumentParser) -> None:
    """Declare `--dtype`, see `dtype_option`."""
    parser.add_argument(
        "--dtype",
        action="append",
        metavar="[PATTERN=]DTYPE",
        type=_dtype,
        help="convert to bf16, or only some: '*.norm.weight=fp32'; can be repeated",
    )


def add_writing(parser: ArgumentParser) -> None:
    """Declare `--overwrite` and `--max-inflight-bytes`."""
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument("--max-inflight-bytes", type=parse_size, metavar="SIZE", help="memory for data in transit")


def add_verify(parser: ArgumentParser) -> None:
    """Declare `--verify`."""
    parser.add_argument(
        "--verify", choices=("none", "read", "full"), default="full", help="checksums to compare (default: %(default)s)"
    )


def given(arguments: Namespace, *names: str) -> dict[str, Any]:
    """Return the named arguments without those left out, for which the function called has defaults."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def pair(text: str) -> tuple[str, str]:
    """Split `OLD=NEW`."""
    old, equals, new = text.partition("=")
    if not equals:
        raise ArgumentTypeError(f"{text!r} is not OLD=NEW")
    return old, new


def dtype_option(given: Sequence[tuple[str, torch.dtype]] | None) -> Any:
    """Convert the values of `--dtype` to the `dtype` argument of functions."""
    if given is None:
        return None
    if len(given) == 1 and not given[0][0]:
        return given[0][1]
    # The first matching pattern counts: the one for all others comes last.
    return {pattern or "*": dtype for pattern, dtype in sorted(given, key=lambda pair: not pair[0])}


def warn_of_overflows(overflows: Mapping[str, int], output: Output) -> None:
    """Warn about values that did not fit the dtype they were converted to."""
    for name, count in overflows.items():
        output.message(f"warning: {count} values of {name!r} did not fit the dtype they were converted to")


def _dtype(text: str) -> tuple[str, torch.dtype]:
    pattern, _, name = text.rpartition("=")
    dtype = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(f"torch has no dtype {name!r}; write bf16, fp32, float8_e4m3fn")
    return pattern, dtype

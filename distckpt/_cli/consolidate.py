"""`distckpt consolidate`: merge the shards of a checkpoint into a Hugging Face directory."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from typing import Any

import torch

from distckpt._cli.output import Output, size_text
from distckpt._cli.verb import Verb, parse_size
from distckpt.serialization import consolidate

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments: those of `distckpt.consolidate`."""
    parser.add_argument("checkpoint", help="a checkpoint, or a folder of shards: a path or URL")
    parser.add_argument("output_dir", help="gets model.safetensors, or several files and their index")
    parser.add_argument(
        "--keys", action="append", metavar="PATTERN", help="beginning of keys, or pattern with *; repeat"
    )
    parser.add_argument(
        "--rename",
        action="append",
        metavar="OLD=NEW",
        type=_pair,
        default=[],
        help="replace a beginning of names; repeat",
    )
    parser.add_argument(
        "--dtype",
        action="append",
        metavar="[PATTERN=]DTYPE",
        type=_dtype,
        help="convert: bf16, or '*.norm.weight=fp32'; repeat",
    )
    parser.add_argument("--tied", choices=("drop", "write"), default="drop", help="what to do with copies of a tensor")
    parser.add_argument("--max-file-bytes", type=parse_size, metavar="SIZE", help="such as 5GB")
    parser.add_argument("--like", metavar="DIR", help="divide tensors among files as this Hugging Face directory does")
    parser.add_argument("--extra-files-from", metavar="DIR", help="copy config, tokenizer and the like from there")
    parser.add_argument("--overwrite", action="store_true", help="replace an export that is there")
    parser.add_argument("--verify", choices=("none", "read", "full"), default="full", help="which checksums to compare")
    parser.add_argument("--max-inflight-bytes", type=parse_size, metavar="SIZE", help="memory for data on its way")


def run(arguments: Namespace, output: Output) -> int:
    """Consolidate and say what was written."""
    # What was not given is left to the defaults of the function.
    sizes = {
        name: getattr(arguments, name)
        for name in ("max_file_bytes", "max_inflight_bytes")
        if getattr(arguments, name) is not None
    }
    report = consolidate(
        arguments.checkpoint,
        arguments.output_dir,
        keys=arguments.keys,
        rename=dict(arguments.rename),
        dtype=_dtype_option(arguments.dtype),
        tied=arguments.tied,
        like=arguments.like,
        extra_files_from=arguments.extra_files_from,
        overwrite=arguments.overwrite,
        verify=arguments.verify,
        **sizes,
    )
    fields = {**vars(report), "dtypes": dict(report.dtypes), "overflows": dict(report.overflows)}
    output.json({"output_dir": arguments.output_dir, **fields})
    dtypes = ", ".join(f"{count} {name}" for name, count in sorted(report.dtypes.items()))
    output.line(
        f"{report.num_tensors} tensors ({dtypes}), {report.num_parameters:,} parameters, "
        f"{size_text(report.num_bytes)} in {len(report.files)} files in {arguments.output_dir}, {report.seconds:.2f} s"
    )
    for name, count in report.overflows.items():
        output.message(f"warning: {count} values of {name!r} did not fit the dtype they were converted to")
    return 0


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals:
        raise ArgumentTypeError(f"{text!r} is not OLD=NEW")
    return old, new


def _dtype(text: str) -> tuple[str, torch.dtype]:
    pattern, _, name = text.rpartition("=")
    dtype = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(f"torch has no dtype {name!r}; write bf16, fp32, float8_e4m3fn")
    return pattern, dtype


def _dtype_option(given: Sequence[tuple[str, torch.dtype]] | None) -> Any:
    if given is None:
        return None
    if len(given) == 1 and not given[0][0]:
        return given[0][1]
    # The first pattern that fits counts: the one for all others comes last.
    return {pattern or "*": dtype for pattern, dtype in sorted(given, key=lambda pair: not pair[0])}


VERB = Verb(
    "consolidate",
    "Merge the shards of a checkpoint into a Hugging Face directory.",
    add_arguments,
    run,
    aliases=("export",),
)

"""`distckpt reshard`: rewrite a checkpoint as other ranks would have saved it."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from distckpt._cli.output import Output, count_text, size_text
from distckpt._cli.selection import add_verify, add_writing, given, warn_of_overflows
from distckpt._cli.verb import Verb, positive
from distckpt._operations.reshard import ReshardReport, reshard


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("source", help="a checkpoint: a path or URL")
    parser.add_argument("checkpoint", help="the new checkpoint: a path or URL")
    parser.add_argument(
        "--grid",
        action="append",
        metavar="PATTERN=AxB",
        type=_grid,
        default=[],
        help="divide matching tensors into A x B parts, part i written by rank i; can be repeated",
    )
    add_output(parser)
    add_verify(parser)


def add_output(parser: ArgumentParser) -> None:
    """Declare the arguments for writing a checkpoint."""
    parser.add_argument(
        "--ranks",
        type=positive,
        default=1,
        metavar="N",
        help="write the files of N ranks, of even size (default: %(default)s)",
    )
    add_writing(parser)


def output_options(arguments: Namespace) -> dict[str, Any]:
    """Convert the arguments of `add_output` to those of `distckpt.reshard`."""
    return {"num_ranks": arguments.ranks, **given(arguments, "overwrite", "max_inflight_bytes")}


def run(arguments: Namespace, output: Output) -> int:
    """Reshard, and print a summary."""
    with output.progress("resharding") as progress:
        options = {"grids": dict(arguments.grid), "verify": arguments.verify, **output_options(arguments)}
        report = reshard(arguments.source, arguments.checkpoint, progress=progress, **options)
    show(report, output)
    return 0


def show(report: ReshardReport, output: Output) -> None:
    """Print what was written."""
    output.json(vars(report))
    output.line(
        f"{count_text(report.num_tensors, 'tensor')} in {count_text(report.num_chunks, 'chunk')}, "
        f"{count_text(report.num_objects, 'object')}, "
        f"{size_text(report.num_bytes)} in {count_text(report.num_files, 'file')} "
        f"in {report.location}, {report.seconds:.2f} s"
    )
    warn_of_overflows(report.overflows, output)


def _grid(text: str) -> tuple[str, tuple[int, ...]]:
    pattern, equals, counts = text.rpartition("=")
    try:
        grid = tuple(int(count) for count in counts.split("x"))
    except ValueError:
        grid = ()
    if not equals or not grid or min(grid) < 1:
        raise ArgumentTypeError(f"{text!r} is not PATTERN=AxB, such as '*.up.weight=4x1'")
    return pattern, grid


VERB = Verb("reshard", "Rewrite a checkpoint as other ranks would have saved it.", add_arguments, run)

"""`distckpt reshard`: rewrite a checkpoint as other ranks would have saved it."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from distckpt._cli.output import Output, count_text, size_text
from distckpt._cli.selection import warn_of_overflows
from distckpt._cli.verb import Verb, parse_size, positive
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
        help="divide these tensors into so many parts along each axis, part i for rank i; repeat",
    )
    add_output(parser)
    parser.add_argument("--verify", choices=("none", "read", "full"), default="full", help="which checksums to compare")


def add_output(parser: ArgumentParser) -> None:
    """Declare the arguments that say how a checkpoint is written."""
    parser.add_argument(
        "--ranks",
        type=positive,
        default=1,
        metavar="N",
        help="write the files of so many ranks, of even size (default: %(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is there")
    parser.add_argument("--max-inflight-bytes", type=parse_size, metavar="SIZE", help="memory for data on its way")


def output_options(arguments: Namespace) -> dict[str, Any]:
    """Return what `add_output` declares as arguments of `distckpt.reshard`."""
    options = {"num_ranks": arguments.ranks, "overwrite": arguments.overwrite}
    # What was not given is left to the default of the function.
    if arguments.max_inflight_bytes is not None:
        options["max_inflight_bytes"] = arguments.max_inflight_bytes
    return options


def run(arguments: Namespace, output: Output) -> int:
    """Rewrite and say what was written."""
    with output.progress("resharding") as progress:
        report = reshard(
            arguments.source,
            arguments.checkpoint,
            grids=dict(arguments.grid),
            verify=arguments.verify,
            progress=progress,
            **output_options(arguments),
        )
    show(report, output)
    return 0


def show(report: ReshardReport, output: Output) -> None:
    """Say what was written."""
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

"""`distckpt reshard`: rewrite a checkpoint as other ranks would have saved it."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from distckpt._cli.output import Output, count_text, size_text
from distckpt._cli.selection import given, warn_of_overflows
from distckpt._operations.reshard import ReshardReport, reshard


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

"""`distckpt reshard` and `distckpt import`: write a checkpoint for a number of ranks."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from distckpt._tools.reshard import ReshardReport, reshard
from distckpt.cli._arguments import is_in_parts
from distckpt.cli._output import Output, count_text, size_text
from distckpt.cli._selection import dtype_option, given, run_parts, warn_of_overflows


def run(arguments: Namespace, output: Output) -> int:
    """Reshard, or import, and print a summary."""
    is_import = "hf_dir" in arguments
    options = {
        "source_dir": arguments.hf_dir if is_import else arguments.source,
        "checkpoint_dir": arguments.checkpoint,
        "num_ranks": arguments.ranks,
        "overwrite": arguments.overwrite,
        **(_import_arguments(arguments) if is_import else _reshard_arguments(arguments)),
        **given(arguments, "max_inflight_bytes"),
    }
    if is_in_parts(arguments):
        return run_parts(arguments, output, "reshard", options, arguments.checkpoint, _print_report)
    with output.progress("importing" if is_import else "resharding") as progress:
        report = reshard(**options, progress=progress)
    return _print_report(report, output)


def _print_report(report: ReshardReport, output: Output) -> int:
    output.json(vars(report))
    output.line(
        f"{count_text(report.num_tensors, 'tensor')} in {count_text(report.num_chunks, 'chunk')}, "
        f"{count_text(report.num_objects, 'object')}, "
        f"{size_text(report.num_bytes)} in {count_text(report.num_files, 'file')} "
        f"in {report.location}, {report.seconds:.2f} s"
    )
    warn_of_overflows(report.overflows, output)
    return 0


def _import_arguments(arguments: Namespace) -> dict[str, Any]:
    return {
        "keys": arguments.keys,
        "rename": dict(arguments.rename),
        "dtype": dtype_option(arguments.dtype),
    }


def _reshard_arguments(arguments: Namespace) -> dict[str, Any]:
    return {"grids": dict(arguments.grid), "verify": arguments.verify}

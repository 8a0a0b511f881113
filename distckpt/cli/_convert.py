"""`distckpt convert`: convert checkpoints from or for PyTorch or Megatron Core."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._tools.reshard import ReshardReport, reshard
from distckpt.cli._arguments import is_in_parts
from distckpt.cli._output import Output, size_text
from distckpt.cli._selection import run_parts
from distckpt.megatron import interop as megatron
from distckpt.torch_dist._export import export


def run(arguments: Namespace, output: Output) -> int:
    """Convert, and print a summary."""
    if arguments.megatron_types:
        megatron.register_types()
    if arguments.to == "torch_dist":
        return _export(arguments, output)
    options: dict[str, Any] = {
        "source_dir": arguments.source,
        "checkpoint_dir": arguments.checkpoint,
        "common_state": {} if arguments.without_common_state else None,
        "overwrite": arguments.overwrite,
    }
    if is_in_parts(arguments):
        return run_parts(arguments, output, "reshard", options, arguments.checkpoint, _print_report)
    with output.progress("converting") as progress:
        report = reshard(**options, progress=progress)
    return _print_report(report, output)


def _print_report(report: ReshardReport, output: Output) -> int:
    output.json(
        {"location": report.location, "num_bytes": report.num_bytes, "seconds": report.seconds}
    )
    output.line(
        f"{size_text(report.num_bytes)} converted to {report.location} in {report.seconds:.2f} s"
    )
    return 0


def _export(arguments: Namespace, output: Output) -> int:
    if arguments.without_common_state:
        raise CheckpointingException(
            "--without-common-state is not available with --to torch_dist."
        )
    options: dict[str, Any] = {
        "checkpoint_dir": arguments.source,
        "output_dir": arguments.checkpoint,
        "overwrite": arguments.overwrite,
    }
    show = partial(_print_export, arguments.checkpoint)
    if is_in_parts(arguments):
        return run_parts(
            arguments, output, "export_torch_dist", options, arguments.checkpoint, show
        )
    with output.progress("exporting") as progress:
        export(**options, progress=progress)
    return show(None, output)


def _print_export(location: str, report: None, output: Output) -> int:
    output.json({"location": location})
    output.line(f"converted to {location}")
    return 0

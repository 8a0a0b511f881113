"""`distckpt import`: convert a Hugging Face directory to a checkpoint."""

from __future__ import annotations

from argparse import Namespace

from distckpt._cli.output import Output
from distckpt._cli.reshard import output_options, show
from distckpt._cli.selection import dtype_option
from distckpt._operations.reshard import reshard


def run(arguments: Namespace, output: Output) -> int:
    """Import, and print a summary."""
    with output.progress("importing") as progress:
        chosen = {"keys": arguments.keys, "rename": dict(arguments.rename), "dtype": dtype_option(arguments.dtype)}
        options = {**chosen, **output_options(arguments)}
        report = reshard(arguments.hf_dir, arguments.checkpoint, progress=progress, **options)
    show(report, output)
    return 0

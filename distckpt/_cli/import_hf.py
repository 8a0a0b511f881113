"""`distckpt import`: convert a Hugging Face directory to a checkpoint."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from distckpt._cli.output import Output
from distckpt._cli.reshard import add_output, output_options, show
from distckpt._cli.selection import add_dtype, add_keys, add_rename, dtype_option
from distckpt._cli.verb import Verb
from distckpt._operations.reshard import reshard


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("hf_dir", help="a Hugging Face directory: a path or URL")
    parser.add_argument("checkpoint", help="the new checkpoint: a path or URL")
    add_keys(parser)
    add_rename(parser)
    add_dtype(parser)
    add_output(parser)


def run(arguments: Namespace, output: Output) -> int:
    """Import, and print a summary."""
    with output.progress("importing") as progress:
        chosen = {"keys": arguments.keys, "rename": dict(arguments.rename), "dtype": dtype_option(arguments.dtype)}
        options = {**chosen, **output_options(arguments)}
        report = reshard(arguments.hf_dir, arguments.checkpoint, progress=progress, **options)
    show(report, output)
    return 0


VERB = Verb("import", "Convert a Hugging Face directory to a checkpoint.", add_arguments, run)

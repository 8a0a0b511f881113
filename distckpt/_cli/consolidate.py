"""`distckpt consolidate`: merge the shards of a checkpoint into a Hugging Face directory."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from distckpt._cli.output import Output, count_text, size_text
from distckpt._cli.selection import (
    add_dtype,
    add_keys,
    add_rename,
    add_verify,
    add_writing,
    dtype_option,
    given,
    warn_of_overflows,
)
from distckpt._cli.verb import Verb, parse_size
from distckpt.serialization import consolidate


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments: those of `distckpt.consolidate`."""
    parser.add_argument("checkpoint", help="a checkpoint, or a folder of shards: a path or URL")
    parser.add_argument("output_dir", help="directory for model.safetensors, or several files and their index")
    add_keys(parser)
    add_rename(parser)
    add_dtype(parser)
    parser.add_argument(
        "--tied",
        choices=("drop", "write"),
        default="drop",
        help="leave out or write tied copies of a tensor (default: %(default)s)",
    )
    parser.add_argument("--max-file-bytes", type=parse_size, metavar="SIZE", help="largest size of a file, such as 5GB")
    parser.add_argument("--like", metavar="DIR", help="divide tensors among files as this Hugging Face directory does")
    parser.add_argument("--extra-files-from", metavar="DIR", help="copy config, tokenizer and similar files from there")
    parser.add_argument("--extra-code", action="store_true", help="copy *.py files from there too")
    add_writing(parser)
    add_verify(parser)


def run(arguments: Namespace, output: Output) -> int:
    """Consolidate, and print a summary."""
    with output.progress("writing") as progress:
        report = consolidate(
            arguments.checkpoint,
            arguments.output_dir,
            keys=arguments.keys,
            rename=dict(arguments.rename),
            dtype=dtype_option(arguments.dtype),
            tied=arguments.tied,
            like=arguments.like,
            extra_files_from=arguments.extra_files_from,
            extra_code=arguments.extra_code,
            overwrite=arguments.overwrite,
            verify=arguments.verify,
            progress=progress,
            **given(arguments, "max_file_bytes", "max_inflight_bytes"),
        )
    fields = {**vars(report), "dtypes": dict(report.dtypes), "overflows": dict(report.overflows)}
    output.json({"output_dir": arguments.output_dir, **fields})
    dtypes = ", ".join(f"{count} {name}" for name, count in sorted(report.dtypes.items()))
    output.line(
        f"{count_text(report.num_tensors, 'tensor')} ({dtypes}), {report.num_parameters:,} parameters, "
        f"{size_text(report.num_bytes)} in {count_text(len(report.files), 'file')} "
        f"in {arguments.output_dir}, {report.seconds:.2f} s"
    )
    warn_of_overflows(report.overflows, output)
    return 0


VERB = Verb(
    "consolidate",
    "Merge the shards of a checkpoint into a Hugging Face directory.",
    add_arguments,
    run,
    aliases=("export",),
)

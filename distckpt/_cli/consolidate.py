"""`distckpt consolidate`: merge the shards of a checkpoint into a Hugging Face directory."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace

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
from distckpt._operations.consolidate import Preview, consolidate, preview
from distckpt._quantization.formats import FORMATS


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments: those of `distckpt.consolidate`."""
    parser.add_argument("checkpoint", help="a checkpoint, or a folder of shards: a path or URL")
    parser.add_argument("output_dir", help="directory for model.safetensors, or several files and their index")
    add_keys(parser)
    add_rename(parser)
    add_dtype(parser)
    parser.add_argument(
        "--family",
        metavar="auto|PATH",
        help="convert names and shapes of Megatron Core or transformers, by the config.json of --like, or at PATH",
    )
    parser.add_argument("--dry-run", action="store_true", help="list what would be exported and from where, and stop")
    parser.add_argument(
        "--tied",
        choices=("drop", "write"),
        default="drop",
        help="leave out or write tied copies of a tensor (default: %(default)s)",
    )
    parser.add_argument("--max-file-bytes", type=parse_size, metavar="SIZE", help="largest size of a file, such as 5GB")
    parser.add_argument(
        "--quantize",
        action="append",
        type=_format,
        metavar="[PATTERN=]FORMAT",
        help=f"quantise to one of {', '.join(FORMATS)}; what models usually quantise, or by pattern; can be repeated",
    )
    parser.add_argument("--like", metavar="DIR", help="divide tensors among files as this Hugging Face directory does")
    parser.add_argument("--extra-files-from", metavar="DIR", help="copy config, tokenizer and similar files from there")
    parser.add_argument("--extra-code", action="store_true", help="copy *.py files from there too")
    add_writing(parser)
    add_verify(parser)


def _format(text: str) -> tuple[str, str]:
    pattern, _, name = text.rpartition("=")
    if name not in FORMATS:
        raise ArgumentTypeError(f"{name!r} is no format: choose from {', '.join(FORMATS)}")
    return pattern, name


def run(arguments: Namespace, output: Output) -> int:
    """Consolidate, and print a summary."""
    selected = {
        "keys": arguments.keys,
        "family": arguments.family,
        "rename": dict(arguments.rename),
        "dtype": dtype_option(arguments.dtype),
        "quantize": dict(arguments.quantize) if arguments.quantize else None,
        "tied": arguments.tied,
        "like": arguments.like,
    }
    if arguments.dry_run:
        _show_plan(preview(arguments.checkpoint, **selected), output)
        return 0
    with output.progress("writing") as progress:
        report = consolidate(
            arguments.checkpoint,
            arguments.output_dir,
            **selected,
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


def _show_plan(plan: Preview, output: Output) -> None:
    """Print each tensor of an export, and the regions that it is made of."""
    sources = {t.name: [f"{part.key} {part.source}" for part in t.mapped.parts] for t in plan.tensors}
    if output.as_json:
        tensors = [
            {"name": t.name, "dtype": t.dtype, "shape": t.shape, "sources": sources[t.name]} for t in plan.tensors
        ]
        output.json({"tensors": tensors, "left_out": plan.left_out})
        return
    for tensor in plan.tensors:
        regions = sources[tensor.name]
        more = f" and {len(regions) - 1:,} more" if len(regions) > 1 else ""
        shape = "x".join(map(str, tensor.shape)) or "()"
        output.line(f"{tensor.name}  {tensor.dtype} {shape}  <- {regions[0] if regions else 'empty'}{more}")
    for key in plan.left_out:
        output.line(f"left out: {key}")
    num_bytes = sum(tensor.num_bytes for tensor in plan.tensors)
    output.line(f"{count_text(len(plan.tensors), 'tensor')}, {size_text(num_bytes)}; nothing was written")


VERB = Verb(
    "consolidate",
    "Merge the shards of a checkpoint into a Hugging Face directory.",
    add_arguments,
    run,
    aliases=("export",),
)

"""`distckpt convert`: convert a checkpoint that PyTorch or Megatron Core wrote, or make one for them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from distckpt._base.errors import CheckpointingException
from distckpt._cli.output import Output, size_text
from distckpt._cli.verb import Verb
from distckpt.interop import megatron, torch_dist


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("source", help="a checkpoint, a directory with a .metadata file, or a Hugging Face directory")
    parser.add_argument("checkpoint", help="the new checkpoint: a path or URL")
    parser.add_argument(
        "--to",
        choices=("distckpt", "torch_dist"),
        default="distckpt",
        help="format of the new checkpoint; torch_dist is that of Megatron Core, which PyTorch reads as well",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing checkpoint")
    parser.add_argument(
        "--megatron-types", action="store_true", help="import Megatron Core, and register its Enum classes for objects"
    )
    parser.add_argument(
        "--without-common-state", action="store_true", help="leave out common state, the values that are not sharded"
    )


def run(arguments: Namespace, output: Output) -> int:
    """Convert, and print a summary."""
    if arguments.megatron_types:
        megatron.register_types()
    if arguments.to == "torch_dist":
        return _export(arguments, output)
    common_state: dict[str, object] | None = {} if arguments.without_common_state else None
    with output.progress("converting") as progress:
        report = torch_dist.convert(
            arguments.source,
            arguments.checkpoint,
            common_state=common_state,
            overwrite=arguments.overwrite,
            progress=progress,
        )
    output.json({"location": report.location, "num_bytes": report.num_bytes, "seconds": report.seconds})
    output.line(f"{size_text(report.num_bytes)} converted to {report.location} in {report.seconds:.2f} s")
    return 0


def _export(arguments: Namespace, output: Output) -> int:
    if arguments.without_common_state:
        raise CheckpointingException("--without-common-state is not available with --to torch_dist.")
    with output.progress("exporting") as progress:
        torch_dist.export(arguments.source, arguments.checkpoint, overwrite=arguments.overwrite, progress=progress)
    output.json({"location": arguments.checkpoint})
    output.line(f"converted to {arguments.checkpoint}")
    return 0


VERB = Verb(
    "convert",
    "Convert a checkpoint that PyTorch or Megatron Core wrote, or make one that they read.",
    add_arguments,
    run,
)

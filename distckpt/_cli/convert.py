"""`distckpt convert`: convert a checkpoint that PyTorch or Megatron Core wrote, or make one for
them.
"""

from __future__ import annotations

from argparse import Namespace

from distckpt._base.errors import CheckpointingException
from distckpt._cli.output import Output, size_text
from distckpt._foreign.torch_dist.export import export
from distckpt._megatron import interop as megatron
from distckpt._operations.reshard import reshard


def run(arguments: Namespace, output: Output) -> int:
    """Convert, and print a summary."""
    if arguments.megatron_types:
        megatron.register_types()
    if arguments.to == "torch_dist":
        return _export(arguments, output)
    common_state: dict[str, object] | None = {} if arguments.without_common_state else None
    with output.progress("converting") as progress:
        report = reshard(
            arguments.source,
            arguments.checkpoint,
            common_state=common_state,
            overwrite=arguments.overwrite,
            progress=progress,
        )
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
    with output.progress("exporting") as progress:
        export(
            arguments.source, arguments.checkpoint, overwrite=arguments.overwrite, progress=progress
        )
    output.json({"location": arguments.checkpoint})
    output.line(f"converted to {arguments.checkpoint}")
    return 0

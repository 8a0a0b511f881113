"""`distckpt reshard` and `distckpt import`: write a checkpoint as some number of ranks would have
saved it.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from distckpt._cli.output import Output, count_text, size_text
from distckpt._cli.selection import dtype_option, given, warn_of_overflows
from distckpt._operations.reshard import reshard


def run(arguments: Namespace, output: Output) -> int:
    """Reshard, or import, and print a summary."""
    options: dict[str, Any] = {
        "num_ranks": arguments.ranks,
        **given(arguments, "overwrite", "max_inflight_bytes"),
    }
    if "hf_dir" in arguments:
        source, doing = arguments.hf_dir, "importing"
        options |= {
            "keys": arguments.keys,
            "rename": dict(arguments.rename),
            "dtype": dtype_option(arguments.dtype),
        }
    else:
        source, doing = arguments.source, "resharding"
        options |= {"grids": dict(arguments.grid), "verify": arguments.verify}
    with output.progress(doing) as progress:
        report = reshard(source, arguments.checkpoint, progress=progress, **options)
    output.json(vars(report))
    output.line(
        f"{count_text(report.num_tensors, 'tensor')} in {count_text(report.num_chunks, 'chunk')}, "
        f"{count_text(report.num_objects, 'object')}, "
        f"{size_text(report.num_bytes)} in {count_text(report.num_files, 'file')} "
        f"in {report.location}, {report.seconds:.2f} s"
    )
    warn_of_overflows(report.overflows, output)
    return 0

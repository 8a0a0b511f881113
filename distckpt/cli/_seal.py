"""`distckpt seal`: store the checksums of another program's checkpoint beside it."""

from __future__ import annotations

from argparse import Namespace

from distckpt._tools.seal import seal
from distckpt.cli._output import Output, count_text, size_text


def run(arguments: Namespace, output: Output) -> int:
    """Seal a directory, and tell the number and size of its files."""
    with output.progress("sealing") as progress:
        report = seal(
            arguments.path,
            overwrite=arguments.overwrite,
            num_threads=arguments.jobs,
            progress=progress,
        )
    output.json(vars(report))
    outcome = "sealed" if report.is_new else "unchanged since it was sealed"
    output.line(
        f"{outcome}: {report.location}, {count_text(report.num_files, 'file')}, "
        f"{size_text(report.num_bytes)} read in {report.seconds:.2f} s"
    )
    return 0

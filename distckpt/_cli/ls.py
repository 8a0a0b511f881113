"""`distckpt ls`: list the checkpoints of a run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from distckpt._cli.output import Output, size_text, state_text, time_text
from distckpt._manager.listing import CheckpointInfo, list_checkpoints


def run(arguments: Namespace, output: Output) -> int:
    """Print a line for each checkpoint, and why some are not whole."""
    found = list_checkpoints(arguments.root)
    output.json([vars(info) for info in found])
    if arguments.html is not None:
        _write_page(arguments, found)
    if not found:
        output.line(f"there are no checkpoints in {arguments.root}")
        return 0
    rows = [
        [
            info.name,
            time_text(info.saved_at),
            " ".join(f"{name}={value:.4g}" for name, value in info.metrics.items()),
            state_text(info),
            size_text(info.num_bytes) if info.num_bytes else "",
        ]
        for info in found
    ]
    output.table(
        ["checkpoint", "saved", "metrics", "state", "size"], rows, num_text=4, drop="metrics saved"
    )
    for info in found:
        if info.problem:
            output.line(f"{info.name}: {info.problem}")
    return 0


def _write_page(arguments: Namespace, found: Sequence[CheckpointInfo]) -> None:
    # Imported when it is asked for, which is rare.
    from distckpt._cli.run_page import write_run_page

    chosen = (arguments.changes, arguments.keys, arguments.recompute)
    write_run_page(arguments.html, arguments.root, found, *chosen)

"""`distckpt ls`: list the checkpoints of a run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from distckpt.cli._output import Output, metrics_text, size_text, state_text, time_text
from distckpt.manager._listing import CheckpointInfo, list_checkpoints


def run(arguments: Namespace, output: Output) -> int:
    """Print a line for each checkpoint, with its problem if any."""
    infos = list_checkpoints(arguments.root)
    output.json(list(map(vars, infos)))
    if arguments.html is not None:
        _write_page(arguments, infos)
    if not infos:
        output.line(f"there are no checkpoints in {arguments.root}")
        return 0
    rows = []
    for info in infos:
        state = state_text(info)
        size = ""
        if info.num_bytes:
            size = size_text(info.num_bytes)
        rows.append([info.name, time_text(info.saved_at), metrics_text(info), state, size])
    output.table(
        ["checkpoint", "saved", "metrics", "state", "size"], rows, num_text=4, drop="metrics saved"
    )
    for info in infos:
        if info.problem:
            output.line(f"{info.name}: {info.problem}")
    return 0


def _write_page(arguments: Namespace, infos: Sequence[CheckpointInfo]) -> None:
    # Imported only for this option, which is rare.
    from distckpt._pages.run_page import write_run_page

    options = (arguments.changes, arguments.keys, arguments.recompute)
    write_run_page(arguments.html, arguments.root, infos, *options)

"""`distckpt ls`: list the checkpoints of a run."""

from __future__ import annotations

from argparse import Namespace

from distckpt.cli._output import Output, size_text, time_text
from distckpt.manager._listing import CheckpointInfo, list_checkpoints

HEADS = ["checkpoint", "saved", "metrics", "state", "size"]


def run(arguments: Namespace, output: Output) -> int:
    """Print a line for each checkpoint, with its problem if any."""
    infos = list_checkpoints(arguments.root)
    output.json(list(map(vars, infos)))
    if arguments.html is not None:
        # Imported only for this option, which is rare.
        from distckpt._pages.run_page import write_run_page

        options = (arguments.changes, arguments.keys, arguments.recompute)
        write_run_page(arguments.html, arguments.root, infos, *options)
    if not infos:
        output.line(f"there are no checkpoints in {arguments.root}")
        return 0
    output.table(HEADS, list(map(cells_of, infos)), num_text=4, drop="metrics saved")
    for info in infos:
        if info.problem:
            output.line(f"{info.name}: {info.problem}")
    return 0


def cells_of(info: CheckpointInfo) -> list[str]:
    """Return the cells of a checkpoint in a table with these heads."""
    metrics = " ".join(f"{name}={value:.4g}" for name, value in info.metrics.items())
    words = {
        "not whole": info.problem is not None,
        "newest": info.is_newest,
        "pinned": info.pinned,
    }
    state = ", ".join(word for word, applies in words.items() if applies)
    size = ""
    if info.num_bytes:
        size = size_text(info.num_bytes)
    return [info.name, time_text(info.saved_at), metrics, state, size]

"""`distckpt ls`: list the checkpoints of a run."""

from __future__ import annotations

import importlib
import time
from argparse import Namespace
from collections.abc import Sequence

from distckpt._cli.output import Output, size_text
from distckpt._manager.listing import CheckpointInfo, list_checkpoints


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


def time_text(seconds: float | None) -> str:
    """Format a time by the clock of this machine; an empty string for None."""
    if seconds is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def metrics_text(info: CheckpointInfo) -> str:
    """Format the metrics of a step in one line."""
    return " ".join(f"{name}={value:.4g}" for name, value in info.metrics.items())


def state_text(info: CheckpointInfo) -> str:
    """Describe the state of a checkpoint."""
    words = {
        "not whole": info.problem is not None,
        "newest": info.is_newest,
        "pinned": info.pinned,
    }
    return ", ".join(word for word, applies in words.items() if applies)


def _write_page(arguments: Namespace, infos: Sequence[CheckpointInfo]) -> None:
    # Imported only for this option, which is rare.
    page = importlib.import_module("distckpt._cli.run_page")
    options = (arguments.changes, arguments.keys, arguments.recompute)
    page.write_run_page(arguments.html, arguments.root, infos, *options)

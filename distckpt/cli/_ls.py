"""`distckpt ls`: list the checkpoints of a run."""

from __future__ import annotations

from argparse import Namespace

from distckpt.cli._output import CHECKPOINT_HEADS, Output, cells_of_checkpoint
from distckpt.manager._listing import list_checkpoints


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
    rows = list(map(cells_of_checkpoint, infos))
    output.table(CHECKPOINT_HEADS, rows, num_text=4, drop="metrics saved")
    for info in infos:
        for problem in (info.problem, info.tier_problem):
            if problem:
                output.line(f"{info.name}: {problem}")
    return 0

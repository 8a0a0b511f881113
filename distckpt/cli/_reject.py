"""`distckpt reject`: let managers pass over a step, or take that back."""

from __future__ import annotations

from argparse import Namespace

from distckpt._commit import posix
from distckpt.cli._output import Output
from distckpt.manager._rejections import reject


def run(arguments: Namespace, output: Output) -> int:
    """Reject a step, or with `--undo` let it count again."""
    root = posix.resolve(arguments.root)
    reject(root, arguments.step, arguments.reason)
    output.json({"root": root, "step": arguments.step, "rejected": arguments.reason})
    outcome = "counts again"
    if arguments.reason is not None:
        outcome = "is passed over from now on"
    output.line(f"step {arguments.step} in {root} {outcome}")
    return 0

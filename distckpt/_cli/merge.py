"""`distckpt merge`: merge several checkpoints into one Hugging Face directory."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

from distckpt._cli.consolidate import export
from distckpt._cli.output import Output
from distckpt._operations.merge import merge


def run(arguments: Namespace, output: Output) -> int:
    """Merge, and print a summary."""
    how = {"weights": arguments.weights, "ema": arguments.ema, "integers": arguments.integers}
    return export(partial(merge, arguments.checkpoints, **how), arguments, output)

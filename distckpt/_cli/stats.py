"""`distckpt stats`: statistics of the values of each tensor."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial

from distckpt._base.dtypes import FROM_NAME
from distckpt._checkpoint.opening import opened
from distckpt._cli.arguments import is_in_parts
from distckpt._cli.output import Output, count_text, size_text
from distckpt._cli.selection import run_parts_of_check
from distckpt._operations.stats import TensorStats, compute_stats
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations

_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def run(arguments: Namespace, output: Output) -> int:
    """Print a line for each tensor; return 1 if there is a NaN."""
    started = time.perf_counter()
    location = locations.normalize(arguments.path)
    show = partial(_print_stats, location, started)
    if is_in_parts(arguments):
        given = {"checkpoint_dir": arguments.path, "keys": arguments.keys}
        return run_parts_of_check(arguments, output, "stats", given, show)
    with (
        opened(Ranks.alone(), location) as stored,
        output.progress("reading") as progress,
    ):
        found = list(compute_stats(stored, arguments.keys, progress))
    return show(found, output)


def _print_stats(
    location: str, started: float, found: Sequence[TensorStats], output: Output
) -> int:
    output.json({"location": location, "tensors": [vars(tensor) for tensor in found]})
    heads = ["tensor", "norm", "mean", "min", "max", "zeros", "NaN", "Inf", "values"]
    output.table(heads, [_cells(tensor) for tensor in found], drop="values zeros mean Inf min max")
    num_bytes = sum(math.prod(tensor.shape) * FROM_NAME[tensor.dtype].itemsize for tensor in found)
    seconds = time.perf_counter() - started
    num_nan = sum(tensor.num_nan > 0 for tensor in found)
    output.line(
        f"{count_text(len(found), 'tensor')}, {num_nan:,} with NaN; {size_text(num_bytes)} read in "
        f"{seconds:.2f} s, {size_text(num_bytes / seconds)}/s"
    )
    return 1 if num_nan else 0


def _cells(tensor: TensorStats) -> list[str]:
    numbers = [f"{value:.3g}" for value in (tensor.norm, tensor.mean, tensor.min, tensor.max)]
    counts = [
        f"{count:,}" if count else ""
        for count in (tensor.num_zero, tensor.num_nan, tensor.num_infinite)
    ]
    tallest = max(tensor.histogram, default=1) or 1
    bars = "".join(_BARS[count * (len(_BARS) - 1) // tallest] for count in tensor.histogram)
    return [tensor.key, *numbers, *counts, bars]

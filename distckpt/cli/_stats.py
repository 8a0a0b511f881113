"""`distckpt stats`: statistics of the values of each tensor."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from distckpt._base.dtypes import ITEM_BYTES
from distckpt._base.messages import key_pattern, summarize_keys, without_numbers
from distckpt._base.options import Progress
from distckpt._io.block_stats import BlockStats, together
from distckpt._storage import locations
from distckpt._tools.stats import TensorStats, compute_stats, saved_stats
from distckpt.cli._output import Output, count_text, size_text
from distckpt.cli._selection import call, opened_at

_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_ASCII_BARS = "_.:-=+*#"
_HEADS = ["tensor", "keys", "norm", "mean", "min", "max", "zeros", "NaN", "Inf", "values"]


def run(arguments: Namespace, output: Output) -> int:
    """Print a line for each name, or for each tensor.

    Return 1 if there is a NaN.
    """
    return call(
        arguments,
        output,
        partial(_measure, arguments.recompute),
        {"checkpoint_dir": arguments.path, "keys": arguments.keys},
        partial(_print_stats, arguments),
        verb="stats",
        doing="reading",
    )


class _Report(NamedTuple):
    """Statistics and their source.

    It is the tensors, with the seconds of reading them if known, or the save.
    """

    tensors: Sequence[TensorStats]
    seconds: float | None = None
    is_saved: bool = False

    def source(self) -> str:
        """Describe the source of the statistics."""
        if self.is_saved:
            return "as stored by the save, nothing was read (--recompute reads the tensors)"
        num_bytes = sum(
            math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in self.tensors
        )
        if self.seconds is None:
            return f"{size_text(num_bytes)} read"
        speed = size_text(num_bytes / self.seconds)
        return f"{size_text(num_bytes)} read in {self.seconds:.2f} s, {speed}/s"


def _measure(
    is_recomputing: bool, checkpoint_dir: str, keys: Sequence[str] | None, progress: Progress
) -> _Report:
    started = time.perf_counter()
    with opened_at(checkpoint_dir) as stored:
        saved = None if is_recomputing else saved_stats(stored, keys)
        if saved is not None:
            return _Report(saved, is_saved=True)
        tensors = list(compute_stats(stored, keys, progress))
    return _Report(tensors, time.perf_counter() - started)


def _print_stats(
    arguments: Namespace, report: _Report | Sequence[TensorStats], output: Output
) -> int:
    if not isinstance(report, _Report):
        # Other processes have read most of it.
        report = _Report(report)
    tensors = report.tensors
    output.json(
        {
            "location": locations.normalize(arguments.path),
            "from_save": report.is_saved,
            "tensors": list(map(vars, tensors)),
        }
    )
    groups = [[tensor] for tensor in tensors] if arguments.tree else _grouped(tensors)
    bars = _ASCII_BARS
    if output.draws_blocks:
        bars = _BARS
    # Saves store no histograms.
    num_columns = len(_HEADS) - report.is_saved
    rows = []
    for group in groups:
        rows.append(_cells(group, bars)[:num_columns])
    output.table(_HEADS[:num_columns], rows, drop="values zeros keys mean Inf min max")
    with_nan = []
    for tensor in tensors:
        if tensor.num_nan:
            with_nan.append(tensor.key)
    output.line(
        f"{count_text(len(tensors), 'tensor')}, {len(with_nan):,} with NaN; {report.source()}"
    )
    if with_nan:
        output.line(f"NaN in {summarize_keys(with_nan)}")
        return 1
    return 0


def _grouped(tensors: Sequence[TensorStats]) -> list[list[TensorStats]]:
    """Group tensors of one dtype and shape by key without numbers."""
    groups = defaultdict(list)
    for tensor in tensors:
        groups[without_numbers(tensor.key), tensor.dtype, tensor.shape].append(tensor)
    return list(groups.values())


def _cells(group: Sequence[TensorStats], bars: str) -> list[str]:
    """Format the statistics of all values of a group; a single tensor has a histogram."""
    parts = []
    for tensor in group:
        num_finite = tensor.num_elements - tensor.num_nan - tensor.num_infinite
        counts = (num_finite, tensor.num_nan, tensor.num_infinite, tensor.num_zero)
        parts.append(BlockStats(*counts, tensor.mean, tensor.norm, tensor.min, tensor.max))
    total = together(parts)
    cells = [key_pattern([tensor.key for tensor in group]), str(len(group))]
    cells += [f"{value:.3g}" for value in (total.norm, total.mean, total.low, total.high)]
    for count in (total.num_zero, total.num_nan, total.num_infinite):
        cells.append(f"{count:,}" if count else "")
    cells.append(_histogram(group[0], bars) if len(group) == 1 else "")
    return cells


def _histogram(tensor: TensorStats, bars: str) -> str:
    tallest = max(tensor.histogram, default=1) or 1
    return "".join(bars[count * (len(bars) - 1) // tallest] for count in tensor.histogram)

"""`distckpt stats`: statistics of the values of each tensor."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from distckpt._base.dtypes import ITEM_BYTES
from distckpt._base.messages import key_pattern, summarize_keys, without_numbers
from distckpt._checkpoint.opening import opened
from distckpt._cli.arguments import is_in_parts
from distckpt._cli.output import Output, count_text, size_text
from distckpt._format.tensor_stats import TensorStats
from distckpt._operations.saved_stats import saved_stats
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations

_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_ASCII_BARS = "_.:-=+*#"
_HEADS = ["tensor", "keys", "norm", "mean", "min", "max", "zeros", "NaN", "Inf", "values"]


def run(arguments: Namespace, output: Output) -> int:
    """Print a line for the tensors of each name, or for each tensor; return 1 if there is a NaN."""
    location = locations.normalize(arguments.path)
    if is_in_parts(arguments):
        return _run_part(location, arguments, output)
    with opened(Ranks.alone(), location) as stored:
        found = None if arguments.recompute else saved_stats(stored, arguments.keys)
        if found is not None:
            return _print_stats(_Report(location, found, is_saved=True), arguments.tree, output)
        from distckpt._operations.stats import compute_stats

        started = time.perf_counter()
        with output.progress("reading") as progress:
            found = list(compute_stats(stored, arguments.keys, progress))
    seconds = time.perf_counter() - started
    return _print_stats(_Report(location, found, seconds), arguments.tree, output)


def _run_part(location: str, arguments: Namespace, output: Output) -> int:
    def show(found: Sequence[TensorStats], output: Output) -> int:
        # Other processes have read most of it.
        return _print_stats(_Report(location, found), arguments.tree, output)

    from distckpt._cli.selection import run_parts_of_check

    given = {"checkpoint_dir": arguments.path, "keys": arguments.keys}
    return run_parts_of_check(arguments, output, "stats", given, show)


class _Report(NamedTuple):
    """Statistics, and where they are from: the tensors, read in some seconds if that is known, or
    the save.
    """

    location: str
    found: Sequence[TensorStats]
    seconds: float | None = None
    is_saved: bool = False

    def source(self) -> str:
        """Say where the statistics are from."""
        if self.is_saved:
            return "as stored by the save, nothing was read (--recompute reads the tensors)"
        num_bytes = sum(math.prod(each.shape) * ITEM_BYTES[each.dtype] for each in self.found)
        if self.seconds is None:
            return f"{size_text(num_bytes)} read"
        speed = size_text(num_bytes / self.seconds)
        return f"{size_text(num_bytes)} read in {self.seconds:.2f} s, {speed}/s"


def _print_stats(report: _Report, is_listing: bool, output: Output) -> int:
    found = report.found
    output.json(
        {
            "location": report.location,
            "from_save": report.is_saved,
            "tensors": [vars(tensor) for tensor in found],
        }
    )
    groups = [[tensor] for tensor in found] if is_listing else _grouped(found)
    _print_groups(groups, not report.is_saved, output)
    with_nan = [tensor.key for tensor in found if tensor.num_nan]
    output.line(
        f"{count_text(len(found), 'tensor')}, {len(with_nan):,} with NaN; {report.source()}"
    )
    if with_nan:
        output.line(f"NaN in {summarize_keys(with_nan)}")
    return 1 if with_nan else 0


def _print_groups(
    groups: Sequence[Sequence[TensorStats]], has_histograms: bool, output: Output
) -> None:
    bars = _BARS if output.draws_blocks else _ASCII_BARS
    # Saves store no histograms.
    num_columns = len(_HEADS) - (not has_histograms)
    rows = [_cells(group, bars)[:num_columns] for group in groups]
    output.table(_HEADS[:num_columns], rows, drop="values zeros keys mean Inf min max")


def _grouped(tensors: Sequence[TensorStats]) -> list[list[TensorStats]]:
    """Put tensors together whose keys differ in numbers only, and that have one dtype and shape."""
    groups = defaultdict(list)
    for tensor in tensors:
        groups[without_numbers(tensor.key), tensor.dtype, tensor.shape].append(tensor)
    return list(groups.values())


def _cells(group: Sequence[TensorStats], bars: str) -> list[str]:
    """Format the statistics of all values of a group; those of one tensor have a histogram."""
    totals = (
        sum(tensor.num_zero for tensor in group),
        sum(tensor.num_nan for tensor in group),
        sum(tensor.num_infinite for tensor in group),
    )
    return [
        key_pattern([tensor.key for tensor in group]),
        str(len(group)),
        *(f"{value:.3g}" for value in _of_all(group)),
        *(f"{count:,}" if count else "" for count in totals),
        _histogram(group[0], bars) if len(group) == 1 else "",
    ]


def _of_all(group: Sequence[TensorStats]) -> tuple[float, float, float, float]:
    """Return norm, mean, minimum and maximum of the finite values of a group."""
    # What has no finite values has none of these.
    members = [tensor for tensor in group if _num_finite(tensor)] or group[:1]
    number = sum(_num_finite(tensor) for tensor in members) or 1
    means = (tensor.mean * (_num_finite(tensor) / number) for tensor in members)
    return (
        math.hypot(*(tensor.norm for tensor in members)),
        sum(means) if len(members) > 1 else members[0].mean,
        min(tensor.min for tensor in members),
        max(tensor.max for tensor in members),
    )


def _num_finite(tensor: TensorStats) -> int:
    return tensor.num_elements - tensor.num_nan - tensor.num_infinite


def _histogram(tensor: TensorStats, bars: str) -> str:
    tallest = max(tensor.histogram, default=1) or 1
    return "".join(bars[count * (len(bars) - 1) // tallest] for count in tensor.histogram)

"""`distckpt diff`: compare two checkpoints."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from distckpt._base.messages import natural_order
from distckpt._tools.diff import DiffReport, diff
from distckpt.cli._arguments import is_in_parts
from distckpt.cli._diff_texts import (
    DifferenceGroup,
    describe_object,
    divided_by_owner,
    group_differences,
    optimizer_text,
    outcome,
)
from distckpt.cli._output import MAX_LISTED, Output, size_text
from distckpt.cli._selection import run_parts_of_check

_HEADS = ("tensor", "differs", "max", "rel L2", "where")


def run(arguments: Namespace, output: Output) -> int:
    """Compare, list the differences, return 1 if there are any."""
    values = {
        "a": arguments.a,
        "b": arguments.b,
        "keys": arguments.keys,
        "rename": dict(arguments.rename),
        "atol": arguments.atol,
        "rtol": arguments.rtol,
    }
    show = partial(_show, arguments)
    if is_in_parts(arguments):
        return run_parts_of_check(arguments, output, "diff", values, show)
    with output.progress("comparing") as progress:
        report = diff(**values, progress=progress)
    return show(report, output)


def _show(arguments: Namespace, report: DiffReport, output: Output) -> int:
    output.json(_as_json(report))
    if arguments.html:
        # Imported only for this option, which is rare.
        from distckpt._pages.diff_page import write_diff_page

        write_diff_page(arguments.html, report, arguments.keys, dict(arguments.rename))
        output.message(f"wrote {arguments.html}")
    _print_differences(report, output, arguments.keys is None)
    output.line(f"{'SAME' if report.is_same else 'DIFFERENT'}: {outcome(report)}")
    note = ""
    if not report.objects_compared:
        note = "; objects and common state were not compared"
    output.line(_reading(report) + note)
    if report.is_same:
        return 0
    return 1


def _as_json(report: DiffReport) -> dict[str, Any]:
    tensors = []
    for item in report.tensors:
        tensors.append({**vars(item), "relative_difference": item.relative_difference})
    objects = list(map(vars, report.objects))
    lists = {"tensors": tensors, "objects": objects}
    optimizer_keys = sorted(report.optimizer_keys, key=natural_order)
    return {**vars(report), "is_same": report.is_same, **lists, "optimizer_keys": optimizer_keys}


def _print_differences(report: DiffReport, output: Output, is_folding: bool) -> None:
    """Print the differences, of models before optimizers.

    If `is_folding`, the differences of optimizers become one line.
    """
    models, optimizers = divided_by_owner(report)
    if is_folding:
        groups = group_differences(models)
    else:
        groups = [*group_differences(models), *group_differences(optimizers)]
    if groups:
        _print_table(groups, output)
        output.line()
    if is_folding and (text := optimizer_text(optimizers)):
        output.line(text)
    for item in report.objects[:MAX_LISTED]:
        output.line(describe_object(item))
    num_left = max(0, len(groups) - MAX_LISTED) + max(0, len(report.objects) - MAX_LISTED)
    if num_left:
        output.line(f"... and {num_left} more (all with --json)")


def _print_table(groups: Sequence[DifferenceGroup], output: Output) -> None:
    rows = [group.cells for group in groups]
    shown = []
    for place in range(len(_HEADS)):
        if any(row[place] for row in rows):
            shown.append(place)
    heads = [_HEADS[place] for place in shown]
    cells = []
    for row in rows[:MAX_LISTED]:
        cells.append([row[place] for place in shown])
    output.table(heads, cells, num_text=2, drop="where max")


def _reading(report: DiffReport) -> str:
    rate = size_text(report.num_bytes / report.seconds)
    return f"{size_text(report.num_bytes)} read in {report.seconds:.2f} s, {rate}/s"

"""`distckpt diff`: compare two checkpoints."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from distckpt._base.messages import natural_order
from distckpt._cli.arguments import is_in_parts
from distckpt._cli.diff_texts import (
    DifferenceGroup,
    describe_object,
    divided_by_owner,
    group_differences,
    optimizer_text,
    outcome,
)
from distckpt._cli.output import MAX_LISTED, Output, size_text
from distckpt._cli.selection import run_parts_of_check
from distckpt._operations.diff import DiffReport, diff

_HEADS = ("tensor", "differs", "max", "rel L2", "where")


def run(arguments: Namespace, output: Output) -> int:
    """Compare, list the differences, return 1 if there are any."""
    given = {
        "a": arguments.a,
        "b": arguments.b,
        "keys": arguments.keys,
        "rename": dict(arguments.rename),
        "atol": arguments.atol,
        "rtol": arguments.rtol,
    }
    show = partial(_show, arguments)
    if is_in_parts(arguments):
        return run_parts_of_check(arguments, output, "diff", given, show)
    with output.progress("comparing") as progress:
        report = diff(**given, progress=progress)
    return show(report, output)


def _show(arguments: Namespace, report: DiffReport, output: Output) -> int:
    output.json(_as_json(report))
    if arguments.html:
        # Imported when it is asked for, which is rare.
        from distckpt._cli.diff_page import write_diff_page

        write_diff_page(arguments.html, report, arguments.keys, dict(arguments.rename))
        output.message(f"wrote {arguments.html}")
    _print_differences(report, output, arguments.keys is None)
    output.line(f"{'SAME' if report.is_same else 'DIFFERENT'}: {outcome(report)}")
    note = "" if report.objects_compared else "; objects and common state were not compared"
    output.line(_reading(report) + note)
    return 0 if report.is_same else 1


def _as_json(report: DiffReport) -> dict[str, Any]:
    tensors = [
        {**vars(item), "relative_difference": item.relative_difference} for item in report.tensors
    ]
    objects = [vars(item) for item in report.objects]
    listed = {"tensors": tensors, "objects": objects}
    optimizer_keys = sorted(report.optimizer_keys, key=natural_order)
    return {**vars(report), "is_same": report.is_same, **listed, "optimizer_keys": optimizer_keys}


def _print_differences(report: DiffReport, output: Output, is_folding: bool) -> None:
    """Print the differences, those of the model first; if `is_folding`, those of optimizers as one
    line.
    """
    of_model, of_optimizers = divided_by_owner(report)
    if is_folding:
        groups = group_differences(of_model)
    else:
        groups = [*group_differences(of_model), *group_differences(of_optimizers)]
    if groups:
        _print_table(groups, output)
        output.line()
    if is_folding and (text := optimizer_text(of_optimizers)):
        output.line(text)
    for item in report.objects[:MAX_LISTED]:
        output.line(describe_object(item))
    num_left = max(0, len(groups) - MAX_LISTED) + max(0, len(report.objects) - MAX_LISTED)
    if num_left:
        output.line(f"... and {num_left} more (all with --json)")


def _print_table(groups: Sequence[DifferenceGroup], output: Output) -> None:
    rows = [group.cells for group in groups]
    shown = [place for place in range(len(_HEADS)) if any(row[place] for row in rows)]
    heads = [_HEADS[place] for place in shown]
    cells = [[row[place] for place in shown] for row in rows[:MAX_LISTED]]
    output.table(heads, cells, num_text=2, drop="where max")


def _reading(report: DiffReport) -> str:
    rate = size_text(report.num_bytes / report.seconds)
    return f"{size_text(report.num_bytes)} read in {report.seconds:.2f} s, {rate}/s"

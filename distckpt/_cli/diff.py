"""`distckpt diff`: compare two checkpoints."""

from __future__ import annotations

import json
from argparse import Namespace

from distckpt._base.messages import summarize_keys
from distckpt._cli.output import MAX_LISTED, Output, count_text, size_text
from distckpt._cli.selection import given
from distckpt._operations.diff import DiffReport, ObjectDifference, TensorDifference, diff
from distckpt._state.common_state import COMMON_KEY

_SIDES = {"a": "only in A", "b": "only in B", "both": "differs"}


def run(arguments: Namespace, output: Output) -> int:
    """Compare, list the differences, return 1 if there are any."""
    with output.progress("comparing") as progress:
        options = given(arguments, "keys", "atol", "rtol")
        report = diff(arguments.a, arguments.b, rename=dict(arguments.rename), progress=progress, **options)
    lists = {name: [item._asdict() for item in getattr(report, name)] for name in ("tensors", "objects")}
    output.json({**vars(report), "is_same": report.is_same, **lists})
    for side, keys in (("A", report.only_in_a), ("B", report.only_in_b)):
        if keys:
            output.line(f"only in {side}: {summarize_keys(keys, limit=MAX_LISTED)}")
    for tensor in report.tensors[:MAX_LISTED]:
        output.line(describe_tensor(tensor))
    for item in report.objects[:MAX_LISTED]:
        output.line(describe_object(item))
    num_left = max(0, len(report.tensors) - MAX_LISTED) + max(0, len(report.objects) - MAX_LISTED)
    if num_left:
        output.line(f"... and {num_left} more (all with --json)")
    output.line(summary(report))
    return 0 if report.is_same else 1


def describe_tensor(difference: TensorDifference) -> str:
    """Format the difference of a tensor as one line."""
    parts = []
    if difference.shapes[0] != difference.shapes[1]:
        parts.append("shape {} / {}".format(*("x".join(map(str, shape)) or "()" for shape in difference.shapes)))
    if difference.dtypes[0] != difference.dtypes[1]:
        parts.append("dtype {} / {}".format(*difference.dtypes))
    if difference.num_different:
        parts.append(
            f"{difference.num_different:,} of {difference.num_elements:,} values differ, by at most "
            f"{difference.max_difference:.6g}, first at "
            f"{json.dumps(difference.first_index)}, all in {difference.region}"
        )
    elif difference.num_elements:
        parts.append("values equal")
    return f"{difference.key}: {'; '.join(parts)}"


def describe_object(difference: ObjectDifference) -> str:
    """Format the difference of an object as one line."""
    part = "" if difference.offset in (None, (0,)) else f" part {json.dumps(difference.offset)}"
    path = f" at {difference.path}" if difference.path else ""
    name = "common state" if difference.key == COMMON_KEY else difference.key
    return f"{name}{part}: {_SIDES[difference.where]}{path}"


def summary(report: DiffReport) -> str:
    """Format the outcome as one line."""
    verdict = "SAME" if report.is_same else "DIFFERENT"
    note = "" if report.objects_compared else "; objects and common state were not compared"
    rate = report.num_bytes / 1e9 / report.seconds
    return (
        f"{verdict}: {count_text(report.num_compared, 'tensor')} compared, {size_text(report.num_bytes)} read in "
        f"{report.seconds:.2f} s, {rate:.2f} GB/s{note}"
    )

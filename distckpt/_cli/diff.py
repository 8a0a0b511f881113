"""`distckpt diff`: compare two checkpoints."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from distckpt._base.messages import key_pattern, summarize_keys, without_numbers
from distckpt._cli.output import MAX_LISTED, Output, count_text, shape_text, size_text
from distckpt._cli.page import write_page
from distckpt._cli.selection import given
from distckpt._foreign.opening import open_checkpoint
from distckpt._geometry.region import whole
from distckpt._operations.diff import DiffReport, ObjectDifference, TensorDifference, diff
from distckpt._plan.export import matches, renamed
from distckpt._state.common_state import COMMON_KEY

_SIDES = {"a": "only in A", "b": "only in B", "both": "differs"}


def run(arguments: Namespace, output: Output) -> int:
    """Compare, list the differences, return 1 if there are any."""
    with output.progress("comparing") as progress:
        options = given(arguments, "keys", "atol", "rtol")
        report = diff(arguments.a, arguments.b, rename=dict(arguments.rename), progress=progress, **options)
    tensors = [{**item._asdict(), "relative_difference": item.relative_difference} for item in report.tensors]
    lists = {"tensors": tensors, "objects": [item._asdict() for item in report.objects]}
    output.json({**vars(report), "is_same": report.is_same, **lists})
    if arguments.html:
        _write_page(arguments.html, report, arguments.keys, dict(arguments.rename))
        output.message(f"wrote {arguments.html}")
    for side, keys in (("A", report.only_in_a), ("B", report.only_in_b)):
        if keys:
            output.line(f"only in {side}: {summarize_keys(keys, limit=MAX_LISTED)}")
    groups = group_differences(report.tensors)
    if groups:
        heads = ["tensor", "differs", "max", "rel L2", "where"]
        output.table(heads, groups[:MAX_LISTED], num_text=2, drop="where differs")
    for item in report.objects[:MAX_LISTED]:
        output.line(describe_object(item))
    num_left = max(0, len(groups) - MAX_LISTED) + max(0, len(report.objects) - MAX_LISTED)
    if num_left:
        output.line(f"... and {num_left} more (all with --json)")
    output.line(summary(report))
    return 0 if report.is_same else 1


def _write_page(path: str, report: DiffReport, keys: Sequence[str] | None, rename: Mapping[str, str]) -> None:
    a, b = (open_checkpoint(location) for location in (report.a, report.b))
    names = {
        renamed(key, rename): key
        for key in a.manifest.key_index
        if not a.is_object(key) and (keys is None or matches(key, keys))
    }
    changes: dict[str, dict[str, Any]] = {
        tensor.key: {"max": tensor.max_difference, "rate": tensor.relative_difference, "text": _changes([tensor])}
        for tensor in report.tensors
        if tensor.num_elements
    }
    rest = {tensor.key: _changes([tensor]) for tensor in report.tensors if not tensor.num_elements}
    rest |= dict.fromkeys(report.only_in_a, "only in A") | dict.fromkeys(report.only_in_b, "only in B")
    changes |= {name: {"max": None, "rate": None, "text": text} for name, text in rest.items()}
    texts = {
        "title": f"{report.a} \u2194 {report.b}",
        "subtitle": summary(report),
        "common": "\n".join(map(describe_object, report.objects)),
    }
    num_different = sum(tensor.shapes[0] == tensor.shapes[1] for tensor in report.tensors)
    counts = {
        "compared": report.num_compared,
        "equal": report.num_compared - num_different,
        "different": len(report.tensors),
        "only in one": len(report.only_in_a) + len(report.only_in_b),
    }
    write_page(
        path, a, names, texts, [(f"{count:,}", name) for name, count in counts.items()], changes, (b, report.only_in_b)
    )


def group_differences(tensors: Sequence[TensorDifference]) -> list[list[str]]:
    """Return a line of a table for tensors whose keys differ in numbers only, with the largest differences."""
    alike: dict[object, list[TensorDifference]] = {}
    for tensor in tensors:
        kind = (without_numbers(tensor.key), tensor.shapes, tensor.dtypes, tensor.num_different > 0)
        alike.setdefault(kind, []).append(tensor)
    return [
        [
            key_pattern([tensor.key for tensor in members]),
            _changes(members),
            f"{max(tensor.max_difference for tensor in members):.1e}" if members[0].num_different else "",
            f"{max(tensor.relative_difference for tensor in members):.1e}" if members[0].num_different else "",
            _place(members[0]) if len(members) == 1 and members[0].num_different else "",
        ]
        for members in alike.values()
    ]


def _changes(members: Sequence[TensorDifference]) -> str:
    """Say what differs in all of these tensors: their shapes, dtypes, and the number of values."""
    first, parts = members[0], []
    if first.shapes[0] != first.shapes[1]:
        parts.append("shape {} / {}".format(*map(shape_text, first.shapes)))
    if first.dtypes[0] != first.dtypes[1]:
        parts.append("dtype {} / {}".format(*first.dtypes))
    if first.num_different:
        counts = (sum(tensor.num_different for tensor in members), sum(tensor.num_elements for tensor in members))
        parts.append("{:,} of {:,}".format(*counts))
    elif first.num_elements:
        parts.append("values equal")
    return ", ".join(parts)


def _place(tensor: TensorDifference) -> str:
    if tensor.num_different == 1 or not tensor.region:
        return json.dumps(tensor.first_index)
    return "" if tensor.region == str(whole(tensor.shapes[0])) else tensor.region


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
    num_different = len([tensor for tensor in report.tensors if tensor.shapes[0] == tensor.shapes[1]])
    verb = "differs" if num_different == 1 else "differ"
    return (
        f"{verdict}: {count_text(report.num_compared, 'tensor')} compared: {report.num_compared - num_different:,} "
        f"equal, {num_different:,} {verb}; {size_text(report.num_bytes)} read in {report.seconds:.2f} s, "
        f"{size_text(report.num_bytes / report.seconds)}/s{note}"
    )

"""`distckpt diff`: compare two checkpoints."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distckpt._base.messages import key_pattern, without_numbers
from distckpt._checkpoint.opening import open_checkpoint
from distckpt._cli.output import MAX_LISTED, Output, count_text, shape_text, size_text
from distckpt._cli.page import write_page
from distckpt._cli.selection import given
from distckpt._geometry.region import whole
from distckpt._operations.diff import DiffReport, ObjectDifference, TensorDifference, diff
from distckpt._plan.selection import matches, renamed
from distckpt._state.common_state import COMMON_KEY

_HEADS = ("tensor", "differs", "max", "rel L2", "where")


def run(arguments: Namespace, output: Output) -> int:
    """Compare, list the differences, return 1 if there are any."""
    with output.progress("comparing") as progress:
        options = given(arguments, "keys", "atol", "rtol")
        report = diff(
            arguments.a, arguments.b, rename=dict(arguments.rename), progress=progress, **options
        )
    tensors = [
        {**item._asdict(), "relative_difference": item.relative_difference}
        for item in report.tensors
    ]
    lists = {"tensors": tensors, "objects": [item._asdict() for item in report.objects]}
    output.json({**vars(report), "is_same": report.is_same, **lists})
    if arguments.html:
        _write_page(arguments.html, report, arguments.keys, dict(arguments.rename))
        output.message(f"wrote {arguments.html}")
    groups = group_differences(report)
    if groups:
        shown = [place for place in range(len(_HEADS)) if any(row[place] for row in groups)]
        rows = [[row[place] for place in shown] for row in groups[:MAX_LISTED]]
        output.table([_HEADS[place] for place in shown], rows, num_text=2, drop="where max")
        output.line()
    for item in report.objects[:MAX_LISTED]:
        output.line(describe_object(item))
    num_left = max(0, len(groups) - MAX_LISTED) + max(0, len(report.objects) - MAX_LISTED)
    if num_left:
        output.line(f"... and {num_left} more (all with --json)")
    output.line(f"{'SAME' if report.is_same else 'DIFFERENT'}: {outcome(report)}")
    note = "" if report.objects_compared else "; objects and common state were not compared"
    output.line(_reading(report) + note)
    return 0 if report.is_same else 1


# --- The page -------------------------------------------------------------------------------------


def _write_page(
    path: str, report: DiffReport, keys: Sequence[str] | None, rename: Mapping[str, str]
) -> None:
    a, b = (open_checkpoint(location) for location in (report.a, report.b))
    names = {
        renamed(key, rename): key
        for key in a.manifest.key_index
        if not a.is_object(key) and (keys is None or matches(key, keys))
    }
    changes = {tensor.key: _change(tensor) for tensor in report.tensors}
    for side, only in (("A", report.only_in_a), ("B", report.only_in_b)):
        changes |= {name: {"rate": None, "text": f"only in {side}"} for name in only}
    counts = {"tensors compared": report.num_compared, **_counts(report)}
    shown = [
        (f"{count:,}", name)
        for name, count in counts.items()
        if count or name in ("equal", "differ")
    ]
    note = "" if report.objects_compared else "Objects and common state were not compared."
    head = {
        "title": "No differences" if report.is_same else _title(report),
        "lines": [("A", report.a), ("B", report.b), ("", note)],
        "tiles": shown,
        "objects": [
            [_place_of_object(item), *(value or "" for value in item.values)]
            for item in report.objects
        ],
        "same": report.is_same,
    }
    write_page(path, a, names, head, changes, (b, report.only_in_b))


def _title(report: DiffReport) -> str:
    counts = _counts(report)
    parts = [
        f"{count:,} {name}"
        for name, count in counts.items()
        if count and name not in ("equal", "differ")
    ]
    if counts["differ"]:
        verb = "differs" if counts["differ"] == 1 else "differ"
        parts.insert(
            0, f"{counts['differ']:,} of {count_text(report.num_compared, 'tensor')} {verb}"
        )
    return ", ".join(parts) or "All tensors are equal, but not all objects or common state"


def _change(tensor: TensorDifference) -> dict[str, Any]:
    """Return what a page says of a tensor that is not the same."""
    if not tensor.num_different:
        return {"rate": None, "text": _changes([tensor])}
    counts = {"different": tensor.num_different, "elements": tensor.num_elements}
    sizes = {"max": tensor.max_difference, "rate": tensor.relative_difference}
    return {**counts, **sizes, "where": _place(tensor), "text": _changes([tensor])}


# --- Texts ----------------------------------------------------------------------------------------


def group_differences(report: DiffReport) -> list[list[str]]:
    """Return a line of a table for tensors whose keys differ in numbers only, the largest relative
    difference first.

    Tensors whose values are not compared, or on one side only, come last.
    """
    alike: dict[object, list[TensorDifference]] = {}
    for tensor in report.tensors:
        kind = (without_numbers(tensor.key), tensor.shapes, tensor.dtypes, tensor.num_different > 0)
        alike.setdefault(kind, []).append(tensor)
    lines = []
    for members in alike.values():
        sizes = [
            _largest(getattr(tensor, name) for tensor in members)
            for name in ("max_difference", "relative_difference")
        ]
        numbers = [f"{size:.1e}" for size in sizes] if members[0].num_different else ["", ""]
        place = _place(members[0]) if len(members) == 1 and members[0].num_different else ""
        rank = -math.inf if not math.isfinite(sizes[1]) else -sizes[1]
        lines.append(
            (
                rank,
                [
                    key_pattern([tensor.key for tensor in members]),
                    _changes(members),
                    *numbers,
                    place,
                ],
            )
        )
    lines.sort(key=lambda line: line[0])
    for side, keys in (("A", report.only_in_a), ("B", report.only_in_b)):
        patterns: dict[object, list[str]] = {}
        for key in keys:
            patterns.setdefault(without_numbers(key), []).append(key)
        lines += [
            (0.0, [key_pattern(names), f"only in {side}", "", "", ""])
            for names in patterns.values()
        ]
    return [cells for _, cells in lines]


def _largest(numbers: Iterable[float]) -> float:
    """Return the largest number, or NaN where there is one."""
    found = list(numbers)
    return math.nan if any(map(math.isnan, found)) else max(found)


def _changes(members: Sequence[TensorDifference]) -> str:
    """Say what differs in all of these tensors: their shapes, dtypes, and the number of values."""
    first, parts = members[0], []
    if first.shapes[0] != first.shapes[1]:
        parts.append("shape {} / {}".format(*map(shape_text, first.shapes)))
    if first.dtypes[0] != first.dtypes[1]:
        parts.append("dtype {} / {}".format(*first.dtypes))
    if first.num_different:
        counts = (
            sum(tensor.num_different for tensor in members),
            sum(tensor.num_elements for tensor in members),
        )
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
    place, (a, b) = _place_of_object(difference), difference.values
    if difference.where != "both":
        value = a or b
        return f"{place}: only in {difference.where.upper()}" + (f" ({value})" if value else "")
    return f"{place} differs" if a == b else f"{place}: {a} -> {b}"


def _place_of_object(difference: ObjectDifference) -> str:
    part = "" if difference.offset in (None, (0,)) else f" part {json.dumps(difference.offset)}"
    name = "common state" if difference.key == COMMON_KEY else difference.key
    return f"{name}{part}" + (f": {difference.path}" if difference.path else "")


def _counts(report: DiffReport) -> dict[str, int]:
    """Count the tensors by how they compare."""
    num_different = len(
        [tensor for tensor in report.tensors if tensor.shapes[0] == tensor.shapes[1]]
    )
    return {
        "equal": report.num_compared - num_different,
        "differ": num_different,
        "of another shape": len(report.tensors) - num_different,
        "only in A": len(report.only_in_a),
        "only in B": len(report.only_in_b),
    }


def outcome(report: DiffReport) -> str:
    """Format how the tensors compare as one line."""
    counts = _counts(report)
    compared = f"{counts.pop('equal'):,} equal, {counts['differ']:,} differ{'s' * (counts.pop('differ') == 1)}"
    rest = [f"{count:,} {name}" for name, count in counts.items() if count]
    rest += (
        [f"{count_text(len(report.objects), 'difference')} in common state and objects"]
        if report.objects
        else []
    )
    return "; ".join(
        [
            f"{count_text(report.num_compared, 'tensor')} compared: {compared}",
            *filter(None, [", ".join(rest)]),
        ]
    )


def _reading(report: DiffReport) -> str:
    rate = size_text(report.num_bytes / report.seconds)
    return f"{size_text(report.num_bytes)} read in {report.seconds:.2f} s, {rate}/s"

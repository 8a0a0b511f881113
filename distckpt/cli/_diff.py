"""`distckpt diff`: compare two checkpoints."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from distckpt._base.messages import key_pattern, natural_order, without_numbers
from distckpt._checkpoint.opening import open_undisturbed
from distckpt._geometry.region import whole
from distckpt._plan.selection import matches, names_of_tensors, renamed
from distckpt._ranks.collectives import Ranks
from distckpt._state.common_state import COMMON_KEY
from distckpt._tools.diff import DiffReport, ObjectDifference, diff
from distckpt._tools.tensor_differences import TensorDifference
from distckpt.cli._output import MAX_LISTED, Output, count_text, shape_text, size_text
from distckpt.cli._selection import call, given

_HEADS = ("tensor", "differs", "max", "rel L2", "where")


def run(arguments: Namespace, output: Output) -> int:
    """Compare, list the differences, return 1 if there are any."""
    values = given(arguments, "a", "b", "keys", "atol", "rtol")
    values["rename"] = dict(arguments.rename)
    show = partial(_show, arguments)
    return call(arguments, output, diff, values, show, verb="diff", doing="comparing")


def _show(arguments: Namespace, report: DiffReport, output: Output) -> int:
    output.json(_as_json(report))
    if arguments.html:
        _write_page(arguments.html, report, arguments.keys, dict(arguments.rename))
        output.message(f"wrote {arguments.html}")
    _print_differences(report, output, arguments.keys is None)
    output.line(f"{'SAME' if report.is_same else 'DIFFERENT'}: {_outcome(report)}")
    note = ""
    if not report.objects_compared:
        note = "; objects and common state were not compared"
    rate = size_text(report.num_bytes / report.seconds)
    output.line(f"{size_text(report.num_bytes)} read in {report.seconds:.2f} s, {rate}/s{note}")
    return int(not report.is_same)


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
    models = _of_owner(report, is_optimizer=False)
    optimizers = _of_owner(report, is_optimizer=True)
    rows = _rows_of(models)
    if not is_folding:
        rows += _rows_of(optimizers)
    if rows:
        _print_table(rows, output)
        output.line()
    if is_folding and (text := _optimizer_text(optimizers)):
        output.line(text)
    for item in report.objects[:MAX_LISTED]:
        output.line(_describe_object(item))
    num_left = max(0, len(rows) - MAX_LISTED) + max(0, len(report.objects) - MAX_LISTED)
    if num_left:
        output.line(f"... and {num_left} more (all with --json)")


def _print_table(rows: Sequence[Sequence[str]], output: Output) -> None:
    """Print the first rows, without columns that are always empty."""
    columns = []
    for head, *cells in zip(_HEADS, *rows, strict=True):
        if any(cells):
            columns.append([head, *cells[:MAX_LISTED]])
    heads, *shown = zip(*columns, strict=True)
    output.table(heads, shown, num_text=2, drop="where max")


# --- Tensors --------------------------------------------------------------------------------------


def _of_owner(report: DiffReport, is_optimizer: bool) -> DiffReport:
    """Return the differences of optimizers, or of all others."""

    def is_wanted(key: str) -> bool:
        return (key in report.optimizer_keys) == is_optimizer

    return replace(
        report,
        tensors=tuple(tensor for tensor in report.tensors if is_wanted(tensor.key)),
        only_in_a=tuple(filter(is_wanted, report.only_in_a)),
        only_in_b=tuple(filter(is_wanted, report.only_in_b)),
    )


def _optimizer_text(report: DiffReport) -> str:
    """Sum up the differences of optimizers in one line, perhaps empty."""
    counts = {
        "differ": len(report.tensors),
        "only in A": len(report.only_in_a),
        "only in B": len(report.only_in_b),
    }
    parts = _counted(counts)
    if not parts:
        return ""
    rates = []
    for tensor in report.tensors:
        if tensor.num_different:
            rates.append(tensor.relative_difference)
    largest = ""
    if rates:
        largest = f", largest rel L2 {_largest(rates):.1e}"
    return f"optimizer: {', '.join(parts)}{largest} (--keys lists them)"


def _rows_of(report: DiffReport) -> list[list[str]]:
    """Return a row for each group of tensors that differ alike.

    Their keys differ in numbers only. The largest relative difference comes first. Tensors whose
    values are not compared, or that only one side has, come last.
    """
    alike: dict[object, list[TensorDifference]] = {}
    for tensor in report.tensors:
        kind = (without_numbers(tensor.key), tensor.shapes, tensor.dtypes, tensor.num_different > 0)
        alike.setdefault(kind, []).append(tensor)
    rows = list(map(_row_of, sorted(alike.values(), key=_order)))
    for side, keys in (("A", report.only_in_a), ("B", report.only_in_b)):
        groups: dict[object, list[str]] = {}
        for key in keys:
            groups.setdefault(without_numbers(key), []).append(key)
        for names in groups.values():
            rows.append([key_pattern(names), f"only in {side}", "", "", ""])
    return rows


def _order(members: Sequence[TensorDifference]) -> float:
    relative = _largest(tensor.relative_difference for tensor in members)
    if math.isfinite(relative):
        return -relative
    return -math.inf


def _row_of(members: Sequence[TensorDifference]) -> list[str]:
    row = [key_pattern([tensor.key for tensor in members]), _changes_of(members)]
    if not members[0].num_different:
        return [*row, "", "", ""]
    for field in ("max_difference", "relative_difference"):
        row.append(f"{_largest(getattr(tensor, field) for tensor in members):.1e}")
    return [*row, _place_of(members[0]) if len(members) == 1 else ""]


def _largest(numbers: Iterable[float]) -> float:
    """Return the largest number, or NaN if there is one."""
    values = list(numbers)
    if any(map(math.isnan, values)):
        return math.nan
    return max(values)


def _changes_of(members: Sequence[TensorDifference]) -> str:
    """Format the common difference of some tensors: shapes, dtypes and number of values."""
    first = members[0]
    parts = []
    if first.shapes[0] != first.shapes[1]:
        parts.append("shape {} / {}".format(*map(shape_text, first.shapes)))
    if first.dtypes[0] != first.dtypes[1]:
        parts.append("dtype {} / {}".format(*first.dtypes))
    if first.num_different:
        num_different = sum(tensor.num_different for tensor in members)
        num_elements = sum(tensor.num_elements for tensor in members)
        parts.append(f"{num_different:,} of {num_elements:,}")
    elif first.num_elements:
        parts.append("values equal")
    return ", ".join(parts)


def _place_of(tensor: TensorDifference) -> str:
    """Return the place where a tensor differs; an empty string for everywhere."""
    if tensor.num_different == 1 or not tensor.region:
        return json.dumps(tensor.first_index)
    if tensor.region == str(whole(tensor.shapes[0])):
        return ""
    return tensor.region


# --- Objects --------------------------------------------------------------------------------------


def _describe_object(difference: ObjectDifference) -> str:
    """Format the difference of an object as one line."""
    place = _place_of_object(difference)
    a, b = difference.values
    if difference.where != "both":
        value = a or b
        return f"{place}: only in {difference.where.upper()}" + (f" ({value})" if value else "")
    if a == b:
        return f"{place} differs"
    return f"{place}: {a} -> {b}"


def _place_of_object(difference: ObjectDifference) -> str:
    """Name the place of a difference."""
    part = ""
    if difference.offset not in (None, (0,)):
        part = f" part {json.dumps(difference.offset)}"
    name = difference.key
    if difference.key == COMMON_KEY:
        name = "common state"
    return f"{name}{part}" + (f": {difference.path}" if difference.path else "")


# --- The whole ------------------------------------------------------------------------------------


def _counts_of(report: DiffReport) -> dict[str, int]:
    """Count the tensors by how they compare."""
    num_different = sum(tensor.shapes[0] == tensor.shapes[1] for tensor in report.tensors)
    return {
        "equal": report.num_compared - num_different,
        "differ": num_different,
        "of another shape": len(report.tensors) - num_different,
        "only in A": len(report.only_in_a),
        "only in B": len(report.only_in_b),
    }


def _counted(counts: Mapping[str, int]) -> list[str]:
    """Format the counts that are not 0."""
    return [f"{count:,} {name}" for name, count in counts.items() if count]


def _outcome(report: DiffReport) -> str:
    """Format how the checkpoints compare as one line."""
    counts = _counts_of(report)
    num_equal = counts.pop("equal")
    num_different = counts.pop("differ")
    verb = "differs" if num_different == 1 else "differ"
    rest = _counted(counts)
    if report.objects:
        differences = count_text(len(report.objects), "difference")
        rest.append(f"{differences} in common state and objects")
    compared = count_text(report.num_compared, "tensor")
    text = f"{compared} compared: {num_equal:,} equal, {num_different:,} {verb}"
    if rest:
        return "; ".join([text, ", ".join(rest)])
    return text


# --- The page -------------------------------------------------------------------------------------


def _write_page(
    path: str, report: DiffReport, keys: Sequence[str] | None, rename: Mapping[str, str]
) -> None:
    """Write a page about the differences between two checkpoints."""
    # Imported only for this option, which is rare.
    from distckpt._pages.page import write_page

    a, b = (open_undisturbed(Ranks.alone(), location) for location in (report.a, report.b))
    names = {}
    for key in names_of_tensors(a.manifest):
        if keys is None or matches(key, keys):
            names[renamed(key, rename)] = key
    changes = {}
    for tensor in report.tensors:
        changes[tensor.key] = _change(tensor)
    for side, only in (("A", report.only_in_a), ("B", report.only_in_b)):
        changes |= {name: {"rate": None, "text": f"only in {side}"} for name in only}
    write_page(path, a, names, _head(report), changes, (b, report.only_in_b))


def _head(report: DiffReport) -> dict[str, Any]:
    note = ""
    if not report.objects_compared:
        note = "Objects and common state were not compared."
    objects = []
    for item in report.objects:
        objects.append([_place_of_object(item), *(value or "" for value in item.values)])
    return {
        "title": "No differences" if report.is_same else _title(report),
        "lines": [("A", report.a), ("B", report.b), ("", note)],
        "tiles": _tiles(report),
        "objects": objects,
        "same": report.is_same,
    }


def _tiles(report: DiffReport) -> list[tuple[str, str]]:
    always = {"equal", "differ"}
    counts = {"tensors compared": report.num_compared, **_counts_of(report)}
    tiles = []
    for name, count in counts.items():
        if count or name in always:
            tiles.append((f"{count:,}", name))
    return tiles


def _title(report: DiffReport) -> str:
    counts = _counts_of(report)
    del counts["equal"]
    num_different = counts.pop("differ")
    verb = "differs" if num_different == 1 else "differ"
    parts = _counted(counts)
    if num_different:
        compared = count_text(report.num_compared, "tensor")
        parts.insert(0, f"{num_different:,} of {compared} {verb}")
    return ", ".join(parts) or "All tensors are equal, but not all objects or common state"


def _change(tensor: TensorDifference) -> dict[str, Any]:
    """Return the entry of the page for a tensor that differs."""
    text = _changes_of([tensor])
    if not tensor.num_different:
        return {"rate": None, "text": text}
    return {
        "different": tensor.num_different,
        "elements": tensor.num_elements,
        "max": tensor.max_difference,
        "rate": tensor.relative_difference,
        "where": _place_of(tensor),
        "text": text,
    }

"""The page that `distckpt diff --html` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distckpt._checkpoint.opening import open_undisturbed
from distckpt._pages.page import write_page
from distckpt._plan.selection import matches, names_of_tensors, renamed
from distckpt._ranks.collectives import Ranks
from distckpt._tools.diff import DiffReport
from distckpt._tools.tensor_differences import TensorDifference
from distckpt.cli._diff import (
    changes_of,
    counted,
    counts_of,
    number_that_differ,
    place_of,
    place_of_object,
)
from distckpt.cli._output import count_text


def write_diff_page(
    path: str, report: DiffReport, keys: Sequence[str] | None, rename: Mapping[str, str]
) -> None:
    """Write a page about the differences between two checkpoints."""
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
        objects.append([place_of_object(item), *(value or "" for value in item.values)])
    return {
        "title": "No differences" if report.is_same else _title(report),
        "lines": [("A", report.a), ("B", report.b), ("", note)],
        "tiles": _tiles(report),
        "objects": objects,
        "same": report.is_same,
    }


def _tiles(report: DiffReport) -> list[tuple[str, str]]:
    always = {"equal", "differ"}
    counts = {"tensors compared": report.num_compared, **counts_of(report)}
    tiles = []
    for name, count in counts.items():
        if count or name in always:
            tiles.append((f"{count:,}", name))
    return tiles


def _title(report: DiffReport) -> str:
    counts = counts_of(report)
    del counts["equal"]
    num_different = counts.pop("differ")
    parts = counted(counts)
    if num_different:
        number, verb = number_that_differ(num_different).split(" ")
        compared = count_text(report.num_compared, "tensor")
        parts.insert(0, f"{number} of {compared} {verb}")
    return ", ".join(parts) or "All tensors are equal, but not all objects or common state"


def _change(tensor: TensorDifference) -> dict[str, Any]:
    """Return the entry of the page for a tensor that differs."""
    text = changes_of([tensor])
    if not tensor.num_different:
        return {"rate": None, "text": text}
    return {
        "different": tensor.num_different,
        "elements": tensor.num_elements,
        "max": tensor.max_difference,
        "rate": tensor.relative_difference,
        "where": place_of(tensor),
        "text": text,
    }

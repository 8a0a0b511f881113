"""Lay out tables as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


def table_lines(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    num_text: int,
    drop: Sequence[str] = (),
    width: int | None = None,
) -> list[str]:
    """Lay out a table as lines, with two spaces between columns.

    See `Output.table` for the effect of a `width`. A row whose first cell is broken has several
    lines.

    """
    columns = [list(column) for column in zip(heads, *rows, strict=True)]
    widths = _widths(columns, drop, width)
    names = []
    for name in columns[0][1:]:
        names.append(_broken(name, widths[heads[0]]))
    columns[0][1:] = [lines[0] for lines in names]
    shown = []
    for place, column in enumerate(columns):
        if column[0] in widths:
            shown.append(_aligned(column, widths[column[0]], is_text=place < num_text))
    head, rule, *lines = ["  ".join(cells).rstrip() for cells in zip(*shown, strict=True)]
    whole = ["\n".join([line, *name[1:]]) for line, name in zip(lines, names, strict=True)]
    return [head, rule, *whole]


def _aligned(column: Sequence[str], width: int, is_text: bool) -> list[str]:
    head, *cells = column
    align = str.ljust if is_text else str.rjust
    lines = []
    for cell in (head, "-" * width, *cells):
        lines.append(align(cell, width))
    return lines


def _widths(
    columns: Sequence[Sequence[str]], drop: Sequence[str], width: int | None
) -> Mapping[str, int]:
    """Return the width of each column that is shown, by its head."""
    widths = {}
    for column in columns:
        widths[column[0]] = max(map(len, column))
    if width is None:
        return widths
    names = columns[0]
    longest = widths.pop(names[0])
    parts = []
    for name in names:
        for line in _broken(name, 1):
            parts.append(len(line))
    least = min(longest, max(2 * width // 5, *parts))
    for head in drop:
        if least + _taken(widths) > width:
            widths.pop(head, None)
    room = width - _taken(widths)
    return {names[0]: min(longest, max(least, room)), **widths}


def _taken(widths: Mapping[str, int]) -> int:
    """Return the width of columns, each with the two spaces before it."""
    return sum(widths.values()) + 2 * len(widths)


def _broken(name: str, width: int) -> list[str]:
    """Break a name after dots into lines of at most this width.

    A line may hold one longer part; `{0..3}` stays whole.
    """
    indent = " " * (len(name) - len(name.lstrip()) + 2)
    lines = [""]
    for part in re.split(r"(?<=[^.]\.)(?=[^.])", name):
        if lines[-1].strip() and len(lines[-1]) + len(part) > width:
            lines.append(indent)
        lines[-1] += part
    return lines

"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table whose columns after the first are numbers."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    aligned = [
        "| "
        + " | ".join(
            cell.rjust(w) if i else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in [heads, *rows]
    ]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths))
    return "\n".join(
        f"{line} |" if line is not rule else f"{line}|" for line in [aligned[0], rule, *aligned[1:]]
    )

"""Print results to stdout and everything else to stderr, in colour on terminals where rich is installed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

try:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.table import Table
    from rich.text import Text

    HAS_RICH = True
except ImportError:
    HAS_RICH = False

MAX_LISTED = 50
"""Findings that a verb lists without --json."""

_SECONDS_BETWEEN = 0.2


class Output:
    """Prints the results and messages of a verb; with `as_json` the result is one JSON value only."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def json(self, value: Any) -> None:
        """Print the result as JSON if requested."""
        if self.as_json:
            print(json.dumps(finite(value), indent=1))

    def line(self, text: str = "") -> None:
        """Print a line of the result."""
        if not self.as_json:
            print(printable(text))

    def picture(self, lines: Iterable[str]) -> None:
        """Print lines that contain colours and no names."""
        for line in lines:
            print(line)

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]], num_text: int = 1) -> None:
        """Print a table of the result: the first `num_text` columns hold text, the others numbers, aligned right."""
        if self.as_json:
            return
        rows = [[printable(cell) for cell in row] for row in rows]
        if not (HAS_RICH and sys.stdout.isatty()):
            print(plain_table(heads, rows, num_text))
            return
        table = Table(header_style="dim")
        for index, head in enumerate(heads):
            table.add_column(head, justify="left" if index < num_text else "right", overflow="fold")
        for row in rows:
            # As text: names may contain what rich takes for markup.
            table.add_row(*(Text(cell) for cell in row))
        Console(highlight=False).print(table)

    def message(self, text: str) -> None:
        """Print a message to stderr."""
        print(text, file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        """Print an error as one line."""
        line = "error: " + printable(" ".join(text.split()))
        self.message(f"\x1b[31m{line}\x1b[0m" if sys.stderr.isatty() and "NO_COLOR" not in os.environ else line)

    @contextlib.contextmanager
    def progress(self, label: str) -> Iterator[Callable[[int, int], object]]:
        """Show progress on a terminal; yield a function to call with the bytes done and the bytes in total."""
        if not sys.stderr.isatty():
            yield lambda done, total: None
            return
        if not HAS_RICH:
            try:
                yield _PlainProgress(label)
            finally:
                print(file=sys.stderr)
            return
        columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


class _PlainProgress:
    """Rewrites one line of a terminal a few times per second."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._started = time.monotonic()
        self._shown = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._shown < _SECONDS_BETWEEN and done < total:
            return
        self._shown = now
        rate = done / max(now - self._started, 1e-9)
        left = f"{(total - done) / rate:.0f} s" if rate else "unknown"
        text = f"{self._label} {size_text(done)} of {size_text(total)}, {size_text(rate)}/s, {left} left"
        # Spaces cover the rest of a longer text.
        print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Escape characters that control a terminal or cannot be printed: names come from files that others wrote."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by strings: "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]], num_text: int) -> str:
    """Lay out a table as text whose columns are separated by two spaces."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = [
        "  ".join(
            cell.ljust(w) if i < num_text else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in [heads, ["-" * width for width in widths], *rows]
    ]
    return "\n".join(line.rstrip() for line in lines)


def count_text(number: int, noun: str) -> str:
    """Format a count: `1 file`, `2,000 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size_text(num_bytes: float) -> str:
    """Format a number of bytes: `1.23 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"

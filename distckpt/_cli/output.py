"""Print results to stdout and everything else to stderr, in colour on terminals."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

MAX_LISTED = 50
"""Findings that a verb lists without --json."""

DIM, BOLD, GREEN, RED = "2", "1", "32", "31"
"""Styles, see `Output.styled`."""

_SECONDS_BETWEEN = 0.2
_BAR_WIDTH = 30
COLOURS = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#b07aa1",
    "#e15759",
    "#76b7b2",
    "#edc948",
    "#9c755f",
    "#ff9da7",
    "#86bcb6",
)
"""Of ranks, in pictures as on terminals."""
_MAX_SWATCHES = 16


class Output:
    """Prints the results and messages of a verb; with `as_json` the result is one JSON value
    only.
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def json(self, value: Any) -> None:
        """Print the result as JSON if requested."""
        if self.as_json:
            print(json.dumps(finite(value), indent=1))

    def line(self, text: str = "", style: str = "") -> None:
        """Print a line of the result."""
        if not self.as_json:
            text = printable(text)
            if sys.stdout.isatty() and "\n" not in text:
                text = _wrapped(text, shutil.get_terminal_size().columns)
            print(self.styled(text, style) if style else text)

    def picture(self, lines: Iterable[str]) -> None:
        """Print lines that contain colours and no names."""
        for line in lines:
            print(line)

    def table(
        self,
        heads: Sequence[str],
        rows: Sequence[Sequence[str]],
        num_text: int = 1,
        drop: str = "",
        swatches: Sequence[Sequence[int]] = (),
    ) -> None:
        """Print a table of the result: the first `num_text` columns hold text, the others numbers,
        aligned right.

        On a terminal that is too narrow, names in the first column are broken at dots, and when
        they would have less than 2/5 of the width, the columns named in `drop` are left out, one
        after the other. In colour, each row ends with the colours of the ranks in its `swatches`.
        """
        if self.as_json:
            return
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        shown = [[printable(cell) for cell in row] for row in rows]
        head, rule, *lines = table_lines(heads, shown, num_text, drop.split(), width)
        print(self.styled(head, DIM), self.styled(rule, DIM), sep="\n")
        for line, ranks in itertools.zip_longest(lines, swatches if self.in_colour else ()):
            first, *more = line.split("\n")
            colours = "  " + "".join(map(swatch, ranks[:_MAX_SWATCHES])) if ranks else ""
            print(first.ljust(len(rule)) + colours if colours else first, *more, sep="\n")

    def styled(self, text: str, style: str) -> str:
        """Return text in a style where the result has colours."""
        return f"\x1b[{style}m{text}\x1b[0m" if self.in_colour else text

    def message(self, text: str) -> None:
        """Print a message to stderr."""
        print(text, file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        """Print an error as one line."""
        line = "error: " + printable(" ".join(text.split()))
        self.message(
            f"\x1b[31m{line}\x1b[0m"
            if sys.stderr.isatty() and "NO_COLOR" not in os.environ
            else line
        )

    @contextlib.contextmanager
    def progress(self, label: str) -> Iterator[Callable[[int, int], object]]:
        """Show progress on a terminal; yield a function to call with the bytes done and the bytes
        in total.
        """
        if not sys.stderr.isatty():
            yield lambda done, total: None
            return
        try:
            yield _Progress(label)
        finally:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class _Progress:
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
        text = f"{size_text(done)} of {size_text(total)}, {size_text(rate)}/s, {left} left"
        room = min(
            _BAR_WIDTH, shutil.get_terminal_size().columns - len(self._label) - len(text) - 3
        )
        bar = (
            ("\u2501" * (room * done // max(total, 1))).ljust(room, "\u2500") + " "
            if room > 4
            else ""
        )
        print(f"\r{self._label} {bar}{text}\x1b[K", end="", file=sys.stderr, flush=True)


def swatch(rank: int, letter: str = " ") -> str:
    """Return a cell in the colour of a rank, for terminals."""
    colour = COLOURS[rank % len(COLOURS)]
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"\x1b[48;2;{red};{green};{blue}m\x1b[38;2;255;255;255m{letter}\x1b[0m"


def printable(text: str) -> str:
    """Escape characters that control a terminal or cannot be printed: names come from files that
    others wrote.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text
    )


def finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by strings: "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def table_lines(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    num_text: int,
    drop: Sequence[str] = (),
    width: int | None = None,
) -> list[str]:
    """Lay out a table as lines whose columns are separated by two spaces; see `Output.table` for a
    `width`.

    The line of a row whose first cell is broken has several lines.
    """
    columns = list(zip(heads, *rows, strict=True))
    widths = {column[0]: max(map(len, column)) for column in columns}
    if width is not None:
        most = widths[heads[0]]
        least = min(
            most,
            max(2 * width // 5, *(len(line) for cell in columns[0] for line in _broken(cell, 1))),
        )
        for head in drop:
            if sum(widths.values()) - most + least + 2 * len(widths) - 2 > width:
                widths.pop(head, None)
        room = width - (sum(widths.values()) - most + 2 * len(widths) - 2)
        widths[heads[0]] = min(most, max(least, room))
    names = [_broken(cell, widths[heads[0]]) for cell in columns[0][1:]]
    columns[0] = (heads[0], *(lines[0] for lines in names))
    shown = [
        [
            cell.ljust(widths[head]) if i < num_text else cell.rjust(widths[head])
            for cell in (head, "-" * widths[head], *cells)
        ]
        for i, (head, *cells) in enumerate(columns)
        if head in widths
    ]
    head, rule, *lines = ["  ".join(line).rstrip() for line in zip(*shown, strict=True)]
    return [
        head,
        rule,
        *("\n".join([line, *name[1:]]) for line, name in zip(lines, names, strict=True)),
    ]


def _wrapped(text: str, width: int) -> str:
    """Break a line between words."""
    if len(text) <= width:
        return text
    return textwrap.fill(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _broken(name: str, width: int) -> list[str]:
    """Break a name after dots into lines of at most this width, or one part; `{0..3}` stays
    whole.
    """
    indent = " " * (len(name) - len(name.lstrip()) + 2)
    lines = [""]
    for part in re.split(r"(?<=[^.]\.)(?=[^.])", name):
        if lines[-1].strip() and len(lines[-1]) + len(part) > width:
            lines.append(indent)
        lines[-1] += part
    return lines


def shape_text(shape: Sequence[int]) -> str:
    """Format a shape: `128x512`, `()` for a scalar."""
    return "x".join(map(str, shape)) or "()"


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

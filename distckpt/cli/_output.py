"""Print results to stdout and messages to stderr, in color on terminals."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distckpt.manager._listing import CheckpointInfo

MAX_LISTED = 50
"""Findings that a verb lists without --json."""

# Styles, see `Output.styled`.
DIM = "2"
BOLD = "1"
RED = "31"

_SECONDS_BETWEEN = 0.2
_BAR_WIDTH = 30
COLORS = (
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
"""The colors of ranks, on pages as on terminals."""
CHECKPOINT_HEADS = ["checkpoint", "saved", "metrics", "state", "size"]
_MAX_SWATCHES = 16
_BLOCK = "\u2588"


class Output:
    """The printer of results and messages of a verb.

    With `as_json` the result is just one JSON value.

    Attributes:
        as_json: see above.
        in_color: whether stdout shows colors.
        draws_blocks: whether stdout can show bars of Unicode.
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.in_color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.draws_blocks = encodable(_BLOCK) == _BLOCK

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
            print(encodable(self.styled(text, style) if style else text))

    def picture(self, lines: Iterable[str]) -> None:
        """Print lines that contain colors, and no names from a checkpoint."""
        for line in lines:
            print(encodable(line))

    def table(
        self,
        heads: Sequence[str],
        rows: Sequence[Sequence[str]],
        num_text: int = 1,
        drop: str = "",
        swatches: Sequence[Sequence[int]] = (),
    ) -> None:
        """Print a table of the result.

        On a terminal that is too narrow, names in the first column are broken at dots. If they
        would get less than 2/5 of the width, the columns named in `drop` are left out, one after
        the other.

        Args:
            heads: names of the columns.
            rows: their cells.
            num_text: number of columns with text, from the left; the rest holds numbers, aligned
                right.
            drop: names of columns, separated by spaces.
            swatches: for each row the ranks whose colors end it, if the result has colors.
        """
        if self.as_json:
            return
        width = None
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns
        shown = []
        for row in rows:
            shown.append([encodable(printable(cell)) for cell in row])
        head, rule, *lines = table_lines(heads, shown, num_text, drop.split(), width)
        print(self.styled(head, DIM), self.styled(rule, DIM), sep="\n")
        for line, ranks in itertools.zip_longest(lines, swatches if self.in_color else ()):
            first, *more = line.split("\n")
            colors = ""
            if ranks:
                colors = "  " + "".join(map(swatch, ranks[:_MAX_SWATCHES]))
            print(first.ljust(len(rule)) + colors if colors else first, *more, sep="\n")

    def styled(self, text: str, style: str) -> str:
        """Return text in a style, if the result has colors."""
        if self.in_color:
            return f"\x1b[{style}m{text}\x1b[0m"
        return text

    def message(self, text: str) -> None:
        """Print a message to stderr."""
        print(text, file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        """Print an error as one line."""
        line = "error: " + printable(" ".join(text.split()))
        if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
            line = f"\x1b[{RED}m{line}\x1b[0m"
        self.message(line)

    @contextlib.contextmanager
    def progress(self, label: str) -> Iterator[Callable[[int, int], object]]:
        """Show progress on a terminal.

        Yield a function to call with the bytes done and their total.
        """
        if not sys.stderr.isatty():
            yield lambda done, total: None
            return
        try:
            yield _Progress(label)
        finally:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class _Progress:
    """A line of a terminal, rewritten a few times per second."""

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
        left = "unknown"
        if rate:
            left = f"{(total - done) / rate:.0f} s"
        text = f"{size_text(done)} of {size_text(total)}, {size_text(rate)}/s, {left} left"
        room = shutil.get_terminal_size().columns - len(self._label) - len(text) - 3
        bar = _bar(done / max(total, 1), min(_BAR_WIDTH, room))
        print(f"\r{self._label} {bar}{text}\x1b[K", end="", file=sys.stderr, flush=True)


def _bar(fraction: float, width: int) -> str:
    """Draw a bar, if there is room for one, and a space."""
    if width <= 4:
        return ""
    return ("\u2501" * int(fraction * width)).ljust(width, "\u2500") + " "


def swatch(rank: int, letter: str = " ") -> str:
    """Return a cell in the color of a rank, for terminals."""
    color = COLORS[rank % len(COLORS)]
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"\x1b[48;2;{red};{green};{blue}m\x1b[38;2;255;255;255m{letter}\x1b[0m"


def printable(text: str) -> str:
    """Escape characters that control a terminal or cannot be printed.

    Names come from files of unknown origin.
    """
    if text.isprintable():
        return text
    escaped = ""
    for char in text:
        if char.isprintable() or char in "\n\t":
            escaped += char
        else:
            escaped += repr(char)[1:-1]
    return escaped


def encodable(text: str) -> str:
    """Escape characters that the encoding of stdout lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by strings: "NaN", "Infinity", "-Infinity"."""
    return json.loads(json.dumps(value), parse_constant=str)


def _wrapped(text: str, width: int) -> str:
    """Break a line between words."""
    if len(text) <= width:
        return text
    return textwrap.fill(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def shape_text(shape: Sequence[int]) -> str:
    """Format a shape: `128x512`, `()` for a scalar."""
    return "x".join(map(str, shape)) or "()"


def count_text(number: int, noun: str) -> str:
    """Format a count: `1 file`, `2,000 files`."""
    if number == 1:
        return f"{number:,} {noun}"
    return f"{number:,} {noun}s"


def size_text(num_bytes: float) -> str:
    """Format a number of bytes: `1.23 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            if unit == "B":
                return f"{num_bytes:.0f} B"
            return f"{num_bytes:.2f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"


def time_text(seconds: float | None) -> str:
    """Format a time by the clock of this machine; an empty string for None."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def cells_of_checkpoint(info: CheckpointInfo) -> list[str]:
    """Return the cells of a checkpoint in a table with `CHECKPOINT_HEADS`."""
    metrics = " ".join(f"{name}={value:.4g}" for name, value in info.metrics.items())
    words = {
        str(info.tier): info.tier is not None,
        "not whole": info.problem is not None,
        "newest": info.is_newest,
        "pinned": info.pinned,
        "no optimizer": not info.has_optimizer,
        f"rejected: {info.rejected}": info.rejected is not None,
    }
    state = ", ".join(word for word, applies in words.items() if applies)
    size = ""
    if info.num_bytes:
        size = size_text(info.num_bytes)
    return [info.name, time_text(info.saved_at), metrics, state, size]


# --- Table ----------------------------------------------------------------------------------------


def table_lines(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    num_text: int,
    drop: Sequence[str],
    width: int | None,
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

"""What a benchmark has found: tables whose figures say how noisy they are, as JSON and as
Markdown.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from measure import machine_facts
from tables import markdown_table

MAX_NOISE = 0.3
"""A figure is marked when the middle half of its runs spans more than this fraction of their
median.
"""
MAX_OTHERS = 0.25
"""All figures of runs are marked when other programs took more than this fraction of the
processors.
"""
MIN_RUNS = 3

Cell: TypeAlias = "str | dict[str, Any]"
"""Text, or `text` and the `noise` of the runs it was computed from; None when they are fewer than
`MIN_RUNS`.
"""


# --- Cells ----------------------------------------------------------------------------------------


def median(runs: Sequence[float], form: str = "{:.2f}") -> Cell:
    """Return the median of some runs, and their noise."""
    return figure(form.format(statistics.median(runs)), runs)


def ratio(above: Sequence[float], below: Sequence[float], form: str = "{:.2f}") -> Cell:
    """Return the ratio of two medians, which is as noisy as the noisier one."""
    return figure(form.format(statistics.median(above) / statistics.median(below)), above, below)


def figure(text: str, *runs: Sequence[float]) -> Cell:
    """Return a text that was computed from the medians of some runs."""
    noises = [noise_of(each) for each in runs]
    return {
        "text": text,
        "noise": None if None in noises else round(max(noise or 0 for noise in noises), 3),
    }


def noise_of(runs: Sequence[float]) -> float | None:
    """Return what fraction of their median the middle half of some runs spans; None of fewer than
    `MIN_RUNS`.
    """
    if len(runs) < MIN_RUNS:
        return None
    first, middle, third = statistics.quantiles(runs, n=4, method="inclusive")
    return (third - first) / middle


# --- Reports --------------------------------------------------------------------------------------


def parser_of(
    doc: str | None, runs: int | None = 5, has_files: bool = True
) -> argparse.ArgumentParser:
    """Make a parser of the options that the benchmarks have in common."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if has_files:
        parser.add_argument(
            "--dir", default=tempfile.gettempdir(), help="where files go; they are deleted again"
        )
    if runs is not None:
        parser.add_argument(
            "--runs", type=int, default=runs, help=f"rounds that count (default: {runs})"
        )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser


class Report:
    """What one benchmark finds. Make it before anything is measured; `finish` prints and writes
    it.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._begun = time.perf_counter(), _processor_seconds()
        self.about = ""
        self.tables: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def add(self, heads: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str = "") -> None:
        """Add a table whose columns after the first are numbers, below a caption."""
        self.tables.append({"caption": caption, "heads": heads, "rows": rows})

    def finish(self, **details: Any) -> None:
        """Print everything, and write it where it was asked for."""
        folder = getattr(self._arguments, "dir", None)
        value = {
            "command": _command(folder),
            "date": datetime.date.today().isoformat(),
            "machine": machine_facts(folder),
            "others": self._share_of_others(),
            "about": self.about,
            "tables": self.tables,
            "notes": self.notes,
            **details,
        }
        print(markdown(value))
        if self._arguments.json:
            self._arguments.json.write_text(to_json(value))

    def _share_of_others(self) -> float | None:
        """Return what fraction of the processors was taken by what is not this process, nor started
        by it.
        """
        began, before = self._begun
        now = _processor_seconds()
        if before is None or now is None:
            return None
        taken = (now[0] - before[0]) - (now[1] - before[1])
        return round(max(0.0, taken) / (time.perf_counter() - began) / (os.cpu_count() or 1), 2)


def _processor_seconds() -> tuple[float, float] | None:
    """Return the processor seconds of the machine, and of this process and those it waited for;
    None if unknown.
    """
    try:
        ticks = [
            int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        ]
    except OSError:
        return None
    idle, waiting = ticks[3:5]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


def _command(folder: str | None) -> str:
    words = [f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return " ".join(["python", *("DIR" if folder and word == folder else word for word in words)])


def to_json(value: dict[str, Any]) -> str:
    """Write each entry in a line of its own."""
    return (
        "{\n"
        + ",\n".join(f"{json.dumps(key)}: {json.dumps(part)}" for key, part in value.items())
        + "\n}\n"
    )


# --- Markdown -------------------------------------------------------------------------------------


def markdown(value: dict[str, Any]) -> str:
    """Lay out what `Report.finish` has written."""
    others = value["others"]
    is_busy = others is not None and others > MAX_OTHERS
    facts = [f"`{value['command']}`"] if value["command"] else []
    sentences = [f"{', '.join([*facts, value['date'], value['machine']])}.", value["about"]]
    if others is not None:
        sentences.append(f"Other programs took {others:.0%} of the processors.")
    blocks = [_wrapped(" ".join(filter(None, sentences)))]
    is_marked = False
    for table in value["tables"]:
        rows = [[_text(cell, is_busy) for cell in row] for row in table["rows"]]
        is_marked |= any(cell.endswith(MARK) for row in rows for cell in row)
        blocks += [_wrapped(table["caption"])] if table["caption"] else []
        blocks.append(markdown_table(table["heads"], rows))
    if is_marked:
        blocks.append(_wrapped(BUSY_LEGEND if is_busy else LEGEND))
    return "\n\n".join([*blocks, *map(_wrapped, value["notes"])])


MARK = " ?"
LEGEND = (
    "Figures with a question mark mean little: the middle half of the runs spans more than "
    f"{MAX_NOISE:.0%} of their median, or there were fewer than {MIN_RUNS} runs."
)
BUSY_LEGEND = (
    "Figures with a question mark mean little: other programs took more than "
    f"{MAX_OTHERS:.0%} of the processors meanwhile."
)


def _text(cell: Cell, is_busy: bool) -> str:
    if isinstance(cell, str):
        return cell
    is_noisy = is_busy or cell["noise"] is None or cell["noise"] > MAX_NOISE
    return cell["text"] + (MARK if is_noisy else "")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)

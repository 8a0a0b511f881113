"""Pages without scripts: charts in SVG, and the frame around them."""

from __future__ import annotations

import importlib.resources
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape, unescape
from typing import Any, NamedTuple

from distckpt._base.errors import CheckpointingException
from distckpt._base.options import sealed, unsealed
from distckpt._storage import locations
from distckpt.cli._output import COLORS

logger = logging.getLogger(__name__)

_TOP = 10
_BOTTOM = 24
"""Pixels below the drawing, and above it (`_TOP`).

Across, a picture is as wide as the window lets it be, and places are parts of 100.
"""
_STYLE = """
.chart { display: grid; grid-template-columns: minmax(64px, 16%) minmax(0, 1fr); gap: 8px; }
.chart { padding-right: 12px; }
.chart svg { display: block; width: 100%; font-size: 12px; }
.chart .plot { overflow: visible; }
svg text { fill: var(--soft); }
svg .axis { stroke: var(--line); }
svg .wait { fill: var(--group); }
svg .curve { fill: none; stroke: var(--accent); stroke-width: 2; }
svg .curve { vector-effect: non-scaling-stroke; }
svg .dot { fill: var(--accent); }
svg .bad { fill: var(--bad); }
svg .cell { stroke: var(--card); }
section h2 { margin: 0 0 10px; }
@media (max-width: 640px) {
  .chart svg { font-size: 11px; }
  .cards thead { display: none; }
  .cards tr { padding-left: 0; }
  .cards td:first-child { flex: 0 0 100%; }
}
"""


_MAX_COLUMN_LABELS = 6
"""Labels below a heat map, which stay apart on a phone."""
_KIND_COLORS = [color for color in COLORS if color != "#e15759"]
"""The colors of kinds: never red, which stands for a problem."""


_FIGURES = ('<meta name="distckpt-figures" content="', '">')


class Point(NamedTuple):
    """A place on a chart, and the text about it."""

    x: float
    y: float
    text: str


class Bar(NamedTuple):
    """A stretch of a row in the color of its kind."""

    row: str
    start: float
    stop: float
    kind: str
    text: str
    is_bad: bool


def write_static_page(
    path: str,
    title: str,
    lines: Sequence[str],
    sections: Sequence[tuple[str, str]],
    figures: Mapping[str, Any] | None = None,
) -> None:
    """Write a page that stands alone.

    A program that reads it meanwhile sees the earlier one.

    Args:
        path: of the file.
        title: of the page.
        lines: texts below it.
        sections: headings, and HTML below each.
        figures: JSON values that the next page at this path may reuse, see `figures_in`.
    """
    template = importlib.resources.files(__package__).joinpath("page.html").read_text("utf-8")
    style = template.partition("<style>")[2].partition("</style>")[0]
    head = "".join(f"<p class=soft>{escape(line)}</p>" for line in lines)
    body = "".join(
        f"<section><h2>{escape(heading)}</h2>{content}</section>" for heading, content in sections
    )
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"{_FIGURES[0]}{escape(sealed(figures or {}))}{_FIGURES[1]}"
        f"<title>{escape(title)}</title><style>{style}{_STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><div id="head">{head}</div>{body}</main></body></html>\n'
    )
    try:
        locations.write_bytes(path, page.encode(), durable=False)
    except OSError as error:
        raise CheckpointingException(
            f"The page cannot be written to {path!r}: {error.strerror}."
        ) from error


def figures_in(path: str) -> dict[str, Any]:
    """Return the figures in the page at a path.

    There are none if it has none and, with a warning, if they are damaged.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read().partition(_FIGURES[0])[2].partition(_FIGURES[1])[0]
        if text:
            return unsealed(unescape(text), {})
        return {}
    except OSError:
        return {}
    except ValueError as error:
        logger.warning("the figures in %s are damaged, and made anew: %s", path, error)
        return {}


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Return tiles, each a number and the thing it counts."""
    cells = (
        f'<div class="tile"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in pairs
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts; on a phone, its rows are cards."""
    head = "".join(f"<th>{escape(head_text)}</th>" for head_text in heads)
    body = "".join(f"<tr>{_cells_of(heads, row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="cards">{table}</div>'


def _cells_of(heads: Sequence[str], row: Sequence[str]) -> str:
    first, *cells = row
    html = f'<td class="text">{escape(first)}</td>'
    for head, cell in zip(heads[1:], cells, strict=True):
        if cell:
            html += f'<td class="text" data-name="{escape(head)}">{escape(cell)}</td>'
        else:
            html += "<td></td>"
    return html


def line_chart(points: Sequence[Point], ends: tuple[float, float], height: int = 150) -> str:
    """Return a curve through points, with its smallest and largest value.

    The axis across goes from one of the ends to the other.
    """
    ys = [point.y for point in points]
    low, high = min(ys), max(ys)
    bottom = height - _BOTTOM
    at_x = _scale(*ends, 0, 100)
    at_y = _scale(low, high, bottom, _TOP)
    dots = []
    path = ""
    for point in points:
        x, y = at_x(point.x), at_y(point.y)
        path += f"{x:.2f},{y:.1f} "
        dots.append(
            f'<circle class="dot" cx="{x:.2f}%" cy="{y:.1f}" r="4">'
            f"<title>{escape(point.text)}</title></circle>"
        )
    limits = dict(zip(_apart(high, low), (high, low), strict=True))
    labels = []
    for text, limit in limits.items():
        labels.append(_label(at_y(limit) + 4, text))
    first, last = _apart(*ends)
    below = [_text(0, height - 4, first, "start"), _text(100, height - 4, last, "end")]
    axis = f'<line class="axis" x1="0" y1="{bottom}" x2="100%" y2="{bottom}"/>'
    # The line is a picture in the picture, stretched to its width.
    stretched = f'viewBox="0 0 100 {height:.0f}" preserveAspectRatio="none"'
    line = f'<polyline class="curve" points="{path.rstrip()}"/>'
    curve = f'<svg class="plot" {stretched} height="{height:.0f}">{line}</svg>'
    return _chart(height, labels, [axis, curve, *dots, *below])


def _apart(first: float, second: float) -> tuple[str, str]:
    """Format two numbers with as many digits as distinguish them.

    Integers have all digits.
    """
    if isinstance(first, int) and isinstance(second, int):
        return str(first), str(second)
    digits = 4
    while first != second and f"{first:.{digits}g}" == f"{second:.{digits}g}":
        digits += 1
    return f"{first:.{digits}g}", f"{second:.{digits}g}"


def timeline(bars: Sequence[Bar]) -> str:
    """Return a row of bars for each name; gaps between them are gray."""
    rows: dict[str, list[Bar]] = {}
    for bar in bars:
        rows.setdefault(bar.row, []).append(bar)
    first = min(bar.start for bar in bars)
    last = max(bar.stop for bar in bars)
    pitch = 6
    if len(rows) <= 64:
        pitch = 20
    height = _TOP + pitch * len(rows) + _BOTTOM
    at = _scale(first, last, 0, 100)
    kinds = dict.fromkeys(bar.kind for bar in bars)
    colors = dict(zip(kinds, itertools.cycle(_KIND_COLORS), strict=False))
    parts: list[str] = []
    labels: list[str] = []
    for number, (row, own) in enumerate(rows.items()):
        top = _TOP + pitch * number
        parts += _row_parts(row, own, at, colors, top, pitch - 3)
        if pitch == 20:
            labels.append(_label(top + 13, row))
    parts.append(_text(0, height - 6, "0 s", "start"))
    parts.append(_text(100, height - 6, f"{last - first:.3g} s", "end"))
    legend = "".join(
        f'<span><i class="dot" style="background:{color}"></i>{escape(kind)}</span>'
        for kind, color in colors.items()
    )
    return f'{_chart(height, labels, parts)}<div class="legend">{legend}</div>'


def _row_parts(
    row: str,
    bars: Sequence[Bar],
    at: Callable[[float], float],
    colors: Mapping[str, str],
    top: float,
    height: float,
) -> Iterator[str]:
    """Yield the parts of a row: its waiting time, and above it its bars."""
    begin = at(min(bar.start for bar in bars))
    end = at(max(bar.stop for bar in bars))
    yield _rect(begin, top, end - begin, height, 'class="wait"', f"{row}: waits")
    for bar in bars:
        look = 'class="bad"'
        if not bar.is_bad:
            look = f'fill="{colors[bar.kind]}"'
        width = max(at(bar.stop) - at(bar.start), 0.1)
        yield _rect(at(bar.start), top, width, height, look, bar.text)


def heat_map(columns: Sequence[str], rows: Mapping[str, Sequence[tuple[float | None, str]]]) -> str:
    """Return a grid of values between 0 and 1 with their texts.

    None is a bad value.
    """
    pitch = max(14, min(22, 900 // max(1, len(rows))))
    width = 100 / max(1, len(columns))
    height = _TOP + pitch * len(rows) + _BOTTOM
    parts: list[str] = []
    labels: list[str] = []
    for number, (name, cells) in enumerate(rows.items()):
        top = _TOP + pitch * number
        labels.append(_label(top + pitch - 5, name))
        for column, (value, text) in enumerate(cells):
            shade = 'class="cell bad"'
            if value is not None:
                shade = f'class="cell" fill="{_shade(value)}"'
            parts.append(_rect(column * width, top, width, pitch, shade, text))
    step = max(1, math.ceil(len(columns) / _MAX_COLUMN_LABELS))
    for column in range(0, len(columns), step):
        parts.append(_text((column + 0.5) * width, height - 6, columns[column], "middle"))
    return _chart(height, labels, parts)


def ramp(low: str, high: str, bad: str) -> str:
    """Return the legend of a heat map: the meaning of its palest, darkest and bad cells."""
    shades = ", ".join(_shade(part / 4) for part in range(5))
    gradient = f'<i class="ramp" style="background:linear-gradient(90deg, {shades})"></i>'
    dot = '<i class="dot" style="background:var(--bad)"></i>'
    return (
        f'<div class="legend"><span>{escape(low)} {gradient} {escape(high)}</span>'
        f"<span>{dot}{escape(bad)}</span></div>"
    )


def _shade(value: float) -> str:
    """Return a color between pale and dark."""
    low = (222, 233, 247)
    high = (16, 64, 140)
    red, green, blue = (round(a + (b - a) * value) for a, b in zip(low, high, strict=True))
    return f"rgb({red},{green},{blue})"


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    """Return the function that brings `low` to `start` and `high` to `stop`."""
    per_unit = 0.0
    origin = (start + stop) / 2
    if high != low:
        per_unit = (stop - start) / (high - low)
        origin = start

    def at(value: float) -> float:
        return origin + (value - low) * per_unit

    return at


def _chart(height: float, labels: Sequence[str], parts: Sequence[str]) -> str:
    """Return a picture, with labels on its left."""
    left = f'<svg height="{height:.0f}" aria-hidden="true">{"".join(labels)}</svg>'
    plot = f'<svg class="plot" height="{height:.0f}" role="img">{"".join(parts)}</svg>'
    return f'<div class="chart">{left}{plot}</div>'


def _rect(x: float, y: float, width: float, height: float, look: str, text: str) -> str:
    place = f'x="{x:.2f}%" y="{y:.1f}" width="{width:.2f}%" height="{height:.1f}"'
    return f'<rect {place} rx="2" {look}><title>{escape(text)}</title></rect>'


def _label(y: float, text: str) -> str:
    """Return a text that ends at the picture; of a long one, its end is seen."""
    return _text(100, y, text, "end", 26)


def _text(x: float, y: float, text: str, anchor: str, most: int = 40) -> str:
    short = text
    if len(text) > most:
        short = f"\u2026{text[1 - most :]}"
    place = f'x="{x:.2f}%" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(short)}<title>{escape(text)}</title></text>"

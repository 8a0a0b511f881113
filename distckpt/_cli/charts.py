"""Pages without scripts: charts in SVG, and the frame around them."""

from __future__ import annotations

import importlib.resources
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from distckpt._base.errors import CheckpointingException
from distckpt._cli.output import COLORS

_WIDTH = 1160
_LABEL_WIDTH = 190
_TOP, _BOTTOM = 10, 24
_STYLE = """
svg { display: block; width: 100%; height: auto; font-size: 12px; }
svg text { fill: var(--soft); }
svg .axis { stroke: var(--line); }
svg .wait { fill: var(--group); }
svg .curve { fill: none; stroke: var(--accent); stroke-width: 2; }
svg .dot { fill: var(--accent); }
svg .bad { fill: var(--bad); }
.scroll svg { min-width: 640px; }
section h2 { margin: 0 0 10px; }
"""


class Point(NamedTuple):
    """A place on a chart, and what is said about it."""

    x: float
    y: float
    text: str


class Bar(NamedTuple):
    """A stretch of a row, from one place to another, in the color of its kind."""

    row: str
    start: float
    stop: float
    kind: str
    text: str
    is_bad: bool = False


def write_static_page(
    path: str, title: str, lines: Sequence[str], sections: Sequence[tuple[str, str]]
) -> None:
    """Write a page that stands alone. A program that reads it meanwhile sees the earlier one.

    Args:
        path: of the file.
        title: of the page.
        lines: texts below it.
        sections: headings, and HTML below each.
    """
    template = importlib.resources.files("distckpt._cli").joinpath("page.html").read_text("utf-8")
    style = template.partition("<style>")[2].partition("</style>")[0]
    head = "".join(f"<p class=soft>{escape(line)}</p>" for line in lines)
    body = "".join(
        f"<section><h2>{escape(heading)}</h2>{content}</section>" for heading, content in sections
    )
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{style}{_STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><div id="head">{head}</div>{body}</main></body></html>\n'
    )
    temporary = f"{path}.tmp-{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(page)
        os.replace(temporary, path)
    except OSError as error:
        raise CheckpointingException(
            f"The page cannot be written to {path!r}: {error.strerror}."
        ) from error


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Return tiles, of a number and what it counts."""
    cells = (
        f'<div class="tile"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in pairs
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts."""
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(
        f"<tr>{''.join(f'<td class=text>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def line_chart(points: Sequence[Point], ends: tuple[float, float], height: int = 150) -> str:
    """Return a curve through points, with its smallest and largest value; the axis across goes from
    one of the ends to the other.
    """
    ys = [point.y for point in points]
    left, right, bottom = _LABEL_WIDTH, _WIDTH - 20, height - _BOTTOM
    at_x = _scale(*ends, left, right)
    at_y = _scale(min(ys), max(ys), bottom, _TOP)
    places = [(at_x(point.x), at_y(point.y)) for point in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(
        f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(point.text)}</title>'
        "</circle>"
        for (x, y), point in zip(places, points, strict=True)
    )
    labels = [
        _text(left - 8, at_y(max(ys)) + 4, f"{max(ys):.4g}", "end"),
        _text(left - 8, at_y(min(ys)) + 4, f"{min(ys):.4g}", "end"),
        _text(left, height - 4, f"{ends[0]:g}", "start"),
        _text(right, height - 4, f"{ends[1]:g}", "end"),
    ]
    curve = f'<polyline class="curve" points="{path}"/>'
    return _svg(height, _line(left, bottom, right, bottom) + curve + dots + "".join(labels))


def timeline(bars: Sequence[Bar], unit: str = "s") -> str:
    """Return a row for each name with its bars; what lies between them is gray."""
    rows: dict[str, list[Bar]] = {}
    for bar in bars:
        rows.setdefault(bar.row, []).append(bar)
    first, last = min(bar.start for bar in bars), max(bar.stop for bar in bars)
    pitch = 20 if len(rows) <= 64 else 6
    height = _TOP + pitch * len(rows) + _BOTTOM
    at = _scale(first, last, _LABEL_WIDTH, _WIDTH - 20)
    colors = {kind: _color_of(number) for number, kind in enumerate(_kinds(bars))}
    parts: list[str] = []
    for number, (row, own) in enumerate(rows.items()):
        top = _TOP + pitch * number
        parts += _row_parts(row, own, at, colors, (top, pitch - 3))
        if pitch == 20:
            parts.append(_text(_LABEL_WIDTH - 8, top + 13, row, "end"))
    parts.append(_text(_LABEL_WIDTH, height - 6, f"0 {unit}", "start"))
    parts.append(_text(_WIDTH - 20, height - 6, f"{last - first:.3g} {unit}", "end"))
    legend = "".join(
        f'<span><i class="dot" style="background:{color}"></i>{escape(kind)}</span>'
        for kind, color in colors.items()
    )
    return f'{_svg(height, "".join(parts))}<div class="legend">{legend}</div>'


def _kinds(bars: Sequence[Bar]) -> list[str]:
    return list(dict.fromkeys(bar.kind for bar in bars))


def _row_parts(
    row: str,
    bars: Sequence[Bar],
    at: _Scale,
    colors: Mapping[str, str],
    top_and_height: tuple[float, float],
) -> Iterator[str]:
    """Yield what is drawn in a row: how long it waits, and above that its bars."""
    top, height = top_and_height
    begin, end = at(min(bar.start for bar in bars)), at(max(bar.stop for bar in bars))
    yield _rect(begin, top, end - begin, height, 'class="wait"', f"{row}: waits")
    for bar in bars:
        look = 'class="bad"' if bar.is_bad else f'fill="{colors[bar.kind]}"'
        width = max(at(bar.stop) - at(bar.start), 0.8)
        yield _rect(at(bar.start), top, width, height, look, bar.text)


def heat_map(columns: Sequence[str], rows: Mapping[str, Sequence[tuple[float | None, str]]]) -> str:
    """Return a grid of values between 0 and 1, each with a text; None is a value that is bad."""
    pitch = max(14, min(22, 900 // max(1, len(rows))))
    width = (_WIDTH - 20 - _LABEL_WIDTH) / max(1, len(columns))
    height = _TOP + pitch * len(rows) + _BOTTOM
    parts = []
    for number, (name, cells) in enumerate(rows.items()):
        top = _TOP + pitch * number
        parts.append(_text(_LABEL_WIDTH - 8, top + pitch - 5, name, "end", 26))
        for column, (value, text) in enumerate(cells):
            shade = 'class="bad"' if value is None else f'fill="{_shade(value)}"'
            left = _LABEL_WIDTH + column * width
            parts.append(_rect(left, top, width - 1, pitch - 1, shade, text))
    step = max(1, math.ceil(len(columns) / 12))
    for column in range(0, len(columns), step):
        middle = _LABEL_WIDTH + (column + 0.5) * width
        parts.append(_text(middle, height - 6, columns[column], "middle"))
    return _svg(height, "".join(parts))


def ramp(low: str, high: str, bad: str) -> str:
    """Return the legend of a heat map: what its palest, its darkest and its bad cells mean."""
    shades = ", ".join(_shade(part / 4) for part in range(5))
    gradient = f'<i class="ramp" style="background:linear-gradient(90deg, {shades})"></i>'
    dot = '<i class="dot" style="background:var(--bad)"></i>'
    return (
        f'<div class="legend"><span>{escape(low)} {gradient} {escape(high)}</span>'
        f"<span>{dot}{escape(bad)}</span></div>"
    )


def _color_of(number: int) -> str:
    """Return the color of a kind: never red, which means that something is wrong."""
    colors = [color for color in COLORS if color != "#e15759"]
    return colors[number % len(colors)]


def _shade(value: float) -> str:
    """Return a color between pale and dark."""
    low, high = (222, 233, 247), (16, 64, 140)
    red, green, blue = (round(a + (b - a) * value) for a, b in zip(low, high, strict=True))
    return f"rgb({red},{green},{blue})"


class _Scale(NamedTuple):
    """A line through two points."""

    first: float
    per_unit: float
    origin: float

    def __call__(self, value: float) -> float:
        return self.origin + (value - self.first) * self.per_unit


def _scale(low: float, high: float, start: float, stop: float) -> _Scale:
    """Return the function that brings `low` to `start` and `high` to `stop`."""
    if high == low:
        return _Scale(low, 0.0, (start + stop) / 2)
    return _Scale(low, (stop - start) / (high - low), start)


def _svg(height: float, content: str) -> str:
    box = f'viewBox="0 0 {_WIDTH} {height:.0f}"'
    return f'<div class="scroll"><svg {box} role="img">{content}</svg></div>'


def _rect(x: float, y: float, width: float, height: float, look: str, text: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} rx="2" {look}><title>{escape(text)}</title></rect>'


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<line class="axis" x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}"/>'


def _text(x: float, y: float, text: str, anchor: str, most: int = 40) -> str:
    short = text if len(text) <= most else f"\u2026{text[1 - most :]}"
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(short)}<title>{escape(text)}</title></text>"

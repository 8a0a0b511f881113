"""The figures as a picture: one bar per contestant, as long as it is fast; the raw storage as a line."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from contest.figures import Figure, Outcome, is_own, raw_seconds

_WIDTH, _LEFT, _BAR_WIDTH = 900, 250, 440
_ROW, _BAR, _HEAD, _GAP = 24, 16, 30, 18
# Keeps text readable on top of the line.
_HALO = 'paint-order="stroke" stroke="#ffffff" stroke-width="4"'
_OWN, _OTHER, _RAW = "#2f6fb2", "#a9b4c0", "#d9a441"


def draw(outcome: Outcome) -> str:
    """Draw an SVG picture."""
    y = 34
    parts = [
        _text(20, y, "Save and load", 'font-size="18" font-weight="bold"'),
        _text(20, y + 22, f"{outcome.num_bytes / 1e9:.2f} GB, {outcome.num_ranks} ranks, median of {outcome.num_runs}; "
              "longer is faster; in brackets: share of the raw storage's speed", 'fill="#57606a"'),
        _text(20, y + 40, outcome.machine, 'fill="#57606a"'),
    ]  # fmt: skip
    y += 64
    for case, figures in outcome.cases().items():
        parts.append(_text(20, y + 12, outcome.title(case), 'font-size="14" font-weight="bold"'))
        y += _HEAD
        parts += _case(figures, y)
        y += _ROW * len(figures) + _GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" height="{y}" '
        'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif" font-size="13" fill="#24292f">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>", ""])


def _case(figures: Sequence[Figure], top: int) -> list[str]:
    raw = raw_seconds(figures)
    fastest = max(figure.gb_per_second for figure in figures)
    parts: list[str] = []
    labels: list[str] = []
    for row, figure in enumerate(figures):
        y = top + row * _ROW
        width = max(1.0, _BAR_WIDTH * figure.gb_per_second / fastest)
        colour = _RAW if not figure.is_checkpoint else _OWN if is_own(figure) else _OTHER
        weight = 'font-weight="bold"' if is_own(figure) else ""
        ratio = f"  ({raw / figure.median:.2f})" if raw else ""
        parts += [
            _text(_LEFT - 10, y + 13, figure.name, f'text-anchor="end" {weight}'),
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2" fill="{colour}"/>',
        ]
        labels.append(_text(_LEFT + width + 8, y + 13, f"{figure.gb_per_second:.2f} GB/s{ratio}", f"{weight} {_HALO}"))
    if raw:
        at = _LEFT + _BAR_WIDTH * figures[0].num_bytes / raw / 1e9 / fastest
        bottom = top + _ROW * len(figures) - (_ROW - _BAR)
        parts.append(
            f'<line x1="{at:.1f}" y1="{top - 4}" x2="{at:.1f}" y2="{bottom + 4}" stroke="{_RAW}" stroke-width="1.5" '
            'stroke-dasharray="4 3"/>'
        )
    return parts + labels


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'

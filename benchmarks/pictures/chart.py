"""The figures of a benchmark as a picture: one bar per contestant, as long as it is fast; the raw
storage as a line.
"""

from __future__ import annotations

from collections.abc import Sequence

from contest.figures import Figure, Outcome, fastest_raw, is_own

from pictures.svg import document, heading, text

_CASES = ("save", "warm_load", "reshard_axis")
"""Those that are drawn; the tables have all."""
_LEFT, _BAR_WIDTH, _ROW, _BAR = 14, 330, 38, 12


def draw(outcome: Outcome) -> str:
    """Draw an SVG picture."""
    y = 28.0
    parts = [
        heading(_LEFT, y, "Gigabytes per second: a longer bar is better"),
        text(
            _LEFT,
            y + 22,
            f"{outcome.num_bytes / 1e9:.2f} GB on {outcome.num_ranks} ranks, median of "
            f"{outcome.num_runs}. Dashed: raw storage.",
            "soft",
            "start",
        ),
    ]
    y += 54
    for case in _CASES:
        figures = [
            figure for figure in outcome.cases().get(case, []) if "verify=" not in figure.name
        ]
        if not figures:
            continue
        parts.append(heading(_LEFT, y, outcome.title(case).partition(" (")[0]))
        parts += _case(figures, y + 8)
        y += _ROW * len(figures) + 44
    return document(
        "Speed of saves and loads, beside other libraries and the raw storage", y - 16, parts
    )


def _case(figures: Sequence[Figure], top: float) -> list[str]:
    raw = fastest_raw(figures)
    fastest = max(figure.gb_per_second for figure in figures)
    parts: list[str] = []
    if raw:
        at = _LEFT + _BAR_WIDTH * raw.gb_per_second / fastest
        parts.append(
            f'<path d="M{at:.1f} {top + 4}V{top + _ROW * len(figures)}" '
            'stroke="var(--raw)" stroke-dasharray="4 3"/>'
        )
    for row, figure in enumerate(figures):
        y = top + row * _ROW
        width = max(1.0, _BAR_WIDTH * figure.gb_per_second / fastest)
        colour = "raw" if not figure.is_checkpoint else "own" if is_own(figure) else "other"
        weight = "bold" if is_own(figure) else ""
        parts += [
            text(_LEFT, y + 18, figure.name, weight, "start"),
            f'<rect x="{_LEFT}" y="{y + 23:g}" width="{width:.1f}" height="{_BAR}" '
            f'rx="2" fill="var(--{colour})"/>',
            text(
                _LEFT + width + 8,
                y + 34,
                f"{figure.gb_per_second:.2f} GB/s",
                f"{weight} halo".strip(),
                "start",
            ),
        ]
    return parts

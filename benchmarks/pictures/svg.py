"""Parts of SVG pictures, in colours that follow the reader's theme.

A picture is 460 units wide and its smallest text 14 units high: about 11 pixels on a phone. Colours
are variables. They follow the system's theme where the picture is a file of its own, and the theme
of the site where it is part of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH = 460
_LIGHT = (
    "--ink:#1d2733;--soft:#4d5a68;--line:#8a97a6;--panel:#f1f4f8;--page:#ffffff;"
    "--a:#cfe3f8;--b:#d3eed8;--c:#fbe3bf;--d:#e8d8f5;--own:#2f6fb2;--other:#a9b4c0;--raw:#c98f1f"
)
_DARK = (
    "--ink:#e6eaf2;--soft:#aab4c3;--line:#6b7890;--panel:#262c3c;--page:#1e2129;"
    "--a:#1f4a78;--b:#1f5a38;--c:#6a4c13;--d:#54357a;--own:#5aa0ea;--other:#6b7686;--raw:#d9a441"
)
_STYLE = f"""\
<style>
.distckpt-picture{{{_LIGHT};max-width:100%;height:auto}}
@media (prefers-color-scheme:dark){{.distckpt-picture{{{_DARK}}}}}
[data-md-color-scheme=default] .distckpt-picture{{{_LIGHT}}}
[data-md-color-scheme=slate] .distckpt-picture{{{_DARK}}}
.distckpt-picture text{{fill:var(--ink)}}
.distckpt-picture .soft{{fill:var(--soft)}}
.distckpt-picture .halo{{paint-order:stroke;stroke:var(--page);stroke-width:4px}}
.distckpt-picture .bold{{font-weight:600}}
.distckpt-picture .code{{font-family:ui-monospace,Menlo,Consolas,monospace}}
</style>"""
_FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"


def document(title: str, height: float, parts: Sequence[str]) -> str:
    """Return a picture as a file."""
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" class="distckpt-picture" role="img" '
        f'viewBox="0 0 {WIDTH} {height:g}" '
        f'width="600" height="{600 * height / WIDTH:.0f}" font-family="{_FONT}" font-size="14">'
    )
    background = '<rect width="100%" height="100%" rx="6" fill="var(--page)"/>'
    return "\n".join(
        [head, f"<title>{escape(title)}</title>", _STYLE, background, *parts, "</svg>", ""]
    )


def text(
    x: float, y: float, content: str, classes: str = "", anchor: str = "middle", size: float = 14
) -> str:
    """Return a line of text; `y` is its base line."""
    of_class = f' class="{classes}"' if classes else ""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size:g}"{of_class}>'
        f"{escape(content)}</text>"
    )


def heading(x: float, y: float, content: str) -> str:
    """Return a line of text that stands above what it names."""
    return text(x, y, content, "bold", "start", 16)


def rect(
    x: float, y: float, width: float, height: float, fill: str = "panel", radius: float = 0
) -> str:
    """Return a rectangle in one of the colours."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
        f'fill="var(--{fill})" stroke="var(--line)"/>'
    )


def box(x: float, y: float, width: float, lines: Sequence[str], fill: str = "panel") -> str:
    """Return a box with a bold line, and others under it."""
    parts = [rect(x, y, width, 16 + 19 * len(lines), fill, radius=8)]
    parts += [
        text(x + width / 2, y + 22 + 19 * i, line, "soft" if i else "bold", size=14 if i else 15)
        for i, line in enumerate(lines)
    ]
    return "\n".join(parts)


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return an arrow along one axis."""
    dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    back_x, back_y = x2 - 8 * dx, y2 - 8 * dy
    tip = (
        f"M{back_x - 4 * dy:g} {back_y - 4 * dx:g}L{x2:g} {y2:g}"
        f"L{back_x + 4 * dy:g} {back_y + 4 * dx:g}"
    )
    return (
        f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}{tip}" '
        'stroke="var(--soft)" stroke-width="1.6" fill="none"/>'
    )

"""The pictures of the pages and the tables of README.md, drawn and laid out from docs/figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

from contest.figures import from_json
from pictures.chart import draw
from pictures.diagrams import DIAGRAMS
from report import markdown

BLOCK = re.compile(r"(?<=<!-- figures/)(\w+)(\.json -->\n).*?(?=<!-- end -->\n)", re.S)


def render(docs: Path, readme: Path) -> None:
    """Write docs/*.svg, and the README's text between the comments that name a file of figures."""
    figures = {
        path.stem: json.loads(path.read_text()) for path in (docs / "figures").glob("*.json")
    }
    blocks = {name: markdown(value) for name, value in figures.items()}
    readme.write_text(with_blocks(readme.read_text(), blocks))
    if "save_load" in figures:
        (docs / "storage.svg").write_text(draw(from_json(figures["save_load"]["outcome"])))
    for name, picture in DIAGRAMS.items():
        (docs / name).write_text(picture())


def with_blocks(page: str, blocks: dict[str, str]) -> str:
    """Replace what stands on a page between comments, or say that it was not measured."""

    def block(match: re.Match[str]) -> str:
        name, rest = match.groups()
        missing = f"Not measured yet: run `python benchmarks/run_all.py --only {name}`."
        return f"{name}{rest}\n{blocks.get(name, missing)}\n\n"

    return BLOCK.sub(block, page)

"""Draw the pictures of the pages, and bring the tables of docs/performance.md in line with docs/figures.

    python tests/benchmarks/save_load.py --dir DIR --gb 2 --ranks 2 --runs 7 --json docs/figures/save_load.json
    python tests/benchmarks/page.py [--docs docs]

Rewrites docs/*.svg, and the tables of docs/performance.md between the comments that name the file of figures.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from contest.figures import Figure, Outcome, tables
from pictures.chart import draw
from pictures.diagrams import DIAGRAMS

BEGIN, END = "<!-- figures/save_load.json by tests/benchmarks/page.py -->\n", "<!-- end -->\n"


def main() -> None:
    """Rewrite the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=Path(__file__).parents[2] / "docs", help="the folder of the pages")
    docs: Path = parser.parse_args().docs
    outcome = from_json(json.loads((docs / "figures" / "save_load.json").read_text()))
    page = docs / "performance.md"
    page.write_text(with_tables(page.read_text(), tables(outcome)))
    (docs / "storage.svg").write_text(draw(outcome))
    for name, picture in DIAGRAMS.items():
        (docs / name).write_text(picture())


def from_json(value: dict[str, Any]) -> Outcome:
    """Take back what save_load.py has written; what follows from the figures is computed again."""
    figures = [Figure(**{field: figure[field] for field in Figure._fields}) for figure in value["figures"]]
    return Outcome(**{**{field: value[field] for field in Outcome._fields}, "figures": figures})


def with_tables(page: str, text: str) -> str:
    """Replace what stands on a page between the two comments."""
    before, found_begin, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end):
        raise ValueError(f"the page lacks {BEGIN.strip()} or {END.strip()}")
    return f"{before}{BEGIN}\n{text}\n\n{END}{after}"


if __name__ == "__main__":
    main()

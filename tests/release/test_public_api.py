"""Public names and signatures change on purpose only."""

from __future__ import annotations

import difflib
from pathlib import Path

from tests.support.public_api import describe_public_api, public_modules

STORED = Path(__file__).with_name("public_api.txt")


def test_public_names_and_signatures_are_those_of_the_stored_list():
    text = describe_public_api()
    left_out = tuple(f"[{name}]" for name in public_modules() if f"[{name}]" not in text)
    sections = STORED.read_text().split("\n\n")
    kept = [section for section in sections if not section.startswith(left_out)]
    stored, found = "\n\n".join(kept).splitlines(), text.splitlines()
    changes = [
        line
        for line in difflib.unified_diff(stored, found, "stored", "found", lineterm="", n=1)
        if not line.isspace()
    ]
    assert changes == [], (
        "\n".join(changes)
        + "\nIs that on purpose? See docs/stability.md; then store it:\n"
        + "python -m tests.support.public_api > tests/release/public_api.txt"
    )

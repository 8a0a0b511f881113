"""Public names and signatures change on purpose only; what goes away warns first."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from distckpt._base.deprecation import deprecated, warn_deprecated
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


def test_a_deprecated_function_works_and_names_its_replacement():
    @deprecated(instead="`new`", since="1.2", removed_in="1.4")
    def old(value, *, times=1):
        """Return a product."""
        return value * times

    expected = r"old\(\) is deprecated since distckpt 1\.2 .* removed in 1\.4: use `new`\."
    with pytest.warns(FutureWarning, match=expected) as caught:
        assert old(2, times=3) == 6
    assert caught[0].filename == __file__
    assert old.__doc__ == "Return a product."


def test_a_deprecated_argument_is_reported_where_it_is_given():
    def load(path=None):
        if path is not None:
            warn_deprecated("`path` of `load`", instead="`uri`", since="1.2", removed_in="1.4")
        return path

    with pytest.warns(FutureWarning, match="`path` of `load`.*use `uri`") as caught:
        assert load(path="x") == "x"
    assert caught[0].filename == __file__

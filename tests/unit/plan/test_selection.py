"""Which tensors an export takes."""

from __future__ import annotations

import pytest

from distckpt._plan.selection import matches


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("!optimizer.", ["model.a", "model.b"]),
        (["!optimizer.", "!*.b"], ["model.a"]),
        (["model.", "!*.b"], ["model.a"]),
        ([], []),
    ],
)
def test_patterns_say_what_is_left_out(patterns, expected):
    keys = ["model.a", "model.b", "optimizer.a"]
    assert [key for key in keys if matches(key, patterns)] == expected

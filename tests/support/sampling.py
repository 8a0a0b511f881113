"""Cases of which the regular tests take some, and `-m slow` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(stride: int, cases: Iterable[Any], first: int = 0) -> list[Any]:
    """Return cases for `parametrize`, of which all but one in `stride`, from number `first` on, are
    marked as slow.
    """
    return [
        case if number % stride == first else pytest.param(case, marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]

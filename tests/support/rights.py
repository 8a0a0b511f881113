"""Doing something without the rights of root."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tests.support.harness import error_of

NOBODY = 65534


def as_nobody(rank: int, function: Callable[..., Any], *args: Any) -> BaseException | None:
    """On a rank: call a function as a user without rights; return the error it raises, if any."""
    del rank
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    return error_of(function, *args)

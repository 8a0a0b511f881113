"""Calls in the middle of other ones, as another program would make them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def as_another_program(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in a thread of its own: one thread cannot save in the middle of a save."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args, **kwargs).result()

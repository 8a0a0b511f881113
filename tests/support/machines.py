"""Ranks on one machine that take themselves to be on several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from distckpt._io import shared_read
from distckpt._move import host_memory


@contextlib.contextmanager
def on_machine(number: int) -> Iterator[None]:
    """Share memory and caches only with the ranks that are on a machine of the same number."""
    original = shared_read.host_number
    host_memory.host_number = shared_read.host_number = lambda: number
    try:
        yield
    finally:
        host_memory.host_number = shared_read.host_number = original

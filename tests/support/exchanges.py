"""Watching the exchanges of a rank with the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from distckpt._ranks import exchanges


@contextlib.contextmanager
def watching_exchanges(arrive) -> Iterator[None]:
    """Call `arrive(name)` whenever this rank is about to begin an exchange."""
    plain = exchanges.contact

    def watched(group, name, **options):
        arrive(name)
        return plain(group, name, **options)

    exchanges.contact = watched
    try:
        yield
    finally:
        exchanges.contact = plain

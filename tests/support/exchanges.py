"""Watching the exchanges of a rank with the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from distckpt._ranks.collectives import Ranks


@contextlib.contextmanager
def watching_exchanges(arrive) -> Iterator[None]:
    """Call `arrive(name)` whenever this rank is about to begin an exchange."""
    plain = Ranks._contact

    def watched(ranks, name, **options):
        arrive(name)
        return plain(ranks, name, **options)

    Ranks._contact = watched
    try:
        yield
    finally:
        Ranks._contact = plain

"""Pauses of Python's cyclic garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Keep the cyclic garbage collector from running.

    Planning makes many small tuples that all live on, and an import many objects. The collector
    would walk over them, and over all of torch's, again and again, which takes as long as the
    planning or the import itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

"""How many bytes a process asks the system for."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace


@contextlib.contextmanager
def counted_reads() -> Iterator[SimpleNamespace]:
    """Count the bytes that are read until the block ends, as the kernel counts them:
    `num_bytes`.
    """
    counts = SimpleNamespace(num_bytes=-rchar())
    try:
        yield counts
    finally:
        counts.num_bytes += rchar()


def rchar() -> int:
    match = re.search(r"^rchar: (\d+)$", Path("/proc/self/io").read_text(), re.M)
    assert match is not None
    return int(match[1])

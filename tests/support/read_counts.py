"""How many bytes a process asks the system for."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from distckpt._io import aio


@contextlib.contextmanager
def counted_reads() -> Iterator[SimpleNamespace]:
    """Count bytes until the block ends: `plain` by read and pread, `batched` by requests handed to `io_submit`.

    The kernel counts the former itself; the latter are read off the requests on their way to it.
    """
    counts = SimpleNamespace(plain=-rchar(), batched=0)
    system_call = aio._system_call

    def counting(name: str, *arguments: int) -> int:
        result = system_call(name, *arguments)
        if name == "submit" and result > 0:
            _, _, pointers = arguments
            for request in (ctypes.c_uint64 * result).from_address(pointers):
                counts.batched += ctypes.c_uint64.from_address(request + 32).value
        return result

    aio._system_call = counting
    try:
        yield counts
    finally:
        aio._system_call = system_call
        counts.plain += rchar()


def rchar() -> int:
    match = re.search(r"^rchar: (\d+)$", Path("/proc/self/io").read_text(), re.M)
    assert match is not None
    return int(match[1])

"""Tensors of returned collectives that gloo's threads still hold.

A thread lets go of a tensor a little later, and needs the interpreter's lock for that. Python
before 3.14 ends threads that wait for this lock while the process exits, which aborts the process.
So its exit waits for these threads.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from distckpt._base.lazy import torch
from distckpt._base.libc import keep_for_ever

SECONDS_TO_LET_GO = 5.0
"""Longest time that the exit waits."""

_lent: weakref.WeakKeyDictionary[Any, list[torch.Tensor]] = weakref.WeakKeyDictionary()
"""Gloo group, whose threads end with it -> tensors."""


@contextlib.contextmanager
def lent(group: Any, work: Any, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Wait in the body for a collective that works on tensors."""
    try:
        yield
    finally:
        if work.is_completed():
            _lent[group] = [*filter(_is_held, _lent.get(group, ())), *tensors]
        else:
            # It goes on without us. As long as the work is here, no thread of gloo is the last to
            # let go of tensors. The end of the group would wait for that thread.
            keep_for_ever([group, work, *tensors])


def _is_held(tensor: torch.Tensor) -> bool:
    """Return whether anything but Python holds a tensor.

    Some versions of torch do not tell.
    """
    return bool(getattr(tensor, "_use_count", lambda: 1)() > 1)


def _wait() -> None:
    deadline = time.monotonic() + SECONDS_TO_LET_GO
    while any(map(_is_held, itertools.chain(*_lent.values()))) and time.monotonic() < deadline:
        time.sleep(0.001)


# Exit functions run in the reverse order: this one after the functions of programs, which may save.
atexit.register(_wait)

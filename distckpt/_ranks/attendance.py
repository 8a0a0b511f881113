"""The roll of a process group: how many exchanges each of its ranks has come to, so that a lost one can be named."""

from __future__ import annotations

import contextlib
import time
from typing import Any

LATE_SECONDS = 2.0
"""So long a rank may take to come to an exchange that another one has found broken, and not be called absent."""


class AttendanceLog:
    """Notes of all ranks in the store through which they found each other.

    A note is sent and not waited for, which takes some microseconds. A store that is gone, since the process that held
    it is dead, perhaps, makes nobody fail: ranks have no names then.

    Args:
        store: shared by the ranks of one group and used for nothing else; None when there is none.
        rank: of this process.
        size: number of ranks.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._num_exchanges = 0

    def note(self) -> None:
        """Note that this rank comes to the next exchange, to which all ranks come in the same order."""
        self._num_exchanges += 1
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(str(self._rank), str(self._num_exchanges))

    def absent_ranks(self) -> list[int]:
        """Return the ranks that have come to fewer exchanges than any other, given that one has just failed here.

        A broken connection shows at once: ranks that are only late get some time to come.
        """
        # Whoever finds the exchange broken leaves it. So ranks that died in the middle of it are behind as well.
        self.note()
        deadline = time.monotonic() + LATE_SECONDS
        while True:
            counts = self._counts()
            fewest = min(counts, default=0)
            absent = [rank for rank, count in enumerate(counts) if count == fewest < self._num_exchanges]
            if not absent or time.monotonic() > deadline:
                return absent
            time.sleep(0.02)

    def _counts(self) -> list[int]:
        """Return how many exchanges each rank has come to; nothing when the store does not answer."""
        names = [str(rank) for rank in range(self._size)]
        if self._store is None:
            return []
        try:
            return [int(self._store.get(name)) if self._store.check([name]) else 0 for name in names]
        except RuntimeError:
            return []

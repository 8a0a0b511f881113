"""Progress of a call: bytes done, and bytes in total."""

from __future__ import annotations

import threading

from distckpt._base.options import Progress


class ProgressCounter:
    """Adds up the bytes that several threads have moved, and reports the sum.

    The sum never exceeds the total: reads may cover a little more than was requested.
    """

    def __init__(self, report: Progress | None, total_bytes: int) -> None:
        self._report = report
        self._total = total_bytes
        self._done = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count bytes that have been moved."""
        if self._report is None:
            return
        with self._lock:
            self._done = min(self._done + num_bytes, self._total)
            self._report(self._done, self._total)

    def finish(self) -> None:
        """Report the total, unless it has been reported."""
        if self._done < self._total:
            self.add(self._total - self._done)

"""Local files that stay open for reading.

Opening a file costs a round trip on a network file system.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from distckpt._storage.file_state import FileState, has_changed, written_to
from distckpt._storage.locations import naming

MAX_OPEN = 16
"""Maximum of unused open files: a checkpoint may have more files than a process may open."""
_MOST_OPEN = 1024


@dataclass
class _Opened:
    fd: int
    is_checked: bool = False


def _state_of(fd: int) -> FileState:
    return FileState.of_local(os.fstat(fd))


class OpenFiles:
    """Local files that several threads read; closed when the context ends.

    `decoded` is for `object_store.at`, until then. One that was set stays for later files, unless
    the body fails.

    No two threads read through one descriptor at a time: the system reads ahead for each
    descriptor, and less far where reads alternate between two places.
    """

    def __init__(self, max_open: int = MAX_OPEN) -> None:
        self._max_open = max_open
        self._unused: dict[str, list[_Opened]] = {}
        self._num_unused = 0
        self._checks: dict[str, threading.Lock] = {}
        self._checked: set[str] = set()
        self._lock = threading.Lock()
        self.decoded: dict[str, Any] = {}

    @classmethod
    def for_many_reads(cls) -> OpenFiles:
        """Return files for many reads that come back to the same ones.

        More of them stay open, as far as the system allows.
        """
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY:
            return cls(_MOST_OPEN)
        return cls(max(MAX_OPEN, min(limit // 4, _MOST_OPEN)))

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A file that is put back later is closed at once.
        self._max_open = 0
        if error is not None:
            self.decoded.clear()
        for memory in list(self.decoded.values()):
            memory.settle()
        self.decoded = {}
        self._close_unused(self._num_unused)

    def check_once(self, file: str, check: Callable[[], None]) -> None:
        """Check a file, perhaps a remote one, unless that has been done.

        Other threads wait for the one that does it.
        """
        with self._lock:
            lock = self._checks.setdefault(file, threading.Lock())
        with lock:
            if file not in self._checked:
                check()
                self._checked.add(file)

    @contextlib.contextmanager
    def open(self, file: str, state: FileState | None = None) -> Iterator[int]:
        """Yield a descriptor of a file; the body's system errors name it.

        A file that is not in the given state any more, when it is opened, is refused: its name may
        stand for another one now, and for the first one again at the next look.
        """
        opened = self._take(file) or _Opened(self._open(file))
        try:
            with naming(file):
                if state is not None and not opened.is_checked:
                    look = partial(_state_of, opened.fd)
                    if has_changed(state, look(), look):
                        raise written_to(file)
                    opened.is_checked = True
                yield opened.fd
        finally:
            self._put_back(file, opened)

    def _take(self, file: str) -> _Opened | None:
        """Return an unused descriptor, or None."""
        with self._lock:
            unused = self._unused.get(file)
            if not unused:
                return None
            self._num_unused -= 1
            return unused.pop()

    def _put_back(self, file: str, opened: _Opened) -> None:
        with self._lock:
            # The files that were used longest ago come first.
            self._unused[file] = [*self._unused.pop(file, ()), opened]
            self._num_unused += 1
        self._close_unused(self._num_unused - self._max_open)

    def _open(self, file: str) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            return os.open(file, flags)
        except OSError as error:
            # The program may have opened many other files meanwhile.
            if error.errno != errno.EMFILE or not self._close_unused(self._num_unused):
                raise
            return os.open(file, flags)

    def _close_unused(self, max_closed: int) -> int:
        """Close the files that were used longest ago; return their number."""
        if max_closed <= 0:
            # Nearly always, so without the lock.
            return 0
        closed: list[_Opened] = []
        with self._lock:
            while len(closed) < max_closed and self._unused:
                file = next(iter(self._unused))
                closed += self._unused.pop(file)
            self._num_unused -= len(closed)
        for opened in closed:
            # The bytes that were read have been compared already: an error of closing says nothing
            # about them.
            with contextlib.suppress(OSError):
                os.close(opened.fd)
        return len(closed)

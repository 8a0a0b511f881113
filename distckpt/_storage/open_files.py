"""Local files: kept open for reading, since opening one costs a round trip on a network file
system.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from distckpt._storage.file_state import FileState, has_changed, written_to
from distckpt._storage.locations import naming

MAX_OPEN = 16
"""Unused files that are kept open; a checkpoint may have more files than a process may open."""
_MOST_OPEN = 1024


class _Opened:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.num_users = 0
        self.is_checked = False


class OpenFiles:
    """Local files that several threads read; closed when the context ends."""

    def __init__(self, max_open: int = MAX_OPEN) -> None:
        self._max_open = max_open
        self._opened: dict[str, _Opened] = {}
        self._checks: dict[str, threading.Lock] = {}
        self._checked: set[str] = set()
        self._lock = threading.Lock()

    @classmethod
    def for_many_reads(cls) -> OpenFiles:
        """Return files for many reads that come back to the same ones: more of them stay open, as
        far as the system allows.
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
        for opened in self._opened.values():
            _close(opened.fd)
        self._opened.clear()

    def check_once(self, file: str, check: Callable[[], None]) -> None:
        """Check a file, perhaps a remote one, unless that has been done; others wait for the thread
        that does it.
        """
        with self._lock:
            lock = self._checks.setdefault(file, threading.Lock())
        with lock:
            if file not in self._checked:
                check()
                self._checked.add(file)

    @contextlib.contextmanager
    def open(self, file: str, state: FileState | None = None) -> Iterator[int]:
        """Yield a descriptor of a file; errors of the system in the body name the file.

        A file that is not in the given state any more, when it is opened, is refused: its name may
        stand for another one now, and for the first one again when somebody looks next.
        """
        with self._lock:
            opened = self._opened.pop(file, None) or _Opened(self._open(file))
            # Those that were used longest ago come first.
            self._opened[file] = opened
            opened.num_users += 1
        try:
            with naming(file):
                if state is not None and not opened.is_checked:
                    self._check_state(file, opened.fd, state)
                    opened.is_checked = True
                yield opened.fd
        finally:
            with self._lock:
                opened.num_users -= 1
                self._close_unused(max(0, len(self._opened) - self._max_open))

    @staticmethod
    def _check_state(file: str, fd: int, state: FileState) -> None:
        def look() -> FileState:
            return FileState.of_local(os.fstat(fd))

        if has_changed(state, look(), look):
            raise written_to(file)

    def _open(self, file: str) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            return os.open(file, flags)
        except OSError as error:
            # The program may have opened many others meanwhile.
            if error.errno != errno.EMFILE or not self._close_unused(len(self._opened)):
                raise
            return os.open(file, flags)

    def _close_unused(self, max_closed: int) -> int:
        """Close files that were used longest ago, and return how many there were."""
        if not max_closed:
            # Mostly; and there may be many files.
            return 0
        unused = [name for name, other in self._opened.items() if not other.num_users][:max_closed]
        for name in unused:
            _close(self._opened.pop(name).fd)
        return len(unused)


def _close(fd: int) -> None:
    # What was read has been compared already: an error of closing says nothing about it.
    with contextlib.suppress(OSError):
        os.close(fd)

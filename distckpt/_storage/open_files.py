"""Local files: kept open for reading, since opening one costs a round trip on a network file system."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from distckpt._base.memory import Bytes
from distckpt._storage.locations import naming

MAX_OPEN = 16
"""So many unused files are kept open at most; a checkpoint may have more than a process may have open."""
_MOST_OPEN = 1024


class _Opened:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.num_users = 0


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
        """Return files for many reads that come back to the same ones: more of them stay open, if the system allows."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return cls(_MOST_OPEN if limit == resource.RLIM_INFINITY else max(MAX_OPEN, min(limit // 4, _MOST_OPEN)))

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for opened in self._opened.values():
            _close(opened.fd)
        self._opened.clear()

    def check_once(self, file: str, check: Callable[[], None]) -> None:
        """Check a file, a remote one perhaps, unless that has been done; others wait for the thread that does it."""
        with self._lock:
            lock = self._checks.setdefault(file, threading.Lock())
        with lock:
            if file not in self._checked:
                check()
                self._checked.add(file)

    @contextlib.contextmanager
    def open(self, file: str) -> Iterator[int]:
        """Yield a descriptor of a file; errors of the system in the body name the file."""
        with self._lock:
            opened = self._opened.pop(file, None) or _Opened(self._open(file))
            # Those that were used longest ago come first.
            self._opened[file] = opened
            opened.num_users += 1
        try:
            with naming(file):
                yield opened.fd
        finally:
            with self._lock:
                opened.num_users -= 1
                self._close_unused(max(0, len(self._opened) - self._max_open))

    def _open(self, file: str) -> int:
        try:
            return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            # The program may have opened many others meanwhile.
            if error.errno != errno.EMFILE or not self._close_unused(len(self._opened)):
                raise
            return os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    def _close_unused(self, max_closed: int) -> int:
        """Close files that were used longest ago, and return how many there were."""
        # Mostly there is nothing to do, and there may be many files.
        unused = [name for name, other in self._opened.items() if not other.num_users] if max_closed else []
        for name in unused[:max_closed]:
            _close(self._opened.pop(name).fd)
        return len(unused[:max_closed])


def _close(fd: int) -> None:
    # What was read has been compared already: an error of closing says nothing about it.
    with contextlib.suppress(OSError):
        os.close(fd)


def read_into(fd: int, buffers: list[Bytes], position: int) -> int:
    """Fill buffers from a position of a file on; returns how many bytes there were."""
    wanted = sum(map(len, buffers))
    got = more = os.preadv(fd, buffers, position)
    while got < wanted and more:
        # A short read: a signal or a network file system; go on until the bytes or the file end.
        more = os.preadv(fd, _after(buffers, got), position + got)
        got += more
    return got


def _after(buffers: list[Bytes], num_bytes: int) -> list[Bytes]:
    """Return what is left of some buffers when the first bytes are filled."""
    rest = []
    for buffer in buffers:
        if len(buffer) > num_bytes:
            rest.append(buffer[num_bytes:])
        num_bytes = max(0, num_bytes - len(buffer))
    return rest


def allocate(fd: int, num_bytes: int) -> None:
    """Reserve disk space for a file, so that a full disk is found before anything is written.

    Uses the system call and not posix_fallocate, which writes zeros where the file system cannot reserve.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if num_bytes == 0 or not hasattr(libc, "fallocate"):
        return
    if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))

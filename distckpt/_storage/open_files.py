"""Local files: kept open for reading, since opening one costs a round trip on a network file
system.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import threading
from collections.abc import Callable, Collection, Iterator
from types import TracebackType

from distckpt._base.device import DeviceLayer
from distckpt._base.memory import ALIGNMENT, Bytes, bounce_buffer
from distckpt._storage.locations import naming
from distckpt._storage.page_cache import cached_fraction, mark_as_read

MAX_OPEN = 16
"""So many unused files are kept open at most; a checkpoint may have more than a process may have
open.
"""
_MOST_OPEN = 1024


class _Opened:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.num_users = 0


class OpenFiles:
    """Local files that several threads read; closed when the context ends.

    Attributes:
        direct: those of which `read_directly` reads what is not in memory.
    """

    def __init__(self, max_open: int = MAX_OPEN, direct: Collection[str] = ()) -> None:
        self.direct = direct
        self._max_open = max_open
        self._opened: dict[tuple[str, int], _Opened] = {}
        self._checks: dict[str, threading.Lock] = {}
        self._checked: set[str] = set()
        self._lock = threading.Lock()

    @classmethod
    def for_many_reads(cls, direct: Collection[str] = ()) -> OpenFiles:
        """Return files for many reads that come back to the same ones: more of them stay open, if
        the system allows.
        """
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = (
            _MOST_OPEN
            if limit == resource.RLIM_INFINITY
            else max(MAX_OPEN, min(limit // 4, _MOST_OPEN))
        )
        return cls(most, direct)

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
        """Check a file, a remote one perhaps, unless that has been done; others wait for the thread
        that does it.
        """
        with self._lock:
            lock = self._checks.setdefault(file, threading.Lock())
        with lock:
            if file not in self._checked:
                check()
                self._checked.add(file)

    @contextlib.contextmanager
    def open(self, file: str, flags: int = 0) -> Iterator[int]:
        """Yield a descriptor of a file; errors of the system in the body name the file."""
        with self._lock:
            opened = self._opened.pop((file, flags), None) or _Opened(self._open(file, flags))
            # Those that were used longest ago come first.
            self._opened[file, flags] = opened
            opened.num_users += 1
        try:
            with naming(file):
                yield opened.fd
        finally:
            with self._lock:
                opened.num_users -= 1
                self._close_unused(max(0, len(self._opened) - self._max_open))

    def read_directly(
        self, file: str, position: int, num_bytes: int, device: DeviceLayer | None = None
    ) -> Bytes | None:
        """Read past the page cache into this thread's scratch memory for reads (see
        `bounce_buffer`), and return it.

        None for other files than `direct`, and where it is better to read as usual: when the bytes
        are in memory, or for the error.
        """
        if file not in self.direct:
            return None
        first = position // ALIGNMENT * ALIGNMENT
        lead = position - first
        try:
            with self.open(file) as fd:
                if cached_fraction(fd, position, num_bytes) > 0.5:
                    return None
            with self.open(file, os.O_DIRECT) as fd:
                window = bounce_buffer(
                    "read", -(-(lead + num_bytes) // ALIGNMENT) * ALIGNMENT, device
                )
                # The system writes to disk first what was changed in memory.
                num_read = os.preadv(fd, [window], first)
        except OSError:
            return None
        return window[lead : lead + num_bytes] if num_read >= lead + num_bytes else None

    def _open(self, file: str, flags: int) -> int:
        flags |= os.O_RDONLY | os.O_CLOEXEC
        try:
            fd = os.open(file, flags)
        except OSError as error:
            # The program may have opened many others meanwhile.
            if error.errno != errno.EMFILE or not self._close_unused(len(self._opened)):
                raise
            fd = os.open(file, flags)
        if file in self.direct:
            mark_as_read(fd)
        return fd

    def _close_unused(self, max_closed: int) -> int:
        """Close files that were used longest ago, and return how many there were."""
        # Mostly there is nothing to do, and there may be many files.
        unused = (
            [name for name, other in self._opened.items() if not other.num_users]
            if max_closed
            else []
        )
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

    Uses the system call and not posix_fallocate, which writes zeros where the file system cannot
    reserve.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if num_bytes == 0 or not hasattr(libc, "fallocate"):
        return
    if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))

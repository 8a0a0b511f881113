"""Local files: kept open for reading, since opening one costs a round trip on a network file
system; and which of them are read past the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from types import TracebackType

from distckpt._base.libc import ALIGNMENT, DIRECT, cached_fraction, fetch, read_aligned
from distckpt._base.memory import Bytes, DeviceLayer, bounce_buffer
from distckpt._storage.locations import naming

MAX_OPEN = 16
"""Unused files that are kept open; a checkpoint may have more files than a process may open."""
MIN_DIRECT_BYTES = 32 << 20
"""Smaller files go through the page cache, as does a load of which no rank reads as much."""
_MOST_OPEN = 1024


class _Opened:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.num_users = 0


class OpenFiles:
    """Local files that several threads read; closed when the context ends.

    Attributes:
        direct: files of which `read_directly` reads what is not in memory.
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
        """Return files for many reads that come back to the same ones: more of them stay open, as
        far as the system allows.
        """
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY:
            return cls(_MOST_OPEN, direct)
        return cls(max(MAX_OPEN, min(limit // 4, _MOST_OPEN)), direct)

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

        None for files that are not `direct`, and where it is better to read as usual: if the bytes
        are in memory, or if that will raise an error.
        """
        if file not in self.direct:
            return None
        first = position // ALIGNMENT * ALIGNMENT
        lead = position - first
        try:
            with self.open(file) as fd:
                if cached_fraction(fd, position, num_bytes) > 0.5:
                    return None
            with self.open(file, DIRECT) as fd:
                size = -(-(lead + num_bytes) // ALIGNMENT) * ALIGNMENT
                window = bounce_buffer("read", size, device)
                # The system first writes to disk what was changed in memory.
                num_read = read_aligned(fd, window, first)
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
            _mark_as_read(fd)
        return fd

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


# --- Past the page cache --------------------------------------------------------------------------


def may_be_read_directly(path: str) -> bool:
    """Tell whether a large file on a disk of this machine was not read yet, as far as the page
    cache remembers.

    Reading such a file past the page cache leaves a mark in the cache, so that the file goes
    through it when it is read a second time, and comes from memory the third time.
    """
    try:
        status = os.stat(path)
        if not _is_large_on_disk(status):
            return False
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not cached_fraction(fd, status.st_size // 2, 1)
    finally:
        os.close(fd)


def _is_large_on_disk(status: os.stat_result) -> bool:
    # File systems without a block device below them are network file systems, or in memory.
    is_on_disk = stat.S_ISREG(status.st_mode) and os.major(status.st_dev) != 0
    return bool(DIRECT and is_on_disk and status.st_size >= MIN_DIRECT_BYTES)


def _mark_as_read(fd: int) -> None:
    """Bring the page in the middle of a file into the page cache."""
    fetch(fd, os.fstat(fd).st_size // 2, 1)

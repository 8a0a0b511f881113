"""Every file-system call that this process makes below a folder: numbered, described, and open to
interference.

    def on_call(call, moment):
        if call.number == 7 and moment == "before":
            raise OSError(errno.ENOSPC, "No space left on device")

    with watched(folder, on_call):
        distckpt.save(state, folder / "checkpoint")

The real calls are made on real files. What distckpt uses to reach them is wrapped: the functions of
`os`, the built-in `open`, and `renameat2` and `fallocate` of libc. `test_calls.py` compares with
strace.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import io
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import pytest

from distckpt._base import libc

Moment: TypeAlias = Literal["before", "after"]

BY_PATH = (
    "open", "mkdir", "unlink", "remove", "rmdir", "truncate", "chmod", "chown", "listdir",
    "scandir", "stat", "lstat",
)  # fmt: skip
BY_TWO_PATHS = ("rename", "replace", "link", "symlink")
READS = ("read", "pread", "readv", "preadv")
WRITES = ("write", "pwrite", "writev", "pwritev")
BY_DESCRIPTOR = (
    "close",
    *READS,
    *WRITES,
    "fsync",
    "fdatasync",
    "ftruncate",
    "posix_fallocate",
    "sendfile",
)
BY_LIBC = ("renameat2", "fallocate")

_READ_ONLY = {"listdir", "scandir", "stat", "lstat", "close", *READS}
_NONCE = re.compile(r"(?<![0-9a-f])[0-9a-f]{16}(?![0-9a-f])")
_FLAGS = {
    "r": os.O_RDONLY,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
}


class Call(NamedTuple):
    """One call.

    Attributes:
        number: from 1, in the order in which calls below the folder begin.
        name: of the function of `os`, or `renameat2`, `fallocate`.
        paths: what it is about, relative to the folder (`.` is the folder); a descriptor stands for
            its file.
        fd: the descriptor it was given, -1 if none.
        flags: of `open` and `renameat2`.
        offset: the first byte in the file that is read or written.
        length: bytes asked for or given; the new size for `truncate` and `ftruncate`.
        buffers: what is written, valid while `on_call` runs: see `data`.
        started: nanoseconds of a clock that all processes of the machine share.
        outcome: after the call, what it returned, or the OSError it raised.
    """

    number: int
    name: str
    paths: tuple[str, ...]
    fd: int = -1
    flags: int = 0
    offset: int = 0
    length: int = 0
    buffers: Sequence[Any] = ()
    started: int = 0
    outcome: Any = None

    @property
    def data(self) -> bytes:
        """What is written, copied."""
        return b"".join(bytes(view_of(buffer)) for buffer in self.buffers)

    @property
    def changes_something(self) -> bool:
        """Whether a crash before and one after this call can leave different files, or make
        different ones durable.
        """
        if self.name == "open":
            return bool(self.flags & (os.O_CREAT | os.O_TRUNC))
        return self.name not in _READ_ONLY

    @property
    def failed(self) -> bool:
        return isinstance(self.outcome, OSError)

    def __str__(self) -> str:
        """Say what is called on what, the same in every run: random parts of names are shown as
        `*`.
        """
        size = f" {self.length} bytes at {self.offset}" if self.name in {*READS, *WRITES} else ""
        return f"{self.name} {' '.join(_NONCE.sub('*', path) for path in self.paths)}{size}"


OnCall: TypeAlias = Callable[[Call, Moment], "int | None"]
"""Called before and after each call, one call at a time; what it does to files itself is not
watched.

It may raise an OSError: before, and the call is not made (but a close does close); after, and the
caller believes that it failed. Before a read or write it may return how many bytes are moved at
most. It may kill the process.
"""


@contextlib.contextmanager
def watched(folder: str | os.PathLike[str], on_call: OnCall) -> Iterator[None]:
    """Have every file-system call below a folder that this process makes, in any thread, go through
    `on_call`.
    """
    watch = _Watch(os.path.abspath(folder), on_call)
    with pytest.MonkeyPatch.context() as patch:
        for name in (*BY_PATH, *BY_TWO_PATHS, *BY_DESCRIPTOR):
            patch.setattr(os, name, watch.wrap(name, getattr(os, name)))
        patch.setattr(builtins, "open", functools.partial(_open, watch, open))
        patch.setattr(libc, "_libc", _Libc(watch, libc._libc))
        yield


@contextlib.contextmanager
def recorded(folder: str | os.PathLike[str]) -> Iterator[list[Call]]:
    """Collect the calls that were made below a folder, with copies of what they wrote."""
    calls: list[Call] = []

    def take_note(call: Call, moment: Moment) -> None:
        if moment == "before":
            calls.append(call._replace(buffers=(call.data,)))
        else:
            # Calls are made one at a time, so this is the one that was noted last.
            calls[-1] = calls[-1]._replace(outcome=call.outcome if call.name != "scandir" else None)

    with watched(folder, take_note):
        yield calls


def view_of(buffer: Any) -> memoryview:
    """Return any buffer as flat bytes."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


class _Watch:
    """Which descriptors are below the folder, and who is told of calls."""

    def __init__(self, folder: str, on_call: OnCall) -> None:
        self._folder, self._on_call = folder, on_call
        self._fds: set[int] = set()
        self._number = 0
        self._lock = threading.Lock()
        self._local = threading.local()

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands in for a function of `os`."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            call = None if self.is_busy else self._describe(name, args, kwargs)
            if call is None:
                return function(*args, **kwargs)
            return self.make(call, lambda limit: function(*_limited(call, args, limit), **kwargs))

        return wrapped

    @property
    def is_busy(self) -> bool:
        """Whether this thread is inside a call already."""
        return getattr(self._local, "is_busy", False)

    def is_below(self, path: Any) -> bool:
        """Tell whether a path or descriptor is below the folder, or the folder."""
        if isinstance(path, int):
            return path in self._fds
        text = os.path.abspath(os.fsdecode(path))
        return text == self._folder or text.startswith(self._folder + os.sep)

    def relative(self, path: Any) -> str:
        """Return the path of what a path or descriptor stands for."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}").removesuffix(" (deleted)")
        path = os.path.abspath(os.fsdecode(path))
        return os.path.relpath(path, self._folder) if self.is_below(path) else path

    def make(self, call: Call, function: Callable[[int | None], Any]) -> Any:
        """Make a call, telling `on_call` before and after it. `function` is given how many bytes to
        move at most.
        """
        with self._lock:
            self._number += 1
            call = call._replace(number=self._number, started=time.monotonic_ns())
            self._local.is_busy = True
            try:
                return self._make(call, function)
            finally:
                self._local.is_busy = False

    def _make(self, call: Call, function: Callable[[int | None], Any]) -> Any:
        try:
            limit = self._on_call(call, "before")
        except OSError:
            if call.name == "close":
                # Linux closes the descriptor whatever it reports.
                self._fds.discard(call.fd)
                function(None)
            raise
        if call.name == "close":
            self._fds.discard(call.fd)
        try:
            result = function(limit)
        except OSError as error:
            self._on_call(call._replace(outcome=error), "after")
            raise
        if call.name == "open":
            self._fds.add(result)
        try:
            self._on_call(call._replace(outcome=result), "after")
        except OSError:
            if call.name == "open":
                # Nobody will close what nobody knows of.
                self._fds.discard(result)
                os.close(result)
            raise
        return result

    def _describe(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
        """Describe a call of a function of `os`; None when it is about something else."""
        if name in BY_TWO_PATHS:
            return self._describe_two_paths(name, args[0], args[1])
        path = args[0] if args else kwargs.get("path", ".")
        if isinstance(kwargs.get("dir_fd"), int):
            if not self.is_below(kwargs["dir_fd"]):
                return None
            path = os.path.join(self._folder, self.relative(kwargs["dir_fd"]), os.fsdecode(path))
        if not self.is_below(path):
            return None
        call = Call(0, name, (self.relative(path),), path if isinstance(path, int) else -1)
        if name == "open":
            return call._replace(flags=args[1])
        if name in ("truncate", "ftruncate"):
            return call._replace(length=args[1])
        if name == "posix_fallocate":
            return call._replace(offset=args[1], length=args[2])
        return _describe_moving(call, args)

    def _describe_two_paths(self, name: str, source: Any, target: Any) -> Call | None:
        if not (self.is_below(source) or self.is_below(target)):
            return None
        # What a symbolic link says is a text, and no path that the call is about.
        paths = (target,) if name == "symlink" else (source, target)
        return Call(0, name, tuple(map(self.relative, paths)))


def _describe_moving(call: Call, args: Sequence[Any]) -> Call:
    """Add where a read or write begins and how many bytes it is about."""
    if call.name == "sendfile":
        return call._replace(offset=os.lseek(call.fd, 0, os.SEEK_CUR), length=args[3])
    if call.name not in READS + WRITES:
        return call
    is_placed = call.name.startswith("p")
    offset = args[2] if is_placed else os.lseek(call.fd, 0, os.SEEK_CUR)
    if call.name in ("read", "pread"):
        return call._replace(offset=offset, length=args[1])
    buffers = list(args[1]) if call.name.endswith("v") else [args[1]]
    length = sum(memoryview(buffer).nbytes for buffer in buffers)
    return call._replace(
        offset=offset, length=length, buffers=buffers if call.name in WRITES else ()
    )


def _limited(call: Call, args: Sequence[Any], limit: int | None) -> Sequence[Any]:
    """Make the arguments of a read or write ask for fewer bytes."""
    if limit is None or call.name not in READS + WRITES:
        return args
    if call.name in ("read", "pread"):
        return (args[0], min(args[1], limit), *args[2:])
    if not call.name.endswith("v"):
        return (args[0], view_of(args[1])[:limit], *args[2:])
    kept = []
    for buffer in args[1]:
        kept.append(view_of(buffer)[: max(0, limit)])
        limit -= len(kept[-1])
    return (args[0], kept, *args[2:])


# --- What goes past the functions of `os` ---------------------------------------------------------


class _File(io.RawIOBase):
    """A file that the built-in `open` opened, whose calls go through `os`."""

    def __init__(self, path: Any, mode: str) -> None:
        (kind,) = set(mode) & set(_FLAGS)
        flags = _FLAGS[kind]
        if "+" in mode:
            flags = flags & ~os.O_WRONLY | os.O_RDWR
        self._fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
        self.name, self.mode = path, mode

    def fileno(self) -> int:
        return self._fd

    def readable(self) -> bool:
        return "r" in self.mode or "+" in self.mode

    def writable(self) -> bool:
        return "r" not in self.mode or "+" in self.mode

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return os.readv(self._fd, [buffer])

    def readall(self) -> bytes:
        rest = os.fstat(self._fd).st_size - os.lseek(self._fd, 0, os.SEEK_CUR)
        parts = [os.read(self._fd, max(0, rest) + 1)]
        while parts[-1]:
            parts.append(os.read(self._fd, max(1, rest + 1 - sum(map(len, parts)))))
        return b"".join(parts)

    def write(self, data: Any) -> int:
        return os.write(self._fd, data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return os.lseek(self._fd, offset, whence)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        os.ftruncate(self._fd, size)
        return size

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)


def _open(
    watch: _Watch,
    original: Any,
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if isinstance(file, int) or watch.is_busy or not watch.is_below(file):
        return original(file, mode, buffering, *args, **kwargs)
    raw = _File(file, mode)
    if buffering == 0:
        return raw
    buffered = (
        io.BufferedRandom
        if "+" in mode
        else io.BufferedReader
        if "r" in mode
        else io.BufferedWriter
    )(raw)
    return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **kwargs)


class _Libc:
    """The C library, in which the calls that distckpt makes by their C names are watched."""

    def __init__(self, watch: _Watch, library: Any) -> None:
        self._watch, self._library = watch, library

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        return functools.partial(self._call, name, function) if name in BY_LIBC else function

    def _call(self, name: str, function: Any, *args: Any) -> int:
        watch = self._watch
        place = args[1] if name == "renameat2" else args[0]
        if watch.is_busy or not watch.is_below(place):
            return int(function(*args))
        if name == "renameat2":
            call = Call(0, name, (watch.relative(args[1]), watch.relative(args[3])), flags=args[4])
        else:
            first, length = (value.value for value in args[2:4])
            call = Call(0, name, (watch.relative(args[0]),), args[0], offset=first, length=length)

        def raising(_: int | None) -> int:
            if function(*args) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            return 0

        try:
            return int(watch.make(call, raising))
        except OSError as error:
            ctypes.set_errno(error.errno or 0)
            return -1

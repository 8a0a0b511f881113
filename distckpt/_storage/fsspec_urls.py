"""URLs of fsspec's file systems, such as `memory://` and those of users, with requests repeated while that may help."""

from __future__ import annotations

import contextlib
import errno
import inspect
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import fsspec
import fsspec.asyn
import fsspec.spec
import xxhash
from fsspec.implementations.memory import MemoryFileSystem

from distckpt._base.memory import Bytes
from distckpt._storage.remote import RemoteLocation, fill, too_large

logger = logging.getLogger(__name__)

_ATTEMPTS = 4
_FIRST_DELAY = 0.25
"""Seconds before the second attempt, twice as long before each further one, less a random half."""
_TEMPORARY_ERRNOS = {
    errno.EIO, errno.EBUSY, errno.EAGAIN, errno.EPIPE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED,
    errno.ECONNABORTED, getattr(errno, "EREMOTEIO", errno.EIO),
}  # fmt: skip
_TEMPORARY_STATUSES = {"408", "429", "500", "502", "503", "504"}
"""Of HTTP: busy, or broken for a moment."""
_TEMPORARY_CLASSES = {
    "ConnectionError", "TimeoutError", "IncompleteRead", "ClientConnectionError", "ClientPayloadError",
    "ServiceRequestError", "ServiceResponseError",
}  # fmt: skip
"""By name, wherever they are defined: file systems of fsspec bring their own, and are not imported here."""

_Result = TypeVar("_Result")
_lock = threading.Lock()
"""Of file systems without conditional writes: at least the threads of this process take turns."""


def settings_of(protocol: str) -> Mapping[str, Any]:
    """Return what the user has configured in fsspec for a protocol."""
    return dict(fsspec.config.conf.get(protocol, {}))


class FsspecLocation(RemoteLocation):
    """A URL that fsspec serves; ImportError when the library that its file system needs is not installed."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        try:
            self._fs, self._path = fsspec.core.url_to_fs(location)
        except ImportError as error:
            raise ImportError(f"{location}: {error}") from error

    @property
    def has_create(self) -> bool:  # type: ignore[override]
        fs = self._fs
        put = type(fs)._pipe_file if isinstance(fs, fsspec.asyn.AsyncFileSystem) else type(fs).pipe_file
        # Those without conditional writes have the function of a base class, or one without the argument.
        is_own = put not in (fsspec.asyn.AsyncFileSystem._pipe_file, fsspec.AbstractFileSystem.pipe_file)
        return is_own and "mode" in inspect.signature(put).parameters

    @property
    def has_replace(self) -> bool:  # type: ignore[override]
        # One process has it to itself.
        return isinstance(self._fs, MemoryFileSystem)

    def kind(self) -> Literal["file", "directory"] | None:
        try:
            return "directory" if self._request(self._fs.info)["type"] == "directory" else "file"
        except FileNotFoundError:
            return None

    def list_names(self) -> list[str]:
        entries = self._request(lambda path: self._fs.ls(path, detail=False))
        return sorted(entry.rstrip("/").rpartition("/")[2] for entry in entries)

    def list_files(self) -> list[str]:
        def find(path: str) -> list[str]:
            start = path.rstrip("/") + "/"
            return sorted(name[len(start) :] for name in self._walk(start) if name.startswith(start))

        return self._request(find)

    def _walk(self, start: str) -> Iterator[str]:
        """Yield the paths of all files below a prefix. `fs.find` leaves out silently what it could not list."""
        with contextlib.suppress(FileNotFoundError):
            for entry in self._fs.ls(start, detail=True):
                name = entry["name"].rstrip("/") + "/"
                if entry["type"] == "directory" and name != start:
                    yield from self._walk(name)
                elif entry["type"] != "directory":
                    yield entry["name"]

    def size(self) -> int:
        return int(self._request(self._fs.size))

    def read(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and self.size() > max_bytes:
            raise too_large(max_bytes, self.location)
        return bytes(self._request(self._fs.cat_file))

    def read_into(self, start: int, buffers: Sequence[Bytes]) -> int:
        wanted = sum(len(buffer) for buffer in buffers)

        def fetch(path: str) -> int:
            got = fill(buffers, self._fs.cat_file(path, start=start, end=start + wanted))
            if got < wanted and start + got < self._fs.size(path):
                raise OSError(errno.EIO, f"{got} bytes came, {wanted} were requested")
            return got

        return self._request(fetch) if wanted else 0

    def write(self, data: bytes) -> None:
        self._request(lambda path: self._fs.pipe_file(path, data))

    def write_stream(self, content: Callable[[], Iterable[bytes]], num_bytes: int, num_requests: int) -> None:
        error = self._request(lambda path: self._stream(path, iter(content())))
        try:
            if error is not None:
                raise error
        finally:
            # It refers to this frame: a circle would keep what the content is made of.
            del error

    def _stream(self, path: str, pieces: Iterator[bytes]) -> Exception | None:
        """Put pieces into a new file; returns an error of the pieces, for which there is no use in another attempt."""
        stream = self._fs.open(path, "wb")
        try:
            while True:
                try:
                    piece = next(pieces, None)
                except Exception as error:
                    _discard(stream)
                    return error
                if piece is None:
                    break
                stream.write(memoryview(piece))
            stream.close()
        except FileNotFoundError as error:
            # Of an upload that is gone: its file system has repeated a request that was carried out.
            _discard(stream)
            raise OSError(errno.EIO, str(error)) from error
        except BaseException:
            _discard(stream)
            raise
        return None

    def open_for_writing(self) -> Any:
        return self._fs.open(self._path, "wb")

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._request(self._fs.rm_file)

    def version(self) -> Any:
        with contextlib.suppress(FileNotFoundError):
            return _digest(self._request(self._fs.cat_file))
        return None

    def _put_if(self, known_version: Any, data: bytes) -> bool:
        if known_version is None and self.has_create:
            try:
                self._request(lambda path: self._fs.pipe_file(path, data, mode="create"))
            except FileExistsError:
                return False
            return True
        with _lock:
            if self.version() != known_version:
                return False
            self.write(data)
            return True

    def _request(self, make: Callable[[str], _Result]) -> _Result:
        """Make a request, again after a while as long as the reason of its failure may be temporary."""
        delay = _FIRST_DELAY
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._fs.invalidate_cache()
                return make(self._path)
            except Exception as error:
                if attempt == _ATTEMPTS or not _is_temporary(error):
                    raise _naming(error, self.location) from error
                logger.info("%s: %s: %s; trying again", self.location, type(error).__name__, error)
            time.sleep(delay * random.uniform(0.5, 1.0))
            delay *= 2
        raise AssertionError("the last attempt returns or raises")


def _discard(stream: Any) -> None:
    """Give up what is being written, so that no file is made of it where that is possible."""
    with contextlib.suppress(Exception):
        if isinstance(stream, fsspec.spec.AbstractBufferedFile):
            # The garbage collector would close it later, in the place of what has been put there by then.
            stream.closed = True
            stream.discard()
        else:
            stream.close()


def _digest(data: bytes) -> str:
    return str(xxhash.xxh3_64_hexdigest(data))


def _is_temporary(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno in _TEMPORARY_ERRNOS:
        return True
    # HTTP libraries have the status of an answer under these names.
    statuses = {str(getattr(error, name, "")) for name in ("status", "status_code", "code")}
    return not statuses.isdisjoint(_TEMPORARY_STATUSES) or any(
        kind.__name__ in _TEMPORARY_CLASSES for kind in type(error).__mro__
    )


def _naming(error: Exception, location: str) -> Exception:
    """Return an error that names the location; one of the program (a bug) as it is."""
    if isinstance(error, FileNotFoundError | FileExistsError):
        if error.filename is not None:
            return error
        number = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EEXIST
        return type(error)(number, str(error), location)
    if isinstance(error, OSError):
        number = error.errno or (errno.EACCES if isinstance(error, PermissionError) else errno.EIO)
        return OSError(number, error.strerror or str(error), location)
    if type(error).__module__ == "builtins":
        return error
    return OSError(errno.EIO, f"{type(error).__name__}: {error}", location)

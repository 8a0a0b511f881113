"""URLs of fsspec's file systems, such as `memory://`, including users' own."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import fsspec
import fsspec.spec
import numpy as np
import xxhash
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from distckpt._base.memory import Bytes
from distckpt._storage.remote import NO_BYTES, PROVIDERS, RemoteLocation, too_large

_Result = TypeVar("_Result")

_OVER_HTTP = re.compile(r"(?:^|::)https?://")
_TEMPORARY_ERRNOS = {
    errno.EIO,
    errno.EBUSY,
    errno.EAGAIN,
    errno.EPIPE,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.ECONNABORTED,
    getattr(errno, "EREMOTEIO", errno.EIO),
}
_ERRNOS = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES}
"""Numbers of errors that have none."""
_TEMPORARY_STATUSES = {"408", "429", "500", "502", "503", "504"}
"""HTTP statuses of a store that is busy or temporarily broken."""
_TEMPORARY_CLASSES = {
    "ConnectionError",
    "TimeoutError",
    "IncompleteRead",
    "ClientConnectionError",
    "ClientPayloadError",
    "ServiceRequestError",
    "ServiceResponseError",
}
"""Names of temporary errors, wherever they are defined. File systems of fsspec bring their own
classes, which are not imported here.
"""

_WITHOUT_BUCKETS = {"sftp", "ssh", "ftp"}
"""Protocols of file systems whose folders can all be made."""

_REPLACED_SETTINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "s3": {
        "endpoint_url": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
        "profile": ("AWS_PROFILE",),
        "key": ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"),
    },
    "gcs": {
        "endpoint_url": ("STORAGE_EMULATOR_HOST",),
        "token": (
            "GOOGLE_APPLICATION_CREDENTIALS",
            "GOOGLE_SERVICE_ACCOUNT",
            "STORAGE_EMULATOR_HOST",
        ),
    },
    "azure": dict.fromkeys(
        ("connection_string", "account_name", "account_host", "account_key", "sas_token"),
        ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME"),
    ),
}
"""Settings of fsspec about data's place and owner -> their replacements. The settings are ignored,
and environment variables replace them.
"""

_lock = threading.Lock()
"""Lock under which conditional writes take turns."""


def settings_of(provider: str) -> dict[str, Any]:
    """Return the user's fsspec settings for a provider's file systems."""
    settings: dict[str, Any] = {}
    for protocol, other in PROVIDERS.items():
        configured = fsspec.config.conf.get(protocol)
        if other == provider and isinstance(configured, dict):
            settings.update(configured)
    return settings


def check_settings(provider: str) -> None:
    """Refuse settings of fsspec that decide the destination of data.

    They are fine if the environment replaces them.
    """
    settings = settings_of(provider)
    client_settings = settings.get("client_kwargs")
    if isinstance(client_settings, dict):
        settings |= client_settings
    for name, variables in _REPLACED_SETTINGS[provider].items():
        if settings.get(name) and not any(map(os.environ.get, variables)):
            raise ValueError(
                f"fsspec's setting {name!r} is not read for this URL: set {' or '.join(variables)} "
                "in the environment"
            )


class FsspecLocation(RemoteLocation):
    """A URL that fsspec serves.

    ImportError if the library that its file system needs is not installed.
    """

    def __init__(self, location: str) -> None:
        super().__init__(location)
        try:
            self._uncached, self._path = fsspec.core.url_to_fs(location)
        except ImportError as error:
            raise ImportError(f"{location}: {error}") from error
        except Exception as error:
            text = f"fsspec does not open this URL ({type(error).__name__}: {error})"
            raise OSError(errno.EINVAL, text, location) from error
        # A file system of the user may be derived from them.
        if type(self._uncached) in (LocalFileSystem, DirFileSystem):
            raise OSError(
                errno.EINVAL,
                "this URL is another name of a directory: give its path or URL",
                location,
            )
        # A memory file system belongs to one process; other file systems promise nothing.
        self.has_conditions = isinstance(self._uncached, MemoryFileSystem)

    @property
    def _fs(self) -> Any:
        self._uncached.invalidate_cache()
        return self._uncached

    def kind(self) -> Literal["file", "directory"] | None:
        try:
            info = self._request(lambda: self._fs.info(self._path))
        except FileNotFoundError:
            return None
        if info["type"] == "directory":
            return "directory"
        return "file"

    def list_names(self) -> list[str]:
        entries = self._request(lambda: self._fs.ls(self._path, detail=False))
        return sorted(entry.rstrip("/").rpartition("/")[2] for entry in entries)

    def list_files(self) -> list[str]:
        start = self._path.rstrip("/") + "/"
        names = self._request(lambda: list(self._walk(start)))
        return sorted(name[len(start) :] for name in names if name.startswith(start))

    def _walk(self, start: str) -> Iterator[str]:
        """Yield the paths of all files below a prefix.

        `fs.find` would silently leave out folders that it could not list.
        """
        with contextlib.suppress(FileNotFoundError):
            for entry in self._fs.ls(start, detail=True):
                name = entry["name"].rstrip("/") + "/"
                if entry["type"] == "directory" and name != start:
                    yield from self._walk(name)
                elif entry["type"] != "directory":
                    yield entry["name"]

    def size(self) -> int:
        return int(self._request(lambda: self._fs.size(self._path)))

    def modified_time(self) -> float | None:
        with contextlib.suppress(NotImplementedError):
            return float(self._request(lambda: self._fs.modified(self._path)).timestamp())
        return None

    def read(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and self.size() > max_bytes:
            raise too_large(max_bytes, self.location)
        return bytes(self._request(lambda: self._fs.cat_file(self._path)))

    def read_range(self, start: int, num_bytes: int) -> Bytes:
        def fetch() -> Bytes:
            data = self._fs.cat_file(self._path, start=start, end=start + num_bytes)
            if len(data) != num_bytes:
                self._check_range(start, num_bytes, len(data))
            content: Bytes = np.frombuffer(data, np.uint8)
            return content

        if not num_bytes:
            return NO_BYTES
        return self._request(fetch)

    def read_into(self, buffers: Sequence[Bytes], start: int) -> int:
        fill = getattr(self._uncached, "read_into", None)
        if fill is None:
            return super().read_into(buffers, start)
        return int(self._request(lambda: fill(self._path, buffers, start)))

    def _check_range(self, start: int, num_bytes: int, num_received: int) -> None:
        """Check that the request was answered, up to the file's end."""
        expected = max(0, min(num_bytes, self._fs.size(self._path) - start))
        if num_received > expected:
            raise OSError(
                errno.EOPNOTSUPP,
                f"{num_received} bytes came, {expected} were requested: what serves this URL "
                "ignores ranges of bytes. Download the files, or serve them by a server that "
                "answers range requests",
                self.location,
            )
        if num_received < expected:
            raise OSError(errno.EIO, f"{num_received} bytes came, {expected} were requested")

    def _check_writable(self) -> None:
        if _OVER_HTTP.search(self.location):
            raise OSError(errno.EROFS, "checkpoints cannot be written over HTTP", self.location)

    def write(self, data: bytes) -> None:
        self._check_writable()
        self._request(lambda: self._with_parents(lambda: self._fs.pipe_file(self._path, data)))

    def _with_parents(self, put: Callable[[], _Result]) -> _Result:
        """Put a file; if its folder is missing, make that and repeat."""
        try:
            return put()
        except Exception:
            if not self._make_parents():
                raise
        return put()

    def _make_parents(self) -> bool:
        """Make the missing folders above the file.

        False if none was missing, or they cannot be made. The first one may be a bucket, which is
        not made by accident.
        """
        fs = self._fs
        parent = fs._parent(self._path)
        names = parent.strip("/").split("/")
        root = parent[: parent.index(names[0]) + len(names[0])]
        if fs.exists(parent) or not (self._has_no_buckets or fs.exists(root)):
            return False
        for _ in names:
            # Another rank may make one of them at the same time.
            with contextlib.suppress(Exception):
                fs.makedirs(parent, exist_ok=True)
            if self._fs.exists(parent):
                return True
        return False

    @property
    def _has_no_buckets(self) -> bool:
        names = self._uncached.protocol
        if isinstance(names, str):
            names = [names]
        return not _WITHOUT_BUCKETS.isdisjoint(names)

    def remove_empty_folders(self) -> None:
        is_bucket = "/" not in self._path.strip("/")
        if self._has_no_buckets or not is_bucket:
            # Other programs may put files there: a folder with files stays.
            with contextlib.suppress(Exception):
                self._remove_if_empty(self._path)

    def _remove_if_empty(self, path: str) -> bool:
        """Remove a folder with nothing but empty folders in it.

        Return whether it is removed.
        """
        entries = self._fs.ls(path, detail=True)
        folders = [entry["name"] for entry in entries if entry["type"] == "directory"]
        are_gone = [self._remove_if_empty(folder) for folder in folders]
        if len(folders) < len(entries) or not all(are_gone):
            return False
        self._fs.rmdir(path)
        return True

    def write_stream(
        self,
        content: Callable[[], Iterable[bytes]],
        num_bytes: int,
        num_requests: int,
        part_bytes: int,
    ) -> None:
        self._check_writable()

        def send() -> None:
            stream = self._fs.open(self._path, "wb")
            try:
                for piece in content():
                    stream.write(memoryview(piece))
                stream.close()
            except BaseException as error:
                _discard(stream)
                if isinstance(error, FileNotFoundError) and error.filename is None:
                    # The upload is missing: the file system has repeated a request that had been
                    # carried out.
                    raise OSError(errno.EIO, str(error)) from error
                raise

        self._request(lambda: self._with_parents(send))

    def open_for_writing(self) -> Any:
        self._check_writable()
        if self._has_no_buckets:
            # The stream may notice too late that its folder is missing.
            self._make_parents()
        return self._with_parents(lambda: self._fs.open(self._path, "wb"))

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._request(lambda: self._fs.rm_file(self._path))

    def version(self) -> Any:
        with contextlib.suppress(FileNotFoundError):
            return xxhash.xxh3_64_hexdigest(self.read())
        return None

    def _put_if(self, known_version: Any, data: bytes) -> bool:
        with _lock:
            if self.version() != known_version:
                return False
            self.write(data)
            return True

    def _is_temporary(self, error: Exception) -> bool:
        if isinstance(error, OSError) and error.errno in _TEMPORARY_ERRNOS:
            return True
        # HTTP libraries have the status of an answer under these names.
        statuses = {str(getattr(error, name, "")) for name in ("status", "status_code", "code")}
        if not statuses.isdisjoint(_TEMPORARY_STATUSES):
            return True
        return any(kind.__name__ in _TEMPORARY_CLASSES for kind in type(error).__mro__)

    def _translated(self, error: Exception) -> Exception:
        if isinstance(error, OSError):
            if error.filename is not None:
                return error
            number = error.errno or _ERRNOS.get(type(error), errno.EIO)
            return OSError(number, error.strerror or str(error), self.location)
        if type(error).__module__.partition(".")[0] in ("builtins", "distckpt"):
            # A bug, or an error of the content.
            return error
        return OSError(errno.EIO, f"{type(error).__name__}: {error}", self.location)


def _discard(stream: Any) -> None:
    """Give up a stream, if possible without making a file of it."""
    with contextlib.suppress(Exception):
        if isinstance(stream, fsspec.spec.AbstractBufferedFile):
            # The garbage collector would close it later, over an object that has been put there by
            # then.
            stream.closed = True
        stream.discard()
    with contextlib.suppress(Exception):
        # For files that cannot be discarded. Discarded ones are closed already.
        stream.close()

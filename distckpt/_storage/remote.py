"""Locations that URLs name: the interface that object stores and the file systems of fsspec share."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from distckpt._base.memory import Bytes

PART_BYTES = 16 << 20
"""Larger objects are put in parts of this size, larger ones when there would be too many."""


class Upload(NamedTuple):
    """A multipart upload that has been neither completed nor aborted; its parts are stored, and cost, until then."""

    location: str
    id: str


class RemoteLocation(ABC):
    """An object, or a prefix of objects. Listings are never cached.

    Methods raise FileNotFoundError when nothing is there, else OSError, both naming the location. Requests whose
    failure may be temporary have been repeated by then.
    """

    def __init__(self, location: str) -> None:
        self.location = location

    @abstractmethod
    def kind(self) -> Literal["file", "directory"] | None:
        """Return None when nothing is there; a store that does not answer is an error."""

    @abstractmethod
    def list_names(self) -> list[str]:
        """Return the sorted names directly below the prefix."""

    @abstractmethod
    def list_files(self) -> list[str]:
        """Return the sorted names of all objects below the prefix, relative to it, such as `tensors/x`."""

    @abstractmethod
    def size(self) -> int:
        """Return the size of the object in bytes."""

    @abstractmethod
    def read(self, max_bytes: int | None = None) -> bytes:
        """Return the whole object; OSError with errno EFBIG when it has more than `max_bytes`."""

    @abstractmethod
    def read_into(self, start: int, buffers: Sequence[Bytes]) -> int:
        """Fill buffers from a position of the object on; returns how many bytes there were."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Put the object with one request, replacing one that is there."""

    @abstractmethod
    def write_stream(self, content: Callable[[], Iterable[bytes]], num_bytes: int, num_requests: int) -> None:
        """Put a large object of `num_bytes` bytes; it becomes visible when it is complete, or not at all.

        `content` returns its pieces, and is called again when all of them are to be sent again. What it raises is
        passed on as it is.
        """

    @abstractmethod
    def open_for_writing(self) -> Any:
        """Open the object for streaming writes, which are not repeated; it becomes visible when it is closed."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the object; one that is not there is fine."""

    # --- Conditional writes -------------------------------------------------------------------------------------------

    has_create: bool = True
    """Whether `create` is atomic, so that of two programs only one can succeed."""
    has_replace: bool = True
    """The same for `replace`."""

    @abstractmethod
    def version(self) -> Any:
        """Return a value that changes whenever the object does, None when there is no object."""

    def create(self, data: bytes) -> bool:
        """Put an object where there is none; False when there is one, unless it has this very content.

        Then an earlier attempt was carried out, and its answer lost.
        """
        return self._put_if(None, data) or self._holds(data)

    def replace(self, data: bytes, known_version: Any) -> bool:
        """Put an object in place of the one of a known version; False when that has changed since, see `create`."""
        return self._put_if(known_version, data) or self._holds(data)

    @abstractmethod
    def _put_if(self, known_version: Any, data: bytes) -> bool:
        """Put the object if its version is the known one, None for no object; False when it is not."""

    def _holds(self, data: bytes) -> bool:
        try:
            return self.read() == data
        except FileNotFoundError:
            return False

    # --- Unfinished uploads -------------------------------------------------------------------------------------------

    def list_uploads(self) -> list[Upload]:
        """Return the unfinished multipart uploads to this object or below this prefix."""
        return []

    def abort(self, upload: Upload) -> None:
        """Give up an upload; one that is gone is fine."""
        raise NotImplementedError


def fill(buffers: Sequence[Bytes], data: Any) -> int:
    """Copy data into buffers, one after the other; returns its size."""
    rest = np.frombuffer(data, np.uint8)
    num_bytes = len(rest)
    for buffer in buffers:
        count = min(len(buffer), len(rest))
        buffer[:count], rest = rest[:count], rest[count:]
    return num_bytes


def too_large(max_bytes: int, location: str) -> OSError:
    """Return the error about an object that is larger than it can be."""
    return OSError(errno.EFBIG, f"more than {max_bytes} bytes", location)

"""The interface of what URLs name, which object stores and the file systems of fsspec share."""

from __future__ import annotations

import errno
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from distckpt._base.memory import Bytes
from distckpt._base.threads import Pool

logger = logging.getLogger(__name__)

PROVIDERS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
}
"""The object store that each scheme of URLs is for. All other schemes are fsspec's."""
PART_BYTES = 16 << 20
"""Larger objects are put in parts, of this size at least."""
_MAX_PART_BYTES = 128 << 20
_NUM_REMOVALS = 10
"""At the same time."""
RETRY_SECONDS = 180
"""After which a request is not repeated any more."""
_FIRST_DELAY = 0.2
"""Seconds before the second attempt, twice as long before each further one, less a random half."""

_Result = TypeVar("_Result")


class RefusedError(PermissionError):
    """The store has refused a request, and certainly not carried it out."""


class Upload(NamedTuple):
    """A multipart upload that has been neither completed nor aborted; its parts are stored, and
    cost, until then.
    """

    location: str
    id: str


class RemoteLocation(ABC):
    """An object, or a prefix of objects. Listings are never cached.

    Methods raise FileNotFoundError when nothing is there, else OSError, both naming the location.
    Requests whose failure may be temporary have been repeated by then.
    """

    num_attempts = 4
    has_conditions: bool = True
    """Whether `create` and `replace` are atomic, so that of two programs only one can succeed."""

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
        """Return the sorted names of all objects below the prefix, relative to it, such as
        `tensors/x`.
        """

    @abstractmethod
    def size(self) -> int:
        """Return the size of the object in bytes."""

    @abstractmethod
    def modified_time(self) -> float | None:
        """Return when the object was written, in seconds since 1970; None where the store does not
        tell.
        """

    @abstractmethod
    def read(self, max_bytes: int | None = None) -> bytes:
        """Return the object; OSError with errno EFBIG when it has more than `max_bytes`."""

    @abstractmethod
    def read_into(self, start: int, buffers: Sequence[Bytes]) -> int:
        """Fill buffers from a position of the object on; returns how many bytes there were."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Put the object, replacing one that is there."""

    @abstractmethod
    def write_stream(
        self,
        content: Callable[[], Iterable[bytes]],
        num_bytes: int,
        num_requests: int,
        part_bytes: int,
    ) -> None:
        """Put a large object of `num_bytes` bytes; it becomes visible when it is complete, or not
        at all.

        `content` returns its pieces, and is called again when all of them are to be sent again.
        What it raises is passed on as it is. Requests are of `part_bytes`, more when there would be
        too many, where the store is told.
        """

    @abstractmethod
    def open_for_writing(self) -> Any:
        """Open the object for streaming writes, which are not repeated; it becomes visible when it
        is closed.
        """

    @abstractmethod
    def remove(self) -> None:
        """Remove the object; one that is not there is fine."""

    def remove_many(self, locations: Sequence[str]) -> None:
        """Remove objects of the same store, in few requests or several at a time."""
        with Pool(_NUM_REMOVALS, thread_name_prefix="distckpt-remove") as pool:
            list(pool.map(lambda location: type(self)(location).remove(), locations))

    @abstractmethod
    def version(self) -> Any:
        """Return a value that changes whenever the object does, None when there is no object."""

    def create(self, data: bytes) -> bool:
        """Put an object where there is none; False when there is one, unless it has this very
        content.

        Then an earlier attempt was carried out, and its answer lost.
        """
        return self.replace(data, None)

    def replace(self, data: bytes, known_version: Any) -> bool:
        """Put an object in place of the one of a known version; False when that has changed since,
        see `create`.

        A `RefusedError` means that it was not put; after other errors that is unknown.
        """
        if self._put_if(known_version, data):
            return True
        try:
            return self.read() == data
        except FileNotFoundError:
            return False

    @abstractmethod
    def _put_if(self, known_version: Any, data: bytes) -> bool:
        """Put the object if its version is the known one, None for no object; False when it is
        not.
        """

    def list_uploads(self) -> list[Upload]:
        """Return the unfinished multipart uploads to this object or below this prefix, where the
        store lists them.
        """
        return []

    def abort(self, upload: Upload) -> None:
        """Give up an upload; one that is gone is fine."""
        raise NotImplementedError

    def _request(self, make: Callable[[], _Result]) -> _Result:
        """Make a request, again after a while as long as the reason of its failure may be
        temporary.
        """
        attempt, started = 1, time.monotonic()
        while True:
            try:
                return make()
            except Exception as error:
                is_late = attempt >= self.num_attempts or time.monotonic() - started > RETRY_SECONDS
                if is_late or not self._is_temporary(error):
                    translated = self._translated(error)
                    if translated is error:
                        raise
                    raise translated from error
                logger.info("%s: %s: %s; trying again", self.location, type(error).__name__, error)
            time.sleep(_FIRST_DELAY * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
            attempt += 1

    @abstractmethod
    def _is_temporary(self, error: Exception) -> bool:
        """Tell whether a request that failed may succeed when it is made again."""

    @abstractmethod
    def _translated(self, error: Exception) -> Exception:
        """Return an OSError that names the location in place of errors of libraries; others as they
        are.
        """


def part_bytes_of(num_bytes: int, max_part_bytes: int) -> int:
    """Return the size of the parts of an object: a 64th of it within limits, so that requests are
    neither many nor few.

    At most `max_part_bytes`, since parts are in memory while they are sent, but never less than
    `PART_BYTES`.
    """
    return max(PART_BYTES, min(num_bytes // 64, _MAX_PART_BYTES, max_part_bytes))


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

"""The interface to URLs of object stores and of fsspec's file systems."""

from __future__ import annotations

import errno
import logging
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from distckpt._base.memory import Bytes, copy_into
from distckpt._base.threads import PART_BYTES, Pool
from distckpt._storage.file_state import FileState

logger = logging.getLogger(__name__)

_MAX_PART_BYTES = 128 << 20
_NUM_REMOVALS = 10
"""Number of simultaneous removals."""
RETRY_SECONDS = 180
"""Seconds after which a request is no longer repeated."""
_FIRST_DELAY = 0.2
"""Seconds before the second attempt. They double before each further one, less a random half."""
_LONGEST_DELAY = 15.0
"""Maximum of seconds before an attempt."""

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

NO_BYTES: Bytes = np.zeros(0, np.uint8)

_Result = TypeVar("_Result")


class RefusedError(PermissionError):
    """Refusal of a request, which the store certainly has not carried out."""


class NoConditionsError(OSError):
    """Answer to a conditional put that the store has no conditions."""


class Upload(NamedTuple):
    """A multipart upload that was neither completed nor aborted.

    Until then, its parts are stored and cost money.
    """

    location: str
    id: str


class RemoteLocation(ABC):
    """An object, or a prefix of objects; listings are never cached.

    Methods raise FileNotFoundError if nothing is there, else OSError, and both name the location.
    By then, requests whose failure may be temporary have been repeated.
    """

    num_attempts = 4
    has_conditions: bool = True
    """Whether only one of two competing `create` or `replace` can succeed."""

    def __init__(self, location: str) -> None:
        self.location = location

    @abstractmethod
    def kind(self) -> Literal["file", "directory"] | None:
        """Return the kind of the object, None if nothing is there.

        A store that does not answer is an error.
        """

    @abstractmethod
    def list_names(self) -> list[str]:
        """Return the sorted names directly below the prefix."""

    @abstractmethod
    def list_files(self) -> list[str]:
        """Return the sorted names of all objects below the prefix.

        Names are relative to it, such as `tensors/x`.
        """

    @abstractmethod
    def size(self) -> int:
        """Return the size of the object in bytes."""

    @abstractmethod
    def modified_time(self) -> float | None:
        """Return the object's time of writing, in seconds since 1970, or None.

        None if the store does not tell.
        """

    def state(self) -> FileState:
        """Return the state of the object.

        It takes one request where the store tells all at once.
        """
        return FileState(self.size(), self.modified_time())

    def list_states(self) -> dict[str, FileState]:
        """Return the states of all objects below the prefix, by name.

        Names are the ones of `list_files`; the dict is empty if a listing does not tell states.
        """
        return {}

    @abstractmethod
    def read(self, max_bytes: int | None = None) -> bytes:
        """Return the content of the object.

        OSError with errno EFBIG if it has more than `max_bytes`.
        """

    @abstractmethod
    def read_range(self, start: int, num_bytes: int) -> Bytes:
        """Return bytes from a position of the object on.

        There are fewer if it ends before that.
        """

    def read_into(self, buffers: Sequence[Bytes], start: int) -> int:
        """Fill buffers from a position of the object on; return the bytes read.

        There are fewer than fit if it ends before that.
        """
        return copy_into(buffers, self.read_range(start, sum(map(len, buffers))))

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
        """Put a large object of `num_bytes` bytes.

        It becomes visible when it is complete, or not at all. `content` returns its pieces, and is
        called again if all of them must be sent again. Its exceptions are passed on as they are. If
        the store lets us choose, requests have `part_bytes`, more if there would be too many.
        """

    @abstractmethod
    def open_for_writing(self) -> Any:
        """Open the object for a stream of writes, which are not repeated.

        It becomes visible when it is closed.
        """

    @abstractmethod
    def remove(self) -> None:
        """Remove the object; one that is not there is fine."""

    def remove_many(self, locations: Sequence[str]) -> None:
        """Remove objects of the same store, in few or simultaneous requests."""
        with Pool(_NUM_REMOVALS, thread_name_prefix="distckpt-remove") as pool:
            list(pool.map(lambda location: type(self)(location).remove(), locations))

    def remove_empty_folders(self) -> None:
        """Remove empty folders below the prefix, and its own.

        This concerns stores with folders. Failures are no errors: nothing depends on the folders.
        """
        return

    @abstractmethod
    def version(self) -> Any:
        """Return a value that changes whenever the object does, or None.

        None if there is no object.
        """

    def create(self, data: bytes) -> bool:
        """Put an object where there is none.

        False if there is one, unless it has this very content: then an earlier attempt was carried
        out, and its answer was lost. Also False if the store has no conditional writes.
        """
        try:
            return self.replace(data, None)
        except NoConditionsError:
            return False

    def replace(self, data: bytes, known_version: Any) -> bool:
        """Replace a known version of the object.

        False if the object has changed since, see `create`. A `RefusedError` means that it was not
        put; after other errors, that is unknown. No other request than the conditional put raises a
        `NoConditionsError`.
        """
        if self._put_if(known_version, data):
            return True
        try:
            return self.read() == data
        except FileNotFoundError:
            return False

    @abstractmethod
    def _put_if(self, known_version: Any, data: bytes) -> bool:
        """Put the object if its version is the known one.

        Return False if it is not. None is the version of an absent object.
        """

    def list_uploads(self) -> list[Upload]:
        """Return the unfinished uploads to this object or below this prefix.

        There are none, with a warning, where the store does not list them.
        """
        return []

    def abort(self, upload: Upload) -> None:
        """Give up an upload; one that is missing already is fine.

        A failure is a warning.
        """
        raise NotImplementedError

    def _request(self, make: Callable[[], _Result]) -> _Result:
        """Make a request, and repeat it while its failure may be temporary.

        There is a delay before each attempt.
        """
        attempt = 1
        started = time.monotonic()
        num_failures: Counter[int] = Counter()
        while True:
            try:
                return make()
            except Exception as error:
                is_late = time.monotonic() - started > RETRY_SECONDS
                # Refusals of a busy store do not use up the attempts that other failures have.
                limit = self._attempts_after(error)
                num_failures[limit] += 1
                is_last = is_late or num_failures[limit] >= limit
                if is_last or not self._is_temporary(error):
                    translated = self._translated(error)
                    if translated is error:
                        raise
                    raise translated from error
                logger.info("%s: %s: %s; trying again", self.location, type(error).__name__, error)
            delay = min(_FIRST_DELAY * 2 ** (attempt - 1), _LONGEST_DELAY)
            time.sleep(delay * random.uniform(0.5, 1.0))
            attempt += 1

    def _attempts_after(self, error: Exception) -> int:
        """Return the number of attempts at a request with an error."""
        return self.num_attempts

    @abstractmethod
    def _is_temporary(self, error: Exception) -> bool:
        """Return whether a request that failed may succeed if repeated."""

    @abstractmethod
    def _translated(self, error: Exception) -> Exception:
        """Return a library's error as an OSError that names the location.

        Other errors are returned as they are.
        """


def part_bytes_of(num_bytes: int, max_part_bytes: int) -> int:
    """Return the size of an object's parts: a 64th, within limits.

    So there are neither too many requests nor too few. It is at most `max_part_bytes`, since parts
    are in memory while they are sent, but never less than `PART_BYTES`.
    """
    return max(PART_BYTES, min(num_bytes // 64, _MAX_PART_BYTES, max_part_bytes))


def too_large(max_bytes: int, location: str) -> OSError:
    """Return the error about an object that is too large."""
    return OSError(errno.EFBIG, f"more than {max_bytes} bytes", location)

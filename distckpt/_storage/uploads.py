"""Uploads: files whose bytes come in units, put into an object store in parts, several at the same time."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from distckpt._base.memory import Bytes
from distckpt._base.threads import run_threads
from distckpt._storage import object_store

UNITS_PER_PART = 2
"""As long as the file is not so large that it would have too many parts; a file of one part is put with one request."""


class OutgoingFile(NamedTuple):
    """A file for an object store.

    Attributes:
        location: a URL.
        header: its first bytes.
        unit_bytes: the sizes of its units, which follow. A unit but for the last has at least 5 MiB.
        read: given the number of a unit, returns its bytes, which are the thread's until it asks again. It may ask for
            one several times.
    """

    location: str
    header: bytes
    unit_bytes: Sequence[int]
    read: Callable[[int], list[Bytes]]


def upload_files(
    files: Sequence[OutgoingFile], num_requests: int, progress: Callable[[int], None] | None = None
) -> None:
    """Upload files. One pool of threads takes the parts of all of them in order.

    No part of a file that was not completed stays behind, whatever happened.

    Args:
        files: what to upload.
        num_requests: that are made at the same time, each with a copy of a part.
        progress: told the number of bytes whenever some have been put, from several threads.

    Raises:
        OSError: naming the file.
    """
    uploads = [_Upload(file) for file in files]
    parts = [(upload, number) for upload in uploads for number in range(upload.num_parts)]

    def put(item: tuple[_Upload, int]) -> None:
        upload, number = item
        num_bytes = upload.put(number)
        if progress is not None:
            progress(num_bytes)

    try:
        run_threads(put, parts, num_requests)
    except BaseException:
        for upload in uploads:
            # What cannot be aborted now is listed, and aborted, by whoever clears up the checkpoint.
            with contextlib.suppress(OSError):
                upload.abort()
        raise


class _Upload:
    """A file while it is being uploaded."""

    def __init__(self, file: OutgoingFile) -> None:
        num_units = len(file.unit_bytes)
        step = max(UNITS_PER_PART, -(-num_units // object_store.MAX_PARTS))
        self._file = file
        self._parts = [range(i, min(i + step, num_units)) for i in range(0, num_units, step)] or [range(0)]
        self._is_stream = len(self._parts) > 1 and not object_store.takes_parts(file.location)
        if self._is_stream:
            self._parts = [range(num_units)]
        self._tags = [""] * len(self._parts)
        self._num_missing = len(self._parts)
        self._lock = threading.Lock()
        self._upload: object_store.Upload | None = None

    @property
    def num_parts(self) -> int:
        return len(self._parts)

    def put(self, number: int) -> int:
        """Put one part, and complete the file when it is the last that was missing; returns its size."""
        num_bytes = sum(self._file.unit_bytes[unit] for unit in self._parts[number])
        if self._is_stream:
            # The division into requests is left to the backend of fsspec.
            object_store.write_stream(self._file.location, self._pieces)
            return num_bytes
        content = self._content(number)
        if self.num_parts == 1:
            object_store.write(self._file.location, content)
            return num_bytes
        with self._lock:
            if self._upload is None:
                self._upload = object_store.begin_upload(self._file.location)
        self._tags[number] = object_store.put_part(self._upload, number + 1, content)
        with self._lock:
            self._num_missing -= 1
            is_last = self._num_missing == 0
        if is_last:
            object_store.complete(self._upload, self._tags, len(self._file.header) + sum(self._file.unit_bytes))
            self._upload = None
        return num_bytes

    def abort(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            object_store.abort(upload)

    def _content(self, number: int) -> bytes:
        content = io.BytesIO()
        if number == 0:
            content.write(self._file.header)
        for unit in self._parts[number]:
            for buffer in self._file.read(unit):
                content.write(buffer)
        # Without a copy: nothing else refers to it.
        return content.getvalue()

    def _pieces(self) -> Iterator[bytes | Bytes]:
        yield self._file.header
        for unit in self._parts[0]:
            yield from self._file.read(unit)

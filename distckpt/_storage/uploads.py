"""Uploads of files in units, with several requests at a time."""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from distckpt._base.memory import Bytes
from distckpt._base.threads import PART_BYTES, Pool, wait_for_all
from distckpt._storage import object_store
from distckpt._storage.remote import part_bytes_of


class OutgoingFile(NamedTuple):
    """A file for an object store: `header`, then units of `unit_bytes`.

    `read` returns the bytes of a unit, given its number. They belong to the calling thread until it
    calls again. It may ask for a unit several times.
    """

    location: str
    header: bytes
    unit_bytes: Sequence[int]
    read: Callable[[int], list[Bytes]]


def upload_files(
    files: Sequence[OutgoingFile],
    num_requests: int,
    max_part_bytes: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Upload files with `num_requests` requests at a time.

    Nothing of a failed file stays behind. Each request has a part of an object (see
    `part_bytes_of`) and a unit in memory. `progress` is called with numbers of bytes as they are
    handed over, from several threads.
    """
    num_at_once = min(num_requests, len(files))
    num_of_each = num_requests // num_at_once
    stop = threading.Event()
    with (
        Pool(num_requests, thread_name_prefix="distckpt-io") as readers,
        Pool(num_at_once, thread_name_prefix="distckpt-upload") as uploaders,
    ):
        running = []
        for file in files:
            upload = _Upload(file, num_of_each, max_part_bytes, readers, stop, progress)
            running.append(uploaders.submit(upload.run))
        try:
            wait_for_all(running)
        finally:
            # One has failed, or Ctrl-C has reached this thread: the others must not go on to their
            # end.
            if not all(future.done() for future in running):
                stop.set()
    errors = [future.exception() for future in running]
    failures = [error for error in errors if error is not None]
    failures.sort(key=lambda error: isinstance(error, _Stopped))
    if failures:
        raise failures[0]


class _Stopped(Exception):
    """End of an upload because another one has failed."""


@dataclass
class _Upload:
    file: OutgoingFile
    num_requests: int
    max_part_bytes: int
    readers: Pool
    stop: threading.Event
    progress: Callable[[int], None] | None
    num_reported: int = 0

    def run(self) -> None:
        num_bytes = len(self.file.header) + sum(self.file.unit_bytes)
        remote = object_store.at(self.file.location)
        if num_bytes <= PART_BYTES:
            self._check()
            numbers = range(len(self.file.unit_bytes))
            remote.write(self.file.header + b"".join(map(self._read, numbers)))
            for number in numbers:
                self._report(number)
        else:
            part_bytes = part_bytes_of(num_bytes, self.max_part_bytes)
            remote.write_stream(self._pieces, num_bytes, self.num_requests, part_bytes)

    def _pieces(self) -> Iterator[bytes]:
        """Yield the header and the units.

        With several requests at a time, more units are read ahead.
        """
        yield self.file.header
        ahead: deque[Future[bytes]] = deque()
        num_units = len(self.file.unit_bytes)
        num_ahead = self.num_requests - 1
        for number in range(num_units + num_ahead):
            if number < num_units:
                ahead.append(self.readers.submit(self._read, number))
            if number >= num_ahead:
                self._check()
                yield ahead.popleft().result()
                # In another thread: this one drives obstore's requests, and the callback may make
                # requests of its own.
                self.readers.submit(self._report, number - num_ahead).result()

    def _read(self, number: int) -> bytes:
        content = io.BytesIO()
        content.writelines(self.file.read(number))
        # Without a copy: nothing else refers to it.
        return content.getvalue()

    def _report(self, number: int) -> None:
        # A stream that has failed begins again.
        if self.progress is not None and number == self.num_reported:
            self.num_reported += 1
            self.progress(self.file.unit_bytes[number])

    def _check(self) -> None:
        if self.stop.is_set():
            raise _Stopped

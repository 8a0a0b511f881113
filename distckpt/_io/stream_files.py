"""Files whose layout is known before their tensors come: on local disks in any order, on object stores in order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from distckpt._base.memory import tensor_bytes
from distckpt._base.threads import UNIT_BYTES
from distckpt._format.safetensors_file import Entry
from distckpt._storage import locations as storage_locations
from distckpt._storage.open_files import allocate
from distckpt.tensors import chunk_tensor_by_memory, to_plain_memory


class Place(NamedTuple):
    """Where a tensor goes: number of its file, and its first byte there."""

    entry: Entry
    file: int
    first_byte: int


class Layout(NamedTuple):
    """The layout of all files: header and size of each, and tensor name -> place, in the order of the bytes."""

    headers: list[bytes]
    num_bytes: list[int]
    places: dict[str, Place]


class LocalFiles:
    """Local files of known layout; tensors are written at their places, in any order."""

    def __init__(self, locations: Sequence[str], layout: Layout) -> None:
        self._locations, self._layout = locations, layout
        self._created: list[str] = []
        # One file at a time is open: there may be more than a process may open.
        self._open_file, self._fd = -1, -1

    def create(self) -> None:
        """Create every file at its full size, so that a full disk is found before the first tensor comes."""
        for location, header, num_bytes in zip(
            self._locations, self._layout.headers, self._layout.num_bytes, strict=True
        ):
            with _opened(location, os.O_CREAT | os.O_EXCL) as fd:
                self._created.append(location)
                allocate(fd, num_bytes)
                _write_at(fd, memoryview(header), 0)

    def write(self, place: Place, tensor: torch.Tensor) -> None:
        location = self._locations[place.file]
        if self._open_file != place.file:
            self._close()
            self._fd, self._open_file = os.open(location, os.O_WRONLY | os.O_CLOEXEC), place.file
        with storage_locations.naming(location):
            for position, window in _windows(tensor, place.first_byte):
                _write_at(self._fd, window, position)

    def finish(self) -> None:
        """Bring everything to disk."""
        self._close()
        for location in self._locations:
            with _opened(location, 0) as fd:
                os.fsync(fd)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._close()
        for location in self._created:
            storage_locations.remove_file(location)

    def _close(self) -> None:
        # A descriptor is free whatever its closing reports.
        number, self._open_file = self._open_file, -1
        if number >= 0:
            with storage_locations.naming(self._locations[number]):
                os.close(self._fd)


class RemoteFiles:
    """Files of an object store, which are written from beginning to end."""

    def __init__(self, locations: Sequence[str], layout: Layout) -> None:
        self._locations, self._layout = locations, layout
        self._next_places = iter(layout.places.values())
        self._created: list[str] = []
        self._file: Any = None

    def create(self) -> None:
        self._begin_next()

    def write(self, place: Place, tensor: torch.Tensor) -> None:
        expected = next(self._next_places)
        if place != expected:
            raise ValueError(
                f"the tensor {place.entry.name!r} came where {expected.entry.name!r} has its place; "
                f"{self._locations[expected.file]!r} can only be written in order: give the tensors in this order, or "
                "write to a local file"
            )
        if place.file == len(self._created):
            self._begin_next()
        for _, window in _windows(tensor, place.first_byte):
            self._file.write(window)

    def finish(self) -> None:
        self._close()

    def remove(self) -> None:
        # An open file becomes visible when it is closed, at the latest by the garbage collector: close, then remove.
        with contextlib.suppress(Exception):
            self._close()
        for location in self._created:
            storage_locations.remove_file(location)

    def _begin_next(self) -> None:
        self._close()
        location = self._locations[len(self._created)]
        self._file = storage_locations.open_remote_for_writing(location)
        self._created.append(location)
        self._file.write(self._layout.headers[len(self._created) - 1])

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _windows(tensor: torch.Tensor, first_byte: int) -> Iterator[tuple[int, memoryview]]:
    """Divide a tensor into its bytes, a window at a time, each with its place in the file."""
    for chunk in chunk_tensor_by_memory(tensor, UNIT_BYTES):
        window = memoryview(tensor_bytes(to_plain_memory(chunk)))
        yield first_byte, window
        first_byte += len(window)


@contextlib.contextmanager
def _opened(location: str, flags: int) -> Iterator[int]:
    with storage_locations.naming(location):
        fd = os.open(location, os.O_WRONLY | os.O_CLOEXEC | flags, 0o666)
        try:
            yield fd
        finally:
            os.close(fd)


def _write_at(fd: int, data: memoryview, position: int) -> None:
    while data:
        written = os.pwrite(fd, data, position)
        data, position = data[written:], position + written

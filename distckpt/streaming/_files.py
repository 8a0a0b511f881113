"""Writing of files from tensors that come one at a time.

Local disks take them in any order, object stores in order.
"""

from __future__ import annotations

import contextlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from distckpt._base.dtypes import ITEM_BYTES, TO_NAME
from distckpt._base.libc import write_all
from distckpt._base.memory import Bytes, tensor_bytes
from distckpt._base.messages import did_you_mean, summarize_keys
from distckpt._base.threads import UNIT_BYTES
from distckpt._format.safetensors_file import Entry, build_header, layout_order
from distckpt._io.write import create_file
from distckpt._storage import locations as storage_locations
from distckpt._storage import object_store
from distckpt.streaming._tensors import chunk_tensor_by_memory, to_plain_memory


class StreamLayout(NamedTuple):
    """The layout of all files.

    It has the header and size of each file, and by name the file and entry of each tensor, in
    order.
    """

    headers: list[bytes]
    num_bytes: list[int]
    places: dict[str, tuple[int, Entry]]


def lay_out(groups: Sequence[Sequence[Entry]], metadata: Mapping[str, str]) -> StreamLayout:
    """Lay out one file for each group of tensors."""
    layout = StreamLayout([], [], {})
    for number, group in enumerate(groups):
        entries = _aligned(group)
        header, first_bytes = build_header(entries, metadata)
        layout.headers.append(header)
        layout.num_bytes.append(len(header) + sum(entry.num_bytes for entry in entries))
        for entry, first_byte in zip(entries, first_bytes, strict=True):
            layout.places[entry.name] = number, entry._replace(first_byte=first_byte)
    return layout


def _aligned(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Keep the announced order, unless items would be unaligned.

    Tensors mostly come in this order.
    """
    position = 0
    for entry in entries:
        if position % ITEM_BYTES[entry.dtype]:
            return [entries[i] for i in layout_order(entries)]
        position += entry.num_bytes
    return entries


class _Files(ABC):
    """Files of a layout, of which one is open at a time: a process may not open all of many."""

    def __init__(self, locations: Sequence[str], layout: StreamLayout) -> None:
        self._locations = locations
        self._layout = layout
        self._created: list[str] = []
        self._location = ""
        self._file: Any = None

    @abstractmethod
    def create(self) -> None:
        """Begin before the first tensor comes."""

    @abstractmethod
    def write(self, file: int, entry: Entry, tensor: torch.Tensor) -> None:
        """Write a tensor."""

    def finish(self) -> None:
        """Complete all files."""
        self._close()

    def remove(self) -> None:
        """Remove the files."""
        # An open file of an object store becomes visible when it is closed, at the latest by the
        # garbage collector: close, then remove.
        with contextlib.suppress(Exception):
            self._close()
        for location in self._created:
            storage_locations.remove_file(location)

    def _close(self) -> None:
        # It is closed whatever its closing reports.
        file = self._file
        self._file = None
        if file is not None:
            with storage_locations.naming(self._location):
                file.close()


class _LocalFiles(_Files):
    """Local files of known layout, whose tensors come in any order."""

    def create(self) -> None:
        # A full disk is found before the first tensor comes.
        headers = self._layout.headers
        sizes = self._layout.num_bytes
        for location, header, num_bytes in zip(self._locations, headers, sizes, strict=True):
            create_file(location, header, num_bytes)
            self._created.append(location)

    def write(self, file: int, entry: Entry, tensor: torch.Tensor) -> None:
        location = self._locations[file]
        if self._file is None or self._location != location:
            self._close()
            self._file = io.FileIO(location, "r+")
            self._location = location
        position = entry.first_byte
        with storage_locations.naming(location):
            for window in _windows(tensor):
                write_all(self._file.fileno(), [window], position)
                position += len(window)

    def finish(self) -> None:
        super().finish()
        for location in self._locations:
            with storage_locations.naming(location), io.FileIO(location, "r+") as file:
                os.fsync(file.fileno())


class _RemoteFiles(_Files):
    """Files of an object store, which are written from beginning to end."""

    def create(self) -> None:
        self._next_places = iter(self._layout.places.values())
        self._begin_next()

    def write(self, file: int, entry: Entry, tensor: torch.Tensor) -> None:
        expected_file, expected = next(self._next_places)
        if entry != expected:
            raise ValueError(
                f"the tensor {entry.name!r} came where {expected.name!r} has its place; "
                f"{self._locations[expected_file]!r} can only be written in order: give the "
                "tensors in this order, or write to a local file"
            )
        if file == len(self._created):
            self._begin_next()
        for window in _windows(tensor):
            self._file.write(memoryview(window))

    def remove(self) -> None:
        super().remove()
        # Their parts, if closing has failed.
        for location in self._created:
            storage_locations.remove_tree(location)

    def _begin_next(self) -> None:
        self._close()
        number = len(self._created)
        self._location = self._locations[number]
        self._file = object_store.at(self._location).open_for_writing()
        self._created.append(self._location)
        self._file.write(self._layout.headers[number])


@contextlib.contextmanager
def written_files(
    locations: Sequence[str],
    layout: StreamLayout,
    tensor_iter: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[None]:
    """Write files of a layout from tensors that come, before the body.

    They are removed when this or the body raises.

    Raises:
        ValueError: announced tensors are missing, or other tensors have come.
    """
    kind = _LocalFiles if storage_locations.is_local(locations[0]) else _RemoteFiles
    files = kind(locations, layout)
    try:
        files.create()
        _write_all(files, layout, tensor_iter)
        files.finish()
        yield
    except BaseException:
        files.remove()
        raise


def _write_all(
    files: _Files, layout: StreamLayout, tensor_iter: Iterable[tuple[str, torch.Tensor]]
) -> None:
    awaited = dict.fromkeys(layout.places)
    for name, tensor in tensor_iter:
        _check(layout, awaited, name, tensor)
        files.write(*layout.places[name], tensor.detach())
        del awaited[name]
        # Its memory is needed for the next one.
        del tensor
    if awaited:
        raise ValueError(
            f"{len(awaited)} of {len(layout.places)} announced tensors were not written: "
            f"{summarize_keys(awaited)}"
        )


def _check(
    layout: StreamLayout, awaited: Mapping[str, None], name: str, tensor: torch.Tensor
) -> None:
    if name not in layout.places:
        raise ValueError(
            f"the tensor {name!r} came but was not "
            f"announced{did_you_mean(str(name), layout.places)}"
        )
    if name not in awaited:
        raise ValueError(f"the tensor {name!r} came twice")
    if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "to_local"):
        raise ValueError(
            f"{name!r} came as a {type(tensor).__name__}: give plain tensors (of a DTensor "
            "full_tensor())"
        )
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"the tensor {name!r} came as {tensor.dtype} in {tensor.layout} on {tensor.device}: "
            "not dense"
        )
    _, entry = layout.places[name]
    dtype = TO_NAME.get(tensor.dtype, str(tensor.dtype))
    shape = tuple(tensor.shape)
    if (dtype, shape) != (entry.dtype, entry.shape):
        raise ValueError(
            f"the tensor {name!r} came as {dtype} {shape}, but was announced as {entry.dtype} "
            f"{entry.shape}"
        )


def _windows(tensor: torch.Tensor) -> Iterator[Bytes]:
    """Divide a tensor into its bytes, a window at a time."""
    for chunk in chunk_tensor_by_memory(tensor, UNIT_BYTES):
        yield tensor_bytes(to_plain_memory(chunk))

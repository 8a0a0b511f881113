"""Writing shard files: bytes straight from tensor memory, checksummed while they are in cache."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.device import Copier, DeviceLayer
from distckpt._base.dtypes import as_integers
from distckpt._base.memory import ALIGNMENT, Bytes, bounce_buffer, is_plain_memory, tensor_bytes
from distckpt._base.threads import MAX_BUFFERS, NUM_REQUESTS, NUM_THREADS, UNIT_BYTES, run_threads
from distckpt._format.checksum import BLOCK_BYTES, block_checksums
from distckpt._geometry.region import flat_range_regions
from distckpt._storage import locations
from distckpt._storage.open_files import allocate
from distckpt._storage.remote import PART_BYTES
from distckpt._storage.uploads import OutgoingFile, upload_files

DIRECT_MIN_BYTES = 16 << 20
"""Smaller files go through the page cache: one flush costs less than many waits for the disk."""


class Span(NamedTuple):
    """Bytes [start, stop) of one chunk of a file."""

    chunk: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.stop - self.start


Fill: TypeAlias = Callable[[Sequence[Span], Bytes], list[Bytes]]
"""Gives the bytes of some spans, in order: views of memory that is there, or of the scratch memory
it is handed.
"""


class NewFile(NamedTuple):
    """A file to be written at a location where nothing is: a header, then chunks without gaps.

    `fill` gives the bytes of chunks, from several threads. `device` is where they come from, when
    not from host memory.
    """

    location: str
    header: bytes
    chunk_bytes: Sequence[int]
    fill: Fill
    device: DeviceLayer | None = None

    def below(self, directory: str, suffix: str = "") -> NewFile:
        """Return the file, whose location is a name in a checkpoint, in that directory, see
        `in_folder`.
        """
        return self._replace(
            location=locations.join(directory, *in_folder(self.location, suffix).split("/"))
        )


@dataclass(frozen=True)
class WriteSettings:
    """The settings of writing files.

    Attributes:
        durable: whether bytes must be on disk when `write_files` returns.
        direct: whether to go around the page cache (`O_DIRECT`); None where it pays and the file
            system takes it.
        with_checksums: whether to compute checksums, of blocks of `block_bytes`.
        num_threads: that fill and write at the same time, each `UNIT_BYTES` at most.
        num_requests: that are made of an object store at the same time.
        max_part_bytes: memory that each of them may have for a part of an object.
        progress: called with the number of bytes whenever some have been written, from several
            threads.
    """

    durable: bool = True
    direct: bool | None = None
    with_checksums: bool = True
    block_bytes: int = BLOCK_BYTES
    num_threads: int = NUM_THREADS
    num_requests: int = NUM_REQUESTS
    max_part_bytes: int = PART_BYTES
    progress: Callable[[int], None] | None = None


def write_files(files: Sequence[NewFile], settings: WriteSettings) -> npt.NDArray[np.uint64]:
    """Write files, and return the checksums of the blocks of all their chunks, in order; none
    without checksums.

    One pool of threads takes the units of all files in order, so that the data of one file goes to
    disk (fsync) while the next is being written. Space for all of them is reserved first: a full
    disk is found before anything is written, where the file system can tell.
    """
    outputs = [_Output(file, settings) for file in files]
    local = [output for output in outputs if output.is_local]
    try:
        for output in local:
            create_file(output.file.location, output.file.header, output.num_bytes)
        units = [(output, number) for output in local for number in range(len(output.units))]
        # Writers through the page cache would wait for each other: the system lets one at a time
        # into a file.
        pays = any(output.may_be_direct or output.file.device for output in local)
        run_threads(
            lambda item: item[0].write_unit(item[1]), units, settings.num_threads if pays else 1
        )
    finally:
        for output in local:
            # What was written completely is closed. An error of closing others would hide the one
            # that matters.
            with contextlib.suppress(OSError):
                output.close()
    remote = [output.outgoing() for output in outputs if not output.is_local]
    upload_files(remote, settings.num_requests, settings.max_part_bytes, settings.progress)
    return np.array(
        [digest for output in outputs for unit in output.checksums for digest in unit], np.uint64
    )


def in_folder(name: str, suffix: str) -> str:
    """Return the name of a file with a suffix to that of its folder, see
    `PreparedSave.folder_suffix`.
    """
    folder, _, file = name.partition("/")
    return f"{folder}{suffix}/{file}"


class _Output:
    """A file while it is being written."""

    def __init__(self, file: NewFile, settings: WriteSettings) -> None:
        self.file = file
        self.settings = settings
        self.is_local = locations.is_local(file.location)
        self._unit_bytes = max(UNIT_BYTES, settings.block_bytes)
        self.units = list(units_of(file.chunk_bytes, self._unit_bytes, settings.block_bytes))
        if self.is_local and not self.units:
            # So that a file without data is finished like the others.
            self.units = [[]]
        self.checksums: list[list[int]] = [[] for _ in self.units]
        self._sizes = [sum(span.num_bytes for span in unit) for unit in self.units]
        self._starts = list(itertools.accumulate(self._sizes, initial=len(file.header)))
        self.num_bytes = self._starts[-1]
        self._lock = threading.Lock()
        self._num_pending = len(self.units)
        self._fd = -1
        self._direct_fd = -1

    def write_unit(self, number: int) -> None:
        """Write a unit, and finish the file when it is the last that was missing."""
        with locations.naming(self.file.location):
            self._open()
            if self._direct_fd >= 0 and self.units[number]:
                self._write_direct(number)
            else:
                write_all(self._fd, self._buffers_of(number), self._starts[number])
            with self._lock:
                self._num_pending -= 1
                is_last = self._num_pending == 0
            if is_last:
                if self.settings.durable:
                    os.fsync(self._fd)
                self.close()
            if self.settings.progress is not None:
                self.settings.progress(self._sizes[number])

    def outgoing(self) -> OutgoingFile:
        """Describe the file for an object store."""
        return OutgoingFile(self.file.location, self.file.header, self._sizes, self._buffers_of)

    def close(self) -> None:
        """Close what is open."""
        with self._lock, contextlib.ExitStack() as closing:
            # A descriptor is free whatever its closing reports.
            for fd in (self._fd, self._direct_fd):
                if fd >= 0:
                    closing.callback(os.close, fd)
            self._fd = self._direct_fd = -1

    def _open(self) -> None:
        with self._lock:
            if self._fd < 0:
                # Files are opened when their turn comes: a rank may have more of them than it may
                # have open.
                self._fd = os.open(self.file.location, os.O_WRONLY | os.O_CLOEXEC)
                self._direct_fd = self._open_direct()

    @property
    def may_be_direct(self) -> bool:
        """Whether to go around the page cache, if the file system takes it."""
        direct = self.settings.direct
        if direct is None:
            direct = self.settings.durable and sum(self.file.chunk_bytes) >= DIRECT_MIN_BYTES
        return direct and hasattr(os, "O_DIRECT")

    def _open_direct(self) -> int:
        if not self.may_be_direct:
            return -1
        try:
            return os.open(self.file.location, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno == errno.EINVAL and self.settings.direct is None:
                return -1
            raise

    def _buffers_of(self, number: int) -> list[Bytes]:
        buffers = self.file.fill(
            self.units[number], bounce_buffer("write", self._unit_bytes, self.file.device)
        )
        self._keep_checksums(number, buffers)
        return buffers

    def _keep_checksums(self, number: int, buffers: Sequence[Bytes]) -> None:
        if self.settings.with_checksums:
            sizes = [span.num_bytes for span in self.units[number]]
            self.checksums[number] = block_checksums(sizes, buffers, self.settings.block_bytes)

    def _write_direct(self, number: int) -> None:
        """Write through an aligned window; what is left at its edges goes through the page
        cache.
        """
        position, num_bytes = self._starts[number], self._sizes[number]
        phase = position % ALIGNMENT
        window = bounce_buffer("write", self._unit_bytes + ALIGNMENT, self.file.device)[
            phase : phase + num_bytes
        ]
        copy_into(window, self.file.fill(self.units[number], window))
        self._keep_checksums(number, [window])
        first = min(-position % ALIGNMENT, num_bytes)
        last = max(first, num_bytes - (position + num_bytes) % ALIGNMENT)
        written = first + _write_aligned(self._direct_fd, window[first:last], position + first)
        write_all(self._fd, [window[:first]], position)
        write_all(self._fd, [window[written:]], position + written)


def file_of_tensors(
    location: str, header: bytes, contents: Sequence[Sequence[torch.Tensor]]
) -> NewFile:
    """Describe a file each of whose chunks is the row-major contents of some tensors, one after the
    other.

    Call it in the thread that computes: what this has queued on a device so far is done before
    bytes are copied.
    """
    copier = Copier(tensor for chunk in contents for tensor in chunk)

    def fill(unit: Sequence[Span], scratch: Bytes) -> list[Bytes]:
        buffers: list[Bytes] = []
        used = 0
        try:
            for span in unit:
                buffers.extend(
                    _span_bytes(
                        contents[span.chunk], span, scratch[used : used + span.num_bytes], copier
                    )
                )
                used += span.num_bytes
        finally:
            # Also after an error: the memory is used again.
            copier.wait()
        return buffers

    sizes = [sum(tensor.numel() * tensor.element_size() for tensor in chunk) for chunk in contents]
    return NewFile(location, header, sizes, fill, copier.layer)


def create_file(location: str, header: bytes, num_bytes: int) -> None:
    """Create a local file with its full size, so that a full disk is found early, and write its
    header.
    """
    with locations.naming(location):
        fd = os.open(location, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            allocate(fd, num_bytes)
            write_all(fd, [np.frombuffer(header, np.uint8)], 0)
        except BaseException:
            os.unlink(location)
            raise
        finally:
            os.close(fd)


def write_all(fd: int, buffers: list[Bytes], position: int) -> None:
    """Write buffers one after the other."""
    for start in range(0, len(buffers), MAX_BUFFERS):
        batch = buffers[start : start + MAX_BUFFERS]
        total = sum(len(buffer) for buffer in batch)
        written = os.pwritev(fd, batch, position)
        while written < total:
            # A short write: a signal, or almost no space left (then the next call says so).
            rest = np.concatenate(batch)[written:]
            written += os.pwrite(fd, rest, position + written)
        position += total


def _write_aligned(fd: int, data: Bytes, position: int) -> int:
    """Write as much as a file opened for direct I/O takes; returns the number of bytes."""
    written = 0
    while written < len(data) and written % ALIGNMENT == 0:
        try:
            count = os.pwrite(fd, data[written:], position + written)
        except OSError as error:
            # Some file systems agree to direct I/O when a file is opened, and refuse it later.
            if error.errno != errno.EINVAL:
                raise
            break
        written += count
    return written


def copy_into(window: Bytes, buffers: Sequence[Bytes]) -> None:
    """Put the bytes of all buffers into the window, unless they are there already."""
    filled = 0
    for buffer in buffers:
        place = window[filled : filled + len(buffer)]
        if place.ctypes.data != buffer.ctypes.data:
            np.copyto(place, buffer)
        filled += len(buffer)


def units_of(
    chunk_bytes: Sequence[int], unit_bytes: int = UNIT_BYTES, block_bytes: int = BLOCK_BYTES
) -> Iterator[list[Span]]:
    """Divide a file into runs of at most `unit_bytes`; chunks are divided between blocks only."""
    unit: list[Span] = []
    filled = 0
    for index, size in enumerate(chunk_bytes):
        start = 0
        while start < size:
            room = unit_bytes - filled
            if room < size - start:
                room = room // block_bytes * block_bytes
            stop = min(size, start + room)
            if stop > start:
                unit.append(Span(index, start, stop))
                filled += stop - start
                start = stop
            if start < size or filled == unit_bytes:
                yield unit
                unit, filled = [], 0
    if unit:
        yield unit


def _span_bytes(
    tensors: Sequence[torch.Tensor], span: Span, scratch: Bytes, copier: Copier
) -> list[Bytes]:
    """Return bytes [start, stop) of a chunk: views of tensor memory where that is possible, copies
    in `scratch`.
    """
    buffers: list[Bytes] = []
    begin = 0
    for tensor in tensors:
        end = begin + tensor.numel() * tensor.element_size()
        low, high = max(span.start, begin), min(span.stop, end)
        if low < high:
            if is_plain_memory(tensor) and not copier.is_away(tensor):
                buffers.append(tensor_bytes(tensor)[low - begin : high - begin])
            else:
                copied = scratch[low - span.start : high - span.start]
                _copy_range(tensor, low - begin, high - begin, copied, copier)
                buffers.append(copied)
        begin = end
    return buffers


def _copy_range(tensor: torch.Tensor, start: int, stop: int, target: Bytes, copier: Copier) -> None:
    """Copy bytes [start, stop) of a tensor's row-major content, from any device and with any
    strides.
    """
    item = tensor.element_size()
    values = torch.from_numpy(target).view(tensor.dtype)
    if not (tensor.is_conj() or tensor.is_neg()):
        tensor, values = as_integers(tensor), as_integers(values)
    filled = 0
    for region in flat_range_regions(tuple(tensor.shape), start // item, stop // item):
        copier.copy(
            values[filled : filled + region.num_elements].view(region.shape),
            tensor[region.slices()],
        )
        filled += region.num_elements

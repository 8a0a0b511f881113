"""Writing of shard files straight from tensor memory.

Bytes are checksummed while they are in cache.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.libc import ALIGNMENT, DIRECT, copy_bytes, reserve, write_aligned, write_all
from distckpt._base.memory import Bytes, Copier, DeviceLayer, bounce_buffer, tensor_bytes
from distckpt._base.threads import (
    NUM_REQUESTS,
    NUM_THREADS,
    PART_BYTES,
    UNIT_BYTES,
    Progress,
    run_threads,
)
from distckpt._format.checksum import BLOCK_BYTES, block_checksums
from distckpt._geometry.region import flat_range_regions
from distckpt._geometry.units import Span, Unit, spans_within, units_of, units_of_spans
from distckpt._storage import locations

DIRECT_MIN_BYTES = 16 << 20
"""Size from which on files go around the page cache: below, one flush costs less than many waits
for the disk.
"""
SMALL_BYTES = 64 << 10
"""Write smaller pieces of tensors together with their neighbors: a copy costs less than a view and
a buffer of its own, and threads that make these wait for each other.
"""

FOLDER_RANKS = 256
"""Ranks per folder: object stores limit the requests below one prefix."""
_RANK = re.compile(r"(?:shard|rank)-(\d+)")

Fill: TypeAlias = Callable[[Unit, Bytes], list[Bytes]]
"""Function that returns the bytes of spans, in order: views of existing memory, or of the scratch
memory of their size that it receives.
"""


class NewFile(NamedTuple):
    """A file to write at a free location: header, then chunks.

    There are no gaps between chunks. `fill` gives the bytes of chunks, and is called by several
    threads. `device` is the device of the bytes, None for host memory.
    """

    location: str
    header: bytes
    chunk_bytes: Sequence[int]
    fill: Fill
    device: DeviceLayer | None = None

    def below(self, directory: str, suffix: str = "") -> NewFile:
        """Return the file with a location in a checkpoint's directory.

        Its location is a name in the checkpoint before; see `in_folder`.
        """
        return self._replace(location=f"{directory}/{in_folder(self.location, suffix)}")


@dataclass(frozen=True)
class WriteSettings:
    """Settings for writing files.

    Attributes:
        durable: whether bytes must be on disk when `write_files` returns.
        direct: whether to go around the page cache (`O_DIRECT`); None if that pays and the file
            system takes it.
        with_checksums: whether to compute checksums, of blocks of `block_bytes`.
        num_threads: threads that fill and write at the same time, each `UNIT_BYTES` at most.
        num_requests: requests that are made to an object store at the same time.
        max_part_bytes: memory that a request may use for a part of an object.
        progress: called with the number of bytes whenever some have been written, by several
            threads.
    """

    durable: bool = True
    direct: bool | None = None
    with_checksums: bool = True
    block_bytes: int = BLOCK_BYTES
    num_threads: int = NUM_THREADS
    num_requests: int = NUM_REQUESTS
    max_part_bytes: int = PART_BYTES
    progress: Progress | None = None


def write_files(files: Sequence[NewFile], settings: WriteSettings) -> npt.NDArray[np.uint64]:
    """Write files; return the checksums of all blocks, in order.

    The array is empty without checksums. One pool of threads takes the units of all files in order,
    so that the data of one file goes to disk (fsync) while the next is being written. Space for all
    of them is reserved first: a full disk is found before anything is written, if the file system
    can tell.
    """
    # They are parts of one checkpoint.
    are_local = not files or locations.is_local(files[0].location)
    outputs = [_Output(file, are_local, settings) for file in files]
    if are_local:
        for output in outputs:
            create_file(output.file.location, output.file.header, output.num_bytes)
        _write_and_close(outputs, settings)
    else:
        _upload(outputs, settings)
    units = itertools.chain.from_iterable(output.checksums for output in outputs)
    return np.array(list(itertools.chain.from_iterable(units)), np.uint64)


def write_span(
    file: NewFile, start: int, stop: int, settings: WriteSettings
) -> npt.NDArray[np.uint64]:
    """Write bytes [start, stop) of a local file.

    The file is made if it is not there. Return the checksums of the blocks that begin in them.

    Other processes may write the rest of the file at the same time, or the same bytes. Blocks at
    the edges are filled whole, and written as far as they are in the span; one that begins before
    it is filled by itself.
    """
    output = _Output(file, True, settings, (start, stop))
    _reserve(file.location, file.header if start == 0 else b"", start, stop, os.O_CREAT)
    _write_and_close([output], settings)
    return np.array(list(itertools.chain.from_iterable(output.checksums)), np.uint64)


def _write_and_close(outputs: Sequence[_Output], settings: WriteSettings) -> None:
    try:
        _write_units(outputs, settings)
    finally:
        for output in outputs:
            # Complete files are closed already. An error of closing other files would hide the one
            # that matters.
            with contextlib.suppress(OSError):
                output.close()


def _write_units(outputs: Sequence[_Output], settings: WriteSettings) -> None:
    units = []
    for output in outputs:
        for number in range(len(output.units)):
            units.append((output, number))
    # Writers through the page cache would wait for each other: the system lets one at a time into a
    # file.
    pays = any(output.may_be_direct or output.file.device for output in outputs)

    def write(unit: tuple[_Output, int]) -> None:
        output, number = unit
        output.write_unit(number)

    run_threads(write, units, settings.num_threads if pays else 1)


def _upload(outputs: Sequence[_Output], settings: WriteSettings) -> None:
    # Imported when it is needed: most programs write to local paths only.
    from distckpt._storage.uploads import OutgoingFile, upload_files

    files = []
    for output in outputs:
        location = output.file.location
        header = output.file.header
        files.append(OutgoingFile(location, header, output.sizes, output.buffers_of))
    upload_files(
        files,
        settings.num_requests,
        settings.max_part_bytes,
        settings.progress,
    )


def in_folder(name: str, suffix: str) -> str:
    """Return a file name with a suffix added to its folder.

    See `PreparedSave.folder_suffix`. With a suffix, a folder has the files of `FOLDER_RANKS` ranks.
    """
    folder, _, file = name.partition("/")
    folder += suffix
    rank = _RANK.match(file)
    if suffix and rank:
        number = (int(rank[1]) - 1) // FOLDER_RANKS
        if number:
            folder += f"-{number}"
    return f"{folder}/{file}"


def create_file(location: str, header: bytes, num_bytes: int) -> None:
    """Create a local file at its full size, and write its header. So a full disk is found early."""
    _reserve(location, header, 0, num_bytes, os.O_CREAT | os.O_EXCL)


def _reserve(location: str, header: bytes, start: int, stop: int, flags: int) -> None:
    """Reserve bytes [start, stop) of a local file; write its header."""
    try:
        fd = os.open(location, flags | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            # Not all of it: some file systems write zeros, and each process would wait for that.
            reserve(fd, stop - start, start)
            write_all(fd, [np.frombuffer(header, np.uint8)], 0)
        except BaseException:
            if flags & os.O_EXCL:
                os.unlink(location)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        locations.name_file(error, location)
        raise


class _Output:
    """A file, or its `span` [start, stop), while it is being written.

    Attributes:
        num_bytes: its size.
        units: the units that it is written in; a local file without data has one, so that it is
            finished like other files.
        sizes: sizes of the units.
        checksums: checksums of the blocks of each unit.
        may_be_direct: whether to go around the page cache, if the file system takes it.
    """

    def __init__(
        self,
        file: NewFile,
        is_local: bool,
        settings: WriteSettings,
        span: tuple[int, int] | None = None,
    ) -> None:
        self.file = file
        self._settings = settings
        self._unit_bytes = max(UNIT_BYTES, settings.block_bytes)
        self.num_bytes = len(file.header) + sum(file.chunk_bytes)
        self._span = span or (0, self.num_bytes)
        first = len(file.header)
        if span is None:
            self.units = list(units_of(file.chunk_bytes, self._unit_bytes, settings.block_bytes))
        else:
            self.units, first = self._cut_span()
        if is_local and not self.units:
            self.units = [[]]
        self.checksums: list[list[int]] = [[] for _ in self.units]
        self.sizes = []
        for unit in self.units:
            self.sizes.append(sum(stop - start for _, start, stop in unit))
        self._starts = list(itertools.accumulate(self.sizes, initial=first))
        pays = settings.durable and sum(self.sizes) >= DIRECT_MIN_BYTES
        self.may_be_direct = bool(DIRECT and (pays if settings.direct is None else settings.direct))
        self._lock = threading.Lock()
        self._num_pending = len(self.units)
        self._fd = -1
        self._direct_fd = -1

    def _cut_span(self) -> tuple[list[Unit], int]:
        """Return the units of the span, and the position of the first.

        A block that begins before the span is a unit of its own.
        """
        begin = len(self.file.header)
        block_bytes = self._settings.block_bytes
        start, stop = (max(0, edge - begin) for edge in self._span)
        spans = spans_within(self.file.chunk_bytes, start, stop, block_bytes)
        if not spans:
            return [], begin + start
        chunk, first, last = spans[0]
        position = begin + sum(self.file.chunk_bytes[:chunk]) + first
        edges: list[Unit] = []
        if position < self._span[0]:
            middle = min(first + block_bytes, last)
            edges = [[Span(chunk, first, middle)]]
            spans[0] = Span(chunk, middle, last)
        return [*edges, *units_of_spans(spans, self._unit_bytes, block_bytes)], position

    def write_unit(self, number: int) -> None:
        """Write a unit, and finish the file after its last one."""
        try:
            self._open()
            low, high = self._own_part(number)
            if self._direct_fd >= 0 and self.units[number]:
                self._write_directly(number, low, high)
            else:
                buffers = self.buffers_of(number)
                if (low, high) != (0, self.sizes[number]):
                    buffers = cut_buffers(buffers, low, high)
                write_all(self._fd, buffers, self._starts[number] + low)
            with self._lock:
                self._num_pending -= 1
                is_last = self._num_pending == 0
            if is_last:
                if self._settings.durable:
                    os.fsync(self._fd)
                self.close()
        except OSError as error:
            locations.name_file(error, self.file.location)
            raise
        if self._settings.progress is not None:
            self._settings.progress(self.sizes[number])

    def close(self) -> None:
        """Close the open descriptors."""
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
                if self.may_be_direct:
                    self._direct_fd = self._open_directly()

    def _open_directly(self) -> int:
        try:
            return os.open(self.file.location, os.O_WRONLY | os.O_CLOEXEC | DIRECT)
        except OSError as error:
            if error.errno == errno.EINVAL and self._settings.direct is None:
                return -1
            raise

    def buffers_of(self, number: int) -> list[Bytes]:
        """Return the bytes of a unit, and keep their checksums."""
        scratch = bounce_buffer("write", self._unit_bytes, self.file.device)
        buffers = self.file.fill(self.units[number], scratch)
        self._keep_checksums(number, buffers)
        return buffers

    def _keep_checksums(self, number: int, buffers: Sequence[Bytes]) -> None:
        if self._settings.with_checksums:
            sizes = [stop - start for _, start, stop in self.units[number]]
            checksums = block_checksums(sizes, buffers, self._settings.block_bytes)
            # A block that begins before the span belongs to the one before.
            self.checksums[number] = checksums[self._starts[number] < self._span[0] :]

    def _own_part(self, number: int) -> tuple[int, int]:
        """Return the range of a unit's bytes that is in the span."""
        start = self._starts[number]
        (first, last) = self._span
        return max(0, first - start), min(self.sizes[number], last - start)

    def _write_directly(self, number: int, low: int, high: int) -> None:
        """Write bytes [low, high) of a unit through an aligned window.

        Its unaligned edges go through the page cache.
        """
        position = self._starts[number]
        memory = bounce_buffer("write", self._unit_bytes + ALIGNMENT, self.file.device)
        phase = position % ALIGNMENT
        window = memory[phase : phase + self.sizes[number]]
        fill_window(window, self.file.fill(self.units[number], window))
        self._keep_checksums(number, [window])
        window = window[low:high]
        position = position + low
        num_bytes = high - low
        first = min(-position % ALIGNMENT, num_bytes)
        last = max(first, num_bytes - (position + num_bytes) % ALIGNMENT)
        written = first + write_aligned(self._direct_fd, window[first:last], position + first)
        write_all(self._fd, [window[:first]], position)
        write_all(self._fd, [window[written:]], position + written)


def cut_buffers(buffers: Sequence[Bytes], start: int, stop: int) -> list[Bytes]:
    """Return bytes [start, stop) of consecutive buffers."""
    cut = []
    begin = 0
    for buffer in buffers:
        cut.append(buffer[max(0, start - begin) : max(0, stop - begin)])
        begin += len(buffer)
    return [buffer for buffer in cut if len(buffer)]


def fill_window(window: Bytes, buffers: Sequence[Bytes]) -> None:
    """Copy buffers into the window, unless they are there already."""
    filled = 0
    for buffer in buffers:
        place = window[filled : filled + len(buffer)]
        if place.ctypes.data != buffer.ctypes.data:
            np.copyto(place, buffer)
        filled += len(buffer)


# --- Bytes of tensors -----------------------------------------------------------------------------


def file_of_tensors(
    location: str, header: bytes, contents: Sequence[Sequence[torch.Tensor]]
) -> NewFile:
    """Describe a file whose chunks are the row-major contents of tensors.

    A chunk may consist of several tensors, one after the other. Call it in the thread that
    computes: work that this thread has queued on a device is done before bytes are copied.
    """
    sizes = []
    for chunk in contents:
        sizes.append(sum(tensor.nbytes for tensor in chunk))
    copier = Copier(itertools.chain.from_iterable(contents))

    def fill(unit: Unit, scratch: Bytes) -> list[Bytes]:
        try:
            return _bytes_of(contents, unit, scratch, copier)
        finally:
            if copier.layer is not None:
                # Also after an error: the memory is used again.
                copier.wait()

    return NewFile(location, header, sizes, fill, copier.layer)


def _bytes_of(
    contents: Sequence[Sequence[torch.Tensor]],
    unit: Unit,
    scratch: Bytes,
    copier: Copier,
) -> list[Bytes]:
    """Return the bytes of a unit.

    These are views of large pieces of tensor memory, and of `scratch`, which has a place for each
    byte, for everything else.
    """
    buffers: list[Bytes] = []
    address = scratch.ctypes.data
    # The bytes between these in `scratch` are not among the buffers yet.
    first = end = 0
    for span in unit:
        begin = 0
        for tensor in contents[span.chunk]:
            size = tensor.nbytes
            low = max(span.start - begin, 0)
            high = min(span.stop - begin, size)
            begin += size
            if low >= high:
                continue
            start = end
            end = end + high - low
            if not copier.is_plain(tensor):
                _copy_range(tensor, low, high, scratch[start:end], copier)
            elif high - low < SMALL_BYTES:
                copy_bytes(address + start, tensor.data_ptr() + low, high - low)
            else:
                buffers += [scratch[first:start], tensor_bytes(tensor)[low:high]]
                first = end
    return [buffer for buffer in (*buffers, scratch[first:end]) if len(buffer)]


def _copy_range(
    tensor: torch.Tensor,
    start: int,
    stop: int,
    target: Bytes,
    copier: Copier,
) -> None:
    """Copy bytes [start, stop) of a tensor's row-major content.

    The tensor may have any strides and be on any device.
    """
    item = tensor.element_size()
    values = torch.from_numpy(target).view(tensor.dtype)
    filled = 0
    for region in flat_range_regions(tuple(tensor.shape), start // item, stop // item):
        place = values[filled : filled + region.num_elements].view(region.shape)
        copier.copy(place, tensor[region.slices()])
        filled += region.num_elements

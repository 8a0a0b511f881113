"""Reading of chunks in file order, into targets or scratch memory.

The steps of a read:

1. Parts: ranges of bytes of a chunk, each with its target. `parts_of` makes them of the copies of a
   plan, `whole_chunks` of objects.
2. Units: `in_file_order` sorts the parts by file and position, and `units` joins neighbors. A
   thread reads one unit at a time.
3. Contents: `content_for` chooses the memory of a unit: large plain targets directly, and scratch
   memory for all other bytes. Short runs of columns (`even_runs`) leave a window of it at once,
   while it is in cache.
4. Finish: `_verify` compares a unit with its checksums while it is in cache, and `deliver` copies,
   converts or scatters the bytes in scratch memory to their targets.

Parts and contents are in `read_parts.py`, units and their verification here.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np

from distckpt._base.errors import CorruptCheckpointError, add_to_message
from distckpt._base.lazy import torch
from distckpt._base.libc import fetch, read_into
from distckpt._base.memory import (
    Bytes,
    Copier,
    bounce_buffer,
    copy_into,
    is_plain_memory,
    run_bytes,
)
from distckpt._base.threads import NUM_REQUESTS, NUM_THREADS, UNIT_BYTES, Progress, run_threads
from distckpt._format.checksum import block_checksums
from distckpt._format.stored_checkpoint import (
    StoredCheckpoint,
    check_files,
    checksums_of_ranges,
    missing_file,
)
from distckpt._geometry.region import IntArray, num_outer_axes, run_starts
from distckpt._geometry.units import Span, Unit, sizes_of, units_of
from distckpt._io.read_parts import (
    LONG_PITCH_BYTES,
    NOT_PLAIN,
    REQUEST_BYTES,
    Content,
    PartTable,
    ReadPart,
    Runs,
    content_for,
    deliver,
    even_runs,
    useful_bytes,
)
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage import locations, object_store
from distckpt._storage.open_files import OpenFiles

_Fill = Callable[[Sequence[Bytes], int], int]
"""Fills buffers from a position of a file on; returns the bytes read."""

PIECE_BYTES = 1 << 20
"""Bytes that one call reads from a local file: few enough to be in cache still when their checksums
are computed, and when runs are copied from them. A unit has several pieces, since the overhead of
a unit would slow them down.
"""
_FEW_FILES = 2
"""Files that one thread reads if they have a piece to read: tensors and objects of one rank."""
MAX_GAP_BYTES = 256 << 10
"""Merge reads whose gap is smaller: fetching the gap is cheaper than another request."""


def read_chunks(stored: StoredCheckpoint, chunks: Sequence[int]) -> list[bytes]:
    """Return the stored bytes of some chunks, after comparing their checksums."""
    return read_parts(stored, (), chunks)


def read_in_pieces(stored: StoredCheckpoint, chunk: int, piece_bytes: int) -> Iterator[Bytes]:
    """Yield the stored bytes of a chunk, about `piece_bytes` at a time.

    The memory of a piece is used again for the next one.
    """
    check_files(stored, [chunk])
    size = int(stored.manifest.num_bytes[chunk])
    block_bytes = stored.manifest.block_bytes
    step = max(1, piece_bytes // block_bytes) * block_bytes
    memory = np.empty(min(step, size), np.uint8)
    for start in range(0, size, step):
        stop = min(start + step, size)
        part = ReadPart(chunk, start, stop, memory[: stop - start], lead=0)
        read_parts(stored, [part])
        yield part.target


def read_parts(
    stored: StoredCheckpoint,
    parts: Sequence[ReadPart],
    chunks: Sequence[int] = (),
    copier: Copier | None = None,
    num_threads: int = NUM_THREADS,
    progress: Progress | None = None,
) -> list[bytes]:
    """Read parts of chunks, and whole chunks, whose bytes are returned.

    Each thread has a buffer of about `UNIT_BYTES`, or `REQUEST_BYTES`. `progress` is called with
    numbers of bytes, from several threads. Damage raises CorruptCheckpointError, which names file,
    key, region and bytes.
    """
    check_files(stored, [*(part.chunk for part in parts), *chunks])
    whole = []
    for chunk in chunks:
        # Its size agrees with that of its file.
        size = int(stored.manifest.num_bytes[chunk])
        whole.append(ReadPart(chunk, 0, size, np.empty(size, np.uint8), lead=0))
    table = in_file_order(stored, copier or Copier(()), [*parts, *whole])
    _read_table(table, num_threads, progress)
    return [part.target.tobytes() for part in whole]


def _read_table(table: PartTable, num_threads: int, progress: Progress | None) -> None:
    stored = table.stored
    # The files of the checkpoint stay open, new ones do not.
    with contextlib.nullcontext(stored.files) if stored.files else OpenFiles() as files:
        reading = Reading(table, files, progress)
        if not reading.is_local:
            run_threads(reading.fetch, reading.near_units(), num_threads)
            return
        num_bytes = sum(part.stop - part.start for part in table.parts)
        if num_bytes <= PIECE_BYTES and len({*table.files.tolist()}) <= _FEW_FILES:
            # Starting other threads takes longer than this.
            num_threads = 1
        # A disk is fastest where each of a few threads reads on and on.
        run_threads(reading.read, reading.units(), num_threads, in_stretches=True)


def unit_bytes_at(location: str) -> int:
    """Return the size of a unit, which one thread reads."""
    return UNIT_BYTES if locations.is_local(location) else REQUEST_BYTES


def num_threads_at(location: str) -> int:
    """Return the default number of reading threads for a location."""
    return NUM_THREADS if locations.is_local(location) else NUM_REQUESTS


# --- Units ----------------------------------------------------------------------------------------


def in_file_order(
    stored: StoredCheckpoint,
    copier: Copier,
    parts: Sequence[ReadPart],
    first_files: IntArray | int = 0,
) -> PartTable:
    """Sort parts by file and position.

    Files of a part count from its number in `first_files` on: parts with other ones are read apart.
    """
    manifest = stored.manifest
    chunks = np.array([part.chunk for part in parts], np.int64)
    starts = np.array([part.start for part in parts], np.int64)
    files = manifest.file_ids[chunks] + first_files
    positions = manifest.first_bytes[chunks] + starts
    order = np.lexsort((positions, files))
    in_order = [parts[i] for i in order.tolist()]
    return PartTable(stored, copier, in_order, files[order], positions[order])


class Reading:
    """The reads of one call, shared by all threads."""

    def __init__(
        self,
        table: PartTable,
        files: OpenFiles,
        progress: Progress | None = None,
    ) -> None:
        stored = table.stored
        self.stored = stored
        self.is_local = locations.is_local(stored.root)
        self.verifies = stored.verifies
        self.files = files
        self.table = table
        self._progress = progress
        if self.verifies:
            ranges = [(part.chunk, part.start, part.stop) for part in table.parts]
            self._expected, self._first_expected = checksums_of_ranges(stored, table.files, ranges)

    def units(self) -> Iterator[Unit]:
        """Divide neighboring parts of a file into units for threads.

        Spans have the numbers of parts, and positions in them. A sparse part is a unit; units of a
        large scattered part have no others.
        """
        parts = self.table.parts
        files = self.table.files
        positions = self.table.positions
        sizes = [part.stop - part.start for part in parts]
        is_alone = np.zeros(len(parts), np.bool_)
        for number, part in enumerate(parts):
            if part.lead == NOT_PLAIN:
                is_alone[number] = part.is_sparse or sizes[number] > PIECE_BYTES
        begins_run = np.ones(len(parts), np.bool_)
        begins_run[1:] = (
            (files[1:] != files[:-1])
            | (positions[1:] != (positions + sizes)[:-1])
            | is_alone[1:]
            | is_alone[:-1]
        )
        unit_bytes = UNIT_BYTES if self.is_local else REQUEST_BYTES
        block_bytes = self.stored.manifest.block_bytes
        for first, end in itertools.pairwise([*np.flatnonzero(begins_run).tolist(), len(parts)]):
            if parts[first].is_sparse:
                yield [Span(first, 0, sizes[first])]
                continue
            yield from units_of(sizes[first:end], unit_bytes, block_bytes, first)

    def near_units(self) -> list[list[Unit]]:
        """Group units that one request to an object store reads.

        Each request includes the gaps between its units.
        """
        groups: list[list[Unit]] = []
        file = start = stop = -1
        for unit in self.units():
            first = self.position(unit)
            end = first + sum(sizes_of(unit))
            is_near = self.file_of(unit) == file and first - stop <= MAX_GAP_BYTES
            if is_near and max(stop, end) - start <= REQUEST_BYTES:
                groups[-1].append(unit)
                stop = max(stop, end)
            else:
                groups.append([unit])
                file = self.file_of(unit)
                start = first
                stop = end
        return groups

    def read(self, unit: Unit) -> None:
        """Read a unit of a local file, and finish it."""
        part = self.table.parts[unit[0].chunk]
        if part.is_sparse:
            with self._naming(unit, part.stop - part.start):
                _read_runs(self, part)
            self._count(unit)
            return
        runs = even_runs(self.table, unit)
        path = self._path(unit)
        if runs is not None:
            with self._naming(unit, unit[0].num_bytes), self.open(path) as fd:
                self._verify(unit, self._read_by_windows(unit, runs, fd))
            self._count(unit)
            return
        content = content_for(self.table, unit)
        with self._naming(unit, len(content.scratch)), self.open(path) as fd:
            piece_bytes = PIECE_BYTES if self.verifies else UNIT_BYTES
            fill = partial(read_into, fd)
            self._verify(unit, self._read_pieces(unit, content.buffers, fill, piece_bytes))
        self._finish(unit, content)

    def open(self, path: str) -> AbstractContextManager[int]:
        """Open a local file, which must be unchanged since it was described."""
        return self.files.open(path, self.stored.states.get(path))

    def fetch(self, units: list[Unit]) -> None:
        """Read units from an object store with one request; finish them."""
        if len(units) == 1:
            self._fetch_unit(units[0])
            return
        file, position, stop = self.range_of(units)
        with self._naming(units[0], stop - position):
            path = self.stored.path_of_file(file)
            data = object_store.at(path, self.files.decoded).read_range(position, stop - position)
        for unit in units:
            content = content_for(self.table, unit)
            num_read = copy_into(content.buffers, data[self.position(unit) - position :])
            if num_read < sum(map(len, content.buffers)):
                raise _cut_off(self, unit, self.position(unit), num_read)
            self._verify(unit, content.buffers)
            self._finish(unit, content)

    def _fetch_unit(self, unit: Unit) -> None:
        """Read a unit from an object store into its memory; finish it."""
        content = content_for(self.table, unit)
        num_bytes = len(content.scratch)
        with self._naming(unit, num_bytes):
            fill = object_store.at(self._path(unit), self.files.decoded).read_into
            self._verify(unit, self._read_pieces(unit, content.buffers, fill, num_bytes))
        self._finish(unit, content)

    def _read_pieces(
        self, unit: Unit, buffers: Sequence[Bytes], fill: _Fill, piece_bytes: int
    ) -> Iterator[Bytes]:
        """Fill the buffers of a unit in order, and yield them."""
        position = begin = self.position(unit)
        for piece, num_bytes in pieces_of(buffers, piece_bytes):
            num_read = fill(piece, position)
            position += num_read
            if num_read < num_bytes:
                raise _cut_off(self, unit, begin, position - begin)
            yield from piece

    def _read_by_windows(self, unit: Unit, runs: Runs, fd: int) -> Iterator[Bytes]:
        """Yield the bytes of a unit, from which runs are then copied."""
        (span,) = unit
        window = bounce_buffer("read", min(PIECE_BYTES, span.num_bytes))
        num_whole, rest = divmod(span.num_bytes, len(window))
        buffers = [window] * num_whole + [window[:rest]] * bool(rest)
        start = self.table.parts[span.chunk].start + span.start
        for piece in self._read_pieces(unit, buffers, partial(read_into, fd), len(window)):
            yield piece
            runs.copy_from(piece, start)
            start += len(piece)

    def _verify(self, unit: Unit, filled: Iterable[Bytes]) -> None:
        """Compare the blocks of a unit with their checksums; the bytes come piece by piece."""
        if self.verifies:
            block = self.stored.manifest.block_bytes
            sizes = [stop - start for _, start, stop in unit]
            actual = block_checksums(sizes, filled, block)
            first = int(self._first_expected[unit[0].chunk]) + unit[0].start // block
            expected: list[int] = self._expected[first : first + len(actual)].tolist()
            if actual != expected:
                pairs = zip(actual, expected, strict=True)
                raise _mismatch(self, unit, next(i for i, (a, b) in enumerate(pairs) if a != b))
        # The rest, and what follows the last piece.
        collections.deque(filled, maxlen=0)

    def _finish(self, unit: Unit, content: Content) -> None:
        """Copy a unit to its targets, and count it."""
        if content.small or content.values:
            deliver(self.table, content)
        self._count(unit)

    def _count(self, unit: Unit) -> None:
        if self._progress is not None:
            self._progress(sum(useful_bytes(self.table, span) for span in unit))

    @contextlib.contextmanager
    def _naming(self, unit: Unit, num_bytes: int) -> Iterator[None]:
        """Name the file, place and first key in errors of the system."""
        try:
            yield
        except FileNotFoundError as error:
            raise missing_file(self.stored, self._path(unit)) from error
        except OSError as error:
            start = self.position(unit)
            key = self.stored.key_of(self.table.parts[unit[0].chunk].chunk)
            add_to_message(error, f"bytes {start} to {start + num_bytes}, from key {key!r} on")
            raise

    def _path(self, unit: Unit) -> str:
        """Return the path of the file of a unit."""
        return self.stored.path_of_file(self.file_of(unit))

    def position(self, unit: Unit) -> int:
        """Return the position of a unit in its file."""
        return int(self.table.positions[unit[0].chunk]) + unit[0].start

    def range_of(self, units: list[Unit]) -> tuple[int, int, int]:
        """Return the file and the range of bytes of some units."""
        stop = max(self.position(unit) + sum(sizes_of(unit)) for unit in units)
        return self.file_of(units[0]), self.position(units[0]), stop

    def file_of(self, unit: Unit) -> int:
        """Return the number of the file of a unit."""
        return int(self.table.files[unit[0].chunk])


def _read_runs(reading: Reading, part: ReadPart) -> None:
    """Read a sparse part run by run.

    Runs go straight to their target if their memory is contiguous there.
    """
    stored = reading.stored
    copier = reading.table.copier
    region = part.region
    target = part.target
    shape = stored.manifest.chunk_region(part.chunk).shape
    dtype = stored.dtype_of(part.chunk)
    outer = num_outer_axes(shape, region)
    goal = target
    has_runs = target.dtype == dtype and is_plain_memory(target[(0,) * outer])
    if not has_runs or copier.is_away(target):
        scratch = bounce_buffer("read", region.num_elements * dtype.itemsize, copier.layer)
        goal = torch.from_numpy(scratch).view(dtype).view(region.shape)
    memory = run_bytes(goal, outer)
    positions = runs_of(stored, part)[0].tolist()
    with reading.open(stored.path_of(part.chunk)) as fd:
        if are_near(part, len(positions)):
            fetch(fd, positions[0], part.stop - part.start)
        for position, index in zip(positions, np.ndindex(memory.shape[:-1]), strict=True):
            run = memory[index]
            num_read = read_into(fd, [run], position)
            if num_read < len(run):
                raise _file_ends(stored, part.chunk, position + num_read)
    if goal is not target:
        copier.copy(target, goal)
        copier.wait()


def runs_of(stored: StoredCheckpoint, part: ReadPart) -> tuple[IntArray, int]:
    """Return the positions and the size of a sparse part's runs."""
    shape = stored.manifest.chunk_region(part.chunk).shape
    item = stored.dtype_of(part.chunk).itemsize
    first_byte = int(stored.manifest.first_bytes[part.chunk])
    starts = first_byte + run_starts(shape, part.region) * item
    return starts, part.region.num_elements * item // len(starts)


def are_near(part: ReadPart, num_runs: int) -> bool:
    """Whether a sparse part is fetched with its gaps."""
    return part.stop - part.start < num_runs * LONG_PITCH_BYTES


def pieces_of(buffers: Sequence[Bytes], max_bytes: int) -> Iterator[tuple[list[Bytes], int]]:
    """Divide consecutive buffers into pieces of `max_bytes`.

    The last piece may have fewer bytes. Yield each piece with its number of bytes.
    """
    piece: list[Bytes] = []
    room = max_bytes
    for buffer in buffers:
        start = 0
        size = len(buffer)
        while start < size:
            stop = min(start + room, size)
            piece.append(buffer[start:stop])
            room -= stop - start
            start = stop
            if not room:
                yield piece, max_bytes
                piece = []
                room = max_bytes
    if piece:
        yield piece, max_bytes - room


# --- Damage ---------------------------------------------------------------------------------------


def _mismatch(reading: Reading, unit: Unit, number: int) -> CorruptCheckpointError:
    """Return the error about the damaged block of a unit."""
    stored = reading.stored
    manifest = reading.stored.manifest
    block = manifest.block_bytes
    starts = []
    for span in unit:
        for position in range(span.start, span.stop, block):
            starts.append((span.chunk, position))
    part = reading.table.parts[starts[number][0]]
    chunk = part.chunk
    first = int(manifest.first_bytes[chunk])
    start = first + part.start + starts[number][1]
    stop = min(start + block, first + int(manifest.num_bytes[chunk]))
    key = stored.key_of(chunk)
    name = "common state" if key == COMMON_KEY else f"key {key!r}"
    event = "the save"
    way = ""
    if manifest.origin is not None:
        event = "it was sealed"
        way = " If that was meant to be, seal it again (--overwrite)."
    return CorruptCheckpointError(
        f"Checksum mismatch in {stored.path_of(chunk)!r}, bytes {start} to {stop}: chunk "
        f"{manifest.chunk_region(chunk)} of {name} was damaged or replaced after {event}. Restore "
        f"the file from a copy or load another checkpoint.{way}"
    )


def _cut_off(reading: Reading, unit: Unit, position: int, num_read: int) -> CorruptCheckpointError:
    """Return the error about a file that ends within a unit.

    `position` is where the unit begins.
    """
    ends = itertools.accumulate(sizes_of(unit))
    span = next(span for span, end in zip(unit, ends, strict=True) if end > num_read)
    return _file_ends(reading.stored, reading.table.parts[span.chunk].chunk, position + num_read)


def _file_ends(stored: StoredCheckpoint, chunk: int, end: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{stored.path_of(chunk)!r} ends at byte {end}, but the manifest says that key "
        f"{stored.key_of(chunk)!r} goes on after it: the file was cut off. Restore it from a "
        "copy or load another checkpoint."
    )

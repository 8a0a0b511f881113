"""Reading of chunks in file order, into targets or scratch memory.

The steps of a read:

1. Parts: `parts_of` divides the copies of a plan into ranges of bytes of a chunk, each with its
   target.
2. Units: `_Reading` sorts the parts by file and position, and `units` joins neighbors. A thread
   reads one unit at a time.
3. Contents: `_content_for` chooses the memory of a unit: large plain targets directly, and scratch
   memory for all other bytes.
4. Finish: `_finish` compares a unit with its checksums while it is in cache, then copies, converts
   or scatters the bytes in scratch memory to their targets.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from distckpt._base.dtypes import as_integers
from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.lazy import torch
from distckpt._base.libc import copy_bytes, fetch, read_into
from distckpt._base.memory import (
    Bytes,
    Copier,
    bounce_buffer,
    is_plain_memory,
    memory_at,
    run_bytes,
)
from distckpt._base.threads import NUM_REQUESTS, NUM_THREADS, UNIT_BYTES, run_threads
from distckpt._format.checksum import block_checksums, checksum
from distckpt._format.checksum_files import Checksums, checksums_of_blocks, fetch_checksums
from distckpt._format.marker import file_size
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import (
    IntArray,
    Region,
    flat_range_regions,
    flat_start,
    intersect,
    num_outer_axes,
    run_starts,
)
from distckpt._geometry.units import Span, units_of
from distckpt._io.read_parts import NOT_PLAIN, REACH_BYTES, ReadPart, parts_of
from distckpt._plan.load import Copy
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage import locations, object_store
from distckpt._storage.open_files import OpenFiles

PIECE_BYTES = 512 << 10
"""Bytes that one call reads from a local file: few enough to be in cache still when their checksums
are computed. A unit has several pieces, since the overhead of a unit would slow them down.
"""
REQUEST_BYTES = 16 << 20
"""Size of a request to an object store: enough that its answer takes longer than the way there."""
FETCH_PITCH_BYTES = 64 << 10
"""Read runs closer than this with the gaps: one by one is slower."""
MAX_GAP_BYTES = 256 << 10
"""Merge reads whose gap is smaller: fetching the gap is cheaper than another request."""
SMALL_BYTES = 16 << 10
"""Copy smaller pieces through scratch memory: a copy costs less than a buffer of its own."""
LONG_RUN_BYTES = 256 << 10
"""Read longer runs of a scattered region straight into targets. Shorter ones, copied together out
of scratch memory, take less time: threads hash pieces of blocks by turns.
"""


def read_copies(
    stored: StoredCheckpoint,
    copies: Sequence[Copy],
    targets: Sequence[torch.Tensor],
    num_threads: int = NUM_THREADS,
    progress: Callable[[int], None] | None = None,
    *,
    with_check: bool = True,
) -> None:
    """Fill requested regions from chunks.

    `targets` has for each request a tensor of its region's shape, of any strides, device and dtype.
    Each thread has a buffer of about `UNIT_BYTES`, or `REQUEST_BYTES`. `progress` is called
    with numbers of bytes, from several threads. `with_check=False` leaves `check_files` to the
    caller. Damage raises CorruptCheckpointError, which names file, key, region and bytes.
    """
    # Checksums are of blocks: to verify them, the bytes between the runs are needed as well.
    is_local = locations.is_local(stored.location)
    exact = is_local and not stored.verifies
    reach_bytes = REACH_BYTES if is_local else REQUEST_BYTES
    copier = Copier(targets)
    parts = parts_of(stored, copies, targets, copier, exact=exact, reach_bytes=reach_bytes)
    if with_check:
        check_files(stored, [part.chunk for part in parts])
    with _open_files(stored) as files:
        reading = _Reading(stored, _in_file_order(stored, parts), copier, files, progress)
        reading.run(num_threads)


def read_chunks(stored: StoredCheckpoint, chunks: Sequence[int]) -> list[bytes]:
    """Return the stored bytes of some chunks, after comparing their checksums."""
    # Before memory is allocated: sizes may be damaged.
    check_files(stored, chunks)
    contents = [np.empty(int(stored.manifest.num_bytes[chunk]), np.uint8) for chunk in chunks]
    read_chunks_into(stored, chunks, contents, with_check=False)
    return [content.tobytes() for content in contents]


def read_chunks_into(
    stored: StoredCheckpoint,
    chunks: Sequence[int],
    memories: Sequence[Bytes],
    num_threads: int = NUM_THREADS,
    *,
    with_check: bool = True,
) -> None:
    """Read complete chunks into memory of their size."""
    if with_check:
        check_files(stored, chunks)
    parts = []
    for chunk, memory in zip(chunks, memories, strict=True):
        parts.append(ReadPart(chunk, 0, len(memory), memory, lead=0))
    with _open_files(stored) as files:
        reading = _Reading(stored, _in_file_order(stored, parts), Copier(()), files)
        reading.run(num_threads)


def read_in_pieces(stored: StoredCheckpoint, chunk: int, piece_bytes: int) -> Iterator[Bytes]:
    """Yield the stored bytes of a chunk, about `piece_bytes` at a time.

    The memory of a piece is used again for the next one.
    """
    check_files(stored, [chunk])
    size = int(stored.manifest.num_bytes[chunk])
    block_bytes = stored.manifest.block_bytes
    step = max(1, piece_bytes // block_bytes) * block_bytes
    memory = np.empty(min(step, size), np.uint8)
    with _open_files(stored) as files:
        for start in range(0, size, step):
            stop = min(start + step, size)
            part = ReadPart(chunk, start, stop, memory[: stop - start], lead=0)
            _Reading(stored, _in_file_order(stored, [part]), Copier(()), files).run(NUM_THREADS)
            yield part.target


def _open_files(stored: StoredCheckpoint) -> AbstractContextManager[OpenFiles]:
    """Return the checkpoint's open files, or new ones for the context."""
    if stored.files:
        return contextlib.nullcontext(stored.files)
    return OpenFiles()


def unit_bytes_at(location: str) -> int:
    """Return the size of a unit, which one thread reads."""
    return UNIT_BYTES if locations.is_local(location) else REQUEST_BYTES


def num_threads_at(location: str) -> int:
    """Return the default number of reading threads for a location."""
    return NUM_THREADS if locations.is_local(location) else NUM_REQUESTS


# --- Units ----------------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """Parts in file order, with their files and positions."""

    parts: list[ReadPart]
    files: IntArray
    positions: IntArray


def _in_file_order(stored: StoredCheckpoint, parts: Sequence[ReadPart]) -> _Parts:
    manifest = stored.manifest
    chunks = np.array([part.chunk for part in parts], np.int64)
    starts = np.array([part.start for part in parts], np.int64)
    files = manifest.file_ids[chunks]
    positions = manifest.first_bytes[chunks] + starts
    order = np.lexsort((positions, files))
    return _Parts([parts[i] for i in order.tolist()], files[order], positions[order])


class _Reading:
    """The reads of one call, shared by all threads."""

    def __init__(
        self,
        stored: StoredCheckpoint,
        sorted_parts: _Parts,
        copier: Copier,
        files: OpenFiles,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.stored = stored
        self.parts = sorted_parts.parts
        self.copier = copier
        self.files = files
        self._sorted_parts = sorted_parts
        self._progress = progress
        self._paths = {file: stored.path_of_file(file) for file in {*sorted_parts.files.tolist()}}
        if stored.verifies:
            self._expected, self._first_expected = _expected_checksums(stored, sorted_parts)

    def run(self, num_threads: int) -> None:
        """Read everything. A disk is fastest where each of a few threads reads on and on."""
        if locations.is_local(self.stored.location):
            run_threads(self.read, self.units(), num_threads, in_stretches=True)
        else:
            run_threads(self.fetch, self._near_units(), num_threads)

    def units(self) -> Iterator[list[Span]]:
        """Divide neighboring parts of a file into units for threads.

        Spans have the numbers of parts, and positions in them. A sparse part is a unit.
        """
        parts, files, positions = self._sorted_parts
        sizes = [part.stop - part.start for part in parts]
        is_sparse = np.array([part.is_sparse for part in parts], np.bool_)
        begins_run = np.ones(len(parts), np.bool_)
        begins_run[1:] = (
            (files[1:] != files[:-1])
            | (positions[1:] != (positions + sizes)[:-1])
            | is_sparse[1:]
            | is_sparse[:-1]
        )
        unit_bytes = unit_bytes_at(self.stored.location)
        block_bytes = self.stored.manifest.block_bytes
        for first, end in itertools.pairwise([*np.flatnonzero(begins_run).tolist(), len(parts)]):
            if parts[first].is_sparse:
                yield [Span(first, 0, sizes[first])]
                continue
            yield from units_of(sizes[first:end], unit_bytes, block_bytes, first)

    def _near_units(self) -> list[list[list[Span]]]:
        """Group units that one request to an object store reads.

        Each request includes the gaps between its units.
        """
        groups: list[list[list[Span]]] = []
        file = start = stop = -1
        for unit in self.units():
            first = self._position(unit)
            end = first + sum(span.num_bytes for span in unit)
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

    def read(self, unit: list[Span]) -> None:
        """Read a unit of a local file, and finish it."""
        part = self.parts[unit[0].chunk]
        if part.is_sparse:
            _read_runs(self, part)
            self._count(unit)
            return
        content = _content_for(self, unit)
        with self.open(self._paths[self.file_of(unit)]) as fd:
            self._finish(unit, content, self._read_pieces(unit, content.buffers, fd))

    def open(self, path: str) -> AbstractContextManager[int]:
        """Open a local file, which must be unchanged since it was described."""
        return self.files.open(path, self.stored.states.get(path))

    def fetch(self, units: list[list[Span]]) -> None:
        """Read units from an object store with one request; finish them."""
        position = self._position(units[0])
        stop = max(self._position(unit) + sum(span.num_bytes for span in unit) for unit in units)
        path = self._paths[self.file_of(units[0])]
        data = _fetch(self.stored, path, position, stop - position)
        for unit in units:
            content = _content_for(self, unit)
            num_read = _fill(content.buffers, data[self._position(unit) - position :])
            if num_read < sum(map(len, content.buffers)):
                raise _cut_off(self, unit, self._position(unit), num_read)
            self._finish(unit, content, content.buffers)

    def _read_pieces(self, unit: list[Span], buffers: Sequence[Bytes], fd: int) -> Iterator[Bytes]:
        """Fill the buffers of a unit in order, and yield them."""
        position = begin = self._position(unit)
        piece_bytes = PIECE_BYTES if self.stored.verifies else UNIT_BYTES
        for piece, num_bytes in pieces_of(buffers, piece_bytes):
            num_read = read_into(fd, piece, position)
            position += num_read
            if num_read < num_bytes:
                raise _cut_off(self, unit, begin, position - begin)
            yield from piece

    def _finish(self, unit: list[Span], content: _Content, filled: Iterable[Bytes]) -> None:
        """Verify a unit while it is filled; copy it to its targets."""
        if self.stored.verifies:
            _verify(self, unit, filled)
        else:
            collections.deque(filled, maxlen=0)
        if content.small or content.values:
            _deliver(self, content)
        self._count(unit)

    def _count(self, unit: list[Span]) -> None:
        if self._progress is not None:
            self._progress(sum(_useful_bytes(self, span) for span in unit))

    def expected(self, unit: list[Span], num_blocks: int) -> list[int]:
        """Return the stored checksums of a unit's `num_blocks` blocks."""
        block_bytes = self.stored.manifest.block_bytes
        first = int(self._first_expected[unit[0].chunk]) + unit[0].start // block_bytes
        checksums: list[int] = self._expected[first : first + num_blocks].tolist()
        return checksums

    def _position(self, unit: list[Span]) -> int:
        """Return the position of a unit in its file."""
        return int(self._sorted_parts.positions[unit[0].chunk]) + unit[0].start

    def file_of(self, unit: list[Span]) -> int:
        """Return the number of the file of a unit."""
        return int(self._sorted_parts.files[unit[0].chunk])


class _Goal(NamedTuple):
    """Bytes of a unit that a target holds unchanged.

    They begin at `place` in the unit, and at `address` in memory.
    """

    address: int
    place: int
    num_bytes: int


class _Content(NamedTuple):
    """The memory that a unit is read into.

    Attributes:
        buffers: memory in the order of the bytes; some buffers are pieces of `scratch`.
        scratch: scratch memory as large as the unit.
        small: bytes in `scratch` that go elsewhere as they are.
        values: spans in `scratch` whose values are converted or scattered, and where they begin.
    """

    buffers: list[Bytes]
    scratch: Bytes
    small: list[_Goal]
    values: list[tuple[Span, int]]


def _content_for(reading: _Reading, unit: list[Span]) -> _Content:
    """Choose the memory for a unit: large plain targets, and scratch memory."""
    scratch = bounce_buffer("read", sum(span.num_bytes for span in unit), reading.copier.layer)
    goals, values = _goals_of(reading, unit)
    content = _Content([], scratch, [], values)
    end = 0
    for goal in goals:
        if goal.num_bytes < SMALL_BYTES:
            content.small.append(goal)
            continue
        content.buffers.extend([scratch[end : goal.place], memory_at(*goal[::2])])
        end = goal.place + goal.num_bytes
    content.buffers.append(scratch[end:])
    content.buffers[:] = [buffer for buffer in content.buffers if len(buffer)]
    return content


def _goals_of(reading: _Reading, unit: list[Span]) -> tuple[list[_Goal], list[tuple[Span, int]]]:
    """Return the goals of a unit's plain bytes, and its other spans.

    Values of the other spans are converted or scattered; each span comes with its place in the
    unit. Neighbors that go to neighboring memory are one goal.
    """
    goals: list[_Goal] = []
    values: list[tuple[Span, int]] = []
    begin = after = -1
    end = 0
    for span in unit:
        start = end
        end = end + span.stop - span.start
        part = reading.parts[span.chunk]
        if part.lead == NOT_PLAIN:
            runs = _long_runs(reading, span, start)
            goals.extend(runs)
            if not runs:
                values.append((span, start))
            continue
        if part.lead == span.start == 0:
            low = 0
            high = min(span.stop, part.target.nbytes)
        else:
            low, high = _bytes_of_target(part, span)
        address = _address(part.target) + low
        place = start + part.lead + low - span.start
        if address == after and place == begin:
            last = goals.pop()
            goals.append(_Goal(last.address, last.place, last.num_bytes + high - low))
        else:
            goals.append(_Goal(address, place, high - low))
        after = address + high - low
        begin = place + high - low
    return goals, values


def _long_runs(reading: _Reading, span: Span, place: int) -> list[_Goal]:
    """Return the goals of a scattered region's runs in a span.

    `place` is the beginning of the span in its unit. There are no goals if runs are short or their
    values are converted.
    """
    part = reading.parts[span.chunk]
    target = part.target
    dtype = reading.stored.dtype_of(part.chunk)
    is_long = target.nbytes >= LONG_RUN_BYTES and target.dtype == dtype
    if not is_long or reading.copier.is_away(target):
        return []
    shape = reading.stored.manifest.chunk_region(part.chunk).shape
    # Runs are contiguous both in the file and in memory.
    outer = num_outer_axes(shape, part.region)
    while not is_plain_memory(target[(0,) * outer]) and outer < target.dim():
        outer += 1
    num_bytes = math.prod(target.shape[outer:]) * dtype.itemsize
    if num_bytes < LONG_RUN_BYTES:
        return []
    unit_offset = place - part.start - span.start
    begins = run_starts(shape, part.region, outer) * dtype.itemsize + unit_offset
    places = begins.clip(place, place + span.num_bytes)
    sizes = (begins + num_bytes).clip(place, place + span.num_bytes) - places
    addresses = _run_addresses(target, outer) + places - begins
    table = np.stack([addresses, places, sizes], axis=1)[sizes > 0]
    return [_Goal(*row) for row in table.tolist()]


def _run_addresses(target: torch.Tensor, num_outer: int) -> IntArray:
    """Return the addresses of a tensor's runs behind `num_outer` axes, in order."""
    addresses: IntArray = np.array([target.data_ptr()], np.int64)
    for size, stride in zip(target.shape[:num_outer], target.stride(), strict=False):
        steps = np.arange(size) * stride * target.itemsize
        addresses = np.add.outer(addresses, steps).reshape(-1)
    return addresses


def _address(target: Any) -> int:
    # Bytes are read without torch.
    if isinstance(target, np.ndarray):
        return target.ctypes.data
    address: int = target.data_ptr()
    return address


def _bytes_of_target(part: ReadPart, span: Span) -> tuple[int, int]:
    """Return the range of a plain target's bytes that a span holds."""
    size = part.target.nbytes
    return min(max(span.start - part.lead, 0), size), min(max(span.stop - part.lead, 0), size)


def _deliver(reading: _Reading, content: _Content) -> None:
    """Copy values from scratch memory to the targets."""
    address = content.scratch.ctypes.data
    try:
        for goal in content.small:
            copy_bytes(goal.address, address + goal.place, goal.num_bytes)
        for span, place in content.values:
            _deliver_values(reading, span, content.scratch[place : place + span.num_bytes])
    finally:
        # Also after an error: the memory is used again.
        reading.copier.wait()


def _deliver_values(reading: _Reading, span: Span, content: Bytes) -> None:
    """Copy the values of a span to their targets."""
    part = reading.parts[span.chunk]
    shape = reading.stored.manifest.chunk_region(part.chunk).shape
    dtype = reading.stored.dtype_of(part.chunk)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    values = torch.from_numpy(content).view(dtype)
    first = (part.start + span.start) // dtype.itemsize
    for region in _regions_within(reading, span):
        place = region.relative_to(part.region.offset).slices()
        source = values.as_strided(region.shape, strides, flat_start(shape, region) - first)
        _copy(source, part.target[place] if shape else part.target, reading.copier)


def _regions_within(reading: _Reading, span: Span) -> Iterator[Region]:
    """Yield the parts of a requested region that lie in a span."""
    part = reading.parts[span.chunk]
    shape = reading.stored.manifest.chunk_region(part.chunk).shape
    item = reading.stored.dtype_of(part.chunk).itemsize
    start = (part.start + span.start) // item
    stop = (part.start + span.stop) // item
    for run in flat_range_regions(shape, start, stop):
        region = intersect(run, part.region)
        if region is not None:
            yield region


def _useful_bytes(reading: _Reading, span: Span) -> int:
    """Count the requested bytes of a span."""
    part = reading.parts[span.chunk]
    if part.lead != NOT_PLAIN:
        low, high = _bytes_of_target(part, span)
        return high - low
    item = reading.stored.dtype_of(part.chunk).itemsize
    if part.is_sparse:
        return part.region.num_elements * item
    return sum(region.num_elements for region in _regions_within(reading, span)) * item


def _read_runs(reading: _Reading, part: ReadPart) -> None:
    """Read a sparse part run by run.

    Runs go straight to their target if their memory is contiguous there.
    """
    stored = reading.stored
    copier = reading.copier
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
    first_byte = int(stored.manifest.first_bytes[part.chunk])
    positions = (first_byte + run_starts(shape, region) * dtype.itemsize).tolist()
    num_bytes = part.stop - part.start
    with reading.open(stored.path_of(part.chunk)) as fd:
        if num_bytes < len(positions) * FETCH_PITCH_BYTES:
            fetch(fd, positions[0], num_bytes)
        for position, index in zip(positions, np.ndindex(memory.shape[:-1]), strict=True):
            run = memory[index]
            num_read = read_into(fd, [run], position)
            if num_read < len(run):
                raise _file_ends(stored, part.chunk, position + num_read)
    if goal is not target:
        _copy(goal, target, copier)
        copier.wait()


def _copy(source: torch.Tensor, target: torch.Tensor, copier: Copier) -> None:
    """Copy values out of scratch memory, converting the dtype if needed; it is done after
    `copier.wait`.
    """
    if target.dtype == source.dtype and not (target.is_conj() or target.is_neg()):
        source = as_integers(source)
        target = as_integers(target)
    copier.copy(target, source)


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


def _fill(buffers: Sequence[Bytes], data: Bytes) -> int:
    """Copy data into consecutive buffers; return the number of bytes copied."""
    rest = data
    for buffer in buffers:
        count = min(len(buffer), len(rest))
        buffer[:count] = rest[:count]
        rest = rest[count:]
    return len(data) - len(rest)


# --- Damage ---------------------------------------------------------------------------------------


def _verify(reading: _Reading, unit: list[Span], filled: Iterable[Bytes]) -> None:
    """Compare the blocks of a unit with their checksums; the bytes come piece by piece."""
    block = reading.stored.manifest.block_bytes
    actual = block_checksums([span.stop - span.start for span in unit], filled, block)
    expected = reading.expected(unit, len(actual))
    if actual != expected:
        pairs = zip(actual, expected, strict=True)
        raise _mismatch(reading, unit, next(i for i, (a, b) in enumerate(pairs) if a != b))


def _expected_checksums(
    stored: StoredCheckpoint, sorted_parts: _Parts
) -> tuple[Checksums, IntArray]:
    """Return all parts' stored block checksums, and where each part begins."""
    manifest = stored.manifest
    block = stored.manifest.block_bytes
    fetch_checksums(stored, sorted_parts.files)
    table = [(part.chunk, part.start, part.stop) for part in sorted_parts.parts]
    chunks, starts, stops = np.array(table, np.int64).reshape(-1, 3).T
    counts = -(-(stops - starts) // block)
    begins = np.cumsum(counts) - counts
    # For each block: the first one of its part, plus its number within the part.
    firsts = manifest.first_blocks[chunks] + starts // block - begins
    blocks = np.repeat(firsts, counts) + np.arange(int(counts.sum()))
    files = np.repeat(sorted_parts.files, counts)
    return checksums_of_blocks(manifest, files, blocks), begins


def _mismatch(reading: _Reading, unit: list[Span], number: int) -> CorruptCheckpointError:
    """Return the error about the damaged block of a unit."""
    stored = reading.stored
    manifest = reading.stored.manifest
    block = manifest.block_bytes
    starts = []
    for span in unit:
        for position in range(span.start, span.stop, block):
            starts.append((span.chunk, position))
    part = reading.parts[starts[number][0]]
    chunk = part.chunk
    first = int(manifest.first_bytes[chunk])
    start = first + part.start + starts[number][1]
    stop = min(start + block, first + int(manifest.num_bytes[chunk]))
    key = stored.key_of(chunk)
    name = "common state" if key == COMMON_KEY else f"key {key!r}"
    return CorruptCheckpointError(
        f"Checksum mismatch in {stored.path_of(chunk)!r}, bytes {start} to {stop}: chunk "
        f"{manifest.chunk_region(chunk)} of {name} was damaged or replaced after the save. Restore "
        "the file from a copy or load another checkpoint."
    )


def _cut_off(
    reading: _Reading, unit: list[Span], position: int, num_read: int
) -> CorruptCheckpointError:
    """Return the error about a file that ends within a unit.

    `position` is where the unit begins.
    """
    ends = itertools.accumulate(span.num_bytes for span in unit)
    span = next(span for span, end in zip(unit, ends, strict=True) if end > num_read)
    return _file_ends(reading.stored, reading.parts[span.chunk].chunk, position + num_read)


def _file_ends(stored: StoredCheckpoint, chunk: int, end: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{stored.path_of(chunk)!r} ends at byte {end}, but the manifest says that key "
        f"{stored.key_of(chunk)!r} goes on after it: the file was cut off. Restore it from a "
        "copy or load another checkpoint."
    )


def check_files(stored: StoredCheckpoint, chunks: Sequence[int]) -> None:
    """Check that the files of some chunks have their manifest sizes.

    On an object store each file takes a request, so missing bytes are left to checksums and reads
    to find.
    """
    rows = np.array(chunks, np.int64)
    stored.manifest.check_rows(rows)
    if stored.verifies and not locations.is_local(stored.location):
        return
    num_threads = 1 if locations.is_local(stored.location) else NUM_REQUESTS
    file_ids = stored.manifest.file_ids[rows]
    # np.unique would import a part of numpy, at a time when perhaps no file can be opened any more.
    different = np.flatnonzero(np.bincount(file_ids)).tolist()
    check = _check_file if stored.files is None else _check_file_once
    run_threads(lambda file_id: check(stored, file_id), different, num_threads)


def _check_file_once(stored: StoredCheckpoint, file_id: int) -> None:
    assert stored.files is not None
    stored.files.check_once(stored.path_of_file(file_id), lambda: _check_file(stored, file_id))


def _check_file(stored: StoredCheckpoint, file_id: int) -> None:
    path = stored.path_of_file(file_id)
    expected = stored.manifest.files[file_id].num_bytes
    try:
        actual = file_size(path)
    except FileNotFoundError as error:
        raise _missing(stored, path) from error
    if actual != expected:
        raise CorruptCheckpointError(
            f"{path!r} has {actual} bytes, but the manifest of {stored.location!r} says "
            f"{expected}: the file was cut off, extended or replaced. Restore it from a copy or "
            "load another checkpoint."
        )
    if stored.compares_headers and not _has_described_header(stored, file_id):
        raise CorruptCheckpointError(
            f"{path!r} on host {os.uname().nodename!r} has another header than where rank 0 has "
            "read it: they are not copies of one file, or it was replaced meanwhile. Give all "
            "ranks the same files."
        )


def _has_described_header(stored: StoredCheckpoint, file_id: int) -> bool:
    file = stored.manifest.files[file_id]
    header = locations.read_range(stored.path_of_file(file_id), 0, file.header_bytes)
    # Some formats have no headers that are known.
    return not file.header_bytes or checksum(header) == file.header_checksum


def _fetch(stored: StoredCheckpoint, path: str, position: int, num_bytes: int) -> Bytes:
    """Read from an object store; fewer bytes if the file ends early."""
    try:
        return object_store.at(path).read_range(position, num_bytes)
    except FileNotFoundError as error:
        raise _missing(stored, path) from error


def _missing(stored: StoredCheckpoint, path: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path!r} is missing, but the manifest of {stored.location!r} needs it: it was "
        "deleted, or is not visible on this machine yet. Restore it from a copy, or check "
        "that all machines see the same directory."
    )

"""Staging: what a save in the background writes is copied first, so that training may go on with
its tensors.

The memory that takes the copies is used again by the next save of the same structure; no page of it
is new then, and staging costs one copy of the bytes. Pages that are new cost several times as much,
so memory can be reserved before the first save. Without room for everything, the rest is copied
while files are being written.
"""

from __future__ import annotations

import bisect
import itertools
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distckpt._base.errors import CheckpointingException
from distckpt._base.interrupts import run_handlers
from distckpt._base.memory import Bytes, DeviceLayer
from distckpt._base.threads import NUM_THREADS, SIGNAL_SECONDS, UNIT_BYTES, run_threads
from distckpt._format.checksum import BLOCK_BYTES
from distckpt._geometry.units import Span, units_of
from distckpt._io.write import Fill, NewFile, copy_into

MAX_SETS = 2
"""So many saves may have staged data at the same time; the next one waits."""
PINNED_UNITS = 4
"""Units in a buffer of page-locked memory, since torch rounds the size of each buffer up to a power
of two.
"""


class _Set(NamedTuple):
    """Buffers of one save; `is_pinned` when they are page-locked, for tensors on a device."""

    buffers: list[Bytes]
    is_pinned: bool


class StagingMemory:
    """Buffers for staged data, kept for the next save of the same structure."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[_Set] = []
        self._num_used = 0
        self._num_waiting = 0
        self._is_reserving = False

    def take(
        self, sizes: Sequence[int], layer: DeviceLayer | None = None, timeout: float | None = None
    ) -> list[Bytes]:
        """Return a buffer of each size, after waiting up to `timeout` seconds while `MAX_SETS` sets
        are in use.

        Memory that a device copies to is allocated by its layer. Buffers that were kept are freed
        when they do not
        fit: the structure has changed.
        """
        with self._changed:
            deadline = time.monotonic() + (math.inf if timeout is None else timeout)
            while not self._wait_for(lambda: not self._is_reserving and self._num_used < MAX_SETS):
                run_handlers()
                if time.monotonic() < deadline:
                    continue
                raise CheckpointingException(
                    f"{MAX_SETS} saves are being written in the background, and neither was done "
                    f"within {timeout} s: save less often, or look for what blocks writing."
                )
            self._num_used += 1
            fitting = self._fitting(sizes, layer)
            self._idle = fitting[1:]
        if fitting:
            return fitting[0].buffers
        try:
            return _allocate(sizes, layer)
        except BaseException:
            self._end_use()
            raise

    def reserve(
        self, sizes: Sequence[int], layer: DeviceLayer | None, is_abandoned: threading.Event
    ) -> None:
        """Keep a buffer of each size, whose pages are there, for the next save; for a thread in the
        background.

        Nothing is done when the memory of a save is in use, which the next one can have, or is kept
        and fits. Whoever
        takes or frees memory meanwhile ends this: buffers are then kept as they are.
        """
        with self._changed:
            if self._num_used or self._num_waiting or self._fitting(sizes, layer):
                return
            self._idle = []
            self._is_reserving = True
        buffers: list[Bytes] | None = None
        try:
            buffers = _allocate(sizes, layer)
            for buffer in buffers if layer is None else ():
                for start in range(0, len(buffer), UNIT_BYTES):
                    if self._num_waiting or is_abandoned.is_set():
                        return
                    # The system provides a page when something is written to it.
                    np.copyto(buffer[start : start + UNIT_BYTES : mmap.PAGESIZE], 0)
        finally:
            with self._changed:
                self._idle = [] if buffers is None else [_Set(buffers, layer is not None)]
                self._is_reserving = False
                self._changed.notify_all()

    def give_back(self, buffers: list[Bytes], layer: DeviceLayer | None) -> None:
        """Keep buffers for the next save, with the layer they were taken for."""
        with self._changed:
            self._idle.append(_Set(buffers, layer is not None))
        self._end_use()

    def free(self) -> None:
        """Free what is not in use."""
        with self._changed:
            while not self._wait_for(lambda: not self._is_reserving):
                run_handlers()
            self._idle = []

    def _fitting(self, sizes: Sequence[int], layer: DeviceLayer | None) -> list[_Set]:
        wanted = list(sizes), layer is not None
        return [
            kept
            for kept in self._idle
            if ([len(buffer) for buffer in kept.buffers], kept.is_pinned) == wanted
        ]

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait a moment for something; a reservation ends meanwhile."""
        self._num_waiting += 1
        try:
            return self._changed.wait_for(condition, SIGNAL_SECONDS)
        finally:
            self._num_waiting -= 1

    def _end_use(self) -> None:
        with self._changed:
            # In a forked process, what its parent uses does not count.
            self._num_used = max(0, self._num_used - 1)
            self._changed.notify_all()


def _allocate(sizes: Sequence[int], layer: DeviceLayer | None) -> list[Bytes]:
    # numpy asks for huge pages, and what is so large is given back to the system when it is freed.
    if layer is None:
        return [np.empty(size, np.uint8) for size in sizes]
    return [layer.pinned_memory(size).numpy() for size in sizes]


shared_memory = StagingMemory()
"""Of all saves of this process."""

if hasattr(os, "register_at_fork"):
    # The parent's background thread may have held the lock, and goes on with the buffers.
    os.register_at_fork(after_in_child=shared_memory.__init__)  # type: ignore[misc]


class Staging:
    """The copies of one save, made by `num_threads` threads in at most `max_bytes` of `memory`;
    None is no limit.

    `staged` is set when the tensors are not needed any more. With `only_measures` nothing is
    copied: `needed` is then what the copies would need, sizes of buffers and what allocates them.
    """

    def __init__(
        self,
        memory: StagingMemory,
        max_bytes: int | None = None,
        timeout: float | None = None,
        num_threads: int = NUM_THREADS,
        only_measures: bool = False,
    ) -> None:
        self.needed: tuple[list[int], DeviceLayer | None] = [], None
        self._only_measures = only_measures
        self.staged = threading.Event()
        self._memory, self._max_bytes, self._timeout, self._num_threads = (
            memory,
            max_bytes,
            timeout,
            num_threads,
        )
        self._buffers: list[Bytes] | None = None
        self._lock = threading.Lock()
        self._num_uncopied = 0

    def copy(self, files: Sequence[NewFile]) -> list[NewFile]:
        """Return the same files filled from copies, as far as there is room.

        What is left over is copied when its turn to be written comes; `staged` is set when that is
        done.
        """
        chosen = _choose([file.chunk_bytes for file in files], self._max_bytes)
        sizes = [
            [file.chunk_bytes[i] for i in chunks]
            for file, chunks in zip(files, chosen, strict=True)
        ]
        device = next((file.device for file in files if file.device is not None), None)
        divided = [_buffer_bytes(each, device) for each in sizes]
        self.needed = list(itertools.chain(*divided)), device
        if self._only_measures:
            return list(files)
        self._buffers = self._memory.take(*self.needed, self._timeout)
        buffers = iter(self._buffers)
        staged: list[NewFile] = []
        units: list[tuple[Fill, Sequence[Span], Bytes]] = []
        for file, chunks, chunk_bytes, buffer_bytes in zip(
            files, chosen, sizes, divided, strict=True
        ):
            starts = dict(zip(chunks, itertools.accumulate(chunk_bytes, initial=0), strict=False))
            ends = [0, *itertools.accumulate(buffer_bytes)]
            copies = _Copies(starts, list(itertools.islice(buffers, len(buffer_bytes))), ends)
            start = 0
            for unit in units_of(chunk_bytes, UNIT_BYTES, BLOCK_BYTES):
                spans = [span._replace(chunk=chunks[span.chunk]) for span in unit]
                num_bytes = sum(span.num_bytes for span in spans)
                (window,) = copies.between(start, start + num_bytes)
                units.append((file.fill, spans, window))
                start += num_bytes
            self._num_uncopied += sum(file.chunk_bytes) - sum(chunk_bytes)
            if len(chunks) < len(file.chunk_bytes):
                staged.append(file._replace(fill=_filling(copies, file.fill, self._note_copied)))
            else:
                # This refers to nothing of the original, which may be freed.
                staged.append(file._replace(fill=_filling(copies), device=None))

        run_threads(lambda unit: copy_into(unit[2], unit[0](*unit[1:])), units, self._num_threads)
        if not self._num_uncopied:
            self.staged.set()
        return staged

    def release(self) -> None:
        """Give the memory back, when everything is written or given up."""
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            self._memory.give_back(buffers, self.needed[1])
        self.staged.set()

    def __del__(self) -> None:
        # Of a save that was abandoned before it began.
        self.release()

    def _note_copied(self, num_bytes: int) -> None:
        with self._lock:
            self._num_uncopied -= num_bytes
            if not self._num_uncopied:
                self.staged.set()


def threads_to_copy_with(num_ranks: int) -> int:
    """Return how many threads may copy on each rank, when all ranks of this machine copy at the
    same time.

    All ranks of the group count as on this machine, unless the launcher says how many are.
    """
    num_processors = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(
        1,
        min(
            NUM_THREADS,
            num_processors // (int(local) if local.isdigit() and int(local) else num_ranks),
        ),
    )


def _choose(sizes: Sequence[Sequence[int]], max_bytes: int | None) -> list[list[int]]:
    """Choose for each file the chunks to copy at once: as many as there is room for, beginning at
    the end.

    Files are written from the beginning, so what has room is what would be copied last.
    """
    if max_bytes is None:
        return [list(range(len(chunks))) for chunks in sizes]
    chosen: list[list[int]] = []
    room = max_bytes
    for chunks in reversed(sizes):
        taken: list[int] = []
        for index in range(len(chunks) - 1, -1, -1):
            if chunks[index] <= room:
                room -= chunks[index]
                taken.append(index)
        chosen.append(taken[::-1])
    return chosen[::-1]


def _buffer_bytes(chunk_bytes: Sequence[int], device: DeviceLayer | None) -> list[int]:
    """Return the sizes of the buffers for some chunks. No unit is in two of them."""
    if device is None:
        return [sum(chunk_bytes)]
    units = [sum(span.num_bytes for span in unit) for unit in units_of(chunk_bytes, UNIT_BYTES, BLOCK_BYTES)]
    return [sum(units[i : i + PINNED_UNITS]) for i in range(0, len(units), PINNED_UNITS)]


class _Copies(NamedTuple):
    """Chunks one after the other in buffers: where each chunk begins, and 0 and where each buffer
    ends.
    """

    starts: Mapping[int, int]
    buffers: list[Bytes]
    ends: list[int]

    def between(self, start: int, stop: int) -> list[Bytes]:
        """Return the bytes from start to stop, of which there are some."""
        index = bisect.bisect_right(self.ends, start) - 1
        begin, end = self.ends[index : index + 2]
        found = self.buffers[index][start - begin : stop - begin]
        return [found] if stop <= end else [found, *self.between(end, stop)]


def _filling(
    copies: _Copies, rest: Fill | None = None, note_copied: Callable[[int], None] | None = None
) -> Fill:
    """Return what gives the copies of chunks; other chunks are copied from `rest`, and how much of
    them is noted.
    """

    def fill(unit: Sequence[Span], scratch: Bytes) -> list[Bytes]:
        buffers: list[Bytes] = []
        begin = 0
        for span in unit:
            # Where it goes in the end, so that it is not overwritten by then.
            window = scratch[begin : begin + span.num_bytes]
            begin += span.num_bytes
            if (start := copies.starts.get(span.chunk)) is not None:
                buffers += copies.between(start + span.start, start + span.stop)
                continue
            if rest is not None and note_copied is not None:
                copy_into(window, rest([span], window))
                note_copied(len(window))
            buffers.append(window)
        return buffers

    return fill

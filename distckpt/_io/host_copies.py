"""Copies in host memory for background saves, while training goes on.

The next save of the same structure uses the memory of the copies again. None of its pages are new
then, and a copy costs no more than moving the bytes. New pages cost several times as much, so the
memory can be reserved before the first save. Bytes that do not fit are copied while files are being
written.
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
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from distckpt._base.errors import CheckpointingException
from distckpt._base.interrupts import run_handlers
from distckpt._base.memory import Bytes, DeviceLayer
from distckpt._base.threads import NUM_THREADS, SIGNAL_SECONDS, UNIT_BYTES, run_threads
from distckpt._format.checksum import BLOCK_BYTES
from distckpt._geometry.units import Unit, sizes_of, units_of
from distckpt._io.write import Fill, NewFile, fill_window

MAX_SETS = 2
"""Number of saves that may hold copies at a time; the next save waits."""
PINNED_UNITS = 4
"""Units per buffer of page-locked memory. Torch rounds the size of each buffer up to a power of
two.
"""

# --- Memory ---------------------------------------------------------------------------------------


_Set: TypeAlias = tuple[list[Bytes], bool]
"""The buffers of one save, and whether they are page-locked."""


class HostMemory:
    """Buffers for copies, kept for the next save of the same structure."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[_Set] = []
        self._num_used = 0
        self._num_waiting = 0
        self._is_reserving = False

    def take(
        self, sizes: Sequence[int], layer: DeviceLayer | None = None, timeout: float | None = None
    ) -> list[Bytes]:
        """Return a buffer of each size; wait up to `timeout` seconds while `MAX_SETS` are in use.

        Memory that a device copies to is allocated by its layer. Buffers kept from an earlier save
        are freed if they do not fit, because the structure has changed.
        """
        with self._changed:
            self._wait_for_turn(timeout)
            self._num_used += 1
            fitting = self._fitting(sizes, layer)
            self._idle = fitting[1:]
        if fitting:
            return fitting[0][0]
        try:
            return _allocate(sizes, layer)
        except BaseException:
            self._end_use()
            raise

    def _wait_for_turn(self, timeout: float | None) -> None:
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while not self._wait_for(lambda: not self._is_reserving and self._num_used < MAX_SETS):
            run_handlers()
            if time.monotonic() >= deadline:
                raise CheckpointingException(
                    f"{MAX_SETS} saves are being written in the background, and neither was done "
                    f"within {timeout} s: save less often, or look for what blocks writing."
                )

    def reserve(
        self, sizes: Sequence[int], layer: DeviceLayer | None, is_abandoned: threading.Event
    ) -> None:
        """Prepare a buffer of each size for the next save.

        Its pages are in memory then. This takes a while: it is meant for a background thread.

        Does nothing if a save is using memory, which the next one can have, or if fitting buffers
        are kept already. Ends early when someone takes or frees memory meanwhile; the buffers are
        then kept as they are.
        """
        with self._changed:
            if self._num_used or self._num_waiting or self._fitting(sizes, layer):
                return
            self._idle = []
            self._is_reserving = True
        buffers: list[Bytes] | None = None
        try:
            buffers = _allocate(sizes, layer)
            if layer is None:
                self._touch_pages(buffers, is_abandoned)
        finally:
            with self._changed:
                self._idle = []
                if buffers is not None:
                    self._idle = [(buffers, layer is not None)]
                self._is_reserving = False
                self._changed.notify_all()

    def _touch_pages(self, buffers: list[Bytes], is_abandoned: threading.Event) -> None:
        """Write to every page, which makes the system provide it."""
        for buffer in buffers:
            for start in range(0, len(buffer), UNIT_BYTES):
                if self._num_waiting or is_abandoned.is_set():
                    return
                np.copyto(buffer[start : start + UNIT_BYTES : mmap.PAGESIZE], 0)

    def give_back(self, buffers: list[Bytes], layer: DeviceLayer | None) -> None:
        """Keep buffers for the next save; `layer` is the one they were taken for."""
        with self._changed:
            self._idle.append((buffers, layer is not None))
        self._end_use()

    def free(self) -> None:
        """Free the memory that is not in use."""
        with self._changed:
            while not self._wait_for(lambda: not self._is_reserving):
                run_handlers()
            self._idle = []

    def _fitting(self, sizes: Sequence[int], layer: DeviceLayer | None) -> list[_Set]:
        fitting = []
        for buffers, is_pinned in self._idle:
            if list(map(len, buffers)) == list(sizes) and is_pinned == (layer is not None):
                fitting.append((buffers, is_pinned))
        return fitting

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait a moment for a condition; a reservation in progress ends."""
        self._num_waiting += 1
        try:
            return self._changed.wait_for(condition, SIGNAL_SECONDS)
        finally:
            self._num_waiting -= 1

    def _end_use(self) -> None:
        with self._changed:
            # In a forked process, the parent's use does not count.
            self._num_used = max(0, self._num_used - 1)
            self._changed.notify_all()


def _allocate(sizes: Sequence[int], layer: DeviceLayer | None) -> list[Bytes]:
    # numpy asks for huge pages, and the system gets such large blocks back when they are freed.
    if layer is None:
        return [np.empty(size, np.uint8) for size in sizes]
    return [layer.pinned_memory(size).numpy() for size in sizes]


shared_memory = HostMemory()
"""Host memory of all saves of this process."""

if hasattr(os, "register_at_fork"):
    # The parent's background thread may have held the lock, and goes on using the buffers.
    os.register_at_fork(after_in_child=shared_memory.__init__)  # type: ignore[misc]


def threads_to_copy_with(num_ranks: int) -> int:
    """Return the number of copying threads per rank on this machine.

    Counts all ranks of the group as ranks of this machine, unless the launcher says how many are.
    """
    if hasattr(os, "sched_getaffinity"):
        num_processors = len(os.sched_getaffinity(0))
    else:
        num_processors = os.cpu_count() or 1
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    num_local = int(local) if local.isdigit() else 0
    return max(1, min(NUM_THREADS, num_processors // (num_local or num_ranks)))


# --- Copies ---------------------------------------------------------------------------------------


class HostCopies:
    """The copies of one save.

    Attributes:
        staged: set once the save no longer needs the original tensors.
        needed: the sizes of the copies' buffers, and the device layer that allocates them.
    """

    def __init__(
        self,
        max_bytes: int | None,
        timeout: float | None,
        num_threads: int,
        only_measures: bool = False,
    ) -> None:
        """Prepare the copies; `copy` makes them.

        Args:
            max_bytes: the most memory that they may take; None for no limit.
            timeout: seconds to wait for memory that other saves use.
            num_threads: number of threads that copy.
            only_measures: set `needed`, and copy nothing.
        """
        self.staged = threading.Event()
        self.needed: tuple[list[int], DeviceLayer | None] = [], None
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._num_threads = num_threads
        self._only_measures = only_measures
        self._buffers: list[Bytes] | None = None
        self._lock = threading.Lock()
        self._num_uncopied = 0

    def copy(self, files: Sequence[NewFile]) -> list[NewFile]:
        """Return the same files, with bytes in copies as room allows.

        The rest is copied when its turn to be written comes; after that `staged` is set.
        """
        device = next((file.device for file in files if file.device is not None), None)
        chunks_of_files = _choose([file.chunk_bytes for file in files], self._max_bytes)
        parts = []
        sizes: list[int] = []
        for file, chunks in zip(files, chunks_of_files, strict=True):
            part = _Copies.of(file.chunk_bytes, chunks, device)
            parts.append(part)
            sizes += np.diff(part.ends).tolist()
        self.needed = sizes, device
        if self._only_measures:
            return list(files)
        self._buffers = shared_memory.take(sizes, device, self._timeout)
        buffers = iter(self._buffers)
        units: list[tuple[Fill, Unit, Bytes]] = []
        copied: list[NewFile] = []
        for file, part in zip(files, parts, strict=True):
            part.buffers.extend(itertools.islice(buffers, len(part.ends) - 1))
            for unit in part.units:
                (window,) = part.bytes_of(unit)
                units.append((file.fill, unit, window))
            num_left_out = sum(file.chunk_bytes) - part.ends[-1]
            self._num_uncopied += num_left_out
            if num_left_out:
                copied.append(file._replace(fill=partial(self._fill, part, file.fill)))
            else:
                # This refers to nothing of the original, which can be freed.
                copied.append(file._replace(fill=partial(_fill_from, part), device=None))
        run_threads(_copy_unit, units, self._num_threads)
        if not self._num_uncopied:
            self.staged.set()
        return copied

    def _fill(self, copies: _Copies, rest: Fill, unit: Unit, scratch: Bytes) -> list[Bytes]:
        """Return the bytes of a unit; chunks without a copy are copied from `rest`."""
        buffers: list[Bytes] = []
        begin = 0
        for span in unit:
            # The span's final place, so that nothing overwrites it until then.
            window = scratch[begin : begin + span.num_bytes]
            begin += span.num_bytes
            if span.chunk in copies.starts:
                buffers += copies.bytes_of([span])
                continue
            fill_window(window, rest([span], window))
            self._note_copied(len(window))
            buffers.append(window)
        return buffers

    def release(self) -> None:
        """Give the memory back, after the save or when it is abandoned."""
        buffers = self._buffers
        self._buffers = None
        if buffers is not None:
            shared_memory.give_back(buffers, self.needed[1])
        self.staged.set()

    def __del__(self) -> None:
        # The save was given up before it began.
        self.release()

    def _note_copied(self, num_bytes: int) -> None:
        with self._lock:
            self._num_uncopied -= num_bytes
            if not self._num_uncopied:
                self.staged.set()


def _choose(sizes: Sequence[Sequence[int]], max_bytes: int | None) -> list[list[int]]:
    """Choose the chunks to copy at once, as many as fit.

    Files are written from the beginning. So chunks at the end, whose turn comes last, are copied
    first.
    """
    if max_bytes is None:
        return [list(range(len(chunks))) for chunks in sizes]
    selection: list[list[int]] = []
    room = max_bytes
    for chunks in reversed(sizes):
        taken: list[int] = []
        for index in range(len(chunks) - 1, -1, -1):
            if chunks[index] <= room:
                room -= chunks[index]
                taken.append(index)
        selection.append(taken[::-1])
    return selection[::-1]


class _Copies(NamedTuple):
    """Copies of some chunks of a file in buffers.

    Attributes:
        starts: where each chunk begins.
        units: the units to copy. None is in two buffers.
        ends: 0, and where each buffer ends.
        buffers: the buffers.
    """

    starts: Mapping[int, int]
    units: list[Unit]
    ends: list[int]
    buffers: list[Bytes]

    @classmethod
    def of(cls, sizes: Sequence[int], chunks: Sequence[int], device: DeviceLayer | None) -> _Copies:
        """Lay out the copies of some chunks of a file."""
        chunk_bytes = [sizes[chunk] for chunk in chunks]
        starts = itertools.accumulate(chunk_bytes, initial=0)
        units = []
        unit_ends = [0]
        for unit in units_of(chunk_bytes, UNIT_BYTES, BLOCK_BYTES):
            units.append([span._replace(chunk=chunks[span.chunk]) for span in unit])
            unit_ends.append(unit_ends[-1] + sum(sizes_of(unit)))
        ends = [0, unit_ends[-1]]
        if device is not None:
            ends = [*unit_ends[:-1:PINNED_UNITS], unit_ends[-1]]
        return cls(dict(zip(chunks, starts, strict=False)), units, ends, [])

    def bytes_of(self, unit: Unit) -> list[Bytes]:
        """Return the bytes of spans that follow one another."""
        start = self.starts[unit[0].chunk] + unit[0].start
        return self._between(start, start + sum(sizes_of(unit)))

    def _between(self, start: int, stop: int) -> list[Bytes]:
        """Return the bytes from start to stop, which must not be equal."""
        index = bisect.bisect_right(self.ends, start) - 1
        begin, end = self.ends[index : index + 2]
        first_part = self.buffers[index][start - begin : stop - begin]
        if stop <= end:
            return [first_part]
        return [first_part, *self._between(end, stop)]


def _copy_unit(unit: tuple[Fill, Unit, Bytes]) -> None:
    fill, spans, window = unit
    fill_window(window, fill(spans, window))


def _fill_from(copies: _Copies, unit: Unit, scratch: Bytes) -> list[Bytes]:
    """Return the bytes of a unit of which all chunks are copied."""
    del scratch
    parts = []
    for span in unit:
        parts.extend(copies.bytes_of([span]))
    return parts

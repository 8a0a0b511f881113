"""Staging: what a save in the background writes is copied first, so that training may go on with its tensors.

The memory that takes the copies is used again by the next save of the same structure; no page of it is new then, and
staging costs one copy of the bytes. Without room for everything, the rest is copied while files are being written.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from distckpt._base.device import Copier, DeviceLayer
from distckpt._base.errors import CheckpointingException
from distckpt._base.memory import Bytes
from distckpt._base.threads import NUM_THREADS, run_threads
from distckpt._io.shard_writer import Contents, FilesToWrite
from distckpt._io.write import Fill, Part, file_of_tensors, gather, units_of

MAX_SETS = 2
"""So many saves may have staged data at the same time; the next one waits."""


class StagingMemory:
    """Buffers for staged data, kept for the next save of the same structure."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[list[Bytes]] = []
        self._num_used = 0

    def take(self, sizes: Sequence[int], layer: DeviceLayer | None = None, timeout: float | None = None) -> list[Bytes]:
        """Return a buffer of each size, after waiting while `MAX_SETS` sets are in use.

        What a device copies to is memory that its layer allocates.

        Buffers that were kept are freed when they do not fit: the structure has changed.

        Raises:
            CheckpointingException: no set came free within `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_used < MAX_SETS, timeout):
                raise CheckpointingException(
                    f"{MAX_SETS} saves are being written in the background, and neither was done within {timeout} s: "
                    "save less often, or look for what blocks writing."
                )
            self._num_used += 1
            fitting = [buffers for buffers in self._idle if [len(buffer) for buffer in buffers] == list(sizes)]
            self._idle = fitting[1:]
        if fitting:
            return fitting[0]
        try:
            return [_allocate(size, layer) for size in sizes]
        except BaseException:
            self._end_use()
            raise

    def give_back(self, buffers: list[Bytes]) -> None:
        """Keep buffers for the next save."""
        with self._changed:
            self._idle.append(buffers)
        self._end_use()

    def free(self) -> None:
        """Free what is not in use."""
        with self._changed:
            self._idle = []

    def _end_use(self) -> None:
        with self._changed:
            self._num_used -= 1
            self._changed.notify_all()


shared_memory = StagingMemory()
"""Of all saves of this process."""


class Staging:
    """The copies of one save.

    Args:
        memory: where they go.
        max_bytes: how much memory they may take; None for all that is needed. At least the windows that files are
            written through are used.
        timeout: seconds to wait for memory.
        num_threads: that copy at the same time.

    Attributes:
        staged: set when the tensors are not needed any more.
    """

    def __init__(
        self,
        memory: StagingMemory,
        max_bytes: int | None = None,
        timeout: float | None = None,
        num_threads: int = NUM_THREADS,
    ) -> None:
        self.staged = threading.Event()
        self._memory = memory
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._num_threads = num_threads
        self._buffers: list[Bytes] | None = None
        self._lock = threading.Lock()
        self._num_uncopied = 0

    def copy(self, files: FilesToWrite) -> FilesToWrite:
        """Return the same files with contents that are copies, as far as there is room.

        What is left over is copied when its turn to be written comes; `staged` is set when that is done.
        """
        sizes = [layout.num_bytes for layout, _ in files.tensor_files]
        chosen = _choose(sizes, self._max_bytes)
        buffer_sizes = [sum(size[i] for i in chunks) for size, chunks in zip(sizes, chosen, strict=True)]
        copier = Copier(t for _, contents in files.tensor_files for tensors in contents for t in tensors)
        self._buffers = self._memory.take(buffer_sizes, copier.layer, self._timeout)
        jobs: list[_Job] = []
        tensor_files = []
        for (layout, contents), chunks, buffer in zip(files.tensor_files, chosen, self._buffers, strict=True):
            chunk_bytes = [layout.num_bytes[i] for i in chunks]
            jobs.append(_Job([contents[i] for i in chunks], chunk_bytes, buffer))
            copies = dict(zip(chunks, _cut(buffer, chunk_bytes), strict=True))
            new = [[copies[i]] if i in copies else tensors for i, tensors in enumerate(contents)]
            tensor_files.append((layout, new))
        _copy_all(jobs, self._num_threads)
        left = [set(range(len(size))).difference(chunks) for size, chunks in zip(sizes, chosen, strict=True)]
        self._num_uncopied = sum(size[i] for size, chunks in zip(sizes, left, strict=True) for i in chunks)
        if not self._num_uncopied:
            self.staged.set()
            return files._replace(tensor_files=tensor_files)
        # Made here and not when files are written: by the thread whose work on a device is to be waited for.
        fills = [file_of_tensors("", b"", contents).fill for _, contents in tensor_files]
        copying = [_copying(fill, chunks, self._note_copied) for fill, chunks in zip(fills, left, strict=True)]
        return files._replace(tensor_files=tensor_files, wrap_fill=lambda number, fill: copying[number])

    def release(self) -> None:
        """Give the memory back, when everything is written or given up."""
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            self._memory.give_back(buffers)
        self.staged.set()

    def __del__(self) -> None:
        # Of a save that was abandoned before it began.
        self.release()

    def _note_copied(self, num_bytes: int) -> None:
        with self._lock:
            self._num_uncopied -= num_bytes
            if not self._num_uncopied:
                self.staged.set()


class _Job(NamedTuple):
    """Chunks of a file and the buffer they go to, one after the other."""

    contents: Contents
    chunk_bytes: list[int]
    buffer: Bytes


def threads_to_copy_with(num_ranks: int) -> int:
    """Return how many threads may copy on each rank, when all ranks of this machine copy at the same time.

    Args:
        num_ranks: of the group; all are taken to be on this machine unless the launcher says how many are.
    """
    num_processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, min(NUM_THREADS, num_processors // (int(local) if local.isdigit() and int(local) else num_ranks)))


def _choose(sizes: Sequence[Sequence[int]], max_bytes: int | None) -> list[list[int]]:
    """Choose for each file the chunks to copy at once: as many as there is room for, beginning at the end.

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


def _cut(buffer: Bytes, chunk_bytes: Iterable[int]) -> list[torch.Tensor]:
    ends = list(itertools.accumulate(chunk_bytes))
    whole = torch.from_numpy(buffer)
    return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _copy_all(jobs: Sequence[_Job], num_threads: int) -> None:
    items = []
    for job in jobs:
        fill = file_of_tensors("", b"", job.contents).fill
        start = 0
        for unit in units_of(job.chunk_bytes):
            stop = start + sum(part.stop - part.start for part in unit)
            items.append((fill, unit, job.buffer[start:stop]))
            start = stop
    run_threads(_copy_unit, items, num_threads)


def _copy_unit(item: tuple[Fill, Sequence[Part], Bytes]) -> None:
    fill, unit, window = item
    gather(fill(unit, window), window)


def _copying(fill: Fill, chunks: Container[int], note_copied: Callable[[int], None]) -> Fill:
    """Return what gives copies of some chunks, and tells when it has made them."""

    def copy(unit: Sequence[Part], scratch: Bytes) -> list[Bytes]:
        num_bytes = sum(part.stop - part.start for part in unit if part.chunk in chunks)
        if not num_bytes:
            return fill(unit, scratch)
        window = scratch[: sum(part.stop - part.start for part in unit)]
        gather(fill(unit, window), window)
        note_copied(num_bytes)
        return [window]

    return copy


def _allocate(num_bytes: int, layer: DeviceLayer | None) -> Bytes:
    if layer is None or not num_bytes:
        return np.empty(num_bytes, np.uint8)
    memory: Bytes = layer.pinned_memory(num_bytes).numpy()
    return memory

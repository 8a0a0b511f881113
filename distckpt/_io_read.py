"""Reading chunks: grouped by file, in file order, straight into the target where its memory has the same layout."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from distckpt import _storage, core
from distckpt._dtypes import FROM_NAME, as_integers
from distckpt._io import (
    MAX_BUFFERS,
    NUM_THREADS,
    Bytes,
    bounce_buffer,
    checksum,
    is_plain_memory,
    run_threads,
    tensor_bytes,
)
from distckpt._manifest import Manifest
from distckpt._plan_load import Copy
from distckpt._region import Region, flat_start, num_outer_axes

READ_UNIT_BYTES = 2 << 20
"""One thread reads this much at a time: little enough to be in cache still when its checksum is computed."""
LONG_RUN_BYTES = 128 << 10
"""Runs at least this long are read one by one; shorter ones together with what lies between them."""


class _Part(NamedTuple):
    """Bytes [start, stop) of a chunk, and where they go.

    Either straight into `memory`, or through a bounce buffer: then `box` (of the chunk) is copied to `target`.
    """

    chunk: int
    start: int
    stop: int
    memory: Bytes | None
    box: Region | None
    target: torch.Tensor | None


def read_copies(
    location: str,
    manifest: Manifest,
    copies: Sequence[Copy],
    targets: Sequence[torch.Tensor],
    verify: str,
    num_threads: int = NUM_THREADS,
) -> None:
    """Fill requested regions from chunks.

    Args:
        location: of the checkpoint.
        manifest: its manifest.
        copies: what to read.
        targets: for each request a tensor of its region's shape, of any strides, device and dtype.
        verify: "none", "read" (every block that is read whole) or "full" (widen reads to whole blocks).
        num_threads: that read at the same time, each with a buffer of about `READ_UNIT_BYTES`.

    Raises:
        CorruptCheckpointError: naming file, key, region and bytes.
    """
    parts = [part for copy in copies for part in _divide(manifest, copy, targets[copy.request], verify)]
    _read_parts(location, manifest, parts, verify, num_threads)


def read_chunks(location: str, manifest: Manifest, chunks: Sequence[int], verify: str) -> list[bytes]:
    """Return the whole content of some chunks (encoded objects)."""
    # Before memory is asked for: sizes may be damaged.
    _check_files(location, manifest, chunks)
    contents = [np.empty(int(manifest.num_bytes[chunk]), np.uint8) for chunk in chunks]
    read_chunks_into(location, manifest, chunks, contents, verify)
    return [content.tobytes() for content in contents]


def read_chunks_into(
    location: str,
    manifest: Manifest,
    chunks: Sequence[int],
    memories: Sequence[Bytes],
    verify: str,
    num_threads: int = NUM_THREADS,
) -> None:
    """Read whole chunks into memory of their size."""
    parts = [
        part
        for chunk, memory in zip(chunks, memories, strict=True)
        for part in _direct_parts(chunk, 0, len(memory), memory, manifest.block_bytes)
    ]
    _read_parts(location, manifest, parts, verify, num_threads)


def _divide(manifest: Manifest, copy: Copy, target: torch.Tensor, verify: str) -> Iterator[_Part]:
    """Divide a copy into parts of at most `READ_UNIT_BYTES`."""
    chunk = copy.chunk
    shape = manifest.chunk_region(chunk).shape
    dtype = FROM_NAME[manifest.dtypes[manifest.key_ids[chunk]]]
    item, block, size = dtype.itemsize, manifest.block_bytes, int(manifest.num_bytes[chunk])
    goal = target if copy.target.shape == tuple(target.shape) else target[copy.target.slices()]
    if copy.source.shape == shape and goal.dtype == dtype and is_plain_memory(goal):
        yield from _direct_parts(chunk, 0, size, tensor_bytes(goal), block)
        return
    for run in _long_runs(shape, copy.source, item):
        run_goal = goal[run.relative_to(copy.source.offset).slices()] if run.shape else goal
        first = flat_start(shape, run) * item
        last = first + _covering_elements(shape, run) * item
        is_aligned = first % block == 0 and (last % block == 0 or last == size)
        if (
            num_outer_axes(shape, run) == 0
            and run_goal.dtype == dtype
            and is_plain_memory(run_goal)
            and (is_aligned or verify != "full")
        ):
            yield from _direct_parts(chunk, first, last, tensor_bytes(run_goal), block)
            continue
        for box in _slabs(shape, run, READ_UNIT_BYTES // item):
            start = flat_start(shape, box) * item
            stop = start + _covering_elements(shape, box) * item
            if verify == "full":
                start, stop = start // block * block, min(-(-stop // block) * block, size)
            part_goal = run_goal[box.relative_to(run.offset).slices()] if box.shape else run_goal
            yield _Part(chunk, start, stop, None, box, part_goal)


def _direct_parts(chunk: int, first: int, last: int, memory: Bytes, block: int) -> Iterator[_Part]:
    start = first
    while start < last:
        # Cut between blocks, so that each is read whole and can be verified.
        stop = min(last, max((start + READ_UNIT_BYTES) // block, start // block + 1) * block)
        yield _Part(chunk, start, stop, memory[start - first : stop - first], None, None)
        start = stop


def _covering_elements(shape: tuple[int, ...], box: Region) -> int:
    """Count the elements from the first to the last one of a box, those between its runs included."""
    if box.num_elements == 0:
        return 0
    last = Region(tuple(o + n - 1 for o, n in zip(box.offset, box.shape, strict=True)), (1,) * len(shape))
    return flat_start(shape, last) - flat_start(shape, box) + 1


def _long_runs(shape: tuple[int, ...], box: Region, item: int) -> Iterator[Region]:
    """Yield the contiguous runs of a box when they are long and far apart, else the box itself."""
    outer = num_outer_axes(shape, box)
    run_bytes = math.prod(box.shape[outer:]) * item
    is_sparse = _covering_elements(shape, box) > 2 * box.num_elements
    if outer == 0 or run_bytes < LONG_RUN_BYTES or not is_sparse:
        yield box
        return
    for index in itertools.product(*(range(o, o + n) for o, n in zip(box.offset[:outer], box.shape, strict=False))):
        yield Region(index + box.offset[outer:], (1,) * outer + box.shape[outer:])


def _slabs(shape: tuple[int, ...], box: Region, max_elements: int) -> Iterator[Region]:
    """Cut a box across its leading axes until each part spans at most `max_elements` of the chunk."""
    if box.num_elements == 0:
        return
    if _covering_elements(shape, box) <= max_elements:
        yield box
        return
    axis = next(i for i, n in enumerate(box.shape) if n > 1)
    step = max(1, max_elements // math.prod(shape[axis + 1 :]))
    for begin in range(0, box.shape[axis], step):
        extent = min(step, box.shape[axis] - begin)
        offset = (*box.offset[:axis], box.offset[axis] + begin, *box.offset[axis + 1 :])
        yield from _slabs(shape, Region(offset, (*box.shape[:axis], extent, *box.shape[axis + 1 :])), max_elements)


def _read_parts(
    location: str, manifest: Manifest, parts: list[_Part], verify: str, num_threads: int = NUM_THREADS
) -> None:
    def place(part: _Part) -> tuple[int, int]:
        return int(manifest.file_ids[part.chunk]), int(manifest.first_bytes[part.chunk]) + part.start

    parts.sort(key=place)
    _check_files(location, manifest, [part.chunk for part in parts])
    run_threads(lambda unit: _read_unit(location, manifest, unit, verify), _units(manifest, parts), num_threads)


def _units(manifest: Manifest, parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Join parts that go straight to memory and follow one another in a file: one call reads them all."""
    unit: list[_Part] = []
    unit_bytes, end = 0, (-1, -1)
    for part in parts:
        file_id, first = int(manifest.file_ids[part.chunk]), int(manifest.first_bytes[part.chunk])
        num_bytes = part.stop - part.start
        is_direct = part.memory is not None and bool(unit) and unit[-1].memory is not None
        follows = is_direct and end == (file_id, first + part.start)
        if not (follows and len(unit) < MAX_BUFFERS and unit_bytes + num_bytes <= READ_UNIT_BYTES):
            if unit:
                yield unit
            unit, unit_bytes = [], 0
        unit.append(part)
        unit_bytes += num_bytes
        end = (file_id, first + part.stop)
    if unit:
        yield unit


def _read_unit(location: str, manifest: Manifest, unit: list[_Part], verify: str) -> None:
    first = unit[0]
    if first.memory is not None:
        buffers = [part.memory for part in unit if part.memory is not None]
    else:
        buffers = [bounce_buffer("read", first.stop - first.start)]
    _read_into(location, manifest, first, buffers)
    for part, buffer in zip(unit, buffers, strict=True):
        if verify != "none" and manifest.has_checksums:
            _verify(location, manifest, part, buffer)
        if part.memory is None:
            _deliver(manifest, part, buffer)


def _deliver(manifest: Manifest, part: _Part, buffer: Bytes) -> None:
    """Copy a box of a chunk from the bytes around it to its target, converting the dtype where it differs."""
    assert part.box is not None
    assert part.target is not None
    shape = manifest.chunk_region(part.chunk).shape
    dtype = FROM_NAME[manifest.dtypes[manifest.key_ids[part.chunk]]]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    begin = flat_start(shape, part.box) - part.start // dtype.itemsize
    whole_items = len(buffer) // dtype.itemsize * dtype.itemsize
    values = torch.from_numpy(buffer[:whole_items]).view(dtype)
    source, target = values.as_strided(part.box.shape, strides, begin), part.target
    if target.dtype == dtype and not (target.is_conj() or target.is_neg()):
        source, target = as_integers(source), as_integers(target)
    target.copy_(source)


def _verify(location: str, manifest: Manifest, part: _Part, buffer: Bytes) -> None:
    block, size = manifest.block_bytes, int(manifest.num_bytes[part.chunk])
    first_block = int(manifest.block_starts[part.chunk])
    for index in range(-(-part.start // block), -(-part.stop // block)):
        low, high = index * block, min((index + 1) * block, size)
        if high > part.stop:
            return
        if checksum(buffer[low - part.start : high - part.start]) != int(manifest.block_checksums[first_block + index]):
            file = _file_location(location, manifest, part.chunk)
            start = int(manifest.first_bytes[part.chunk])
            raise core.CorruptCheckpointError(
                f"Checksum mismatch in {file!r}, bytes {start + low} to {start + high}: chunk "
                f"{manifest.chunk_region(part.chunk)} of key {_key(manifest, part.chunk)!r} is not what was written. "
                "The file was damaged or replaced after the save: restore it from a copy or load another checkpoint."
            )


def _read_into(location: str, manifest: Manifest, first: _Part, buffers: list[Bytes]) -> None:
    file = _file_location(location, manifest, first.chunk)
    position = int(manifest.first_bytes[first.chunk]) + first.start
    wanted = sum(len(buffer) for buffer in buffers)
    if _storage.is_local(file):
        got = _read_local(file, position, buffers)
    else:
        data = np.frombuffer(_storage.read_range(file, position, position + wanted), np.uint8)
        got = len(data)
        for buffer in buffers if got == wanted else ():
            buffer[:], data = data[: len(buffer)], data[len(buffer) :]
    if got != wanted:
        raise core.CorruptCheckpointError(
            f"{file!r} ends at byte {position + got}, but the manifest says that key {_key(manifest, first.chunk)!r} "
            "goes on after it: the file was cut off. Restore it from a copy or load another checkpoint."
        )


def _read_local(file: str, position: int, buffers: list[Bytes]) -> int:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        got = os.preadv(fd, buffers, position)
        while True:
            # A short read: a signal or a network file system; go on until the bytes or the file end.
            skipped, rest = 0, []
            for buffer in buffers:
                rest.append(buffer[max(0, got - skipped) :])
                skipped += len(buffer)
            rest = [buffer for buffer in rest if len(buffer)]
            more = os.preadv(fd, rest, position + got) if rest else 0
            if not more:
                return got
            got += more
    except OSError as error:
        raise OSError(error.errno, error.strerror, file) from error
    finally:
        os.close(fd)


def _check_files(location: str, manifest: Manifest, chunks: Sequence[int]) -> None:
    for file_id in sorted({int(manifest.file_ids[chunk]) for chunk in chunks}):
        _check_file(location, manifest, file_id)


def _check_file(location: str, manifest: Manifest, file_id: int) -> None:
    file = _storage.join(location, *manifest.files[file_id].name.split("/"))
    expected = manifest.files[file_id].num_bytes
    try:
        actual = _storage.file_size(file)
    except FileNotFoundError as error:
        raise core.CorruptCheckpointError(
            f"{file!r} is missing, but the manifest of {location!r} needs it: it was deleted, or is not visible on "
            "this machine yet. Restore it from a copy, or check that all machines see the same directory."
        ) from error
    if actual != expected:
        raise core.CorruptCheckpointError(
            f"{file!r} has {actual} bytes, but the manifest of {location!r} says {expected}: the file was cut off, "
            "extended or replaced. Restore it from a copy or load another checkpoint."
        )


def _file_location(location: str, manifest: Manifest, chunk: int) -> str:
    return _storage.join(location, *manifest.files[int(manifest.file_ids[chunk])].name.split("/"))


def _key(manifest: Manifest, chunk: int) -> str:
    return manifest.keys[int(manifest.key_ids[chunk])]

"""Reading chunks: grouped by file, in file order, straight into the target where its memory has the
same layout.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from distckpt._base.device import Copier
from distckpt._base.dtypes import as_integers
from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.memory import Bytes, bounce_buffer, is_plain_memory, run_bytes
from distckpt._base.threads import MAX_BUFFERS, NUM_REQUESTS, NUM_THREADS, UNIT_BYTES, run_threads
from distckpt._format.checksum import block_checksums
from distckpt._format.marker import file_size
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import flat_start, num_outer_axes, run_starts
from distckpt._io.read_parts import (
    READ_UNIT_BYTES,
    ReadPart,
    direct_parts,
    divide_copy,
    regions_within,
)
from distckpt._plan.load import Copy
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage import locations, object_store
from distckpt._storage.open_files import OpenFiles, read_into

REQUEST_BYTES = 16 << 20
"""Size of a request of an object store: enough that its answer takes longer than the way there."""
DIRECT_BYTES = 1 << 20
"""Less is not read past the page cache: there the system would fetch it with what is beside it."""
FETCH_PITCH_BYTES = 64 << 10
"""When runs are closer than this, a disk delivers them faster with the gaps than one by one."""


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
    Each thread has a buffer of about `READ_UNIT_BYTES`, or `REQUEST_BYTES`. `progress` is called
    with numbers of bytes, from several threads. `with_check=False` leaves `check_files` to the
    caller. Damage raises CorruptCheckpointError, which names file, key, region and bytes.
    """
    # Checksums are of blocks: where there are some to verify, what lies between the runs is needed
    # as well.
    exact = locations.is_local(stored.location) and not stored.verifies
    copier = Copier(targets)
    unit_bytes = _unit_bytes(stored.location)
    parts = [
        part
        for copy in copies
        for part in divide_copy(stored, copy, targets[copy.request], exact, copier, unit_bytes)
    ]
    if with_check:
        check_files(stored, [part.chunk for part in parts])
    _read_parts(stored, parts, copier, num_threads, progress)


def read_chunks(stored: StoredCheckpoint, chunks: Sequence[int]) -> list[bytes]:
    """Return the bytes of some chunks as they are stored, after comparing them with their
    checksums.
    """
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
    block, pairs = stored.manifest.block_bytes, zip(chunks, memories, strict=True)
    parts = [
        part
        for chunk, memory in pairs
        for part in direct_parts(chunk, 0, memory, (0, len(memory)), block)
    ]
    _read_parts(stored, parts, Copier(()), num_threads)


def _unit_bytes(location: str) -> int:
    return READ_UNIT_BYTES if locations.is_local(location) else REQUEST_BYTES


class _Reading(NamedTuple):
    """Values shared by all threads that read parts."""

    stored: StoredCheckpoint
    copier: Copier
    files: OpenFiles


def _read_parts(
    stored: StoredCheckpoint,
    parts: Sequence[ReadPart],
    copier: Copier,
    num_threads: int = NUM_THREADS,
    progress: Callable[[int], None] | None = None,
) -> None:
    manifest = stored.manifest
    chunks = np.array([part.chunk for part in parts], np.int64)
    files = manifest.file_ids[chunks]
    positions = manifest.first_bytes[chunks] + np.array([part.start for part in parts], np.int64)
    order = np.lexsort((positions, files))
    in_order = [parts[i] for i in order.tolist()]
    with contextlib.nullcontext(stored.files) if stored.files else OpenFiles() as open_files:
        reading = _Reading(stored, copier, open_files)
        candidates = set(files.tolist()) if open_files.direct else ()
        direct = {file for file in candidates if stored.path_of_file(file) in open_files.direct}
        units = _units(
            in_order,
            files[order].tolist(),
            positions[order].tolist(),
            _unit_bytes(stored.location),
            direct,
        )

        def read_unit(unit: list[ReadPart]) -> None:
            if int(manifest.file_ids[unit[0].chunk]) not in direct or unit[0].sparse:
                _read_unit(reading, unit)
            elif not _read_directly(reading, unit):
                for part in unit:
                    _read_unit(reading, [part])
            if progress is not None:
                progress(sum(_useful_bytes(stored, part) for part in unit))

        run_threads(read_unit, units, num_threads)


def _useful_bytes(stored: StoredCheckpoint, part: ReadPart) -> int:
    if part.memory is not None:
        return len(part.memory)
    item = stored.dtype_of(part.chunk).itemsize
    return sum(region.num_elements for region in regions_within(stored, part)) * item


def _units(
    parts: Sequence[ReadPart],
    files: Sequence[int],
    positions: Sequence[int],
    unit_bytes: int,
    direct: Collection[int],
) -> Iterator[list[ReadPart]]:
    """Join parts that follow one another in a file: one call reads them all.

    Those that go straight to memory, and all that are read past the page cache, of `direct` files.
    """
    unit: list[ReadPart] = []
    room, next_file, next_position = 0, -1, -1
    for part, file, position in zip(parts, files, positions, strict=True):
        num_bytes = part.stop - part.start
        follows = file == next_file and position == next_position and num_bytes <= room
        may_join = part.memory is not None or (file in direct and not part.sparse)
        # A part has three buffers at most, see `_runs_of`.
        if not (follows and may_join and (file in direct or len(unit) < MAX_BUFFERS // 3)):
            if unit:
                yield unit
            # Nothing joins a part that goes through a bounce buffer.
            unit, room = [], (UNIT_BYTES if file in direct else unit_bytes) if may_join else 0
        unit.append(part)
        room -= num_bytes
        next_file, next_position = file, position + num_bytes
    if unit:
        yield unit


def _read_directly(reading: _Reading, unit: list[ReadPart]) -> bool:
    """Read parts past the page cache; False where they are to be read through it."""
    stored, copier, files = reading
    num_bytes = sum(part.stop - part.start for part in unit)
    if num_bytes < DIRECT_BYTES:
        return False
    start = int(stored.manifest.first_bytes[unit[0].chunk]) + unit[0].start
    content = files.read_directly(stored.path_of(unit[0].chunk), start, num_bytes, copier.layer)
    if content is None:
        return False
    for part in unit:
        run, content = content[: part.stop - part.start], content[part.stop - part.start :]
        if stored.verifies:
            _verify(stored, part, [run])
        if part.memory is None:
            _deliver(stored, part, run, copier)
        else:
            np.copyto(part.memory, run[part.lead : part.lead + len(part.memory)])
    return True


def _read_unit(reading: _Reading, unit: list[ReadPart]) -> None:
    stored, copier, _ = reading
    first = unit[0]
    if first.sparse:
        _read_sparse(reading, first)
        return
    runs = _runs_of(unit, copier)
    _read_into(reading, first, list(itertools.chain(*runs)))
    for part, runs_of_part in zip(unit, runs, strict=True):
        if stored.verifies:
            _verify(stored, part, runs_of_part)
        if part.memory is None:
            _deliver(stored, part, runs_of_part[0], copier)


def _runs_of(unit: list[ReadPart], copier: Copier) -> list[list[Bytes]]:
    """Return the memory that the bytes of each part are read to: scratch memory for those that go
    nowhere else.
    """
    if unit[0].memory is None:
        return [[bounce_buffer("read", unit[0].stop - unit[0].start, copier.layer)]]
    others = [part.stop - part.start - len(part.memory) for part in unit if part.memory is not None]
    scratch = bounce_buffer("read", sum(others)) if any(others) else np.empty(0, np.uint8)
    runs: list[list[Bytes]] = []
    for part, num_others in zip(unit, others, strict=True):
        assert part.memory is not None
        before, after, scratch = (
            scratch[: part.lead],
            scratch[part.lead : num_others],
            scratch[num_others:],
        )
        runs.append([run for run in (before, part.memory, after) if len(run)])
    return runs


def _read_sparse(reading: _Reading, part: ReadPart) -> None:
    """Read a part run by run, straight to where the runs belong if their memory is contiguous
    there.
    """
    stored, copier, files = reading
    region, target = part.region, part.target
    shape = stored.manifest.chunk_region(part.chunk).shape
    dtype, outer = stored.dtype_of(part.chunk), num_outer_axes(shape, region)
    goal = target
    has_runs = target.dtype == dtype and is_plain_memory(target[(0,) * outer])
    if not has_runs or copier.is_away(target):
        values = torch.from_numpy(
            bounce_buffer("read", region.num_elements * dtype.itemsize, copier.layer)
        )
        goal = values.view(dtype).view(region.shape)
    memory = run_bytes(goal, outer)
    path, first_byte = stored.path_of(part.chunk), int(stored.manifest.first_bytes[part.chunk])
    positions = (first_byte + run_starts(shape, region) * dtype.itemsize).tolist()
    num_bytes = part.stop - part.start
    with files.open(path) as fd:
        if num_bytes < len(positions) * FETCH_PITCH_BYTES and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, positions[0], num_bytes, os.POSIX_FADV_WILLNEED)
        for position, index in zip(positions, np.ndindex(memory.shape[:-1]), strict=True):
            run = memory[index]
            num_read = read_into(fd, [run], position)
            if num_read < len(run):
                raise _cut_off(stored, part, position + num_read)
    if goal is not target:
        _copy(goal, target, copier)
        copier.wait()


def _deliver(stored: StoredCheckpoint, part: ReadPart, buffer: Bytes, copier: Copier) -> None:
    """Copy what a part holds of its region to where it belongs."""
    shape = stored.manifest.chunk_region(part.chunk).shape
    dtype = stored.dtype_of(part.chunk)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    values = torch.from_numpy(buffer).view(dtype)
    try:
        for region in regions_within(stored, part):
            begin = flat_start(shape, region) - part.start // dtype.itemsize
            target = (
                part.target[region.relative_to(part.region.offset).slices()]
                if shape
                else part.target
            )
            _copy(values.as_strided(region.shape, strides, begin), target, copier)
    finally:
        # Also after an error: the buffer is used again.
        copier.wait()


def _copy(source: torch.Tensor, target: torch.Tensor, copier: Copier) -> None:
    """Copy values out of scratch memory, converting the dtype where it differs; it is done after
    `copier.wait`.
    """
    if target.dtype == source.dtype and not (target.is_conj() or target.is_neg()):
        source, target = as_integers(source), as_integers(target)
    copier.copy(target, source)


def _verify(stored: StoredCheckpoint, part: ReadPart, runs: Sequence[Bytes]) -> None:
    """Compare the blocks of a part, which holds whole ones, with their checksums."""
    manifest, chunk = stored.manifest, part.chunk
    block, size = manifest.block_bytes, part.stop - part.start
    first_block = int(manifest.block_starts[chunk]) + part.start // block
    expected = manifest.block_checksums[first_block : first_block - (-size // block)].tolist()
    found = block_checksums([size], runs, block)
    for low, digest, other in zip(range(0, size, block), found, expected, strict=True):
        if digest != other:
            start = int(manifest.first_bytes[chunk]) + part.start + low
            key = stored.key_of(chunk)
            name = "common state" if key == COMMON_KEY else f"key {key!r}"
            raise CorruptCheckpointError(
                f"Checksum mismatch in {stored.path_of(chunk)!r}, bytes {start} to "
                f"{start + min(block, size - low)}: chunk {manifest.chunk_region(chunk)} of {name} "
                "was damaged or replaced after the save. Restore the file from a copy or load "
                "another checkpoint."
            )


def _read_into(reading: _Reading, first: ReadPart, buffers: list[Bytes]) -> None:
    stored = reading.stored
    path = stored.path_of(first.chunk)
    position = int(stored.manifest.first_bytes[first.chunk]) + first.start
    if locations.is_local(path):
        with reading.files.open(path) as fd:
            num_read = read_into(fd, buffers, position)
    else:
        num_read = object_store.at(path).read_into(position, buffers)
    if num_read != sum(len(buffer) for buffer in buffers):
        raise _cut_off(stored, first, position + num_read)


def _cut_off(stored: StoredCheckpoint, part: ReadPart, end: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{stored.path_of(part.chunk)!r} ends at byte {end}, but the manifest says that key "
        f"{stored.key_of(part.chunk)!r} goes on after it: the file was cut off. Restore it from a "
        "copy or load another checkpoint."
    )


def check_files(stored: StoredCheckpoint, chunks: Sequence[int]) -> None:
    """Check that the files of some chunks have the sizes that the manifest says."""
    # On an object store each takes a request.
    num_threads = 1 if locations.is_local(stored.location) else NUM_REQUESTS
    # np.unique would import a part of numpy, at a time when perhaps no file can be opened any more.
    file_ids = np.flatnonzero(
        np.bincount(stored.manifest.file_ids[np.array(chunks, np.int64)])
    ).tolist()
    check = _check_file if stored.files is None else _check_file_once
    run_threads(lambda file_id: check(stored, file_id), file_ids, num_threads)


def _check_file_once(stored: StoredCheckpoint, file_id: int) -> None:
    assert stored.files is not None
    stored.files.check_once(stored.path_of_file(file_id), lambda: _check_file(stored, file_id))


def _check_file(stored: StoredCheckpoint, file_id: int) -> None:
    path, expected = stored.path_of_file(file_id), stored.manifest.files[file_id].num_bytes
    try:
        actual = file_size(path)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"{path!r} is missing, but the manifest of {stored.location!r} needs it: it was "
            "deleted, or is not visible on this machine yet. Restore it from a copy, or check "
            "that all machines see the same directory."
        ) from error
    if actual != expected:
        raise CorruptCheckpointError(
            f"{path!r} has {actual} bytes, but the manifest of {stored.location!r} says "
            f"{expected}: the file was cut off, extended or replaced. Restore it from a copy or "
            "load another checkpoint."
        )

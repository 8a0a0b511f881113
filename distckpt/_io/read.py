"""Reading chunks: grouped by file, in file order, straight into the target where its memory has the same layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from distckpt._base.device import Copier
from distckpt._base.dtypes import FROM_NAME, as_integers
from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.memory import Bytes, bounce_buffer
from distckpt._base.threads import MAX_BUFFERS, NUM_REQUESTS, NUM_THREADS, run_threads
from distckpt._format.checksum import checksum
from distckpt._format.manifest import Manifest
from distckpt._format.marker import file_size
from distckpt._geometry.region import IntArray, flat_start, num_outer_axes
from distckpt._io.read_parts import READ_UNIT_BYTES, Part, direct_parts, divide_copy, regions_within, with_gaps
from distckpt._io.sparse_read import holds_runs, read_sparse_region
from distckpt._plan.load import Copy
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles

REQUEST_BYTES = 16 << 20
"""One request of an object store asks for this much: enough that its answer takes longer than the way there."""


class _Reading(NamedTuple):
    """What threads need to know to read parts."""

    location: str
    manifest: Manifest
    verify: str
    copier: Copier
    files: OpenFiles


def read_copies(
    location: str,
    manifest: Manifest,
    copies: Sequence[Copy],
    targets: Sequence[torch.Tensor],
    verify: str,
    num_threads: int = NUM_THREADS,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fill requested regions from chunks.

    Args:
        location: of the checkpoint.
        manifest: its manifest.
        copies: what to read.
        targets: for each request a tensor of its region's shape, of any strides, device and dtype.
        verify: "none", "read" (every block that is read whole) or "full" (widen reads to whole blocks). No block is
            read in two pieces: reads are cut between blocks.
        num_threads: that read at the same time, each with a buffer of about `READ_UNIT_BYTES`, or `REQUEST_BYTES`.
        progress: told the number of bytes whenever some have arrived, from several threads.

    Raises:
        CorruptCheckpointError: naming file, key, region and bytes.
    """
    if not manifest.has_checksums:
        verify = "none"
    # Checksums are of blocks: where there are some to verify, what lies between the runs is needed as well.
    exact = locations.is_local(location) and verify == "none"
    copier = Copier(targets)
    unit_bytes = _unit_bytes(location)
    parts = [
        part
        for copy in copies
        for part in divide_copy(manifest, copy, targets[copy.request], verify, exact, copier, unit_bytes)
    ]
    _check_files(location, manifest, [part.chunk for part in parts])
    _read_parts(location, manifest, parts, verify, copier, num_threads, progress)


def read_chunks(location: str, manifest: Manifest, chunks: Sequence[int], verify: str) -> list[bytes]:
    """Return the whole content of some chunks (encoded objects)."""
    # Before memory is asked for: sizes may be damaged.
    _check_files(location, manifest, chunks)
    contents = [np.empty(int(manifest.num_bytes[chunk]), np.uint8) for chunk in chunks]
    _read_parts(location, manifest, _whole_chunks(manifest, chunks, contents), verify, Copier(()))
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
    _check_files(location, manifest, chunks)
    _read_parts(location, manifest, _whole_chunks(manifest, chunks, memories), verify, Copier(()), num_threads)


def _whole_chunks(manifest: Manifest, chunks: Sequence[int], memories: Sequence[Bytes]) -> list[Part]:
    parts: list[Part] = []
    for chunk, memory in zip(chunks, memories, strict=True):
        if 0 < len(memory) <= READ_UNIT_BYTES:
            parts.append(Part(chunk, 0, len(memory), memory))
        else:
            parts.extend(direct_parts(chunk, 0, len(memory), memory, manifest.block_bytes))
    return parts


def _unit_bytes(location: str) -> int:
    return READ_UNIT_BYTES if locations.is_local(location) else REQUEST_BYTES


def _read_parts(
    location: str,
    manifest: Manifest,
    parts: Sequence[Part],
    verify: str,
    copier: Copier,
    num_threads: int = NUM_THREADS,
    progress: Callable[[int], None] | None = None,
) -> None:
    if not manifest.has_checksums:
        verify = "none"
    chunks = np.array([part.chunk for part in parts], np.int64)
    files = manifest.file_ids[chunks]
    positions = manifest.first_bytes[chunks] + np.array([part.start for part in parts], np.int64)
    order = np.lexsort((positions, files))
    in_order = [parts[i] for i in order.tolist()]
    units = _units(in_order, files[order].tolist(), positions[order].tolist(), _unit_bytes(location))
    with OpenFiles() as open_files:
        reading = _Reading(location, manifest, verify, copier, open_files)

        def read(unit: list[Part]) -> None:
            _read_unit(reading, unit)
            if progress is not None:
                progress(sum(len(p.memory) if p.memory is not None else _region_bytes(manifest, p) for p in unit))

        run_threads(read, units, num_threads)


def _region_bytes(manifest: Manifest, part: Part) -> int:
    item = FROM_NAME[manifest.dtypes[manifest.key_ids[part.chunk]]].itemsize
    return sum(region.num_elements for region in regions_within(manifest, part)) * item


def _units(
    parts: Sequence[Part], files: Sequence[int], positions: Sequence[int], unit_bytes: int
) -> Iterator[list[Part]]:
    """Join parts that go straight to memory and follow one another in a file: one call reads them all."""
    unit: list[Part] = []
    room, next_file, next_position = 0, -1, -1
    for part, file, position in zip(parts, files, positions, strict=True):
        num_bytes = part.stop - part.start
        follows = file == next_file and position == next_position and num_bytes <= room
        if not (follows and part.memory is not None and len(unit) < MAX_BUFFERS):
            if unit:
                yield unit
            # Nothing joins a part that goes through a bounce buffer.
            unit, room = [], unit_bytes if part.memory is not None else 0
        unit.append(part)
        room -= num_bytes
        next_file, next_position = file, position + num_bytes
    if unit:
        yield unit


def _read_unit(reading: _Reading, unit: list[Part]) -> None:
    first = unit[0]
    if first.sparse:
        if not _read_sparse(reading, first):
            for part in with_gaps(first, reading.manifest.block_bytes):
                _read_unit(reading, [part])
        return
    if first.memory is not None:
        buffers = [part.memory for part in unit if part.memory is not None]
    else:
        buffers = [bounce_buffer("read", first.stop - first.start, reading.copier.layer)]
    _read_into(reading, first, buffers)
    for part, buffer in zip(unit, buffers, strict=True):
        if reading.verify != "none":
            _verify(reading.location, reading.manifest, part, buffer)
        if part.memory is None:
            _deliver(reading.manifest, part, buffer, reading.copier)


def _read_sparse(reading: _Reading, part: Part) -> bool:
    """Read the runs of a part only; False when the system cannot."""
    location, manifest, _, copier, _ = reading
    assert part.region is not None
    assert part.target is not None
    region, target = part.region, part.target
    shape = manifest.chunk_region(part.chunk).shape
    dtype = FROM_NAME[manifest.dtypes[manifest.key_ids[part.chunk]]]
    goal = target
    if target.dtype != dtype or copier.is_away(target) or not holds_runs(target, num_outer_axes(shape, region)):
        values = torch.from_numpy(bounce_buffer("read", region.num_elements * dtype.itemsize, copier.layer)).view(dtype)
        goal = values.view(region.shape)
    file, first_byte = _file_location(location, manifest, part.chunk), int(manifest.first_bytes[part.chunk])
    end = read_sparse_region(file, first_byte, shape, region, goal)
    if end is None:
        return False
    if end < first_byte + part.stop:
        raise _cut_off(manifest, part, file, end)
    if goal is not target:
        _copy(goal, target, copier)
        copier.wait()
    return True


def _deliver(manifest: Manifest, part: Part, buffer: Bytes, copier: Copier) -> None:
    """Copy what a part holds of its region to where it belongs."""
    assert part.region is not None
    assert part.target is not None
    shape = manifest.chunk_region(part.chunk).shape
    dtype = FROM_NAME[manifest.dtypes[manifest.key_ids[part.chunk]]]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    values = torch.from_numpy(buffer).view(dtype)
    for piece in regions_within(manifest, part):
        begin = flat_start(shape, piece) - part.start // dtype.itemsize
        target = part.target[piece.relative_to(part.region.offset).slices()] if shape else part.target
        _copy(values.as_strided(piece.shape, strides, begin), target, copier)
    copier.wait()


def _copy(source: torch.Tensor, target: torch.Tensor, copier: Copier) -> None:
    """Copy values out of scratch memory, converting the dtype where it differs; `copier.wait` tells when it is done."""
    if target.dtype == source.dtype and not (target.is_conj() or target.is_neg()):
        source, target = as_integers(source), as_integers(target)
    copier.copy(target, source)


def _verify(location: str, manifest: Manifest, part: Part, buffer: Bytes) -> None:
    block, size = manifest.block_bytes, int(manifest.num_bytes[part.chunk])
    first_block = int(manifest.block_starts[part.chunk])
    for index in range(-(-part.start // block), -(-part.stop // block)):
        low, high = index * block, min((index + 1) * block, size)
        if high > part.stop:
            return
        if checksum(buffer[low - part.start : high - part.start]) != int(manifest.block_checksums[first_block + index]):
            file = _file_location(location, manifest, part.chunk)
            start = int(manifest.first_bytes[part.chunk])
            raise CorruptCheckpointError(
                f"Checksum mismatch in {file!r}, bytes {start + low} to {start + high}: chunk "
                f"{manifest.chunk_region(part.chunk)} of key {_key(manifest, part.chunk)!r} was "
                "damaged or replaced after the save. Restore the file from a copy or load another checkpoint."
            )


def _read_into(reading: _Reading, first: Part, buffers: list[Bytes]) -> None:
    location, manifest = reading.location, reading.manifest
    file = _file_location(location, manifest, first.chunk)
    position = int(manifest.first_bytes[first.chunk]) + first.start
    wanted = sum(len(buffer) for buffer in buffers)
    if locations.is_local(file):
        got = reading.files.read_into(file, buffers, position)
    else:
        got = locations.read_remote_into(file, position, buffers)
    if got != wanted:
        raise _cut_off(manifest, first, file, position + got)


def _cut_off(manifest: Manifest, part: Part, file: str, end: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{file!r} ends at byte {end}, but the manifest says that key {_key(manifest, part.chunk)!r} goes on after it: "
        "the file was cut off. Restore it from a copy or load another checkpoint."
    )


def _distinct(file_ids: IntArray) -> list[int]:
    # np.unique would import a part of numpy, at a time when perhaps no file can be opened any more.
    distinct: list[int] = np.flatnonzero(np.bincount(file_ids)).tolist()
    return distinct


def _check_files(location: str, manifest: Manifest, chunks: Sequence[int]) -> None:
    """Check that the files of some chunks have the sizes that the manifest says."""
    # On an object store each takes a request.
    num_threads = 1 if locations.is_local(location) else NUM_REQUESTS
    file_ids = _distinct(manifest.file_ids[np.array(chunks, np.int64)])
    run_threads(lambda file_id: _check_file(location, manifest, file_id), file_ids, num_threads)


def _check_file(location: str, manifest: Manifest, file_id: int) -> None:
    file = locations.join(location, *manifest.files[file_id].name.split("/"))
    expected = manifest.files[file_id].num_bytes
    try:
        actual = file_size(file)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"{file!r} is missing, but the manifest of {location!r} needs it: it was deleted, or is not visible on "
            "this machine yet. Restore it from a copy, or check that all machines see the same directory."
        ) from error
    if actual != expected:
        raise CorruptCheckpointError(
            f"{file!r} has {actual} bytes, but the manifest of {location!r} says {expected}: the file was cut off, "
            "extended or replaced. Restore it from a copy or load another checkpoint."
        )


def _file_location(location: str, manifest: Manifest, chunk: int) -> str:
    return locations.join(location, *manifest.files[int(manifest.file_ids[chunk])].name.split("/"))


def _key(manifest: Manifest, chunk: int) -> str:
    return manifest.keys[int(manifest.key_ids[chunk])]

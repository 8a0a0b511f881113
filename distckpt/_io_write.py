"""Writing shard files: bytes straight from tensor memory, checksummed while they are in cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from distckpt import _storage, core
from distckpt._dtypes import as_integers
from distckpt._io import (
    BLOCK_BYTES,
    MAX_BUFFERS,
    NUM_THREADS,
    UNIT_BYTES,
    Bytes,
    allocate,
    bounce_buffer,
    checksum,
    is_plain_memory,
    run_threads,
    tensor_bytes,
)
from distckpt._region import flat_range_regions


class Part(NamedTuple):
    """Bytes [start, stop) of one chunk of a file."""

    chunk: int
    start: int
    stop: int


Fill: TypeAlias = Callable[[Sequence[Part], Bytes], list[Bytes]]
"""Gives the bytes of some parts, in order: views of memory that is there, or of the scratch memory it is handed."""


def write_file(
    location: str,
    header: bytes,
    chunk_bytes: Sequence[int],
    fill: Fill,
    *,
    with_checksums: bool = True,
    num_threads: int = NUM_THREADS,
) -> npt.NDArray[np.uint64]:
    """Write one file: a header, then chunks without gaps. Its bytes are on disk when this returns.

    Args:
        location: must not exist.
        header: the first bytes.
        chunk_bytes: size of each chunk.
        fill: gives the bytes of chunks; called from several threads.
        with_checksums: whether to compute checksums.
        num_threads: that fill and write at the same time, each `UNIT_BYTES` at most.

    Returns:
        The checksums of the blocks of all chunks, chunk by chunk; empty without.

    Raises:
        OSError: naming the file.
    """
    counts = [-(-size // BLOCK_BYTES) for size in chunk_bytes]
    first_block = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    checksums = np.zeros(int(first_block[-1]) if with_checksums else 0, np.uint64)

    def buffers_of(unit: Sequence[Part]) -> list[Bytes]:
        buffers = fill(unit, bounce_buffer("write", UNIT_BYTES))
        if with_checksums:
            _compute_checksums(unit, buffers, first_block, checksums)
        return buffers

    try:
        if _storage.is_local(location):
            _write_local(location, header, chunk_bytes, buffers_of, num_threads)
        else:
            with _storage.open_remote_for_writing(location) as file:
                file.write(header)
                for unit in _units(chunk_bytes):
                    for buffer in buffers_of(unit):
                        file.write(memoryview(buffer))
    except OSError as error:
        # An error that names a file already is one of reading what goes into this one.
        if error.errno is None or error.filename is not None or isinstance(error, core.CheckpointingException):
            raise
        raise OSError(error.errno, error.strerror, location) from error
    return checksums


def fill_from_tensors(contents: Sequence[Sequence[torch.Tensor]]) -> Fill:
    """Return what fills each chunk with the row-major contents of its tensors, one after the other."""

    def fill(unit: Sequence[Part], scratch: Bytes) -> list[Bytes]:
        buffers: list[Bytes] = []
        used = 0
        for part in unit:
            size = part.stop - part.start
            buffers.extend(_part_bytes(contents[part.chunk], part, scratch[used : used + size]))
            used += size
        return buffers

    return fill


def _write_local(
    location: str,
    header: bytes,
    chunk_bytes: Sequence[int],
    buffers_of: Callable[[Sequence[Part]], list[Bytes]],
    num_threads: int,
) -> None:
    first_bytes = np.concatenate([[0], np.cumsum(chunk_bytes, dtype=np.int64)]) + len(header)
    fd = os.open(location, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        allocate(fd, int(first_bytes[-1]))
        _write_all(fd, [np.frombuffer(header, np.uint8)], 0)

        def write_unit(unit: Sequence[Part]) -> None:
            _write_all(fd, buffers_of(unit), int(first_bytes[unit[0].chunk]) + unit[0].start)

        run_threads(write_unit, _units(chunk_bytes), num_threads)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, buffers: list[Bytes], position: int) -> None:
    for start in range(0, len(buffers), MAX_BUFFERS):
        batch = buffers[start : start + MAX_BUFFERS]
        total = sum(len(buffer) for buffer in batch)
        written = os.pwritev(fd, batch, position)
        while written < total:
            # A short write: a signal, or almost no space left (then the next call says so).
            rest = np.concatenate(batch)[written:]
            written += os.pwrite(fd, rest, position + written)
        position += total


def _units(chunk_bytes: Sequence[int]) -> Iterator[list[Part]]:
    """Divide a file into runs of at most `UNIT_BYTES`; chunks are divided between blocks only."""
    unit: list[Part] = []
    filled = 0
    for index, size in enumerate(chunk_bytes):
        start = 0
        while start < size:
            room = UNIT_BYTES - filled
            if room < size - start:
                room = room // BLOCK_BYTES * BLOCK_BYTES
            stop = min(size, start + room)
            if stop > start:
                unit.append(Part(index, start, stop))
                filled += stop - start
                start = stop
            if start < size or filled == UNIT_BYTES:
                yield unit
                unit, filled = [], 0
    if unit:
        yield unit


def _part_bytes(tensors: Sequence[torch.Tensor], part: Part, scratch: Bytes) -> list[Bytes]:
    """Return bytes [start, stop) of a chunk: views of tensor memory where that is possible, copies in `scratch`."""
    pieces: list[Bytes] = []
    begin = 0
    for tensor in tensors:
        end = begin + tensor.numel() * tensor.element_size()
        low, high = max(part.start, begin), min(part.stop, end)
        if low < high:
            if is_plain_memory(tensor):
                pieces.append(tensor_bytes(tensor)[low - begin : high - begin])
            else:
                copied = scratch[low - part.start : high - part.start]
                _copy_range(tensor, low - begin, high - begin, copied)
                pieces.append(copied)
        begin = end
    return pieces


def _copy_range(tensor: torch.Tensor, start: int, stop: int, target: Bytes) -> None:
    """Copy bytes [start, stop) of a tensor's row-major content, from any device and with any strides."""
    item = tensor.element_size()
    values = torch.from_numpy(target).view(tensor.dtype)
    if not (tensor.is_conj() or tensor.is_neg()):
        tensor, values = as_integers(tensor), as_integers(values)
    filled = 0
    for box in flat_range_regions(tuple(tensor.shape), start // item, stop // item):
        part = tensor[box.slices()]
        values[filled : filled + box.num_elements].view(box.shape).copy_(part)
        filled += box.num_elements


def _compute_checksums(
    unit: Sequence[Part],
    buffers: Sequence[Bytes],
    first_block: npt.NDArray[np.int64],
    checksums: npt.NDArray[np.uint64],
) -> None:
    """Compute the checksums of the blocks of a unit, whose bytes may come in other pieces than its parts."""
    pieces = list(reversed(buffers))
    for part in unit:
        block = int(first_block[part.chunk]) + part.start // BLOCK_BYTES
        for start in range(part.start, part.stop, BLOCK_BYTES):
            wanted = min(BLOCK_BYTES, part.stop - start)
            if len(pieces[-1]) >= wanted:
                checksums[block] = checksum(pieces[-1][:wanted])
                pieces[-1] = pieces[-1][wanted:]
            else:
                checksums[block] = _digest_of_pieces(pieces, wanted)
            if not len(pieces[-1]):
                pieces.pop()
            block += 1


def _digest_of_pieces(pieces: list[Bytes], wanted: int) -> int:
    hasher = xxhash.xxh3_64()
    while True:
        taken = pieces[-1][:wanted]
        hasher.update(taken)
        pieces[-1] = pieces[-1][len(taken) :]
        wanted -= len(taken)
        if not wanted:
            return hasher.intdigest()
        pieces.pop()

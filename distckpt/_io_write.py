"""Writing shard files: bytes straight from tensor memory, checksummed while they are in cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from distckpt import _storage
from distckpt._dtypes import as_integers
from distckpt._io import (
    BLOCK_BYTES,
    MAX_BUFFERS,
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


class ChunkSource(NamedTuple):
    """A chunk to write: its place in the file and the tensors whose contents, in order, are its bytes."""

    first_byte: int
    num_bytes: int
    tensors: Sequence[torch.Tensor]


class FileSource(NamedTuple):
    """A file to write: the header, then chunks without gaps."""

    location: str
    header: bytes
    chunks: Sequence[ChunkSource]

    @property
    def num_bytes(self) -> int:
        """The size of the whole file."""
        return len(self.header) + sum(chunk.num_bytes for chunk in self.chunks)


class _Part(NamedTuple):
    chunk: int
    start: int
    stop: int


def write_file(source: FileSource) -> npt.NDArray[np.uint64]:
    """Write one file; its bytes are on disk when this returns.

    Returns:
        The checksums of the blocks of all chunks, chunk by chunk.

    Raises:
        OSError: naming the file.
    """
    counts = [-(-chunk.num_bytes // BLOCK_BYTES) for chunk in source.chunks]
    first_block = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    checksums = np.zeros(int(first_block[-1]), np.uint64)

    def buffers_of(unit: list[_Part]) -> list[Bytes]:
        scratch = bounce_buffer(UNIT_BYTES)
        used = 0
        buffers: list[Bytes] = []
        for part in unit:
            pieces = _part_bytes(source.chunks[part.chunk], part, scratch[used : used + part.stop - part.start])
            used += part.stop - part.start
            block = int(first_block[part.chunk]) + part.start // BLOCK_BYTES
            for digest in _block_digests(pieces):
                checksums[block] = digest
                block += 1
            buffers.extend(pieces)
        return buffers

    try:
        if _storage.is_local(source.location):
            _write_local(source, buffers_of)
        else:
            with _storage.open_remote_for_writing(source.location) as file:
                file.write(source.header)
                for unit in _units(source.chunks):
                    for buffer in buffers_of(unit):
                        file.write(memoryview(buffer))
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, source.location) from error
    return checksums


def _write_local(source: FileSource, buffers_of: Callable[[list[_Part]], list[Bytes]]) -> None:
    fd = os.open(source.location, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        allocate(fd, source.num_bytes)
        _write_all(fd, [np.frombuffer(source.header, np.uint8)], 0)

        def write_unit(unit: list[_Part]) -> None:
            position = source.chunks[unit[0].chunk].first_byte + unit[0].start
            _write_all(fd, buffers_of(unit), position)

        run_threads(write_unit, _units(source.chunks))
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


def _units(chunks: Sequence[ChunkSource]) -> Iterator[list[_Part]]:
    """Divide a file into runs of at most `UNIT_BYTES`; chunks are divided between blocks only."""
    unit: list[_Part] = []
    filled = 0
    for index, chunk in enumerate(chunks):
        start = 0
        while start < chunk.num_bytes:
            room = UNIT_BYTES - filled
            if room < chunk.num_bytes - start:
                room = room // BLOCK_BYTES * BLOCK_BYTES
            stop = min(chunk.num_bytes, start + room)
            if stop > start:
                unit.append(_Part(index, start, stop))
                filled += stop - start
                start = stop
            if start < chunk.num_bytes or filled == UNIT_BYTES:
                yield unit
                unit, filled = [], 0
    if unit:
        yield unit


def _part_bytes(chunk: ChunkSource, part: _Part, scratch: Bytes) -> list[Bytes]:
    """Return bytes [start, stop) of a chunk: views of tensor memory where that is possible, copies in `scratch`."""
    pieces: list[Bytes] = []
    begin = 0
    for tensor in chunk.tensors:
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


def _block_digests(pieces: list[Bytes]) -> Iterator[int]:
    if len(pieces) == 1:
        data = pieces[0]
        for start in range(0, len(data), BLOCK_BYTES):
            yield checksum(data[start : start + BLOCK_BYTES])
        return
    hasher, room = xxhash.xxh3_64(), BLOCK_BYTES
    for data in pieces:
        while len(data):
            taken, data = data[:room], data[room:]
            hasher.update(taken)
            room -= len(taken)
            if room == 0:
                yield hasher.intdigest()
                hasher, room = xxhash.xxh3_64(), BLOCK_BYTES
    if room < BLOCK_BYTES:
        yield hasher.intdigest()

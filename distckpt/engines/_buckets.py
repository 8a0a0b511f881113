"""Tensors for any engine: a stream in bounded memory, or buckets of bytes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from distckpt._base.messages import check_num_bytes
from distckpt._operations.checkpoint import Checkpoint, TensorInfo
from distckpt._operations.checkpoint import open as open_checkpoint

DEFAULT_BUCKET_BYTES = 512 << 20
_ALIGNMENT = 16


class BucketEntry(NamedTuple):
    """A tensor in a bucket.

    Attributes:
        name: of the tensor.
        shape: of the tensor.
        dtype: of the tensor.
        start_idx: its first byte in the bucket.
        end_idx: the byte after its last one.
        numel: the number of its elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class Bucket(NamedTuple):
    """Tensors in one tensor of bytes.

    Attributes:
        data: uint8, 1-D.
        entries: the tensors in it, in order of their bytes.
    """

    data: torch.Tensor
    entries: tuple[BucketEntry, ...]


def stream_tensors(
    path: str | os.PathLike[str] | Checkpoint, *, max_bytes: int = DEFAULT_BUCKET_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the tensors of a checkpoint by key, for a weight loader.

        model.load_weights(distckpt.engines.stream_tensors("exports/qwen3"))

    Any rank may call, alone. Quantized tensors come as they are stored.

    Args:
        path: anything that `distckpt.open` opens, or an opened checkpoint.
        max_bytes: bytes that are read at once; a larger tensor comes alone.
    """
    check_num_bytes("max_bytes", max_bytes)
    opened = path if isinstance(path, Checkpoint) else open_checkpoint(path, as_stored=True)
    for keys in _grouped(opened.tensors.values(), max_bytes):
        tensors = opened.read_tensors(keys)
        while tensors:
            key = next(iter(tensors))
            yield key, tensors.pop(key)


def _grouped(tensors: Iterable[TensorInfo], max_bytes: int) -> Iterator[list[str]]:
    """Divide keys into groups of at most `max_bytes`, or of one key."""
    group: list[str] = []
    filled = 0
    for tensor in tensors:
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        if group and filled + size > max_bytes:
            yield group
            group = []
            filled = 0
        group.append(tensor.key)
        filled += size
    if group:
        yield group


def pack_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], *, max_bytes: int = DEFAULT_BUCKET_BYTES
) -> Iterator[Bucket]:
    """Copy tensors into buckets of bytes, as SGLang's `load_format="flattened_bucket"` takes them.

        for bucket in distckpt.engines.pack_buckets(model.state_dict().items()):
            send(bucket.data, bucket.entries)

    The entries have the attributes of SGLang's `FlattenedTensorMetadata`. A tensor is let go
    before the next one is asked for, and one bucket is in memory at a time when the caller lets it
    go.

    Args:
        tensors: of one device.
        max_bytes: size of a bucket at most; a larger tensor gets a bucket of its own.
    """
    check_num_bytes("max_bytes", max_bytes)
    open_bucket = _OpenBucket(max_bytes)
    for name, tensor in tensors:
        if not open_bucket.has_room(tensor):
            yield open_bucket.close()
            open_bucket = _OpenBucket(max_bytes)
        open_bucket.add(name, tensor)
        del tensor
    if open_bucket.entries:
        yield open_bucket.close()


class _OpenBucket:
    """A bucket that is being filled."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.entries = list[BucketEntry]()
        self._data = torch.empty(0, dtype=torch.uint8)

    def _start(self) -> int:
        end = 0
        if self.entries:
            end = self.entries[-1].end_idx
        return -(-end // _ALIGNMENT) * _ALIGNMENT

    def has_room(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor still fits; the first one always does."""
        return not self.entries or self._start() + tensor.nbytes <= self.max_bytes

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor behind the earlier ones."""
        start = self._start()
        end = start + tensor.nbytes
        if not self.entries:
            size = max(self.max_bytes, end)
            self._data = torch.zeros(size, dtype=torch.uint8, device=tensor.device)
        place = self._data[start:end].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor.detach())
        shape = tuple(tensor.shape)
        self.entries.append(BucketEntry(name, shape, tensor.dtype, start, end, tensor.numel()))

    def close(self) -> Bucket:
        """Return the filled bucket."""
        return Bucket(self._data[: self.entries[-1].end_idx], tuple(self.entries))


def unpack_bucket(bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a bucket, as views of its bytes.

    model.load_weights(distckpt.engines.unpack_bucket(bucket))
    """
    tensors = []
    for entry in bucket.entries:
        tensors.append(
            (
                entry.name,
                bucket.data[entry.start_idx : entry.end_idx].view(entry.dtype).view(entry.shape),
            )
        )
    return tensors

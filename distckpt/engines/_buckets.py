"""Tensors for any engine: a stream in bounded memory, or buckets of bytes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from distckpt._base.messages import check_num_bytes
from distckpt._format.hf_names import group_keys_by_bytes
from distckpt._operations.checkpoint import Checkpoint
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
    sizes = {}
    for key, tensor in opened.tensors.items():
        sizes[key] = math.prod(tensor.shape) * tensor.dtype.itemsize
    for keys in group_keys_by_bytes(sizes, max_bytes):
        tensors = opened.read_tensors(keys)
        while tensors:
            key = next(iter(tensors))
            yield key, tensors.pop(key)


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
    data = None
    entries: list[BucketEntry] = []
    end = 0
    for name, tensor in tensors:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if data is not None and start + tensor.nbytes > max_bytes:
            bucket = Bucket(data[:end], tuple(entries))
            data = None
            entries = []
            start = 0
            yield bucket
            # The caller may have let it go, and the next one needs its memory.
            del bucket
        end = start + tensor.nbytes
        if data is None:
            data = torch.zeros(max(max_bytes, end), dtype=torch.uint8, device=tensor.device)
        data[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        shape = tuple(tensor.shape)
        entries.append(BucketEntry(name, shape, tensor.dtype, start, end, tensor.numel()))
        del tensor
    if data is not None:
        yield Bucket(data[:end], tuple(entries))


def unpack_bucket(bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a bucket, as views of its bytes.

    model.load_weights(distckpt.engines.unpack_bucket(bucket))
    """
    tensors = []
    for entry in bucket.entries:
        data = bucket.data[entry.start_idx : entry.end_idx]
        tensors.append((entry.name, data.view(entry.dtype).view(entry.shape)))
    return tensors

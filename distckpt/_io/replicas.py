"""Hashes of ranks' tensors, which must be equal for replicas."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.dtypes import as_integers
from distckpt._base.memory import Bytes, blocks_at, is_plain_memory, tensor_bytes
from distckpt._format.checksum import checksum
from distckpt._geometry.region import Region
from distckpt._plan.layout import SavePlan
from distckpt._state.shards import Shard, ShardTable, region_view
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedObject

NUM_BLOCKS = 16
"""Blocks sampled per tensor, including the first and last. Small tensors are hashed whole."""
BLOCK_BYTES = 64
"""Smallest size of a block; a few more elements make distances equal."""


def add_digests(table: ShardTable, shards: Sequence[Shard], of_samples: bool) -> None:
    """Add hashes of shards or their samples to the table; 0 means not hashed."""
    rows = [*enumerate(table.shard_ids.tolist())]
    if not of_samples:
        for row, shard_id in rows:
            content = _content_of(shards[shard_id], table.row_region(row))
            table.digests[row] = max(1, checksum(content))
        return
    of_tensors = []
    for row, shard_id in rows:
        if isinstance(shards[shard_id], ShardedTensor):
            of_tensors.append(row)
    table.digests[of_tensors] = sampled_digests(_views_of_rows(table, shards, of_tensors))


def _views_of_rows(
    table: ShardTable, shards: Sequence[Shard], rows: Sequence[int]
) -> list[torch.Tensor]:
    """Return views of the tensors in some rows of this rank's table."""
    views = []
    for row in rows:
        shard = shards[int(table.shard_ids[row])]
        assert isinstance(shard, ShardedTensor)
        views.append(region_view(shard, table.row_region(row)))
    return views


def _content_of(shard: Shard, region: Region) -> bytes | Bytes:
    if isinstance(shard, ShardedObject):
        encoded: bytes = shard.data
        return encoded
    view = region_view(shard, region)
    if not is_plain_memory(view):
        view = view.cpu().resolve_conj().resolve_neg().contiguous()
    return tensor_bytes(view)


def samples_of_rows(table: ShardTable, shards: Sequence[Shard], rows: Sequence[int]) -> list[bytes]:
    """Return samples of the tensors in some rows of this rank's table."""
    return [bytes(sample) for sample in _samples(_views_of_rows(table, shards, rows))]


def weighted_digest(plan: SavePlan, shards: Sequence[Shard]) -> int:
    """Return a number of this rank for comparing replicas.

    The numbers of all ranks add up to 0, modulo 2**64, if samples of replicas are equal.
    """
    views = []
    for number, region in plan.replicas or ():
        shard = shards[number]
        if isinstance(shard, ShardedTensor):
            views.append(region_view(shard, region))
    return int((sampled_digests(views) * plan.weights).sum(dtype=np.uint64).view(np.int64))


def sampled_digests(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.uint64]:
    """Hash samples of tensors."""
    return np.array([max(1, checksum(sample)) for sample in _samples(tensors)], np.uint64)


def _samples(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Take a few blocks of each tensor, equally on all devices."""
    samples: list[Any] = [b""] * len(tensors)
    elsewhere: dict[torch.device, list[int]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        if is_plain_memory(tensor):
            samples[number] = _sample_of_memory(tensor)
        elif tensor.numel():
            elsewhere[tensor.device].append(number)
    for numbers in elsewhere.values():
        device_samples = _samples_of_device([tensors[number].detach() for number in numbers])
        for number, sample in zip(numbers, device_samples, strict=True):
            samples[number] = sample
    return samples


def _sample_of_memory(tensor: torch.Tensor) -> bytes:
    size = tensor.itemsize
    count, length, pitch = _blocks(tensor.nbytes // size, size)
    return blocks_at(tensor.data_ptr(), count, length * size, pitch * size).tobytes()


def _samples_of_device(tensors: Sequence[torch.Tensor]) -> list[Bytes]:
    """Return the samples of tensors of one device.

    One copy goes to the device and one comes from it for all of them: each waits for the work that
    the program has queued there.
    """
    places = [_places(tensor) for tensor in tensors]
    there = torch.cat(places).to(tensors[0].device)
    split = torch.split_with_sizes(there, list(map(len, places)))
    taken = list(map(_taken, tensors, split))
    ends = np.cumsum(list(map(len, taken)))
    return np.split(tensor_bytes(torch.cat(taken).cpu()), ends[:-1])


def _places(tensor: torch.Tensor) -> torch.Tensor:
    count, length, pitch = _blocks(tensor.numel(), tensor.itemsize)
    firsts = torch.arange(count, device="cpu") * pitch
    return (firsts[:, None] + torch.arange(length, device="cpu")).flatten()


def _taken(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return torch.take(as_integers(tensor.resolve_conj().resolve_neg()), places).view(torch.uint8)


@functools.lru_cache(4096)
def _blocks(num_elements: int, element_bytes: int) -> tuple[int, int, int]:
    """Return the number, length and distance of a sample's blocks.

    Length and distance are in elements. The last block ends with the last element.
    """
    length = BLOCK_BYTES // element_bytes
    if num_elements <= NUM_BLOCKS * length:
        return 1, num_elements, 0
    pitch, rest = divmod(num_elements - length, NUM_BLOCKS - 1)
    return NUM_BLOCKS, length + rest, pitch

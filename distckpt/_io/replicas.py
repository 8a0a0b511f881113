"""Hashes of what ranks hold, of which replicas must have the same."""

from __future__ import annotations

import ctypes
import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.dtypes import as_integers
from distckpt._base.memory import is_plain_memory, tensor_bytes
from distckpt._format.checksum import checksum
from distckpt._mapping.wrappers import ShardedObject, ShardedTensor
from distckpt._plan.layout import SavePlan
from distckpt._state.shards import Shard, ShardTable, region_view, shard_regions

NUM_BLOCKS = 16
BLOCK_BYTES = 64
"""So many blocks of a tensor are a sample of it, the first and the last among them; small tensors
are hashed whole.
"""


def add_digests(table: ShardTable, shards: Sequence[Shard], of_samples: bool) -> None:
    """Add hashes of shards, or of samples of their tensors, to the table; 0 means not hashed."""
    # In the order of the rows.
    held = [(shard, region) for shard in shards for region in shard_regions(shard)]
    if of_samples:
        views = {
            row: region_view(s, region)
            for row, (s, region) in enumerate(held)
            if isinstance(s, ShardedTensor)
        }
        table.digests[list(views)] = sampled_digests(list(views.values()))
        return
    for row, (shard, region) in enumerate(held):
        if isinstance(shard, ShardedObject):
            content = shard.data
        else:
            view = region_view(shard, region)
            plain = (
                view
                if is_plain_memory(view)
                else view.cpu().resolve_conj().resolve_neg().contiguous()
            )
            content = tensor_bytes(plain)
        table.digests[row] = max(1, checksum(content))


def weighted_digest(plan: SavePlan, shards: Sequence[Shard]) -> int:
    """Return a number of this rank. The sum of all ranks is 0 where samples of replicas are equal,
    modulo 2**64.
    """
    views = [
        region_view(s, region)
        for i, region in plan.replicas or ()
        if isinstance(s := shards[i], ShardedTensor)
    ]
    return int((sampled_digests(views) * plan.weights).sum(dtype=np.uint64).view(np.int64))


def sampled_digests(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.uint64]:
    """Hash the same few blocks of elements of each tensor, whatever its device and strides."""
    samples: list[Any] = [b""] * len(tensors)
    elsewhere: dict[torch.device, list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        if is_plain_memory(tensor):
            start, num_bytes, size = tensor.data_ptr(), tensor.nbytes, tensor.itemsize
            firsts, length = _blocks(num_bytes // size, size)
            parts = [ctypes.string_at(start + first * size, length * size) for first in firsts]
            samples[i] = parts[0] if len(parts) == 1 else b"".join(parts)
        elif tensor.numel():
            elsewhere[tensor.device].append(i)
    for device, numbers in elsewhere.items():
        # One copy to a device and one from it for all of them: each waits for what the program has
        # queued there.
        places = [_places(tensors[i]) for i in numbers]
        split = torch.split_with_sizes(torch.cat(places).to(device), [len(each) for each in places])
        taken = [_taken(tensors[i], each) for i, each in zip(numbers, split, strict=True)]
        ends = np.cumsum([len(sample) for sample in taken])
        for i, sample in zip(
            numbers, np.split(tensor_bytes(torch.cat(taken).cpu()), ends[:-1]), strict=True
        ):
            samples[i] = sample
    return np.array([max(1, checksum(sample)) for sample in samples], np.uint64)


def _places(tensor: torch.Tensor) -> torch.Tensor:
    firsts, length = _blocks(tensor.numel(), tensor.itemsize)
    return (torch.tensor(firsts)[:, None] + torch.arange(length)).flatten()


def _taken(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return torch.take(as_integers(tensor.resolve_conj().resolve_neg()), places).view(torch.uint8)


@functools.lru_cache(4096)
def _blocks(num_elements: int, element_bytes: int) -> tuple[list[int], int]:
    """Return the first elements of the blocks of a sample, and how many elements each has."""
    length = BLOCK_BYTES // element_bytes
    if num_elements <= NUM_BLOCKS * length:
        return [0], num_elements
    return [(num_elements - length) * i // (NUM_BLOCKS - 1) for i in range(NUM_BLOCKS)], length

"""Known global tensors, and how ranks of a layout hold them; the oracle of the tests is numpy
indexing.
"""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch

from distckpt import ShardedTensor

Slices = tuple[slice, ...]


class Layout(NamedTuple):
    """Sizes of the groups of a parallel layout. Ranks count tensor parallel positions first, data
    parallel last.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def position(self, rank: int) -> tuple[int, int, int]:
        """Return the position of a rank in its tensor, pipeline and data parallel group."""
        return rank % self.tp, rank // self.tp % self.pp, rank // (self.tp * self.pp)

    def __str__(self) -> str:
        return f"TP{self.tp}-PP{self.pp}-DP{self.dp}"


def global_bytes(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
    """Return the bytes of the global tensor of a key, of shape `(*shape, bytes per element)`."""
    random = np.random.default_rng(zlib.crc32(key.encode()))
    return random.integers(0, 256, (*shape, dtype.itemsize), np.uint8)


def tensor_from(content: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of its own memory from bytes of shape `(*shape, bytes per element)`."""
    if content.size == 0:
        return torch.empty(content.shape[:-1], dtype=dtype)
    return torch.from_numpy(content.copy(order="C")).view(dtype).reshape(content.shape[:-1])


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a tensor, of shape `(*shape, bytes per element)`."""
    flat = tensor.detach().contiguous().reshape(-1, 1)
    return flat.view(torch.uint8).numpy().reshape(*tensor.shape, tensor.dtype.itemsize)


def even_part(size: int, parts: int, index: int) -> slice:
    """Return the index-th of `parts` equal parts of an axis."""
    assert size % parts == 0
    return slice(index * size // parts, (index + 1) * size // parts)


def uneven_part(size: int, parts: int, index: int) -> slice:
    """Return the index-th of `parts` parts of an axis that differ much in size; some are empty."""
    weights = [(7 * i) % 5 for i in range(1, parts + 1)]
    ends = [size * total // sum(weights) for total in itertools.accumulate(weights)]
    return slice([0, *ends][index], ends[index])


def irregular_shard(
    key: str, content: np.ndarray, dtype: torch.dtype, slices: Slices, replica_id: Any = 0
) -> ShardedTensor:
    """Describe any region of a global tensor (given as bytes) as a shard on an irregular grid."""
    part = tensor_from(content[slices], dtype)
    bounds = [s.indices(n)[:2] for s, n in zip(slices, content.shape, strict=False)]
    offset = tuple(start for start, _ in bounds)
    return ShardedTensor(
        key, part, dtype, tuple(part.shape), content.shape[:-1], offset, None, replica_id
    )


def flat_part(num_elements: int, parts: int, index: int) -> slice:
    """Return the index-th of `parts` runs of a flattened tensor, as ZeRO-1 cuts it: rounded up, the
    last ones short.
    """
    length = math.ceil(num_elements / parts)
    return slice(min(num_elements, index * length), min(num_elements, (index + 1) * length))

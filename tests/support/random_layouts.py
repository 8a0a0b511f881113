"""Random layouts of tensors over ranks."""

from __future__ import annotations

import math

import numpy as np
import torch

from distckpt import ShardedTensor
from tests.support.layouts import flat_part, irregular_shard, tensor_from, uneven_part

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e4m3fn)


def random_shards(
    random: np.random.Generator, key: str, content: np.ndarray, dtype: torch.dtype, num_ranks: int
) -> list[list[ShardedTensor]]:
    """Return the shards that each rank has of a tensor under a random layout."""
    shape = content.shape[:-1]
    kind = random.choice(["split", "flat", "grid", "replicated", "one", "hybrid"])
    by_rank: list[list[ShardedTensor]] = [[] for _ in range(num_ranks)]
    if kind == "replicated":
        copies = random.permutation(num_ranks)
        for rank in range(num_ranks):
            whole = tuple(slice(0, n) for n in shape)
            by_rank[rank] += [irregular_shard(key, content, dtype, whole, int(copies[rank]))]
    elif kind == "flat":
        flat = tensor_from(content, dtype).flatten()
        for rank in range(num_ranks):
            part = flat_part(flat.numel(), num_ranks, rank)
            by_rank[rank].append(
                ShardedTensor.from_rank_offsets_flat(
                    key, flat[part].clone(), shape, flattened_range=part
                )
            )
    elif kind == "one":
        whole = tuple(slice(0, n) for n in shape)
        by_rank[int(random.integers(num_ranks))] += [irregular_shard(key, content, dtype, whole)]
    else:
        # Along one axis or two, in even or uneven parts, with copies of each.
        num_copies = int(random.integers(1, 3)) if kind == "hybrid" else 1
        num_axes = 2 if kind == "grid" and len(shape) > 1 else 1
        axes = random.permutation(len(shape))[:num_axes]
        counts = [int(random.integers(1, num_ranks + 1)) for _ in axes]
        cells = math.prod(counts)
        for copy in range(num_copies):
            ranks = random.integers(0, num_ranks, cells)
            for cell, rank in enumerate(ranks.tolist()):
                index = np.unravel_index(cell, counts)
                slices = [slice(0, n) for n in shape]
                for axis, part, count in zip(axes.tolist(), index, counts, strict=True):
                    slices[axis] = uneven_part(shape[axis], count, int(part))
                held = irregular_shard(key, content, dtype, tuple(slices), copy)
                by_rank[rank].append(held)
    return by_rank


def elements_of(shards: list[ShardedTensor], shape: tuple[int, ...]) -> np.ndarray:
    """Mark the elements of a tensor that shards hold."""
    mask = np.zeros(shape, np.bool_)
    for shard in shards:
        if shard.flattened_range is not None:
            mask[shard.global_coordinates()] = True
        else:
            mask[shard.global_slice()] = True
    return mask

"""Descriptions of the shards that ranks hold, for some layouts of large jobs, without tensor data.

Columns that ranks have in common are shared between their tables.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from distckpt import ShardedTensor
from distckpt._geometry.region import row_hashes
from distckpt._state.shards import ShardTable, shard_table

TP, PP, EP = 8, 16, 64

Weight: TypeAlias = tuple[str, int | None, tuple[int, ...]]
"""A name, the axis that tensor parallelism divides (None: replicated), and the global shape."""

STATES = [
    ("model.", torch.bfloat16),
    ("optimizer.exp_avg.", torch.float32),
    ("optimizer.exp_avg_sq.", torch.float32),
]


def llama_layer(hidden: int, intermediate: int, key_values: int) -> list[Weight]:
    """Return the weights of one layer of a Llama."""
    return [
        ("self_attn.q_proj.weight", 0, (hidden, hidden)),
        ("self_attn.k_proj.weight", 0, (key_values, hidden)),
        ("self_attn.v_proj.weight", 0, (key_values, hidden)),
        ("self_attn.o_proj.weight", 1, (hidden, hidden)),
        ("mlp.gate_proj.weight", 0, (intermediate, hidden)),
        ("mlp.up_proj.weight", 0, (intermediate, hidden)),
        ("mlp.down_proj.weight", 1, (hidden, intermediate)),
        ("input_layernorm.weight", None, (hidden,)),
        ("post_attention_layernorm.weight", None, (hidden,)),
    ]


LAYER = llama_layer(4096, 14336, 1024)
EMBEDDING: Weight = ("embed_tokens.weight", 0, (128256, 4096))


def llama(num_weights: int) -> list[Weight]:
    """Return some weights of a model like Llama 3 8B, with as many layers as it takes."""
    layers = range(-(-num_weights // len(LAYER)))
    weights = [EMBEDDING, *_numbered(layers, LAYER)]
    return weights[:num_weights]


def llama_405b() -> list[Weight]:
    """Return the weights of Llama 3.1 405B."""
    ends: list[Weight] = [
        ("embed_tokens.weight", 0, (128256, 16384)),
        ("lm_head.weight", 0, (128256, 16384)),
        ("norm.weight", None, (16384,)),
    ]
    return ends + _numbered(range(126), llama_layer(16384, 53248, 1024))


def deepseek_v3(expert_ids: Sequence[int]) -> list[Weight]:
    """Return the weights of DeepSeek-V3, 671B in all, with some of the 256 experts of a layer."""
    hidden, dense, expert = 7168, 18432, 2048
    attention: list[Weight] = [
        ("self_attn.q_a_proj.weight", 0, (1536, hidden)),
        ("self_attn.q_a_layernorm.weight", None, (1536,)),
        ("self_attn.q_b_proj.weight", 0, (24576, 1536)),
        ("self_attn.kv_a_proj.weight", 0, (576, hidden)),
        ("self_attn.kv_a_layernorm.weight", None, (512,)),
        ("self_attn.kv_b_proj.weight", 0, (32768, 512)),
        ("self_attn.o_proj.weight", 1, (hidden, 16384)),
        ("input_layernorm.weight", None, (hidden,)),
        ("post_attention_layernorm.weight", None, (hidden,)),
    ]
    ends: list[Weight] = [
        ("embed_tokens.weight", 0, (129280, hidden)),
        ("lm_head.weight", 0, (129280, hidden)),
        ("norm.weight", None, (hidden,)),
    ]
    gate: list[Weight] = [("mlp.gate.weight", 0, (256, hidden))]
    experts = [
        weight
        for number in expert_ids
        for weight in _feed_forward(f"mlp.experts.{number}.", hidden, expert)
    ]
    mixture = attention + gate + _feed_forward("mlp.shared_experts.", hidden, expert) + experts
    dense_layers = _numbered(range(3), attention + _feed_forward("mlp.", hidden, dense))
    return ends + dense_layers + _numbered(range(3, 61), mixture)


def _feed_forward(prefix: str, hidden: int, inner: int) -> list[Weight]:
    return [
        (f"{prefix}gate_proj.weight", 0, (inner, hidden)),
        (f"{prefix}up_proj.weight", 0, (inner, hidden)),
        (f"{prefix}down_proj.weight", 1, (hidden, inner)),
    ]


def _numbered(layers: range, weights: Sequence[Weight]) -> list[Weight]:
    return [(f"layers.{i}.{name}", axis, shape) for i in layers for name, axis, shape in weights]


# --- Layouts --------------------------------------------------------------------------------------


def fsdp2(num_ranks: int, num_tensors: int) -> Iterator[ShardTable]:
    """Every rank has rows of every tensor; none of some where there are not enough."""
    return _fully_sharded(_whole(llama(-(-num_tensors // 3)), num_tensors), num_ranks)


def fsdp2_405b(num_ranks: int, num_tensors: int) -> Iterator[ShardTable]:
    """The same with Llama 3.1 405B."""
    return _fully_sharded(_whole(llama_405b(), num_tensors), num_ranks)


def _fully_sharded(whole: ShardTable, num_ranks: int) -> Iterator[ShardTable]:
    for rank in range(num_ranks):
        yield _rows_of(whole, rank, num_ranks)


def ddp(num_ranks: int, num_tensors: int) -> Iterator[ShardTable]:
    """Every rank has every tensor."""
    first = _whole(llama(-(-num_tensors // 3)), num_tensors)
    copy = _copy_of(first)
    for rank in range(num_ranks):
        yield first if rank == 0 else copy


def zero1(num_ranks: int, num_tensors: int) -> Iterator[ShardTable]:
    """TP8 x PP16: weights on all data-parallel replicas, of the moments each has rows.

    Norms are on all ranks of a tensor-parallel group; the embedding is on the first and the last
    stage.
    """
    num_replicas = num_ranks // (TP * PP)
    num_weights = -(-num_tensors // len(STATES))

    @functools.cache
    def of_place(tp_rank: int, stage: int) -> ShardTable:
        return _sampled(shard_table(list(_shards_of(tp_rank, stage, num_weights))[:num_tensors]))

    for rank in range(num_ranks):
        replica = rank // TP % num_replicas
        table = of_place(rank % TP, rank // TP // num_replicas)
        is_moment = np.array([key.startswith("optimizer.") for key in table.keys])[table.key_ids]
        parts, counts = np.where(is_moment, [[replica], [num_replicas]], [[0], [1]])
        divided = _rows_of(table, parts, counts)
        is_copy = ~is_moment & (replica > 0)
        yield divided._replace(is_main=table.is_main & ~is_copy)


def _shards_of(tp_rank: int, stage: int, num_weights: int) -> Iterator[ShardedTensor]:
    weights = [
        (f"stage.{stage}.{name}", axis, shape, 0) for name, axis, shape in llama(num_weights)[1:]
    ]
    if stage in (0, PP - 1):
        weights.insert(0, (*EMBEDDING, int(stage > 0)))
    for prefix, dtype in STATES:
        for name, axis, shape, copy in weights:
            local = [n // TP if i == axis else n for i, n in enumerate(shape)]
            offsets = () if axis is None else ((axis, tp_rank, TP),)
            replica_id = (copy, 0 if axis is not None else tp_rank)
            data = torch.empty(local, dtype=dtype, device="meta")
            yield ShardedTensor.from_rank_offsets(
                prefix + name, data, *offsets, replica_id=replica_id
            )


def deepseek(num_ranks: int, num_tensors: int) -> Iterator[ShardTable]:
    """EP64: each rank has rows of the experts of its place, and of all other tensors."""

    @functools.cache
    def of_place(expert_rank: int) -> tuple[ShardTable, Any]:
        per_rank = 256 // EP
        own = range(expert_rank * per_rank, (expert_rank + 1) * per_rank)
        whole = _whole(deepseek_v3(own), num_tensors)
        return whole, np.array([".experts." in key for key in whole.keys])

    for rank in range(num_ranks):
        whole, is_expert = of_place(rank % EP)
        parts = np.where(is_expert, rank // EP, rank)
        yield _rows_of(whole, parts, np.where(is_expert, num_ranks // EP, num_ranks))


def rows_of_columns(num_ranks: int, num_tensors: int) -> Iterator[ShardTable]:
    """The tensors of a public report on planning in torch: (1024, 1), divided by rows."""
    weights: list[Weight] = [(f"tensor_{i}", 0, (1024, 1)) for i in range(num_tensors)]
    shards = [
        ShardedTensor.from_rank_offsets(name, torch.empty(shape, device="meta"))
        for name, _, shape in weights
    ]
    return _fully_sharded(shard_table(shards), num_ranks)


LAYOUTS: dict[str, tuple[Callable[[int, int], Iterator[ShardTable]], int]] = {
    "fsdp2": (fsdp2, 300),
    "zero1": (zero1, 300),
    "deepseek": (deepseek, 1 << 30),
    "405b": (fsdp2_405b, 1 << 30),
    "ddp": (ddp, 300),
}
"""Layouts, and how many tensors each rank has where nothing else is asked for: 2**30 is the whole
model.
"""


def _whole(weights: Sequence[Weight], num_tensors: int) -> ShardTable:
    """Describe whole tensors: weights and two moments of each."""
    shards = [
        ShardedTensor.from_rank_offsets(
            prefix + name, torch.empty(shape, dtype=dtype, device="meta")
        )
        for prefix, dtype in STATES
        for name, _, shape in weights
    ]
    return shard_table(shards[:num_tensors])


def _copy_of(table: ShardTable) -> ShardTable:
    return _sampled(table._replace(is_main=np.zeros_like(table.is_main)))


def _rows_of(whole: ShardTable, parts: Any, counts: Any) -> ShardTable:
    """Take one of `counts` parts of the rows of each tensor, as `torch.chunk` divides them."""
    offsets, shapes = whole.offsets.copy(), whole.shapes.copy()
    step = -(-shapes[:, 0] // counts)
    first = np.minimum(parts * step, shapes[:, 0])
    offsets[:, 0] += first
    shapes[:, 0] = np.minimum(first + step, shapes[:, 0]) - first
    return _sampled(whole._replace(offsets=offsets, shapes=shapes))


def _sampled(table: ShardTable) -> ShardTable:
    """Give each region of a key the hash of made-up contents."""
    names = _hashes_of(tuple(table.keys))[table.key_ids]
    return table._replace(digests=row_hashes([names, *table.offsets.T, *table.shapes.T]))


@functools.lru_cache(256)
def _hashes_of(keys: tuple[str, ...]) -> Any:
    return np.array([zlib.crc32(key.encode()) for key in keys])

"""Factories for fused parameters: SwiGLU gate and up, attention query, key and value.

A layer that computes several projections at once keeps their weights in one parameter. Its rows on
one rank are a part of *each* projection, so they do not lie together in any global tensor, and
which rows they are depends on the number of tensor parallel ranks. The factories here store every
part at its place in one global tensor that does not depend on that number:

    fused = ShardedTensor.from_rank_offsets("mlp.linear_fc1.weight", weight, (0, tp_rank, tp_size))
    state["mlp.linear_fc1.weight"] = swiglu_factory(fused)

The shard handed to a factory describes the fused parameter as if it were one matrix divided among
the ranks in order. It may be a part of any size, and flat. Optimizer states are made by replacing
`key`, `data` and, for a flat part, `flattened_range` of the factory.

Loading writes into the memory of the parameter, and merging gives that very memory back, without a
copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from distckpt._geometry.region import with_item
from distckpt._models.fused import FusedPart, fail, parts_factory
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedTensorFactory

__all__ = [
    "apply_swiglu_sharded_factory",
    "qkv_factory",
    "swiglu_factory",
]


def swiglu_factory(
    shard: ShardedTensor, *, dim: int = 0, separate: bool = False
) -> ShardedTensorFactory:
    """Make the factory of a fused gate and up projection.

        key = "mlp.linear_fc1.weight"
        fused = ShardedTensor.from_rank_offsets(key, weight, (0, tp_rank, tp_size))
        state[key] = swiglu_factory(fused)

    Each rank holds its part of gate, then its part of up. They are stored as Megatron stores them:
    one tensor of the global shape of `shard`, all rows of gate before all rows of up.

    Args:
        shard: the fused parameter or its bias, of local shape `[..., 2 * rows, ...]`.
        dim: axis of the local tensor along which gate and up follow each other.
        separate: store gate and up as two tensors, whose keys end in `_w` and `_v` (Megatron's
            `singleton_local_shards`).

    Raises:
        InvalidShardingError: an odd size or offset along `dim`.
    """
    axis = _global_axis(shard, dim)
    local = shard.local_shape[dim]
    offset = shard.global_offset[axis]
    size = shard.global_shape[axis]
    if local % 2 or offset % 2 or size % 2:
        fail(
            shard.key,
            f"gate and up are halves, but along dim {dim} the shard has {local} of {size} from "
            f"{offset}",
        )
    half = local // 2
    if separate:
        runs = [_Run(0, half, offset // 2, suffix="_w"), _Run(half, half, offset // 2, suffix="_v")]
        return _along(shard, dim, runs, size // 2)
    return _along(
        shard, dim, [_Run(0, half, offset // 2), _Run(half, half, (size + offset) // 2)], size
    )


def apply_swiglu_sharded_factory(
    original_sh_ten: ShardedTensor,
    sharded_offsets: Sequence[tuple[int, int, int]],
    singleton_local_shards: bool = False,
) -> ShardedTensorFactory:
    """Make the factory of a fused gate and up projection.

    It is `swiglu_factory` with the arguments of Megatron's function.

    Args:
        original_sh_ten: the fused parameter, divided along its first axis.
        sharded_offsets: prepended axes of `original_sh_ten`, as (axis, position, size).
        singleton_local_shards: store gate and up as two tensors, `<key>_w` and `<key>_v`.

    Raises:
        InvalidShardingError: odd sizes, or `sharded_offsets` that are not the prepended axes of the
            shard.
    """
    shard = original_sh_ten
    prepended = []
    for axis in range(shard.prepend_axis_num):
        prepended.append((axis, shard.global_offset[axis], shard.global_shape[axis]))
    if sorted(map(tuple, sharded_offsets)) != prepended:
        fail(
            shard.key,
            f"sharded_offsets {tuple(sharded_offsets)} are not its prepended axes "
            f"{tuple(prepended)}",
        )
    return swiglu_factory(shard, separate=singleton_local_shards)


def qkv_factory(
    shard: ShardedTensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    layout: Literal["grouped", "concatenated"],
    kv_copies: int = 1,
    dim: int = 0,
) -> ShardedTensorFactory:
    """Make the factory of a fused query, key and value projection.

        key = "attention.qkv.weight"
        fused = ShardedTensor.from_rank_offsets(key, weight, (0, tp_rank, tp_size))
        state[key] = qkv_factory(fused, num_heads=32, num_kv_heads=8, layout="concatenated")

    Each rank holds some groups: a key head, a value head, and the query heads that use them.
    Whatever the layout in memory, they are stored as Megatron stores them: group after group,
    [query heads, key head, value head]. So models of both layouts can read each other's checkpoints
    and Megatron's.

    Args:
        shard: the fused parameter or its bias, of local shape `[..., heads * head size, ...]`, as
            part of a tensor that holds the parts of all ranks in order.
        num_heads: query heads of the whole model.
        num_kv_heads: key heads (and value heads) of the whole model, which is the number of groups.
        layout: order of the heads of a rank in memory. "grouped" as they are stored; "concatenated"
            for all query heads, then all key heads, then all value heads.
        kv_copies: number of ranks that hold each key and value head, together with different query
            heads: the number of tensor parallel ranks divided by `num_kv_heads` if that is more
            than 1.
        dim: axis of the local tensor along which the heads follow one another.

    Raises:
        InvalidShardingError: numbers of heads that do not divide evenly, or a shard that does not
            consist of whole groups.
    """
    if layout not in ("grouped", "concatenated"):
        fail(shard.key, f"layout must be 'grouped' or 'concatenated', got {layout!r}")
    num_groups = num_kv_heads * kv_copies
    if min(num_heads, num_kv_heads, kv_copies) < 1 or num_heads % num_groups:
        fail(
            shard.key,
            f"{num_heads} query heads cannot be divided among {num_kv_heads} * {kv_copies} groups",
        )
    axis = _global_axis(shard, dim)
    local = shard.local_shape[dim]
    offset = shard.global_offset[axis]
    size = shard.global_shape[axis]
    num_fused = num_heads + 2 * num_groups
    head_size, rest = divmod(size, num_fused)
    if rest:
        fail(
            shard.key,
            f"global size {size} along dim {dim} is not a multiple of {num_fused} ({num_heads} "
            f"query heads, and {num_kv_heads} key and value heads, each held {kv_copies} times)",
        )
    group_size = max(num_fused // num_groups * head_size, 1)
    if local % group_size or offset % group_size:
        fail(
            shard.key,
            f"holds {local} from {offset} along dim {dim}: not complete groups of {group_size}",
        )
    groups = range(offset // group_size, (offset + local) // group_size)
    order = _stored_heads(groups, num_heads // num_groups, kv_copies, layout)
    runs = _join_heads(order, head_size)
    return _along(shard, dim, runs, (num_heads + 2 * num_kv_heads) * head_size)


class _Run(NamedTuple):
    """Indices along one axis.

    There are `size` of them, from `start` in the local tensor and from `stored_start` in the stored
    one.
    """

    start: int
    size: int
    stored_start: int
    suffix: str = ""
    copy: int = 0


def _along(
    shard: ShardedTensor, dim: int, runs: Iterable[_Run], stored_size: int
) -> ShardedTensorFactory:
    """Make the factory of a shard stored as runs along an axis."""
    if shard.allow_shape_mismatch:
        fail(
            shard.key,
            "allow_shape_mismatch makes no sense for a fused tensor, whose parts would move",
        )
    axis = _global_axis(shard, dim)
    no_offset = (0,) * len(shard.local_shape)
    parts = []
    for run in runs:
        part = FusedPart(
            with_item(no_offset, dim, run.start),
            with_item(shard.local_shape, dim, run.size),
            with_item(shard.global_offset, axis, run.stored_start),
            with_item(shard.global_shape, axis, stored_size),
            run.suffix,
            run.copy,
        )
        parts.append(part)
    return parts_factory(
        shard.key,
        shard.data,  # type: ignore[arg-type]  # None: a description without data
        parts,
        local_shape=shard.local_shape,
        prepend_axis_num=shard.prepend_axis_num,
        replica_id=shard.replica_id,
        flattened_range=shard.flattened_range,
    )


def _stored_heads(
    groups: range, num_queries: int, kv_copies: int, layout: Literal["grouped", "concatenated"]
) -> list[tuple[int, int]]:
    """List the heads of a rank as they are in memory.

    Each comes as its position among the stored heads, and the number of the copy.

    `groups` are the numbers of the rank's groups, each of `num_queries` query heads. With copies
    these are not the stored groups but their parts, `kv_copies` of each.
    """
    stored_group = num_queries * kv_copies + 2
    queries = []
    keys = []
    values = []
    for number in groups:
        group, copy = divmod(number, kv_copies)
        first = group * stored_group
        queries.append([(first + copy * num_queries + i, 0) for i in range(num_queries)])
        keys.append([(first + stored_group - 2, copy)])
        values.append([(first + stored_group - 1, copy)])
    if layout == "grouped":
        blocks = list(itertools.chain.from_iterable(zip(queries, keys, values, strict=True)))
    else:
        blocks = [*queries, *keys, *values]
    return list(itertools.chain.from_iterable(blocks))


def _join_heads(heads: Sequence[tuple[int, int]], size: int) -> list[_Run]:
    """Join heads of a size that follow one another in both tensors."""
    runs: list[_Run] = []
    end = None
    for position, (stored, copy) in enumerate(heads):
        if (stored, copy) == end:
            runs[-1] = runs[-1]._replace(size=runs[-1].size + size)
        else:
            runs.append(_Run(position * size, size, stored * size, copy=copy))
        end = stored + 1, copy
    # A rank without heads still names the stored tensor.
    return runs or [_Run(0, 0, 0)]


def _global_axis(shard: ShardedTensor, dim: int) -> int:
    if not 0 <= dim < len(shard.local_shape):
        fail(shard.key, f"there is no dim {dim} in local shape {shard.local_shape}")
    return shard.prepend_axis_num + dim

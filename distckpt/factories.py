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

from distckpt._base.public import set_public_home
from distckpt._models.factories import (
    apply_swiglu_sharded_factory,
    qkv_factory,
    swiglu_factory,
)

__all__ = [
    "apply_swiglu_sharded_factory",
    "qkv_factory",
    "swiglu_factory",
]

set_public_home(globals())

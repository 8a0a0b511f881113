"""Classes that give a state dict's values their place in a checkpoint.

Model authors wrap their tensors, mostly with `ShardedTensor.from_rank_offsets`, and other per-rank
values with `ShardedObject`. A state dict that holds such wrappers is a *sharded state dict*, the
argument of `save` and `load`.

Words used below. The *key* names a global tensor or object. A *shard* is the part of it that one
rank holds. The *grid* is the division of each axis of the global tensor among shards; it is regular
when all shards have one shape. *Prepended axes* are axes that the global tensor has in front of the
shard's own, each of size 1 in it. A *flat* shard holds a run of elements of the row-major flattened
local tensor rather than all of it.
"""

from distckpt._base.public import set_public_home
from distckpt._mapping.base import ReplicaId, ShardedBase
from distckpt._mapping.sharded_tensor import ShardedTensor
from distckpt._mapping.wrappers import (
    CommonStateDict,
    FactoryBuildFn,
    FactoryMergeFn,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    ShardedTensorFactory,
    StateDict,
    apply_factories,
    apply_factory_merges,
    is_main_replica,
)

__all__ = [
    "CommonStateDict",
    "FactoryBuildFn",
    "FactoryMergeFn",
    "LocalNonpersistentObject",
    "ReplicaId",
    "ShardedBase",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "apply_factories",
    "apply_factory_merges",
    "is_main_replica",
]

set_public_home(globals())

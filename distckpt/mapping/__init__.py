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

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distckpt._base.public import first_use

if TYPE_CHECKING:
    from distckpt.mapping._base import ReplicaId, ShardedBase
    from distckpt.mapping._sharded_tensor import ShardedTensor
    from distckpt.mapping._wrappers import (
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

if not TYPE_CHECKING:  # else a type checker believes that the package has every name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Imported when it is needed: other modules of the package need one of these files.
        from distckpt.mapping import _base, _sharded_tensor, _wrappers

        return first_use(name, globals(), _base, _sharded_tensor, _wrappers)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

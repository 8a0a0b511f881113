"""Megatron's tensors for its own format, made from distckpt's shards, too.

They are for programs that write it; distckpt does not use them.
"""

from __future__ import annotations

import functools
from typing import Any

from distckpt.megatron._forwarding import forward, installed, taking_ours

_PATH = "strategies.checkpointable"
_others = forward(_PATH, "LocalShardsContainer")

# All names are those of classes of Megatron.
__all__: list[str] = []


@functools.cache
def __getattr__(name: str) -> Any:
    if name != "CheckpointableShardedTensor":
        return _others(name)

    base = installed(_PATH, name)

    class CheckpointableShardedTensor(base):  # type: ignore[misc, valid-type]
        @classmethod
        def from_sh_ten(cls, sh_ten: Any) -> Any:
            return taking_ours(super().from_sh_ten, f"{name}.from_sh_ten")(sh_ten)

    CheckpointableShardedTensor.__module__ = __name__
    CheckpointableShardedTensor.__qualname__ = name
    return CheckpointableShardedTensor

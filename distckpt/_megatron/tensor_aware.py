"""Megatron's state dicts for local checkpoints, given state dicts in which some objects are
distckpt's.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from distckpt._mapping.sharded_tensor import ShardedTensor
from distckpt._mapping.wrappers import LocalNonpersistentObject, ShardedObject
from distckpt._megatron.dict_utils import dict_list_map_outplace
from distckpt._megatron.forwarding import installed, refuse_own_objects


@functools.cache
def __getattr__(name: str) -> Any:
    if name != "MCoreTensorAwareStateDict":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    base = installed("tensor_aware_state_dict", name)

    class MCoreTensorAwareStateDict(base):  # type: ignore[misc, valid-type]
        # Programs whose imports were replaced wrap in objects of distckpt what they save besides
        # the model.
        @classmethod
        def from_state_dict(cls, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            made, distribution = super().from_state_dict(
                _as_megatron(sharded_state_dict), *args, **kwargs
            )
            made.__class__ = cls
            return made, distribution

        def to_state_dict(self, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return super().to_state_dict(_as_megatron(sharded_state_dict), *args, **kwargs)

    MCoreTensorAwareStateDict.__module__, MCoreTensorAwareStateDict.__qualname__ = __name__, name
    return MCoreTensorAwareStateDict


def _as_megatron(state_dict: Any) -> Any:
    """Return a copy of a state dict with Megatron's objects in the place of distckpt's."""
    theirs = importlib.import_module("megatron.core.dist_checkpointing.mapping")

    def convert(value: Any) -> Any:
        kind = type(value)
        if kind not in (LocalNonpersistentObject, ShardedObject, ShardedTensor) or getattr(
            value, "flattened_range", None
        ):
            return value
        made = object.__new__(getattr(theirs, kind.__name__))
        vars(made).update(vars(value))
        return made

    converted = dict_list_map_outplace(convert, state_dict)
    refuse_own_objects(converted, "MCoreTensorAwareStateDict")
    return converted

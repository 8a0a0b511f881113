"""Megatron's state dicts for checkpoints in memory or on local disks."""

from __future__ import annotations

import functools
from typing import Any

from distckpt.megatron._forwarding import installed, taking_ours

# All names are those of classes of Megatron.
__all__: list[str] = []


@functools.cache
def __getattr__(name: str) -> Any:
    if name != "MCoreTensorAwareStateDict":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    base = installed("tensor_aware_state_dict", name)

    class MCoreTensorAwareStateDict(base):  # type: ignore[misc, valid-type]
        # Programs whose imports were replaced save objects of distckpt, and use its enums and
        # errors.
        @classmethod
        def from_state_dict(cls, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            make = taking_ours(super().from_state_dict, f"{name}.from_state_dict")
            made, distribution = make(sharded_state_dict, *args, **kwargs)
            made.__class__ = cls
            return made, distribution

        def to_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            fill = taking_ours(super().to_state_dict, f"{name}.to_state_dict")
            return fill(*args, **kwargs)

    MCoreTensorAwareStateDict.__module__ = __name__
    MCoreTensorAwareStateDict.__qualname__ = name
    return MCoreTensorAwareStateDict

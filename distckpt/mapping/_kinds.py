"""Counterparts of the sharded classes in Megatron Core: `isinstance` answers for both.

Megatron's classes are recognized by their names and fields: it need not be installed, and any
version of it will do.
"""

from __future__ import annotations

import functools
import sys
from abc import ABCMeta
from typing import Any

_FIELDS = {
    "ShardedTensor": {
        "key",
        "data",
        "dtype",
        "local_shape",
        "global_shape",
        "global_offset",
        "axis_fragmentations",
    },
    "ShardedObject": {"key", "data", "global_shape", "global_offset", "replica_id"},
    "ShardedTensorFactory": {"key", "data", "build_fn", "merge_fn", "replica_id"},
}
"""Class name -> the fields that distinguish it from a namesake."""


@functools.cache
def kind_of(cls: type) -> str | None:
    """Return the name of a class's sharded base class, or None."""
    for base in cls.__mro__:
        fields = _FIELDS.get(base.__name__)
        if fields is not None and fields <= set(getattr(base, "__dataclass_fields__", ())):
            return base.__name__
        if base.__name__ == "LocalNonpersistentObject" and callable(getattr(base, "unwrap", None)):
            return base.__name__
    return None


class ShardedMeta(ABCMeta):
    """Metaclass of the sharded classes, with Megatron's objects as instances.

    They belong to Megatron's class of the same name, so that a program need not know who made an
    object.

    Their classes are no subclasses.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        """Whether an object is of the class, or of its counterpart."""
        return _covers(cls, type(instance))  # type: ignore[arg-type]  # Classes are hashable.


@functools.cache
def _covers(cls: type, other: type) -> bool:
    if issubclass(other, cls):
        return True
    kind = kind_of(other)  # type: ignore[arg-type]
    # Classes that a program derives from ours do not count.
    is_ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
    return is_ours and (kind == cls.__name__ or (cls.__name__ == "ShardedBase" and kind in _FIELDS))


@functools.cache
def _counterpart(cls: type, theirs: Any) -> Any:
    """Return Megatron's class of the same kind, whose objects are instances now."""
    counterpart = getattr(theirs, str(kind_of(cls)), None)
    if isinstance(counterpart, ABCMeta):
        counterpart.register(cls)
    return counterpart


def megatron_counterpart(cls: type) -> Any:
    """Make Megatron's class of the same kind known to a class.

    Either may be imported first.

    Objects of the class become instances of Megatron's where that is an abstract base class.
    Returns Megatron's class; None where Megatron has not been imported.
    """
    theirs = sys.modules.get("megatron.core.dist_checkpointing.mapping")
    # While that is imported it has no class yet.
    is_complete = hasattr(theirs, "ShardedTensorFactory")
    if is_complete:
        return _counterpart(cls, theirs)
    return None

"""Tell what a leaf of a sharded state dict is: an object of distckpt, or its counterpart of
Megatron Core.

Megatron's classes are recognized by their names and fields: it need not be installed, and any
version of it will do.
"""

from __future__ import annotations

import functools
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
"""Class name -> the fields that distinguish the class from others of that name."""


@functools.cache
def kind_of(cls: type) -> str | None:
    """Return the name of the sharded class that a class is, or is derived from; None for all
    others.
    """
    for base in cls.__mro__:
        fields = _FIELDS.get(base.__name__)
        if fields is not None and fields <= set(getattr(base, "__dataclass_fields__", ())):
            return base.__name__
        if base.__name__ == "LocalNonpersistentObject" and callable(getattr(base, "unwrap", None)):
            return base.__name__
    return None


def is_a(value: Any, *classes: type) -> bool:
    """Tell whether a value is an instance of one of the classes, or of Megatron's class of the same
    name.
    """
    if isinstance(value, classes):
        return True
    kind = kind_of(type(value))  # type: ignore[arg-type]  # Classes are hashable.
    if kind is None:
        return False
    names = {cls.__name__ for cls in classes}
    return kind in names or ("ShardedBase" in names and kind in _FIELDS)

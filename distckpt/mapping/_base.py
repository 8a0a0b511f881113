"""The base of the values in a sharded state dict.

`distckpt.mapping` is the public path and defines the words.
"""

from __future__ import annotations

import functools
import math
import sys
from abc import ABCMeta, abstractmethod
from numbers import Integral
from operator import index
from typing import Any, NoReturn, TypeAlias

from distckpt._base.errors import InvalidShardingError
from distckpt._base.lazy import torch

ReplicaId: TypeAlias = int | tuple[int, ...]

INTEGERS = (int, Integral)
"""Classes of integers; `int` is the most frequent and the fastest to find."""

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
"""Class name -> the fields that distinguish it from a namesake.

By these Megatron's classes are recognized: it need not be installed, and any version will do.
"""


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
    if hasattr(theirs, "ShardedTensorFactory"):
        return _counterpart(cls, theirs)
    return None


class OpenReplicaId(tuple[int, ...]):
    """A replica id that leaves the main copy of a shard open.

    A copy with the plain replica id 0 is the main one if there is one. Otherwise it is the copy of
    the lowest rank, among copies whose first number is 0 if there are any.
    """


class BufferReplicaId(OpenReplicaId):
    """An open replica id of a buffer, whose copies may differ.

    Running statistics are an example. Only the main replica is written.
    """


class ShardedBase(metaclass=ShardedMeta):
    """Base of the parts of global tensors and objects.

    Two of them are equal when they are of one class, describe the same thing and hold the very same
    `data` object. Values are not compared, since `==` of two tensors is a tensor and not an answer.
    They are mutable and therefore not hashable.

    Attributes:
        key: name of the global tensor or object. Assignable, for renaming.
        data: the part that this rank holds.
        replica_id: which copy of the part this is, see `is_main_replica`.
    """

    key: str
    data: Any
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Check that the attributes agree with one another, else raise InvalidShardingError."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """Return a copy whose `data` is None."""

    def __post_init__(self) -> None:
        megatron_counterpart(type(self))

    def _check_identity(self) -> None:
        if not isinstance(self.key, str):
            self._fail(f"the key must be a string, got {type(self.key).__name__}")
        numbers = self.replica_id
        if isinstance(self.replica_id, INTEGERS):
            numbers = (self.replica_id,)
        if min(integers(type(self), self.key, "replica_id", numbers), default=0) < 0:
            self._fail(
                f"replica_id {self.replica_id} must not be negative; count copies from 0, the main "
                "one"
            )

    def _fail(self, problem: str) -> NoReturn:
        fail(type(self), self.key, problem)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        ours = dict(vars(self))
        theirs = dict(vars(other))
        return ours.pop("data") is theirs.pop("data") and ours == theirs

    __hash__ = None  # type: ignore[assignment]


def fail(kind: type, key: str, problem: str) -> NoReturn:
    """Raise InvalidShardingError about a part of kind `kind`."""
    raise InvalidShardingError(f"{kind.__name__} {key!r}: {problem}")


def flat_bounds(flattened_range: slice, local_shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the bounds of a flat shard inside its flattened local tensor.

    They are the first element, and the last + 1.
    """
    start, stop, _ = flattened_range.indices(math.prod(local_shape))
    return start, max(start, stop)


def integers(kind: type, key: str, attribute: str, values: Any) -> tuple[int, ...]:
    """Return `values` as Python integers.

    Otherwise raise InvalidShardingError, naming the attribute.
    """
    try:
        return tuple(map(index, values))
    except TypeError:
        fail(kind, key, f"{attribute} must be a sequence of integers, got {values!r}")


def unsuitable(data: Any) -> str:
    """Return the problem with a tensor's elements, and the way out.

    "" for ordinary tensors.
    """
    is_plain = type(data) in (torch.Tensor, torch.nn.Parameter) and data.layout is torch.strided
    if is_plain and data.data_ptr() and not (data.is_nested or data.is_quantized):
        return ""
    return _unsuitable(data)


def _unsuitable(data: Any) -> str:
    kind = type(data)
    if torch.nn.parameter.is_lazy(data):
        return (
            "has no shape before the first call of its module: call it once before describing the "
            "module"
        )
    if data.is_nested:
        return (
            "is a nested tensor: describe its values() and offsets(), each under a key of its own"
        )
    if hasattr(kind, "local_shards"):
        return (
            f"holds a {kind.__module__}.{kind.__name__}, as FSDP1 makes them: use fully_shard, or "
            "distckpt.dcp"
        )
    if hasattr(kind, "device_mesh"):
        return (
            f"holds a {kind.__name__}: give its local part (to_local()) with the offsets of that "
            "part"
        )
    if data.layout is not torch.strided or data.is_quantized:
        return (
            f"has layout {data.layout} and dtype {data.dtype}, and only dense tensors can be saved "
            "and loaded: take its to_dense() or dequantize(), or describe its parts (indices() "
            "and values()), each under its own key"
        )
    if data.is_meta:
        return (
            "has no data (it is on the meta device): call module.to_empty(device=...) before "
            "describing the module, or give load the module itself, and materialize='cpu' or "
            "another device"
        )
    if data.numel() and not data.data_ptr():
        return (
            f"has no memory of its own ({kind.__name__}): a tensor that was freed, as FSDP1 frees "
            "parameters (use torch.distributed.fsdp.fully_shard), or one that is made of others: "
            "describe those"
        )
    return ""

"""The sharded classes other than `ShardedTensor`, and functions that take them.

`distckpt.mapping` is the public path and defines the words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeAlias, cast

from distckpt._base.errors import InvalidShardingError, class_of_both
from distckpt._base.lazy import torch
from distckpt._base.tree import Position, children_of, dotted, nested_items_iter
from distckpt.mapping._base import (
    INTEGERS,
    ReplicaId,
    ShardedBase,
    ShardedMeta,
    fail,
    integers,
    megatron_counterpart,
)

StateDict: TypeAlias = dict[str, Any]
CommonStateDict: TypeAlias = dict[str, Any]
ShardedStateDict: TypeAlias = dict[str, Any]


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Whether a copy of a shard is the one that counts.

    Among the ranks that hold the same shard exactly one must have the main replica. The application
    numbers them, usually by data parallel rank: with a number, or a tuple of numbers for several
    kinds of replication. The main one has 0, or a tuple of zeros, which may be empty.
    """
    if isinstance(replica_id, tuple):
        return not any(replica_id)
    if isinstance(replica_id, INTEGERS):
        return bool(replica_id == 0)
    return all(r == 0 for r in cast(Iterable[int], replica_id))


class LocalNonpersistentObject(metaclass=ShardedMeta):
    """A value of this rank that is not saved; `load` returns it as it is."""

    def __new__(cls, obj: Any) -> LocalNonpersistentObject:
        """Make an object that is also Megatron's, without an abstract class there."""
        theirs = megatron_counterpart(cls)
        kind: Any = cls
        if theirs is not None and not issubclass(cls, theirs):
            kind = class_of_both(cls, theirs)
        made: LocalNonpersistentObject = super().__new__(kind)
        return made

    def __init__(self, obj: Any) -> None:
        """Wrap a value."""
        self.obj = obj

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.obj,)

    def unwrap(self) -> Any:
        """Return the wrapped value."""
        return self.obj


@dataclass(eq=False)
class ShardedObject(ShardedBase):
    """A local object, and its place in a global array of objects.

    Each rank's object is stored as it is. In contrast to tensors the array cannot be divided
    differently when loading.

    Attributes:
        key: name of the global object.
        data: the local object. None in descriptions without data.
        global_shape: shape of the global array of objects.
        global_offset: index of the local object in it.
        replica_id: which copy of this object this is, see `is_main_replica`. The main replica is
            stored; copies are compared with it only by `save(validate_replicas=True)`.
    """

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.global_shape = integers(type(self), self.key, "global_shape", self.global_shape)
        self.global_offset = integers(type(self), self.key, "global_offset", self.global_offset)
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Check that the offset is an index into the global shape.

        Raises:
            InvalidShardingError: it is not. A size of -1 means unknown, see
                `empty_from_unique_key`.
        """
        self._check_identity()
        shape = self.global_shape
        offset = self.global_offset
        if len(shape) != len(offset):
            self._fail(
                f"global_shape {shape} and global_offset {offset} must have the same number of axes"
            )
        if any(
            off < 0 or size < -1 or off >= size != -1
            for off, size in zip(offset, shape, strict=True)
        ):
            self._fail(
                f"global_offset {offset} does not lie within global_shape {shape}; it counts "
                "objects from 0"
            )

    def without_data(self) -> ShardedObject:
        """Return a copy whose `data` is None."""
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """The key with the place in the global array.

        It is `<key>/shard_<offset>_<shape>`, with numbers joined by dots.
        """
        return f"{self.key}/shard_{dotted(self.global_offset)}_{dotted(self.global_shape)}"

    def __str__(self) -> str:
        return f"{type(self).__name__}(key='{self.key}')"

    @classmethod
    def empty_from_unique_key(
        cls,
        unique_key: str,
        replica_id: ReplicaId = 0,
    ) -> ShardedObject:
        """Make the description of an object, without data, from its `unique_key`.

        The last size of the shape may be missing, as it is in old checkpoints; it becomes -1,
        unknown.

        Raises:
            InvalidShardingError: not a unique key.
        """
        key, slash, place = unique_key.rpartition("/")
        try:
            tag, offset_text, shape_text = place.split("_")
            offset = _numbers(offset_text)
            shape = _numbers(shape_text)
        except ValueError:
            tag = ""
            offset = ()
            shape = ()
        if not slash or tag != "shard":
            fail(cls, unique_key, "a unique key has the form <key>/shard_<offset>_<shape>")
        if len(shape) + 1 == len(offset):
            shape += (-1,)
        return cls(key, None, shape, offset, replica_id)


FactoryBuildFn: TypeAlias = Callable[
    [str, "torch.Tensor", ReplicaId, slice | None], ShardedStateDict
]
FactoryMergeFn: TypeAlias = Callable[[StateDict], "torch.Tensor"]


def _numbers(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    return tuple(map(int, text.split(".")))


@dataclass(eq=False)
class ShardedTensorFactory(ShardedBase):
    """A tensor that is stored in another form than the model's.

    It has a function for each direction.

    An example is one fused parameter that is stored as two shards. The way depends only on the
    arguments of `build_fn`, so that the optimizer can apply it to its own states by replacing `key`
    and `data`.

    Attributes:
        key: name given to `build_fn`.
        data: the parameter as the model holds it. None once only merging is left to do.
        build_fn: called as `build_fn(key, data, replica_id, flattened_range)`; gives a
            `ShardedTensor`, or nested dicts and lists of them.
        merge_fn: called with the result of `build_fn`, each shard replaced by its loaded tensor;
            gives the parameter.
        replica_id: which copy this is, see `is_main_replica`.
        flattened_range: which elements of the flattened parameter `data` holds, None for all.
    """

    key: str
    data: torch.Tensor | None
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> ShardedStateDict:
        """Return the shards in the form in which they are stored."""
        return self.build_fn(
            self.key, cast("torch.Tensor", self.data), self.replica_id, self.flattened_range
        )

    def validate_metadata_integrity(self) -> None:
        """Check nothing: only the shards that `build` gives can be checked."""

    def without_data(self) -> ShardedTensorFactory:
        """Return a copy whose `data` is None."""
        return replace(self, data=None)


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace each factory in nested containers by its shards, in place."""
    for container, key, value in nested_items_iter(sharded_state_dict):
        if isinstance(value, ShardedTensorFactory):
            container[key] = value.build()


def apply_factory_merges(x1: Any, x2: Any, key: Position = ()) -> Any:
    """Turn the loaded shards of factories into the model's form, in place.

    Args:
        x1: loaded state dict.
        x2: the factories, in nested dicts and lists that hold nothing else. They lie at the same
            positions as in `x1`; a dict with integer keys matches a list, too.
        key: position of both in a larger state dict, for error messages.

    Returns:
        `x1`, or the merged tensor when `x2` is a factory itself.

    Raises:
        InvalidShardingError: `x1` has no counterpart of a factory; the message gives the position.
    """
    if isinstance(x2, ShardedTensorFactory):
        return x2.merge_fn(x1)
    _check_containers(x1, x2, key)
    for part, factories in children_of(x2):
        _check_is_loaded(x1, part, key)
        x1[part] = apply_factory_merges(x1[part], factories, (*key, part))
    return x1


def _check_containers(loaded: Any, factories: Any, position: Position) -> None:
    is_list = isinstance(factories, list)
    if not isinstance(factories, dict | list) or not isinstance(
        loaded, list if is_list else (dict, list)
    ):
        _fail_merge(
            position,
            f"loaded a {type(loaded).__name__}, which does not match the "
            f"{type(factories).__name__} with factories",
        )
    if is_list and len(loaded) != len(factories):
        _fail_merge(
            position,
            f"the lists have different lengths, {len(loaded)} loaded and {len(factories)} with "
            "factories",
        )


def _check_is_loaded(loaded: Any, key: Any, position: Position) -> None:
    if isinstance(loaded, dict) and key not in loaded:
        _fail_merge(
            position, f"{key!r} was not loaded, but a factory needs it; loaded were {list(loaded)}"
        )
    is_index = isinstance(key, int) and 0 <= key < len(loaded)
    if isinstance(loaded, list) and not is_index:
        _fail_merge(position, f"{key!r} is not an index of a loaded list of length {len(loaded)}")


def _fail_merge(position: Position, problem: str) -> NoReturn:
    raise InvalidShardingError(f"cannot merge factories at position {position}: {problem}")

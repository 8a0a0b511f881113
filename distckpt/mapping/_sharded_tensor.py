"""The shard of a global tensor. `distckpt.mapping` is the public path and defines the words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import is_lazy

from distckpt._base.errors import InvalidShardingError
from distckpt._geometry.region import with_item
from distckpt.mapping._base import (
    INTEGERS,
    ReplicaId,
    ShardedBase,
    fail,
    flat_bounds,
    integers,
    unsuitable,
)


@dataclass(eq=False)
class ShardedTensor(ShardedBase):
    """A local tensor, and its place in a global tensor.

    Attributes:
        key: name of the global tensor.
        data: the local tensor, of shape `local_shape`; a 1-D tensor when `flattened_range` is set.
            None in descriptions without data, and before `init_data`.
        dtype: element type of `data`.
        local_shape: shape of the local tensor, without prepended axes. For a flat shard, the shape
            before flattening.
        global_shape: shape of the global tensor, prepended axes included.
        global_offset: index in the global tensor of the first element of the local tensor, per
            axis, counted in elements, prepended axes included.
        axis_fragmentations: number of shards along each axis of the global tensor; None when the
            grid is not regular.
        replica_id: which copy of this shard this is, see `is_main_replica`.
        prepend_axis_num: number of prepended axes.
        allow_shape_mismatch: when loading, accept a stored tensor of another global shape (a padded
            one, say).
        flattened_range: the elements that a flat shard holds: `data` is
            `full_local_tensor.flatten()[flattened_range]`. Python's rules apply to an omitted start
            or stop and to a stop past the end. None when the shard holds the whole local tensor.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.local_shape = integers(type(self), self.key, "local_shape", self.local_shape)
        self.global_shape = integers(type(self), self.key, "global_shape", self.global_shape)
        self.global_offset = integers(type(self), self.key, "global_offset", self.global_offset)
        if self.axis_fragmentations is not None:
            self.axis_fragmentations = integers(
                type(self), self.key, "axis_fragmentations", self.axis_fragmentations
            )
        self.validate_metadata_integrity()

    @property
    def has_regular_grid(self) -> bool:
        """True if all shards of the global tensor have one shape."""
        return self.axis_fragmentations is not None

    def validate_metadata_integrity(self) -> None:
        """Check that the attributes and `data` agree, else raise InvalidShardingError.

        The class checks itself when it is made; call this after assigning to attributes.
        """
        self._check_identity()
        self._check_grid()
        if self.flattened_range is not None:
            self._check_flattened_range(self.flattened_range)
        if self.data is not None:
            self._check_data(self.data)

    def _check_grid(self) -> None:
        self._check_numbers_of_axes()
        fragmentations = self.axis_fragmentations
        if min((*self.local_shape, *self.global_shape, *self.global_offset), default=0) < 0:
            self._fail("sizes and offsets must not be negative")
        if min(fragmentations or (), default=1) < 1:
            self._fail("axis_fragmentations must be at least 1")
        sizes = (1,) * self.prepend_axis_num + self.local_shape
        grid = zip(self.global_shape, sizes, self.global_offset, strict=True)
        for axis, (global_size, size, offset) in enumerate(grid):
            if offset + size > global_size and not self.allow_shape_mismatch:
                self._fail(
                    f"reaches past the end of global axis {axis}; correct the offset or "
                    "global_shape"
                )
            if fragmentations is not None and size and offset % size:
                self._fail(
                    f"global_offset on axis {axis} must be a multiple of the local size {size} on "
                    "a regular grid; pass axis_fragmentations=None for shards of different sizes"
                )

    def _check_numbers_of_axes(self) -> None:
        prepended = self.prepend_axis_num
        fragmentations = self.axis_fragmentations
        if not isinstance(prepended, INTEGERS) or prepended < 0:
            self._fail("prepend_axis_num must be an integer of at least 0")
        if len(self.global_shape) != len(self.global_offset):
            self._fail("global_shape and global_offset must have the same number of axes")
        if len(self.local_shape) + prepended != len(self.global_shape):
            self._fail("local_shape and the prepended axes must add up to the axes of global_shape")
        if fragmentations is not None and len(fragmentations) != len(self.global_shape):
            self._fail("axis_fragmentations must have one entry per axis of global_shape")

    def _check_flattened_range(self, flattened_range: slice) -> None:
        if not isinstance(flattened_range, slice) or flattened_range.step is not None:
            self._fail("flattened_range must be a slice without a step")
        for bound in (flattened_range.start, flattened_range.stop):
            if bound is not None and (not isinstance(bound, INTEGERS) or bound < 0):
                self._fail("flattened_range must have bounds of at least 0, or None")

    def _check_data(self, data: torch.Tensor) -> None:
        if not isinstance(data, torch.Tensor):
            self._fail(
                f"data must be a torch.Tensor, got {type(data).__name__}; use ShardedObject for "
                "other values"
            )
        if data.dtype != self.dtype:
            self._fail(f"data has dtype {data.dtype}, but the attribute dtype is {self.dtype}")
        if self.flattened_range is None:
            if tuple(data.shape) != self.local_shape:
                self._fail(f"data has shape {tuple(data.shape)}, which must be local_shape")
            return
        if data.ndim != 1:
            self._fail(
                f"data has shape {tuple(data.shape)}, but must be 1-D where flattened_range is set"
            )
        start, stop = self._flat_bounds()
        if data.numel() != stop - start:
            self._fail(
                f"data has {data.numel()} elements, but flattened_range selects {stop - start}"
            )

    def _flat_bounds(self) -> tuple[int, int]:
        """Return the bounds of the held elements in the flattened local tensor."""
        if self.flattened_range is None:
            self._fail(
                "flattened_range is not set; use global_slice() for a shard that is not flat"
            )
        return flat_bounds(self.flattened_range, self.local_shape)

    def _fail(self, problem: str) -> NoReturn:
        flat = ""
        if self.flattened_range is not None:
            flat = f", flattened_range {self.flattened_range}"
        super()._fail(
            f"{problem} (local_shape {self.local_shape}, prepend_axis_num {self.prepend_axis_num}, "
            f"global_shape {self.global_shape}, global_offset {self.global_offset}, "
            f"axis_fragmentations {self.axis_fragmentations}{flat})"
        )

    def global_slice(self) -> tuple[int | slice, ...]:
        """Return the index of the local tensor in the global tensor.

        It has an int for a prepended axis, a slice for another.

        `global_tensor[shard.global_slice()]` has the shape `local_shape`. A flattened_range is not
        taken into account, see `global_coordinates`.
        """
        prepended, offsets = self._split_axes(self.global_offset)
        return (
            *prepended,
            *(slice(off, off + size) for off, size in zip(offsets, self.local_shape, strict=True)),
        )

    def local_coordinates(self) -> tuple[npt.NDArray[np.intp], ...]:
        """Return the local coordinates of the elements of a flat shard.

        One index array per axis of `local_shape`, each with one entry per element, in order.
        InvalidShardingError if the shard is not flat.
        """
        start, stop = self._flat_bounds()
        if not self.local_shape:
            return ()
        return tuple(np.unravel_index(np.arange(start, stop), self.local_shape))

    def global_coordinates(self) -> tuple[npt.NDArray[np.intp] | int, ...]:
        """Return the global coordinates of the elements of a flat shard.

        One entry per global axis: an int for a prepended axis, an index array for another, so that
        `global_tensor[shard.global_coordinates()]` are the elements in order.
        InvalidShardingError if the shard is not flat.
        """
        prepended, offsets = self._split_axes(self.global_offset)
        local = self.local_coordinates()
        return (*prepended, *(coords + off for coords, off in zip(local, offsets, strict=True)))

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Return the index in the grid of shards, per global axis.

        It is 0 on an axis along which the local tensor is empty.

        Raises:
            InvalidShardingError: the offset is not a multiple of the local size on some axis.
        """
        prepended, offsets = self._split_axes(self.global_offset)
        if any(size and off % size for off, size in zip(offsets, self.local_shape, strict=True)):
            self._fail("not on a regular grid: global_offset is not a multiple of local_shape")
        index = list(prepended)
        for off, size in zip(offsets, self.local_shape, strict=True):
            index.append(off // size if size else 0)
        return tuple(index)

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Return the shape of one cell of the grid, prepended axes included.

        Raises:
            InvalidShardingError: the grid is not regular, or an axis does not divide evenly (which
                is accepted, rounding down, with `allow_shape_mismatch`).
        """
        if self.axis_fragmentations is None:
            self._fail("a grid that is not regular has no single cell shape")
        sizes = list(zip(self.global_shape, self.axis_fragmentations, strict=True))
        if not self.allow_shape_mismatch and any(size % parts for size, parts in sizes):
            self._fail("global_shape does not divide evenly by axis_fragmentations")
        return tuple(size // parts for size, parts in sizes)

    def _split_axes(self, values: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return values[: self.prepend_axis_num], values[self.prepend_axis_num :]

    def without_data(self) -> ShardedTensor:
        """Return a copy whose `data` is None."""
        return replace(self, data=None)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """Make a shard of a global tensor that is divided evenly.

        A matrix split by rows over 4 ranks, as seen by rank 1:

            ShardedTensor.from_rank_offsets("decoder.weight", weight, (0, 1, 4))

        Args:
            key: name of the global tensor.
            data: the local tensor.
            rank_offsets: for each divided axis `(axis, position, number of parts)`. Axes are
                counted in the global tensor, prepended axes included. Axes that are not mentioned
                are not divided.
            replica_id: which copy of this shard this is, see `is_main_replica`.
            prepend_axis_num: number of axes that the global tensor has in front of the axes of
                `data`.
            flattened_range: must be None, see `from_rank_offsets_flat`.
            init_kwargs: further attributes of the class.

        Raises:
            InvalidShardingError: an axis that is out of range or mentioned twice, a position
                outside the parts, or attributes that do not agree with `data`.
        """
        if flattened_range is not None:
            fail(cls, key, "from_rank_offsets takes no flattened_range; use from_rank_offsets_flat")
        _check_tensor(cls, key, data)
        local_shape = tuple(data.shape)
        grid = grid_from_ranks(key, local_shape, rank_offsets, prepend_axis_num)
        return cls(
            key, data, data.dtype, local_shape, *grid, replica_id, prepend_axis_num, **init_kwargs
        )

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: torch.Tensor,
        non_flat_local_shape: Sequence[int],
        *rank_offsets: tuple[int, int, int],
        flattened_range: slice | None = None,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """Make a flat shard: a run of elements of a local tensor.

        The grid is as for `from_rank_offsets`.

        Args:
            key: name of the global tensor.
            data: 1-D tensor of the elements held, `local_tensor.flatten()[flattened_range]`.
            non_flat_local_shape: shape of the local tensor before flattening.
            rank_offsets: see `from_rank_offsets`, like all other arguments.
            flattened_range: which elements of the flattened local tensor `data` holds. Required.

        Raises:
            InvalidShardingError: as for `from_rank_offsets`, and when `flattened_range` is missing,
                has a step, or holds another number of elements than the 1-D `data`.
        """
        if not isinstance(flattened_range, slice):
            fail(
                cls,
                key,
                "from_rank_offsets_flat needs a flattened_range; use from_rank_offsets without one",
            )
        _check_tensor(cls, key, data)
        local_shape = integers(cls, key, "non_flat_local_shape", non_flat_local_shape)
        grid = grid_from_ranks(key, local_shape, rank_offsets, prepend_axis_num)
        init_kwargs["flattened_range"] = flattened_range
        return cls(
            key, data, data.dtype, local_shape, *grid, replica_id, prepend_axis_num, **init_kwargs
        )

    def init_data(
        self, device: str | torch.device, init_fn: Callable[..., torch.Tensor] = torch.empty
    ) -> None:
        """Allocate `data` by `init_fn(shape, dtype=..., device=...)`, unless it is set.

        The shape is `local_shape`, or for a flat shard the number of elements held.
        """
        if self.data is not None:
            return
        shape = self.local_shape
        if self.flattened_range is not None:
            start, stop = self._flat_bounds()
            shape = (stop - start,)
        self.data = init_fn(shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Keep a part of one axis of the local tensor, like `torch.narrow`.

        Every rank is taken to keep the same part of its own local tensor, so that the global tensor
        shrinks in proportion. The data are views. `dim` does not count prepended axes.

        Returns:
            One shard. For a flat shard as many as it takes for the kept elements to be runs of
            `data`, without empty ones: at most one for the first axis, none when nothing is kept.

        Raises:
            InvalidShardingError: no such part, or the shards are not on a regular grid along this
                axis.
        """
        if not -len(self.local_shape) <= dim < len(self.local_shape):
            self._fail(f"narrow: local_shape has no axis {dim}")
        dim %= len(self.local_shape)
        size = self.local_shape[dim]
        axis = dim + self.prepend_axis_num
        if start < 0 or length < 0 or start + length > size:
            self._fail(
                f"narrow: start {start} and length {length} do not lie within axis {dim} of "
                "local_shape"
            )
        global_size = self.global_shape[axis]
        global_offset = self.global_offset[axis]
        if (global_size % size or global_offset % size) if size else global_size:
            self._fail(
                f"narrow: needs shards of one size along axis {dim}, but not all have size {size} "
                "there"
            )
        scaled = replace(
            self.without_data(),
            local_shape=with_item(self.local_shape, dim, length),
            global_shape=with_item(self.global_shape, axis, global_size // max(size, 1) * length),
            global_offset=with_item(
                self.global_offset, axis, global_offset // max(size, 1) * length
            ),
        )
        if self.flattened_range is not None:
            return self._narrow_runs(scaled, dim, start)
        return [
            replace(
                scaled, data=None if self.data is None else self.data.narrow(dim, start, length)
            )
        ]

    def _narrow_runs(
        self,
        scaled: ShardedTensor,
        dim: int,
        start: int,
    ) -> list[ShardedTensor]:
        # Flattened, the local tensor is a sequence of rows, one per index of the axes before `dim`;
        # narrowing keeps one run of each, and the kept runs in sequence are the flattened narrowed
        # tensor.
        inner = math.prod(self.local_shape[dim + 1 :])
        row = self.local_shape[dim] * inner
        kept_row = scaled.local_shape[dim] * inner
        first, end = self._flat_bounds()
        shards = []
        for i in range(first // max(row, 1), -(-end // max(row, 1))):
            kept_first = i * row + start * inner
            lo = max(first, kept_first)
            hi = min(end, kept_first + kept_row)
            if lo < hi:
                data = None
                if self.data is not None:
                    data = self.data[lo - first : hi - first]
                moved = i * kept_row - kept_first
                shards.append(
                    replace(scaled, data=data, flattened_range=slice(lo + moved, hi + moved))
                )
        return shards


def _check_tensor(cls: type, key: str, data: object) -> None:
    if not isinstance(key, str):
        raise InvalidShardingError(
            f"The key comes first, then the tensor: got a {type(key).__name__} for the key."
        )
    if not isinstance(data, torch.Tensor):
        fail(cls, key, f"data must be a torch.Tensor, got {type(data).__name__}")
    if data.is_nested or is_lazy(data):
        # All other tensors have a shape, and are refused when they are saved or loaded.
        fail(cls, key, unsuitable(data))


def grid_from_ranks(
    key: str,
    local_shape: tuple[int, ...],
    rank_offsets: Iterable[Sequence[int]],
    prepend_axis_num: int,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return shape, offset and fragmentations of a shard on a regular grid.

    Shape and offset are global.
    """
    full_shape = (1,) * prepend_axis_num + local_shape
    shape = list(full_shape)
    offset = [0] * len(full_shape)
    fragmentations = [1] * len(full_shape)
    seen = set()
    for entry in rank_offsets:
        triple = integers(ShardedTensor, key, "each of rank_offsets", entry)
        if len(triple) != 3:
            fail(
                ShardedTensor,
                key,
                f"rank_offsets {triple} must be (axis, position, number of parts)",
            )
        axis, position, parts = triple
        if not 0 <= axis < len(full_shape):
            axes = f"{prepend_axis_num} prepended axes and local shape {local_shape}"
            fail(ShardedTensor, key, f"rank_offsets {triple}: there is no axis {axis} among {axes}")
        if axis in seen:
            fail(
                ShardedTensor,
                key,
                f"rank_offsets {triple}: axis {axis} is mentioned twice; combine both divisions",
            )
        if not 0 <= position < parts:
            fail(
                ShardedTensor,
                key,
                f"rank_offsets {triple}: there is no part {position} among {parts}",
            )
        seen.add(axis)
        shape[axis] = parts * full_shape[axis]
        offset[axis] = position * full_shape[axis]
        fragmentations[axis] = parts
    return tuple(shape), tuple(offset), tuple(fragmentations)

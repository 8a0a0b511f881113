"""The place of this rank's part of a DTensor, or of a plain tensor that says so, in the global
tensor.

DTensors are recognized by their attributes, not by their class: importing
`torch.distributed.tensor` takes half a second, which only programs that have DTensors spend.

Words used below: the *mesh* is the array of ranks that a DTensor is spread over; a *placement*
says, for each mesh axis, whether the tensor is divided along it (and which tensor axis) or copied.
A *run* is a range of indices along one axis of the global tensor; one rank may hold several, one
after another in its local tensor.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from distckpt._base.errors import InvalidShardingError
from distckpt._mapping.base import OpenReplicaId, ReplicaId
from distckpt._mapping.sharded_tensor import ShardedTensor, grid_from_ranks
from distckpt._mapping.wrappers import ShardedTensorFactory
from distckpt._models.fused import FusedPart, parts_factory

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges `(start, stop)` of one axis, not empty, in the order of the local tensor."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types of most tensors, asked about first."""
_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""Attributes of torch's `CheckpointableTensor`, new in torch 2.14."""
_Split: TypeAlias = tuple[int, int, int, int]
"""Mesh axis, tensor axis, split factor (1 unless strided), number of parts."""


def is_dtensor(value: Any) -> bool:
    """Tell whether a value is a DTensor."""
    # Asked of the class: looking for a missing attribute of a tensor costs more.
    kind = type(value)
    return kind not in _PLAIN and hasattr(kind, "device_mesh") and hasattr(kind, "placements")


def has_parts(value: Any) -> bool:
    """Tell whether a tensor has the attributes of torch's `CheckpointableTensor`."""
    if type(value) in _PLAIN:
        return "global_offsets" in vars(value) and vars(value).keys() >= {*_ATTRIBUTES}
    if not isinstance(value, torch.Tensor) or is_dtensor(value):
        return False
    return all(hasattr(value, name) for name in _ATTRIBUTES)


def local_part(tensor: Any) -> Any:
    """Return the part of a DTensor that this rank holds, and other values as they are."""
    if not is_dtensor(tensor):
        return tensor
    # Not to_local(), which may give a new object: the part is found by its id().
    return tensor._local_tensor


@functools.lru_cache(maxsize=16)
def _lowest_rank(mesh: Any) -> int:
    # A mesh makes this array each time it is asked for it.
    return int(mesh.mesh.min())


@functools.lru_cache(maxsize=16)
def _place_in_groups(mesh: Any, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """Return which part this rank, at a coordinate of a mesh, has along each of its axes.

    Collective operations of torch, and so FSDP2, count ranks in the order of their process group,
    which is that of their numbers, and need not be that of the mesh.
    """
    place = []
    for axis, position in enumerate(coordinate):
        others = (*coordinate[:axis], slice(None), *coordinate[axis + 1 :])
        ranks = mesh.mesh[others].tolist()
        place.append(position if ranks == sorted(ranks) else mesh.get_local_rank(axis))
    return tuple(place)


def is_in_mesh(dtensor: Any) -> bool:
    """Tell whether this rank is in the mesh of a DTensor; ranks outside of it hold nothing."""
    return dtensor.device_mesh.get_coordinate() is not None


def _find_part(
    key: str, dtensor: Any
) -> tuple[tuple[Runs, ...], tuple[int, ...] | None, tuple[int, ...]]:
    """Find the part of a DTensor that this rank holds, which must be in the mesh.

    Returns its runs per axis; the number of parts along each axis if all are of one size, else
    None; and this rank's place among copies: its mesh coordinates, 0 where the mesh divides the
    tensor.

    Raises:
        InvalidShardingError: the tensor is not divided into parts and copies (a sum that is yet to
            be made, say), or its local part has another shape than mesh and placements give it.
    """
    mesh, local_shape = dtensor.device_mesh, tuple(dtensor._local_tensor.shape)
    coordinate = _place_in_groups(mesh, tuple(mesh.get_coordinate()))
    mesh_shape = tuple(mesh.shape)
    shape, placements = tuple(dtensor.shape), dtensor.placements
    splits = tuple(_splits(key, placements, mesh_shape))
    for runs, fragmentations in _possible_runs(shape, splits, coordinate):
        sizes = tuple(sum(stop - start for start, stop in axis) for axis in runs)
        # FSDP2 empties other axes of an empty part, too.
        if sizes == local_shape or (0 in sizes and 0 in local_shape):
            divided = {mesh_axis for mesh_axis, *_ in splits}
            replica = tuple(
                0 if i in divided else position for i, position in enumerate(coordinate)
            )
            return runs, fragmentations, replica
    raise InvalidShardingError(
        f"DTensor {key!r} of shape {shape} has the placements {tuple(placements)} on a mesh of "
        f"{mesh_shape}; at {coordinate} of it that does not give a local part of {local_shape}. "
        "Make it with distribute_tensor or from_local(..., shape=, stride=), or wrap its local "
        "part in a ShardedTensor yourself."
    )


def _splits(key: str, placements: Sequence[Any], mesh_shape: tuple[int, ...]) -> list[_Split]:
    splits: list[_Split] = []
    for mesh_axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        axis = getattr(placement, "dim", None)
        if placement.is_partial() or not isinstance(axis, int):
            raise InvalidShardingError(
                f"DTensor {key!r} is {placement} on mesh axis {mesh_axis}, which is neither a part "
                "nor a copy of it: redistribute it to Shard or Replicate placements first."
            )
        splits.append(
            (mesh_axis, axis, int(getattr(placement, "split_factor", 1)), mesh_shape[mesh_axis])
        )
    return splits


@functools.lru_cache(maxsize=4096)
def _possible_runs(
    shape: tuple[int, ...], splits: tuple[_Split, ...], coordinate: tuple[int, ...]
) -> list[tuple[tuple[Runs, ...], tuple[int, ...] | None]]:
    """Return the runs and fragmentations that placements can mean, the likeliest first.

    Where FSDP divides what tensor parallelism has divided along the same axis, it names a strided
    placement, which should give the same parts when the mesh is gone through from left to right.
    That holds only while all parts are of one size. With others, the rank holds what the divisions
    give in the order in which they were made.
    """
    as_made = _order_of_making(splits)
    orders = [splits] if as_made is None or as_made == splits else [as_made, splits]
    possible: list[tuple[tuple[Runs, ...], tuple[int, ...] | None]] = []
    for order in orders:
        runs: list[Runs] = [((0, size),) if size else () for size in shape]
        for mesh_axis, axis, split_factor, parts in order:
            factor = 1 if order is as_made else split_factor
            runs[axis] = _part(runs[axis], factor, parts, coordinate[mesh_axis])
        possible.append((tuple(runs), _fragmentations(shape, order, runs)))
    return possible


def _order_of_making(splits: tuple[_Split, ...]) -> tuple[_Split, ...] | None:
    """Return the order in which plain divisions give what strided placements mean, None if no order
    does.
    """
    order: list[_Split] = []
    for split in reversed(splits):
        _, axis, split_factor, _ = split
        if split_factor == 1:
            order.insert(0, split)
        elif split_factor == math.prod(parts for _, other, _, parts in order if other == axis):
            order.append(split)
        else:
            return None
    return tuple(order)


def _part(runs: Runs, split_factor: int, num_parts: int, index: int) -> Runs:
    """Return one part of some runs: the `index`-th of `num_parts` of each of `split_factor` equal
    pieces of them.
    """
    if split_factor == 1:
        return _chunk(runs, num_parts, index)
    pieces = (_chunk(_chunk(runs, split_factor, i), num_parts, index) for i in range(split_factor))
    return _joined(itertools.chain.from_iterable(pieces))


def _chunk(runs: Runs, num_parts: int, index: int) -> Runs:
    """Return the `index`-th part of the indices in some runs, divided as `torch.chunk` does: the
    last may be empty.
    """
    size = -(-sum(stop - start for start, stop in runs) // num_parts)
    first, end = index * size, (index + 1) * size
    found, position = [], 0
    for start, stop in runs:
        lo, hi = max(first, position), min(end, position + stop - start)
        if lo < hi:
            found.append((start + lo - position, start + hi - position))
        position += stop - start
    return tuple(found)


def _joined(runs: Any) -> Runs:
    """Join runs that continue one another."""
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _fragmentations(
    shape: tuple[int, ...], splits: Sequence[_Split], runs: Sequence[Runs]
) -> tuple[int, ...] | None:
    parts = [1] * len(shape)
    for _, axis, _, num_parts in splits:
        parts[axis] *= num_parts
    is_even = all(size and size % n == 0 for size, n in zip(shape, parts, strict=True))
    return tuple(parts) if is_even and all(len(axis) == 1 for axis in runs) else None


def shard_of_dtensor(
    key: str,
    dtensor: Any,
    rank_offsets: Sequence[tuple[int, int, int]],
    num_prepended: int,
    replica_id: ReplicaId | None,
    **attributes: Any,
) -> ShardedTensor | ShardedTensorFactory:
    """Describe what this rank holds of a DTensor that is itself a part of a larger tensor.

    `rank_offsets` say which part, as in `ShardedTensor.from_rank_offsets`. `replica_id` numbers
    copies on other meshes; None numbers them by mesh. `attributes` are further ones of the
    `ShardedTensor`. The data is the local part; where that lies in several places of the global
    tensor, the result is a factory that makes a shard of each.
    """
    runs, parts_per_axis, place_in_mesh = _find_part(key, dtensor)
    local, replica = dtensor._local_tensor, _replica_id(dtensor, replica_id, place_in_mesh)
    shape, first, divisions = grid_from_ranks(
        key, tuple(dtensor.shape), rank_offsets, num_prepended
    )
    if local.numel() and any(len(axis) > 1 for axis in runs):
        if attributes:
            raise InvalidShardingError(
                f"DTensor {key!r} lies in several places of the global tensor: its shards take no "
                f"{sorted(attributes)}."
            )
        return parts_factory(
            key,
            local,
            _parts_of_runs(runs, first, shape),
            local_shape=local.shape,
            prepend_axis_num=num_prepended,
            replica_id=replica,
        )
    fragmentations = None
    if parts_per_axis is not None:
        fragmentations = tuple(map(int.__mul__, divisions, (1,) * num_prepended + parts_per_axis))
    offset = _moved(first, [axis[0][0] if axis else 0 for axis in runs])
    place = (tuple(local.shape), shape, offset, fragmentations)
    return ShardedTensor(key, local, local.dtype, *place, replica, num_prepended, **attributes)


def shard_of_parts(
    key: str,
    tensor: Any,
    rank_offsets: Sequence[tuple[int, int, int]],
    num_prepended: int,
    replica_id: ReplicaId,
    **attributes: Any,
) -> ShardedTensor | ShardedTensorFactory:
    """Describe a tensor that says which parts of a global tensor it has, see `has_parts`.

    The arguments are those of `shard_of_dtensor`. A tensor with several parts, or with elements
    that belong to none, becomes a factory that makes a shard of each part.
    """
    sizes = tuple(map(int, tensor.global_shape))
    shape, first, _ = grid_from_ranks(key, sizes, rank_offsets, num_prepended)
    local_shape = tuple(tensor.shape)
    parts = [
        FusedPart(start, size, _moved(first, offset), shape)
        for offset, start, size in _checked_parts(key, tensor, sizes)
    ]
    if not parts and local_shape:
        # A rank without elements names the tensor, too.
        nothing = (0,) * len(local_shape)
        parts = [FusedPart(nothing, nothing, _moved(first, nothing), shape)]
    if len(parts) == 1 and parts[0].shape == local_shape:
        place = (local_shape, shape, parts[0].global_offset, None)
        return ShardedTensor(
            key, tensor, tensor.dtype, *place, replica_id, num_prepended, **attributes
        )
    if attributes or not parts:
        raise InvalidShardingError(
            f"Tensor {key!r} has {len(parts)} parts of the global tensor and elements beside them: "
            f"it takes no {sorted(attributes)}, and has at least one part if it has no axes."
        )
    return parts_factory(
        key,
        tensor,
        parts,
        local_shape=local_shape,
        prepend_axis_num=num_prepended,
        replica_id=replica_id,
    )


def _checked_parts(
    key: str, tensor: Any, sizes: tuple[int, ...]
) -> list[tuple[tuple[int, ...], ...]]:
    """Return the global offset, local offset and size of each part of a tensor.

    Raises:
        InvalidShardingError: they do not fit the tensor, or one another.
    """
    given = (tensor.global_offsets, tensor.local_offsets, tensor.local_sizes)
    fits = len({*map(len, given)}) == 1 and len(sizes) == tensor.ndim
    parts: list[tuple[tuple[int, ...], ...]] = []
    for part in zip(*given, strict=fits):
        offset, start, size = (tuple(map(int, values)) for values in part)
        fits = fits and len(offset) == len(start) == len(size) == tensor.ndim
        axes = zip(offset, start, size, sizes, tensor.shape, strict=fits)
        fits = fits and all(map(_is_inside, axes))
        parts.append((offset, start, size))
    if not fits:
        raise InvalidShardingError(
            f"Tensor {key!r} of shape {tuple(tensor.shape)} has the attributes of a part of a "
            f"global tensor of shape {sizes}, which contradict one another: global_offsets, "
            f"local_offsets and local_sizes are {given}. Each part has one of them, with a number "
            "for each axis, and lies inside both shapes."
        )
    return parts


def _is_inside(axis: tuple[int, ...]) -> bool:
    """Tell whether a part lies inside the global and the local tensor along an axis."""
    offset, start, size, most, most_local = axis
    is_valid = min(offset, start, size) >= 0
    return is_valid and offset + size <= most and start + size <= most_local


def _replica_id(
    dtensor: Any, outer: ReplicaId | None, place_in_mesh: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the replica id of a local part: that among copies on other meshes (`outer`), then that
    among those on this one.
    """
    if outer is None:
        # The lowest rank of a mesh distinguishes copies on other meshes.
        outer = OpenReplicaId((0, _lowest_rank(dtensor.device_mesh)))
    numbers = (*((outer,) if isinstance(outer, int) else outer), *place_in_mesh)
    return OpenReplicaId(numbers) if isinstance(outer, OpenReplicaId) else numbers


def _parts_of_runs(
    runs: tuple[Runs, ...], first: tuple[int, ...], global_shape: tuple[int, ...]
) -> list[FusedPart]:
    """Return a part for each combination of runs; the tensor begins at `first` in the global
    tensor.
    """
    parts = []
    for start, spans in zip(_starts(runs), itertools.product(*runs), strict=True):
        shape = tuple(stop - start for start, stop in spans)
        offset = _moved(first, [start for start, _ in spans])
        parts.append(FusedPart(start, shape, offset, global_shape))
    return parts


def _moved(first: tuple[int, ...], offset: Sequence[int]) -> tuple[int, ...]:
    """Return where an offset in a tensor lies in one with prepended axes, in which the tensor
    begins at `first`.
    """
    num_prepended = len(first) - len(offset)
    return first[:num_prepended] + tuple(map(int.__add__, first[num_prepended:], offset))


def _starts(runs: Sequence[Runs]) -> list[tuple[int, ...]]:
    """Return where in the local tensor each combination of runs begins, in row-major order."""
    per_axis = [itertools.accumulate((hi - lo for lo, hi in axis[:-1]), initial=0) for axis in runs]
    return list(itertools.product(*per_axis))

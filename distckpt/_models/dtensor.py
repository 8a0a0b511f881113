"""Shards of DTensors, and of tensors with parts of global ones.

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
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch

from distckpt._base.errors import InvalidShardingError
from distckpt._models.fused import FusedPart, parts_factory, with_numbers
from distckpt.mapping._base import OpenReplicaId, ReplicaId
from distckpt.mapping._sharded_tensor import ShardedTensor, grid_from_ranks
from distckpt.mapping._wrappers import ShardedTensorFactory

TensorShard: TypeAlias = ShardedTensor | ShardedTensorFactory
"""A shard, or a factory of shards in several places."""
Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges `(start, stop)` of one axis, in local order."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types of most tensors, asked about first."""
_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""Attributes of torch's `CheckpointableTensor`, new in torch 2.14."""
_Split: TypeAlias = tuple[int, int, int, int]
"""Mesh axis, tensor axis, split factor (1 unless strided), number of parts."""
_Division: TypeAlias = tuple[tuple[Runs, ...], tuple[int, ...] | None]
"""Runs of each axis, and the number of parts along each.

None if the parts are not of one size.
"""


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
    """Return this rank's part of a DTensor; other values unchanged."""
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
    """Number this rank's part along the axes of a mesh.

    Collective operations of torch, and so FSDP2, count ranks in the order of their process group,
    which is that of their numbers, and need not be that of the mesh.
    """
    place = []
    for axis, position in enumerate(coordinate):
        others = (*coordinate[:axis], slice(None), *coordinate[axis + 1 :])
        ranks = mesh.mesh[others].tolist()
        if ranks != sorted(ranks):
            position = mesh.get_local_rank(axis)
        place.append(position)
    return tuple(place)


def is_in_mesh(dtensor: Any) -> bool:
    """Tell whether this rank is in the mesh of a DTensor; ranks outside of it hold nothing."""
    return dtensor.device_mesh.get_coordinate() is not None


def _find_part(
    key: str, dtensor: Any
) -> tuple[tuple[Runs, ...], tuple[int, ...] | None, tuple[int, ...]]:
    """Find this rank's part of a DTensor; the rank must be in the mesh.

    Returns its runs per axis; the number of parts along each axis if all are of one size, else
    None; and this rank's place among copies: its mesh coordinates, 0 where the mesh divides the
    tensor.

    Raises:
        InvalidShardingError: the tensor is not divided into parts and copies (a sum that is yet to
            be made, say), or its local part has another shape than mesh and placements give it.
    """
    mesh = dtensor.device_mesh
    local_shape = tuple(dtensor._local_tensor.shape)
    coordinate = _place_in_groups(mesh, tuple(mesh.get_coordinate()))
    mesh_shape = tuple(mesh.shape)
    shape = tuple(dtensor.shape)
    placements = dtensor.placements
    splits = _in_noted_order(dtensor, tuple(_splits(key, placements, mesh_shape)))
    for runs, fragmentations in _noted_runs(dtensor) or _possible_runs(shape, splits, coordinate):
        sizes = tuple(map(_num_indices, runs))
        # FSDP2 empties other axes of an empty part, too.
        if sizes == local_shape or (0 in sizes and 0 in local_shape):
            replica = list(coordinate)
            for mesh_axis, *_ in splits:
                replica[mesh_axis] = 0
            return runs, fragmentations, tuple(replica)
    raise InvalidShardingError(
        f"DTensor {key!r} of shape {shape} has the placements {tuple(placements)} on a mesh of "
        f"{mesh_shape}; at {coordinate} of it that does not give a local part of {local_shape}. "
        "Make it with distribute_tensor or from_local(..., shape=, stride=), pass a state dict of "
        "Megatron-FSDP through its preprocess_state_dict_for_uneven_dtensor, or wrap the local "
        "part in a ShardedTensor yourself."
    )


def _in_noted_order(dtensor: Any, splits: tuple[_Split, ...]) -> tuple[_Split, ...]:
    """Return splits in the order of their making, if that is noted."""
    # Megatron-FSDP divides the parts of tensor parallelism, and notes that there.
    mesh_axes = list(getattr(dtensor.device_mesh, "_shard_order", ()))
    if not mesh_axes:
        # Newer PyTorch notes the order for each axis of the tensor.
        for entry in getattr(dtensor._spec, "shard_order", None) or ():
            mesh_axes += entry.mesh_dims
    if not {split[0] for split in splits}.issubset(mesh_axes):
        return splits
    return tuple(sorted(splits, key=lambda split: mesh_axes.index(split[0])))


def _noted_runs(dtensor: Any) -> list[_Division]:
    """Return the runs of a local part that notes its place.

    Megatron-FSDP notes it, as torch's checkpoints ask for: its parts follow no rule.
    """
    noted = vars(dtensor._local_tensor).get("__create_chunk_list__")
    if noted is None:
        return []
    (chunk,) = noted()
    runs = []
    for start, size in zip(chunk.offsets, chunk.sizes, strict=True):
        runs.append(_joined([(start, start + size)]))
    return [(tuple(runs), None)]


def _num_indices(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


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
) -> list[_Division]:
    """Return the runs and fragmentations that placements can mean, the likeliest first.

    Where FSDP divides parts of tensor parallelism along the same axis, it names a strided
    placement, which should give the same parts when the mesh is gone through from left to right.
    That holds only while all parts are of one size. With others, the rank holds the parts that the
    divisions give in the order in which they were made.
    """
    as_made = _order_of_making(splits)
    orders = [splits]
    if as_made is not None and as_made != splits:
        orders.insert(0, as_made)
    possible: list[_Division] = []
    for order in orders:
        runs = [_joined([(0, size)]) for size in shape]
        for mesh_axis, axis, split_factor, parts in order:
            factor = 1 if order is as_made else split_factor
            runs[axis] = _part(runs[axis], factor, parts, coordinate[mesh_axis])
        possible.append((tuple(runs), _fragmentations(shape, order, runs)))
    return possible


def _order_of_making(splits: tuple[_Split, ...]) -> tuple[_Split, ...] | None:
    """Return an order of plain divisions equal to strided placements.

    None stands for placements without such an order.
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
    """Return one part of some runs.

    It is the `index`-th of `num_parts` of each of `split_factor` equal pieces of them.
    """
    if split_factor == 1:
        return _chunk(runs, num_parts, index)
    parts: list[tuple[int, int]] = []
    for number in range(split_factor):
        piece = _chunk(runs, split_factor, number)
        parts += _chunk(piece, num_parts, index)
    return _joined(parts)


def _chunk(runs: Runs, num_parts: int, index: int) -> Runs:
    """Return the `index`-th part of the indices in some runs.

    They are divided as by `torch.chunk`: the last part may be empty.
    """
    size = -(-_num_indices(runs) // num_parts)
    first = index * size
    end = first + size
    part = []
    position = 0
    for start, stop in runs:
        low = max(first, position)
        high = min(end, position + stop - start)
        if low < high:
            part.append((start + low - position, start + high - position))
        position += stop - start
    return tuple(part)


def _joined(runs: Any) -> Runs:
    """Join runs that continue one another; empty ones are left out."""
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


def _fragmentations(
    shape: tuple[int, ...], splits: Sequence[_Split], runs: Sequence[Runs]
) -> tuple[int, ...] | None:
    parts = [1] * len(shape)
    for _, axis, _, num_parts in splits:
        parts[axis] *= num_parts
    is_even = all(size and size % n == 0 for size, n in zip(shape, parts, strict=True))
    if is_even and all(len(axis) == 1 for axis in runs):
        return tuple(parts)
    return None


def shard_of_dtensor(
    key: str,
    dtensor: Any,
    rank_offsets: Sequence[tuple[int, int, int]],
    num_prepended: int,
    replica_id: ReplicaId | None,
    **attributes: Any,
) -> TensorShard:
    """Describe this rank's part of a DTensor in a larger tensor.

    `rank_offsets` say which part, as in `ShardedTensor.from_rank_offsets`. `replica_id` numbers
    copies on other meshes; None numbers them by mesh. `attributes` are further ones of the
    `ShardedTensor`. The data is the local part; where that lies in several places of the global
    tensor, the result is a factory that makes a shard of each.
    """
    runs, parts_per_axis, place_in_mesh = _find_part(key, dtensor)
    local = dtensor._local_tensor
    if replica_id is None:
        # The lowest rank of a mesh distinguishes copies on other meshes.
        replica_id = OpenReplicaId((0, _lowest_rank(dtensor.device_mesh)))
    replica = with_numbers(replica_id, place_in_mesh)
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
    starts = [0] * len(runs)
    for number, axis in enumerate(runs):
        if axis:
            starts[number] = axis[0][0]
    offset = _moved(first, starts)
    place = (tuple(local.shape), shape, offset, fragmentations)
    return ShardedTensor(key, local, local.dtype, *place, replica, num_prepended, **attributes)


def shard_of_parts(
    key: str,
    tensor: Any,
    rank_offsets: Sequence[tuple[int, int, int]],
    num_prepended: int,
    replica_id: ReplicaId,
    **attributes: Any,
) -> TensorShard:
    """Describe a tensor that has parts of a global tensor, see `has_parts`.

    The arguments are those of `shard_of_dtensor`. A tensor with several parts, or with elements
    that belong to none, becomes a factory that makes a shard of each part.
    """
    sizes = tuple(map(int, tensor.global_shape))
    shape, first, _ = grid_from_ranks(key, sizes, rank_offsets, num_prepended)
    local_shape = tuple(tensor.shape)
    parts = []
    for offset, start, size in _checked_parts(key, tensor, sizes):
        parts.append(FusedPart(start, size, _moved(first, offset), shape))
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
    """Return global offset, local offset and size of each part.

    Raises:
        InvalidShardingError: they do not fit the tensor, or one another.
    """
    attributes = (tensor.global_offsets, tensor.local_offsets, tensor.local_sizes)
    fits = len({*map(len, attributes)}) == 1 and len(sizes) == tensor.ndim
    parts: list[tuple[tuple[int, ...], ...]] = []
    for part in zip(*attributes, strict=fits):
        offset, start, size = (tuple(map(int, values)) for values in part)
        fits = fits and len(offset) == len(start) == len(size) == tensor.ndim
        for axis in zip(offset, start, size, sizes, tensor.shape, strict=fits):
            first, first_local, extent, most, most_local = axis
            is_inside = first + extent <= most and first_local + extent <= most_local
            fits = fits and is_inside and min(first, first_local, extent) >= 0
        parts.append((offset, start, size))
    if not fits:
        raise InvalidShardingError(
            f"Tensor {key!r} of shape {tuple(tensor.shape)} has the attributes of a part of a "
            f"global tensor of shape {sizes}, which contradict one another: global_offsets, "
            f"local_offsets and local_sizes are {attributes}. Each part has one of them, with a "
            "number for each axis, and lies inside both shapes."
        )
    return parts


def _parts_of_runs(
    runs: tuple[Runs, ...], first: tuple[int, ...], global_shape: tuple[int, ...]
) -> list[FusedPart]:
    """Return a part for each combination of runs.

    The tensor begins at `first` in the global tensor.
    """
    axes = []
    for axis in runs:
        sizes = [stop - start for start, stop in axis]
        local_starts = itertools.accumulate(sizes[:-1], initial=0)
        starts = [start for start, _ in axis]
        axes.append(list(zip(local_starts, sizes, starts, strict=True)))
    parts = []
    for spans in itertools.product(*axes):
        local_offset, shape, offset = zip(*spans, strict=True)
        parts.append(FusedPart(local_offset, shape, _moved(first, offset), global_shape))
    return parts


def _moved(first: tuple[int, ...], offset: Sequence[int]) -> tuple[int, ...]:
    """Return an offset in a tensor as one in a larger tensor.

    The larger tensor may have prepended axes; the tensor begins at `first` in it.
    """
    num_prepended = len(first) - len(offset)
    return first[:num_prepended] + tuple(map(int.__add__, first[num_prepended:], offset))


def mesh_names(modules: Iterable[torch.nn.Module]) -> list[str]:
    """Name the device meshes of modules, by their axes and sizes."""
    meshes: set[Any] = set()
    for module in modules:
        for param in module.parameters():
            if is_dtensor(param):
                meshes.add(param.device_mesh)  # type: ignore[attr-defined]
    return sorted({f"{mesh.mesh_dim_names or ''}{tuple(mesh.shape)}" for mesh in meshes})

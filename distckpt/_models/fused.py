"""Geometry of the factories: parameters whose parts are stored apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from distckpt._base.errors import InvalidShardingError
from distckpt._geometry.region import Region, flat_range_regions, flat_start, intersect, whole
from distckpt.mapping._base import OpenReplicaId, ReplicaId, flat_bounds
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import LocalNonpersistentObject, ShardedTensorFactory


class FusedPart(NamedTuple):
    """Region of a local tensor, and its place in a stored one.

    Attributes:
        offset: index of the region's first element in the local tensor, per axis.
        shape: extent of the region.
        global_offset: index of the region in the stored tensor, prepended axes included.
        global_shape: shape of the stored tensor, prepended axes included.
        suffix: put behind the key.
        copy: which copy this is, if several ranks hold the part besides the replicas of the whole
            parameter.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    suffix: str = ""
    copy: int = 0


def parts_factory(
    key: str,
    data: torch.Tensor,
    parts: Sequence[FusedPart],
    *,
    local_shape: Sequence[int],
    view_shape: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    prepend_axis_num: int = 0,
    replica_id: ReplicaId = 0,
    flattened_range: slice | None = None,
) -> ShardedTensorFactory:
    """Make the factory of a parameter whose parts are stored apart.

    `parts` are regions of a view of the parameter of shape `view_shape`: `local_shape` with some
    axes divided into several. Elements in no part are not stored. `axes` gives, for each axis of
    the stored tensor (prepended ones aside), the axis of the view that it is.

    `build` gives one shard for each part, in their order; for a flat parameter a dict, with a shard
    for each region of a part that its range covers.
    """
    local_shape = tuple(local_shape)
    if view_shape is None:
        view_shape = local_shape
    if axes is None:
        axes = range(len(view_shape))
    form = _Form(local_shape, tuple(view_shape), tuple(axes), tuple(parts), prepend_axis_num)
    return ShardedTensorFactory(key, data, form.build, form.merge, replica_id, flattened_range)


class _Cell(NamedTuple):
    """A region of one part that is stored as one shard.

    It lies in `run`, a region that is contiguous in memory.
    """

    part: FusedPart
    region: Region
    run: Region


class _Form(NamedTuple):
    """The layout of a parameter in memory and in stored tensors; see `parts_factory`."""

    local_shape: tuple[int, ...]
    view_shape: tuple[int, ...]
    axes: tuple[int, ...]
    parts: tuple[FusedPart, ...]
    prepend_axis_num: int

    def build(
        self, key: str, tensor: torch.Tensor, replica_id: ReplicaId, flattened_range: slice | None
    ) -> Any:
        """Describe each cell as a shard."""
        bounds = self.bounds(key, tensor, flattened_range)
        cells = list(self.cells(bounds))
        views = self.views(tensor.detach(), cells, bounds)
        shards = []
        for cell, view in zip(cells, views, strict=True):
            shards.append(self.shard(key, cell, view, replica_id))
        if bounds is None:
            return shards
        # Merging needs the bounds, which tensors alone do not show.
        return {"bounds": LocalNonpersistentObject(bounds), "shards": shards}

    def bounds(
        self, key: str, tensor: torch.Tensor, flattened_range: slice | None
    ) -> tuple[int, int] | None:
        """Check the shape; return the range of elements of a flat parameter.

        The range is that of its first element to the one after its last; None if it is not flat.
        """
        bounds = None
        expected = self.local_shape
        flat = ""
        if flattened_range is not None:
            bounds = flat_bounds(flattened_range, self.local_shape)
            expected = (bounds[1] - bounds[0],)
            flat = f" for {flattened_range} of local shape {self.local_shape}"
        if tuple(tensor.shape) != expected:
            fail(key, f"data has shape {tuple(tensor.shape)}, but must have {expected}{flat}")
        return bounds

    def cells(self, bounds: tuple[int, int] | None) -> Iterator[_Cell]:
        """Divide a parameter into cells: at least one, maybe empty."""
        if bounds is None:
            for part in self.parts:
                yield _Cell(part, Region(part.offset, part.shape), whole(self.view_shape))
            return
        is_empty = True
        for run in flat_range_regions(self.view_shape, *bounds):
            for part in self.parts:
                region = intersect(run, Region(part.offset, part.shape))
                if region is not None:
                    is_empty = False
                    yield _Cell(part, region, run)
        if is_empty:
            nothing = Region(self.parts[0].offset, (0,) * len(self.view_shape))
            yield _Cell(self.parts[0], nothing, nothing)

    def views(
        self, tensor: torch.Tensor, cells: Iterable[_Cell], bounds: tuple[int, int] | None
    ) -> list[torch.Tensor]:
        """Return the views of cells in a tensor of the parameter's shape.

        Their axes are in the stored order.
        """
        views = []
        for _, region, run in cells:
            if bounds is None:
                around = tensor.reshape(self.view_shape)
            else:
                first = 0
                if run.num_elements:
                    first = flat_start(self.view_shape, run) - bounds[0]
                around = tensor[first : first + run.num_elements].view(run.shape)
            views.append(around[region.relative_to(run.offset).slices()].permute(self.axes))
        return views

    def shard(
        self, key: str, cell: _Cell, view: torch.Tensor, replica_id: ReplicaId
    ) -> ShardedTensor:
        """Describe one cell."""
        part = cell.part
        within = cell.region.relative_to(part.offset).offset
        moved = (0,) * self.prepend_axis_num + tuple(within[axis] for axis in self.axes)
        if part.copy:
            replica_id = with_numbers(replica_id, (part.copy,))
        global_offset = tuple(map(int.__add__, part.global_offset, moved))
        place = (tuple(view.shape), part.global_shape, global_offset, None)
        return ShardedTensor(
            key + part.suffix, view, view.dtype, *place, replica_id, self.prepend_axis_num
        )

    def merge(self, loaded: Any) -> torch.Tensor:
        """Put the tensors of the shards of `build` together."""
        bounds = None
        tensors = loaded
        shape = self.local_shape
        if isinstance(loaded, dict):
            bounds = loaded["bounds"]
            tensors = loaded["shards"]
        if isinstance(bounds, LocalNonpersistentObject):
            bounds = bounds.unwrap()
        if bounds is not None:
            shape = (bounds[1] - bounds[0],)
        cells = list(self.cells(bounds))
        # A tensor without memory has strides, too.
        model = torch.empty(shape, dtype=tensors[0].dtype, device="meta")
        merged = _behind(tensors, self.views(model, cells, bounds), model)
        if merged is None:
            merged = torch.zeros(shape, dtype=tensors[0].dtype, device=tensors[0].device)
            for view, tensor in zip(self.views(merged, cells, bounds), tensors, strict=True):
                view.copy_(tensor)
        return merged


def with_numbers(replica_id: ReplicaId, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Append numbers to a replica id: of copies of another kind."""
    if isinstance(replica_id, OpenReplicaId):
        return OpenReplicaId((*replica_id, *numbers))
    if isinstance(replica_id, tuple | list):
        return (*replica_id, *numbers)
    return (replica_id, *numbers)


def _behind(
    tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor], model: torch.Tensor
) -> torch.Tensor | None:
    """Return the tensor of which `tensors` are views, or None.

    They are laid out in its memory as `views` are in `model`.
    """
    memory = tensors[0].untyped_storage().data_ptr()
    start = tensors[0].storage_offset() - views[0].storage_offset()
    end = (start + model.numel()) * model.itemsize
    has_room = start >= 0 and end <= tensors[0].untyped_storage().nbytes()
    is_shared = (
        memory != 0
        and has_room
        and all(
            tensor.untyped_storage().data_ptr() == memory
            and tensor.storage_offset() - view.storage_offset() == start
            and (tensor.dtype, tensor.shape, tensor.stride())
            == (view.dtype, view.shape, view.stride())
            for tensor, view in zip(tensors, views, strict=True)
        )
    )
    if not is_shared:
        return None
    return tensors[0].as_strided(model.shape, model.stride(), start)


def fail(key: str, problem: str) -> NoReturn:
    """Raise InvalidShardingError about the factory of a key."""
    raise InvalidShardingError(f"factory of key {key!r}: {problem}")

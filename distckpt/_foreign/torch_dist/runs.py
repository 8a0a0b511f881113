"""Regions of a stored tensor that are contiguous in its file."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator

from distckpt._foreign.torch_dist.objects import TensorView
from distckpt._geometry.region import Region, flat_range_regions

_MAX_RUNS = 1 << 20
"""Most regions that a stored tensor is divided into."""

_Shape = tuple[int, ...]


def contiguous_runs(stored: TensorView, region: Region) -> Iterator[tuple[Region, int]]:
    """Divide the region that a stored tensor holds into contiguous ones.

    Each comes with the position of its first element, counted from the first of the tensor.
    """
    shape = region.shape
    strides = stored.strides
    inner = _axes_of_runs(shape, strides)
    if region.num_elements == 0 or len(inner) == len(shape):
        yield region, 0
        return
    extent = [1] * len(shape)
    counts = list(shape)
    for axis in inner:
        extent[axis] = shape[axis]
        counts[axis] = 1
    if math.prod(counts) > _MAX_RUNS:
        raise ValueError(
            f"it is stored with strides {strides}, in more than {_MAX_RUNS} runs; save contiguous "
            "tensors"
        )
    for index in itertools.product(*map(range, counts)):
        offset = tuple(map(operator.add, region.offset, index))
        yield Region(offset, tuple(extent)), sum(map(operator.mul, index, strides))


def _axes_of_runs(shape: _Shape, strides: _Shape) -> set[int]:
    """Return the axes along which a stored tensor is contiguous."""
    # The axes from `outer` on lie as in a contiguous tensor; an axis of size 1 may have any stride.
    outer = len(shape)
    step = 1
    while outer and (shape[outer - 1] == 1 or strides[outer - 1] == step):
        outer -= 1
        step *= shape[outer]
    # A transposed tensor has its runs along another axis.
    for axis in range(outer):
        if strides[axis] == 1 and shape[axis] > step:
            return {axis}
    return set(range(outer, len(shape)))


def unflattened_runs(
    stored: TensorView, region: Region, shape: _Shape, original: _Shape
) -> Iterator[tuple[Region, int]]:
    """Divide the region of a flattened shard into regions of the original.

    Such a tensor is stored as an array of `shape`, with one axis more than `original`: the first
    axes number the shards of a regular grid, and the last one counts the elements of each,
    flattened. Each region comes with the position of its first element.
    """
    local = _shape_of_shards(shape, original)
    if local is None or region.shape[:-1] != (1,) * len(local):
        raise ValueError(f"a flattened tensor of shape {original} in a grid {shape}")
    if stored.strides and stored.strides[-1] != 1 and region.shape[-1] > 1:
        raise ValueError(f"a flattened tensor with strides {stored.strides}")
    if region.num_elements == 0:
        yield Region((0,) * len(local), (0,) * len(local)), 0
        return
    *cell, first = region.offset
    corner = tuple(map(operator.mul, cell, local))
    position = 0
    for piece in flat_range_regions(local, first, first + region.shape[-1]):
        offset = tuple(map(operator.add, corner, piece.offset))
        yield Region(offset, piece.shape), position
        position += piece.num_elements


def _shape_of_shards(shape: _Shape, original: _Shape) -> _Shape | None:
    """Return the shape of a flattened tensor's shards.

    None if `original` has no such grid.
    """
    grid = shape[:-1]
    if len(grid) != len(original) or 0 in grid:
        return None
    local = tuple(map(operator.floordiv, original, grid))
    is_regular = tuple(map(operator.mul, local, grid)) == original
    if is_regular and math.prod(local) == shape[-1]:
        return local
    return None

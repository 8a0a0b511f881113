"""Regions of a global tensor: intersecting, cutting and comparing them.

A region is an offset and a shape, counted in elements of the global tensor. Arrays of regions are
pairs of int64 arrays `offsets`, `shapes` of shape (n, ndim).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

MAX_NDIM = 64
"""Maximum axes of a tensor in foreign files; numpy has no more."""
_MAX_DIVIDED_AXES = 8
_MAX_CORNERS = 1 << 22


class Region(NamedTuple):
    """A rectangle of indices of a tensor.

    `offset` is the offset of its first element, and `shape` its size, one int per axis.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Count the elements inside (1 for the region of a 0-dim tensor)."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return (
            "["
            + ", ".join(f"{o}:{o + s}" for o, s in zip(self.offset, self.shape, strict=True))
            + "]"
        )

    def relative_to(self, origin: tuple[int, ...]) -> Region:
        """Count the offset from `origin`."""
        return Region(tuple(o - b for o, b in zip(self.offset, origin, strict=True)), self.shape)

    def slices(self, step: tuple[int, ...] = ()) -> tuple[slice, ...]:
        """Return the index that selects this region of a tensor.

        With `step`, the selected indices lie so far apart.
        """
        if not step:
            return tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))
        return tuple(
            slice(o, o + n * s, s) for o, n, s in zip(self.offset, self.shape, step, strict=True)
        )


def covering(region: Region, step: tuple[int, ...]) -> Region:
    """Return the smallest region around elements that lie `step` apart.

    It goes from the first to the last of them along each axis.
    """
    if not step:
        return region
    return Region(
        region.offset, tuple((n - 1) * s + 1 for n, s in zip(region.shape, step, strict=True))
    )


def whole(shape: tuple[int, ...]) -> Region:
    """Return the region that covers a whole tensor."""
    return Region((0,) * len(shape), tuple(shape))


def with_item(values: Sequence[int], position: int, value: int) -> tuple[int, ...]:
    """Replace one of several numbers."""
    return (*values[:position], value, *values[position + 1 :])


def intersect(first: Region, second: Region) -> Region | None:
    """Return the elements that two regions share, or None.

    They are a region, too.
    """
    start = tuple(map(max, first.offset, second.offset))
    stop = tuple(
        min(a + n, b + m)
        for a, n, b, m in zip(first.offset, first.shape, second.offset, second.shape, strict=True)
    )
    if any(lo >= hi for lo, hi in zip(start, stop, strict=True)):
        return None
    return Region(start, tuple(hi - lo for lo, hi in zip(start, stop, strict=True)))


def subtract(region: Region, hole: Region) -> list[Region]:
    """Cut a region outside of a hole into regions.

    The hole lies inside of the region.
    """
    rest: list[Region] = []
    offset, shape = region
    for axis, (first, size) in enumerate(zip(*hole, strict=True)):
        low = offset[axis]
        high = low + shape[axis]
        for start, stop in ((low, first), (first + size, high)):
            if start < stop:
                piece_offset = with_item(offset, axis, start)
                piece_shape = with_item(shape, axis, stop - start)
                rest.append(Region(piece_offset, piece_shape))
        offset = with_item(offset, axis, first)
        shape = with_item(shape, axis, size)
    return rest


def intersect_many(
    offsets: IntArray, shapes: IntArray, other_offsets: npt.ArrayLike, other_shapes: npt.ArrayLike
) -> tuple[IntArray, IntArray, IntArray]:
    """Intersect n regions with n others, or all with the same one.

    Returns `(rows, offsets, shapes)`: the indices of the regions that share elements, and their
    intersections.
    """
    others = np.asarray(other_offsets, np.int64)
    start = np.maximum(offsets, others)
    stop = np.minimum(offsets + shapes, others + np.asarray(other_shapes, np.int64))
    rows = np.flatnonzero((stop > start).all(axis=1))
    return rows, start[rows], (stop - start)[rows]


def regions_to_arrays(
    regions: Sequence[Region], ndim: int | None = None
) -> tuple[IntArray, IntArray]:
    """Stack regions into `(offsets, shapes)` of shape (n, ndim).

    Offsets are padded with 0 and shapes with 1. Without `ndim`, the longest region determines the
    number of axes.
    """
    if ndim is None:
        ndim = max((len(region.offset) for region in regions), default=0)
    return (
        stacked([region.offset for region in regions], ndim, 0),
        stacked([region.shape for region in regions], ndim, 1),
    )


def stacked(rows: Sequence[tuple[int, ...]], ndim: int, fill: int) -> IntArray:
    """Stack rows of at most `ndim` numbers, and pad shorter ones."""
    if not {ndim}.issuperset(map(len, rows)):
        rows = [row + (fill,) * (ndim - len(row)) for row in rows]
    # There may be many rows: np.array takes three times as long.
    numbers = np.fromiter(itertools.chain.from_iterable(rows), np.int64)
    return numbers.reshape(len(rows), ndim)


def widen(columns: IntArray, ndim: int, fill: int) -> IntArray:
    """Pad `(n, d)` offsets or shapes to `ndim` axes."""
    # Not np.pad, which takes ten times as long for a few rows.
    return np.concatenate(
        [columns, np.full((len(columns), ndim - columns.shape[1]), fill, np.int64)], axis=1
    )


def stable_order(ids: npt.NDArray[Any], bound: int) -> IntArray:
    """Return a stable order that sorts ids from 0 to `bound`.

    `bound` is at most 2**32.
    """
    # numpy sorts numbers of 16 bits by counting, in a tenth of the time.
    order = np.argsort(ids.astype(np.uint16), kind="stable")
    if bound > 1 << 16:
        order = order[np.argsort((ids[order] >> 16).astype(np.uint16), kind="stable")]
    return order


def row_hashes(columns: Sequence[IntArray]) -> npt.NDArray[np.uint64]:
    """Mix integer columns into one 64-bit hash per row."""
    hashes = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        hashes = mixed(hashes * np.uint64(3) + column.astype(np.uint64))
    return hashes


def mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits of integers."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return result


def flat_range_regions(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Region]:
    """Cut elements [start, stop) of a row-major tensor into regions.

    There are at most 2 * ndim - 1 of them. The regions come in memory order and each is contiguous
    in memory, so their flattened contents, one after another, are exactly the flat slice.
    """
    if stop <= start:
        return
    if not shape:
        yield Region((), ())
        return
    row = math.prod(shape[1:])
    # Complete rows, and before and after them parts of rows, which may be the same row.
    low = -(-start // row)
    high = stop // row
    origin = (0,) * (len(shape) - 1)
    if start % row:
        yield from _inside_row(shape, low - 1, start % row, min(row, stop - (low - 1) * row))
    if low < high:
        yield Region((low, *origin), (high - low, *shape[1:]))
    if stop % row and low <= high:
        yield from _inside_row(shape, high, 0, stop % row)


def _inside_row(
    shape: tuple[int, ...],
    row: int,
    start: int,
    stop: int,
) -> Iterator[Region]:
    for inner in flat_range_regions(shape[1:], start, stop):
        yield Region((row, *inner.offset), (1, *inner.shape))


def flat_start(shape: tuple[int, ...], region: Region) -> int:
    """Return the flat index of a region's first element.

    It is an index into a row-major tensor of `shape`.
    """
    index = 0
    for size, offset in zip(shape, region.offset, strict=True):
        index = index * size + offset
    return index


def covering_elements(shape: tuple[int, ...], region: Region) -> int:
    """Count the elements from a region's first to its last.

    Elements between its runs are included.
    """
    if region.num_elements == 0:
        return 0
    last = Region(
        tuple(o + n - 1 for o, n in zip(region.offset, region.shape, strict=True)),
        (1,) * len(shape),
    )
    return flat_start(shape, last) - flat_start(shape, region) + 1


def step_over(region: Region, num_axes: int) -> Iterator[Region]:
    """Cut a region into pieces of one index along its first axes.

    Pieces come in row-major order.
    """
    leading = zip(region.offset[:num_axes], region.shape, strict=False)
    for index in itertools.product(*(range(start, start + size) for start, size in leading)):
        yield Region(index + region.offset[num_axes:], (1,) * num_axes + region.shape[num_axes:])


def num_outer_axes(shape: tuple[int, ...], region: Region) -> int:
    """Return the number of leading axes outside of a region's contiguous runs.

    Walking the region steps over them. The runs are `region.shape[num_outer_axes:]`; leading axes
    of extent 1 cost no step.
    """
    inner = len(shape)
    while inner > 0 and region.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    while outer > 0 and math.prod(region.shape[:outer]) == 1:
        outer = 0
    return outer


def run_starts(shape: tuple[int, ...], region: Region, num_outer: int | None = None) -> IntArray:
    """Return the flat index of each run's first element, in order.

    The runs are the ones of `num_outer_axes`, or shorter ones if `num_outer` axes are stepped over.
    """
    starts: IntArray = np.array([flat_start(shape, region)], np.int64)
    if num_outer is None:
        num_outer = num_outer_axes(shape, region)
    for axis in range(num_outer):
        starts = np.add.outer(
            starts, np.arange(region.shape[axis]) * math.prod(shape[axis + 1 :])
        ).reshape(-1)
    return starts


def reshaped_regions(
    region: Region, shape: tuple[int, ...], new_shape: tuple[int, ...]
) -> Iterator[tuple[Region, Region]]:
    """Cut a region where a row of either shape ends.

    Yield each piece, and its region after a reshape.
    """
    groups = _axis_groups(shape, new_shape)
    runs_of_groups = [list(_runs(region, shape, old, new_shape, new)) for old, new in groups]
    for runs in itertools.product(*runs_of_groups):
        spans: list[_Span] = []
        new_spans: list[_Span] = []
        for old, new in runs:
            spans += old
            new_spans += new
        yield _region_of(spans, len(shape)), _region_of(new_spans, len(new_shape))


def _axis_groups(
    shape: tuple[int, ...], new_shape: tuple[int, ...]
) -> Iterator[tuple[list[int], list[int]]]:
    """Divide the axes of two shapes into the smallest equal groups.

    Axes of size 1 are left out; groups have the same number of elements.
    """
    axes = [axis for axis, size in enumerate(shape) if size != 1]
    new_axes = [axis for axis, size in enumerate(new_shape) if size != 1]
    while axes:
        old = [axes.pop(0)]
        new = [new_axes.pop(0)]
        num = shape[old[0]]
        new_num = new_shape[new[0]]
        while num != new_num:
            if num < new_num:
                old.append(axes.pop(0))
                num *= shape[old[-1]]
            else:
                new.append(new_axes.pop(0))
                new_num *= new_shape[new[-1]]
        yield old, new


_Span: TypeAlias = tuple[int, int, int]
"""An axis, the first index along it, and the number of indices."""


def _runs(
    region: Region,
    shape: tuple[int, ...],
    old: list[int],
    new_shape: tuple[int, ...],
    new: list[int],
) -> Iterator[tuple[list[_Span], list[_Span]]]:
    """Cut a region, along a group of axes, into runs.

    The runs lie along the last axis of the group in both shapes.
    """
    sizes = tuple(shape[axis] for axis in old)
    within = Region(
        tuple(region.offset[axis] for axis in old), tuple(region.shape[axis] for axis in old)
    )
    new_width = new_shape[new[-1]]
    for row in step_over(within, len(old) - 1):
        start = flat_start(sizes, row)
        stop = start + row.shape[-1]
        while start < stop:
            num = min(stop, start - start % new_width + new_width) - start
            yield _spans_of(old, shape, start, num), _spans_of(new, new_shape, start, num)
            start += num


def _spans_of(axes: list[int], shape: tuple[int, ...], start: int, num: int) -> list[_Span]:
    """Return the spans of a run of elements along some axes."""
    rest, first = divmod(start, shape[axes[-1]])
    spans = [(axes[-1], first, num)]
    for axis in reversed(axes[:-1]):
        rest, index = divmod(rest, shape[axis])
        spans.append((axis, index, 1))
    return spans


def _region_of(spans: Sequence[_Span], ndim: int) -> Region:
    offset = [0] * ndim
    shape = [1] * ndim
    for axis, start, num in spans:
        offset[axis] = start
        shape[axis] = num
    return Region(tuple(offset), tuple(shape))


class TilingFault(NamedTuple):
    """A fault of regions that should tile a tensor.

    `element` is covered `num_covers` times instead of once.
    """

    tensor: int
    element: tuple[int, ...]
    num_covers: int


def find_tiling_faults(
    tensor_ids: IntArray, offsets: IntArray, shapes: IntArray, global_shapes: IntArray
) -> list[TilingFault]:
    """Find every tensor whose regions do not tile it exactly.

    Faults come in the order of their ids. `tensor_ids` (n,) are indices into `global_shapes` (t,
    ndim); `offsets` and `shapes` (n, ndim) are of regions that lie inside their tensors. ValueError
    when so many axes are divided that the corners would not fit memory.

    A region is the sum of signed steps at its 2^ndim corners, and this sum is unique. So regions
    tile a tensor exactly when their signed corners, added up, equal the corners of the whole
    tensor: one sort, whatever the grid (regular, irregular, with empty pieces), in O(n 2^ndim log
    n). The first remaining corner, in row-major order, is an element covered the wrong number of
    times.
    """
    num_tensors = len(global_shapes)
    ids = np.concatenate([tensor_ids, np.arange(num_tensors, dtype=np.int64)])
    low = np.concatenate([offsets, np.zeros_like(global_shapes)])
    high = low + np.concatenate([shapes, global_shapes])
    weight = np.repeat(np.array([1, -1]), [len(tensor_ids), num_tensors])
    weight[(high <= low).any(axis=1)] = 0
    # Along an undivided axis, the corners at both ends say the same: the ones at the beginning will
    # do.
    is_divided = (shapes != global_shapes[tensor_ids]).any(axis=0)
    num_divided = int(is_divided.sum())
    if num_divided > _MAX_DIVIDED_AXES and len(ids) << num_divided > _MAX_CORNERS:
        raise ValueError(
            f"{len(tensor_ids)} regions divide tensors along {num_divided} axes, too many to "
            "compare"
        )
    # Corners lie in 0..size, hence the strides of a tensor one larger along every axis.
    places = np.where(is_divided, global_shapes + 1, 1)
    strides = np.ones_like(global_shapes)
    for axis in range(global_shapes.shape[1] - 2, -1, -1):
        strides[:, axis] = strides[:, axis + 1] * places[:, axis + 1]

    corner_ids, positions, sums = _sum_corners(
        ids, low * strides[ids], high * strides[ids], weight, is_divided
    )
    wrong = np.flatnonzero(sums)
    _, firsts = np.unique(corner_ids[wrong], return_index=True)
    faults = []
    for corner in wrong[firsts].tolist():
        tensor = int(corner_ids[corner])
        sizes = zip(strides[tensor].tolist(), places[tensor].tolist(), strict=True)
        element = tuple(int(positions[corner]) // stride % size for stride, size in sizes)
        faults.append(TilingFault(tensor, element, 1 + int(sums[corner])))
    return faults


def _sum_corners(
    ids: IntArray,
    low: IntArray,
    high: IntArray,
    weight: IntArray,
    is_divided: npt.NDArray[np.bool_],
) -> tuple[IntArray, IntArray, IntArray]:
    """Add up the signed corners of regions.

    The edges of regions are flat positions, per axis. Returns the distinct corners: `(ids, flat
    positions, sums)`, sorted by id and position.
    """
    position = np.zeros((len(ids), 1), np.int64)
    sign = weight[:, None]
    for axis in np.flatnonzero(is_divided).tolist():
        position = np.concatenate(
            [position + low[:, axis, None], position + high[:, axis, None]], axis=1
        )
        sign = np.concatenate([sign, -sign], axis=1)
    corner_ids = np.repeat(ids, position.shape[1])
    flat_position = position.reshape(-1)
    flat_sign = sign.reshape(-1)
    order = np.lexsort((flat_position, corner_ids))
    corner_ids = corner_ids[order]
    flat_position = flat_position[order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (corner_ids[1:] != corner_ids[:-1]) | (flat_position[1:] != flat_position[:-1])
    starts = np.flatnonzero(is_new)
    sums = np.add.reduceat(flat_sign[order], starts) if len(starts) else np.zeros(0, np.int64)
    return corner_ids[starts], flat_position[starts], sums

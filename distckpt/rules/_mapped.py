"""Tensors pieced together from regions of other tensors, without data.

All are values and pure functions. A mapped tensor names, for every element of a *target* tensor,
the element of a *source* tensor that it is a copy of. It does so in regions, so that any region of
the target can be read from regions of the sources alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from distckpt._base.errors import InvalidShardingError
from distckpt._base.lazy import torch
from distckpt._geometry.region import (
    IntArray,
    Region,
    covering,
    intersect,
    intersect_many,
    regions_to_arrays,
    reshaped_regions,
    whole,
    with_item,
)

UNCHANGED = (1.0, 0.0)
"""Factor and addition that change nothing."""
_FEW_PARTS = 8
"""Number of parts up to which intersecting one by one is faster."""

Cut: TypeAlias = tuple[tuple[str, Region], ...]
"""Regions `(key, region)` of sources."""


class RegionCopy(NamedTuple):
    """A region of a target tensor that copies a source's region.

    The region `target` of the target tensor is a copy of the region `source` of the source tensor
    `key`. To get the target: take the source, put its axes in the order `order`, then drop and add
    axes of size 1 until it has the shape of the target.

    Attributes:
        order: all source axes, in the order in which they appear in the target. Axes along which
            the source has size 1 stand anywhere. `(0, 1, ..., n-1)` when no axis moves.
        target_step: distance of the elements of the target region along each axis; () for 1 along
            all.
        source_step: distance of the elements of the source region.
        add: number that is added to the elements.
        factor: number that the elements are multiplied by, before.
    """

    target: Region
    key: str
    source: Region
    order: tuple[int, ...]
    target_step: tuple[int, ...] = ()
    source_step: tuple[int, ...] = ()
    add: float = 0.0
    factor: float = 1.0


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its data: global `shape` and safetensors name of `dtype`."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class MappedTensor:
    """A target tensor that is pieced together from source regions.

    Attributes:
        shape: shape of the target tensor.
        dtype: safetensors name of the dtype, the same in all of its sources.
        parts: together with `padding` they tile the target; a target without elements has none.
        trimmed: source regions `(key, region)` that a rule cut off as padding, carried along for
            the way back.
        padding: regions of the target that no source holds, to be filled with zeros.
        is_copy: whether another target holds the same elements, so that the way back does not need
            this one.
    """

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[RegionCopy, ...]
    trimmed: Cut = ()
    padding: tuple[Region, ...] = ()
    is_copy: bool = False

    @property
    def origin(self) -> tuple[int, ...]:
        """The offset of the first element."""
        return (0,) * len(self.shape)

    @cached_property
    def target_arrays(self) -> tuple[IntArray, IntArray]:
        """Offsets and shapes of the parts in the target.

        They are arrays of shape (number of parts, number of axes).
        """
        return regions_to_arrays(
            [covering(part.target, part.target_step) for part in self.parts], len(self.shape)
        )


def identity(key: str, info: TensorSpec) -> MappedTensor:
    """Map a tensor to itself."""
    shape = tuple(info.shape)
    region = whole(info.shape)
    parts: tuple[RegionCopy, ...] = ()
    if 0 not in shape:
        parts = (RegionCopy(region, key, region, tuple(range(len(shape)))),)
    return MappedTensor(shape, info.dtype, parts)


def resolve(mapped: MappedTensor, region: Region) -> list[tuple[Region, RegionCopy]]:
    """Find the source regions of a region of a target tensor.

    Returns:
        Pairs `(place, part)`: `part` is cut down to the region, and `place` is its target, with its
        offset counted from the region's first element. Together with `resolve_padding` the places,
        whose elements lie `part.target_step` apart, tile the region.

    Raises:
        InvalidShardingError: the region does not lie inside the tensor.
    """
    return [
        (target.relative_to(region.offset), _restrict(part, target, target))
        for part, target in _cut(mapped, region)
    ]


def _cut(mapped: MappedTensor, region: Region) -> Iterator[tuple[RegionCopy, Region]]:
    """Yield the parts with elements in a region.

    Each comes with the part of its target in the region.
    """
    check_inside(region, mapped.shape)
    for part, target in _common_with(mapped, region):
        if part.target_step:
            target = _on_steps(part, target)
        if target.num_elements:
            yield part, target


def _common_with(mapped: MappedTensor, region: Region) -> Iterator[tuple[RegionCopy, Region]]:
    """Yield the parts that cover elements of a region.

    Each comes with the elements that it covers.
    """
    if len(mapped.parts) > _FEW_PARTS:
        rows, offsets, shapes = intersect_many(*mapped.target_arrays, *region)
        for row, offset, shape in zip(rows, offsets.tolist(), shapes.tolist(), strict=True):
            yield mapped.parts[row], Region(tuple(offset), tuple(shape))
        return
    for part in mapped.parts:
        common = intersect(covering(part.target, part.target_step), region)
        if common is not None:
            yield part, common


def resolve_padding(mapped: MappedTensor, region: Region) -> list[Region]:
    """Find the zero-filled regions inside a region of a target.

    See `resolve`.
    """
    check_inside(region, mapped.shape)
    zeros = []
    for padding in mapped.padding:
        common = intersect(region, padding)
        if common is not None:
            zeros.append(common.relative_to(region.offset))
    return zeros


def _on_steps(part: RegionCopy, common: Region) -> Region:
    """Return the elements of a part in a region of its cover."""
    offset = []
    shape = []
    for first, step, low, num in zip(part.target.offset, part.target_step, *common, strict=True):
        start = low + (first - low) % step
        offset.append(start)
        shape.append(max(-(-(low + num - start) // step), 0))
    return Region(tuple(offset), tuple(shape))


def target_view(tensor: torch.Tensor, place: Region, part: RegionCopy) -> torch.Tensor:
    """View a tensor's memory at a part's place, with its source's axes.

    `resolve` returns the place. Writing to the view writes to `tensor`. ValueError if `place` does
    not have the shape of the part, or lies outside the tensor.
    """
    view = tensor[place.slices(part.target_step)]
    if tuple(view.shape) != part.target.shape:
        raise ValueError(
            f"a view of shape {tuple(view.shape)} was given for a part of shape {part.target.shape}"
        )
    if part.source.shape == part.target.shape and part.order == tuple(range(view.dim())):
        return view
    pairs = _axis_pairs(part)
    without_unit_axes = view[_index_of_axes(part.target.shape, 0)]
    in_source_order = without_unit_axes.permute(
        sorted(range(len(pairs)), key=lambda axis: pairs[axis][1])
    )
    return in_source_order[_index_of_axes(part.source.shape, None)]


def change(values: torch.Tensor, factor: float, add: float) -> None:
    """Multiply values in place, and add a number."""
    if factor != 1.0:
        values.mul_(factor)
    if add:
        values.add_(add)


def _index_of_axes(shape: tuple[int, ...], unit_index: int | None) -> tuple[Any, ...]:
    """Return an index of all axes, `unit_index` for unit axes."""
    index: list[Any] = [slice(None)] * len(shape)
    for axis, size in enumerate(shape):
        if size == 1:
            index[axis] = unit_index
    return tuple(index)


def crop(mapped: MappedTensor, region: Region) -> MappedTensor:
    """Return a region of a target tensor only.

    Earlier trimmed regions are not carried over.
    """
    parts = tuple(
        _restrict(part, target, target.relative_to(region.offset))
        for part, target in _cut(mapped, region)
    )
    return MappedTensor(region.shape, mapped.dtype, parts)


def crop_axis(mapped: MappedTensor, axis: int, start: int, stop: int) -> MappedTensor:
    """Return the indices [start, stop) of one axis."""
    origin = mapped.origin
    shape = mapped.shape
    return crop(
        mapped, Region(with_item(origin, axis, start), with_item(shape, axis, stop - start))
    )


def trim_axis(mapped: MappedTensor, axis: int, size: int) -> MappedTensor:
    """Return the first `size` indices of an axis; note the trimmed regions.

    These are the source regions behind the others.
    """
    cut = tuple(
        (part.key, part.source) for part in crop_axis(mapped, axis, size, mapped.shape[axis]).parts
    )
    return replace(crop_axis(mapped, axis, 0, size), trimmed=mapped.trimmed + cut)


def permute(mapped: MappedTensor, order: Sequence[int]) -> MappedTensor:
    """Put the axes of a target tensor in another order.

    Axis `j` of the result is axis `order[j]`.
    """
    parts = []
    for part in mapped.parts:
        source_axes = dict(_axis_pairs(part))
        moved = [source_axes[axis] for axis in order if axis in source_axes]
        source_order = _complete_order(len(part.order), moved)
        parts.append(_with_axes(part, order)._replace(order=source_order))
    return MappedTensor(_pick(mapped.shape, order), mapped.dtype, tuple(parts), mapped.trimmed)


def drop_axis(mapped: MappedTensor, axis: int) -> MappedTensor:
    """Take out an axis of size 1."""
    axes = [other for other in range(len(mapped.shape)) if other != axis]
    parts = tuple(_with_axes(part, axes) for part in mapped.parts)
    return MappedTensor(_pick(mapped.shape, axes), mapped.dtype, parts, mapped.trimmed)


def reshape(mapped: MappedTensor, shape: Sequence[int]) -> MappedTensor:
    """Give a target tensor another shape of the same size.

    Elements keep their order (row-major). Where axes are merged or divided, each index along the
    outer ones becomes a part of its own.
    """
    parts = []
    for part in single_rows(mapped):
        for old, new in reshaped_regions(part.target, mapped.shape, tuple(shape)):
            parts.append(_restrict(part, old, new))
    return MappedTensor(tuple(shape), mapped.dtype, tuple(parts), mapped.trimmed)


def interleave(mapped: MappedTensor, axis: int, num: int) -> MappedTensor:
    """Interleave the rows of `num` consecutive pieces of an axis."""
    rows = mapped.shape[axis] // num
    parts: list[RegionCopy] = []
    for index in range(num):
        for part in crop_axis(mapped, axis, index * rows, index * rows + rows).parts:
            offset, shape = part.target
            step = part.target_step or (1,) * len(mapped.shape)
            target = Region(with_item(offset, axis, offset[axis] * num + index), shape)
            parts.append(
                part._replace(target=target, target_step=with_item(step, axis, step[axis] * num))
            )
    return MappedTensor(mapped.shape, mapped.dtype, tuple(parts), mapped.trimmed)


def add(mapped: MappedTensor, value: float) -> MappedTensor:
    """Add a number to all elements."""
    parts = tuple(part._replace(add=part.add + value) for part in mapped.parts)
    return MappedTensor(mapped.shape, mapped.dtype, parts, mapped.trimmed)


def single_rows(mapped: MappedTensor) -> Iterator[RegionCopy]:
    """Cut parts with separate elements into parts of adjacent elements."""
    for part in mapped.parts:
        if not part.target_step:
            yield part
            continue
        for row, _ in adjacent_rows(part.target, part.target_step):
            yield _restrict(part, row, row)._replace(target_step=())


def adjacent_rows(region: Region, steps: tuple[int, ...]) -> Iterator[tuple[Region, Region]]:
    """Cut elements that lie apart into rows of adjacent ones.

    Yield each row, and its region among the elements.
    """
    counts = []
    sizes = []
    for size, step in zip(region.shape, steps, strict=True):
        counts.append(size if step > 1 else 1)
        sizes.append(1 if step > 1 else size)
    for index in itertools.product(*map(range, counts)):
        starts = zip(region.offset, index, steps, strict=True)
        offset = tuple(first + number * step for first, number, step in starts)
        yield Region(offset, tuple(sizes)), Region(index, tuple(sizes))


def compose(mapped: MappedTensor, sources: Mapping[str, MappedTensor], dtype: str) -> MappedTensor:
    """Trace a target back through its sources.

    `mapped` is made of `sources`, which are targets themselves, of one `dtype`.
    """
    parts: list[RegionCopy] = []
    for whole_part in mapped.parts:
        if (key := same_as(sources[whole_part.key])) is not None:
            parts.append(whole_part._replace(key=key))
        else:
            alone = replace(mapped, parts=(whole_part,))
            for part in single_rows(alone):
                parts += _traced(part, sources[part.key])
    trimmed: Cut = ()
    for key in dict.fromkeys(part.key for part in mapped.parts):
        trimmed += sources[key].trimmed
    return MappedTensor(mapped.shape, dtype, tuple(parts), trimmed, mapped.padding)


def _traced(part: RegionCopy, source: MappedTensor) -> Iterator[RegionCopy]:
    """Trace one part back through its source, which is a target itself."""
    if part.source_step:
        raise InvalidShardingError(
            f"Elements of {part.key!r} that lie apart are taken from other tensors by an earlier "
            "rule: leave that rule out, and export in two steps."
        )
    piece = permute(crop(source, part.source), part.order)
    for inner in reshape(piece, part.target.shape).parts:
        offset = tuple(a + b for a, b in zip(part.target.offset, inner.target.offset, strict=True))
        target = Region(offset, inner.target.shape)
        total = inner.add * part.factor + part.add
        yield inner._replace(target=target, add=total, factor=inner.factor * part.factor)


def same_as(mapped: MappedTensor) -> str | None:
    """Return the key of the one tensor that a target copies whole.

    The name may be another one.
    """
    if len(mapped.parts) != 1 or mapped.trimmed or mapped.padding:
        return None
    part = mapped.parts[0]
    is_whole = part.source == part.target and part.target.shape == mapped.shape
    has_order = part.order == tuple(range(len(mapped.shape)))
    if is_whole and has_order and (part.factor, part.add) == UNCHANGED:
        return part.key
    return None


def join(pieces: Sequence[MappedTensor], axis: int) -> MappedTensor:
    """Join targets along an axis.

    They agree in dtype and in all other axes.
    """
    parts: list[RegionCopy] = []
    trimmed: Cut = ()
    end = 0
    for piece in pieces:
        for part in piece.parts:
            offset, shape = part.target
            place = Region(with_item(offset, axis, offset[axis] + end), shape)
            parts.append(part._replace(target=place))
        end += piece.shape[axis]
        trimmed += piece.trimmed
    return MappedTensor(
        with_item(pieces[0].shape, axis, end), pieces[0].dtype, tuple(parts), trimmed
    )


def check_inside(region: Region, shape: tuple[int, ...], key: str | None = None) -> None:
    """Refuse a region outside of its tensor."""
    spans = zip(*region, shape, strict=True) if len(region.shape) == len(shape) else [(-1, 0, 0)]
    if any(not 0 <= offset <= offset + size <= whole_size for offset, size, whole_size in spans):
        tensor = "the tensor" if key is None else repr(key)
        raise InvalidShardingError(
            f"Region {region} does not lie inside {tensor} of shape {shape}: correct one of them."
        )


def _axis_pairs(part: RegionCopy) -> list[tuple[int, int]]:
    """Pair the equal axes of target and source, in target order.

    Axes of size 1 are left out.
    """
    target_axes = [axis for axis, size in enumerate(part.target.shape) if size != 1]
    source_axes = [axis for axis in part.order if part.source.shape[axis] != 1]
    return list(zip(target_axes, source_axes, strict=True))


def _complete_order(ndim: int, moved: list[int]) -> tuple[int, ...]:
    """Add the axes of size 1 to an order of the rest.

    An order that moves nothing becomes the identity.
    """
    if moved == sorted(moved):
        return tuple(range(ndim))
    return (*moved, *(axis for axis in range(ndim) if axis not in moved))


def _restrict(part: RegionCopy, target: Region, place: Region) -> RegionCopy:
    """Cut a part to a region of its target, moved to `place`."""
    if target == part.target:
        if place == target:
            return part
        return part._replace(target=place)
    offset = list(part.source.offset)
    shape = list(part.source.shape)
    ones = (1,) * max(len(part.target.shape), len(shape))
    target_step = part.target_step or ones
    source_step = part.source_step or ones
    for target_axis, source_axis in _axis_pairs(part):
        index = target.offset[target_axis] - part.target.offset[target_axis]
        index //= target_step[target_axis]
        offset[source_axis] += index * source_step[source_axis]
        shape[source_axis] = target.shape[target_axis]
    order = _complete_order(len(shape), [axis for axis in part.order if shape[axis] != 1])
    source = Region(tuple(offset), tuple(shape))
    return part._replace(target=place, source=source, order=order)


def inverse_part(name: str, part: RegionCopy) -> RegionCopy:
    """Return the way back of a part of the target `name`."""
    pairs = sorted(_axis_pairs(part), key=lambda pair: pair[1])
    order = _complete_order(len(part.target.shape), [target_axis for target_axis, _ in pairs])
    return RegionCopy(
        part.source,
        name,
        part.target,
        order,
        part.source_step,
        part.target_step,
        -part.add / part.factor,
        1.0 / part.factor,
    )


def _with_axes(part: RegionCopy, axes: Sequence[int]) -> RegionCopy:
    target = Region(_pick(part.target.offset, axes), _pick(part.target.shape, axes))
    return part._replace(
        target=target, target_step=part.target_step and _pick(part.target_step, axes)
    )


def _pick(values: tuple[int, ...], axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(values[axis] for axis in axes)

"""Tensors that are pieced together from regions of other tensors: values and pure functions, no
data.

A mapped tensor names, for every element of a *target* tensor, the element of a *source* tensor that
it is a copy of. It does so in regions, so that any region of the target can be read from regions of
the sources alone.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distckpt._base.errors import InvalidShardingError
from distckpt._base.lazy import torch
from distckpt._base.messages import summarize_keys
from distckpt._geometry.region import (
    IntArray,
    Region,
    TilingFault,
    covering,
    find_tiling_faults,
    intersect,
    intersect_many,
    regions_to_arrays,
    reshaped_regions,
    whole,
    with_item,
)

_FEW_PARTS = 8
"""Up to this number, intersecting one by one is faster than as arrays."""


class RegionCopy(NamedTuple):
    """A region `target` of a target tensor that is a copy of the region `source` of the source
    tensor `key`.

    To get the target: take the source, put its axes in the order `order`, then drop and add axes of
    size 1 until it has the shape of the target.

    Attributes:
        order: all source axes, in the order in which they appear in the target. Axes along which
            the source has size 1 stand anywhere. `(0, 1, ..., n-1)` when no axis moves.
        target_step: how far the elements of the target region lie apart along each axis; () for 1
            along all.
        source_step: the same for the source region.
        add: what is added to the elements.
    """

    target: Region
    key: str
    source: Region
    order: tuple[int, ...]
    target_step: tuple[int, ...] = ()
    source_step: tuple[int, ...] = ()
    add: float = 0.0


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its data: its global `shape`, and the safetensors name of its `dtype`."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class MappedTensor:
    """A target tensor that is pieced together from regions of source tensors.

    Attributes:
        shape: of the target tensor.
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
    trimmed: tuple[tuple[str, Region], ...] = ()
    padding: tuple[Region, ...] = ()
    is_copy: bool = False

    @property
    def origin(self) -> tuple[int, ...]:
        """The offset of the first element."""
        return (0,) * len(self.shape)

    @cached_property
    def target_arrays(self) -> tuple[IntArray, IntArray]:
        """Offsets and shapes of the parts in the target, arrays of shape (number of parts, number
        of axes).
        """
        return regions_to_arrays(
            [covering(part.target, part.target_step) for part in self.parts], len(self.shape)
        )


def identity(key: str, info: TensorSpec) -> MappedTensor:
    """Map a tensor to itself."""
    shape, region = tuple(info.shape), whole(info.shape)
    parts = () if 0 in shape else (RegionCopy(region, key, region, tuple(range(len(shape)))),)
    return MappedTensor(shape, info.dtype, parts)


def resolve(mapped: MappedTensor, region: Region) -> list[tuple[Region, RegionCopy]]:
    """Find what a region of a target tensor is made of.

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


def _cut(mapped: MappedTensor, region: Region) -> list[tuple[RegionCopy, Region]]:
    """Return the parts that have elements in a region, with the part of their targets in it."""
    _check_inside(region, mapped.shape)
    found = []
    for part, target in _common_with(mapped, region):
        if part.target_step:
            target = _on_steps(part, target)
        if target.num_elements:
            found.append((part, target))
    return found


def _common_with(mapped: MappedTensor, region: Region) -> list[tuple[RegionCopy, Region]]:
    """Return the parts that cover elements of a region, with what they cover of it."""
    if len(mapped.parts) > _FEW_PARTS:
        rows, offsets, shapes = intersect_many(*mapped.target_arrays, *region)
        regions = map(Region, map(tuple, offsets.tolist()), map(tuple, shapes.tolist()))
        return [(mapped.parts[row], common) for row, common in zip(rows, regions, strict=True)]
    found = []
    for part in mapped.parts:
        common = intersect(covering(part.target, part.target_step), region)
        if common is not None:
            found.append((part, common))
    return found


def resolve_padding(mapped: MappedTensor, region: Region) -> list[Region]:
    """Find the regions inside a region of a target tensor that are filled with zeros, see
    `resolve`.
    """
    _check_inside(region, mapped.shape)
    common = (intersect(region, padding) for padding in mapped.padding)
    return [piece.relative_to(region.offset) for piece in common if piece is not None]


def _on_steps(part: RegionCopy, common: Region) -> Region:
    """Return the elements of a part inside a region that cuts what it covers."""
    offset, shape = [], []
    for first, step, low, num in zip(part.target.offset, part.target_step, *common, strict=True):
        start = low + (first - low) % step
        offset.append(start)
        shape.append(max(-(-(low + num - start) // step), 0))
    return Region(tuple(offset), tuple(shape))


def target_view(tensor: torch.Tensor, place: Region, part: RegionCopy) -> torch.Tensor:
    """View the memory of a tensor at the place that `resolve` found for a part, with the shape and
    axes of its source.

    Writing to the view writes to `tensor`. ValueError if `place` does not have the shape of the
    part, or lies outside the tensor.
    """
    view = tensor[place.slices(part.target_step)]
    if tuple(view.shape) != part.target.shape:
        raise ValueError(
            f"a view of shape {tuple(view.shape)} was given for a part of shape {part.target.shape}"
        )
    if part.source.shape == part.target.shape and part.order == tuple(range(view.dim())):
        return view
    pairs = _axis_pairs(part)
    without_unit_axes = view[tuple(0 if size == 1 else slice(None) for size in part.target.shape)]
    in_source_order = without_unit_axes.permute(
        sorted(range(len(pairs)), key=lambda axis: pairs[axis][1])
    )
    return in_source_order[tuple(None if size == 1 else slice(None) for size in part.source.shape)]


def crop(mapped: MappedTensor, region: Region) -> MappedTensor:
    """Keep a region of a target tensor only. What was trimmed before is not carried over."""
    parts = tuple(
        _restrict(part, target, target.relative_to(region.offset))
        for part, target in _cut(mapped, region)
    )
    return MappedTensor(region.shape, mapped.dtype, parts)


def crop_axis(mapped: MappedTensor, axis: int, start: int, stop: int) -> MappedTensor:
    """Keep the indices [start, stop) of one axis."""
    origin, shape = mapped.origin, mapped.shape
    return crop(
        mapped, Region(with_item(origin, axis, start), with_item(shape, axis, stop - start))
    )


def trim_axis(mapped: MappedTensor, axis: int, size: int) -> MappedTensor:
    """Keep the first `size` indices of an axis; note the source regions behind the others."""
    cut = tuple(
        (part.key, part.source) for part in crop_axis(mapped, axis, size, mapped.shape[axis]).parts
    )
    return replace(crop_axis(mapped, axis, 0, size), trimmed=mapped.trimmed + cut)


def permute(mapped: MappedTensor, order: Sequence[int]) -> MappedTensor:
    """Put the axes of a target tensor in another order: axis `j` of the result is axis
    `order[j]`.
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
    kept = [a for a in range(len(mapped.shape)) if a != axis]
    parts = tuple(_with_axes(part, kept) for part in mapped.parts)
    return MappedTensor(_pick(mapped.shape, kept), mapped.dtype, parts, mapped.trimmed)


def reshape(mapped: MappedTensor, shape: Sequence[int]) -> MappedTensor:
    """Give a target tensor another shape of as many elements, which keep their order (row-major).

    Where axes are merged or divided, each index along the outer ones becomes a part of its own.
    """
    parts = tuple(
        _restrict(part, old, new)
        for part in _single_rows(mapped)
        for old, new in reshaped_regions(part.target, mapped.shape, tuple(shape))
    )
    return MappedTensor(tuple(shape), mapped.dtype, parts, mapped.trimmed)


def interleave(mapped: MappedTensor, axis: int, num: int) -> MappedTensor:
    """Let the rows of `num` pieces that follow one another along an axis take turns."""
    rows = mapped.shape[axis] // num
    parts: list[RegionCopy] = []
    for index in range(num):
        for part in crop_axis(mapped, axis, index * rows, index * rows + rows).parts:
            (offset, shape), step = part.target, part.target_step or (1,) * len(mapped.shape)
            target = Region(with_item(offset, axis, offset[axis] * num + index), shape)
            parts.append(
                part._replace(target=target, target_step=with_item(step, axis, step[axis] * num))
            )
    return MappedTensor(mapped.shape, mapped.dtype, tuple(parts), mapped.trimmed)


def add(mapped: MappedTensor, value: float) -> MappedTensor:
    """Add a number to all elements."""
    parts = tuple(part._replace(add=part.add + value) for part in mapped.parts)
    return MappedTensor(mapped.shape, mapped.dtype, parts, mapped.trimmed)


def _single_rows(mapped: MappedTensor) -> Iterator[RegionCopy]:
    """Cut parts whose elements lie apart into ones whose elements do not."""
    for part in mapped.parts:
        apart = [axis for axis, step in enumerate(part.target_step) if step > 1]
        if apart:
            yield from _rows_of(part, apart)
        else:
            yield part


def _rows_of(part: RegionCopy, apart: Sequence[int]) -> Iterator[RegionCopy]:
    """Cut a part into one for each combination of indices along some axes."""
    (first, shape), steps = part.target, part.target_step
    row_shape = tuple(1 if axis in apart else size for axis, size in enumerate(shape))
    for index in itertools.product(*(range(shape[axis]) for axis in apart)):
        offset = first
        for axis, number in zip(apart, index, strict=True):
            offset = with_item(offset, axis, first[axis] + number * steps[axis])
        row = Region(offset, row_shape)
        yield _restrict(part, row, row)._replace(target_step=())


def compose(mapped: MappedTensor, sources: Mapping[str, MappedTensor]) -> MappedTensor:
    """Trace a target back: `mapped` is made of `sources`, which are targets themselves."""
    parts: list[RegionCopy] = []
    for part in _single_rows(mapped):
        if (key := _same_as(sources[part.key])) is not None:
            parts.append(part if key == part.key else part._replace(key=key))
            continue
        piece = permute(crop(sources[part.key], part.source), part.order)
        for inner in reshape(piece, part.target.shape).parts:
            offset = tuple(
                a + b for a, b in zip(part.target.offset, inner.target.offset, strict=True)
            )
            parts.append(
                inner._replace(target=Region(offset, inner.target.shape), add=inner.add + part.add)
            )
    trimmed = tuple(
        cut
        for key in dict.fromkeys(part.key for part in mapped.parts)
        for cut in sources[key].trimmed
    )
    return MappedTensor(mapped.shape, mapped.dtype, tuple(parts), trimmed)


def _same_as(mapped: MappedTensor) -> str | None:
    """Return the key of the tensor that a target is a copy of as a whole, under whatever name."""
    if len(mapped.parts) != 1 or mapped.trimmed or mapped.padding:
        return None
    part = mapped.parts[0]
    is_whole = part.source == part.target and part.target.shape == mapped.shape
    return (
        part.key
        if is_whole and not part.add and part.order == tuple(range(len(mapped.shape)))
        else None
    )


def join(pieces: Sequence[MappedTensor], axis: int) -> MappedTensor:
    """Join targets that agree in dtype and in all other axes along an axis."""
    parts: list[RegionCopy] = []
    end = 0
    for piece in pieces:
        parts.extend(_moved(part, axis, end) if end else part for part in piece.parts)
        end += piece.shape[axis]
    trimmed = tuple(cut for piece in pieces for cut in piece.trimmed)
    return MappedTensor(
        with_item(pieces[0].shape, axis, end), pieces[0].dtype, tuple(parts), trimmed
    )


def _moved(part: RegionCopy, axis: int, distance: int) -> RegionCopy:
    offset, shape = part.target
    return part._replace(target=Region(with_item(offset, axis, offset[axis] + distance), shape))


def invert(
    mapped: Mapping[str, MappedTensor], tensors: Mapping[str, TensorSpec]
) -> dict[str, MappedTensor]:
    """Invert a mapping: make the source tensors `tensors` of the target tensors that `apply_rules`
    made of them.

    Returns:
        Source tensors by key; the parts refer to names of targets. What was trimmed is padding.
        Keys of which no target holds anything (they were dropped) are left out.

    Raises:
        InvalidShardingError: some elements of a source tensor, not all, are in no target, or some
            are in several; or `tensors` are not the tensors that were mapped.
    """
    parts: defaultdict[str, list[RegionCopy]] = defaultdict(list)
    padding: defaultdict[str, list[Region]] = defaultdict(list)
    for name, tensor in mapped.items():
        if tensor.is_copy:
            continue
        for part in tensor.parts:
            parts[part.key].append(_inverse(name, part))
        for key, region in tensor.trimmed:
            padding[key].append(region)
    unknown = (parts.keys() | padding.keys()) - tensors.keys()
    if unknown:
        raise InvalidShardingError(
            f"The mapping reads {summarize_keys(unknown)}, which `tensors` does not name: give the "
            "tensors that the rules were applied to."
        )
    inverse = {
        key: MappedTensor(
            tuple(info.shape),
            info.dtype,
            tuple(sorted(parts[key], key=lambda part: part.target.offset)),
            padding=tuple(sorted(padding[key])),
        )
        for key, info in tensors.items()
        if key in parts or key in padding or 0 in info.shape
    }
    _check_tiled(inverse)
    return inverse


def _check_tiled(mapped: Mapping[str, MappedTensor]) -> None:
    by_ndim: defaultdict[int, list[str]] = defaultdict(list)
    for key, tensor in mapped.items():
        by_ndim[len(tensor.shape)].append(key)
    for ndim, keys in by_ndim.items():
        regions = [_regions(key, mapped[key]) for key in keys]
        offsets, shapes = regions_to_arrays(list(itertools.chain(*regions)), ndim)
        ids = np.repeat(np.arange(len(keys)), [len(inside) for inside in regions])
        global_shapes = np.array([mapped[key].shape for key in keys], np.int64)
        faults = find_tiling_faults(ids, offsets, shapes, global_shapes.reshape(len(keys), ndim))
        if faults:
            raise _not_tiled(keys[faults[0].tensor], faults[0])


def _regions(key: str, mapped: MappedTensor) -> list[Region]:
    """Return the regions of a target: of its parts and of its padding."""
    regions = [*(part.target for part in _single_rows(mapped)), *mapped.padding]
    for region in regions:
        _check_inside(region, mapped.shape, key)
    return regions


def _not_tiled(key: str, fault: TilingFault) -> InvalidShardingError:
    where = f"Element {fault.element} of {key!r}"
    if fault.num_covers > 1:
        return InvalidShardingError(
            f"{where} is in {fault.num_covers} places of the targets, so the way back is "
            "ambiguous: leave all but one out of the mapping."
        )
    return InvalidShardingError(
        f"{where} is in no target, so there is no way back: a rule dropped a piece of the tensor. "
        "Cut padding off with `Trim`, whose inverse fills in zeros, and drop whole tensors only."
    )


def _check_inside(region: Region, shape: tuple[int, ...], key: str | None = None) -> None:
    spans = zip(*region, shape, strict=True) if len(region.shape) == len(shape) else [(-1, 0, 0)]
    if any(not 0 <= offset <= offset + size <= whole_size for offset, size, whole_size in spans):
        tensor = "the tensor" if key is None else repr(key)
        raise InvalidShardingError(
            f"Region {region} does not lie inside {tensor} of shape {shape}: correct one of them."
        )


def _axis_pairs(part: RegionCopy) -> list[tuple[int, int]]:
    """Pair the axes that are the same in target and source, in target order, without axes of
    size 1.
    """
    target_axes = [axis for axis, size in enumerate(part.target.shape) if size != 1]
    source_axes = [axis for axis in part.order if part.source.shape[axis] != 1]
    return list(zip(target_axes, source_axes, strict=True))


def _complete_order(ndim: int, moved: list[int]) -> tuple[int, ...]:
    """Add the axes of size 1 to an order of the others, so that an order that moves nothing is the
    identity.
    """
    if moved == sorted(moved):
        return tuple(range(ndim))
    return (*moved, *(axis for axis in range(ndim) if axis not in moved))


def _restrict(part: RegionCopy, target: Region, place: Region) -> RegionCopy:
    """Cut a part down to a region inside its target, and move that to `place`."""
    if target == part.target:
        return part if place == target else part._replace(target=place)
    offset, shape = list(part.source.offset), list(part.source.shape)
    for target_axis, source_axis in _axis_pairs(part):
        index = target.offset[target_axis] - part.target.offset[target_axis]
        index //= part.target_step[target_axis] if part.target_step else 1
        offset[source_axis] += index * (part.source_step[source_axis] if part.source_step else 1)
        shape[source_axis] = target.shape[target_axis]
    order = _complete_order(len(shape), [axis for axis in part.order if shape[axis] != 1])
    source = Region(tuple(offset), tuple(shape))
    return RegionCopy(place, part.key, source, order, part.target_step, part.source_step, part.add)


def _inverse(name: str, part: RegionCopy) -> RegionCopy:
    pairs = sorted(_axis_pairs(part), key=lambda pair: pair[1])
    order = _complete_order(len(part.target.shape), [target_axis for target_axis, _ in pairs])
    return RegionCopy(
        part.source, name, part.target, order, part.source_step, part.target_step, -part.add
    )


def _with_axes(part: RegionCopy, axes: Sequence[int]) -> RegionCopy:
    target = Region(_pick(part.target.offset, axes), _pick(part.target.shape, axes))
    return part._replace(
        target=target, target_step=part.target_step and _pick(part.target_step, axes)
    )


def _pick(values: tuple[int, ...], axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(values[axis] for axis in axes)

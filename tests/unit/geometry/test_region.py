from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distckpt._geometry.region import (
    Region,
    find_tiling_faults,
    flat_range_regions,
    flat_start,
    intersect,
    intersect_many,
    num_outer_axes,
    step_over,
    whole,
)
from distckpt._geometry.units import cut_region


@st.composite
def regions_in(draw, shape, min_size=0):
    """Draw a region inside a tensor of a shape."""
    offset, extent = [], []
    for size in shape:
        first = draw(st.integers(0, max(size - min_size, 0)))
        offset.append(first)
        extent.append(draw(st.integers(min(min_size, size - first), size - first)))
    return Region(tuple(offset), tuple(extent))


def shapes(min_side=0, max_side=4, max_ndim=4, min_ndim=0):
    return st.lists(st.integers(min_side, max_side), min_size=min_ndim, max_size=max_ndim).map(
        tuple
    )


def mask(shape, region):
    covered = np.zeros(shape, np.int64)
    covered[region.slices()] = 1
    return covered


def test_regions_describe_themselves():
    region = Region((2, 0), (3, 4))
    assert str(region) == "[2:5, 0:4]"
    assert region.num_elements == 12
    assert region.relative_to((1, 0)) == Region((1, 0), (3, 4))
    assert whole((3, 4)) == Region((0, 0), (3, 4))
    assert Region((), ()).num_elements == 1
    assert str(Region((), ())) == "[]"


@given(st.data())
def test_intersection_is_where_both_are(data):
    shape = data.draw(shapes())
    first, second = data.draw(regions_in(shape)), data.draw(regions_in(shape))
    both = mask(shape, first) * mask(shape, second)
    common = intersect(first, second)
    assert (common is None) == (both.sum() == 0)
    if common is not None:
        assert np.array_equal(mask(shape, common), both)


@given(st.data())
def test_intersecting_with_many_agrees_with_intersecting_with_each(data):
    shape = data.draw(shapes())
    region = data.draw(regions_in(shape))
    others = data.draw(st.lists(regions_in(shape), max_size=5))
    offsets = np.array([r.offset for r in others], np.int64).reshape(len(others), len(shape))
    extents = np.array([r.shape for r in others], np.int64).reshape(len(others), len(shape))
    rows, hit_offsets, hit_shapes = intersect_many(offsets, extents, *region)
    found = {
        row: Region(tuple(offset), tuple(extent))
        for row, offset, extent in zip(
            rows.tolist(), hit_offsets.tolist(), hit_shapes.tolist(), strict=True
        )
    }
    expected = {row: intersect(region, other) for row, other in enumerate(others)}
    assert found == {row: common for row, common in expected.items() if common is not None}


@given(st.data())
def test_flat_range_is_cut_into_few_contiguous_regions_in_order(data):
    shape = data.draw(shapes(min_side=1))
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(0, total))
    pieces = list(flat_range_regions(shape, start, stop))
    index = np.arange(total).reshape(shape)
    picked = [i for piece in pieces for i in index[piece.slices()].reshape(-1).tolist()]
    assert picked == list(range(start, stop))
    assert len(pieces) <= max(1, 2 * len(shape) - 1)
    assert all(num_outer_axes(shape, piece) == 0 for piece in pieces)
    assert all(flat_start(shape, piece) == index[piece.slices()].reshape(-1)[0] for piece in pieces)


def test_flat_range_of_an_empty_tensor_is_nothing():
    assert list(flat_range_regions((0, 3), 0, 0)) == []
    assert list(flat_range_regions((3, 0), 0, 0)) == []


@given(st.data())
def test_pieces_of_a_region_are_within_the_limit_and_cover_it_in_order(data):
    shape = data.draw(shapes(max_side=7))
    region = data.draw(regions_in(shape))
    limit = data.draw(st.integers(1, 20))
    pieces = list(cut_region(region, limit))
    index = np.arange(math.prod(shape)).reshape(shape)
    in_order = np.concatenate([index[piece.slices()].reshape(-1) for piece in pieces])
    assert np.array_equal(in_order, index[region.slices()].reshape(-1))
    assert all(piece.num_elements <= limit for piece in pieces)
    assert all(piece.num_elements for piece in pieces) or pieces == [region]


@given(st.data())
def test_pieces_are_whole_rows_and_as_many_as_fit(data):
    rows, columns = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 5))
    limit = data.draw(st.integers(columns, 40))
    pieces = list(cut_region(whole((rows, columns)), limit))
    assert {piece.shape[1] for piece in pieces} == {columns}
    assert {piece.shape[0] for piece in pieces[:-1]} <= {limit // columns}


@settings(max_examples=200)
@given(st.data())
def test_pieces_begin_at_multiples(data):
    shape = data.draw(shapes(min_side=1, max_side=12, min_ndim=1))
    region = data.draw(regions_in(shape, min_size=1))
    limit, multiple = data.draw(st.sampled_from([1, 8, 50])), data.draw(st.sampled_from([1, 6, 16]))
    pieces = list(cut_region(region, limit, shape=shape, multiple=multiple))
    index = np.arange(math.prod(shape)).reshape(shape)
    in_order = np.concatenate([index[piece.slices()].reshape(-1) for piece in pieces])
    assert np.array_equal(in_order, index[region.slices()].reshape(-1))
    assert all(flat_start(shape, piece) % multiple == 0 for piece in pieces[1:])
    if multiple == 1:
        assert pieces == list(cut_region(region, limit))


@given(st.data())
def test_regions_that_overlap_are_cut_at_the_same_rows(data):
    rows, limit = data.draw(st.integers(1, 50)), data.draw(st.integers(2, 20))
    edges = []
    for _ in range(2):
        region = data.draw(regions_in((rows,), min_size=1))
        edges.append({piece.offset[0] for piece in cut_region(region, limit)} - {region.offset[0]})
    assert all(edge % limit == 0 for edge in edges[0] | edges[1])


@given(st.data())
def test_stepping_over_axes_gives_one_piece_for_each_index(data):
    shape = data.draw(shapes())
    region = data.draw(regions_in(shape))
    num_axes = data.draw(st.integers(0, len(shape)))
    pieces = list(step_over(region, num_axes))
    assert len(pieces) == math.prod(region.shape[:num_axes])
    assert all(piece.shape == (1,) * num_axes + region.shape[num_axes:] for piece in pieces)
    assert np.array_equal(
        sum((mask(shape, piece) for piece in pieces), np.zeros(shape, np.int64)),
        mask(shape, region),
    )
    assert [piece.offset for piece in pieces] == sorted(piece.offset for piece in pieces)


@given(st.data())
def test_runs_below_the_outer_axes_are_contiguous_and_as_long_as_possible(data):
    shape = data.draw(shapes(min_side=1, min_ndim=1))
    region = data.draw(regions_in(shape, min_size=1))
    outer = num_outer_axes(shape, region)
    index = np.arange(math.prod(shape)).reshape(shape)[region.slices()]

    def runs_are_contiguous(num_axes):
        runs = index.reshape(math.prod(region.shape[:num_axes]), -1)
        return bool((np.diff(runs, axis=1) == 1).all())

    assert runs_are_contiguous(outer)
    # Fewer axes to step over would do only where the axis left out has one index.
    assert outer == 0 or not runs_are_contiguous(outer - 1) or region.shape[outer - 1] == 1
    assert not runs_are_contiguous(0) or outer == 0


@st.composite
def nearly_tiled(draw, shape):
    """Draw regions that mostly tile a tensor: a random grid, from which some cells are missing,
    doubled or moved.
    """
    cuts = [sorted(draw(st.lists(st.integers(0, n), max_size=3))) for n in shape]
    edges = [[0, *inner, n] for inner, n in zip(cuts, shape, strict=True)]
    cells = [
        Region(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))
        for spans in itertools.product(*(itertools.pairwise(e) for e in edges))
    ]
    copies = [draw(st.sampled_from([1, 1, 1, 1, 1, 1, 0, 2])) for _ in cells]
    extra = draw(st.lists(regions_in(shape), max_size=1)) if draw(st.booleans()) else []
    return [cell for cell, n in zip(cells, copies, strict=True) for _ in range(n)] + extra


@settings(max_examples=120)
@given(st.data())
def test_tiling_faults_are_those_that_counting_finds(data):
    ndim = data.draw(st.integers(0, 4))
    global_shapes = data.draw(
        st.lists(shapes(max_ndim=ndim, min_ndim=ndim), min_size=1, max_size=3)
    )
    regions, tensor_ids, counts = [], [], []
    for tensor, shape in enumerate(global_shapes):
        pieces = data.draw(nearly_tiled(shape))
        counts.append(sum((mask(shape, piece) for piece in pieces), np.zeros(shape, np.int64)))
        regions += pieces
        tensor_ids += [tensor] * len(pieces)
    order = data.draw(st.permutations(range(len(regions))))
    faults = find_tiling_faults(
        np.array([tensor_ids[i] for i in order], np.int64),
        np.array([regions[i].offset for i in order], np.int64).reshape(len(regions), ndim),
        np.array([regions[i].shape for i in order], np.int64).reshape(len(regions), ndim),
        np.array(global_shapes, np.int64).reshape(len(global_shapes), ndim),
    )
    assert [fault.tensor for fault in faults] == [
        t for t, count in enumerate(counts) if (count != 1).any()
    ]
    for fault in faults:
        # The first wrong element in row-major order.
        count = counts[fault.tensor]
        assert fault.element == tuple(np.argwhere(count != 1)[0].tolist())
        assert fault.num_covers == count[fault.element]


@pytest.mark.parametrize("rows", [2**40, 2**59])
def test_tiling_is_checked_without_counting_elements(rows):
    half = rows // 2
    offsets = np.array([[0, 0], [half, 0]], np.int64)
    extents = np.array([[half, 2], [half, 2]], np.int64)
    global_shapes = np.array([[rows, 2]], np.int64)
    ids = np.zeros(2, np.int64)
    assert find_tiling_faults(ids, offsets, extents, global_shapes) == []
    extents[0, 0] -= 1
    (fault,) = find_tiling_faults(ids, offsets, extents, global_shapes)
    assert (fault.element, fault.num_covers) == ((half - 1, 0), 0)

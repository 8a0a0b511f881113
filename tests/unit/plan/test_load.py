from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._plan import load
from distckpt._plan.load import Request, plan_load
from distckpt.megatron.core import LoadMismatchError
from tests.support.manifests import manifest_of


@st.composite
def grids(draw, shape):
    cuts = [sorted(draw(st.lists(st.integers(0, n), max_size=2))) for n in shape]
    edges = [[0, *inner, n] for inner, n in zip(cuts, shape, strict=True)]
    return [
        Region(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))
        for spans in itertools.product(*(itertools.pairwise(e) for e in edges))
    ]


@st.composite
def regions_in(draw, shape):
    offset = tuple(draw(st.integers(0, size)) for size in shape)
    return Region(
        offset, tuple(draw(st.integers(0, n - o)) for o, n in zip(offset, shape, strict=True))
    )


def carry_out(copies, manifest, tensors, requests):
    """Execute copies with numpy; -1 where nothing was copied."""
    results = [np.full(request.region.shape, -1, np.int64) for request in requests]
    for copy in copies:
        key = manifest.keys[manifest.key_ids[copy.chunk]]
        assert key == requests[copy.request].key
        chunk = tensors[key][manifest.chunk_region(copy.chunk).slices()]
        target = results[copy.request][copy.target.slices()]
        assert (target == -1).all()
        results[copy.request][copy.target.slices()] = chunk[copy.source.slices()]
    return results


@settings(max_examples=100)
@given(st.data())
def test_copies_make_up_the_requested_regions(data):
    shapes = {key: tuple(data.draw(st.lists(st.integers(0, 5), max_size=4))) for key in "abc"}
    tensors = {key: np.arange(math.prod(shape)).reshape(shape) for key, shape in shapes.items()}
    manifest = manifest_of({key: (shape, data.draw(grids(shape))) for key, shape in shapes.items()})
    keys = data.draw(st.lists(st.sampled_from("abc"), max_size=4))
    requests = [Request(key, shapes[key], data.draw(regions_in(shapes[key]))) for key in keys]
    with pytest.MonkeyPatch.context() as patch:
        # How many pairs are compared at a time makes no difference.
        patch.setattr(load, "MAX_PAIRS", data.draw(st.sampled_from([1, 3, load.MAX_PAIRS])))
        results = carry_out(
            plan_load(StoredCheckpoint("here", manifest), requests), manifest, tensors, requests
        )
    for request, result in zip(requests, results, strict=True):
        assert np.array_equal(result, tensors[request.key][request.region.slices()])


@settings(max_examples=200)
@given(st.data())
def test_copies_of_a_tensor_with_another_shape_are_what_both_have(data):
    ndim = data.draw(st.integers(0, 3))
    stored, wanted = (
        tuple(data.draw(st.lists(st.integers(0, 5), min_size=ndim, max_size=ndim)))
        for _ in ("stored", "wanted")
    )
    tensor = np.arange(math.prod(stored)).reshape(stored)
    manifest = manifest_of({"w": (stored, data.draw(grids(stored)))})
    region = data.draw(regions_in(wanted))
    request = Request("w", wanted, region, allow_shape_mismatch=True)
    (result,) = carry_out(
        plan_load(StoredCheckpoint("here", manifest), [request]), manifest, {"w": tensor}, [request]
    )
    padded = np.full(tuple(map(max, stored, wanted)), -1, np.int64)
    padded[tuple(slice(n) for n in stored)] = tensor
    assert np.array_equal(result, padded[region.slices()])


def test_a_region_that_was_not_saved_is_an_error_that_names_it():
    manifest = manifest_of({"w": ((4, 4), [Region((0, 0), (2, 4)), Region((3, 0), (1, 4))])})
    stored = Request("w", (4, 4), Region((0, 1), (2, 2)))
    assert len(plan_load(StoredCheckpoint("here", manifest), [stored])) == 1
    absent = Request("w", (4, 4), Region((1, 1), (2, 2)))
    with pytest.raises(
        LoadMismatchError, match=r"\[1:3, 1:3\] of key 'w' is not stored .* in 'here'"
    ) as caught:
        plan_load(StoredCheckpoint("here", manifest), [stored, absent])
    assert caught.value.unexpected == {"w"}


def test_shapes_that_differ_are_an_error_that_names_both():
    manifest = manifest_of({"w": ((4, 4), [Region((0, 0), (4, 4))])})
    with pytest.raises(
        LoadMismatchError,
        match=r"'w' is stored in 'here' .*\(4, 4\) .*\(5, 4\).*allow_shape_mismatch",
    ):
        plan_load(
            StoredCheckpoint("here", manifest), [Request("w", (5, 4), Region((0, 0), (5, 4)))]
        )


def test_another_number_of_axes_is_an_error_even_where_shapes_may_differ():
    manifest = manifest_of({"w": ((4, 4), [Region((0, 0), (4, 4))])})
    with pytest.raises(LoadMismatchError, match="number of axes differs"):
        plan_load(
            StoredCheckpoint("here", manifest),
            [Request("w", (16,), Region((0,), (16,)), allow_shape_mismatch=True)],
        )

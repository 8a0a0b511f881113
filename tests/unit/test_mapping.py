from __future__ import annotations

import copy
import importlib
import itertools
import math
import pickle
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distckpt.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
    is_main_replica,
)
from distckpt.megatron.core import CheckpointingException, InvalidShardingError
from tests.support.reference import megatron_or_skip


@st.composite
def grids(draw, max_parts=3):
    """Draw (local_shape, number of prepended axes, parts per global axis)."""
    local_shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    prepended = draw(st.integers(0, 2))
    parts = tuple(draw(st.integers(1, max_parts)) for _ in range(prepended + len(local_shape)))
    return local_shape, prepended, parts


def global_tensor(local_shape, prepended, parts):
    shape = tuple(n * size for n, size in zip(parts, (1,) * prepended + local_shape, strict=True))
    return torch.arange(math.prod(shape), dtype=torch.int64).reshape(shape)


def cells(local_shape, prepended, parts):
    """Cut the global tensor with numpy: yields rank offsets and the local tensor of each cell of
    the grid.
    """
    whole = global_tensor(local_shape, prepended, parts).numpy()
    for cell in itertools.product(*map(range, parts)):
        local = whole
        for axis, (position, n) in enumerate(zip(cell, parts, strict=True)):
            local = np.split(local, n, axis=axis)[position]
        local = local.reshape(local_shape)
        triples = [
            (axis, position, n) for axis, (position, n) in enumerate(zip(cell, parts, strict=True))
        ]
        yield cell, triples, torch.from_numpy(local.copy())


def flat_shard(local, *rank_offsets, flattened_range, **kwargs):
    data = local.flatten()[flattened_range]
    return ShardedTensor.from_rank_offsets_flat(
        "w", data, tuple(local.shape), *rank_offsets, flattened_range=flattened_range, **kwargs
    )


# ---- ShardedTensor: where a shard lies


@given(grids())
def test_shards_of_a_grid_lie_where_numpy_cuts(grid):
    local_shape, prepended, parts = grid
    whole = global_tensor(*grid)
    for cell, triples, local in cells(*grid):
        shard = ShardedTensor.from_rank_offsets("w", local, *triples, prepend_axis_num=prepended)
        assert shard.global_shape == tuple(whole.shape)
        assert shard.local_shape == local_shape
        assert torch.equal(whole[shard.global_slice()], local)
        assert shard.max_allowed_chunks() == (1,) * prepended + local_shape
        assert shard.axis_fragmentations == parts
        assert shard.has_regular_grid
        # Along an axis of size 0 nothing tells the cells apart.
        sizes = (1,) * prepended + local_shape
        assert shard.local_chunk_offset_in_global() == tuple(
            position if size else 0 for position, size in zip(cell, sizes, strict=True)
        )


def test_axes_that_are_not_mentioned_are_not_divided():
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (2, 1, 4), prepend_axis_num=1)
    assert (shard.global_shape, shard.global_offset, shard.axis_fragmentations) == (
        (1, 2, 12),
        (0, 0, 3),
        (1, 1, 4),
    )
    assert shard.global_slice() == (0, slice(0, 2), slice(3, 6))


def test_scalars_and_attributes_pass_through():
    shard = ShardedTensor.from_rank_offsets(
        "s", torch.tensor(1.5), replica_id=(0, 2), allow_shape_mismatch=True
    )
    assert (shard.global_shape, shard.global_slice(), shard.replica_id) == ((), (), (0, 2))
    assert shard.allow_shape_mismatch
    assert shard.dtype == torch.float32


def test_fields_have_megatrons_order():
    shard = ShardedTensor(
        "w", None, torch.float16, (1, 2), (5, 1, 2), (4, 0, 0), None, 3, 1, True, slice(0, 1)
    )
    assert list(vars(shard).values()) == [
        *("w", None, torch.float16, (1, 2), (5, 1, 2), (4, 0, 0), None, 3, 1, True, slice(0, 1))
    ]
    assert (shard.global_offset, shard.replica_id, shard.flattened_range) == (
        (4, 0, 0),
        3,
        slice(0, 1),
    )


def test_uneven_shards_have_no_regular_grid():
    shard = ShardedTensor("w", torch.zeros(3), torch.float32, (3,), (5,), (2,), None)
    assert not shard.has_regular_grid
    assert shard.global_slice() == (slice(2, 5),)
    for method in (shard.max_allowed_chunks, shard.local_chunk_offset_in_global):
        with pytest.raises(InvalidShardingError, match=r"'w'.*regular"):
            method()


def test_shapes_become_plain_tuples():
    shard = ShardedTensor("w", None, torch.float32, torch.Size([2]), [np.int64(4)], [2], [2])
    for value in (
        shard.local_shape,
        shard.global_shape,
        shard.global_offset,
        shard.axis_fragmentations,
    ):
        assert type(value) is tuple
        assert type(value[0]) is int


def test_padded_tensors_may_reach_past_the_end():
    args = ("w", None, torch.float32, (4,), (6,), (4,), (2,))
    assert ShardedTensor(*args, allow_shape_mismatch=True).max_allowed_chunks() == (3,)
    with pytest.raises(InvalidShardingError, match="past the end"):
        ShardedTensor(*args)


def test_cells_must_divide_evenly():
    shard = ShardedTensor("w", None, torch.float32, (2,), (5,), (0,), (2,))
    with pytest.raises(InvalidShardingError, match="evenly"):
        shard.max_allowed_chunks()


VALID = {
    "key": "w",
    "data": None,
    "dtype": torch.float32,
    "local_shape": (2, 3),
    "global_shape": (4, 4, 3),
    "global_offset": (3, 2, 0),
    "axis_fragmentations": (4, 2, 1),
    "prepend_axis_num": 1,
}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"key": 3}, "string"),
        ({"data": np.zeros((2, 3), np.float32)}, "torch.Tensor"),
        ({"data": torch.zeros(2, 3, dtype=torch.float16)}, "float16"),
        ({"data": torch.zeros(3, 2)}, r"shape \(3, 2\)"),
        ({"local_shape": 2}, "sequence of integers"),
        ({"local_shape": (2.0, 3)}, "sequence of integers"),
        ({"global_offset": (3, 2)}, "same number of axes"),
        ({"local_shape": (2,)}, "add up"),
        ({"prepend_axis_num": 2}, "add up"),
        ({"prepend_axis_num": -1}, "at least 0"),
        ({"prepend_axis_num": 1.0}, "at least 0"),
        ({"global_offset": (3, -2, 0)}, "negative"),
        ({"local_shape": (-2, 3)}, "negative"),
        ({"global_shape": (3, 4, 3)}, "past the end of global axis 0"),
        ({"global_offset": (3, 4, 0)}, "past the end of global axis 1"),
        ({"global_offset": (3, 1, 0)}, "multiple of the local size 2"),
        ({"axis_fragmentations": (4, 2)}, "one entry per axis"),
        ({"axis_fragmentations": (4, 0, 1)}, "at least 1"),
        ({"replica_id": -1}, "replica_id"),
        ({"replica_id": (0, -1)}, "replica_id"),
        ({"replica_id": "0"}, "replica_id"),
        ({"replica_id": None}, "replica_id"),
        ({"flattened_range": slice(0, 4, 1)}, "without a step"),
        ({"flattened_range": (0, 4)}, "slice"),
        ({"flattened_range": slice(-4, None)}, "at least 0"),
        ({"flattened_range": slice(0, 4.0)}, "at least 0"),
        ({"flattened_range": slice(0, 4), "data": torch.zeros(2, 3)}, "1-D"),
        ({"flattened_range": slice(0, 4), "data": torch.zeros(5)}, "5 elements.*selects 4"),
        ({"flattened_range": slice(4, 9), "data": torch.zeros(5)}, "5 elements.*selects 2"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_contradictions_are_errors_that_name_the_key(change, problem):
    ShardedTensor(**VALID)
    with pytest.raises(InvalidShardingError, match=problem) as caught:
        ShardedTensor(**(VALID | change))
    assert repr(change.get("key", "w")) in str(caught.value)


def test_later_changes_can_be_checked_again():
    shard = ShardedTensor(**VALID)
    shard.key = "renamed"
    shard.validate_metadata_integrity()
    shard.global_offset = (9, 9, 9)
    with pytest.raises(InvalidShardingError, match="'renamed'"):
        shard.validate_metadata_integrity()


@pytest.mark.parametrize(
    ("rank_offsets", "problem"),
    [
        ([(3, 0, 2)], "no axis 3"),
        ([(-1, 0, 2)], "no axis -1"),
        ([(0, 2, 2)], "no part 2 among 2"),
        ([(0, -1, 2)], "no part -1"),
        ([(0, 0, 0)], "no part 0 among 0"),
        ([(0, 0, 2), (1, 0, 2), (0, 1, 2)], "axis 0 is mentioned twice"),
        ([(0, 1)], "axis, position, number of parts"),
        ([0, 1, 2], "sequence of integers"),
        ([(0, 0.5, 1)], "sequence of integers"),
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_impossible_rank_offsets_are_errors(rank_offsets, problem, flat):
    make = (
        partial(flat_shard, flattened_range=slice(0, 6))
        if flat
        else partial(ShardedTensor.from_rank_offsets, "w")
    )
    with pytest.raises(InvalidShardingError, match=f"'w'.*{problem}"):
        make(torch.zeros(2, 3), *rank_offsets, prepend_axis_num=1)


def test_each_constructor_recommends_the_other():
    with pytest.raises(InvalidShardingError, match="use from_rank_offsets_flat"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2), flattened_range=slice(0, 2))
    with pytest.raises(InvalidShardingError, match="use from_rank_offsets "):
        ShardedTensor.from_rank_offsets_flat("w", torch.zeros(2), (2,))
    for data in (None, [1.0, 2.0]):
        with pytest.raises(InvalidShardingError, match=r"'w'.*torch\.Tensor"):
            ShardedTensor.from_rank_offsets("w", data)
        with pytest.raises(InvalidShardingError, match=r"'w'.*torch\.Tensor"):
            ShardedTensor.from_rank_offsets_flat("w", data, (2,), flattened_range=slice(0, 2))


# ---- ShardedTensor: flat shards


@given(grids(max_parts=2), st.integers(0, 30), st.integers(0, 30))
def test_coordinates_of_a_flat_shard_pick_its_elements(grid, first, length):
    whole = global_tensor(*grid)
    for _, triples, local in cells(*grid):
        start = min(first, local.numel())
        run = slice(start, min(start + length, local.numel()))
        shard = flat_shard(local, *triples, flattened_range=run, prepend_axis_num=grid[1])
        assert shard.local_shape == tuple(local.shape)
        # Without axes of the local tensor there is nothing to index.
        if local.ndim:
            assert np.array_equal(whole.numpy()[shard.global_coordinates()], shard.data.numpy())
            assert np.array_equal(local.numpy()[shard.local_coordinates()], shard.data.numpy())
        # The slice is that of the whole local tensor.
        assert torch.equal(whole[shard.global_slice()], local)


def test_coordinates_of_a_prepended_axis_are_one_number():
    shard = flat_shard(
        torch.arange(6).reshape(2, 3),
        (0, 2, 4),
        (1, 1, 2),
        flattened_range=slice(2, 4),
        prepend_axis_num=1,
    )
    assert [np.asarray(c).tolist() for c in shard.global_coordinates()] == [2, [2, 3], [2, 0]]
    assert [c.tolist() for c in shard.local_coordinates()] == [[0, 1], [2, 0]]


def test_coordinates_need_a_flattened_range():
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
    for method in (shard.local_coordinates, shard.global_coordinates):
        with pytest.raises(InvalidShardingError, match="flattened_range is not set"):
            method()


@pytest.mark.parametrize(
    ("flattened_range", "expected"),
    [
        (slice(None), [0, 1, 2, 3, 4, 5]),
        (slice(None, 2), [0, 1]),
        (slice(4, None), [4, 5]),
        (slice(4, 9), [4, 5]),
        (slice(3, 3), []),
        (slice(9, 12), []),
        (slice(4, 2), []),
    ],
)
def test_open_ranges_follow_python(flattened_range, expected):
    local = torch.arange(6).reshape(2, 3)
    shard = flat_shard(local, flattened_range=flattened_range)
    assert shard.data.tolist() == expected
    assert shard.flattened_range == flattened_range
    coordinates = shard.local_coordinates()
    assert local.numpy()[coordinates].tolist() == expected


# ---- ShardedTensor: data


@pytest.mark.parametrize(
    ("flattened_range", "shape"), [(None, (2, 3)), (slice(1, 5), (4,)), (slice(4, None), (2,))]
)
def test_init_data_allocates_what_the_shard_holds(flattened_range, shape):
    shard = ShardedTensor(
        "w", None, torch.float16, (2, 3), (2, 3), (0, 0), None, flattened_range=flattened_range
    )
    shard.init_data("cpu", torch.ones)
    assert torch.equal(shard.data, torch.ones(shape, dtype=torch.float16))
    assert shard.data.untyped_storage().nbytes() == 2 * math.prod(shape)
    shard.validate_metadata_integrity()
    data = shard.data
    shard.init_data("meta")
    assert shard.data is data


def test_without_data_leaves_the_original_alone():
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2), replica_id=3)
    empty = shard.without_data()
    assert empty.data is None
    assert shard.data is not None
    assert replace(empty, data=shard.data) == shard


def test_equality_is_decided_without_comparing_elements():
    data = torch.zeros(4)
    shard = ShardedTensor.from_rank_offsets("w", data)
    assert shard == ShardedTensor.from_rank_offsets("w", data)
    assert shard != ShardedTensor.from_rank_offsets("w", data.clone())
    assert shard != ShardedTensor.from_rank_offsets("v", data)
    assert shard.without_data() == ShardedTensor.from_rank_offsets("w", data.clone()).without_data()
    assert shard != "w"
    assert shard in [shard.without_data(), shard]
    with pytest.raises(TypeError, match="unhashable"):
        hash(shard)


def test_repr_shows_no_elements():
    assert "tensor(" not in repr(ShardedTensor.from_rank_offsets("w", torch.zeros(1000)))


def test_copies_and_pickles():
    shard = flat_shard(torch.arange(6).reshape(2, 3), flattened_range=slice(1, 4))
    for other in (copy.deepcopy(shard), pickle.loads(pickle.dumps(shard))):
        assert torch.equal(other.data, shard.data)
        assert other.without_data() == shard.without_data()


# ---- ShardedTensor: narrow


@given(grids(max_parts=2), st.data())
def test_narrowed_shards_make_up_the_narrowed_parts(grid, data):
    local_shape, prepended, parts = grid
    if not local_shape:
        return
    dim = data.draw(st.integers(0, len(local_shape) - 1))
    start = data.draw(st.integers(0, local_shape[dim]))
    length = data.draw(st.integers(0, local_shape[dim] - start))
    axis = dim + prepended
    # What every rank keeps, put together in order of position.
    pieces = np.split(global_tensor(*grid).numpy(), parts[axis], axis=axis)
    expected = np.concatenate(
        [np.take(p, range(start, start + length), axis=axis) for p in pieces], axis=axis
    )
    for _, triples, local in cells(*grid):
        shard = ShardedTensor.from_rank_offsets("w", local, *triples, prepend_axis_num=prepended)
        [kept] = shard.narrow(dim, start, length)
        assert kept.global_shape == expected.shape
        assert np.array_equal(expected[kept.global_slice()], kept.data.numpy())
        assert kept.axis_fragmentations == parts
        assert (
            shard.narrow(dim - len(local_shape), start, length)[0].without_data()
            == kept.without_data()
        )
        assert shard.without_data().narrow(dim, start, length) == [kept.without_data()]


def test_narrowed_data_are_views():
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2))
    [kept] = shard.narrow(0, 1, 2)
    kept.data.fill_(1)
    assert shard.data.sum() == 4
    [kept] = flat_shard(shard.data, flattened_range=slice(0, 8)).narrow(0, 1, 2)
    assert kept.data.tolist() == [1] * 4


@pytest.mark.parametrize(
    ("dim", "start", "length", "problem"),
    [
        (2, 0, 1, "no axis 2"),
        (-3, 0, 1, "no axis -3"),
        (0, -1, 1, "start -1"),
        (0, 0, 5, "length 5"),
        (0, 4, 1, "start 4"),
        (0, 0, -1, "length -1"),
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_narrow_stays_within_the_local_tensor(dim, start, length, problem, flat):
    local = torch.zeros(4, 2)
    shard = (
        flat_shard(local, flattened_range=slice(0, 8))
        if flat
        else ShardedTensor.from_rank_offsets("w", local)
    )
    with pytest.raises(InvalidShardingError, match=f"'w': narrow.*{problem}"):
        shard.narrow(dim, start, length)


def test_narrow_refuses_shards_of_different_sizes():
    for offset, size in ((0, 2), (2, 3)):
        shard = ShardedTensor("w", torch.zeros(size), torch.float32, (size,), (5,), (offset,), None)
        with pytest.raises(InvalidShardingError, match="one size"):
            shard.narrow(0, 0, 1)
    empty = ShardedTensor("w", torch.zeros(0), torch.float32, (0,), (5,), (5,), None)
    with pytest.raises(InvalidShardingError, match="one size"):
        empty.narrow(0, 0, 0)


@pytest.mark.parametrize(
    ("start", "length", "kept"),
    [
        (0, 1, [4, 5, 6]),
        (0, 3, [4, 5, 6, 7, 8]),
        (1, 1, [7, 8]),
        (1, 3, [7, 8]),
        (2, 1, []),
        (0, 0, []),
    ],
)
def test_narrow_flat_along_the_first_axis(start, length, kept):
    local = torch.arange(28).reshape(4, 7)
    shards = flat_shard(local, (0, 1, 2), flattened_range=slice(4, 9)).narrow(0, start, length)
    assert [s.data.tolist() for s in shards] == ([kept] if kept else [])
    for s in shards:
        assert (s.local_shape, s.global_shape, s.global_offset) == (
            (length, 7),
            (2 * length, 7),
            (length, 0),
        )
        assert local[start : start + length].flatten()[s.flattened_range].tolist() == kept


@given(grids(max_parts=2), st.data())
def test_narrowed_runs_tile_the_narrowed_tensor(grid, data):
    local_shape, prepended, _ = grid
    if not local_shape:
        return
    dim = data.draw(st.integers(0, len(local_shape) - 1))
    start = data.draw(st.integers(0, local_shape[dim]))
    length = data.draw(st.integers(0, local_shape[dim] - start))
    numel = math.prod(local_shape)
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=3))})
    _, triples, local = list(cells(*grid))[-1]
    [whole] = ShardedTensor.from_rank_offsets(
        "w", local, *triples, prepend_axis_num=prepended
    ).narrow(dim, start, length)
    found = torch.full((whole.data.numel(),), -1)
    for begin, end in itertools.pairwise(cuts):
        shard = flat_shard(
            local, *triples, flattened_range=slice(begin, end), prepend_axis_num=prepended
        )
        runs = shard.narrow(dim, start, length)
        assert dim > 0 or len(runs) <= 1
        assert shard.without_data().narrow(dim, start, length) == [
            run.without_data() for run in runs
        ]
        for run in runs:
            assert replace(run.without_data(), flattened_range=None) == whole.without_data()
            assert torch.all(found[run.flattened_range] == -1)
            found[run.flattened_range] = run.data
    assert torch.equal(found, whole.data.flatten())


# ---- replicas, objects, local objects


@pytest.mark.parametrize(
    ("replica_id", "expected"),
    [
        (0, True),
        (1, False),
        ((), True),
        ((0, 0), True),
        ((0, 1), False),
        ([0], True),
        (np.int64(0), True),
    ],
)
def test_main_replica_is_the_one_of_zeros(replica_id, expected):
    assert is_main_replica(replica_id) is expected


def test_local_object_is_given_back_as_it_is():
    value = [1]
    assert LocalNonpersistentObject(value).unwrap() is value
    assert LocalNonpersistentObject(value).obj is value


@pytest.mark.parametrize("key", ["rng", "a/b/shard_0_1", "", "sp ace_and.dots"])
@pytest.mark.parametrize(("shape", "offset"), [((), ()), ((1,), (0,)), ((12, 3), (10, 2))])
def test_unique_key_leads_back_to_the_object(key, shape, offset):
    obj = ShardedObject(key, {"state": 1}, shape, offset, replica_id=2)
    other = ShardedObject.empty_from_unique_key(obj.unique_key, replica_id=2)
    assert other == obj.without_data()


def test_unique_key_is_that_of_megatron():
    obj = ShardedObject("rng_state", None, (2, 4), (1, 3))
    assert obj.unique_key == "rng_state/shard_1.3_2.4"
    assert str(obj) == "ShardedObject(key='rng_state')"


def test_old_unique_keys_lack_the_last_size():
    obj = ShardedObject.empty_from_unique_key("k/shard_0.7_3")
    assert (obj.global_shape, obj.global_offset) == ((3, -1), (0, 7))
    assert ShardedObject.empty_from_unique_key(obj.unique_key) == obj


@pytest.mark.parametrize(
    "unique_key",
    ["k", "shard_0_1", "k/part_0_1", "k/shard_0", "k/shard_0_1_2", "k/shard_a_1", "k/"],
)
def test_other_text_is_no_unique_key(unique_key):
    with pytest.raises(InvalidShardingError, match="unique key") as caught:
        ShardedObject.empty_from_unique_key(unique_key)
    assert repr(unique_key) in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "offset", "replica_id"),
    [
        ((2,), (0, 0), 0),
        ((2,), (2,), 0),
        ((2,), (-1,), 0),
        ((0,), (0,), 0),
        ((-2,), (0,), 0),
        ((1,), (0,), -1),
        (1, 0, 0),
    ],
)
def test_object_lies_within_its_array(shape, offset, replica_id):
    with pytest.raises(InvalidShardingError, match="'rng'"):
        ShardedObject("rng", None, shape, offset, replica_id)


def test_object_equality_does_not_compare_data():
    data = torch.zeros(3)
    assert ShardedObject("k", data, (1,), (0,)) == ShardedObject("k", data, (1,), (0,))
    assert ShardedObject("k", data, (1,), (0,)) != ShardedObject("k", torch.zeros(3), (1,), (0,))


# ---- factories


def split_in_two(key, data, replica_id, flattened_range):
    halves = torch.chunk(data, 2)
    return [
        ShardedTensor.from_rank_offsets(key, half, (0, i, 2), replica_id=replica_id)
        for i, half in enumerate(halves)
    ]


def make_factory(key="fc1", data=None, **kwargs):
    return ShardedTensorFactory(
        key, torch.arange(4.0) if data is None else data, split_in_two, torch.cat, **kwargs
    )


def test_factory_hands_its_attributes_to_build_fn():
    seen = []
    data = torch.zeros(1)
    factory = ShardedTensorFactory(
        "k", data, lambda *args: seen.append(args), torch.cat, (0, 1), slice(0, 1)
    )
    factory.build()
    replace(factory, key="optimizer.k").build()
    assert [args[0] for args in seen] == ["k", "optimizer.k"]
    assert all(args[1] is data and args[2:] == ((0, 1), slice(0, 1)) for args in seen)
    factory.validate_metadata_integrity()


def test_factory_without_data_and_equality():
    factory = make_factory()
    assert factory.without_data().data is None
    assert factory.data is not None
    assert factory == replace(factory)
    assert factory != make_factory()
    assert factory.without_data() == make_factory().without_data()


def test_factories_there_and_back():
    state = {
        "layers": [{"w": make_factory(), "b": 1}],
        "w": make_factory("v", torch.arange(6.0), replica_id=1),
    }
    factories = {"layers": {0: {"w": state["layers"][0]["w"]}}, "w": state["w"]}
    assert apply_factories(state) is None
    shards = [*state["layers"][0]["w"], *state["w"]]
    assert [(s.key, s.global_offset, s.replica_id) for s in shards] == [
        ("fc1", (0,), 0),
        ("fc1", (2,), 0),
        ("v", (0,), 1),
        ("v", (3,), 1),
    ]
    loaded = {
        "layers": [{"w": [s.data for s in shards[:2]], "b": 1}],
        "w": [s.data for s in shards[2:]],
    }
    assert apply_factory_merges(loaded, factories) is loaded
    assert torch.equal(loaded["layers"][0]["w"], torch.arange(4.0))
    assert torch.equal(loaded["w"], torch.arange(6.0))
    assert loaded["layers"][0]["b"] == 1


def test_factory_at_the_top_merges_to_a_tensor():
    assert torch.equal(
        apply_factory_merges([torch.zeros(1), torch.ones(1)], make_factory()),
        torch.tensor([0.0, 1.0]),
    )


def test_factories_merge_in_lists_of_the_same_length():
    loaded = [[torch.zeros(1)], [torch.ones(1)]]
    apply_factory_merges(loaded, [make_factory(), make_factory()])
    assert torch.equal(torch.cat(loaded), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize(
    ("loaded", "factories", "problem"),
    [
        ({"a": {}}, {"a": {"w": make_factory()}}, r"\('a',\).*'w' was not loaded"),
        ({"a": [1]}, {"a": [make_factory()] * 2}, r"\('a',\).*lengths"),
        ({"a": [1]}, {"a": {"0": make_factory()}}, r"\('a',\).*not an index"),
        ({"a": [1]}, {"a": {1: make_factory()}}, r"\('a',\).*not an index"),
        ({"a": [1]}, {"a": {-1: make_factory()}}, r"\('a',\).*not an index"),
        ({"a": {0: 1}}, {"a": [make_factory()]}, r"\('a',\).*dict"),
        ({"a": 1}, {"a": {"w": make_factory()}}, r"\('a',\).*int"),
        ({"a": 1}, {"a": 1}, r"\('a',\).*int"),
    ],
)
def test_factory_without_counterpart_is_an_error(loaded, factories, problem):
    with pytest.raises(InvalidShardingError, match=problem):
        apply_factory_merges(loaded, factories)


# ---- beside Megatron


@pytest.fixture(scope="module")
def megatron():
    return megatron_or_skip("dist_checkpointing.mapping")


def attributes(shard):
    values = {f.name: getattr(shard, f.name) for f in fields(ShardedTensor) if f.name != "data"}
    return values | {"local_shape": tuple(shard.local_shape)}


@given(grid=grids(max_parts=2), data=st.data())
def test_shards_agree_with_megatron(megatron, grid, data):
    local_shape, prepended, _ = grid
    for _, triples, local in cells(*grid):
        kwargs = {"prepend_axis_num": prepended, "replica_id": (0, 1)}
        ours = ShardedTensor.from_rank_offsets("w", local, *triples, **kwargs)
        theirs = megatron.ShardedTensor.from_rank_offsets("w", local, *triples, **kwargs)
        assert attributes(ours) == attributes(theirs)
        assert ours.global_slice() == theirs.global_slice()
        assert ours.max_allowed_chunks() == theirs.max_allowed_chunks()
        if 0 in local_shape:
            continue  # divides by zero there
        assert ours.local_chunk_offset_in_global() == theirs.local_chunk_offset_in_global()
        if local_shape:
            dim = data.draw(st.integers(0, len(local_shape) - 1))
            start = data.draw(st.integers(0, local_shape[dim] - 1))
            length = data.draw(st.integers(0, local_shape[dim] - start))
            [kept], [their_kept] = (
                ours.narrow(dim, start, length),
                theirs.narrow(dim, start, length),
            )
            assert attributes(kept) == attributes(their_kept)
            assert torch.equal(kept.data, their_kept.data)


@given(
    sizes=st.lists(st.integers(-1, 4), min_size=4, max_size=4),
    regular=st.booleans(),
    prepended=st.integers(0, 1),
)
def test_what_megatron_refuses_is_refused(megatron, sizes, regular, prepended):
    local, size, offset, parts = sizes
    args = (
        "w",
        None,
        torch.float32,
        (local,),
        (size,),
        (offset,),
        (parts,) if regular else None,
        0,
        prepended,
    )
    try:
        ShardedTensor(*args)
    except CheckpointingException:
        return
    megatron.ShardedTensor(*args)


def test_objects_agree_with_megatron(megatron):
    ours = ShardedObject("rng", None, (2, 3), (1, 2))
    theirs = megatron.ShardedObject("rng", None, (2, 3), (1, 2))
    assert ours.unique_key == theirs.unique_key
    assert str(ours) == str(theirs)
    for unique_key in (ours.unique_key, "old/shard_0.7_3"):
        parsed, expected = (
            kind.empty_from_unique_key(unique_key)
            for kind in (ShardedObject, megatron.ShardedObject)
        )
        assert vars(parsed) == vars(expected)


def test_every_public_name_of_megatron_is_here(megatron):
    mapping = importlib.import_module("distckpt.mapping")
    # Names that the module defines, not those that it imports.
    names = [
        n for n, v in vars(megatron).items() if getattr(v, "__module__", None) == megatron.__name__
    ]
    names += [
        "StateDict",
        "CommonStateDict",
        "ShardedStateDict",
        "ReplicaId",
        "FactoryBuildFn",
        "FactoryMergeFn",
    ]
    assert len(names) > 10
    assert [n for n in names if not hasattr(mapping, n)] == []

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distckpt._format.columns import pack, unpack
from distckpt._geometry.region import Region, whole
from distckpt._plan.save import Pieces, find_aliases, plan_owners
from distckpt._state.shards import ShardTable, merge_tables, shard_table
from distckpt._state.validation import validate_shards
from distckpt.mapping import ShardedObject, ShardedTensor


def shard(key, region, global_shape, replica_id=0, dtype=torch.float32, data=None):
    return ShardedTensor(
        key, data, dtype, region.shape, global_shape, region.offset, None, replica_id
    )


def plan(shards_of_ranks, groups=None):
    table = merge_tables([shard_table(shards) for shards in shards_of_ranks])
    validate_shards(table)
    return plan_owners(table, len(shards_of_ranks), find_aliases(table), groups)


def written(shards_of_ranks, pieces_of_ranks):
    """Yield `(rank, shard, region)` of everything that is planned."""
    for rank, (shards, pieces) in enumerate(zip(shards_of_ranks, pieces_of_ranks, strict=True)):
        for _, shard_id, offset, shape in zip(*(column.tolist() for column in pieces), strict=True):
            ndim = len(shards[shard_id].global_shape)
            yield rank, shards[shard_id], Region(tuple(offset[:ndim]), tuple(shape[:ndim]))


def loads(shards_of_ranks, pieces_of_ranks):
    """Count the bytes each rank writes."""
    counted = Counter({rank: 0 for rank in range(len(shards_of_ranks))})
    for rank, owned, region in written(shards_of_ranks, pieces_of_ranks):
        counted[rank] += region.num_elements * owned.dtype.itemsize
    return counted


def imbalance(counted):
    return max(counted.values()) / (sum(counted.values()) / len(counted))


# ---- who writes what


@st.composite
def clusters(draw):
    """Draw the shards of a few ranks: every cell of a few random grids has a main replica and some
    copies.
    """
    num_ranks = draw(st.integers(1, 4))
    shards_of_ranks = [[] for _ in range(num_ranks)]
    for key in "abc"[: draw(st.integers(1, 3))]:
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 7, 40, 64]), max_size=3)))
        cuts = [sorted(draw(st.lists(st.integers(0, n), max_size=2))) for n in shape]
        edges = [[0, *inner, n] for inner, n in zip(cuts, shape, strict=True)]
        dtype = draw(st.sampled_from([torch.uint8, torch.float32, torch.complex64]))
        for spans in itertools.product(*(itertools.pairwise(e) for e in edges)):
            region = Region(
                tuple(low for low, _ in spans), tuple(high - low for low, high in spans)
            )
            holders = draw(st.lists(st.integers(0, num_ranks - 1), min_size=1, unique=True))
            for copy, rank in enumerate(holders):
                shards_of_ranks[rank].append(shard(key, region, shape, copy, dtype))
    groups = draw(st.none() | st.lists(st.integers(0, 1), min_size=num_ranks, max_size=num_ranks))
    return shards_of_ranks, groups


@settings(max_examples=100)
@given(clusters())
def test_every_byte_has_one_owner_which_holds_it(cluster):
    shards_of_ranks, groups = cluster
    counts = {
        s.key: np.zeros(s.global_shape, np.int64) for shards in shards_of_ranks for s in shards
    }
    main_rank = {}
    for rank, shards in enumerate(shards_of_ranks):
        for held in shards:
            if held.replica_id == 0:
                main_rank[held.key, held.global_offset, held.local_shape] = rank
    for rank, owned, region in written(shards_of_ranks, plan(shards_of_ranks, groups)):
        counts[owned.key][region.slices()] += 1
        for low, size, first, extent in zip(
            owned.global_offset, owned.local_shape, region.offset, region.shape, strict=True
        ):
            assert low <= first
            assert first + extent <= low + size
        if groups is not None and region.num_elements:
            assert (
                groups[rank] == groups[main_rank[owned.key, owned.global_offset, owned.local_shape]]
            )
    assert all((count == 1).all() for count in counts.values())


@given(clusters())
def test_plans_are_equal_when_made_again_and_when_sent(cluster):
    shards_of_ranks, groups = cluster
    for first, second in zip(
        plan(shards_of_ranks, groups), plan(shards_of_ranks, groups), strict=True
    ):
        sent = Pieces(**unpack(pack(None, second._asdict()))[1])
        assert all(np.array_equal(a, b) for a, b in zip(first, sent, strict=True))


def llama_like(tp, dp, layers=8, hidden=1024, vocab=16000):
    """Describe bf16 weights and fp32 Adam moments, split over tp and replicated over dp, for each
    rank.
    """
    shards_of_ranks = []
    for dp_rank, tp_rank in itertools.product(range(dp), range(tp)):
        shards = []

        def add(name, shape, axis, dp_rank=dp_rank, tp_rank=tp_rank, shards=shards):
            local, offset = list(shape), [0] * len(shape)
            if axis is not None:
                local[axis] //= tp
                offset[axis] = tp_rank * local[axis]
            region = Region(tuple(offset), tuple(local))
            replica = (0 if axis is not None else tp_rank, dp_rank)
            shards.append(shard(name, region, shape, replica, torch.bfloat16))
            shards.extend(
                shard(f"optimizer.{m}.{name}", region, shape, replica)
                for m in ("exp_avg", "exp_avg_sq")
            )

        add("embedding", (vocab, hidden), 0)
        for layer in range(layers):
            add(f"layers.{layer}.qkv", (3 * hidden, hidden), 0)
            add(f"layers.{layer}.proj", (hidden, hidden), 1)
            add(f"layers.{layer}.fc1", (8 * hidden, hidden), 0)
            add(f"layers.{layer}.fc2", (hidden, 4 * hidden), 1)
            add(f"layers.{layer}.norm1", (hidden,), None)
            add(f"layers.{layer}.norm2", (hidden,), None)
        add("norm", (hidden,), None)
        add("output", (vocab, hidden), 0)
        shards_of_ranks.append(shards)
    return shards_of_ranks


@pytest.mark.parametrize(("tp", "dp"), [(2, 4), (1, 8), (4, 2), (2, 3)])
def test_replicas_share_the_bytes_of_a_language_model_evenly(tp, dp):
    shards_of_ranks = llama_like(tp, dp)
    counted = loads(shards_of_ranks, plan(shards_of_ranks))
    mains = [s for shards in shards_of_ranks for s in shards if s.replica_id == (0, 0)]
    assert sum(counted.values()) == sum(math.prod(s.local_shape) * s.dtype.itemsize for s in mains)
    assert imbalance(counted) <= 1.05


@pytest.mark.parametrize(
    "shape", [(16384, 16384), (1, 2**28), (3, 2**26, 1), (2**28,), (5, 7, 11, 697_000)]
)
def test_one_large_replicated_tensor_is_sliced_over_its_replicas(shape):
    whole = Region((0,) * len(shape), shape)
    shards_of_ranks = [[shard("w", whole, shape, rank)] for rank in range(8)]
    pieces_of_ranks = plan(shards_of_ranks)
    counted = loads(shards_of_ranks, pieces_of_ranks)
    assert sum(counted.values()) == 4 * math.prod(shape)
    assert imbalance(counted) <= 1.05
    # A slice costs few chunks.
    assert max(len(pieces.shard_ids) for pieces in pieces_of_ranks) <= 2 * len(shape) - 1


def test_ranks_with_bytes_of_their_own_take_less_of_what_is_shared():
    shape = (8, 2**20)
    whole = Region((0, 0), shape)
    shards_of_ranks = [[shard("shared", whole, shape, rank)] for rank in range(4)]
    own = (2, 2**20)
    shards_of_ranks[0].append(shard("own", Region((0, 0), own), own))
    counted = loads(shards_of_ranks, plan(shards_of_ranks))
    assert imbalance(counted) <= 1.05


def test_small_tensors_are_not_cut():
    shape = (10, 10)
    shards_of_ranks = [
        [shard(f"w{i}", Region((0, 0), shape), shape, rank) for i in range(8)] for rank in range(4)
    ]
    regions = [region for _, _, region in written(shards_of_ranks, plan(shards_of_ranks))]
    assert regions == [Region((0, 0), shape)] * 8


def replicated(num_ranks, shape):
    return [[shard("norm", whole(shape), shape, rank)] for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("num_bytes", "num_writers"), [(1 << 20, 16), (24 << 20, 24), (80 << 20, 40)]
)
def test_of_many_replicas_few_write_what_is_little(num_bytes, num_writers):
    shards_of_ranks = replicated(40, (num_bytes // 64, 16))
    counted = loads(shards_of_ranks, plan(shards_of_ranks))
    assert sum(counted.values()) == num_bytes
    writers = [count for count in counted.values() if count]
    assert len(writers) == num_writers
    assert max(writers) <= 1.02 * num_bytes / num_writers


def test_ranks_that_have_a_file_anyway_write_what_is_little():
    shards_of_ranks = replicated(40, (64, 16))
    for rank in range(0, 40, 2):
        region = Region((rank // 2, 0), (1, 5000))
        shards_of_ranks[rank].append(shard("rows", region, (20, 5000)))
    counted = loads(shards_of_ranks, plan(shards_of_ranks))
    assert [rank for rank, count in counted.items() if count] == list(range(0, 40, 2))


def test_copies_of_objects_write_nothing():
    shards_of_ranks = [
        [
            ShardedObject("rng", None, (2,), (0,), replica_id=1 - rank),
            ShardedObject("rng", None, (2,), (1,), replica_id=rank),
        ]
        for rank in range(2)
    ]
    table = merge_tables([shard_table(shards) for shards in shards_of_ranks])
    pieces_of_ranks = plan_owners(table, 2, {})
    assert [pieces.shard_ids.tolist() for pieces in pieces_of_ranks] == [[1], [0]]


def test_nothing_to_write_is_a_plan_too():
    pieces_of_ranks = plan([[], []])
    assert [len(pieces.shard_ids) for pieces in pieces_of_ranks] == [0, 0]
    # As gaps are allowed, what has no main replica on any rank is in no plan.
    table = merge_tables(
        [shard_table([shard("w", Region((0,), (4,)), (4,), replica_id=1)]), shard_table([])]
    )
    assert [len(pieces.shard_ids) for pieces in plan_owners(table, 2, {}, [0, 0])] == [0, 0]


# ---- tied tensors


def test_a_key_that_is_the_same_memory_everywhere_is_an_alias():
    weight, other = torch.ones(4, 2), torch.ones(4, 2)
    region = Region((0, 0), (4, 2))
    shards = [
        shard(key, region, (4, 2), data=data)
        for key, data in (("a", weight), ("b", other), ("c", weight))
    ]
    table = merge_tables([shard_table(shards)])
    assert {table.keys[a]: table.keys[b] for a, b in find_aliases(table).items()} == {"c": "a"}


def test_a_key_that_is_tied_on_one_rank_only_is_stored():
    upper, lower, other = torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2)
    top, bottom = Region((0, 0), (2, 2)), Region((2, 0), (2, 2))
    first = [shard("a", top, (4, 2), data=upper), shard("b", top, (4, 2), data=upper)]
    second = [shard("a", bottom, (4, 2), data=lower), shard("b", bottom, (4, 2), data=other)]
    assert find_aliases(merge_tables([shard_table(first), shard_table(second)])) == {}


@pytest.mark.parametrize(
    "second",
    [
        lambda w: w.t(),
        lambda w: w[:2],
        lambda w: w.view(torch.int32),
        lambda w: w.clone(),
    ],
    ids=["transposed", "part", "reinterpreted", "copied"],
)
def test_views_with_other_contents_are_not_aliases(second):
    weight = torch.ones(4, 4)
    view = second(weight)
    shards = [
        shard("a", Region((0, 0), (4, 4)), (4, 4), data=weight),
        shard(
            "b", Region((0, 0), tuple(view.shape)), tuple(view.shape), dtype=view.dtype, data=view
        ),
    ]
    assert find_aliases(merge_tables([shard_table(shards)])) == {}


def test_tables_are_equal_when_sent():
    table = shard_table(
        [shard("a", Region((0,), (4,)), (4,)), ShardedObject("o", None, (1,), (0,))]
    )
    messages = table._replace(exchange_group=3).to_messages()
    first, sent = ShardTable.all_from_messages(*([message, bytes(message)] for message in messages))
    assert (first.keys, first.dtypes, first.global_shapes) == (
        sent.keys,
        sent.dtypes,
        sent.global_shapes,
    )
    assert (sent.keys, sent.dtypes, sent.global_shapes, sent.exchange_group) == (
        ["a", "o"],
        ["F32", "OBJECT"],
        [(4,), (1,)],
        3,
    )
    assert np.array_equal(sent.offsets, table.offsets)
    assert np.array_equal(sent.is_main, table.is_main)

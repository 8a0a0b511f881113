"""Plans of several planners: the same for any number of them, and right by counting."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from distckpt import InvalidShardingError
from distckpt._base.dtypes import ITEM_BYTES
from distckpt._io.shared_plan import num_planners_for
from distckpt._plan.save import (
    MAX_SMALL_WRITERS,
    MIN_SLICE_BYTES,
    find_aliases,
    plan_owners,
)
from distckpt._state.shards import merge_tables, shard_table
from distckpt._state.validation import replica_factors, replica_weights, validate_shards
from distckpt.mapping import ShardedObject, ShardedTensor
from distckpt.mapping._base import OpenReplicaId
from tests.support.divided import plan_divided

DTYPES = [torch.uint8, torch.float32, torch.complex64]


def shards_of(random_, num_ranks):
    """Make up the shards of some ranks: cells of grids on one rank or on several, scalars, empty
    tensors, objects and tied tensors.
    """
    shards = [[] for _ in range(num_ranks)]
    for number in range(random_.randint(1, 6)):
        shape = tuple(
            random_.choice([0, 1, 2, 7, 40, 64, 5000]) for _ in range(random_.randint(0, 3))
        )
        shape = shape if np.prod(shape) <= 320_000 else shape[:1]
        edges = [
            [0, *sorted(random_.randint(0, n) for _ in range(random_.randint(0, 3))), n]
            for n in shape
        ]
        dtype = random_.choice(DTYPES)
        is_open = random_.random() < 0.3
        for spans in itertools.product(*(itertools.pairwise(each) for each in edges)):
            offset = tuple(low for low, _ in spans)
            size = tuple(high - low for low, high in spans)
            holders = random_.sample(range(num_ranks), random_.choice([1, 1, 2, num_ranks]))
            for copy, rank in enumerate(holders):
                replica = OpenReplicaId((copy,)) if is_open else copy
                shards[rank].append(
                    ShardedTensor(f"k{number}", None, dtype, size, shape, offset, None, replica)
                )
    if random_.random() < 0.5:
        shared = torch.zeros(random_.randint(1, 3000))
        for copy, rank in enumerate(random_.sample(range(num_ranks), 2)):
            for key in ("tied.a", "tied.b"):
                shards[rank].append(ShardedTensor.from_rank_offsets(key, shared, replica_id=copy))
    for rank in random_.sample(range(num_ranks), random_.randint(0, 2)):
        shards[rank].append(ShardedObject(f"object.{rank}", rank, (1,), (0,)))
    for held in shards:
        random_.shuffle(held)
    return shards


def contents(planned):
    """Return everything that must not depend on the number of planners."""
    return (
        planned.keys,
        planned.aliases,
        [factors.tolist() for factors in planned.factors],
        [[column.tolist() for column in pieces] for pieces in planned.pieces],
    )


def check_counts(shards, planned):
    """Count who writes each element that is stored: one rank, which holds it. Return the bytes."""
    counts = {
        shard.key: np.zeros(shard.global_shape, np.int64)
        for held in shards
        for shard in held
        if shard.key not in planned.aliases
    }
    loads = []
    for held, pieces in zip(shards, planned.pieces, strict=True):
        loads.append(0)
        for key_id, shard_id, offset, shape in zip(*(c.tolist() for c in pieces), strict=True):
            shard = held[shard_id]
            assert planned.keys[key_id] == shard.key
            ndim = len(shard.global_shape)
            local = shard.local_shape if isinstance(shard, ShardedTensor) else (1,) * ndim
            for first, extent, low, size in zip(
                offset[:ndim], shape[:ndim], shard.global_offset, local, strict=True
            ):
                assert low <= first
                assert first + extent <= low + size
            slices = tuple(
                slice(o, o + n) for o, n in zip(offset[:ndim], shape[:ndim], strict=True)
            )
            counts[shard.key][slices] += 1
            item = shard.dtype.itemsize if isinstance(shard, ShardedTensor) else 1
            loads[-1] += int(np.prod(shape[:ndim])) * item
    assert all((count == 1).all() for count in counts.values())
    return loads


def check_layout(seed):
    random_ = random.Random(seed)
    num_ranks = random_.randint(2, 9)
    shards = shards_of(random_, num_ranks)
    tables = [shard_table(held) for held in shards]
    if random_.random() < 0.3:
        tables = [table._replace(exchange_group=random_.randint(0, 1)) for table in tables]
    groups = [table.exchange_group for table in tables]
    planned = plan_divided(tables, 1)
    for num_planners in (2, random_.randint(3, max(3, num_ranks))):
        again = plan_divided(tables, min(num_planners, num_ranks))
        assert contents(again) == contents(planned)
    loads = check_counts(shards, planned)
    # As even as the plan of the coordinator alone.
    merged = merge_tables(tables)
    validate_shards(merged)
    alone = plan_owners(merged, num_ranks, find_aliases(merged), groups)
    items = [ITEM_BYTES.get(dtype, 1) for dtype in merged.dtypes]
    stored = [i for i in range(len(items)) if merged.keys[i] not in planned.aliases]
    by_coordinator = [
        sum(
            int(np.prod(shape)) * items[stored[key_id]]
            for key_id, shape in zip(pieces.key_ids.tolist(), pieces.shapes, strict=True)
        )
        for pieces in alone
    ]
    assert sum(loads) == sum(by_coordinator)
    num_lines = 2**num_ranks
    assert max(loads) <= max(by_coordinator) * (1 + 0.02 * num_lines) + 20 * MIN_SLICE_BYTES
    factors = np.concatenate(planned.factors)
    assert (factors == replica_factors(merged)).all()
    weights = [replica_weights(*each) for each in zip(tables, planned.factors, strict=True)]
    assert not int(np.concatenate(weights).sum(dtype=np.uint64))


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_random_layouts_are_planned_alike_by_one_and_by_many(first):
    for seed in range(first, first + 20):
        check_layout(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 1100, 100))
def test_a_thousand_random_layouts_are_planned_alike(first):
    for seed in range(first, first + 100):
        check_layout(seed)


def rows_of(key, rank, num_ranks, num_rows=64, **kwargs):
    data = torch.empty(num_rows // num_ranks, 128, device="meta")
    return ShardedTensor.from_rank_offsets(key, data, (0, rank, num_ranks), **kwargs)


def test_what_only_one_rank_can_write_counts_for_all_planners():
    # Three keys that one rank each has, and a large one that all have: those with less get more.
    shards = [
        [
            rows_of(f"own.{rank}", 0, 1, num_rows=256 * rank),
            rows_of("shared", 0, 1, num_rows=4096, replica_id=rank),
        ]
        for rank in range(4)
    ]
    tables = [shard_table(held) for held in shards]
    for num_planners in (1, 2, 4):
        loads = check_counts(shards, plan_divided(tables, num_planners))
        assert max(loads) <= 1.02 * sum(loads) / 4


def test_few_of_many_ranks_write_few_bytes_that_all_have():
    num_ranks = 40
    shards = [
        [rows_of(f"k{i}", 0, 1, num_rows=num_rows, replica_id=rank) for i, num_rows in enumerate(n)]
        for rank, n in enumerate([(8, 64, 1, 512, 3)] * num_ranks)
    ]
    shards[30].append(rows_of("own", 0, 1))
    tables = [shard_table(held) for held in shards]
    alone = plan_owners(merge_tables(tables), num_ranks, {})
    by_rank = [sorted(pieces.shard_ids.tolist()) for pieces in alone]
    assert sum(map(bool, by_rank)) == MAX_SMALL_WRITERS
    for num_planners in (1, 2, 5):
        planned = plan_divided(tables, num_planners)
        check_counts(shards, planned)
        assert [sorted(pieces.shard_ids.tolist()) for pieces in planned.pieces] == by_rank


def test_a_gap_an_overlap_and_a_contradiction_are_refused_by_name():
    def refused(shards, text, **kwargs):
        tables = [shard_table(held) for held in shards]
        with pytest.raises(InvalidShardingError, match=text):
            plan_divided(tables, 2, **kwargs)

    whole = [[rows_of(f"k{i}", rank, 4) for i in range(6)] for rank in range(4)]
    without_one = [[s for s in held if s.key != "k4"] for held in whole[:1]] + whole[1:]
    refused(without_one, r"'k4'.*no rank holds element \(0, 0\)")
    plan_divided([shard_table(held) for held in without_one], 2, allow_gaps=True)
    doubled = [*whole[:3], [*whole[3], rows_of("k1", 0, 4)]]
    refused(doubled, r"'k1'.*2 main replicas", allow_gaps=True)
    other = [*whole[:3], [*whole[3][1:], rows_of("k0", 3, 4, num_rows=128)]]
    refused(other, r"'k0' has two meanings on rank 0 and on rank 3")


def test_numbers_beyond_32_bits_are_planned():
    shards = [
        [ShardedTensor("k", None, torch.uint8, (1 << 33,), (1 << 34,), (rank << 33,), None, 0)]
        for rank in range(2)
    ]
    planned = plan_divided([shard_table(held) for held in shards], 2)
    assert [pieces.offsets.tolist() for pieces in planned.pieces] == [[[0]], [[1 << 33]]]


def test_few_shards_have_one_planner():
    assert num_planners_for(1 << 20, 1024) == 1
    assert num_planners_for((1 << 20) + 1, 1024) == 2
    assert num_planners_for(1 << 30, 16_384) == 16
    assert num_planners_for(1 << 30, 3) == 3

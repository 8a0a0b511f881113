"""Planning of shared reads: pure functions, compared with loops over sets."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region, flat_start, whole
from distckpt._plan.load import Request, plan_load
from distckpt._plan.share import (
    UNIT_BYTES,
    WAVE_BYTES,
    SharePlan,
    UnitTable,
    describe_units,
    divide,
    plan_shares,
)
from tests.support.manifests import manifest_of

MIB = 1 << 20


def table_of(names, group=0, place=0, num_bytes=100):
    """Make a table whose units are named by numbers."""
    return UnitTable(
        np.array(names, np.int64).reshape(-1, 1),
        np.full(len(names), num_bytes, np.int64),
        group,
        place,
    )


def plan(tables):
    """Plan, by way of the bytes that ranks exchange."""
    plans = plan_shares([UnitTable.from_bytes(table.to_bytes()) for table in tables])
    return [SharePlan.from_bytes(plan.to_bytes()) for plan in plans]


def by_name(tables, plans):
    """Return for each (group, unit) what its holders think of it, and what is sent."""
    known, sent = defaultdict(dict), defaultdict(set)
    for rank, (table, mine) in enumerate(zip(tables, plans, strict=True)):
        names = table.rows[:, 0].tolist()
        for row, name in enumerate(names):
            if mine.readers[row] >= 0:
                seen = (int(mine.readers[row]), int(mine.sequence[row]), int(mine.waves[row]))
                assert rank not in known[table.group, name], "shared twice on one rank"
                known[table.group, name][rank] = seen
        for row, to in zip(mine.send_units.tolist(), mine.send_ranks.tolist(), strict=True):
            assert mine.readers[row] == rank
            sent[table.group, names[row]].add(to)
        assert (np.diff(mine.sequence[mine.send_units]) >= 0).all()
    return known, sent


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 8), max_size=8), st.integers(0, 1), st.integers(0, 2)),
        min_size=1,
        max_size=5,
    )
)
def test_each_unit_has_one_reader_who_sends_it_to_all_others_that_want_it(wanted):
    tables = [table_of(names, group, place) for names, group, place in wanted]
    plans = plan(tables)
    holders, places = defaultdict(set), defaultdict(set)
    for rank, (names, group, place) in enumerate(wanted):
        for name in names:
            holders[group, name].add(rank)
            places[group, name].add(place)
    known, sent = by_name(tables, plans)
    assert set(known) == {unit for unit in holders if len(places[unit]) > 1}
    for unit, seen in known.items():
        assert set(seen) == holders[unit]
        assert len(set(seen.values())) == 1, "all agree"
        reader = next(iter(seen.values()))[0]
        assert sent[unit] == holders[unit] - {reader}
    numbers = sorted(next(iter(seen.values()))[1] for seen in known.values())
    assert numbers == list(range(len(known))), "one order of all units"


def test_replicas_read_equally_much():
    tables = [table_of(range(40), place=rank) for rank in range(4)]
    for rank, mine in enumerate(plan(tables)):
        assert (mine.readers == rank).sum() == 10


def test_who_reads_much_alone_reads_less_for_others():
    tables = [table_of([*range(10), 100, 101, 102, 103], place=0), table_of(range(10), place=1)]
    first, second = plan(tables)
    assert (first.readers == 0).sum() == 3
    assert (second.readers == 1).sum() == 7
    assert (first.readers[10:] == -1).all()


def test_the_most_that_a_rank_shares_is_known_to_all():
    tables = [table_of([1, 2, 8]), table_of([1, 2, 3, 9], place=1), table_of([3, 7], place=2)]
    assert [mine.most_bytes for mine in plan(tables)] == [300] * 3


def test_readers_go_through_their_units_side_by_side():
    tables = [table_of(range(200), place=rank, num_bytes=2 * MIB) for rank in range(2)]
    plans = plan(tables)
    for rank, mine in enumerate(plans):
        own = np.flatnonzero(mine.readers == rank)
        read = np.bincount(mine.waves[own]) * 2 * MIB
        assert (read[:-1] == WAVE_BYTES).all()
        assert len(read) == mine.num_waves
        # In the order of all units, readers take turns.
        assert np.abs(mine.sequence[own] - 2 * np.arange(100)).max() <= 1


def test_nothing_to_share():
    for tables in (
        [table_of([])],
        [table_of([1]), table_of([2], place=1)],
        [table_of([]), table_of([], place=1)],
    ):
        for mine in plan(tables):
            assert mine.num_waves == 0
            assert (mine.readers == -1).all()
            assert len(mine.send_units) == 0


@pytest.mark.parametrize(
    ("shape", "num_units"),
    [
        ((4096, 1024), 16),
        ((3 * MIB,), 12),
        ((1, 8, 512, 1024), 16),
        ((1000, 1001), 1),
        ((2500, 1536), 20),
    ],
)
def test_large_copies_are_divided_between_checksum_blocks(shape, num_units):
    manifest = manifest_of({"w": (shape, [whole(shape)])})
    copies = plan_load(StoredCheckpoint("", manifest), [Request("w", shape, whole(shape))])
    units, copy_of = divide(manifest, copies)
    assert len(units) == num_units
    assert set(copy_of.tolist()) == {0}
    assert sum(unit.source.num_elements for unit in units) == math.prod(shape)
    for unit in units:
        assert unit.target == unit.source
        assert flat_start(shape, unit.source) * 8 % manifest.block_bytes == 0


def test_units_of_a_strided_copy_keep_their_place_in_the_target():
    shape = (4096, 1024)
    manifest = manifest_of({"w": (shape, [whole(shape)])})
    wanted = Region((96, 100), (4000, 600))
    copies = plan_load(StoredCheckpoint("", manifest), [Request("w", shape, wanted)])
    units, _ = divide(manifest, copies)
    assert len(units) == 10
    covered = np.zeros(wanted.shape, np.int64)
    for unit in units:
        assert unit.source.num_elements * 8 <= UNIT_BYTES
        assert unit.source.relative_to(wanted.offset) == unit.target
        covered[unit.target.slices()] += 1
    assert (covered == 1).all()


def test_units_are_equal_when_chunk_region_and_dtype_are():
    manifest = manifest_of(
        {"a": ((6, 4), [whole((6, 4))]), "b": ((6, 4), [whole((6, 4))]), "c": ((), [whole(())])}
    )

    def rows_of(key, region, dtype):
        request = Request(key, manifest.global_shapes[manifest.key_index[key]], region)
        units, _ = divide(manifest, plan_load(StoredCheckpoint("", manifest), [request]))
        return describe_units(manifest, units, [dtype], 0, 0)

    base = rows_of("a", whole((6, 4)), torch.int64)
    assert base.num_bytes.tolist() == [192]
    assert np.array_equal(base.rows, rows_of("a", whole((6, 4)), torch.int64).rows)
    for other in (
        rows_of("b", whole((6, 4)), torch.int64),
        rows_of("a", whole((6, 4)), torch.float64),
        rows_of("a", Region((1, 0), (5, 4)), torch.int64),
        rows_of("c", whole(()), torch.int64),
    ):
        assert other.rows.shape == base.rows.shape
        assert not np.array_equal(other.rows, base.rows)
    assert rows_of("a", Region((6, 0), (0, 4)), torch.int64).rows.shape == (0, base.rows.shape[1])

"""Planning of shared reads: pure functions, compared with loops over sets."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region, flat_start, intersect, whole
from distckpt._plan import share_out
from distckpt._plan.load import Request, plan_load
from distckpt._plan.share import (
    MANY_UNITS,
    MAX_UNIT_BYTES,
    UNIT_BYTES,
    ReadCosts,
    SharePlan,
    UnitTable,
    describe_units,
    divide,
    unit_bytes_for,
)
from distckpt._plan.share_out import WAVE_BYTES, plan_shares
from tests.support.manifests import manifest_of

MIB = 1 << 20
NUM_CHUNKS = 250


def table_of(names, group=0, num_bytes=104):
    """Make a table whose units are whole chunks, of so many bytes."""
    count = len(names)
    chunks = np.array(names, np.int64)
    zeros = np.zeros(count, np.int64)
    return UnitTable(
        np.column_stack([chunks, zeros, zeros + 8]),
        zeros.reshape(-1, 1),
        np.full((count, 1), num_bytes // 8, np.int64),
        np.full(count, num_bytes, np.int64),
        group,
    )


def costs_of(num_bytes=104):
    shape = (num_bytes // 8,)
    return ReadCosts(manifest_of({f"{i}": (shape, [whole(shape)]) for i in range(NUM_CHUNKS)}))


def plan(tables, num_bytes=104):
    """Plan, by way of the bytes that ranks exchange."""
    return shared_out(tables, costs_of(num_bytes))


def shared_out(tables, costs, **kwargs):
    messages = [table.to_bytes() for table in tables]
    return [SharePlan.from_bytes(data) for data in plan_shares(messages, costs, **kwargs)]


def by_name(tables, plans):
    """Return for each (group, unit) what its holders think of it, and what is sent."""
    known, sent = defaultdict(dict), defaultdict(set)
    for rank, (table, mine) in enumerate(zip(tables, plans, strict=True)):
        names = table.names[:, 0].tolist()
        for row, name in enumerate(names):
            if mine.readers[row] >= 0:
                assert rank not in known[table.group, name], "shared twice on one rank"
                known[table.group, name][rank] = (int(mine.readers[row]), int(mine.waves[row]))
        for read, to in zip(mine.send_reads.tolist(), mine.send_ranks.tolist(), strict=True):
            sent[table.group, int(mine.read_chunks[read])].add(to)
        assert (np.diff(mine.send_sequence) > 0).all()
    return known, sent


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 8), max_size=8, unique=True),
            st.integers(0, 1),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_each_unit_has_one_reader_who_sends_it_to_all_others_that_want_it(wanted):
    tables = [table_of(names, group) for names, group in wanted]
    plans = plan(tables)
    holders = defaultdict(set)
    for rank, (names, group) in enumerate(wanted):
        for name in names:
            holders[group, name].add(rank)
    known, sent = by_name(tables, plans)
    assert set(known) == {unit for unit in holders if len(holders[unit]) > 1}
    num_sent = sum(len(ranks) for ranks in sent.values())
    assert {mine.sent_bytes for mine in plans} == {num_sent * 104}
    for unit, seen in known.items():
        assert set(seen) == holders[unit]
        assert len(set(seen.values())) == 1, "all agree"
        reader = next(iter(seen.values()))[0]
        assert sent[unit] == holders[unit] - {reader}
    numbers = [n for mine in plans for n in mine.sequence[mine.readers >= 0].tolist()]
    assert sorted(numbers) == list(range(len(numbers))), "one order of all units"


@st.composite
def all_tables(draw):
    """Draw the units of some ranks: parts of whole chunks of 13 elements."""
    tables = []
    for _ in range(draw(st.integers(1, 7))):
        pairs = st.tuples(st.integers(0, 30), st.integers(0, 12), st.sampled_from([8, 72]))
        units = np.array(draw(st.lists(pairs, max_size=12)), np.int64).reshape(-1, 3)
        chunks, firsts, kinds = units.T
        tables.append(
            UnitTable(
                np.column_stack([chunks, np.zeros_like(chunks), kinds]),
                firsts[:, None],
                13 - firsts[:, None],
                (13 - firsts) * 8,
                draw(st.integers(0, 1)),
            )
        )
    return tables


@settings(deadline=None, max_examples=100)
@given(all_tables(), st.integers(1, 20))
def test_the_plan_is_the_same_however_many_units_are_planned_at_a_time(tables, part_rows):
    messages = [table.to_bytes() for table in tables]
    expected = list(plan_shares([*messages], costs_of()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(share_out, "PART_ROWS", part_rows)
        assert list(plan_shares(messages, costs_of())) == expected
    assert not messages, "memory of what was sent is given back"


def test_many_ranks_read_about_as_much_each_and_every_byte_once():
    """Each four of 512 ranks request the same chunks, and all of them a few others."""
    size, rng = 1 << 10, np.random.default_rng(0)
    sizes = rng.integers(1, 9, (NUM_CHUNKS,)) * size
    shapes = {f"{i}": (int(n) // 8,) for i, n in enumerate(sizes)}
    costs = ReadCosts(manifest_of({key: (shape, [whole(shape)]) for key, shape in shapes.items()}))
    # The manifest has keys in another order.
    sizes = costs.manifest.num_bytes
    tables = []
    for rank in range(512):
        chunks = np.append(np.arange(rank // 4, 200, 128), np.arange(200, NUM_CHUNKS))
        zeros = np.zeros_like(chunks)
        num_bytes = sizes[chunks]
        names = np.column_stack([chunks, zeros, zeros + 8])
        tables.append(UnitTable(names, zeros[:, None], num_bytes[:, None] // 8, num_bytes, 0))
    plans = shared_out(tables, costs)
    read = [int(sizes[mine.read_chunks].sum()) for mine in plans]
    assert all((mine.readers >= 0).all() for mine in plans)
    assert sum(read) == sizes.sum()
    assert max(read) <= 8 * size + sum(read) / len(read)


def test_replicas_read_equally_much():
    tables = [table_of(range(40)) for rank in range(4)]
    for rank, mine in enumerate(plan(tables)):
        assert (mine.readers == rank).sum() == 10


def test_who_reads_much_alone_reads_less_for_others():
    tables = [table_of([*range(10), 100, 101, 102, 103]), table_of(range(10))]
    first, second = plan(tables)
    assert (first.readers == 0).sum() == 3
    assert (second.readers == 1).sum() == 7
    assert (first.readers[10:] == -1).all()


def test_the_most_that_a_rank_shares_is_known_to_all():
    tables = [table_of([1, 2, 8]), table_of([1, 2, 3, 9]), table_of([3, 7])]
    assert [mine.most_bytes for mine in plan(tables)] == [312] * 3


def test_readers_go_through_their_units_side_by_side():
    tables = [table_of(range(200), num_bytes=2 * MIB) for rank in range(2)]
    plans = plan(tables, 2 * MIB)
    for rank, mine in enumerate(plans):
        own = np.flatnonzero(mine.readers == rank)
        read = np.bincount(mine.waves[own]) * 2 * MIB
        # Few bytes go in many waves, too: what is sent waits until a wave has been read.
        assert len(read) == mine.num_waves == 16
        assert read.max() - read.min() <= 2 * MIB < WAVE_BYTES
        # In the order of all units, readers take turns.
        assert np.abs(mine.sequence[own] // 2 - 2 * np.arange(100)).max() <= 1


def test_nothing_to_share():
    for tables in (
        [table_of([])],
        [table_of([1]), table_of([2])],
        [table_of([]), table_of([])],
    ):
        for mine in plan(tables):
            assert mine.num_waves == 0
            assert (mine.readers == -1).all()
            assert len(mine.read_chunks) == len(mine.send_ranks) == 0


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
    units = divide(manifest, copies)
    assert units.cells.tolist() == list(range(num_units))
    assert len(units) == num_units
    assert set(units.copy_of.tolist()) == {0}
    assert sum(unit.source.num_elements for unit in units) == math.prod(shape)
    for unit in units:
        assert unit.target == unit.source
        assert flat_start(shape, unit.source) * 8 % manifest.block_bytes == 0


def test_units_of_a_strided_copy_keep_their_place_in_the_target():
    shape = (4096, 1024)
    manifest = manifest_of({"w": (shape, [whole(shape)])})
    wanted = Region((96, 100), (4000, 600))
    copies = plan_load(StoredCheckpoint("", manifest), [Request("w", shape, wanted)])
    units = divide(manifest, copies)
    # Cells have 256 rows, and the first and the last one are cut.
    assert len(units) == 16
    covered = np.zeros(wanted.shape, np.int64)
    for unit in units:
        assert unit.source.num_elements * 8 <= UNIT_BYTES
        assert unit.source.relative_to(wanted.offset) == unit.target
        covered[unit.target.slices()] += 1
    assert (covered == 1).all()


def test_units_have_equal_names_when_cell_and_dtype_are_equal():
    shapes = {"a": (6, 4), "b": (6, 4), "c": ()}
    manifest = manifest_of({key: (shape, [whole(shape)]) for key, shape in shapes.items()})

    def described(key, region, dtype):
        request = Request(key, manifest.global_shapes[manifest.key_index[key]], region)
        divided = divide(manifest, plan_load(StoredCheckpoint("", manifest), [request]))
        return describe_units(ReadCosts(manifest), divided, [dtype], 0)

    base = described("a", whole((6, 4)), torch.int64)
    assert base.num_bytes.tolist() == [192]
    for other in (
        described("a", whole((6, 4)), torch.int64),
        described("a", Region((1, 0), (5, 4)), torch.int64),
    ):
        assert np.array_equal(other.names, base.names)
    for other in (
        described("b", whole((6, 4)), torch.int64),
        described("a", whole((6, 4)), torch.float64),
        described("c", whole(()), torch.int64),
    ):
        assert other.offsets.shape == other.shapes.shape == base.shapes.shape
        assert not np.array_equal(other.names, base.names)
    assert described("a", Region((6, 0), (0, 4)), torch.int64).offsets.shape == (0, 2)


def test_cells_grow_with_what_is_requested():
    assert unit_bytes_for(1 << 30) == UNIT_BYTES
    assert unit_bytes_for(MANY_UNITS * UNIT_BYTES + 1) == 2 * UNIT_BYTES
    assert unit_bytes_for(1 << 50) == MAX_UNIT_BYTES


@st.composite
def layouts(draw):
    """Draw a tensor, the chunks it is stored in, and what some ranks request of it."""
    shape = draw(st.sampled_from([(40,), (12, 10), (6, 4, 5), (1, 9, 8)]))

    def some_region():
        edges = [sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)))) for n in shape]
        edges = [(low, max(high, low + 1)) for low, high in edges]
        return Region(tuple(low for low, _ in edges), tuple(high - low for low, high in edges))

    cuts = sorted({0, *draw(st.lists(st.integers(1, shape[0]), max_size=3)), shape[0]})
    chunks = [
        Region((low, *[0] * (len(shape) - 1)), (high - low, *shape[1:]))
        for low, high in itertools.pairwise(cuts)
    ]
    wanted = [[some_region() for _ in range(draw(st.integers(0, 2)))] for _ in range(4)]
    return shape, chunks, wanted, draw(st.sampled_from([8, 64, 160])), draw(st.booleans())


@pytest.mark.parametrize("part_rows", [3, share_out.PART_ROWS])
@settings(deadline=None, max_examples=200)
@given(drawn=layouts())
def test_parts_of_overlapping_regions_come_from_one_reader(part_rows, drawn):
    """What each rank has in the end is compared with numpy indexing of the tensor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(share_out, "PART_ROWS", part_rows)
        check_parts_of_overlapping_regions(drawn)


def check_parts_of_overlapping_regions(drawn):
    shape, chunks, wanted, unit_bytes, are_exact = drawn
    values = np.arange(math.prod(shape)).reshape(shape)
    manifest = manifest_of({"w": (shape, chunks)})
    manifest.block_bytes = 16
    costs = ReadCosts(manifest, are_exact, request_bytes=0)
    stored = StoredCheckpoint("", manifest)
    all_units, tables = [], []
    for regions in wanted:
        copies = plan_load(stored, [Request("w", shape, region) for region in regions])
        all_units.append(divide(manifest, copies, unit_bytes))
        dtypes = [torch.int64] * len(regions)
        tables.append(describe_units(costs, all_units[-1], dtypes, 0))
    plans = shared_out(tables, costs, max_held_bytes=64)
    # What readers send: the values by receiver and place in the sequence.
    sent = {}
    for mine in plans:
        for read, to, number, *part in zip(*mine.sends, strict=True):
            held = region_of(mine.read_offsets[read], mine.read_shapes[read])
            content = values[chunks[mine.read_chunks[read]].slices()][held.slices()]
            inner = region_of(*part).relative_to(held.offset)
            sent[to, number] = content[inner.slices()], mine.read_waves[read]
    read_bytes = 0
    for rank, (regions, mine) in enumerate(zip(wanted, plans, strict=True)):
        found = [np.full(region.shape, -1) for region in regions]
        for number, unit in enumerate(all_units[rank]):
            part = values[chunks[unit.chunk].slices()][unit.source.slices()]
            if mine.readers[number] not in (-1, rank):
                part, wave = sent.pop((rank, mine.sequence[number]))
                assert wave == mine.waves[number]
            found[unit.request][unit.target.slices()] = part
        for region, array in zip(regions, found, strict=True):
            assert np.array_equal(array, values[region.slices()])
        check_regions(mine, rank, all_units[rank])
        read_bytes += int(tables[rank].num_bytes[mine.readers < 0].sum())
        read_bytes += int(costs.of(mine.read_chunks, mine.read_offsets, mine.read_shapes).sum())
    assert not sent, "everything that is sent is expected"
    assert read_bytes <= sum(int(table.num_bytes.sum()) for table in tables)


def region_of(offset, shape):
    return Region(tuple(offset.tolist()), tuple(shape.tolist()))


def check_regions(mine, rank, units):
    """Check that the regions that a rank reads hold its own units, and that those are whole which
    the plan says are.
    """
    assert np.array_equal(mine.unit_reads >= 0, mine.readers == rank)
    regions = list(map(region_of, mine.read_offsets, mine.read_shapes))
    for unit, read in zip(units, mine.unit_reads.tolist(), strict=True):
        if read >= 0:
            assert unit.chunk == mine.read_chunks[read]
            assert intersect(unit.source, regions[read]) == unit.source
    for region, unit in zip(regions, mine.read_units.tolist(), strict=True):
        if unit >= 0:
            assert units[unit].source == region


def shares_of(shape, num_tensors, region_of_rank, num_ranks):
    """Plan a load of another program's files in which each rank requests a region of each tensor.

    Return the plans, and the bytes that each rank reads.
    """
    shapes = {f"t{i}": shape for i in range(num_tensors)}
    manifest = manifest_of({key: (shape, [whole(shape)]) for key, shape in shapes.items()})
    manifest.has_checksums = False
    costs = ReadCosts(manifest, are_exact=True)
    stored = StoredCheckpoint("", manifest)
    tables = []
    for rank in range(num_ranks):
        requests = [Request(key, shape, region_of_rank(rank)) for key in shapes]
        divided = divide(manifest, plan_load(stored, requests))
        tables.append(describe_units(costs, divided, [torch.int64] * num_tensors, 0))
    plans = shared_out(tables, costs)
    read = []
    for table, mine in zip(tables, plans, strict=True):
        alone = table.shapes[mine.readers < 0].prod(axis=1).sum()
        read.append(8 * int(alone + mine.read_shapes.prod(axis=1).sum()))
    return plans, read


def test_small_rows_are_read_in_large_pieces():
    def rows(rank):
        return Region((4 * rank, 0), (4, 2048))

    plans, read = shares_of((64, 2048), 40, rows, 16)
    assert sum(read) == 40 * MIB, "each byte once"
    assert {size for mine in plans for size in mine.read_shapes.prod(axis=1) * 8} == {MIB}
    # Neighbors in the file have one reader.
    for mine in plans:
        chunks = np.sort(mine.read_chunks)
        assert (np.diff(chunks) == 1).all()


def test_large_rows_are_read_by_those_that_request_them():
    plans, read = shares_of((8192, 256), 3, lambda rank: Region((4096 * rank, 0), (4096, 256)), 2)
    assert [mine.num_waves for mine in plans] == [0, 0]
    assert read == [24 * MIB] * 2


def test_columns_are_read_once_as_whole_rows():
    def columns(rank):
        return Region((0, 64 * rank), (4096, 64))

    plans, read = shares_of((4096, 512), 3, columns, 8)
    assert sum(read) == 48 * MIB
    for mine in plans:
        assert (mine.readers >= 0).all()
        assert (mine.read_shapes[:, 1] == 512).all()


def test_ranks_whose_rows_meet_in_many_cells_read_equally_much():
    """The cells of 2 MiB and the rows of 64 ranks begin at different places."""

    def rows(rank):
        return Region((32 * rank, 0), (32, 768))

    _, read = shares_of((2048, 768), 24, rows, 64)
    assert sum(read) == 24 * 12 * MIB
    of_nodes = np.array(read).reshape(8, 8).sum(axis=1)
    assert of_nodes.max() <= 1.02 * of_nodes.mean()

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import Manifest
from distckpt._format.planned_manifest import planned_manifest
from distckpt._geometry.region import Region, regions_to_arrays
from distckpt._plan.layout import chunk_table, lay_out_files
from distckpt._plan.save import Pieces, plan_owners
from distckpt._state.shards import merge_tables, shard_table
from distckpt.mapping import ShardedTensor


def shard(key, region, global_shape):
    return ShardedTensor(key, None, torch.float32, region.shape, global_shape, region.offset, None)


@settings(max_examples=100)
@given(st.data())
def test_files_hold_one_chunk_per_key_and_chunks_are_their_pieces_in_order(data):
    pieces, shards, index = [], [], {}
    for key in "ab":
        shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
        index[key] = np.arange(math.prod(shape)).reshape(shape)
        cuts = [sorted(data.draw(st.lists(st.integers(0, n), max_size=2))) for n in shape]
        edges = [[0, *inner, n] for inner, n in zip(cuts, shape, strict=True)]
        for spans in itertools.product(*(itertools.pairwise(e) for e in edges)):
            if data.draw(st.booleans()):
                pieces.append(
                    Region(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))
                )
                shards.append(shard(key, pieces[-1], shape))
    order = np.array(data.draw(st.permutations(range(len(pieces)))), np.int64)
    offsets, extents = regions_to_arrays(pieces)
    ids = np.array(["ab".index(shards[i].key) for i in order.tolist()], np.int64)
    files, _ = lay_out_files(
        0, shard_table(shards), Pieces(ids, order, offsets[order], extents[order])
    )
    used = []
    for file in files:
        assert len({chunk.key for chunk in file.chunks}) == len(file.chunks) > 0
        for chunk in file.chunks:
            assert "ab"[chunk.key_id] == chunk.key
            assert chunk.num_bytes == 4 * chunk.region.num_elements
            content = [
                i
                for _, region in chunk.pieces
                for i in index[chunk.key][region.slices()].reshape(-1).tolist()
            ]
            assert content == index[chunk.key][chunk.region.slices()].reshape(-1).tolist()
            assert all(shards[shard_id].key == chunk.key for shard_id, _ in chunk.pieces)
            used += [(shard_id, region) for shard_id, region in chunk.pieces]
    assert sorted(used) == list(enumerate(pieces))
    table = chunk_table(files)
    regions = [(chunk.key_id, chunk.region) for file in files for chunk in file.chunks]
    checksums = np.arange(int((table.num_bytes > 0).sum()), dtype=np.uint64)
    tables = [ChunkTable.from_bytes(table.to_bytes())]
    keys = Manifest(["a", "b"], ["F32"] * 2, [(1,) * 3] * 2, ChunkTable.empty(), {})
    planned = planned_manifest(keys, tables)
    joined = planned.completed([checksums.tobytes()])
    assert joined.key_ids.tolist() == sorted(key_id for key_id, _ in regions)
    assert len(joined.files) == len(files)
    for file_id, file in enumerate(joined.files):
        # Chunks follow the header, and one another, without gaps.
        rows = np.flatnonzero(joined.file_ids == file_id)
        rows = rows[np.lexsort((joined.num_bytes[rows], joined.first_bytes[rows]))]
        ends = joined.first_bytes[rows] + joined.num_bytes[rows]
        assert [*joined.first_bytes[rows].tolist(), file.num_bytes] == [
            file.header_bytes,
            *ends.tolist(),
        ]


@pytest.mark.parametrize(
    ("offsets", "extents", "num_files"),
    [
        ([[0, 0], [2, 0], [4, 0]], [[2, 3], [2, 3], [1, 3]], 1),
        ([[0, 0], [0, 2], [0, 4]], [[1, 2], [1, 2], [1, 3]], 1),
        ([[0, 0], [0, 2], [0, 4]], [[2, 2], [2, 2], [2, 3]], 3),
        ([[0, 0], [4, 0]], [[2, 3], [1, 3]], 2),
    ],
    ids=["rows", "parts of one row", "columns", "rows with a gap"],
)
def test_pieces_that_follow_one_another_in_memory_become_one_chunk(offsets, extents, num_files):
    regions = [
        Region(tuple(offset), tuple(extent))
        for offset, extent in zip(offsets, extents, strict=True)
    ]
    assert num_files_of([shard("w", region, (5, 7)) for region in regions]) == num_files


def test_a_flat_range_across_rows_needs_a_file_per_region_and_a_whole_shard_none_more():
    flat = ShardedTensor(
        "w", None, torch.float32, (4, 5), (4, 5), (0, 0), None, flattened_range=slice(3, 18)
    )
    rest = [
        ShardedTensor(
            "w", None, torch.float32, (4, 5), (4, 5), (0, 0), None, flattened_range=slice(*bounds)
        )
        for bounds in ((0, 3), (18, 20))
    ]
    assert num_files_of([flat, *rest]) == 1
    assert num_files_of([flat]) == 3


def num_files_of(shards):
    table = shard_table(shards)
    (pieces,) = plan_owners(merge_tables([table]), 1, {})
    return len(lay_out_files(0, table, pieces)[0])

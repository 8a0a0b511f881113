"""Tables of chunks in parts: regions find the chunks that they meet, in any order of rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distckpt._format.chunk_table import NO_CHECKSUMS
from distckpt._format.columns import pack_table
from distckpt._format.lazy_columns import LazyChunks, LazyColumn, Part


def tables(random, num_keys, is_shuffled):
    """Yield parts of a table of rows and columns of keys, and its columns as arrays."""
    columns = {"key_ids": [], "offsets": [], "shapes": []}
    for key in range(num_keys):
        rows, cols = random.integers(1, 6, 2)
        height, width = random.integers(1, 9, 2)
        grid = np.stack(np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij"), -1)
        offsets = grid.reshape(-1, 2) * [height, width]
        if is_shuffled:
            offsets = random.permutation(offsets)
        columns["key_ids"].append(np.full(len(offsets), key))
        columns["offsets"].append(offsets)
        columns["shapes"].append(np.broadcast_to([height, width], offsets.shape))
    return columns


@given(st.integers(0, 1 << 30), st.integers(1, 12), st.booleans(), st.integers(1, 4))
def test_regions_find_the_chunks_that_they_meet(seed, num_keys, is_shuffled, num_parts):
    random = np.random.default_rng(seed)
    columns = tables(random, num_keys, is_shuffled)
    keys_of_parts = np.array_split(np.arange(num_keys), num_parts)
    parts = [
        Part.from_bytes(
            pack_table({name: np.concatenate([c[k] for k in keys]) for name, c in columns.items()})
        )
        for keys in keys_of_parts
        if len(keys)
    ]
    key_ids, offsets, shapes = (np.concatenate(column) for column in columns.values())
    axes = {"key_ids": None, "offsets": 2, "shapes": 2}
    lazy = {name: LazyColumn.of(parts, name, num_axes) for name, num_axes in axes.items()}
    any_column = lazy["key_ids"]
    chunks = LazyChunks(
        "location",
        files=[],
        **lazy,
        file_ids=any_column,
        first_bytes=any_column,
        num_bytes=any_column,
        block_checksums=NO_CHECKSUMS,
        checks=None,
    )
    starts = chunks.key_starts(num_keys)
    assert np.array_equal(starts, np.searchsorted(key_ids, np.arange(num_keys + 1)))

    wanted = random.integers(0, num_keys, 20)
    low, size = random.integers(0, 40, (20, 2)), random.integers(0, 20, (20, 2))
    firsts, stops = chunks.rows_near(wanted, low, size, starts)
    num_found = 0
    for key, corner, extent, first, stop in zip(wanted, low, size, firsts, stops, strict=True):
        meets = (
            (key_ids == key)
            & (offsets < corner + extent).all(axis=1)
            & (corner < offsets + shapes).all(axis=1)
            & (extent > 0).all()
        )
        assert starts[key] <= first <= stop <= starts[key + 1]
        assert not meets[:first].any()
        assert not meets[stop:].any()
        num_found += stop - first
    if not is_shuffled:
        # Nearly what they meet along the first axis, and no more.
        along = sum(
            (
                (key_ids == key)
                & (offsets[:, 0] < c[0] + e[0])
                & (c[0] < offsets[:, 0] + shapes[:, 0])
            ).sum()
            for key, c, e in zip(wanted, low, size, strict=True)
        )
        slack = 2 * sum(np.bincount(key_ids[starts[k] : starts[k + 1]]).max() for k in wanted)
        assert num_found <= along + slack

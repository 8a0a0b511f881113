"""Tables of columns as they are sent."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt._format.columns import compress, decompress, pack, pack_table
from distckpt._format.lazy_columns import LazyColumn, Part


@pytest.mark.parametrize("data", [b"", b"a", bytes(range(8)), bytes(range(250)) * 5])
def test_what_is_compressed_comes_back(data):
    assert decompress(compress(data)) == data


def announced(num_bytes: int, content: bytes) -> bytes:
    return num_bytes.to_bytes(8, "big") + content


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        announced(1 << 62, zlib.compress(bytes(64))),
        announced(8, zlib.compress(bytes(1 << 20))),
        announced(1024, zlib.compress(bytes(64))),
        announced(1024, zlib.compress(bytes(1024))[:-8]),
        announced(64, b"not zlib at all" * 4),
    ],
    ids=["empty", "short", "huge", "bomb", "too little", "cut off", "other bytes"],
)
def test_hostile_messages_are_refused(data):
    with pytest.raises(ValueError, match=r"^not compressed"):
        decompress(data)


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 40), st.integers(-3, 3), st.integers(1, 30)), max_size=6
    ),
    st.integers(0, 3),
)
def test_tables_of_regular_columns_come_back_whole(runs, ndim):
    column = np.concatenate(
        [np.zeros(0, np.int64), *(first + step * np.arange(num) for first, step, num in runs)]
    )
    wide = column[:, None] * np.arange(1, ndim + 1)
    random = np.random.default_rng(len(column)).permutation(len(column)).astype(np.uint16)
    columns = {"key_ids": column, "file_ids": random, "offsets": wide}
    part = Part.from_bytes(pack_table(columns))
    for name, expected in columns.items():
        found = LazyColumn.of([part, part], name, ndim if name == "offsets" else None)
        twice = np.concatenate([expected, expected])
        assert np.array_equal(found.whole(), twice)
        rows = np.random.default_rng(ndim).integers(0, max(1, len(twice)), min(9, len(twice)))
        assert np.array_equal(found[rows], twice[rows])
        assert all(np.array_equal(found[row], twice[row]) for row in rows.tolist())
        assert np.array_equal(found[1:4], twice[1:4])
        if name != "offsets":
            wanted = np.unique(twice[rows])
            assert np.array_equal(found.rows_of(wanted), np.flatnonzero(np.isin(twice, wanted)))


def test_a_regular_table_takes_as_much_as_its_runs():
    rows = np.arange(1 << 16)
    table = {"key_ids": rows // 1024, "offsets": np.stack((rows % 1024 * 64, rows * 0), axis=1)}
    assert len(pack_table(table)) < 5000


@pytest.mark.parametrize(
    "counts", [[1 << 40], [1 << 62] * 4, [-1, 5], [0, 4]], ids=["long", "wrapping", "below", "none"]
)
def test_runs_that_lie_are_refused(counts):
    columns = {"key_ids.deltas": np.ones(len(counts), np.int64), "key_ids.counts": np.array(counts)}
    with pytest.raises(ValueError, match="do not have 4 numbers"):
        LazyColumn.of([Part.from_bytes(pack({"rows": 4}, columns))], "key_ids")

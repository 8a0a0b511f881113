from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import Manifest
from distckpt._format.manifest_reading import manifest_from_bytes
from distckpt._format.planned_manifest import planned_manifest, report_of
from distckpt._format.safetensors_file import ShardFile
from distckpt._geometry.region import Region
from distckpt.megatron.core import CorruptCheckpointError
from tests.support.manifests import example_manifest


def with_changes(fields=None, columns=None):
    """Encode the example with other JSON fields or columns."""
    stored = safetensors.numpy.load(example_manifest().to_bytes())
    text = json.loads(stored.pop("json").tobytes())
    text.update(fields or {})
    stored.update(columns or {})
    return encode(text, stored)


def encode(fields, columns):
    columns = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    return safetensors.numpy.save(
        {**columns, "json": np.frombuffer(json.dumps(fields).encode(), np.uint8)}
    )


def test_manifest_is_the_same_after_writing_and_reading():
    before = example_manifest()
    after = manifest_from_bytes(before.to_bytes(), "here")
    for name in ("keys", "dtypes", "global_shapes", "files", "aliases", "block_bytes"):
        assert getattr(after, name) == getattr(before, name)
    for name in (
        "key_ids",
        "file_ids",
        "first_bytes",
        "num_bytes",
        "offsets",
        "shapes",
        "block_checksums",
    ):
        assert np.array_equal(getattr(after, name), getattr(before, name))
    assert after.to_bytes() == before.to_bytes()


def test_chunks_are_found_by_key():
    manifest = example_manifest()
    assert manifest.key_index == {"a": 0, "scalar": 1, "rng/0": 2, "tied": 0}
    assert manifest.chunk_rows(0) == slice(0, 2)
    assert manifest.chunk_rows(2) == slice(3, 5)
    assert manifest.chunk_region(1) == Region((2, 0), (2, 6))
    assert manifest.chunk_region(2) == Region((), ())
    assert manifest.first_blocks.tolist() == [0, 1, 2, 3, 10]


def test_manifest_is_a_safetensors_file_of_plain_arrays():
    stored = safetensors.numpy.load(example_manifest().to_bytes())
    # As narrow as the numbers allow.
    assert stored["offsets"].dtype == np.uint8
    assert stored["first_bytes"].dtype == np.uint16
    assert stored["offsets"].tolist() == [[0, 0], [2, 0], [0, 0], [0, 0], [1, 0]]
    fields = json.loads(stored["json"].tobytes())
    assert fields["format_version"] == 3
    assert fields["keys"] == ["a", "scalar", "rng/0"]


def test_chunks_of_all_ranks_are_sorted_once_and_completed_by_what_was_written():
    """What a rank knows only when it has written are its checksums, and the sizes and positions of
    its objects; they may be others at each save.
    """
    manifest, none = example_manifest(), ChunkTable.empty()
    whole = manifest.chunks
    first = none._replace(files=[whole.files[1]], **rows_of(whole, [4]))
    second = none._replace(files=[whole.files[0]], **rows_of(whole, [1, 2]))
    third = none._replace(
        files=whole.files, **{**rows_of(whole, [0, 3]), "file_ids": np.array([0, 1])}
    )
    late = ShardFile("late", 0, 0, 0)
    first = first._replace(files=[late], num_bytes=np.array([0]), first_bytes=np.array([0]))
    planned = planned_manifest(
        Manifest(manifest.keys, manifest.dtypes, manifest.global_shapes, none, {}),
        [first, second, third],
    )
    for size, of_late in ((7, [4]), (600_000, [40, 41, 42])):
        laid_out = ShardFile("late", size + 100, 100, 5)
        numbers = np.zeros(0, np.int64)
        checksums = [np.array(ids, np.uint64) for ids in (of_late, [1, 2], [0, 3])]
        of_first = report_of([laid_out], np.array([size]), checksums[0])
        reports = [of_first, *(report_of([], numbers, each) for each in checksums[1:])]
        joined = planned.completed(reports)
        assert joined.files == [laid_out, *(whole.files[i] for i in (0, 0, 1))]
        assert joined.file_ids.tolist() == [2, 1, 1, 3, 0]
        assert joined.key_ids.tolist() == whole.key_ids.tolist()
        assert joined.offsets.tolist() == whole.offsets.tolist()
        assert joined.shapes.tolist() == whole.shapes.tolist()
        assert joined.num_bytes.tolist() == [*whole.num_bytes[:4].tolist(), size]
        assert joined.first_bytes.tolist() == [*whole.first_bytes[:4].tolist(), 100]
        assert joined.block_checksums.tolist() == [0, 1, 2, 3, *of_late]
    assert planned.chunks.num_bytes[-1] == 0


def rows_of(table, rows):
    columns = {
        name: column[rows] for name, column in table.columns().items() if name != "block_checksums"
    }
    return {**columns, "file_ids": np.zeros(len(rows), np.int64)}


def test_chunks_are_taken_with_the_checksums_of_their_blocks():
    taken = example_manifest().chunks.take(np.array([4, 2, 1]), 64)
    assert taken.first_bytes.tolist() == [4500, 4192, 4144]
    assert taken.block_checksums.tolist() == [*range(10, 18), 2, 1]


def test_empty_manifest():
    manifest = Manifest([], [], [], ChunkTable.empty(), {}, 64)
    assert manifest_from_bytes(manifest.to_bytes(), "here").keys == []


FIELDS = {
    "parent directory": {"files": [["tensors/..", 5000, 4096, 0]] * 2},
    "above the checkpoint": {"files": [["../tensors/x", 5000, 4096, 0]] * 2},
    "absolute": {"files": [["/etc/passwd", 5000, 4096, 0]] * 2},
    "in a directory of its own": {"files": [["tensors/a/b", 5000, 4096, 0]] * 2},
    "no name": {"files": [["tensors/", 5000, 4096, 0]] * 2},
    "zero byte in a name": {"files": [["tensors/a\0b", 5000, 4096, 0]] * 2},
    "drive of another system": {"files": [["tensors/..\\x", 5000, 4096, 0]] * 2},
    "negative file size": {"files": [["tensors/a", -5000, 4096, 0]] * 2},
    "file size beyond 64 bits": {"files": [["tensors/a", 10**30, 4096, 0]] * 2},
    "infinite file size": {"files": [["tensors/a", float("inf"), 4096, 0]] * 2},
    "file size that is no number": {"files": [["tensors/a", None, 4096, 0]] * 2},
    "too few files": {"files": [["tensors/a", 5000, 4096, 0]]},
    "files without sizes": {"files": ["tensors/a", "tensors/b"]},
    "unknown dtype": {"dtypes": ["F99", "BF16", "OBJECT"]},
    "dtype of another size": {"dtypes": ["F64", "BF16", "OBJECT"]},
    "too few dtypes": {"dtypes": ["F32"]},
    "key that comes twice": {"keys": ["a", "a", "rng/0"]},
    "too few keys": {"keys": ["a"]},
    "alias of nothing": {"aliases": {"tied": "nothing"}},
    "alias that hides a key": {"aliases": {"scalar": "a"}},
    "aliases as a list": {"aliases": ["a"]},
    "no block size": {"block_bytes": 0},
    "negative block size": {"block_bytes": -64},
    "block size between items": {"block_bytes": 63},
    "block size beyond 64 bits": {"block_bytes": 10**30},
    "infinite block size": {"block_bytes": float("inf")},
    "fields as null": {"keys": None},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_hostile_fields_are_found(fields):
    with pytest.raises(CorruptCheckpointError, match="The manifest of 'here' is damaged"):
        manifest_from_bytes(with_changes(fields), "here")


COLUMNS = {
    "negative offset": {"offsets": [[0, 0], [-2, 0], [0, 0], [0, 0], [1, 0]]},
    "outside of the tensor": {"offsets": [[0, 0], [3, 0], [0, 0], [0, 0], [1, 0]]},
    "offset that overflows": {"offsets": [[0, 0], [2**63 - 1, 0], [0, 0], [0, 0], [1, 0]]},
    "offset on an axis the key lacks": {"offsets": [[0, 0], [2, 0], [0, 0], [0, 0], [1, 1]]},
    "negative extent": {"shapes": [[2, 6], [-2, 6], [1, 1], [1, 1], [1, 1]]},
    "giant extent": {"shapes": [[2, 6], [2**62, 6], [1, 1], [1, 1], [1, 1]]},
    "giant tensor and extent": {
        "key_shapes": [[2**62, 2**62], [1, 1], [2, 1]],
        "shapes": [[2**62, 2**62], [2, 6], [1, 1], [1, 1], [1, 1]],
    },
    "giant tensor": {"key_shapes": [[2**62, 2**62], [1, 1], [2, 1]]},
    "negative tensor": {"key_shapes": [[4, 6], [1, 1], [-2, 1]]},
    "extent of another size": {"shapes": [[2, 6], [2, 5], [1, 1], [1, 1], [1, 1]]},
    "too many axes": {"key_ndims": [2, 0, 3]},
    "negative number of axes": {"key_ndims": [2, -1, 1]},
    "negative key": {"key_ids": [-1, 0, 1, 2, 2]},
    "key beyond the last": {"key_ids": [0, 0, 1, 2, 3]},
    "keys in another order": {"key_ids": [0, 1, 0, 2, 2]},
    "negative file": {"file_ids": [0, 0, 0, 1, -1]},
    "file beyond the last": {"file_ids": [0, 0, 0, 1, 2]},
    "in the header of its file": {"first_bytes": [0, 4144, 4192, 4096, 4500]},
    "beyond the end of its file": {"first_bytes": [4096, 4144, 4193, 4096, 4500]},
    "position that overflows": {"first_bytes": [2**63 - 1, 4144, 4192, 4096, 4500]},
    "negative size": {"num_bytes": [48, 48, 2, 404, -500]},
    "size beyond the end of its file": {"num_bytes": [48, 48, 2, 404, 501]},
    "giant size": {"num_bytes": [48, 48, 2, 404, 2**63 - 1]},
    "fewer rows": {"file_ids": [0, 0, 0, 1]},
    "one axis too few": {"offsets": [0, 2, 0, 0, 1], "shapes": [2, 2, 1, 1, 1]},
    "one axis too many": {"first_bytes": [[4096], [4144], [4192], [4096], [4500]]},
    "ids in two axes": {"key_ids": [[0, 0, 1, 2, 2]]},
    "number": {"key_ids": 0},
}


@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
def test_hostile_columns_are_found(columns):
    arrays = {name: np.array(column, np.int64) for name, column in columns.items()}
    with pytest.raises(CorruptCheckpointError, match="The manifest of 'here' is damaged"):
        manifest_from_bytes(with_changes(columns=arrays), "here")


@pytest.mark.parametrize(
    "columns",
    [
        {"offsets": np.zeros((5, 2), np.int32)},
        {"offsets": np.zeros((5, 2), np.uint64)},
        {"key_ids": np.array([0, 0, 1, 2, 2.0])},
        {"block_checksums": np.arange(18, dtype=np.int64)},
        {"block_checksums": np.arange(17, dtype=np.uint64)},
        {"block_checksums": np.zeros((18, 2), np.uint64)},
    ],
    ids=[
        "signed",
        "too wide",
        "floating point",
        "signed checksums",
        "too few checksums",
        "wide checksums",
    ],
)
def test_columns_of_another_kind_are_found(columns):
    with pytest.raises(CorruptCheckpointError, match="The manifest of 'here' is damaged"):
        manifest_from_bytes(with_changes(columns=columns), "here")


@pytest.mark.parametrize("name", ["json", "key_ids", "offsets", "block_checksums"])
def test_missing_columns_are_found(name):
    stored = safetensors.numpy.load(example_manifest().to_bytes())
    del stored[name]
    with pytest.raises(CorruptCheckpointError, match=name):
        manifest_from_bytes(safetensors.numpy.save(stored), "here")


def open_hostile(data):
    """Open a manifest, or find that it is damaged; anything else is a failure."""
    try:
        manifest = manifest_from_bytes(data, "here")
    except CorruptCheckpointError:
        return
    # What is accepted can be used.
    for row in range(len(manifest.key_ids)):
        manifest.chunk_region(row)
    assert all(
        manifest.keys[i] in (key, manifest.aliases.get(key))
        for key, i in manifest.key_index.items()
    )


@given(st.binary(max_size=200))
def test_random_bytes_are_no_manifest(data):
    with pytest.raises(CorruptCheckpointError, match="'here' is damaged"):
        manifest_from_bytes(data, "here")


@given(st.integers(0, len(example_manifest().to_bytes()) - 1))
def test_a_part_is_no_manifest(length):
    with pytest.raises(CorruptCheckpointError, match="'here' is damaged"):
        manifest_from_bytes(example_manifest().to_bytes()[:length], "here")


@settings(max_examples=300)
@given(st.integers(0, 8 * len(example_manifest().to_bytes()) - 1))
def test_a_flipped_bit_is_found_or_leaves_a_usable_manifest(bit):
    data = bytearray(example_manifest().to_bytes())
    data[bit // 8] ^= 1 << bit % 8
    open_hostile(bytes(data))


NASTY_INTEGERS = st.sampled_from([0, 1, -1, 2, 7, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63)])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=150)
@given(st.data())
def test_mutated_columns_are_found_or_leave_a_usable_manifest(data):
    columns = safetensors.numpy.load(example_manifest().to_bytes())
    fields = json.loads(columns.pop("json").tobytes())
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(columns)))
        column = columns[name].copy()
        change = data.draw(st.sampled_from(["item", "shorter", "longer", "reshaped", "converted"]))
        if change == "item" and column.size:
            column.reshape(-1)[data.draw(st.integers(0, column.size - 1))] = np.array(
                data.draw(NASTY_INTEGERS)
            ).astype(column.dtype)
        elif change == "shorter":
            column = column[:-1]
        elif change == "longer":
            column = np.concatenate([column, column[-1:]])
        elif change == "reshaped":
            column = column.reshape(
                data.draw(st.sampled_from([(-1,), (-1, 1), (1, -1), (1, -1, 1)]))
            )
        elif change == "converted":
            column = column.astype(
                data.draw(st.sampled_from([np.uint64, np.int64, np.int8, np.float32, np.bool_]))
            )
        columns[name] = column if column.ndim else columns[name]
    if data.draw(st.booleans()):
        fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(JSON)
    open_hostile(encode(fields, columns))

"""The list of files of large manifests: names are computed from patterns and numbers."""

from __future__ import annotations

import tracemalloc

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import distckpt
from distckpt import CorruptCheckpointError, ShardedObject, ShardedTensor
from distckpt._format import manifest, manifest_reading, planned_manifest
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.file_table import FileTable
from distckpt._format.manifest import Manifest
from distckpt._format.manifest_reading import manifest_from_bytes
from distckpt._format.safetensors_file import ShardFile
from tests.support.forged_files import files_in, forge, forge_files, marker_of

WEIGHT = torch.arange(12.0).reshape(3, 4)


@pytest.fixture(autouse=True)
def as_large(monkeypatch):
    monkeypatch.setattr(manifest, "MAX_BLOCKS", 0)
    monkeypatch.setattr(planned_manifest, "PART_ROWS", 1)


@pytest.fixture
def path(tmp_path):
    distckpt.save(state(WEIGHT.clone()), tmp_path / "c")
    return tmp_path / "c"


def state(tensor):
    return {
        "w": ShardedTensor.from_rank_offsets("w", tensor),
        "o": ShardedObject("o", {"a": [1]}, (1,), (0,)),
    }


def assert_loads(path):
    assert torch.equal(distckpt.load(state(torch.zeros(3, 4)), path)["w"], WEIGHT)
    assert distckpt.verify(path).problems == ()


def test_its_version_keeps_older_readers_away(path, tmp_path, monkeypatch):
    marker = marker_of(path)
    assert (marker["format_version"], marker["min_reader_version"]) == (4, 4)
    monkeypatch.undo()
    distckpt.save(state(WEIGHT), tmp_path / "small")
    marker = marker_of(tmp_path / "small")
    assert (marker["format_version"], marker["min_reader_version"]) == (3, 3)


def test_the_columns_name_the_files_that_are_there(path):
    found = []
    forge(path, lambda fields, columns: found.extend(files_in(fields, columns)))
    there = {
        str(file.relative_to(path)): file.stat().st_size
        for folder in ("tensors", "objects")
        for file in (path / folder).iterdir()
    }
    assert {name: size for name, size, *_ in found} == there
    assert_loads(path)


def test_names_may_be_patterns_without_numbers(path):
    forge_files(path, lambda files: None)
    assert_loads(path)


@pytest.mark.parametrize("suffix", ["-0123456789abcdef", "-12345678901234567890"])
def test_names_of_files_on_object_stores(suffix):
    names = [
        name
        for rank in (0, 5, 255, 256, 70_000, 123_456)
        for name in (
            f"tensors{suffix}-{rank // 256}/shard-{rank + 1:05d}-model-00001-of-00002.safetensors",
            f"objects{suffix}/rank-{rank + 1:05d}.checksums",
        )
    ]
    table = FileTable.of([ShardFile(name, 5, 4, 3) for name in names])
    assert [file.name for file in decoded(table)] == names
    assert len(table.patterns) == 2
    assert table.holders.tolist() == [*range(1, 12, 2)]


def decoded(table):
    """Return the files of a table as a reader gets it."""
    patterns = [pattern.to_json() for pattern in table.patterns]
    return FileTable.from_columns(patterns, table.columns(), 1 << 32)


NAMES = st.lists(
    st.from_regex(r"(tensors|objects)/[ab%]?[0-9]{0,3}[ab][0-9]{1,22}c?", fullmatch=True),
    max_size=12,
    unique=True,
)


@hypothesis.given(NAMES)
def test_a_table_has_the_names_that_were_given(names):
    files = [ShardFile(name, 10 + i, i, 2**64 - 1 - i) for i, name in enumerate(names)]
    table = decoded(FileTable.of(files))
    assert list(table) == files == [table[i] for i in range(len(files))] == table[:]
    for text in ("/", "/a", "/objects/"):
        expected = [i for i, name in enumerate(names) if text in name]
        assert table.containing(text).tolist() == expected
    with pytest.raises(IndexError):
        table[len(names)]


# ---- what is damaged is refused


def change_of(column, change):
    def forged(fields, columns):
        columns[column] = change(columns[column])

    return forged


def put(column, value, row=0):
    def change(numbers):
        numbers[row] = value
        return numbers

    return change_of(column, change)


def patterns(change):
    def forged(fields, columns):
        fields["file_patterns"] = change(fields["file_patterns"])

    return forged


def first_pattern(*pieces):
    return patterns(lambda found: [list(pieces), *found[1:]])


def same_files(first, second):
    """Give the first two files names that are the same."""

    def forged(fields, columns):
        fields["file_patterns"] = [first, second, *fields["file_patterns"][2:]]
        num_files = len(columns["file_patterns"])
        columns["file_patterns"] = np.arange(num_files) % len(fields["file_patterns"])
        columns["file_numbers"] = np.full((num_files, 1), 7)
        for row, pattern in enumerate(columns["file_patterns"]):
            columns["file_numbers"][row] *= len(fields["file_patterns"][pattern]) > 1
        columns["file_numbers"][-1] *= 0

    return forged


COLUMNS = ["file_patterns", "file_numbers", "file_bytes", "file_header_bytes", "file_checksums"]
CHANGES = {
    "no patterns": (lambda fields, columns: fields.pop("file_patterns"), "KeyError: 'files'"),
    **{
        f"no {name}": (lambda fields, columns, name=name: columns.pop(name), name)
        for name in COLUMNS
    },
    **{f"short {name}": (change_of(name, lambda column: column[1:]), "column") for name in COLUMNS},
    **{f"flat {name}": (change_of(name, lambda c: c[:, None]), "column") for name in COLUMNS},
    **{
        f"float {name}": (change_of(name, lambda c: c.astype(np.float64)), "float64")
        for name in COLUMNS
    },
    "signed checksums": (change_of("file_checksums", lambda c: c.astype(np.int64)), "int64"),
    "wide numbers": (change_of("file_numbers", lambda c: np.tile(c, (1, 2))), "file_numbers"),
    "endless numbers": (
        change_of("file_numbers", lambda c: np.zeros((1 << 50, 0), np.int64)),
        "file_numbers",
    ),
    "no such pattern": (put("file_patterns", 99), "no pattern"),
    "pattern -1": (put("file_patterns", -1), "no pattern"),
    "number -1": (put("file_numbers", -1, -1), "impossible"),
    "large number": (put("file_numbers", 10**18, -1), "impossible"),
    "number that has no place": (put("file_numbers", 1), "impossible"),
    "patterns that are none": (patterns(lambda found: {"a": 1}), "no list"),
    "pattern that is none": (patterns(lambda found: ["a", *found[1:]]), "no list"),
    "too many patterns": (patterns(lambda found: [*found, *(["x"] for _ in range(99))]), "more"),
    "empty pattern": (first_pattern(), "no pattern of names"),
    "no text": (first_pattern(5), "no pattern of names"),
    "null": (first_pattern(None), "no pattern of names"),
    "no end": (first_pattern("tensors/a", 5), "no pattern of names"),
    "two texts": (first_pattern("tensors/a", "b", "c"), "no pattern of names"),
    "no digits": (first_pattern("tensors/a", 0, "b"), "no pattern of names"),
    "negative": (first_pattern("tensors/a", -5, "b"), "no pattern of names"),
    "a gigabyte": (first_pattern("tensors/a", 10**9, "b"), "no pattern of names"),
    "true": (first_pattern("tensors/a", True, "b"), "no pattern of names"),
    "digit before": (first_pattern("tensors/1", 5, "b"), "no pattern of names"),
    "digit after": (first_pattern("tensors/a", 5, "1"), "no pattern of names"),
    "two numbers": (first_pattern("tensors/a", 5, "", 5, "b"), "no pattern of names"),
    **{
        f"name {name!r:.20}": (first_pattern(name), "leads elsewhere")
        for name in (
            "tensors/..",
            "../tensors/x",
            "/etc/passwd",
            "tensors/a/b",
            "tensors\\..\\x",
            "tensors/a\0",
            "tensors/" + "n" * 300,
            "",
        )
    },
    "one name for two": (
        same_files(["tensors/a"], ["tensors/a"]),
        "two files have the name 'tensors/a'",
    ),
    "one name by two patterns": (
        same_files(["tensors/a7"], ["tensors/a", 1, ""]),
        "two files have the name 'tensors/a7'",
    ),
    "one name by equal rows": (
        lambda fields, columns: columns.update(
            file_patterns=np.zeros(len(columns["file_patterns"]), np.int64),
            file_numbers=np.zeros_like(columns["file_numbers"]),
        ),
        "two files have the name 'tensors/shard-00001",
    ),
    **{
        f"size {size}": (put("file_bytes", size), "shard-00001.* has a header of")
        for size in (-1, 0, 7, -(2**63))
    },
    **{
        f"header {size}": (put("file_header_bytes", size), f"shard-00001.* has a header of {size}")
        for size in (-1, 2**40, 2**62)
    },
    "large header": (
        lambda fields, columns: [put(name, 2**33)(fields, columns) for name in COLUMNS[2:4]],
        "has a header of",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_columns_that_are_damaged(path, what):
    change, text = CHANGES[what]
    forge(path, change)
    with pytest.raises(CorruptCheckpointError, match=f"is damaged .*{text}"):
        distckpt.open(path)
    (problem,) = distckpt.verify(path).problems
    assert "is damaged" in problem.message


@pytest.mark.parametrize(("number", "is_too_long"), [(9, False), (10, True)])
def test_a_number_may_make_a_name_too_long(path, number, is_too_long):
    def change(fields, columns):
        fields["file_patterns"][0] = ["tensors/" + "n" * 254, 1, ""]
        columns["file_numbers"][0] = number

    forge(path, change)
    if not is_too_long:
        distckpt.open(path)
        return
    with pytest.raises(CorruptCheckpointError, match="leads elsewhere"):
        distckpt.open(path)


@pytest.mark.parametrize("name", ["shard-", ".checksums", "chunks-00001", "rank-00001.safetensors"])
def test_a_wrong_checksum_is_reported_with_the_file(path, name):
    def change(files):
        (file,) = [file for file in files if name in file[0]]
        file[3] ^= 1

    forge_files(path, change)
    problems = distckpt.verify(path).problems
    assert any(name in problem.file or name in problem.message for problem in problems)


# ---- what it takes


def test_a_rank_opens_the_checkpoint_of_many_within_5_megabytes(tmp_path, monkeypatch):
    num_ranks, num_tensors, num_bytes = 16_384, 8, 512
    ranks = np.tile(np.arange(num_ranks), num_tensors)
    chunks = ChunkTable.empty()._replace(
        files=[
            file
            for rank in range(1, num_ranks + 1)
            for file in (
                ShardFile(
                    f"tensors/shard-{rank:05d}-model-00001-of-00001.safetensors",
                    4096 + num_tensors * num_bytes,
                    4096,
                    rank,
                ),
                ShardFile(f"objects/rank-{rank:05d}.checksums", 64, 64, rank),
            )
        ],
        key_ids=np.repeat(np.arange(num_tensors), num_ranks),
        file_ids=2 * ranks,
        first_bytes=4096 + num_bytes * np.repeat(np.arange(num_tensors), num_ranks),
        num_bytes=np.full(len(ranks), num_bytes),
        offsets=np.stack([ranks, 0 * ranks], axis=1),
        shapes=np.stack([1 + 0 * ranks, 0 * ranks + num_bytes], axis=1),
    )
    written = Manifest(
        [f"layer.{i}" for i in range(num_tensors)],
        ["U8"] * num_tensors,
        [(num_ranks, num_bytes)] * num_tensors,
        ChunkTable.empty(),
        {},
    )
    monkeypatch.setattr(planned_manifest, "PART_ROWS", 1 << 16)
    rest, parts = planned_manifest.with_parts(chunks, {})
    (tmp_path / "objects").mkdir()
    for name, content in parts.items():
        (tmp_path / name).write_bytes(content)
    data = written.replaced(chunks=rest._replace(files=FileTable.of(rest.files))).to_bytes()
    data = manifest_reading.joined(data, str(tmp_path))
    manifest_from_bytes(data, str(tmp_path))
    tracemalloc.start()
    opened = manifest_from_bytes(data, str(tmp_path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5e6
    assert opened.files[9] == rest.files[9]
    assert opened.file_ids[num_ranks + 3] == 6

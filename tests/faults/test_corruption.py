"""Checkpoints that were damaged after the save: found, named, and never loaded as if they were
whole.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import distckpt
from distckpt import (
    CheckpointingException,
    CorruptCheckpointError,
    LoadMismatchError,
    ShardedObject,
    ShardedTensor,
)
from distckpt.megatron.core import read_marker, write_marker
from tests.support.forged_files import forge
from tests.support.sampling import one_in

COMMON = {
    "step": 7,
    "args": {"lr": 0.5, "names": ["a", "b"]},
    "rng": torch.arange(500, dtype=torch.uint8),
}
TENSORS = {
    "w": torch.arange(24.0).view(4, 6),
    "bias": torch.arange(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
}


def save(path, shift=0):
    """Save tensors in two files of equal size, objects and common state."""
    columns = (TENSORS["w"] + shift).chunk(2, 1)
    state = {
        i: ShardedTensor.from_rank_offsets("w", column, (1, i, 2))
        for i, column in enumerate(columns)
    }
    for key in ("bias", "scalar"):
        state[key] = ShardedTensor.from_rank_offsets(key, TENSORS[key])
    # A second chunk of another key, so that both files hold several.
    state["flags"] = ShardedTensor.from_rank_offsets("flags", TENSORS["flags"])
    state |= {
        f"o{i}": ShardedObject("o", {"rank": i, "text": "x" * 50}, (2,), (i,)) for i in range(2)
    }
    distckpt.save({**state, **COMMON}, path)


def load(path, verify=True):
    """Load everything and check that it is what was saved."""
    asked = {
        key: ShardedTensor.from_rank_offsets(key, torch.zeros_like(value))
        for key, value in TENSORS.items()
    }
    asked |= {f"o{i}": ShardedObject("o", None, (2,), (i,)) for i in range(2)}
    loaded = distckpt.load(asked, path, verify=verify, strict="raise")
    assert all(torch.equal(loaded.pop(key), value) for key, value in TENSORS.items())
    assert torch.equal(loaded.pop("rng"), COMMON["rng"])
    assert [loaded.pop(f"o{i}")["rank"] for i in range(2)] == [0, 1]
    assert loaded == {"step": COMMON["step"], "args": COMMON["args"]}


@pytest.fixture
def checkpoint(tmp_path):
    save(tmp_path / "c")
    load(tmp_path / "c")
    return tmp_path / "c"


FILES = [
    "tensors/shard-00001-model-00001-of-00002.safetensors",
    "tensors/shard-00001-model-00002-of-00002.safetensors",
    "objects/rank-00001.safetensors",
    "manifest.safetensors",
    "metadata.json",
]


def test_the_checkpoint_has_these_files(checkpoint):
    assert sorted(
        str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*") if p.is_file()
    ) == sorted(FILES)


def name_of(key):
    """Return how errors name a key."""
    return "common state" if key == "distckpt.common_state" else repr(key)


def entries_of(file):
    """Return where in a safetensors file the data of each entry lie."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: range(8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
        for name, entry in header.items()
    }


def error_of(function):
    """Return the error of this package that a call raises, None when it raises none."""
    try:
        function()
    except CheckpointingException as error:
        return error
    return None


def positions(size, count, seed):
    """Choose the first and last bytes and some others."""
    random = np.random.default_rng(seed)
    return sorted({*range(min(16, size)), size - 1, *random.integers(0, size, count).tolist()})


# ---- single bits


@pytest.mark.parametrize("name", FILES[:3])
def test_a_flipped_bit_of_data_is_found_with_file_and_key(checkpoint, name):
    file = checkpoint / name
    original = file.read_bytes()
    entries = entries_of(file)
    random = np.random.default_rng(0)
    for entry, span in entries.items():
        key = entry.rpartition("/shard_")[0] or entry
        for position in {span[0], span[-1], *random.choice(span, 20).tolist()}:
            flipped = bytearray(original)
            flipped[position] ^= 1 << int(random.integers(8))
            file.write_bytes(flipped)
            with pytest.raises(CorruptCheckpointError) as caught:
                load(checkpoint)
            assert str(file) in str(caught.value)
            assert name_of(key) in str(caught.value)
    file.write_bytes(original)
    load(checkpoint)


@pytest.mark.parametrize("name", FILES[:3])
def test_a_flipped_bit_of_a_header_does_no_harm(checkpoint, name):
    # Where the data lie is read from the manifest, not from the headers.
    file = checkpoint / name
    original = file.read_bytes()
    header_bytes = min(span[0] for span in entries_of(file).values())
    for position in positions(header_bytes, 40, 1):
        flipped = bytearray(original)
        flipped[position] ^= 1 << position % 8
        file.write_bytes(flipped)
        load(checkpoint)


def test_a_flipped_bit_of_the_manifest_is_found(checkpoint):
    file = checkpoint / "manifest.safetensors"
    original = file.read_bytes()
    for position in positions(len(original), 150, 2):
        flipped = bytearray(original)
        flipped[position] ^= 1 << position % 8
        file.write_bytes(flipped)
        with pytest.raises(CorruptCheckpointError, match="is not the one that was saved") as caught:
            load(checkpoint)
        assert str(file) in str(caught.value)


def test_every_flipped_bit_of_the_marker_is_found(checkpoint):
    marker = {
        **read_marker(checkpoint),
        "manager": {"step": 3, "metrics": {"loss": 0.1}, "pinned": True},
    }
    write_marker(checkpoint, marker)
    assert read_marker(checkpoint) == marker
    file = checkpoint / "metadata.json"
    original = file.read_bytes()
    for position in range(len(original)):
        for bit in range(8):
            flipped = bytearray(original)
            flipped[position] ^= 1 << bit
            file.write_bytes(flipped)
            assert str(file) in str(error_of(lambda: read_marker(checkpoint)))
    for read in (
        load,
        distckpt.megatron.load_plain_tensors,
        distckpt.megatron.load_common_state_dict,
    ):
        with pytest.raises(CorruptCheckpointError, match=re.escape(str(file))):
            read(checkpoint)
    assert [problem.file for problem in distckpt.verify(checkpoint, "fast").problems] == [str(file)]


def test_a_marker_may_be_edited_on_purpose(checkpoint):
    file = checkpoint / "metadata.json"
    edited = json.loads(file.read_text()) | {"note": "kept for the paper"}
    file.write_text(json.dumps(edited))
    with pytest.raises(CorruptCheckpointError, match='edited on purpose, set "checksum" to null'):
        load(checkpoint)
    file.write_text(json.dumps(edited | {"checksum": None}))
    load(checkpoint)
    edited.pop("checksum")
    file.write_text(json.dumps(edited))
    with pytest.raises(CorruptCheckpointError, match="does not match"):
        load(checkpoint)


def test_all_bytes_are_checked_when_a_part_is_read(tmp_path):
    tensor = torch.zeros(3, 2**18)
    distckpt.save({"w": ShardedTensor.from_rank_offsets("w", tensor)}, tmp_path / "c")
    (file,) = Path(tmp_path, "c", "tensors").iterdir()
    (span,) = entries_of(file).values()

    def load_some(verify):
        # A few items in the middle of a block of one row.
        target = torch.zeros(1, 8)
        shard = ShardedTensor("w", target, target.dtype, (1, 8), (3, 2**18), (1, 64), None)
        return distckpt.load({"w": shard}, tmp_path / "c", verify=verify)["w"]

    inside, outside = span[0] + 2**20 + 4 * 66 + 3, span[0] + 2**20 + 4 * 200
    for position, is_inside in ((inside, True), (outside, False)):
        original = file.read_bytes()
        flipped = bytearray(original)
        flipped[position] ^= 0x40
        file.write_bytes(flipped)
        with pytest.raises(
            CorruptCheckpointError, match=r"chunk \[0:3, 0:262144\] of key 'w'"
        ) as caught:
            load_some(verify=True)
        assert str(file) in str(caught.value)
        assert bool(load_some(verify=False).any()) == is_inside
        file.write_bytes(original)
    assert not load_some(verify=True).any()


def test_checks_may_be_left_out(checkpoint):
    file = checkpoint / FILES[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(AssertionError):
        load(checkpoint, verify=False)
    with pytest.raises(CorruptCheckpointError):
        load(checkpoint)


def test_the_old_name_of_full_verification(checkpoint):
    tensor = torch.zeros(2)
    shard = {
        "w": ShardedTensor(
            "w", tensor, tensor.dtype, (2,), (4, 6), (0, 0), None, prepend_axis_num=1
        )
    }
    file = checkpoint / FILES[0]
    data = bytearray(file.read_bytes())
    data[entries_of(file)["w"][-1]] ^= 1
    file.write_bytes(data)
    assert distckpt.load(shard, checkpoint, verify=False)["w"].tolist() == [0, 1]
    with pytest.raises(CorruptCheckpointError):
        distckpt.megatron.load(shard, checkpoint, None, False, verify_integrity=True)


# ---- which blocks of a large chunk are checked


ROWS, COLUMNS = 840, 3002
"""Of a tensor of 9.6 MiB in one chunk, which is read in two units. No block begins where a row
does.
"""
BLOCK_BYTES = 256 << 10


def made(*shape, dtype=torch.float32):
    return torch.full(shape, -1, dtype=dtype)


PARTS = {
    "everything": lambda: (made(ROWS, COLUMNS), 0, 0),
    "everything in another dtype": lambda: (made(ROWS, COLUMNS, dtype=torch.float64), 0, 0),
    "everything as a part of wider memory": lambda: (
        made(ROWS, COLUMNS + 9)[:, 5 : 5 + COLUMNS],
        0,
        0,
    ),
    "everything in another order of memory": lambda: (made(COLUMNS, ROWS).t(), 0, 0),
    "rows": lambda: (made(ROWS // 3, COLUMNS), ROWS // 3, 0),
    "rows in another dtype": lambda: (made(ROWS // 3, COLUMNS, dtype=torch.float64), ROWS // 3, 0),
    "columns": lambda: (made(ROWS, COLUMNS // 2), 0, COLUMNS // 4),
    "a few columns": lambda: (made(ROWS, 7), 0, 100),
    "some rows of some columns": lambda: (made(ROWS // 2, COLUMNS // 3), ROWS // 4, COLUMNS // 2),
}
"""A target, and the row and the column of the tensor where it begins."""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "c"
    distckpt.save(
        {
            "w": ShardedTensor.from_rank_offsets(
                "w", torch.arange(1.0 * ROWS * COLUMNS).view(ROWS, -1)
            )
        },
        path,
    )
    return path


def load_part(path, part):
    target, row, column = PARTS[part]()
    shard = ShardedTensor(
        "w", target, target.dtype, tuple(target.shape), (ROWS, COLUMNS), (row, column), None
    )
    distckpt.load({"w": shard}, path)
    expected = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    expected = expected[row : row + target.shape[0], column : column + target.shape[1]]
    assert np.array_equal(target.numpy(), expected), "wrong values, and no error"


@contextlib.contextmanager
def flipped_bit(file, position):
    """Flip a bit, and flip it back when the block ends."""
    with file.open("r+b", buffering=0) as opened:
        byte = os.pread(opened.fileno(), 1, position)
        os.pwrite(opened.fileno(), bytes([byte[0] ^ 16]), position)
        try:
            yield
        finally:
            os.pwrite(opened.fileno(), byte, position)


@pytest.mark.parametrize("part", one_in(2, PARTS))
def test_the_blocks_that_are_checked(large, part):
    """Those in which the first byte that is wanted lies, the last one, and all between."""
    target, row, column = PARTS[part]()
    first = 4 * (row * COLUMNS + column)
    end = 4 * ((row + target.shape[0] - 1) * COLUMNS + column + target.shape[1])
    (file,) = (large / "tensors").iterdir()
    (span,) = entries_of(file).values()
    for start in range(0, len(span), BLOCK_BYTES):
        stop = min(start + BLOCK_BYTES, len(span))
        for position in (start, stop - 1):
            with flipped_bit(file, span[position]):
                if start < end and first < stop:
                    where = (
                        f"{file}', bytes {span[0] + start} to {span[0] + stop}: chunk .* of key 'w'"
                    )
                    with pytest.raises(CorruptCheckpointError, match=where):
                        load_part(large, part)
                else:
                    load_part(large, part)
    load_part(large, part)


def with_blocks_of(path, num_bytes):
    """Give the tensor of a checkpoint checksums of larger or smaller blocks, as other writers may
    choose them.
    """
    (file,) = (path / "tensors").iterdir()
    (span,) = entries_of(file).values()
    content = file.read_bytes()[span[0] : span[-1] + 1]

    def change(fields, columns):
        fields["block_bytes"] = num_bytes
        blocks = [content[i : i + num_bytes] for i in range(0, len(content), num_bytes)]
        digests = [xxhash.xxh3_64_intdigest(block) for block in blocks]
        # Common state is a chunk of one block.
        common = columns["block_checksums"]
        digests = [*digests, common[-1]] if fields["keys"][0] == "w" else [common[0], *digests]
        columns["block_checksums"] = np.array(digests, np.uint64)

    forge(path, change)
    return file, span


@pytest.mark.parametrize("block_bytes", [(64 << 10) - 16, 1 << 20, 16 << 20])
def test_blocks_of_another_size(tmp_path, block_bytes):
    values = torch.arange(1.0 * ROWS * COLUMNS).view(ROWS, -1)
    state = {key: ShardedTensor.from_rank_offsets(key, values) for key in "w"}
    distckpt.save(state, tmp_path / "c")
    file, span = with_blocks_of(tmp_path / "c", block_bytes)
    for part in PARTS:
        load_part(tmp_path / "c", part)
    with (
        flipped_bit(file, span[4 * (100 * COLUMNS + 100) + 1]),
        pytest.raises(CorruptCheckpointError),
    ):
        load_part(tmp_path / "c", "a few columns")


def test_tensors_are_removed_from_a_checkpoint_with_blocks_of_another_size(tmp_path):
    values = torch.arange(1.0 * ROWS * COLUMNS).view(ROWS, -1)
    distckpt.save({"w": ShardedTensor.from_rank_offsets("w", values)}, tmp_path / "c")
    with_blocks_of(tmp_path / "c", 16 << 20)
    forge(tmp_path / "c", lambda fields, columns: fields["aliases"].update(tied="w"))
    # The file is written anew, under the name that stays.
    distckpt.megatron.remove_sharded_tensors(tmp_path / "c", "w")
    assert distckpt.verify(tmp_path / "c").is_whole
    assert torch.equal(distckpt.open(tmp_path / "c").read_tensors()["tied"], values)


# ---- what verification says, and what loads give


def regions_of(file):
    """Return the parts of a safetensors file: its header's length, text and padding, and the data
    of each entry.
    """
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = len(data[8 : 8 + length].rstrip(b" "))
    parts = {"length": range(8), "text": range(8, 8 + text), "padding": range(8 + text, 8 + length)}
    return {name: span for name, span in (parts | entries_of(file)).items() if len(span)}


def sample(span, count, random):
    """Choose the first and last of some positions, and others between them."""
    return sorted(
        {span[0], span[-1], *random.choice(span, min(count, len(span)), replace=False).tolist()}
    )


def flip(file, original, position, random):
    flipped = bytearray(original)
    flipped[position] ^= 1 << int(random.integers(8))
    file.write_bytes(flipped)


@pytest.mark.parametrize("name", FILES[:3])
def test_verify_says_what_a_flipped_bit_concerns(checkpoint, name):
    file = checkpoint / name
    original, random = file.read_bytes(), np.random.default_rng(3)
    first_data_byte = min(span[0] for span in entries_of(file).values())
    for region, span in regions_of(file).items():
        key = region.rpartition("/shard_")[0] or region
        is_header = span[0] < first_data_byte
        for position in sample(span, 12, random):
            flip(file, original, position, random)
            (problem,) = distckpt.verify(checkpoint).problems
            assert problem.file == str(file)
            assert problem.first_byte <= position < problem.stop_byte
            if is_header:
                assert (problem.key, problem.region) == (None, None)
                assert "header" in problem.message
                # Where data lie is read from the manifest, so a header is of no account for
                # distckpt itself.
                load(checkpoint)
                continue
            assert problem.key == key
            assert problem.region is not None
            assert (problem.first_byte, problem.stop_byte) == (span[0], span[-1] + 1)
            with pytest.raises(CorruptCheckpointError) as caught:
                load(checkpoint)
            assert str(file) in str(caught.value)
            assert name_of(key) in str(caught.value)
    file.write_bytes(original)
    assert distckpt.verify(checkpoint).is_whole


def test_verify_names_the_region_of_the_chunk(checkpoint):
    for name, region in ((FILES[0], "[0:4, 0:3]"), (FILES[1], "[0:4, 3:6]")):
        file = checkpoint / name
        original = file.read_bytes()
        flip(file, original, entries_of(file)["w"][5], np.random.default_rng(0))
        (problem,) = distckpt.verify(checkpoint).problems
        assert problem.region == region
        file.write_bytes(original)


@pytest.mark.parametrize("name", FILES[3:])
def test_verify_finds_a_flipped_bit_of_manifest_and_marker(checkpoint, name):
    file = checkpoint / name
    original, random = file.read_bytes(), np.random.default_rng(4)
    harmless = 0
    for position in sample(range(len(original)), 200, random):
        flip(file, original, position, random)
        problems = distckpt.verify(checkpoint).problems
        if not problems:
            harmless += 1
            load(checkpoint)
            continue
        (problem,) = problems
        # The marker holds the size and checksum of the manifest: when they differ, either may be
        # the damaged one.
        assert problem.file in (str(file), str(checkpoint / FILES[3]))
    # Of the marker spaces, say, or fields that nothing depends on.
    assert harmless == 0 if name == FILES[3] else harmless < len(original) / 2


def row_of(path, verify):
    """Load one row of `w`, which lies in both files."""
    target = torch.full((1, 6), -1.0)
    shard = ShardedTensor("w", target, target.dtype, (1, 6), (4, 6), (2, 0), None)
    return distckpt.load({"w": shard}, path)["w"]


@pytest.mark.parametrize("name", FILES[:2])
def test_a_part_in_another_layout_finds_what_it_touches(checkpoint, name):
    file = checkpoint / name
    original, random = file.read_bytes(), np.random.default_rng(5)
    for region, span in regions_of(file).items():
        for position in sample(span, 12, random):
            flip(file, original, position, random)
            if region == "w":
                with pytest.raises(CorruptCheckpointError, match="of key 'w'") as caught:
                    row_of(checkpoint, "full")
                assert str(file) in str(caught.value)
            else:
                assert torch.equal(row_of(checkpoint, "full"), TENSORS["w"][2:3])


def test_an_export_finds_it(checkpoint):
    file = checkpoint / FILES[0]
    original = file.read_bytes()
    for key in entries_of(file):
        flip(file, original, entries_of(file)[key][0], np.random.default_rng(6))
        with pytest.raises(CorruptCheckpointError, match=f"key {key!r}") as caught:
            distckpt.consolidate(checkpoint, checkpoint.parent / "export")
        assert str(file) in str(caught.value)
        assert os.listdir(checkpoint.parent) == [checkpoint.name]
        file.write_bytes(original)


@pytest.mark.parametrize("name", FILES[:4])
def test_any_other_size_is_found(checkpoint, name):
    file = checkpoint / name
    original = file.read_bytes()
    cut = [original[:size] for size in {*range(0, len(original), 512), len(original) - 1}]
    for content in [*cut, original + b"\0", original + b"\0" * 512, original + original[-512:]]:
        file.write_bytes(content)
        (problem, *others) = distckpt.verify(checkpoint).problems
        assert problem.file == str(file)
        # What is missing is listed for each key as well.
        assert all(other.file == str(file) and other.key is not None for other in others)
        with pytest.raises(CorruptCheckpointError) as caught:
            load(checkpoint)
        assert str(file) in str(caught.value)


def exchange(first, second):
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def test_files_that_changed_places_are_found(tmp_path):
    columns = {
        i: ShardedTensor.from_rank_offsets("v", torch.full((4, 3), float(i)), (1, i, 2))
        for i in range(2)
    }
    distckpt.save(columns, tmp_path / "c")
    first, second = (tmp_path / "c" / name for name in FILES[:2])
    assert first.stat().st_size == second.stat().st_size
    exchange(first, second)
    found = {(problem.file, problem.key) for problem in distckpt.verify(tmp_path / "c").problems}
    # Their headers say where the pieces belong, so they differ as well.
    assert found == {(str(file), key) for file in (first, second) for key in (None, "v")}
    with pytest.raises(
        CorruptCheckpointError, match=f"Checksum mismatch in '({first}|{second})'.*key 'v'"
    ):
        distckpt.open(tmp_path / "c").read_tensors()


@pytest.mark.parametrize("name", FILES[:4])
def test_verify_finds_a_file_of_another_save(checkpoint, name):
    save(checkpoint.parent / "other", shift=1)
    other = checkpoint.parent / "other" / name
    assert other.stat().st_size == (checkpoint / name).stat().st_size
    assert (other.read_bytes() == (checkpoint / name).read_bytes()) == (name == FILES[2]), (
        "objects are the same in both"
    )
    shutil.copyfile(other, checkpoint / name)
    problems = distckpt.verify(checkpoint).problems
    if name == FILES[2]:
        assert not problems
        load(checkpoint)
        return
    assert {problem.file for problem in problems} == {str(checkpoint / name)}
    assert {problem.key for problem in problems} == ({"w"} if name != FILES[3] else {None})


# ---- whole files


def cut_one_byte(file):
    file.write_bytes(file.read_bytes()[:-1])


def cut_in_half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file):
    file.write_bytes(b"")


def extend(file):
    file.write_bytes(file.read_bytes() + b"\0")


def delete(file):
    file.unlink()


def replace_by_dangling_link(file):
    file.unlink()
    file.symlink_to(file.parent / "nowhere")


@pytest.mark.parametrize("name", FILES[:4])
@pytest.mark.parametrize(
    "damage", [cut_one_byte, cut_in_half, empty, extend, delete, replace_by_dangling_link]
)
def test_a_damaged_file_is_named(checkpoint, name, damage):
    damage(checkpoint / name)
    for verify in (False, True):
        with pytest.raises(CorruptCheckpointError) as caught:
            load(checkpoint, verify=verify)
        assert str(checkpoint / name) in str(caught.value)


@pytest.mark.parametrize("damage", [cut_in_half, empty, extend])
def test_a_damaged_marker_is_named(checkpoint, damage):
    damage(checkpoint / "metadata.json")
    with pytest.raises(CorruptCheckpointError) as caught:
        load(checkpoint)
    assert str(checkpoint / "metadata.json") in str(caught.value)


@pytest.mark.parametrize("name", [FILES[0], FILES[3], FILES[4]])
def test_a_file_of_another_checkpoint_is_found(checkpoint, name):
    save(checkpoint.parent / "other", shift=1)
    assert (checkpoint.parent / "other" / name).stat().st_size == (checkpoint / name).stat().st_size
    shutil.copyfile(checkpoint.parent / "other" / name, checkpoint / name)
    with pytest.raises(CorruptCheckpointError) as caught:
        load(checkpoint)
    assert str(checkpoint / ("manifest.safetensors" if name.startswith("m") else name)) in str(
        caught.value
    )


def test_a_foreign_file_in_the_directories_is_not_read(checkpoint):
    shutil.copyfile(
        checkpoint / FILES[0],
        checkpoint / "tensors" / "shard-00002-model-00001-of-00001.safetensors",
    )
    (checkpoint / "tensors" / "model.safetensors").write_bytes(b"nonsense")
    load(checkpoint)


def test_what_is_not_asked_for_may_be_damaged(checkpoint):
    files = [checkpoint / name for name in FILES[:2]]
    (needed,) = [file for file in files if "bias" in entries_of(file)]
    files.remove(needed)
    files[0].unlink()
    loaded = distckpt.load(
        {"b": ShardedTensor.from_rank_offsets("bias", TENSORS["bias"] * 0)}, checkpoint
    )
    assert torch.equal(loaded["b"], TENSORS["bias"])
    target = torch.full((4, 6), -1.0)
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        distckpt.load({"w": ShardedTensor.from_rank_offsets("w", target)}, checkpoint)
    # Files are looked at before anything is read into the target.
    assert bool((target == -1).all())


# ---- manifests made by somebody who means harm


def test_forging_nothing_changes_nothing(checkpoint):
    forge(checkpoint, lambda fields, columns: None)
    load(checkpoint)


def test_a_file_elsewhere_is_never_read(checkpoint):
    secret = checkpoint.parent / "secret"
    shutil.copyfile(checkpoint / FILES[0], secret)
    for name in (
        "../secret",
        "tensors/../../secret",
        str(secret),
        "tensors/../../../" + str(secret),
    ):
        forge(
            checkpoint, lambda fields, columns, name=name: fields["files"][0].__setitem__(0, name)
        )
        with pytest.raises(CorruptCheckpointError, match="damaged"):
            load(checkpoint)


@pytest.mark.parametrize("block_bytes", [None, 2**61])
def test_sizes_that_no_memory_holds_are_found_before_it_is_asked_for(checkpoint, block_bytes):
    def enlarge(fields, columns):
        row = int(np.flatnonzero(columns["key_ids"] == fields["keys"].index("o"))[0])
        fields["files"][int(columns["file_ids"][row])][1] = 2**60
        if block_bytes is not None:
            # Still one block per chunk.
            fields["block_bytes"], columns["num_bytes"][row] = block_bytes, 2**50

    forge(checkpoint, enlarge)
    with pytest.raises(
        CorruptCheckpointError, match=r"has .* bytes, but the manifest|block_bytes is"
    ):
        load(checkpoint)


def test_a_giant_tensor_without_chunks_is_not_allocated(checkpoint):
    def enlarge(fields, columns):
        fields["keys"].append("zz")
        fields["dtypes"].append("U8")
        columns["key_shapes"] = np.concatenate([columns["key_shapes"], [[2**30, 2**31]]])
        columns["key_ndims"] = np.append(columns["key_ndims"], 2)

    forge(checkpoint, enlarge)
    assert distckpt.open(checkpoint).tensors["zz"].shape == (2**30, 2**31)
    with pytest.raises(LoadMismatchError, match="of key 'zz' is not stored completely"):
        distckpt.open(checkpoint).read_tensors()


def test_positions_on_top_of_each_other_are_found_by_their_checksums(checkpoint):
    def move(fields, columns):
        rows = np.flatnonzero(columns["key_ids"] == fields["keys"].index("w"))
        columns["file_ids"][rows], columns["first_bytes"][rows] = (
            columns["file_ids"][rows[0]],
            columns["first_bytes"][rows[0]],
        )

    forge(checkpoint, move)
    with pytest.raises(CorruptCheckpointError, match="Checksum mismatch"):
        load(checkpoint)


NASTY = st.sampled_from([0, 1, -1, 2, 5, 2**20, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63)])


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "c"
    save(path)
    return path


@settings(max_examples=75)
@given(data=st.data())
def test_a_mutated_manifest_does_not_lead_to_other_errors(template, tmp_path_factory, data):
    def change(fields, columns):
        for _ in range(data.draw(st.integers(1, 2))):
            column = columns[data.draw(st.sampled_from(sorted(columns)))]
            item = data.draw(st.integers(0, column.size - 1))
            column.reshape(-1)[item] = np.array(data.draw(NASTY)).astype(column.dtype)
        if data.draw(st.booleans()):
            file = data.draw(st.sampled_from(fields["files"]))
            file[1] = data.draw(NASTY)

    path = tmp_path_factory.mktemp("mutated") / "c"
    shutil.copytree(template, path)
    forge(path, change)
    asked = {
        key: ShardedTensor.from_rank_offsets(key, torch.zeros_like(value))
        for key, value in TENSORS.items()
    }
    asked |= {f"o{i}": ShardedObject("o", None, (2,), (i,)) for i in range(2)}
    errors = [
        error_of(lambda: distckpt.load(asked, path)),
        error_of(lambda: distckpt.open(path).read_tensors()),
    ]
    shutil.rmtree(path)
    for error in errors:
        # A mismatch: another shape, or a hole. What the manifest describes is not what is asked
        # for.
        assert error is None or isinstance(error, CorruptCheckpointError | LoadMismatchError)
        assert error is None or str(path) in str(error)


# ---- objects


@settings(max_examples=100)
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_damage_that_checksums_were_not_asked_to_find_is_found_when_decoding(
    template, tmp_path_factory, position, bit
):
    path = tmp_path_factory.mktemp("object") / "c"
    shutil.copytree(template, path)
    file = path / FILES[2]
    span = entries_of(file)["o/shard_0_2"]
    data = bytearray(file.read_bytes())
    data[span[math.floor(position * len(span))]] ^= 1 << bit
    file.write_bytes(data)
    error = error_of(
        lambda: distckpt.load({"o": ShardedObject("o", None, (2,), (0,))}, path, verify=False)
    )
    shutil.rmtree(path)
    assert error is None or isinstance(error, CorruptCheckpointError)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_no_flipped_byte_gives_wrong_values(checkpoint, name):
    """Every byte of every file, one bit of it each time: verification finds it, and a load does, or
    it does no harm.
    """
    file = checkpoint / name
    original, random = file.read_bytes(), np.random.default_rng(7)
    for position in range(len(original)):
        flip(file, original, position, random)
        problems = distckpt.verify(checkpoint).problems
        error = error_of(lambda: load(checkpoint))
        assert problems or error is None
        assert problems or name == FILES[4], f"byte {position} is not found"

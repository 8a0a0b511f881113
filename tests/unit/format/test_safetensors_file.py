"""Shard files are plain safetensors: the reference library and torch's own readers of sharded files
read them.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import distckpt
from distckpt import InvalidShardingError, ShardedObject, ShardedTensor
from distckpt._format.safetensors_file import (
    DATA_ALIGNMENT,
    Entry,
    build_header,
    layout_order,
    stored_shape,
)
from tests.support.reference import needs_torchs_hugging_face
from tests.support.states import shard_files


def several_chunks(path):
    """Save tensors of several shards each; returns the whole tensors."""
    tensors = {
        "rows": torch.randn(12, 5),
        "columns": torch.randn(6, 12, dtype=torch.float64),
        "blocks": torch.randn(8, 4, 6).to(torch.bfloat16),
        "flat": torch.randn(7, 9).half(),
        "whole": torch.randn(3),
        "scalar": torch.tensor(2.5),
    }
    state = {}
    for i in range(3):
        state["rows", i] = ShardedTensor.from_rank_offsets(
            "rows", tensors["rows"].chunk(3)[i], (0, i, 3)
        )
        state["columns", i] = ShardedTensor.from_rank_offsets(
            "columns", tensors["columns"].chunk(3, 1)[i], (1, i, 3)
        )
    for i in range(2):
        for j in range(3):
            part = tensors["blocks"].chunk(2, 0)[i].chunk(3, 2)[j]
            state["blocks", i, j] = ShardedTensor.from_rank_offsets(
                "blocks", part, (0, i, 2), (2, j, 3)
            )
    for first, last in ((0, 20), (20, 41), (41, 63)):
        state["flat", first] = ShardedTensor.from_rank_offsets_flat(
            "flat",
            tensors["flat"].flatten()[first:last],
            (7, 9),
            flattened_range=slice(first, last),
        )
    state["whole"] = ShardedTensor.from_rank_offsets("whole", tensors["whole"])
    state["scalar"] = ShardedTensor.from_rank_offsets("scalar", tensors["scalar"])
    distckpt.save(state, path)
    return tensors


def header_of(file):
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length, len(data)


# ---- a checkpoint's files


def test_the_reference_library_puts_the_tensors_together_again(tmp_path):
    tensors = several_chunks(tmp_path / "c")
    rebuilt = {key: torch.full_like(tensor, math.nan) for key, tensor in tensors.items()}
    for file in shard_files(tmp_path / "c"):
        with safetensors.safe_open(file, "pt") as opened:
            info = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            assert info.keys() == set(opened.keys())
            shapes = json.loads(opened.metadata()["distckpt_global_shapes"])
            for key in opened.keys():  # noqa: SIM118 - not a dict
                chunk = opened.get_tensor(key)
                offset = info[key]["saved_offsets"]
                region = tuple(slice(o, o + n) for o, n in zip(offset, chunk.shape, strict=True))
                assert bool(rebuilt[key][region].isnan().all())
                rebuilt[key][region] = chunk
                assert shapes[key] == list(tensors[key].shape)
    assert all(torch.equal(rebuilt[key], tensor) for key, tensor in tensors.items())


def test_files_are_named_as_torch_names_them_and_say_what_they_are(tmp_path):
    several_chunks(tmp_path / "c")
    files = shard_files(tmp_path / "c")
    count = len(files)
    names = [f"shard-00001-model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert [file.name for file in files] == names
    for file in files:
        metadata = header_of(file)[0]["__metadata__"]
        assert metadata["format"] == "pt"
        assert metadata["DCP_VERSION"] == "1.0"
        assert metadata["distckpt_format"] == "3"


def test_data_begin_at_a_page_and_follow_one_another_aligned_to_their_items(tmp_path):
    several_chunks(tmp_path / "c")
    sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1}
    for file in [*shard_files(tmp_path / "c"), *Path(tmp_path, "c", "objects").iterdir()]:
        header, start, end = header_of(file)
        assert start % 4096 == 0
        del header["__metadata__"]
        position = 0
        for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
            assert entry["data_offsets"][0] == position
            assert position % sizes[entry["dtype"]] == 0
            position = entry["data_offsets"][1]
        assert start + position == end


def test_one_file_is_enough_when_no_key_repeats(tmp_path):
    state = {
        str(i): ShardedTensor.from_rank_offsets(f"w{i}", torch.randn(4, i + 1)) for i in range(20)
    }
    rows = {
        ("rows", i): ShardedTensor.from_rank_offsets("rows", torch.randn(2, 3), (0, i, 5))
        for i in range(5)
    }
    distckpt.save({**state, **rows}, tmp_path / "c")
    (file,) = shard_files(tmp_path / "c")
    assert safetensors.torch.load_file(file)["rows"].shape == (10, 3)


def test_objects_and_common_state_are_entries_of_bytes(tmp_path):
    state = {"step": 5, "rng": ShardedObject("rng", {"seed": 1}, (2,), (0,))}
    state["other"] = ShardedObject("rng", [2], (2,), (1,))
    distckpt.save(state, tmp_path / "c")
    (file,) = Path(tmp_path, "c", "objects").iterdir()
    entries = safetensors.numpy.load_file(file)
    assert entries.keys() == {"rng/shard_0_2", "rng/shard_1_2", "distckpt.common_state/shard_0_1"}
    assert all(entry.dtype == np.uint8 for entry in entries.values())
    # Each entry is itself a safetensors file whose metadata hold the object.
    with safetensors.safe_open(file, "np") as opened:
        blob = opened.get_tensor("rng/shard_0_2").tobytes()
    (length,) = struct.unpack("<Q", blob[:8])
    assert json.loads(json.loads(blob[8 : 8 + length])["__metadata__"]["tree"]) == {"seed": 1}


def test_a_state_without_tensors_has_no_shard_file(tmp_path):
    distckpt.save({"step": 5}, tmp_path / "c")
    assert shard_files(tmp_path / "c") == []
    assert distckpt.load({}, tmp_path / "c") == {"step": 5}


# ---- torch's readers


@needs_torchs_hugging_face
@pytest.mark.filterwarnings("ignore:torch.distributed is ")
def test_torchs_hugging_face_reader_loads_any_part(tmp_path):
    tensors = several_chunks(tmp_path / "c")
    targets = {key: torch.full_like(tensor, math.nan) for key, tensor in tensors.items()}
    dcp.load(
        targets,
        storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "c" / "tensors")),
        no_dist=True,
    )
    assert all(torch.equal(targets[key], tensor) for key, tensor in tensors.items())


def test_torchs_consolidation_merges_the_shards(tmp_path):
    theirs = pytest.importorskip("torch.distributed.checkpoint._consolidate_hf_safetensors")
    # Not the 0-dim one, which torch's function replaces by zero.
    tensors = {key: tensor for key, tensor in several_chunks(tmp_path / "c").items() if tensor.ndim}
    (tmp_path / "merged").mkdir()
    mapping = {key: 1 + number % 2 for number, key in enumerate(tensors)}
    theirs.consolidate_safetensors_files(
        str(tmp_path / "c" / "tensors"), str(tmp_path / "merged"), mapping
    )
    merged = {}
    for file in Path(tmp_path, "merged").glob("*.safetensors"):
        merged |= safetensors.torch.load_file(file)
    assert merged.keys() == tensors.keys()
    assert all(torch.equal(merged[key], tensor) for key, tensor in tensors.items())


# ---- keys of any kind


@pytest.mark.parametrize(
    "key",
    [
        "",
        "a/b",
        "a.b",
        "ключ",
        "a\nb",
        "a\0b",
        '"\\',
        "🤗",
        "x" * 5000,
        "shard-00001",
        "DCP_SHARDING_INFO",
        "json",
    ],
    ids=lambda key: ascii(key[:20]),
)
def test_any_text_is_a_key(tmp_path, key):
    tensor = torch.arange(6.0)
    state = {
        str(i): ShardedTensor.from_rank_offsets(key, part, (0, i, 2))
        for i, part in enumerate(tensor.chunk(2))
    }
    state["object"] = ShardedObject(key + "o", "value", (1,), (0,))
    distckpt.save(state, tmp_path / "c")
    (file,) = shard_files(tmp_path / "c")
    assert torch.equal(safetensors.torch.load_file(file)[key], tensor)
    asked = {
        "w": ShardedTensor.from_rank_offsets(key, torch.zeros(6)),
        "o": ShardedObject(key + "o", None, (1,), (0,)),
    }
    loaded = distckpt.load(asked, tmp_path / "c", strict="raise")
    assert torch.equal(loaded["w"], tensor)
    assert loaded["o"] == "value"


@pytest.mark.parametrize("key", ["__metadata__", "a\ud800"], ids=ascii)
def test_names_that_safetensors_files_cannot_hold_are_refused(tmp_path, key):
    with pytest.raises(InvalidShardingError, match=r"key .* safetensors"):
        distckpt.save({"w": ShardedTensor.from_rank_offsets(key, torch.zeros(2))}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


# ---- the byte layout alone


def entry(name, dtype, shape):
    size = {"F64": 8, "C64": 8, "F32": 4, "BF16": 2, "U8": 1, "F4": 1}[dtype]
    return Entry(name, dtype, shape, math.prod(shape) * size)


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
            st.sampled_from(["F64", "F32", "BF16", "U8"]),
            st.lists(st.integers(0, 4), max_size=3).map(tuple),
        ),
        max_size=6,
        unique_by=lambda item: item[0],
    ),
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        st.text('abc"\\é'),
        max_size=3,
    ),
)
def test_headers_are_what_the_reference_library_reads(items, metadata):
    entries = [entry(*item) for item in items if item[0] != "__metadata__"]
    entries = [entries[i] for i in layout_order(entries)]
    header, first_bytes = build_header(entries, metadata)
    assert len(header) % DATA_ALIGNMENT == 0
    contents = [bytes([number + 1]) * e.num_bytes for number, e in enumerate(entries)]
    blob = header + b"".join(contents)
    assert [
        blob[first : first + len(c)] for first, c in zip(first_bytes, contents, strict=True)
    ] == contents
    read = dict(safetensors.deserialize(blob))
    assert read.keys() == {e.name for e in entries}
    for e, content in zip(entries, contents, strict=True):
        assert bytes(read[e.name]["data"]) == content
        assert tuple(read[e.name]["shape"]) == e.shape
        assert read[e.name]["dtype"] == e.dtype


def test_larger_items_come_first_and_otherwise_the_order_stays():
    entries = [
        entry("a", "U8", (3,)),
        entry("b", "F32", (1,)),
        entry("c", "C64", (1,)),
        entry("d", "F32", (1,)),
    ]
    assert layout_order(entries) == [2, 1, 3, 0]


def test_packed_types_count_their_elements():
    assert stored_shape("F4", (3, 4)) == (3, 8)
    assert stored_shape("F4", ()) == (2,)
    assert stored_shape("F32", (3, 4)) == (3, 4)


def test_headers_that_readers_would_refuse_are_not_written():
    entries = [Entry(letter * 50_000_000, "U8", (0,), 0) for letter in "xy"]
    with pytest.raises(ValueError, match=r"for 2 entries exceeds 100 MB"):
        build_header(entries, {})

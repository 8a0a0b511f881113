from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distckpt.hf import (
    derive_base_prefix_from_path,
    group_keys_by_shard_size,
    index_filename,
    index_json,
    optimize_shard_layout,
    output_filenames,
    shard_filename,
)


def test_names_as_hugging_face_writes_them():
    assert shard_filename("/x/model", 1, 4) == "/x/model-00001-of-00004.safetensors"
    assert (
        shard_filename("s3://bucket/run/model", 12, 123456)
        == "s3://bucket/run/model-00012-of-123456.safetensors"
    )
    assert index_filename("/x/model") == "/x/model.safetensors.index.json"
    assert output_filenames("model", 1) == ["model.safetensors"]
    assert output_filenames("model", 2) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


@pytest.mark.parametrize(("idx", "total"), [(0, 3), (4, 3), (-1, 3), (1, 0)])
def test_a_file_that_is_not_among_them_has_no_name(idx, total):
    with pytest.raises(ValueError, match=f"no file {idx} of {total}"):
        shard_filename("model", idx, total)


PREFIXES = [
    ("/x/model.safetensors", "/x/model"),
    ("/x/model.safetensors.index.json", "/x/model"),
    ("/x/model-00001-of-00004.safetensors", "/x/model"),
    ("model-1-of-4.safetensors", "model"),
    ("model-0000001-of-0012345.safetensors", "model"),
    ("s3://b/run-1-of-2/my-model-00003-of-00004.safetensors", "s3://b/run-1-of-2/my-model"),
    ("gs://b/x.v2/model.safetensors.index.json", "gs://b/x.v2/model"),
    (Path("/x/model.safetensors"), "/x/model"),
    ("/x/model-00001-of-00004", "/x/model-00001-of-00004"),
    ("/x/model.safetensors/inner", "/x/model.safetensors/inner"),
    ("/x/pytorch_model.bin", "/x/pytorch_model.bin"),
    ("/x/model-a-of-b.safetensors", "/x/model-a-of-b"),
    ("/x/modelXsafetensors", "/x/modelXsafetensors"),
]


@pytest.mark.parametrize(("path", "prefix"), PREFIXES)
def test_base_prefix(path, prefix):
    assert derive_base_prefix_from_path(path) == prefix


@pytest.mark.parametrize("total", [1, 7, 100_000])
def test_every_name_leads_back_to_its_prefix(total):
    names = [*output_filenames("gs://b/llama-7b", total)[-3:], index_filename("gs://b/llama-7b")]
    assert {derive_base_prefix_from_path(name) for name in names} == {"gs://b/llama-7b"}


SIZES = st.lists(st.integers(0, 50), max_size=20)


@given(SIZES, st.integers(1, 60))
def test_groups_keep_the_order_and_the_limit(sizes, limit):
    num_bytes = {f"t{i}": size for i, size in enumerate(sizes)}
    state = {
        key: torch.empty(size, dtype=torch.uint8, device="meta") for key, size in num_bytes.items()
    }
    groups = group_keys_by_shard_size(state, limit)
    assert list(itertools.chain(*groups)) == list(num_bytes)
    for group, following in itertools.zip_longest(groups, groups[1:]):
        total = sum(num_bytes[key] for key in group)
        assert total <= limit or len(group) == 1
        # No file is ended before it is full.
        assert following is None or total + num_bytes[following[0]] > limit


def test_groups_by_the_size_of_anything_with_shape_and_dtype():
    class Described:
        shape = (4,)
        dtype = "BF16"

    state = {
        "cpu": torch.zeros(3, 4, dtype=torch.bfloat16),
        "meta": torch.empty(24, dtype=torch.uint8, device="meta"),
        "numpy": np.zeros((2, 3)),
        "other": Described(),
    }
    assert group_keys_by_shard_size(state, 48) == [["cpu", "meta"], ["numpy"], ["other"]]
    assert group_keys_by_shard_size(state, 56) == [["cpu", "meta"], ["numpy", "other"]]
    assert group_keys_by_shard_size(state, 1) == [[key] for key in state]


@pytest.mark.parametrize("group", [group_keys_by_shard_size, optimize_shard_layout])
@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_that_is_not_positive_is_refused(group, limit):
    with pytest.raises(ValueError, match=re.escape(f"not {limit} bytes")):
        group({"a": torch.zeros(2)}, limit)


def transformer(num_layers, num_experts=0):
    """A model whose layers have 10 elements besides their experts, which have 4 each."""
    names = {"model.embed_tokens.weight": 8, "model.norm.weight": 1, "lm_head.weight": 8}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        names |= {
            f"{prefix}.self_attn.q_proj.weight": 3,
            f"{prefix}.self_attn.q_proj.bias": 1,
            f"{prefix}.mlp.up.weight": 6,
        }
        for expert in range(num_experts):
            names |= {f"{prefix}.mlp.experts.{expert}.{name}.weight": 2 for name in ("w1", "w2")}
    keys = sorted(names, reverse=True)
    return {key: torch.empty(names[key], dtype=torch.uint8, device="meta") for key in keys}


def test_layers_stay_together_in_natural_order():
    groups = optimize_shard_layout(transformer(12), 26)
    layers = [[key.split(".")[2] for key in group if ".layers." in key] for group in groups]
    assert [sorted(set(group), key=int) for group in layers if group] == [
        ["0"], ["1", "2"], ["3", "4"], ["5", "6"], ["7", "8"], ["9", "10"], ["11"],
    ]  # fmt: skip
    assert groups[0][:2] == ["lm_head.weight", "model.embed_tokens.weight"]


def test_a_layer_larger_than_a_file_is_divided_between_its_experts():
    groups = optimize_shard_layout(transformer(2, num_experts=11), 9)
    for layer, expert in itertools.product(range(2), range(11)):
        holders = [
            group
            for group in groups
            if any(f"layers.{layer}.mlp.experts.{expert}." in key for key in group)
        ]
        assert len(holders) == 1
    experts = [
        re.findall(r"layers\.0\.mlp\.experts\.(\d+)", key) for group in groups for key in group
    ]
    assert [int(found[0]) for found in experts if found] == [n for n in range(11) for _ in range(2)]


@given(st.integers(0, 4), st.integers(0, 3), st.integers(1, 60))
def test_an_optimized_layout_holds_every_key_once_within_the_limit(num_layers, num_experts, limit):
    state = transformer(num_layers, num_experts)
    groups = optimize_shard_layout(state, limit)
    assert sorted(itertools.chain(*groups)) == sorted(state)
    for group in groups:
        assert len(group) == 1 or sum(state[key].numel() for key in group) <= limit


def test_keys_without_modules_can_be_laid_out():
    state = {key: torch.zeros(4, dtype=torch.uint8) for key in ["w10", "w2", "", "a.", "0"]}
    groups = optimize_shard_layout(state, 8)
    assert sorted(itertools.chain(*groups)) == sorted(state)
    order = list(itertools.chain(*groups))
    assert order.index("w2") < order.index("w10")


def test_index_is_written_as_hugging_face_does():
    weight_map = {
        "b.10": "model-00002-of-00002.safetensors",
        "b.2": "model-00001-of-00002.safetensors",
        "ä": "x",
    }
    expected = (
        '{\n  "metadata": {\n    "total_parameters": 7,\n    "total_size": 28\n  },\n'
        '  "weight_map": {\n'
        '    "b.10": "model-00002-of-00002.safetensors",\n'
        '    "b.2": "model-00001-of-00002.safetensors",\n'
        '    "\\u00e4": "x"\n  }\n}\n'
    )
    assert index_json(weight_map, 28, 7) == expected.encode()
    assert json.loads(expected)["weight_map"] == weight_map

"""Consolidation in one process: what is exported, under which names, in which files, and what stays
when it fails.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import distckpt
from distckpt import LoadMismatchError, ShardedObject, ShardedTensor
from distckpt.hf import HuggingFaceConsolidationStrategy, consolidate_safetensors_files
from distckpt.megatron.core import CheckpointingException
from distckpt.rules import Drop, Rename, Split, Trim, Unstack
from tests.support.disk import header_of, tree_of
from tests.support.exports import SOURCES, model, random_tensor, save_folder
from tests.support.hf_folders import (
    INDEX,
    read_export,
    same_bytes,
    tilings,
    write_folder,
    write_indexed,
    write_shard,
)
from tests.support.reference import needs_dtypes, needs_torchs_hugging_face
from tests.support.states import save_checkpoint

NEW_DTYPES = [
    getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)
]
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool,
    torch.uint8, torch.int8, torch.uint16, torch.int16,
    torch.uint32, torch.int32, torch.uint64, torch.int64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    *NEW_DTYPES,
]  # fmt: skip


# ---- content


@SOURCES
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_every_dtype_and_any_number_of_axes(tmp_path, save, axis):
    tensors = {}
    for dtype in DTYPES:
        for shape in [(4,), (3, 5), (2, 3, 4), (4, 0), (0,), (1, 1, 1, 3)] + [()] * (
            dtype != DTYPES[-1]
        ):
            tensors[f"{dtype}.{'x'.join(map(str, shape))}"] = random_tensor(
                shape, dtype, seed=len(tensors)
            )
    if save is save_folder:
        tensors = {key: tensor for key, tensor in tensors.items() if tensor.numel()}
    save(tmp_path / "in", tensors, axis, 2)
    report = distckpt.consolidate(tmp_path / "in", tmp_path / "out")
    assert same_bytes(read_export(tmp_path / "out"), tensors)
    assert report.files == ("model.safetensors",)
    assert report.num_tensors == len(tensors)
    assert report.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert report.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert sum(report.dtypes.values()) == len(tensors)
    assert report.dtypes["BF16"] == sum(
        tensor.dtype == torch.bfloat16 for tensor in tensors.values()
    )
    assert report.overflows == {}


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_grid(data):
    tensors, chunks = {}, {}
    for key in "ab":
        shape = tuple(
            data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4), f"shape of {key}")
        )
        dtype = data.draw(
            st.sampled_from([torch.int64, torch.int16, torch.uint8, torch.bfloat16]),
            f"dtype of {key}",
        )
        tensors[key] = random_tensor(shape, dtype, seed=ord(key))
        chunks[key] = data.draw(tilings(shape), f"chunks of {key}")
    is_ours = data.draw(st.booleans(), "a distckpt checkpoint")
    with tempfile.TemporaryDirectory() as directory:
        state, rank = {}, 0
        for key, tensor in tensors.items():
            for offset, extent in chunks[key]:
                rank += 1
                part = tensor[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))]
                if is_ours:
                    shard = ShardedTensor(
                        key, part, part.dtype, extent, tuple(tensor.shape), offset, None
                    )
                    state[f"{key}.{offset}"] = shard
                else:
                    write_shard(Path(directory) / "in", rank, {key: (offset, part)})
        if is_ours:
            distckpt.save(state, f"{directory}/in")
        limit = data.draw(st.sampled_from([1, 100, 10**9]), "max_file_bytes")
        distckpt.consolidate(f"{directory}/in", f"{directory}/out", max_file_bytes=limit)
        assert same_bytes(read_export(f"{directory}/out"), tensors)


LARGE = {
    "columns": (37, 1100, 129),
    "rows": (2503, 2201),
    "flat": (5_250_001,),
    "narrow": (1_000_003, 5),
}


@pytest.fixture(scope="module")
def large():
    return {
        key: torch.arange(np.prod(shape), dtype=torch.int32).view(shape)
        for key, shape in LARGE.items()
    }


@SOURCES
@pytest.mark.parametrize("axis", [0, 1])
def test_tensors_larger_than_a_window(tmp_path, large, save, axis):
    save(tmp_path / "in", large, axis, 3)
    for num_windows in (1, 1000):
        out = tmp_path / f"out{num_windows}"
        distckpt.consolidate(tmp_path / "in", out, max_inflight_bytes=num_windows << 25)
        assert same_bytes(read_export(out), large)


def test_tensors_larger_than_a_window_are_converted(tmp_path, large):
    tensors = {key: tensor.float() for key, tensor in large.items()}
    save_folder(tmp_path / "in", tensors, 1, 2)
    for dtype in (torch.bfloat16, torch.float64):
        distckpt.consolidate(tmp_path / "in", tmp_path / str(dtype), dtype=dtype)
        assert same_bytes(
            read_export(tmp_path / str(dtype)), {key: t.to(dtype) for key, t in tensors.items()}
        )


def test_consolidation_as_a_strategy(tmp_path):
    tensors = model()
    distckpt.save(
        {key: ShardedTensor.from_rank_offsets(key, t) for key, t in tensors.items()}, tmp_path / "c"
    )
    strategy = HuggingFaceConsolidationStrategy(keys="model.layers.", max_file_bytes=500)
    report = strategy.consolidate(str(tmp_path / "c"), str(tmp_path / "out"))
    found = read_export(tmp_path / "out")
    assert found.keys() == {key for key in tensors if "layers" in key}
    assert all(torch.equal(found[key], tensors[key]) for key in found)
    assert len(report.files) > 1


def test_integers_become_numbers_of_64_bits(tmp_path):
    save_folder(tmp_path / "in", {"n": torch.tensor([2**53 + 1, -3])})
    report = distckpt.consolidate(tmp_path / "in", tmp_path / "out", dtype={"n": torch.float64})
    assert read_export(tmp_path / "out")["n"].tolist() == [2.0**53, -3.0]
    assert report.overflows == {}


def test_the_header_is_aligned_and_entries_are_ordered_by_size_of_items(tmp_path):
    tensors = {
        "a": random_tensor((3,), torch.uint8),
        "b": random_tensor((5,), torch.float64),
        "c": torch.ones(2, 2),
    }
    distckpt.consolidate(save_folder(tmp_path / "in", tensors), tmp_path / "out")
    start, header = header_of(tmp_path / "out" / "model.safetensors")
    assert start % 8 == 0
    first = {
        key: entry["data_offsets"][0] for key, entry in header.items() if key != "__metadata__"
    }
    assert sorted(first, key=first.get) == ["b", "c", "a"]


def test_objects_and_common_state_are_not_exported(tmp_path):
    save_checkpoint(
        tmp_path / "in", model(), rng=ShardedObject("rng", {"seed": 1}, (1,), (0,)), step=7
    )
    distckpt.consolidate(tmp_path / "in", tmp_path / "out")
    assert same_bytes(read_export(tmp_path / "out"), model())


def test_an_export_can_be_consolidated_again(tmp_path):
    distckpt.consolidate(
        save_folder(tmp_path / "in", model()), tmp_path / "many", max_file_bytes=200
    )
    distckpt.consolidate(tmp_path / "many", tmp_path / "one")
    assert (tmp_path / "one" / "model.safetensors").exists()
    assert same_bytes(read_export(tmp_path / "one"), model())


# ---- selection and names


SELECTIONS = {
    "model.layers.1": {"model.layers.1.w", "model.layers.1.norm"},
    "model.layers.*.w": {f"model.layers.{i}.w" for i in range(3)},
    "*[02].norm": {"model.layers.0.norm", "model.layers.2.norm"},
    ("model.embed", "*1.w"): {"model.embed.weight", "model.layers.1.w"},
    "model.": set(model()),
}


@pytest.mark.parametrize(("keys", "expected"), SELECTIONS.items(), ids=map(str, SELECTIONS))
def test_keys_are_chosen_by_beginnings_and_patterns(tmp_path, keys, expected):
    source = save_checkpoint(tmp_path / "in", {**model(), "optimizer.exp_avg.w": torch.ones(8)})
    distckpt.consolidate(source, tmp_path / "out", keys=keys)
    assert same_bytes(read_export(tmp_path / "out"), {key: model()[key] for key in expected})


def test_no_key_matches(tmp_path):
    source = save_checkpoint(tmp_path / "in", model())
    with pytest.raises(
        LoadMismatchError, match=r"'modle\.'.*'model\.layers\.\{0\.\.2\}\.norm' \(3 keys\)"
    ):
        distckpt.consolidate(source, tmp_path / "out", keys="modle.")
    assert os.listdir(tmp_path) == ["in"]


def test_names_are_changed_by_their_beginnings_in_order(tmp_path):
    source = save_folder(tmp_path / "in", model(1))
    rename = {"model.layers.0.": "first.", "model.": "", "model.embed": "too late"}
    distckpt.consolidate(source, tmp_path / "out", rename=rename)
    assert set(read_export(tmp_path / "out")) == {"embed.weight", "first.w", "first.norm"}
    distckpt.consolidate(source, tmp_path / "out2", rename={"": "m."})
    assert set(read_export(tmp_path / "out2")) == {f"m.{key}" for key in model(1)}


@pytest.mark.parametrize(
    "wrong", [{"keys": ["model.embed", "zzz"]}, {"rename": {"model.": "", "zzz": "y"}}]
)
@pytest.mark.parametrize(
    "door", [distckpt.consolidate, distckpt.reshard, distckpt.merge, distckpt.diff]
)
def test_each_name_must_match_something(tmp_path, door, wrong, caplog):
    source = save_checkpoint(tmp_path / "in", model(1))
    other = (
        save_checkpoint(tmp_path / "other", model(1))
        if door in (distckpt.merge, distckpt.diff)
        else None
    )
    given = {distckpt.merge: ([source, other], tmp_path / "out"), distckpt.diff: (source, other)}
    with pytest.raises(
        LoadMismatchError, match=r"No tensor.* matches 'zzz'; there are 'model\.embed"
    ):
        door(*given.get(door, (source, tmp_path / "out")), **wrong)
    assert not (tmp_path / "out").exists()
    distckpt.consolidate(source, tmp_path / "out", keys="!zzz")
    assert "no tensor matches 'zzz', which is to be left out" in caplog.text


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "bf16"}, r"dtype is a torch.dtype.*got 'bf16'"),
        ({"dtype": {"*": "bf16"}}, r"dtype is a torch.dtype.*got \{"),
        ({"dtype": torch.int32}, r"'model.embed.weight' is .*fractions"),
        ({"dtype": {"*.weight": torch.int8}}, r"'model.embed.weight' is .*fractions"),
        ({"rename": {"model.embed.weight": "__metadata__"}}, r"can hold the name '__metadata__'"),
    ],
)
def test_options_that_make_no_export(tmp_path, options, match):
    source = save_checkpoint(tmp_path / "in", {"model.embed.weight": torch.ones(2, 3)})
    with pytest.raises((TypeError, CheckpointingException), match=match):
        distckpt.consolidate(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    distckpt.consolidate(source, tmp_path / "out", dtype={"model.embed.weight": torch.int8})
    assert distckpt.open(tmp_path / "out").read_tensors()["model.embed.weight"].dtype == torch.int8


@pytest.mark.parametrize("door", [distckpt.consolidate, distckpt.reshard])
def test_a_tied_name_can_be_renamed(tmp_path, door):
    tied = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(3, 2), "head": torch.nn.Linear(2, 3, bias=False)}
    )
    tied["head"].weight = tied["embed"].weight
    distckpt.save({"model": tied}, tmp_path / "in")
    door(tmp_path / "in", tmp_path / "out", rename={"embed.": "wte.", "head.": "lm_head."})
    names = distckpt.open(tmp_path / "out").tensors.keys()
    assert names == {"wte.weight"} | ({"lm_head.weight"} if door is distckpt.reshard else set())


def test_two_tensors_cannot_get_one_name(tmp_path):
    source = save_folder(tmp_path / "in", model(2))
    with pytest.raises(CheckpointingException, match=r"'x\.norm'"):
        distckpt.consolidate(
            source, tmp_path / "out", rename={"model.layers.0": "x", "model.layers.1": "x"}
        )
    assert os.listdir(tmp_path) == ["in"]


def test_rules_change_shapes_and_take_padding_away(tmp_path):
    fused = torch.arange(2 * 6 * 4, dtype=torch.float32).view(2, 6, 4)
    words = torch.arange(16 * 4, dtype=torch.float32).view(16, 4)
    source = save_checkpoint(tmp_path / "in", {"layers.fused": fused, "words": words}, axis=1)
    rules = [
        Trim("words", axis=0, size=13),
        Unstack("layers.fused", "layers.{i}.fused"),
        Split("layers.*.fused", ("layers.{0}.gate", "layers.{0}.up")),
    ]
    distckpt.consolidate(source, tmp_path / "out", rules=rules, dtype={"words": torch.float64})
    expected = {"words": words[:13].double()}
    for layer in range(2):
        expected |= {
            f"layers.{layer}.gate": fused[layer, :3],
            f"layers.{layer}.up": fused[layer, 3:],
        }
    assert same_bytes(read_export(tmp_path / "out"), expected)


def test_the_stored_half_of_a_tensor_does_not_stand_for_the_other_half(tmp_path):
    right = torch.arange(16.0).view(4, 4)
    shard = ShardedTensor("w", right, right.dtype, (4, 4), (4, 8), (0, 4), None)
    distckpt.save({"w": shard}, tmp_path / "in", validate_access_integrity=False)
    with pytest.raises(LoadMismatchError, match=r"\[0:4, 0:4\] of key 'w'.*saved with gaps"):
        distckpt.consolidate(tmp_path / "in", tmp_path / "out", rules=[Split("w", ("a", "b"), 1)])
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("axis", [0, 1])
def test_shards_without_elements(tmp_path, axis):
    tensor = torch.arange(12.0).view(3, 4)
    parts = [tensor.narrow(axis, 0, 2), tensor.narrow(axis, 2, 0), tensor.narrow(axis, 2, 1 + axis)]
    for rank, part in enumerate(parts, 1):
        offset = [0, 0]
        offset[axis] = min(rank - 1, 1) * 2
        write_shard(tmp_path / "in", rank, {"w": (offset, part), f"scalar{rank}": ((), part.sum())})
    distckpt.consolidate(tmp_path / "in", tmp_path / "out")
    scalars = {f"scalar{rank}": part.sum() for rank, part in enumerate(parts, 1)}
    assert same_bytes(read_export(tmp_path / "out"), {"w": tensor, **scalars})


def test_a_tensor_that_no_rule_matches(tmp_path):
    """Nobody notices foreign keys in a Hugging Face checkpoint, so they must not get there
    unasked.
    """
    tensors = {
        f"module.layers.{i}.{name}": torch.full((2,), float(i))
        for i in range(3)
        for name in ("w", "extra")
    }
    tensors |= {f"ema.{key}": -tensor for key, tensor in tensors.items()}
    source = save_checkpoint(tmp_path / "in", tensors)
    rules = [Rename("module.layers.*.w", "model.layers.{0}.weight")]
    with pytest.raises(LoadMismatchError) as caught:
        distckpt.consolidate(source, tmp_path / "out", rules=rules)
    assert "'module.layers.{0..2}.extra' (3 keys)" in str(caught.value)
    assert "'ema.module.layers.{0..2}.w' (3 keys)" in str(caught.value)
    assert "unmatched='keep'" in str(caught.value)
    assert len(caught.value.missing) == 9
    assert os.listdir(tmp_path) == ["in"]

    distckpt.consolidate(source, tmp_path / "kept", rules=rules, unmatched="keep")
    renamed = {
        key.replace("module", "model").replace(".w", ".weight"): tensors[key]
        for key in list(tensors)[::2][:3]
    }
    others = {key: tensor for key, tensor in tensors.items() if key not in list(tensors)[::2][:3]}
    assert same_bytes(read_export(tmp_path / "kept"), renamed | others)
    distckpt.consolidate(source, tmp_path / "out", rules=[*rules, Drop("**.extra")], keys="module.")
    assert same_bytes(read_export(tmp_path / "out"), renamed)


# ---- dtypes


MIXED = {
    "w": torch.tensor([[1.0, 1e5], [-1e39, torch.inf]], dtype=torch.float64),
    "half": torch.tensor([1.5, 65504.0], dtype=torch.float16),
    "ids": torch.arange(5),
    "flag": torch.tensor(True),
    "scaled": torch.tensor([1.0, 448.0]).to(torch.float8_e4m3fn),
    "phase": torch.tensor([1 + 2j], dtype=torch.complex64),
    **{str(dtype): random_tensor((4,), dtype) for dtype in NEW_DTYPES},
}


def test_one_dtype_is_for_ordinary_floating_point_tensors(tmp_path):
    source = save_folder(tmp_path / "in", MIXED)
    distckpt.consolidate(source, tmp_path / "out", dtype=torch.bfloat16)
    converted = {key: MIXED[key].to(torch.bfloat16) for key in ("w", "half")}
    assert same_bytes(read_export(tmp_path / "out"), MIXED | converted)


def test_a_pattern_converts_integers_and_8_bit_floats_only_by_their_name(tmp_path):
    source = save_checkpoint(tmp_path / "in", MIXED)
    dtype = {"ids": torch.int32, "scaled": torch.float32, "h*": torch.float32, "*": torch.float16}
    distckpt.consolidate(source, tmp_path / "out", dtype=dtype)
    converted = {
        "ids": MIXED["ids"].int(),
        "scaled": MIXED["scaled"].float(),
        "half": MIXED["half"].float(),
        "w": MIXED["w"].half(),
    }
    assert same_bytes(read_export(tmp_path / "out"), MIXED | converted)


def test_a_pattern_that_matches_nothing(tmp_path):
    source = save_folder(tmp_path / "in", MIXED)
    with pytest.raises(CheckpointingException, match="wieghts"):
        distckpt.consolidate(source, tmp_path / "out", dtype={"wieghts*": torch.bfloat16})


OVERFLOWS = [
    # One of the values is infinite, which is an overflow where there are no infinities.
    (torch.float32, {"w": 1}),
    (torch.float16, {"w": 2}),
    (torch.bfloat16, {"w": 1}),
    (torch.float8_e5m2, {"w": 2, "half": 1}),
    (torch.float8_e5m2fnuz, {"w": 3, "half": 1}),
    (torch.float8_e4m3fn, {"w": 3, "half": 1}),
    (torch.float8_e4m3fnuz, {"w": 3, "half": 1}),
    (torch.complex64, {"w": 1}),
    (torch.int64, {"w": 2}),
    (torch.uint64, {"w": 2}),
    (torch.uint8, {"w": 3, "half": 1}),
]


@pytest.mark.parametrize(
    ("dtype", "expected"), OVERFLOWS, ids=[str(dtype) for dtype, _ in OVERFLOWS]
)
def test_values_that_overflow_are_counted(tmp_path, caplog, dtype, expected):
    source = save_folder(tmp_path / "in", MIXED)
    with caplog.at_level(logging.WARNING, "distckpt"):
        is_integer = not (dtype.is_floating_point or dtype.is_complex)
        names = [
            name
            for name, tensor in MIXED.items()
            if tensor.is_floating_point() and tensor.itemsize > 1
        ]
        dtypes = dict.fromkeys(names, dtype) if is_integer else dtype
        report = distckpt.consolidate(source, tmp_path / "out", dtype=dtypes)
    assert report.overflows == expected
    assert "'w'" in caplog.text


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn], ids=str
)
def test_what_is_rounded_to_the_largest_number_is_no_overflow(tmp_path, dtype):
    largest = torch.finfo(dtype).max
    unit = 2.0 ** (np.floor(np.log2(largest))) * torch.finfo(dtype).eps
    inside = torch.tensor(
        [largest, largest + unit * 0.49, -largest - unit * 0.49, 0.0, torch.nan]
    ).double()
    outside = torch.tensor([largest + unit * 0.51, -2 * largest]).double()
    source = save_folder(tmp_path / "in", {"inside": inside, "outside": outside})
    report = distckpt.consolidate(source, tmp_path / "out", dtype=dtype)
    assert report.overflows == {"outside": 2}
    assert same_bytes(
        read_export(tmp_path / "out"), {"inside": inside.to(dtype), "outside": outside.to(dtype)}
    )


INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_integers_that_do_not_fit_are_counted(data):
    stored, wanted = (data.draw(st.sampled_from(INTEGERS)) for _ in range(2))
    low, high = torch.iinfo(stored).min, torch.iinfo(stored).max
    edges = [torch.iinfo(wanted).min, torch.iinfo(wanted).max]
    near = st.sampled_from([edge + step for edge in edges for step in (-1, 0, 1)])
    values = data.draw(
        st.lists((near | st.integers(low, high)).filter(lambda n: low <= n <= high), min_size=1)
    )
    with tempfile.TemporaryDirectory() as directory:
        tensor = torch.from_numpy(np.array(values, str(stored).removeprefix("torch.")))
        write_folder(Path(directory) / "in", {"ids": tensor}, 0, 1)
        report = distckpt.consolidate(f"{directory}/in", f"{directory}/out", dtype={"ids": wanted})
        outside = [n for n in values if not edges[0] <= n <= edges[1]]
        assert report.overflows == ({"ids": len(outside)} if outside else {})
        found = read_export(f"{directory}/out")["ids"]
        assert found.dtype == wanted
        if not outside:
            assert [int(n) for n in found.numpy()] == values


@pytest.mark.parametrize(
    ("key", "dtype"),
    [
        ("w", torch.complex128),
        *(("w", dtype) for dtype in NEW_DTYPES if "float4" in str(dtype)),
        *((str(dtype), torch.float32) for dtype in NEW_DTYPES if "float4" in str(dtype)),
        ("phase", torch.float32),
        ("ids", torch.bool),
    ],
    ids=str,
)
def test_a_conversion_that_makes_no_sense_is_refused(tmp_path, key, dtype):
    source = save_folder(tmp_path / "in", MIXED)
    with pytest.raises(CheckpointingException, match=f"'{key}'.*{dtype}"):
        distckpt.consolidate(source, tmp_path / "out", dtype={key: dtype})
    assert os.listdir(tmp_path) == ["in"]


# ---- tied tensors


def tied_state(path):
    weight = torch.arange(12.0).view(4, 3)
    state = {"b": ShardedTensor.from_rank_offsets("norm", torch.ones(3))}
    for key in ("model.embed", "lm_head"):
        state[key] = ShardedTensor.from_rank_offsets(key, weight)
    distckpt.save(state, path)
    return path, {"model.embed": weight, "lm_head": weight, "norm": torch.ones(3)}


def test_of_tied_tensors_one_is_written_or_all(tmp_path):
    source, tensors = tied_state(tmp_path / "in")
    distckpt.consolidate(source, tmp_path / "all", tied="write")
    assert same_bytes(read_export(tmp_path / "all"), tensors)
    report = distckpt.consolidate(source, tmp_path / "one")
    found = read_export(tmp_path / "one")
    assert len(found) == report.num_tensors == 2
    assert same_bytes(found, {key: tensors[key] for key in found})


@pytest.mark.parametrize("key", ["model.embed", "lm_head"])
def test_a_tied_tensor_that_is_chosen_without_the_other_is_written(tmp_path, key):
    source, tensors = tied_state(tmp_path / "in")
    distckpt.consolidate(source, tmp_path / "out", keys=[key, "norm"])
    assert same_bytes(
        read_export(tmp_path / "out"), {name: tensors[name] for name in (key, "norm")}
    )


# ---- files


def files_of(folder):
    """Return the names of the tensors in each file."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    return {
        name: {key for key in weight_map if weight_map[key] == name}
        for name in sorted(set(weight_map.values()))
    }


def test_files_are_filled_up_to_a_size_in_natural_order(tmp_path):
    tensors = {f"layers.{i}.w": torch.full((25,), float(i)) for i in range(12)} | {
        "large": torch.ones(100)
    }
    source = save_folder(tmp_path / "in", tensors)
    report = distckpt.consolidate(source, tmp_path / "out", max_file_bytes=350)
    groups = [
        {"large"},
        *({f"layers.{i}.w" for i in range(first, first + 3)} for first in (0, 3, 6, 9)),
    ]
    names = [f"model-0000{number}-of-00005.safetensors" for number in range(1, 6)]
    assert files_of(tmp_path / "out") == dict(zip(names, groups, strict=True))
    assert report.files == tuple(names)
    assert same_bytes(read_export(tmp_path / "out"), tensors)


def test_files_are_filled_as_a_mapping_says(tmp_path):
    tensors = model(2)
    mapping = {key: 1 + ("layers.1" in key) for key in tensors} | {"lm_head.weight": 1, "absent": 2}
    source = save_folder(tmp_path / "in", tensors)
    distckpt.consolidate(source, tmp_path / "out", fqn_to_index_mapping=mapping)
    assert files_of(tmp_path / "out") == {
        f"model-0000{number}-of-00002.safetensors": {
            key for key in tensors if mapping[key] == number
        }
        for number in (1, 2)
    }
    assert same_bytes(read_export(tmp_path / "out"), tensors)


def test_a_tensor_that_the_mapping_does_not_name(tmp_path):
    tensors = model(2)
    source = save_folder(tmp_path / "in", tensors)
    mapping = {key: 1 for key in tensors if key != "model.layers.1.w"}
    with pytest.raises(
        CheckpointingException, match=r"'model\.layers\.1\.w'.*did you mean 'model\.layers\.0\.w'"
    ):
        distckpt.consolidate(source, tmp_path / "out", fqn_to_index_mapping=mapping)
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("numbers", [(0, 1), (-1, 1), ("1", 2), (1.5, 2), (None, 1)], ids=str)
def test_files_are_numbered_from_1(tmp_path, numbers):
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    source = save_folder(tmp_path / "in", tensors)
    with pytest.raises(CheckpointingException, match="numbered from 1"):
        distckpt.consolidate(
            source, tmp_path / "out", fqn_to_index_mapping=dict(zip("ab", numbers, strict=True))
        )
    assert os.listdir(tmp_path) == ["in"]


def test_files_are_divided_like_those_of_a_reference_directory(tmp_path):
    tensors = model(2)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    by_file = {names[0]: ["model.layers.1.w"], names[1]: ["model.embed.weight", "model.layers.0.w"]}
    by_file[names[2]] = ["model.layers.0.norm", "model.layers.1.norm"]
    like = {name: {key: tensors[key].bfloat16() for key in keys} for name, keys in by_file.items()}
    write_indexed(tmp_path / "like", like)
    source = save_checkpoint(tmp_path / "in", tensors, axis=1)
    distckpt.consolidate(source, tmp_path / "out", like=tmp_path / "like")
    assert files_of(tmp_path / "out") == {name: set(keys) for name, keys in by_file.items()}
    assert same_bytes(read_export(tmp_path / "out"), tensors)


def test_a_reference_directory_tells_that_the_last_shard_is_missing(tmp_path):
    write_folder(tmp_path / "in", {"model.w": torch.ones(8, 3)}, 0, 4)[-1].unlink()
    write_indexed(
        tmp_path / "like", {"model-00001-of-00001.safetensors": {"model.w": torch.ones(8, 3)}}
    )
    with pytest.raises(CheckpointingException, match=r"'model\.w'.*\(6, 3\).*\(8, 3\)"):
        distckpt.consolidate(tmp_path / "in", tmp_path / "out", like=tmp_path / "like")
    assert sorted(os.listdir(tmp_path)) == ["in", "like"]


def test_a_reference_directory_tells_that_whole_tensors_are_missing(tmp_path, caplog):
    write_folder(tmp_path / "in", {"model.w": torch.ones(8, 3)}, 0, 4)
    like = {"model.w": torch.ones(8, 3), "model.norm": torch.ones(8)}
    write_indexed(tmp_path / "like", {"model-00001-of-00001.safetensors": like})
    with caplog.at_level(logging.WARNING, "distckpt"):
        distckpt.consolidate(tmp_path / "in", tmp_path / "out", like=tmp_path / "like")
    assert "'model.norm'" in caplog.text


# ---- other files


def test_extra_files_are_copied_and_weights_are_not(tmp_path):
    reference = write_indexed(
        tmp_path / "ref", {"model-00001-of-00001.safetensors": {"other": torch.ones(3)}}
    )
    for name in (
        "config.json",
        "tokenizer.json",
        "modeling_x.py",
        "pytorch_model.bin",
        ".gitattributes",
    ):
        (reference / name).write_text(name)
    (reference / "pytorch_model.bin.index.json").write_text("{}")
    (reference / "onnx").mkdir()
    (reference / "linked.json").symlink_to(reference / "config.json")
    source = save_folder(tmp_path / "in", model(1))
    (reference / "tokenizer.json").chmod(0o600)
    distckpt.consolidate(source, tmp_path / "out", extra_files_from=reference, extra_code=True)
    extra = {"config.json", "tokenizer.json", "modeling_x.py", "linked.json"}
    assert set(os.listdir(tmp_path / "out")) == extra | {"model.safetensors"}
    assert (tmp_path / "out" / "modeling_x.py").read_text() == "modeling_x.py"
    assert (tmp_path / "out" / "linked.json").read_text() == "config.json"
    assert (tmp_path / "out" / "tokenizer.json").stat().st_mode & 0o777 == 0o600


def test_code_is_copied_on_request_only(tmp_path, caplog):
    (tmp_path / "ref").mkdir()
    (tmp_path / "ref" / "modeling_x.py").touch()
    distckpt.consolidate(
        save_folder(tmp_path / "in", model(1)), tmp_path / "out", extra_files_from=tmp_path / "ref"
    )
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    assert "left out, as extra_code is not set: 'modeling_x.py'" in caplog.text


def test_links_of_a_hub_cache_are_followed(tmp_path):
    snapshot = tmp_path / "models--x" / "snapshots" / "0abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--x" / "blobs").mkdir()
    (tmp_path / "models--x" / "blobs" / "0123").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/0123")
    distckpt.consolidate(
        save_folder(tmp_path / "in", model(1)), tmp_path / "out", extra_files_from=snapshot
    )
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert not (tmp_path / "out" / "config.json").is_symlink()


def a_hole(path):
    path.touch()
    os.truncate(path, 5 << 40)


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        a_hole,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("/etc/hostname"),
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("absent"),
    ],
    ids=["pipe", "hole", "device", "another's file", "circle", "nothing"],
)
def test_extra_files_that_are_not_copied(tmp_path, make):
    (tmp_path / "ref").mkdir()
    make(tmp_path / "ref" / "config.json")
    source = save_folder(tmp_path / "in", model(1))
    with pytest.raises((CheckpointingException, OSError), match=r"ref/config\.json"):
        distckpt.consolidate(source, tmp_path / "out", extra_files_from=tmp_path / "ref")
    assert sorted(os.listdir(tmp_path)) == ["in", "ref"]


@pytest.mark.parametrize(
    "option",
    [{"tied": "keep"}, {"unmatched": "drop"}, {"verify": "all"}, {"max_file_bytes": 0}],
    ids=str,
)
def test_an_option_that_does_not_exist(tmp_path, option):
    source = save_folder(tmp_path / "in", model(1))
    with pytest.raises(ValueError, match=f"{next(iter(option))}|size of a file"):
        distckpt.consolidate(source, tmp_path / "out", **option)
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("option", ["extra_files_from", "like"])
def test_a_reference_directory_that_is_not_there(tmp_path, option):
    source = save_folder(tmp_path / "in", model(1))
    with pytest.raises(FileNotFoundError, match="absent"):
        distckpt.consolidate(source, tmp_path / "out", **{option: tmp_path / "absent"})
    assert os.listdir(tmp_path) == ["in"]


def test_a_checkpoint_as_reference_directory_is_named(tmp_path):
    source = save_folder(tmp_path / "in", model(1))
    save_checkpoint(tmp_path / "checkpoint", model(1))
    for options in ({}, {"family": "auto"}):
        with pytest.raises(CheckpointingException, match=r"like is .*checkpoint' is a checkpoint"):
            distckpt.consolidate(source, tmp_path / "out", like=tmp_path / "checkpoint", **options)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "in"]


def test_the_marker_of_a_checkpoint_is_no_extra_file(tmp_path):
    """The export would be taken for a checkpoint, of which nothing else is there."""
    source = save_checkpoint(tmp_path / "checkpoint", model(1))
    (source / "tokenizer.json").write_text("{}")
    distckpt.consolidate(source, tmp_path / "out", extra_files_from=source)
    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors", "tokenizer.json"]
    assert same_bytes(distckpt.open(tmp_path / "out").read_tensors(), model(1))


@needs_dtypes("float4_e2m1fn_x2")
def test_packed_elements_without_axes_are_no_export(tmp_path):
    tensor = torch.tensor(7, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    distckpt.save({"w": ShardedTensor.from_rank_offsets("w", tensor)}, tmp_path / "in")
    with pytest.raises(
        CheckpointingException, match=r"'w' is torch\.float4_e2m1fn_x2 without axes"
    ):
        distckpt.consolidate(tmp_path / "in", tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


# ---- under torch's name


def test_torchs_function_by_its_name(tmp_path):
    source = save_folder(tmp_path / "in", MIXED)
    consolidate_safetensors_files(str(source), str(tmp_path / "out"))
    assert same_bytes(read_export(tmp_path / "out"), MIXED)
    mapping = {key: 1 + index % 2 for index, key in enumerate(MIXED)}
    consolidate_safetensors_files(str(source), str(tmp_path / "out"), mapping, num_threads=2)
    assert same_bytes(read_export(tmp_path / "out"), MIXED)
    assert len(files_of(tmp_path / "out")) == 2


@needs_torchs_hugging_face
@pytest.mark.parametrize(
    "numbers", [[1, 1, 1], [0, 0, 0], [0, 1, 1], [2, 2, 3], [1, 3, 3]], ids=str
)
def test_files_are_named_as_torch_names_them(tmp_path, numbers):
    """With an index for a single one, too."""
    tensors = {"a": torch.randn(4, 2), "b": torch.randn(3), "c": torch.randn(2, 2).bfloat16()}
    source, mapping = save_folder(tmp_path / "in", tensors), dict(zip("abc", numbers, strict=True))
    (tmp_path / "torch").mkdir()
    torchs = importlib.import_module("torch.distributed.checkpoint._consolidate_hf_safetensors")
    torchs.consolidate_safetensors_files(str(source), str(tmp_path / "torch"), mapping)
    consolidate_safetensors_files(str(source), str(tmp_path / "out"), mapping)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "torch")
    maps = [json.loads((tmp_path / n / INDEX).read_text())["weight_map"] for n in ("torch", "out")]
    assert maps[0] == maps[1]
    assert same_bytes(read_export(tmp_path / "out"), tensors)


def test_one_file_by_a_mapping_is_numbered_by_consolidate_as_well(tmp_path):
    source = save_folder(tmp_path / "in", {"a": torch.randn(4, 2)})
    report = distckpt.consolidate(source, tmp_path / "out", fqn_to_index_mapping={"a": 1})
    assert report.files == ("model-00001-of-00001.safetensors",)
    assert (tmp_path / "out" / INDEX).exists()
    assert distckpt.consolidate(source, tmp_path / "own").files == ("model.safetensors",)


def test_a_number_for_a_key_that_no_shard_has_is_an_error(tmp_path, caplog):
    """Nothing else shows that all shards of a tensor are missing."""
    source = save_folder(tmp_path / "in", {"a": torch.randn(4, 2)})
    with pytest.raises(ValueError, match=r"fqn_to_index_mapping names 'lost', which no shard"):
        consolidate_safetensors_files(str(source), str(tmp_path / "out"), {"a": 1, "lost": 1})
    with pytest.raises(CheckpointingException, match="does not name 'a'"):
        consolidate_safetensors_files(str(source), str(tmp_path / "out"), {})
    assert os.listdir(tmp_path) == ["in"]
    mapping = {"a": 1, "lost": 2}
    distckpt.consolidate(source, tmp_path / "out", fqn_to_index_mapping=mapping)
    assert "fqn_to_index_mapping names tensors that are not exported: 'lost'" in caplog.text


def test_the_dtypes_of_automodel(tmp_path, caplog):
    """What is mapped to float32 stays precise; a cast counts more than other dtypes."""
    names = ["kept", "plain", "half", "codes", "count"]
    tensors = {name: torch.randn(4, 2) for name in names[:4]} | {"count": torch.arange(3)}
    source, mapping = save_folder(tmp_path / "in", tensors), dict.fromkeys(names, 1)
    stored = {"kept": "F32", "half": "bf16", "codes": "F8_E4M3", "count": "I32", "other": "BF16"}
    places = {}
    for name, options in {
        "cast": {"cast_dtype": torch.float16, "fqn_to_dtype_mapping": stored},
        "original": {
            "fqn_to_dtype_mapping": stored,
            "use_staging": True,
            "staging_dir": "/nowhere",
        },
    }.items():
        places[name] = tmp_path / name
        consolidate_safetensors_files(str(source), str(places[name]), mapping, 2, **options)
    half = torch.float16
    cast = {**tensors, **{name: tensors[name].to(half) for name in ("plain", "half", "codes")}}
    assert same_bytes(read_export(places["cast"]), cast)
    original = {**tensors, "half": tensors["half"].bfloat16()}
    assert same_bytes(read_export(places["original"]), original)
    assert "stay so: 'codes'" in caplog.text
    index = json.loads((places["original"] / INDEX).read_text())
    assert index["metadata"]["total_size"] == 3 * 32 + 16 + 24


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cast_dtype": "bf16"}, "cast_dtype is a torch.dtype"),
        ({"fqn_to_dtype_mapping": {"a": "float99"}}, "'float99' for 'a'"),
        ({"fqn_to_dtype_mapping": ["a"]}, "fqn_to_dtype_mapping is a dict"),
        ({"fqn_to_index_mapping": ["a"]}, "fqn_to_index_mapping is a dict"),
        ({"fqn_to_index_mapping": {"a": -1}}, "numbered from 0 to"),
        ({"num_threads": "2"}, "num_threads is a number of threads"),
        ({"use_staging": 1}, "use_staging must be True or False"),
    ],
    ids=str,
)
def test_wrong_arguments_of_torchs_function_are_named(tmp_path, options, named):
    source = save_folder(tmp_path / "in", {"a": torch.randn(4, 2)})
    with pytest.raises((TypeError, ValueError, CheckpointingException), match=named):
        consolidate_safetensors_files(str(source), str(tmp_path / "out"), **options)
    assert os.listdir(tmp_path) == ["in"]


def test_torchs_function_reads_the_tensors_of_our_checkpoints(tmp_path):
    source = save_checkpoint(tmp_path / "in", model(), axis=1, num_parts=3)
    consolidate_safetensors_files(
        str(source / "tensors"), str(tmp_path / "out"), dict.fromkeys(model(), 1)
    )
    assert same_bytes(read_export(tmp_path / "out"), model())


def test_torchs_function_raises_value_errors_and_leaves_an_earlier_export(tmp_path):
    source = save_folder(tmp_path / "in", model(), num_parts=3)
    consolidate_safetensors_files(str(source), str(tmp_path / "out"))
    before = tree_of(tmp_path / "out")
    sorted(source.iterdir())[1].unlink()
    with pytest.raises(ValueError, match="is in no file"):
        consolidate_safetensors_files(str(source), str(tmp_path / "out"))
    assert tree_of(tmp_path / "out") == before
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


# ---- a process that is killed

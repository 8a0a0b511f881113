"""Training that starts from a Hugging Face directory: any layout, other names and shapes, and the
way back.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import distckpt
from distckpt import LoadMismatchError, ShardedTensor
from distckpt.rules import Concat, Rename, Split, Stack, Transpose, Trim, Unstack
from tests.support.hf_folders import read_export, same_bytes, tilings, write_indexed, write_plain
from tests.support.states import numbered


def part_of(key, tensor, *cuts, dtype=None, data=True):
    """Ask for a part of a tensor: `cuts` are `(axis, index, count)`. Returns the shard and what it
    should hold.
    """
    expected = tensor
    for axis, index, count in cuts:
        expected = expected.chunk(count, axis)[index]
    target = torch.zeros(expected.shape, dtype=dtype or tensor.dtype)
    shard = ShardedTensor.from_rank_offsets(key, target, *cuts)
    return shard if data else shard.without_data(), expected.to(target.dtype)


def assert_loads(asked, directory, **options):
    """Load `{name: (shard, expected)}` and compare."""
    loaded = distckpt.load(
        {name: shard for name, (shard, _) in asked.items()}, directory, **options
    )
    assert same_bytes(
        loaded, {name: expected.contiguous() for name, (_, expected) in asked.items()}
    )


# ---- plain directories


@pytest.fixture
def directory(tmp_path):
    """An indexed directory of two files; `tensors` are what it holds."""
    files = {
        "model-00001-of-00002.safetensors": {
            "embed": numbered(12, 6),
            "layers.0.w": numbered(8, 4).bfloat16(),
        },
        "model-00002-of-00002.safetensors": {
            "layers.1.w": -numbered(8, 4).bfloat16(),
            "step": torch.tensor(3),
        },
    }
    return write_indexed(tmp_path / "hf", files), {
        key: t for tensors in files.values() for key, t in tensors.items()
    }


def test_tensor_parallel_slices_and_pipeline_layers(directory):
    path, tensors = directory
    for stage in range(2):
        asked = (
            {f"row{i}": part_of("embed", tensors["embed"], (0, i, 3)) for i in range(3)}
            if stage == 0
            else {}
        )
        for tp in range(2):
            key = f"layers.{stage}.w"
            asked[f"w{tp}"] = part_of(key, tensors[key], (1, tp, 2))
        assert_loads(asked, path)


def test_a_grid_a_whole_tensor_a_scalar_and_no_data(directory):
    path, tensors = directory
    asked = {
        f"{i}{j}": part_of("embed", tensors["embed"], (0, i, 4), (1, j, 2))
        for i in range(4)
        for j in range(2)
    }
    asked |= {key: part_of(key, tensor, data=False) for key, tensor in tensors.items()}
    assert_loads(asked, path, validate_access_integrity=False)


def test_dtypes_are_widened_and_narrowed_only_when_told(directory):
    path, tensors = directory
    asked = {"w": part_of("layers.0.w", tensors["layers.0.w"], (0, 1, 2), dtype=torch.float32)}
    assert_loads(asked, path)
    narrow = {"w": part_of("embed", tensors["embed"], (0, 1, 2), dtype=torch.bfloat16)}
    with pytest.raises(LoadMismatchError, match=r"'embed'.*float32.*bfloat16.*allow_dtype_cast"):
        assert_loads(narrow, path)
    assert not narrow["w"][0].data.any()
    assert_loads(narrow, path, allow_dtype_cast=True)


def test_keys_that_the_directory_does_not_have(directory):
    path, _ = directory
    shards = {
        key: ShardedTensor.from_rank_offsets(key, torch.zeros(8, 4))
        for key in ("layers.0.w", "layers.2.w")
    }
    with pytest.raises(
        LoadMismatchError, match=r"'layers\.2\.w' \(the checkpoint has such keys with other"
    ) as caught:
        distckpt.load(shards, path)
    assert caught.value.unexpected == {"layers.2.w"}
    with pytest.raises(LoadMismatchError, match=r"'layers\.9\.x'.*did you mean"):
        distckpt.load({"x": shards["layers.0.w"]}, path, rules=[Rename("layers.0.w", "layers.9.x")])


def test_a_shape_that_does_not_fit(directory):
    path, _ = directory
    with pytest.raises(LoadMismatchError, match=r"'embed'.*\(12, 6\).*\(12, 5\)"):
        distckpt.load({"e": ShardedTensor.from_rank_offsets("embed", torch.zeros(12, 5))}, path)


def test_what_was_imported_can_be_saved_and_loaded(directory, tmp_path):
    path, tensors = directory
    state = {key: part_of(key, tensor)[0] for key, tensor in tensors.items()}
    distckpt.load(state, path)
    distckpt.save(state, tmp_path / "checkpoint")
    assert same_bytes(distckpt.open(tmp_path / "checkpoint").read_tensors(), tensors)


# ---- through rules

RULES = [
    Trim("words", axis=0, size=11),
    Rename("words", "embed"),
    Concat(("layers.fc1_gate", "layers.fc1_up"), "layers.fc1", axis=1),
    Unstack("layers.fc1", "l.{i}.fc1"),
    Split("l.*.fc1", ("l.{0}.gate", "l.{0}.up")),
    Transpose("out", "out.T"),
]


def both_forms():
    """Make the tensors of a training program, and those of the directory it starts from."""
    gate, up = numbered(3, 4, 5), -numbered(3, 4, 5)
    words, out = numbered(11, 3), numbered(6, 7)
    trained = {
        "layers.fc1_gate": gate,
        "layers.fc1_up": up,
        "out": out,
        "words": torch.cat([words, torch.zeros(5, 3)]),
    }
    stored = {"embed": words, "out.T": out.T.contiguous()}
    for layer in range(3):
        stored |= {f"l.{layer}.gate": gate[layer].clone(), f"l.{layer}.up": up[layer].clone()}
    return trained, stored


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_layout_is_filled_through_rules_and_exported_again(data):
    trained, stored = both_forms()
    state = {}
    for key, tensor in trained.items():
        for offset, extent in data.draw(tilings(tuple(tensor.shape)), key):
            target = torch.full(extent, torch.nan)
            shard = ShardedTensor(
                key, target, torch.float32, extent, tuple(tensor.shape), offset, None
            )
            state[f"{key}{offset}"] = shard
    with tempfile.TemporaryDirectory() as directory:
        write_plain(Path(directory) / "hf" / "model.safetensors", stored)
        distckpt.load(state, f"{directory}/hf", rules=RULES)
        for shard in state.values():
            assert torch.equal(shard.data, trained[shard.key][shard.global_slice()])
        distckpt.save(state, f"{directory}/checkpoint")
        distckpt.consolidate(f"{directory}/checkpoint", f"{directory}/out", rules=RULES)
        assert same_bytes(read_export(f"{directory}/out"), stored)


def test_a_rank_that_holds_only_some_of_the_tensors(tmp_path):
    trained, stored = both_forms()
    write_plain(tmp_path / "model.safetensors", stored)
    for key, tensor in trained.items():
        if key in ("out", "words"):
            assert_loads({"part": part_of(key, tensor, (1, 0, 1))}, tmp_path, rules=RULES)


def test_ranks_load_some_members_of_a_stack(tmp_path):
    """Expert parallelism, with experts in one tensor on disk and apart in memory."""
    stored = {"experts": numbered(4, 6, 5)}
    write_plain(tmp_path / "model.safetensors", stored)
    rules = [Stack("e.*.w", "experts", axis=0, size=4)]
    for part in (0, 1):
        asked = {f"e{e}": part_of(f"e.{e}.w", stored["experts"][e], (0, part, 2)) for e in (2, 3)}
        assert_loads(asked, tmp_path, rules=rules)

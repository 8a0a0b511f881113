"""Saving, loading and looking into checkpoints with the arguments of Megatron Core."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import safetensors.numpy
import torch

import distckpt
from distckpt import (
    CheckpointingException,
    CheckpointNotFoundError,
    InvalidShardingError,
    LoadMismatchError,
    RankFailedError,
    ShardedObject,
    ShardedTensor,
    megatron,
)
from distckpt.megatron import core, serialization
from distckpt.megatron.validation import StrictHandling
from tests.support.one_sided_keys import (
    MISSING,
    UNEXPECTED,
    asked_for,
    described_state,
    obj,
    save_one_sided,
    tensor,
)
from tests.support.read_counts import counted_reads
from tests.support.reference import megatron_or_skip

# ---- keys that only one side has


@pytest.fixture
def stored(tmp_path):
    return save_one_sided(tmp_path / "c")


MODES = {
    # mode: (raises with missing, raises with unexpected, warns of missing, warns of unexpected,
    # returns)
    "assume_ok_unexpected": (None, UNEXPECTED, None, None, None),
    "log_unexpected": (None, None, set(), UNEXPECTED, None),
    "log_all": (None, None, MISSING, UNEXPECTED, None),
    "raise_unexpected": (set(), UNEXPECTED, None, None, None),
    "raise_all": (MISSING, UNEXPECTED, None, None, None),
    "return_unexpected": (None, None, None, None, (set(), UNEXPECTED)),
    "return_all": (None, None, None, None, (MISSING, UNEXPECTED)),
    "ignore_all": (None, None, None, None, None),
}


def as_given(mode, as_enum):
    """Return a mode as an enum of either package, or as text."""
    if as_enum is None:
        return mode
    if as_enum == "distckpt's":
        return StrictHandling(mode)
    theirs = megatron_or_skip("dist_checkpointing.validation").StrictHandling(mode)
    assert theirs != StrictHandling(mode)
    ours = StrictHandling(mode)
    for name in ("explicit_ckpt_mismatch_check", "global_app_metadata", "returning_mismatch_keys"):
        required = getattr(StrictHandling, f"requires_{name}")
        assert (
            required(theirs) == getattr(type(theirs), f"requires_{name}")(theirs) == required(ours)
        )
    return theirs


@pytest.mark.parametrize("as_enum", ["Megatron's", "distckpt's", None])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_does_with_differing_keys_what_it_says(stored, mode, as_enum, caplog):
    raises_missing, raises_unexpected, warns_missing, warns_unexpected, returns = MODES[mode]
    strict = as_given(mode, as_enum)
    caplog.set_level(logging.WARNING)
    if raises_unexpected:
        with pytest.raises(LoadMismatchError) as caught:
            megatron.load(asked_for(), stored, strict=strict)
        named = caught.value.unexpected
        # Without a comparison of keys, tensors or objects that are not there are found first.
        assert named == raises_unexpected or (
            mode == "assume_ok_unexpected" and named and named < raises_unexpected
        )
        assert caught.value.missing == (raises_missing or set())
        assert all(repr(key) in str(caught.value) for key in named | (raises_missing or set()))
        return
    result = megatron.load(asked_for(), stored, strict=strict)
    if returns is not None:
        result, *differing = result
        assert tuple(differing) == returns
    assert result.keys() == {"list", "o", "step"}
    assert [value.tolist() for value in result["list"]] == [[1, 1, 1, 1]]
    assert (result["o"], result["step"]) == (1, 3)
    for expected, key in ((warns_missing, "'left'"), (warns_unexpected, "'new.2'")):
        assert (key in caplog.text) == bool(expected)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_accepts_equal_keys(stored, mode, caplog):
    caplog.set_level(logging.WARNING)
    asked = {"a": tensor("a", 0), "left": tensor("left", 0), "o": obj("o"), "lo": obj("left/o")}
    result = megatron.load(asked, stored, strict=mode)
    if mode.startswith("return"):
        result, missing, unexpected = result
        assert (missing, unexpected) == (set(), set())
    assert (result["a"].tolist(), result["lo"], result["step"]) == ([1] * 4, 2, 3)
    assert caplog.text == ""


@pytest.mark.parametrize(
    "mode", ["log_unexpected", "raise_unexpected", "return_unexpected", "assume_ok_unexpected"]
)
def test_missing_keys_are_ignored_where_only_unexpected_ones_count(stored, mode, caplog):
    caplog.set_level(logging.WARNING)
    result = megatron.load({"a": tensor("a", 0)}, stored, strict=mode)
    if mode == "return_unexpected":
        assert result[1:] == (set(), set())
    assert caplog.text == ""


def test_unknown_modes_are_refused(stored):
    with pytest.raises(ValueError, match="Invalid strict flag: True"):
        megatron.load({}, stored, strict=True)


@pytest.mark.parametrize("mode", MODES)
def test_values_that_are_not_stored_are_left_out_with_a_warning(stored, mode, caplog):
    asked = {"a": tensor("a", 0), "left": [tensor("left", 0), obj("o"), obj("left/o")], "lr": 0.1}
    loaded = megatron.load(asked, stored, strict=mode)
    state = loaded[0] if isinstance(loaded, tuple) else loaded
    assert state.keys() == {"a", "left", "step"}
    assert ("holds nothing for 'lr'" in caplog.text) == (mode != "ignore_all")
    for plain in ({"w": torch.zeros(1)}, {"model": {"w": torch.zeros(1)}}):
        if mode in ("assume_ok_unexpected", "raise_unexpected", "raise_all"):
            with pytest.raises(LoadMismatchError, match="w' of the state dict are not sharded"):
                megatron.load({**asked, **plain}, stored, strict=mode)


# ---- requests of one process


def layer(index, replica_id=0):
    return ShardedTensor.from_rank_offsets(
        "layers", torch.zeros(2), (0, index, 4), prepend_axis_num=1, replica_id=replica_id
    )


def interval(start, stop, **kwargs):
    return ShardedTensor(
        "w",
        torch.zeros(stop - start),
        torch.float32,
        (stop - start,),
        (8,),
        (start,),
        None,
        **kwargs,
    )


def flat(start, stop, **kwargs):
    return ShardedTensor.from_rank_offsets_flat(
        "square", torch.zeros(stop - start), (4, 4), flattened_range=slice(start, stop), **kwargs
    )


WRONG = {
    "a layer twice": (
        lambda: [*map(layer, (0, 1, 1, 2, 3))],
        ("'layers'", "2 main replicas", "[1:2, 0:2]"),
    ),
    "overlapping parts": (
        lambda: [interval(0, 5), interval(4, 8)],
        ("'w'", "2 main replicas", "[0:5]", "[4:8]"),
    ),
    "overlapping ranges": (
        lambda: [flat(0, 9), flat(8, 16)],
        ("'square'", "2 main replicas"),
    ),
    "an object twice": (
        lambda: [obj("p"), obj("p")],
        ("'p'", "2 main replicas"),
    ),
}

PARTS = {
    "layers of a stage": lambda: [layer(0), layer(1)],
    "two parts": lambda: [interval(1, 3), interval(6, 8)],
    "a range": lambda: [flat(3, 13)],
    "a cell": lambda: [obj("o", None, 2, 1)],
    "copies that another rank has": lambda: [layer(0), layer(1, replica_id=1), layer(2), layer(3)],
    "a larger copy": lambda: [interval(0, 4), interval(2, 8, replica_id=(0, 1))],
    "a copy alone": lambda: [interval(0, 8, replica_id=1)],
    "copies of objects": lambda: [ShardedObject("o", None, (2,), (i,), 1) for i in range(2)],
}

WHOLE = {
    "layers": lambda: [*map(layer, range(4))],
    "parts and copies": lambda: [interval(0, 3), interval(3, 8), interval(2, 8, replica_id=1)],
    "ranges": lambda: [flat(8, 16), flat(0, 8), flat(0, 0)],
    "cells": lambda: [obj("o", None, 2, 1), obj("o", None, 2, 0)],
}


@pytest.fixture
def stored_whole(tmp_path):
    state = {
        "layers": tensor("layers", 1, (4, 2)),
        "w": tensor("w", 1, (8,)),
        "square": tensor("square", 1, (4, 4)),
        "whole": tensor("whole"),
        "good": tensor("good"),
        "o": [obj("o", [1], 2, 0), obj("o", [1], 2, 1)],
        "p": obj("p", 1),
    }
    distckpt.save(state, tmp_path / "c")
    return tmp_path / "c"


def load_by_default(state, path):
    return distckpt.load(state, path)


def load_whole(state, path):
    return distckpt.load(state, path, validate_access_integrity=True)


def load_unchecked(state, path):
    return distckpt.load(state, path, validate_access_integrity=False)


def are_loaded(loaded):
    values = [value.tolist() if isinstance(value, torch.Tensor) else value for value in loaded]
    return all(value == [1] * len(value) for value in values)


@pytest.mark.parametrize("load", [megatron.load, load_by_default, load_whole])
@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_request_of_one_process_is_refused(stored_whole, fault, load):
    make, words = WRONG[fault]
    with pytest.raises(InvalidShardingError) as caught:
        load({"good": tensor("good", 0), "wrong": make()}, stored_whole)
    for word in (*words, "validate_access_integrity=False"):
        assert word in str(caught.value)
    assert "'good'" not in str(caught.value)


@pytest.mark.parametrize("mode", StrictHandling)
def test_a_stage_that_forgot_its_offset_is_refused_in_every_mode(stored_whole, mode):
    with pytest.raises(InvalidShardingError, match=r"'layers' .*no rank holds element \(2, 0\)"):
        megatron.load({"layers": [layer(0), layer(1)]}, stored_whole, strict=mode)


@pytest.mark.parametrize("part", PARTS)
def test_one_process_may_request_a_part_that_is_not_to_be_checked(stored_whole, part):
    for load in (megatron.load, load_whole):
        with pytest.raises(InvalidShardingError, match=r"no rank holds|no main replica"):
            load({"part": PARTS[part]()}, stored_whole)
    unchecked = megatron.load({"part": PARTS[part]()}, stored_whole, None, False)
    for loaded in (unchecked, load_by_default({"part": PARTS[part]()}, stored_whole)):
        assert are_loaded(loaded["part"])


@pytest.mark.parametrize("load", [megatron.load, load_by_default, load_whole, load_unchecked])
@pytest.mark.parametrize("whole", WHOLE)
def test_a_right_request_of_one_process_is_loaded(stored_whole, whole, load):
    assert are_loaded(load({"whole": WHOLE[whole]()}, stored_whole)["whole"])


# ---- what a checkpoint holds


def test_nothing_to_load_from(tmp_path):
    for function in (
        lambda path: megatron.load({}, path),
        megatron.load_common_state_dict,
        megatron.load_plain_tensors,
        megatron.load_tensors_metadata,
        serialization.load_sharded_metadata,
        megatron.load_content_metadata,
    ):
        with pytest.raises(CheckpointNotFoundError, match="does not exist"):
            function(tmp_path / "none")
        with pytest.raises(CheckpointNotFoundError, match="no metadata"):
            function(tmp_path)


def test_metadata_describe_what_is_stored(tmp_path):
    distckpt.save(described_state(), tmp_path / "c")
    tensors = megatron.load_tensors_metadata(tmp_path / "c")
    assert {
        key: (t.dtype, t.global_shape, t.local_shape, t.data) for key, t in tensors.items()
    } == {
        "w": (torch.bfloat16, (4, 3), (4, 3), None),
        "stack": (torch.float32, (1, 3), (1, 3), None),
    }
    sharded = serialization.load_sharded_metadata(tmp_path / "c")
    assert sharded.keys() == {"w", "stack", "o/shard_0_2", "o/shard_1_2"}
    assert sharded["o/shard_1_2"].global_offset == (1,)
    # What was described can be loaded.
    for shard in tensors.values():
        shard.init_data("cpu")
    loaded = distckpt.load(sharded | tensors, tmp_path / "c")
    assert (loaded["o/shard_0_2"], loaded["o/shard_1_2"]) == (1, 2)
    assert loaded["w"].shape == (4, 3)


def test_plain_tensors_are_all_tensors_and_nothing_else(tmp_path):
    parts = {
        i: ShardedTensor.from_rank_offsets("w", torch.full((2,), float(i)), (0, i, 3))
        for i in range(3)
    }
    distckpt.save({**parts, "s": tensor("s", 5, ()), "o": obj("o", 1), "step": 2}, tmp_path / "c")
    loaded = megatron.load_plain_tensors(tmp_path / "c")
    assert {key: value.tolist() for key, value in loaded.items()} == {
        "w": [0, 0, 1, 1, 2, 2],
        "s": 5.0,
    }


def test_plain_tensors_that_are_not_named_are_not_read(tmp_path):
    state = {"large": torch.zeros(1 << 21), "small": torch.arange(5)}
    distckpt.save(
        {key: ShardedTensor.from_rank_offsets(key, value) for key, value in state.items()},
        tmp_path / "c",
    )
    with counted_reads() as counts:
        loaded = megatron.load_plain_tensors(tmp_path / "c", keys=["small"])
    assert list(loaded) == ["small"]
    assert torch.equal(loaded["small"], state["small"])
    assert counts.num_bytes < 1 << 20
    with pytest.raises(LoadMismatchError, match=r"smal'.*small"):
        megatron.load_plain_tensors(tmp_path / "c", keys=["large", "smal"])
    for keys in ("small", [1], 7):
        with pytest.raises(TypeError, match="keys is a list of whole keys"):
            megatron.load_plain_tensors(tmp_path / "c", keys=keys)
    with pytest.raises(TypeError, match=r"keys=\['small'\]"):
        megatron.load_plain_tensors(tmp_path / "c", keys="small")


def test_content_metadata_are_kept_apart(tmp_path):
    metadata = {"distrib_optim_sharding_type": "fully", "dp_cp_group": object(), "n": [1]}
    megatron.save(
        {"step": 1}, tmp_path / "c", content_metadata=metadata, validate_access_integrity=False
    )
    kept = {"distrib_optim_sharding_type": "fully", "n": [1]}
    assert "dp_cp_group" in metadata
    assert megatron.load_content_metadata(tmp_path / "c") == kept
    common = megatron.load_common_state_dict(tmp_path / "c")
    assert megatron.load_content_metadata(preloaded_state_dict=common) == kept
    distckpt.save({"step": 1}, tmp_path / "d")
    assert megatron.load_content_metadata(tmp_path / "d") is None
    with pytest.raises(ValueError, match="checkpoint_dir or preloaded_state_dict"):
        megatron.load_content_metadata()


# ---- removing tensors


def test_tensors_of_other_item_sizes_stay_where_the_manifest_says_when_one_is_removed(tmp_path):
    # In a file larger items come first, whatever the order of the keys.
    tensors = {
        f"t{i}": torch.arange(5 + i).to(dtype)
        for i, dtype in enumerate((torch.int8, torch.int64, torch.int16))
    }
    state = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}
    distckpt.save(
        {**state, "gone": ShardedTensor.from_rank_offsets("gone", torch.zeros(3))}, tmp_path / "c"
    )
    megatron.remove_sharded_tensors(tmp_path / "c", "gone")
    loaded = distckpt.open(tmp_path / "c").read_tensors()
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[key], tensors[key]) for key in tensors)
    assert distckpt.verify(tmp_path / "c").is_whole


def test_removed_tensors_are_gone_and_the_others_whole(tmp_path):
    weight = torch.randn(1000, 20)
    moments = {
        ("exp", i): ShardedTensor.from_rank_offsets(
            "optimizer.exp", weight[:, i : i + 1], (1, i, 20)
        )
        for i in range(20)
    }
    state = {
        "w": ShardedTensor.from_rank_offsets("model.w", weight),
        "m": ShardedTensor.from_rank_offsets("optimizer.sq", weight + 1),
        "o": obj("optimizer.o", 1),
        "step": 3,
    }
    distckpt.save({**state, **moments}, tmp_path / "c")
    before = sum(file.stat().st_size for file in Path(tmp_path, "c").rglob("*.*"))
    megatron.remove_sharded_tensors(tmp_path / "c", "optimizer.")
    after = sum(file.stat().st_size for file in Path(tmp_path, "c").rglob("*.*"))
    assert before - after >= 2 * weight.nbytes
    assert serialization.load_sharded_metadata(tmp_path / "c").keys() == {
        "model.w",
        "optimizer.o/shard_0_1",
    }
    loaded = distckpt.load(
        {
            "w": ShardedTensor.from_rank_offsets("model.w", torch.zeros(1000, 20)),
            "o": obj("optimizer.o"),
        },
        tmp_path / "c",
        strict="raise",
        verify=True,
    )
    assert torch.equal(loaded["w"], weight)
    assert (loaded["o"], loaded["step"]) == (1, 3)
    stored = [
        safetensors.numpy.load_file(file) for file in Path(tmp_path, "c", "tensors").iterdir()
    ]
    assert [list(entries) for entries in stored] == [["model.w"]]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_tied_tensor_stays_under_its_other_name(tmp_path):
    weight = torch.randn(4, 3)
    state = {name: ShardedTensor.from_rank_offsets(name, weight) for name in ("a.w", "b.w")}
    for prefix, left in (("a.", "b.w"), ("b.", "a.w")):
        distckpt.save(state, tmp_path / prefix)
        megatron.remove_sharded_tensors(tmp_path / prefix, prefix)
        loaded = distckpt.open(tmp_path / prefix).read_tensors()
        assert loaded.keys() == {left}
        assert torch.equal(loaded[left], weight)


def test_removing_nothing_leaves_the_checkpoint_alone(tmp_path, caplog):
    distckpt.save({"a": tensor("a")}, tmp_path / "c")
    before = {path: path.stat().st_mtime_ns for path in Path(tmp_path, "c").rglob("*")}
    megatron.remove_sharded_tensors(tmp_path / "c", "optimizer.")
    assert {path: path.stat().st_mtime_ns for path in Path(tmp_path, "c").rglob("*")} == before
    assert "'optimizer.': nothing removed" in caplog.text


# ---- arguments


def test_arguments_have_megatrons_order(tmp_path):
    megatron.save({"a": tensor("a")}, str(tmp_path / "c"), None, True, False, None, {"m": 1})
    result = megatron.load(
        {"a": tensor("a", 0)}, str(tmp_path / "c"), None, True, "return_all", True
    )
    assert result[0]["a"].tolist() == [1] * 4
    assert result[0]["content_metadata"] == {"m": 1}


@pytest.mark.parametrize("common_strategy", [None, ("torch", 1)])
def test_arguments_have_the_order_of_megatron_up_to_0_18_too(tmp_path, common_strategy):
    state = {"a": tensor("a")}
    megatron.save(
        state, tmp_path / "c", ("torch_dist", 1), common_strategy, True, False, None, {"m": 1}
    )
    result = megatron.load(
        {"a": tensor("a", 0)},
        tmp_path / "c",
        ("torch_dist", 1),
        common_strategy,
        True,
        "return_all",
    )
    assert result[0]["a"].tolist() == [1] * 4
    assert result[0]["content_metadata"] == {"m": 1}
    assert core.maybe_load_config(str(tmp_path / "c")).sharded_backend == "safetensors"
    gap = ShardedTensor.from_rank_offsets("a", torch.ones(4), (0, 0, 2))
    with pytest.raises(distckpt.InvalidShardingError):
        megatron.save(
            {"a": gap}, tmp_path / "d", None, common_strategy, validate_access_integrity=True
        )


def test_what_is_not_available_is_refused(tmp_path):
    with pytest.raises(CheckpointingException, match="common_strategy must be None"):
        megatron.save({}, tmp_path / "c", common_strategy=("zarr", 1))
    megatron.save(
        {}, tmp_path / "c", common_strategy=None, async_strategy="nvrx", verify_integrity=True
    )
    with pytest.raises(CheckpointingException, match="common_strategy must be None"):
        megatron.load({}, tmp_path / "c", common_strategy=("zarr", 1))


def test_errors_of_one_process_are_raised_as_they_are(tmp_path):
    def explode(common):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        megatron.save({}, tmp_path / "c", preprocess_common_before_consistancy_check=explode)
    assert not isinstance(caught.value, RankFailedError)
    assert list(tmp_path.iterdir()) == []


def test_own_options_are_given_by_keyword(tmp_path):
    reports = []
    save = megatron.save(
        {"a": tensor("a")}, tmp_path / "c", durable=False, on_report=reports.append
    )
    assert save is None
    assert reports[0].location == str(tmp_path / "c")
    half = {"a": ShardedTensor.from_rank_offsets("a", torch.zeros(4, dtype=torch.float16))}
    with pytest.raises(LoadMismatchError, match="allow_dtype_cast"):
        megatron.load(half, tmp_path / "c")
    assert megatron.load(half, tmp_path / "c", allow_dtype_cast=True)["a"].tolist() == [1] * 4
    with pytest.raises(TypeError, match=r"no option 'durabel'.*did you mean 'durable'"):
        megatron.save({}, tmp_path / "d", durabel=False)
    with pytest.raises(TypeError, match="no option 'overwrite'"):
        megatron.load({}, tmp_path / "c", overwrite=True)


def test_checksums_are_compared_where_integrity_is_to_be_verified(tmp_path):
    megatron.save({"a": tensor("a")}, tmp_path / "c")
    (file,) = Path(tmp_path, "c", "tensors").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    asked = {"a": tensor("a", 0)}
    assert megatron.load(asked, tmp_path / "c", verify=False)["a"].tolist() != [1] * 4
    for options in ({}, {"verify_integrity": True}, {"verify_integrity": True, "verify": False}):
        with pytest.raises(distckpt.CorruptCheckpointError, match="checksum"):
            megatron.load(asked, tmp_path / "c", **options)

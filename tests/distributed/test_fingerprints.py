"""Fingerprints of a state under several layouts, of its checkpoints, and those that saves store."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import distckpt
from distckpt import CheckpointingException, CheckpointManager, ShardedObject, ShardedTensor
from distckpt.rules import Rename
from tests.support.disk import flip_in_memory
from tests.support.harness import error_of
from tests.support.layouts import (
    Layout,
    even_part,
    flat_part,
    global_bytes,
    irregular_shard,
    tensor_from,
    uneven_part,
)
from tests.support.quantized_models import mxfp4

LAYOUTS = [
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2),
    Layout(tp=2, dp=2),
    Layout(tp=2, pp=2),
    Layout(tp=4),
]
TENSORS = {
    "first.rows": ((48, 700), torch.bfloat16, 0),
    "first.columns": ((9, 1400), torch.float32, 1),
    "first.uneven": ((29, 7), torch.int16, 0),
    "last.uneven": ((6, 700), torch.float32, 1),
    "last.norm": ((300,), torch.bfloat16, None),
    "last.step": ((), torch.int64, None),
    "last.codes": ((16, 300), torch.float8_e4m3fn, 0),
}
"""By key, whose first word is the pipeline stage: shape, dtype and the axis that is divided."""


def content(key):
    shape, dtype, _ = TENSORS[key]
    return global_bytes(key, shape, dtype)


def whole_state():
    return {
        key: ShardedTensor.from_rank_offsets(key, tensor_from(content(key), dtype))
        for key, (_, dtype, _) in TENSORS.items()
    }


def state_of(layout, rank):
    tp, stage, dp = layout.position(rank)
    state = {}
    for key, (shape, dtype, axis) in TENSORS.items():
        if stage != (0 if key.startswith("first") else layout.pp - 1):
            continue
        slices = [slice(0, size) for size in shape]
        replica_id = dp
        if axis is None:
            replica_id = tp + layout.tp * dp
        else:
            cut = uneven_part if "uneven" in key else even_part
            slices[axis] = cut(shape[axis], layout.tp, tp)
        state[key] = irregular_shard(key, content(key), dtype, tuple(slices), replica_id)
    return state


def fingerprints_of_layout(rank, layout, path):
    state = state_of(layout, rank)
    found = distckpt.fingerprint(state)
    distckpt.save(state, path)
    # The plan of the save serves the next call as well.
    return found, distckpt.fingerprint(state)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fingerprints_are_equal_under_all_layouts(tmp_path, run, layout):
    expected = distckpt.fingerprint(whole_state())

    found = run(fingerprints_of_layout, layout.num_ranks, layout, str(tmp_path / "step"))

    assert found == [(expected, expected)] * layout.num_ranks
    assert distckpt.open(tmp_path / "step").fingerprints() == expected


def fingerprints_of_flat_shards(rank, num_ranks):
    tensor = tensor_from(content("first.rows"), torch.bfloat16)
    part = flat_part(tensor.numel(), num_ranks, rank)
    shard = ShardedTensor.from_rank_offsets_flat(
        "first.rows", tensor.view(-1)[part].clone(), tuple(tensor.shape), flattened_range=part
    )
    return distckpt.fingerprint({"weight": shard})


def test_flat_shards_have_the_fingerprint_of_their_tensor(run):
    expected = distckpt.fingerprint(whole_state())["first.rows"]

    assert run(fingerprints_of_flat_shards, 3, 3) == [{"first.rows": expected}] * 3


def tied_model():
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    model.head.weight = model.embedding.weight
    return model


def fingerprints_of_tied_weights(rank):
    model = tied_model()
    with torch.no_grad():
        model.head.weight.copy_(torch.arange(40).view(10, 4))
    return distckpt.fingerprint({"model": model})


def test_tied_weights_have_one_fingerprint(run):
    weight = torch.arange(40, dtype=torch.float32).view(10, 4)
    shard = ShardedTensor.from_rank_offsets("weight", weight)
    expected = distckpt.fingerprint({"weight": shard})["weight"]

    (found, _) = run(fingerprints_of_tied_weights, 2)

    assert found == {"embedding.weight": expected, "head.weight": expected}


def fingerprint_with_a_gap(rank):
    shard = state_of(Layout(tp=2), 0)["first.rows"]
    return type(_error_of({"weight": shard})).__name__


def _error_of(state):
    with pytest.raises(distckpt.CheckpointingException) as caught:
        distckpt.fingerprint(state)
    return caught.value


def test_a_tensor_that_is_not_complete_has_none(run):
    assert run(fingerprint_with_a_gap, 2) == ["InvalidShardingError"] * 2


def test_plain_tensors_that_are_left_out_are_named(caplog):
    model = torch.nn.Linear(4, 4)
    state = {"model": model, "ema": {"weight": torch.ones(4)}, "step": 3}

    assert distckpt.fingerprint(state) == distckpt.fingerprint({"model": model})

    (warning,) = (each.message for each in caplog.records if each.levelname == "WARNING")
    assert "'ema.weight'" in warning


# --- Stored ones ---------------------------------------------------------------------------------

WAYS = ["save", "async_save", "manager"]


def _saved(rank: int, folder: str, way: str) -> dict[str, distckpt.Fingerprint]:
    state = state_of(Layout(tp=2, pp=2), rank)
    state |= {"object": ShardedObject("object", [1, 2], (1,), (0,), replica_id=rank), "step": 3}
    found = distckpt.fingerprint(state)
    for number in (1, 2):
        # With the plan of the first save, too.
        path = f"{folder}/step_{number:08d}"
        if way == "save":
            distckpt.save(state, path, fingerprint=True)
        elif way == "async_save":
            distckpt.async_save(state, path, fingerprint=True).result()
        else:
            with CheckpointManager(folder, options=distckpt.SaveOptions(fingerprint=True)) as kept:
                kept.save(number, state)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_saves_store_what_was_in_memory(run, tmp_path, way):
    expected = distckpt.fingerprint(whole_state())

    assert run(_saved, 4, str(tmp_path), way) == [expected] * 4

    for number in (1, 2):
        checkpoint = distckpt.open(tmp_path / f"step_{number:08d}")
        assert checkpoint.fingerprints(stored=True) == expected
        assert checkpoint.fingerprints() == expected
        assert checkpoint.fingerprints(["last.norm"], stored=True).keys() == {"last.norm"}
        report = distckpt.verify(checkpoint.location)
        assert report.is_whole
        assert report.num_fingerprints == len(expected)


def test_copies_are_compared_with_what_was_saved(tmp_path):
    state = {"model": tied_model(), "more": whole_state()}
    distckpt.save(state, tmp_path / "step", fingerprint=True)
    saved = distckpt.open(tmp_path / "step").fingerprints(stored=True)
    assert saved == distckpt.fingerprint(state)

    distckpt.reshard(tmp_path / "step", tmp_path / "divided", num_ranks=3, grids={"*rows": (4, 1)})
    distckpt.consolidate(tmp_path / "step", tmp_path / "exported", keys="*")

    divided = distckpt.open(tmp_path / "divided")
    assert divided.fingerprints(stored=True) == divided.fingerprints() == saved
    assert distckpt.verify(tmp_path / "divided").is_whole
    exported = distckpt.open(tmp_path / "exported").fingerprints()
    assert exported == {key: saved[key] for key in exported}
    assert exported.keys() >= whole_state().keys()


def test_a_reshard_keeps_the_fingerprints_of_what_stays_as_it_is(tmp_path):
    distckpt.save(whole_state(), tmp_path / "step", fingerprint=True)
    saved = distckpt.open(tmp_path / "step").fingerprints(stored=True)

    distckpt.reshard(
        tmp_path / "step",
        tmp_path / "other",
        keys=["first.rows", "first.columns", "last.norm"],
        rules=[Rename("last.norm", "norm")],
        dtype={"first.columns": torch.float64},
    )

    other = distckpt.open(tmp_path / "other")
    assert other.fingerprints(["norm"], stored=True)["norm"] == saved["last.norm"]
    assert other.fingerprints(["first.rows"], stored=True)["first.rows"] == saved["first.rows"]
    with pytest.raises(CheckpointingException, match=r"no stored fingerprints of.*first\.columns"):
        other.fingerprints(stored=True)
    report = distckpt.verify(tmp_path / "other")
    assert report.is_whole
    assert report.num_fingerprints == 2


def test_a_reshard_to_values_keeps_the_fingerprints_of_plain_tensors(tmp_path):
    tensors = {**mxfp4().tensors, "norm": torch.ones(5, dtype=torch.bfloat16)}
    state = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}
    distckpt.save(state, tmp_path / "step", fingerprint=True)

    distckpt.reshard(tmp_path / "step", tmp_path / "values", dtype=torch.bfloat16)

    values = distckpt.open(tmp_path / "values")
    expected = distckpt.fingerprint({"norm": state["norm"]})
    assert values.tensors.keys() == {"norm", "m.experts.down_proj"}
    assert values.fingerprints(["norm"], stored=True) == expected
    with pytest.raises(CheckpointingException, match="no stored fingerprints"):
        values.fingerprints(["m.experts.down_proj"], stored=True)
    report = distckpt.verify(tmp_path / "values")
    assert report.is_whole
    assert report.num_fingerprints == 1


def _spoiled(rank: int, path: str, is_async: bool) -> None:
    """One bit changes between memory and checksum."""
    state = state_of(Layout(tp=2), rank)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            flip_in_memory(patch)
        if is_async:
            distckpt.async_save(state, path, fingerprint=True).result()
        else:
            distckpt.save(state, path, fingerprint=True)


@pytest.mark.parametrize("is_async", [False, True])
def test_verify_finds_what_was_written_otherwise_than_it_was(run, tmp_path, is_async):
    run(_spoiled, 2, str(tmp_path / "step"), is_async)

    report = distckpt.verify(tmp_path / "step")

    assert not report.is_whole
    assert {"fingerprint mismatch" in problem.message for problem in report.problems} == {True}
    fast = distckpt.verify(tmp_path / "step", mode="fast")
    assert fast.is_whole
    assert fast.num_fingerprints == 0


def test_checkpoints_without_them_say_so(tmp_path):
    distckpt.save(whole_state(), tmp_path / "step")

    with pytest.raises(CheckpointingException, match="save with fingerprint=True"):
        distckpt.open(tmp_path / "step").fingerprints(stored=True)


def test_tensors_with_gaps_are_not_compared(tmp_path):
    state = {
        "part": ShardedTensor.from_rank_offsets("part", torch.ones(4), (0, 0, 3)),
        "whole": ShardedTensor.from_rank_offsets("whole", torch.ones(4)),
    }
    options = distckpt.SaveOptions(fingerprint=True, validate_access_integrity=False)
    distckpt.save(state, tmp_path / "step", options=options)

    report = distckpt.verify(tmp_path / "step")

    assert report.is_whole
    assert report.num_fingerprints == 1


def _different_options(rank: int, path: str) -> str:
    return str(error_of(distckpt.save, whole_state(), path, fingerprint=rank == 0))


def test_all_ranks_give_the_same(run, tmp_path):
    for text in run(_different_options, 2, str(tmp_path / "step")):
        assert "the same fingerprint" in text


def _of_plain_tensors(rank: int) -> str:
    model = torch.nn.Linear(4, 4)
    # A state dict of plain tensors has none; an empty result would equal any other.
    state = {"model": model.state_dict(), "step": 3} if rank else {}
    return str(error_of(distckpt.fingerprint, state))


def test_plain_tensors_are_refused_where_nothing_else_is_there(run):
    for text in run(_of_plain_tensors, 2):
        assert "plain tensors" in text
        assert "{'model': model}" in text

"""A checkpoint against the tensors that a job has in memory, under the same and another layout."""

from __future__ import annotations

import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from tests.support.layouts import Layout, even_part, global_bytes, irregular_shard, tensor_from

SHAPE = (48, 700)


def state_of(layout, rank, changed_on=None):
    tp, _, dp = layout.position(rank)
    slices = (slice(None), even_part(SHAPE[1], layout.tp, tp))
    weight = irregular_shard(
        "weight", global_bytes("weight", SHAPE, torch.bfloat16), torch.bfloat16, slices, dp
    )
    if rank == changed_on:
        weight.data.view(torch.int16)[5, 7] ^= 1
    norm = ShardedTensor.from_rank_offsets("norm", torch.arange(30.0), replica_id=rank)
    return {"weight": weight, "norm": norm, "step": 3}


def verify_live(rank, layout, path, changed_on):
    return distckpt.verify(path, live=state_of(layout, rank, changed_on))


@pytest.fixture
def path(tmp_path):
    distckpt.save(state_of(Layout(), 0), tmp_path / "step")
    return str(tmp_path / "step")


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=2)], ids=str)
def test_equal_tensors_are_verified_under_any_layout(path, run, layout):
    for report in run(verify_live, 2, layout, path, None):
        assert report.is_whole
        assert report.mode == "live"
        assert report.num_keys == 2
        assert report.num_bytes == layout.dp * 48 * 700 * 2 + 2 * 120


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=2)], ids=str)
def test_one_flipped_bit_is_found_on_every_replica(path, run, layout):
    column = 7 + 350 * (layout.tp - 1)

    for report in run(verify_live, 2, layout, path, 1):
        (problem,) = report.problems
        assert problem.key == "weight"
        assert problem.file == path
        assert "1 of" in problem.message
        assert f"[5, {column}]" in problem.message
        assert "rank 1" in problem.message


def test_tensors_that_are_not_stored_so_are_named(path):
    weight = tensor_from(global_bytes("weight", SHAPE, torch.bfloat16), torch.bfloat16)
    live = {
        "weight": ShardedTensor.from_rank_offsets("weight", weight.float()),
        "other": ShardedTensor.from_rank_offsets("other", torch.ones(2)),
        "norm": ShardedTensor.from_rank_offsets("norm", torch.arange(30.0)),
    }

    report = distckpt.verify(path, live=live)

    found = {problem.key: problem.message for problem in report.problems}
    assert found.keys() == {"other", "weight"}
    assert "no such tensor" in found["other"]
    assert "F32 of (48, 700) in memory, BF16" in found["weight"]


def test_modules_and_optimizers_are_verified(tmp_path):
    model = torch.nn.Linear(300, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(300)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    distckpt.save(state, tmp_path / "step")

    assert distckpt.verify(tmp_path / "step", live=state).is_whole
    optimizer.step()
    keys = {problem.key for problem in distckpt.verify(tmp_path / "step", live=state).problems}

    assert {"weight", "bias", "optimizer.state.exp_avg.weight"} <= keys


def test_a_fast_comparison_with_memory_is_refused(path):
    with pytest.raises(ValueError, match="mode is 'full'"):
        distckpt.verify(path, "fast", live=state_of(Layout(), 0))


def test_nothing_to_compare_is_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    distckpt.save({"model": model}, tmp_path / "step")
    for live in ({}, {"model": model.state_dict()}):
        with pytest.raises(ValueError, match="no tensor that could be compared"):
            distckpt.verify(tmp_path / "step", live=live)

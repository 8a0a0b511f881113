"""A checkpoint against the tensors that a job has in memory, under the same and another layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from tests.support.disk import flip
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


def _trained(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(6)).sum().backward()
    optimizer.step()
    return optimizer


def keys_of_problems(report):
    return {problem.key for problem in report.problems}


def test_state_that_an_optimizer_in_memory_lacks_is_a_problem(tmp_path):
    model = torch.nn.Linear(6, 2)
    distckpt.save({"model": model, "optimizer": _trained(model)}, tmp_path / "step")
    not_resumed = torch.optim.AdamW(model.parameters())

    report = distckpt.verify(tmp_path / "step", live={"model": model, "optimizer": not_resumed})

    names = [f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in ("weight", "bias")]
    assert keys_of_problems(report) == {f"optimizer.state.{name}" for name in names}
    assert "no rank has it in memory" in report.problems[0].message
    assert distckpt.verify(tmp_path / "step", live={"model": model}).is_whole


def _stages(rank, path, num_stages):
    layers = torch.nn.ModuleDict({str(number): torch.nn.Linear(2, 2) for number in range(3)})
    whole = torch.nn.ModuleDict({"layers": layers})
    distckpt.load({"model": whole}, path)
    for number in range(3):
        if number % num_stages != rank:
            del layers[str(number)]
    return keys_of_problems(distckpt.verify(path, live={"model": whole}))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_stage_that_no_rank_has_is_a_problem(tmp_path, run, num_stages):
    layers = torch.nn.ModuleDict({str(number): torch.nn.Linear(2, 2) for number in range(3)})
    distckpt.save({"model": torch.nn.ModuleDict({"layers": layers})}, tmp_path / "step")

    lost = {"layers.2.weight", "layers.2.bias"} if num_stages == 3 else set()
    assert run(_stages, 2, str(tmp_path / "step"), num_stages) == [lost] * 2


def _plain(rank, path, changed_on):
    model = torch.nn.Linear(6, 2)
    distckpt.load({"model": model}, path)
    average = {"weight": torch.ones(2, 6), "rest": [torch.zeros(3)]}
    average["rest"][0][1] = rank == changed_on
    return distckpt.verify(path, live={"model": model, "ema": average, "step": 7})


@pytest.mark.parametrize("changed_on", [None, 1])
def test_plain_tensors_are_compared(tmp_path, run, changed_on):
    average = {"weight": torch.ones(2, 6), "rest": [torch.zeros(3)]}
    distckpt.save({"model": torch.nn.Linear(6, 2), "ema": average}, tmp_path / "step")

    for report in run(_plain, 2, str(tmp_path / "step"), changed_on):
        assert report.num_keys == 4
        assert keys_of_problems(report) == (set() if changed_on is None else {"ema.rest.0"})
        for problem in report.problems:
            assert "1 of 3 elements differ" in problem.message
            assert "[1] (rank 1)" in problem.message


def test_plain_tensors_that_are_not_stored_so_are_named(tmp_path):
    model = torch.nn.Linear(6, 2)
    distckpt.save({"model": model, "scale": torch.ones(2)}, tmp_path / "step")
    live = {"model": model, "scale": torch.ones(3), "mean": torch.ones(2)}

    report = distckpt.verify(tmp_path / "step", live=live)

    found = {problem.key: problem.message for problem in report.problems}
    assert found.keys() == {"scale", "mean"}
    assert "F32 of (3,) in memory, F32 of (2,)" in found["scale"]
    assert "no such tensor" in found["mean"]


class _Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(6, 2)
        self.head = torch.nn.Linear(2, 6, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_tensor_is_compared_under_the_name_that_is_stored(tmp_path):
    model = _Tied()
    distckpt.save({"model": model}, tmp_path / "step")
    distckpt.consolidate(tmp_path / "step", tmp_path / "exported")
    assert list(distckpt.open(tmp_path / "exported").tensors) == ["embed.weight"]

    assert distckpt.verify(tmp_path / "exported", live={"model": model}).is_whole
    with torch.no_grad():
        model.head.weight[3, 1] += 1
    report = distckpt.verify(tmp_path / "exported", live={"model": model})
    assert keys_of_problems(report) == {"embed.weight"}
    model.head.weight = torch.nn.Parameter(torch.zeros(6, 2))
    report = distckpt.verify(tmp_path / "exported", live={"model": model})
    assert keys_of_problems(report) == {"embed.weight", "head.weight"}


def _padded(rows, value):
    table = torch.cat([torch.ones(6, 4), torch.full((rows - 6, 4), value)])
    return ShardedTensor.from_rank_offsets("embed", table, allow_shape_mismatch=True)


def _with_padding(rank, path, rows):
    live = _padded(rows, 3.0)
    part = live.data.chunk(2)[rank].clone()
    half = ShardedTensor.from_rank_offsets("embed", part, (0, rank, 2), allow_shape_mismatch=True)
    right = distckpt.verify(path, live={"embed": half})
    part[1, 3] = 0
    wrong = distckpt.verify(path, live={"embed": half})
    return right.problems, [problem.message for problem in wrong.problems]


@pytest.mark.parametrize("num_rows", [6, 8])
def test_padding_is_not_compared(tmp_path, run, num_rows):
    distckpt.save({"embed": _padded(14 - num_rows, 2.0)}, tmp_path / "step")

    for right, wrong in run(_with_padding, 2, str(tmp_path / "step"), num_rows):
        assert not right
        assert ["[1, 3]" in wrong[0], f"[{num_rows // 2 + 1}, 3]" in wrong[1]] == [True, True]


def test_a_tensor_without_data_is_named(tmp_path, path):
    live = {key: state_of(Layout(), 0)[key] for key in ("weight", "norm")}
    live["norm"] = live["norm"].without_data()

    (problem,) = distckpt.verify(path, live=live).problems

    assert problem.key == "norm"
    assert "has no data in memory" in problem.message


def _of_damaged(rank, path):
    return distckpt.verify(path, live=state_of(Layout(tp=2), rank))


def test_damage_is_listed(path, run):
    (file,) = Path(path).glob("tensors/*")
    flip(file, -1)

    for report in run(_of_damaged, 2, path):
        assert not report.is_whole
        assert all("Checksum mismatch" in problem.message for problem in report.problems)
        assert all(str(file) in problem.message for problem in report.problems)


def _held_by_some(rank, path, holders):
    layout = Layout(tp=2, dp=2)
    return distckpt.verify(path, live=state_of(layout, rank) if rank in holders else {})


@pytest.mark.parametrize("holders", [(0, 1, 2, 3), (1, 2), (0, 2)])
def test_what_is_compared_in_part_is_a_problem(path, run, holders):
    has_all = {rank % 2 for rank in holders} == {0, 1}

    for report in run(_held_by_some, 4, path, holders):
        assert keys_of_problems(report) == (set() if has_all else {"weight"})
        for problem in report.problems:
            assert f"hold {48 * 350} of {48 * 700} elements" in problem.message


def _with_gap(rank, path):
    part = ShardedTensor.from_rank_offsets("part", torch.ones(4), (0, rank, 3))
    distckpt.save({"part": part}, path, validate_access_integrity=False)
    everything = distckpt.verify(path, live={"part": part})
    half = distckpt.verify(path, live={"part": part} if rank else {})
    return everything.problems, [problem.message for problem in half.problems]


def test_gaps_that_were_saved_are_not_missed(tmp_path, run):
    for problems, (text,) in run(_with_gap, 2, str(tmp_path / "step")):
        assert not problems
        assert "hold 4 of 8 elements" in text

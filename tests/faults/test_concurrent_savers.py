"""Two programs that know nothing of each other save to one path: one wins, the other is told, the result is whole."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import torch

import distckpt
from distckpt import CheckpointExistsError, ShardedTensor
from distckpt.strategies.safetensors import SafetensorsSaveStrategy
from tests.distributed.harness import ask_parent, error_of, launched, run, sum_over_ranks

ROUNDS = 12
NUM_TENSORS = 5


def state_of(value):
    return {
        "tensors": [
            ShardedTensor.from_rank_offsets(f"tensor {i}", torch.full((50, 64), float(value)))
            for i in range(NUM_TENSORS)
        ],
        "value": value,
    }


class MeetsBeforeCommit(SafetensorsSaveStrategy):
    """Waits for the other program when all is written, so that both commit at the same time."""

    def save(self, sharded_state_dict, checkpoint_dir):
        fields = super().save(sharded_state_dict, checkpoint_dir)
        ask_parent()
        return fields


def save_many_times(rank, folder, overwrite):
    return [
        error_of(distckpt.save, state_of(rank), f"{folder}/round_{i}", MeetsBeforeCommit(), overwrite=overwrite)
        for i in range(ROUNDS)
    ]


def let_them_meet(launch):
    for _ in range(ROUNDS):
        for rank in (0, 1):
            launch.wait_for_signal(rank)
        for rank in (0, 1):
            launch.answer(rank)


def value_in(path):
    """Return the value that all of a checkpoint holds."""
    loaded = distckpt.load(state_of(-1), path, verify="full")
    values = {loaded["value"], *torch.cat([tensor.flatten() for tensor in loaded["tensors"]]).tolist()}
    assert len(values) == 1, f"{path} is a mixture"
    return loaded["value"]


@pytest.mark.parametrize("before", ["nothing", "empty directory", "unfinished"])
def test_one_of_two_savers_wins(before, tmp_path):
    for i in range(ROUNDS):
        if before != "nothing":
            (tmp_path / f"round_{i}").mkdir()
        if before == "unfinished":
            (tmp_path / f"round_{i}" / "tensors").mkdir()
            (tmp_path / f"round_{i}" / "tensors" / "part").write_bytes(b"of an earlier save")
    with launched(save_many_times, 2, str(tmp_path), False, backend=None) as launch:
        let_them_meet(launch)
        errors = launch.values()
    for i, both in enumerate(zip(*errors, strict=True)):
        (error,) = [error for error in both if error is not None]
        assert isinstance(error, CheckpointExistsError), error
        assert str(tmp_path / f"round_{i}") in str(error)
        assert value_in(str(tmp_path / f"round_{i}")) == both.index(None)
    left = [name for name in os.listdir(tmp_path) if not name.startswith("round_")]
    assert len(left) == (ROUNDS if before == "unfinished" else 0), left
    for name in left:
        assert ".incomplete-" in name
        assert (tmp_path / name / "tensors" / "part").read_bytes() == b"of an earlier save"


@pytest.mark.parametrize("before", ["nothing", "a checkpoint"])
def test_savers_that_overwrite_both_succeed(before, tmp_path):
    if before == "a checkpoint":
        for i in range(ROUNDS):
            distckpt.save(state_of(7), str(tmp_path / f"round_{i}"))
    with launched(save_many_times, 2, str(tmp_path), True, backend=None) as launch:
        let_them_meet(launch)
        assert launch.values() == [[None] * ROUNDS] * 2
    for i in range(ROUNDS):
        assert value_in(str(tmp_path / f"round_{i}")) in (0, 1)
    assert sorted(os.listdir(tmp_path)) == sorted(f"round_{i}" for i in range(ROUNDS))


def overwrite_or_watch(rank, path, done):
    """Rank 0 overwrites again and again; rank 1 looks meanwhile, and counts how often it found what."""
    if rank == 0:
        for value in range(1, 30):
            distckpt.save(state_of(value), path, overwrite=True)
        return Path(done).touch()
    seen = Counter()
    while not os.path.exists(done):
        seen[distckpt.check_is_distributed_checkpoint(path)] += 1
    return seen


def test_overwriting_leaves_no_gap(tmp_path):
    path = str(tmp_path / "checkpoint")
    distckpt.save(state_of(0), path)
    _, seen = run(overwrite_or_watch, 2, path, str(tmp_path / "done"), backend=None)
    assert seen[True] > 30
    assert seen[False] == 0
    assert value_in(path) == 29


def save_from_two_groups(rank, path):
    group = [torch.distributed.new_group(members) for members in ([0, 1], [2, 3])][rank // 2]
    part = torch.full((100, 8), float(rank // 2))
    state = {"w": ShardedTensor.from_rank_offsets("w", part, (0, rank % 2, 2)), "who": rank // 2}
    error = error_of(distckpt.save, state, path, process_group=group)
    return error, sum_over_ranks(rank), sum_over_ranks(1, group)


def test_two_groups_save_to_one_path(tmp_path):
    path = str(tmp_path / "checkpoint")
    results = run(save_from_two_groups, 4, path)
    assert [result[1:] for result in results] == [(6, 2)] * 4
    errors = [error for error, _, _ in results]
    (winner,) = [group for group in (0, 1) if errors[2 * group : 2 * group + 2] == [None, None]]
    for error in errors[2 - 2 * winner : 4 - 2 * winner]:
        assert isinstance(error, CheckpointExistsError)
    assert distckpt.load_common_state_dict(path) == {"who": winner}
    assert set(distckpt.load_plain_tensors(path)["w"].flatten().tolist()) == {float(winner)}
    assert os.listdir(tmp_path) == ["checkpoint"]

"""The checkpoint manager on several ranks: all agree on the step, errors and signals reach all."""

from __future__ import annotations

import os
import signal

import torch

import distckpt
from distckpt import CheckpointManager, CheckpointNotFoundError, PreemptionGuard, RankFailedError, ShardedTensor
from tests.support.harness import error_of, launched, run, signal_parent, sum_over_ranks

PATIENCE = 60.0


def rows_of(rank, num_ranks, value):
    rows = torch.full((100, 256), float(value))
    return {"rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, num_ranks)), "value": value}


def value_in_rows(loaded):
    (value,) = set(loaded["rows"].unique().tolist())
    assert value == loaded["value"]
    return int(value)


def train(rank, num_ranks, root):
    with CheckpointManager(root, keep_last=2, best_metric="loss", durable=False) as manager:
        nothing = manager.latest(), manager.steps()
        error = error_of(manager.load, rows_of(rank, num_ranks, -1))
        state = rows_of(rank, num_ranks, 0)
        for step in range(1, 7):
            state["rows"].data.fill_(step)
            state["value"] = step
            # Rank 0's loss is the one that counts.
            manager.save(step, state, {"loss": abs(step - 2) if rank == 0 else -step})
            assert sum_over_ranks(step) == num_ranks * step
        manager.wait()
        sum_over_ranks(0)
        found = manager.latest(), manager.steps()
        values = [value_in_rows(manager.load(rows_of(rank, num_ranks, -1), step)) for step in (None, 2)]
    return nothing, error, found, values


def test_a_run_of_three_ranks_is_resumed_by_two(tmp_path):
    for nothing, error, found, values in run(train, 3, 3, str(tmp_path)):
        assert nothing == (None, [])
        assert isinstance(error, CheckpointNotFoundError)
        assert found == (6, [2, 5, 6])
        assert values == [6, 2]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6"
    for file in (tmp_path / "step_00000006" / "tensors").iterdir():
        file.unlink()
    assert run(resume, 2, str(tmp_path)) == [(5, [6], 5)] * 2


def resume(rank, root):
    manager = CheckpointManager(root)
    whole = torch.zeros(150, 256)
    loaded = manager.load({"rows": ShardedTensor.from_rank_offsets("rows", whole, (0, rank, 2))})
    return value_in_rows(loaded), list(manager.skipped), manager.latest()


def fail_unnoticed(rank, root):
    manager = CheckpointManager(root)
    manager.save(1, rows_of(rank, 2, 1)).result(PATIENCE)
    if rank == 0:
        with open(f"{root}/step_00000002", "w") as file:
            file.write("in the way")
    sum_over_ranks(0)
    errors = [error_of(manager.save, 2, rows_of(rank, 2, 2)), error_of(manager.save, 3, {"f": rank and object()})]
    handle = manager.save(4, rows_of(rank, 2, 4))
    if rank == 1:
        handle.result(PATIENCE)
    manager.close()
    return errors, manager.latest()


def test_errors_are_the_same_on_all_ranks(tmp_path):
    for (exists, unsupported), latest in run(fail_unnoticed, 2, str(tmp_path)):
        assert isinstance(exists, distckpt.CheckpointExistsError)
        assert isinstance(unsupported, RankFailedError)
        assert list(unsupported.failures) == [1]
        assert latest == 4


def train_until_told_to_stop(rank, root):
    with PreemptionGuard() as guard, CheckpointManager(root) as manager:
        step = 0
        while not guard.should_stop():
            step += 1
            if step == 3:
                signal_parent(os.getpid())
        manager.save(step, rows_of(rank, 2, step)).result(PATIENCE)
    return step, guard.received


def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path):
    with launched(train_until_told_to_stop, 2, str(tmp_path)) as launch:
        pids = [launch.wait_for_signal(rank) for rank in range(2)]
        os.kill(pids[1], signal.SIGTERM)
        (first, first_received), (second, second_received) = launch.values()
    assert first == second >= 3
    assert (first_received, second_received) == (False, True)
    assert CheckpointManager(tmp_path).latest() == first


def save_in_turns(rank, root):
    with CheckpointManager(root, keep_last=1, async_save=False) as manager:
        for step in range(3):
            assert manager.save(step, rows_of(rank, 2, step)).done()
        return manager.steps(), value_in_rows(manager.load(rows_of(rank, 2, -1)))


def test_blocking_saves(tmp_path):
    assert run(save_in_turns, 2, str(tmp_path)) == [([2], 2)] * 2

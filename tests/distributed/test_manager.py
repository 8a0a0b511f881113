"""The checkpoint manager on several ranks: all agree on the step, errors and signals reach all."""

from __future__ import annotations

import os
import signal

import torch

import distckpt
from distckpt import (
    CheckpointManager,
    CheckpointNotFoundError,
    PreemptionGuard,
    RankFailedError,
    ShardedTensor,
)
from tests.support.disk import flip
from tests.support.harness import ask_parent, error_of, launched, run, signal_parent, sum_over_ranks

PATIENCE = 60.0


def rows_of(rank, num_ranks, value):
    rows = torch.full((100, 256), float(value))
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, num_ranks)),
        "value": value,
    }


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
            manager.save(step, state, metrics={"loss": abs(step - 2) if rank == 0 else -step})
            assert sum_over_ranks(step) == num_ranks * step
        manager.wait()
        sum_over_ranks(0)
        found = manager.latest(), manager.steps()
        values = [
            value_in_rows(manager.load(rows_of(rank, num_ranks, -1), step)) for step in (None, 2)
        ]
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
    manager = CheckpointManager(root, unsupported="raise")
    manager.save(1, rows_of(rank, 2, 1)).result(PATIENCE)
    if rank == 0:
        with open(f"{root}/step_00000002", "w") as file:
            file.write("in the way")
    sum_over_ranks(0)
    errors = [
        error_of(manager.save, 2, rows_of(rank, 2, 2)),
        error_of(manager.save, 3, {"f": rank and object()}),
    ]
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


def save_three(rank, root):
    with CheckpointManager(root, async_save=False) as manager:
        for step in (1, 2, 3):
            manager.save(step, rows_of(rank, 2, step))


def load_what_loads(rank, root):
    if rank == 1:
        # No other rank is needed.
        manager = CheckpointManager(root)
        assert (manager.steps(), manager.latest()) == ([1, 2, 3], 3)
    manager = CheckpointManager(root)
    value, skipped = value_in_rows(manager.load(rows_of(rank, 2, -1))), sorted(manager.skipped)
    errors = [
        error_of(manager.load, rows_of(rank, 2, -1), 3),
        error_of(manager.load, {"rows": rank and object()}),
    ]
    wider = torch.zeros(100, 512)
    errors.append(
        error_of(
            manager.load, {"rows": ShardedTensor.from_rank_offsets("rows", wider, (0, rank, 2))}
        )
    )
    return value, skipped, errors


def test_all_ranks_pass_over_a_step_that_is_damaged_for_one(tmp_path):
    run(save_three, 2, str(tmp_path))
    for step in (2, 3):
        (file,) = (tmp_path / f"step_0000000{step}" / "tensors").glob("shard-00002-*")
        flip(file, -1)
    for value, skipped, (named, mismatch, wider) in run(load_what_loads, 2, str(tmp_path)):
        assert (value, skipped) == (1, [2, 3])
        assert isinstance(named, distckpt.CheckpointingException)
        assert "step_00000003" in str(named)
        assert not isinstance(mismatch, CheckpointNotFoundError)
        assert "global shape" in str(wider)


def reject_on_one_rank(rank, root):
    manager = CheckpointManager(root)
    if rank == 1:
        # No other rank is needed.
        manager.reject(3, "rank 1 has found it bad")
    sum_over_ranks(0)
    value = value_in_rows(manager.load(rows_of(rank, 2, -1)))
    skipped = dict(manager.skipped)
    named = value_in_rows(manager.load(rows_of(rank, 2, -1), 3))
    manager.save(3, rows_of(rank, 2, 30)).result()
    return value, skipped, named, value_in_rows(manager.load(rows_of(rank, 2, -1)))


def test_a_step_that_one_rank_rejects_is_passed_over_by_all(tmp_path):
    run(save_three, 2, str(tmp_path))
    for found in run(reject_on_one_rank, 2, str(tmp_path)):
        assert found == (2, {3: "rejected: rank 1 has found it bad"}, 3, 30)


def go_on_without_checkpoints(rank, root):
    manager = CheckpointManager(root, on_failure="log", unsupported="raise", timeout=20.0)

    with open(f"{root}/step_0000000{rank + 1}", "w") as file:
        file.write("in the way")
    sum_over_ranks(0)
    handles = [manager.save(step, rows_of(rank, 2, step)) for step in (1, 2, 3)]
    manager.wait()
    errors = [error_of(manager.save, 4, {"f": rank and object()}), error_of(manager.save, -1, {})]
    results = (
        sorted(manager.failures),
        [type(handle.exception()).__name__ for handle in handles],
        manager.steps(),
        errors,
    )
    if rank == 1:
        signal_parent(None)
        signal.pause()
    ask_parent()
    return results, error_of(manager.save, 5, rows_of(rank, 2, 5))


def test_a_job_goes_on_without_checkpoints_but_not_without_a_rank(tmp_path):
    with launched(go_on_without_checkpoints, 2, str(tmp_path), group_timeout=20.0) as launch:
        launch.wait_for_signal(1)
        launch.wait_for_signal(0)
        launch.kill(1)
        launch.answer(0)
        (failures, kinds, steps, errors), lost = launch.values()[0]
    assert (failures, steps) == ([1, 2], [3])
    assert kinds == ["CheckpointExistsError", "CheckpointExistsError", "NoneType"]
    assert all(isinstance(error, RankFailedError) for error in errors)
    assert lost.is_lost_contact


def save_with_metrics_of_one_rank(rank, root):
    """The loss is known on the last pipeline stage only, and so is that it is worth keeping."""
    with CheckpointManager(
        root, keep_last=1, best_metric="loss", async_save=False, durable=False
    ) as manager:
        for step, loss in [(1, 0.5), (2, 3.0), (3, 2.0), (4, 1.0)]:
            metrics = {"loss": loss} if rank == 1 else {"lr": 0.1} if step < 3 else None
            manager.save(
                step, rows_of(rank, 2, step), metrics=metrics, pinned=(rank, step) == (1, 2)
            )
        invalid = [
            error_of(manager.save, 5, rows_of(rank, 2, 5), metrics=bad if rank else None)
            for bad in ("loss", {"loss": "x"})
        ]
        misnamed = [
            error_of(manager.load, rows_of(rank, 2, -1), 4 if rank == 0 else None),
            error_of(manager.load, rows_of(rank, 2, -1), 4 if rank == 0 else "4"),
            error_of(manager.load, rows_of(rank, 2, -1), 4 - 3 * rank),
        ]
        value = value_in_rows(manager.load(rows_of(rank, 2, -1), 4))
        return (
            manager.steps(),
            value,
            [type(error) for error in invalid],
            [str(error) for error in misnamed],
        )


def test_what_only_one_rank_gives(tmp_path):
    for steps, value, invalid, (no_step, not_a_step, other_step) in run(
        save_with_metrics_of_one_rank, 2, str(tmp_path)
    ):
        assert (steps, value) == ([1, 2, 4], 4)
        assert invalid == [RankFailedError] * 2
        assert "rank 0 gives 4, rank 1 gives None" in no_step
        assert "A step is an integer from 0, got '4'" in not_a_step
        assert "rank 0 gives 4, rank 1 gives 1" in other_step


def save_in_turns(rank, root):
    with CheckpointManager(root, keep_last=1, async_save=False) as manager:
        for step in range(3):
            assert manager.save(step, rows_of(rank, 2, step)).done()
        sum_over_ranks(0)  # rank 0 has removed what is not kept
        return manager.steps(), value_in_rows(manager.load(rows_of(rank, 2, -1)))


def test_blocking_saves(tmp_path):
    assert run(save_in_turns, 2, str(tmp_path)) == [([2], 2)] * 2


def stepped(steps):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    for _ in range(steps):
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def save_steps_that_differ(rank, root):
    state = stepped(1 + rank)
    refusal = error_of(distckpt.save, state, f"{root}/refused")
    manager = distckpt.CheckpointManager(root)
    manager.save(1, stepped(1)).result()
    manager.save(2, state).result()
    manager.close()
    target = stepped(5)
    distckpt.load(target, manager.location(2))
    return str(refusal), [float(each["step"]) for each in target["optimizer"].state.values()]


def test_optimizers_that_have_made_different_numbers_of_steps_cost_a_run_no_checkpoint(tmp_path):
    with launched(save_steps_that_differ, 2, str(tmp_path)) as launch:
        outcomes = launch.outcomes()
    assert [outcome.error for outcome in outcomes] == [None] * 2
    refusals, steps = zip(*(outcome.value for outcome in outcomes), strict=True)
    assert all("{'step': 1.0} and {'step': 2.0}" in refusal for refusal in refusals)
    assert steps == ([1.0, 1.0], [1.0, 1.0])
    warnings = [text for outcome in outcomes for text in outcome.warnings_logged]
    assert any("Ranks disagree" in text and "first of these is stored" in text for text in warnings)


def save_with_losses_of_ranks(rank, path):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss + rank

    optimizer.step(closure)
    state = {"model": model, "optimizer": optimizer}
    refusal = error_of(distckpt.save, state, f"{path}/refused")
    distckpt.save(state, f"{path}/saved", unsupported="warn")
    return str(refusal)


def test_what_ranks_disagree_about_is_named_without_the_rest(tmp_path):
    with launched(save_with_losses_of_ranks, 2, str(tmp_path)) as launch:
        outcomes = launch.outcomes()
    for outcome in outcomes:
        assert outcome.error is None
        assert "values: {'prev_loss': " in outcome.value
        assert "func_evals" not in outcome.value
        assert "unsupported='warn'" in outcome.value

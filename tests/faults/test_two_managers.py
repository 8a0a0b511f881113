"""Two jobs with a manager each save into one directory: a requeued job beside its dying
predecessor, say.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil

import pytest

import distckpt
from distckpt import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointManager,
    CheckpointNotFoundError,
)
from tests.support.harness import ask_parent, launched
from tests.support.s3_server import keys_in, reached_at, uploads_in
from tests.support.states import state_of, value_of

PATIENCE = 200.0
MANAGERS = 2


def value_at(manager, step):
    """Return the value that all parts of a step hold, every byte of which is checked; None when it
    is not there.
    """
    try:
        return value_of(distckpt.load(state_of(-1), manager.location(step)))
    except CheckpointNotFoundError:
        return None


def save_by_chance(rank, root, server, seed, rounds, shares_steps):
    """Save steps in an order of chance; return what was saved, `(step, value)`, and the errors.

    Values are numbers of saves: those of one job are even, those of the other odd. So are the
    steps, unless they are
    shared: then each job overwrites what the other has saved.
    """
    chance = random.Random(seed + rank)
    saved, errors = [], []
    settings = {"keep_last": 2, "best_metric": "loss", "durable": False, "async_save": rank == 1}
    with (
        reached_at(server) if server else contextlib.nullcontext(),
        CheckpointManager(root, **settings) as manager,
    ):
        for number in range(rounds):
            value = MANAGERS * number + rank
            step = chance.randrange(6) if shares_steps else MANAGERS * chance.randrange(4) + rank
            overwrites = not shares_steps or chance.random() < 0.7
            try:
                manager.save(
                    step, state_of(value), metrics={"loss": chance.random()}, overwrite=overwrites
                ).result(PATIENCE)
            except CheckpointExistsError as error:
                errors.append(str(error))
                continue
            if not saved:
                # The other job has looked at the directory, too: of what is saved from now on it
                # knows that it is not its own.
                ask_parent()
            found = value_at(manager, step)
            # What the other job has put in its place may be gone again.
            assert found == value or (
                shares_steps and (found is None or found % MANAGERS != rank)
            ), (step, found)
            saved.append((step, value))
    return saved, errors


def test_a_save_whose_directory_another_program_removes(tmp_path):
    def remove_once(num_bytes, total_bytes):
        for staging in tmp_path.glob(".step_00000001.tmp-*"):
            shutil.rmtree(staging)

    with pytest.raises(
        CheckpointingException, match=r"step_00000001.tmp-.* was removed or renamed by another"
    ):
        distckpt.save(state_of(1), tmp_path / "step_00000001", progress=remove_once)
    assert os.listdir(tmp_path) == []


def run_both(root, server, rounds, shares_steps):
    with launched(
        save_by_chance, MANAGERS, root, server, rounds, rounds, shares_steps, backend=None
    ) as launch:
        for manager in range(MANAGERS):
            launch.wait_for_signal(manager)
        for manager in range(MANAGERS):
            launch.answer(manager)
        return launch.values()


def check_both(root, results, shares_steps):
    manager = CheckpointManager(root)
    last = {step: value for saved, _ in results for step, value in saved}
    found = {step: value_at(manager, step) for step in manager.steps()}
    for step, value in found.items():
        assert value == last[step] or (
            shares_steps and any((step, value) in saved for saved, _ in results)
        )
    for saved, errors in results:
        assert saved
        assert shares_steps or not errors
        assert shares_steps or saved[-1][0] in found
    assert manager.latest() == max(found)
    assert manager.skipped == {}


@pytest.mark.parametrize("shares_steps", [False, True])
@pytest.mark.parametrize("rounds", [12, pytest.param(400, marks=pytest.mark.slow)])
def test_on_a_disk(rounds, shares_steps, tmp_path):
    check_both(tmp_path, run_both(str(tmp_path), None, rounds, shares_steps), shares_steps)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


@pytest.mark.parametrize("shares_steps", [False, True])
@pytest.mark.parametrize("rounds", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_on_an_object_store(rounds, shares_steps, server, bucket):
    root = f"{bucket}/run"
    check_both(root, run_both(root, server, rounds, shares_steps), shares_steps)
    steps = {name.partition("/")[0] for name in keys_in(server, root)}
    assert steps == {f"step_{step:08d}" for step in CheckpointManager(root).steps()} | {
        "latest_checkpointed_iteration.txt"
    }
    assert uploads_in(server, bucket) == []

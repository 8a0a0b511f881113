"""Ranks that are killed in the middle of a save: earlier checkpoints stay, no half one appears,
saving goes on.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import distckpt
from distckpt import RankFailedError, ShardedTensor, ShardedTensorFactory
from tests.support.disk import tree_of
from tests.support.harness import ask_parent, error_of, launched
from tests.support.states import state_of
from tests.support.stopping import StopsAfter, StopsBefore, stopping

NUM_RANKS = 3
TIMEOUT = 15.0
"""Of the process group, in seconds: some survivors wait it out; on a busy machine they are late
themselves.
"""
SLACK = 60.0
"""Seconds by which a survivor may be later than that."""


def save_state(rank, path, value, overwrite=False):
    distckpt.save(state_of(value, rank, NUM_RANKS), path, overwrite=overwrite)


def loaded_values(rank, path):
    """Return all distinct values that the checkpoint of `state_of` holds for this rank."""
    loaded = distckpt.load(state_of(-1, rank, NUM_RANKS), path)
    tensors = torch.cat([loaded["rows"].flatten(), loaded["shared"].flatten()])
    return sorted({*tensors.tolist(), loaded["rng"]["value"], loaded["value"]})


def stops_while_taking_apart(rank, path):
    """Before anything is on disk."""

    def build(key, data, replica_id, flattened_range):
        del flattened_range
        ask_parent()
        return ShardedTensor.from_rank_offsets(key, data, replica_id=replica_id)

    factory = ShardedTensorFactory(
        "fused", torch.ones(4), build, lambda loaded: loaded, replica_id=rank
    )
    distckpt.save({**state_of(2, rank, NUM_RANKS), "fused": factory}, path, overwrite=True)


def stops_before_writing(rank, path):
    distckpt.save(
        state_of(2, rank, NUM_RANKS), path, strategy=stopping(StopsBefore), overwrite=True
    )


def stops_after_writing(rank, path):
    distckpt.save(state_of(2, rank, NUM_RANKS), path, strategy=stopping(StopsAfter), overwrite=True)


def save_and_be_killed(rank, stop, path):
    """Every rank stops at the same place; the survivors are told to go on when the others are
    dead.
    """
    error = error_of(stop, rank, path)
    return error, time.monotonic()


STOPS = [stops_while_taking_apart, stops_before_writing, stops_after_writing]


def check_that_saving_goes_on(run, saved, folder, path):
    """A new job finds the earlier checkpoint as it was, and saves to both paths."""
    assert tree_of(folder / "old") == tree_of(saved)
    assert run(loaded_values, NUM_RANKS, str(folder / "old")) == [[1]] * NUM_RANKS
    run(save_state, NUM_RANKS, str(path), 3, True)
    assert run(loaded_values, NUM_RANKS, str(path)) == [[3]] * NUM_RANKS
    left = {name for name in os.listdir(folder) if not name.startswith(".")}
    assert left == {"old", path.name}


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory):
    path, again = (
        tmp_path_factory.mktemp("saved") / "checkpoint",
        tmp_path_factory.mktemp("again") / "checkpoint",
    )
    for each in (path, again):
        run(save_state, NUM_RANKS, str(each), 1)
    assert tree_of(path) == tree_of(again), "saving is deterministic"
    return path


@pytest.fixture
def folder(saved, tmp_path):
    """A directory with the checkpoint `old`, a copy of what was saved."""
    shutil.copytree(saved, tmp_path / "run" / "old")
    return tmp_path / "run"


def lose_one(stop, path):
    """Kill rank 1 where all stop; return the outcomes, and when it was killed."""
    with launched(save_and_be_killed, NUM_RANKS, stop, str(path), group_timeout=TIMEOUT) as launch:
        for rank in range(NUM_RANKS):
            launch.wait_for_signal(rank)
        launch.kill(1)
        killed = time.monotonic()
        for survivor in (0, 2):
            launch.answer(survivor)
        return launch.values(), killed


@pytest.mark.parametrize("target", ["new", "old"])
def test_one_killed_rank(run, target, saved, tmp_path):
    folders = [tmp_path / stop.__name__ for stop in STOPS]
    for folder in folders:
        shutil.copytree(saved, folder / "old")
    # At the same time: survivors wait for the timeout.
    with ThreadPoolExecutor(len(STOPS)) as pool:
        losses = list(pool.map(lose_one, STOPS, [folder / target for folder in folders]))
    for stop, folder, (outcomes, killed) in zip(STOPS, folders, losses, strict=True):
        assert outcomes[1] is None, stop
        for survivor in (0, 2):
            error, raised = outcomes[survivor]
            assert isinstance(error, RankFailedError), (stop, error)
            assert "Lost contact with rank 1 " in str(error), stop
            assert raised - killed < TIMEOUT + SLACK, stop
        assert [name for name in os.listdir(folder) if name.startswith(".")] == [], (
            f"{stop}: rank 0 lives and has cleaned up"
        )
        assert (folder / "new").exists() is False, stop
        check_that_saving_goes_on(run, saved, folder, folder / target)


@pytest.mark.parametrize("target", ["new", "old"])
@pytest.mark.parametrize("victims", [(0,), (0, 1, 2)], ids=["coordinator", "all"])
def test_killed_coordinator(run, victims, target, saved, folder):
    path = folder / target
    with launched(
        save_and_be_killed, NUM_RANKS, stops_after_writing, str(path), group_timeout=TIMEOUT
    ) as launch:
        outcomes = launch.lose(*victims)
    for survivor in set(range(NUM_RANKS)) - set(victims):
        assert isinstance(outcomes[survivor][0], RankFailedError)
        assert "Lost contact with rank 0 " in str(outcomes[survivor][0])
    assert (folder / "new").exists() is False
    (staging,) = [name for name in os.listdir(folder) if name != "old"]
    assert staging.startswith("."), (
        "nobody was left to clean up; what is left is hidden and no checkpoint"
    )
    assert not distckpt.megatron.check_is_distributed_checkpoint(str(folder / staging))
    check_that_saving_goes_on(run, saved, folder, path)


def save_and_stop_within(rank, path):
    """Save 20 MB; the first thread that has written something waits for the test."""
    is_first = threading.Lock()

    def stop(num_bytes, total_bytes):
        del num_bytes, total_bytes
        if is_first.acquire(blocking=False):
            ask_parent()

    distckpt.save(state_of(2, rank, NUM_RANKS, 20_000), path, overwrite=True, progress=stop)


def files_being_written(folder):
    return list(folder.glob(".*.tmp-*/tensors/*"))


@pytest.mark.parametrize("target", ["new", "old"])
def test_all_ranks_killed_while_they_write(run, target, saved, folder):
    path = folder / target
    with launched(save_and_stop_within, NUM_RANKS, str(path)) as launch:
        assert launch.lose(*range(NUM_RANKS)) == [None] * NUM_RANKS
    assert files_being_written(folder), "they were killed before the commit"
    assert (folder / "new").exists() is False
    check_that_saving_goes_on(run, saved, folder, path)


def load_and_be_killed(rank, path):
    def merge(loaded):
        ask_parent()
        return loaded

    def build(key, data, replica_id, flattened_range):
        del flattened_range
        return ShardedTensor.from_rank_offsets(key, data, replica_id=replica_id)

    data = torch.zeros(64, 256)
    factory = ShardedTensorFactory("shared", data, build, merge, replica_id=rank)
    return error_of(distckpt.load, {"shared": factory}, path)


def test_a_rank_killed_while_loading(folder):
    before = tree_of(folder)
    with launched(
        load_and_be_killed, NUM_RANKS, str(folder / "old"), group_timeout=TIMEOUT
    ) as launch:
        for rank in range(NUM_RANKS):
            launch.wait_for_signal(rank)
        launch.kill(2)
        for survivor in (0, 1):
            launch.answer(survivor)
        outcomes = launch.values()
    for error in outcomes[:2]:
        assert isinstance(error, RankFailedError)
        assert "Lost contact with rank 2 " in str(error)
    assert tree_of(folder) == before


def save_then_wait(rank, path):
    """A rank that does not come in time is as good as dead for the others; they do not wait for
    ever.
    """
    if rank == 1:
        ask_parent()
    started = time.monotonic()
    error = error_of(distckpt.save, state_of(2, rank, NUM_RANKS), path)
    return error, time.monotonic() - started


def test_a_rank_that_does_not_come(tmp_path):
    with launched(
        save_then_wait, NUM_RANKS, str(tmp_path / "checkpoint"), group_timeout=TIMEOUT
    ) as launch:
        launch.wait_for_signal(1)
        launch.wait_for_end(0, 2)
        launch.answer(1)
        outcomes = launch.values()
    for error, seconds in outcomes:
        assert isinstance(error, RankFailedError)
        assert seconds < TIMEOUT + SLACK
    for error, _ in (outcomes[0], outcomes[2]):
        assert list(error.failures) == [1]
    assert list(Path(tmp_path).iterdir()) == []

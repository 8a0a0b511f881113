"""Background saves whose disk fills up or whose ranks are killed or stopped: atomic, and all ranks
raise.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

import distckpt
from distckpt import CheckpointManager, RankFailedError
from distckpt.strategies.safetensors import ShardSave
from tests.support.disk import tree_of
from tests.support.disks import small_disk
from tests.support.harness import ask_parent, error_of, launched, run, sum_over_ranks
from tests.support.states import state_of
from tests.support.stopping import StopsAfter, StopsBefore, StopsWithin, stopping

PATIENCE = 200.0
NUM_RANKS = 3
TIMEOUT = 12.0
"""Of exchanges in the background, in seconds: survivors wait it out; on a busy machine others are
late too.
"""


def values_in(loaded):
    return sorted({*loaded["rows"].unique().tolist(), loaded["rng"]["value"], loaded["value"]})


def save_to_a_full_disk(rank, folder, first):
    handle = distckpt.async_save(state_of(1, rank, NUM_RANKS, 8000), f"{folder}/{first}")
    sums = [sum_over_ranks(step) for step in range(20)]
    error = error_of(handle.result, PATIENCE)
    sums.append(sum_over_ranks(1))
    distckpt.async_save(state_of(2, rank, NUM_RANKS), f"{folder}/small").result(PATIENCE)
    loaded = values_in(distckpt.load(state_of(-1, rank, NUM_RANKS), f"{folder}/small"))
    return error, sums, loaded


def check_that_training_went_on(results, number):
    for error, sums, loaded in results:
        assert isinstance(error, RankFailedError)
        assert {cause.errno for cause in error.failures.values()} == {number}
        assert os.strerror(number) in str(error)
        assert sums == [*(NUM_RANKS * step for step in range(20)), NUM_RANKS]
        assert loaded == [2]


def test_a_disk_that_is_full(tmp_path):
    with small_disk(tmp_path, 10 << 20):
        results = run(save_to_a_full_disk, NUM_RANKS, str(tmp_path), "large")
        assert os.listdir(tmp_path) == ["small"]
    check_that_training_went_on(results, errno.ENOSPC)


def test_a_file_where_a_directory_should_be(tmp_path):
    (tmp_path / "blocked").write_text("")
    results = run(save_to_a_full_disk, NUM_RANKS, str(tmp_path), "blocked/checkpoint")
    check_that_training_went_on(results, errno.ENOTDIR)


# --- Killed ranks ---------------------------------------------------------------------------------


def save_and_lose_a_rank(rank, root, kind):
    manager = CheckpointManager(root, strategy=stopping(kind), timeout=TIMEOUT, exit_timeout=0)
    handle = manager.save(2, state_of(2, rank, NUM_RANKS))
    error = error_of(handle.result, PATIENCE)
    return error, error_of(handle.result, PATIENCE) is error


def save_first(rank, root):
    CheckpointManager(root).save(1, state_of(1, rank, NUM_RANKS)).result(PATIENCE)


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory):
    """The directory of a manager that has saved step 1."""
    root = tmp_path_factory.mktemp("saved") / "root"
    run(save_first, NUM_RANKS, str(root))
    return root


@pytest.fixture
def root(saved, tmp_path):
    """A copy of that directory."""
    return shutil.copytree(saved, tmp_path / "root")


def resume(rank, root):
    """What a new job does: find the newest complete step, load it, and save the next one."""
    with CheckpointManager(root) as manager:
        found = (
            manager.latest(),
            values_in(manager.load(state_of(-1, rank, NUM_RANKS))),
        )
        manager.save(2, state_of(3, rank, NUM_RANKS)).result(PATIENCE)
        return found, values_in(manager.load(state_of(-1, rank, NUM_RANKS)))


def check_resumed(run, root):
    assert run(resume, NUM_RANKS, str(root)) == [((1, [1]), [3])] * NUM_RANKS
    names = {name for name in os.listdir(root) if name.startswith(("step", "."))}
    assert names == {"step_00000001", "step_00000002"}, "what was interrupted has been cleared"


KINDS = [StopsBefore, StopsWithin, StopsAfter]


def lose(kind, victims, root):
    """Kill ranks within a background save of this kind; return the outcomes."""
    with launched(save_and_lose_a_rank, NUM_RANKS, str(root), kind) as launch:
        return launch.lose(*victims)


@pytest.mark.parametrize("victims", [(1,), (0,), (0, 1, 2)], ids=["one", "coordinator", "all"])
def test_killed_ranks(run, victims, saved, tmp_path):
    roots = [shutil.copytree(saved, tmp_path / kind.__name__) for kind in KINDS]
    # At the same time: survivors may wait for the timeout.
    with ThreadPoolExecutor(len(KINDS)) as pool:
        losses = list(pool.map(lose, KINDS, [victims] * len(KINDS), roots))
    for kind, root, outcomes in zip(KINDS, roots, losses, strict=True):
        for survivor in set(range(NUM_RANKS)) - set(victims):
            error, is_same = outcomes[survivor]
            assert isinstance(error, RankFailedError), (kind, error)
            assert f"Lost contact with rank {victims[0]} " in str(error), (kind, error)
            assert list(error.failures) == list(victims), kind
            assert is_same, kind
        assert not (root / "step_00000002").exists(), kind
        assert tree_of(root / "step_00000001") == tree_of(saved / "step_00000001"), kind
        check_resumed(run, root)


def save_after_a_death(rank, root):
    # As init_process_group does it for a store of its own.
    torch.distributed.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=6.0))
    ask_parent()
    return error_of(distckpt.async_save, state_of(2, rank, NUM_RANKS), f"{root}/checkpoint")


def lose_before_the_first_save(backend, folder):
    """Kill rank 1 before a first save; return what the others raise."""
    with launched(
        save_after_a_death, NUM_RANKS, str(folder), backend=backend, group_timeout=6.0
    ) as launch:
        for rank in range(NUM_RANKS):
            launch.wait_for_signal(rank)
        launch.kill(1)
        launch.answer(0)
        launch.answer(2)
        outcomes = launch.values()
    return outcomes[0], outcomes[2]


def test_a_rank_that_dies_before_the_first_save(tmp_path):
    """The process groups that a first save makes are not waited for in vain, nor without naming the
    rank.
    """
    backends = ["gloo", "cuda:gloo"]
    # At the same time: survivors wait for the timeout.
    with ThreadPoolExecutor(len(backends)) as pool:
        losses = list(pool.map(lose_before_the_first_save, backends, [tmp_path] * len(backends)))
    for backend, errors in zip(backends, losses, strict=True):
        for error in errors:
            assert isinstance(error, RankFailedError), (backend, error)
            assert list(error.failures) == [1], backend
            assert "Lost contact with rank 1 " in str(error), backend
    assert list(tmp_path.iterdir()) == []


both_are_scheduled = threading.Event()


class StopsWhenBothAreScheduled(StopsBefore):
    """Waits for the test when the trainer has nothing to exchange any more."""

    def write(self, checkpoint_dir, ranks):
        assert both_are_scheduled.wait(PATIENCE)
        return super().write(checkpoint_dir, ranks)


def save_twice_and_lose_a_rank(rank, root):
    """Of two saves in flight, the first loses a rank; the second one must not begin where the first
    one ended.
    """
    strategy = stopping(StopsWhenBothAreScheduled)
    manager = CheckpointManager(root, strategy=strategy, timeout=TIMEOUT, exit_timeout=0)
    handles = [manager.save(step, state_of(step, rank, NUM_RANKS)) for step in (2, 3)]
    sum_over_ranks(0)
    both_are_scheduled.set()
    return [error_of(handle.result, PATIENCE) for handle in handles]


def test_a_rank_killed_with_two_saves_in_flight(run, root):
    with launched(save_twice_and_lose_a_rank, NUM_RANKS, str(root)) as launch:
        for rank in range(NUM_RANKS):
            launch.wait_for_signal(rank)
        launch.kill(2)
        for survivor in (0, 1):
            launch.answer(survivor)
        outcomes = launch.values()
    for first, second in outcomes[:2]:
        assert list(first.failures) == [2]
        assert isinstance(second, RankFailedError)
        assert "an earlier background save lost contact" in str(second)
    check_resumed(run, root)


def save_large(rank, root):
    handle = CheckpointManager(root).save(2, state_of(2, rank, NUM_RANKS, 40_000), overwrite=True)
    ask_parent()
    handle.result(PATIENCE)


def test_all_ranks_killed_while_they_write(run, root):
    with launched(save_large, NUM_RANKS, str(root)) as launch:
        for rank in range(NUM_RANKS):
            launch.wait_for_signal(rank)
        launch.kill(*range(NUM_RANKS))
        assert launch.values() == [None] * NUM_RANKS
    manager = CheckpointManager(root)
    # Whatever they had come to.
    assert manager.latest() in (1, 2)
    if manager.latest() == 2:
        assert distckpt.verify(manager.location(2)).is_whole
    else:
        check_resumed(run, root)


def stop_a_rank(victim, root):
    """Stop a rank within a background save; return what the others raise, and how many seconds that
    took.
    """
    with launched(save_and_lose_a_rank, NUM_RANKS, str(root), StopsWithin) as launch:
        for rank in range(NUM_RANKS):
            launch.wait_for_signal(rank)
        os.kill(launch.processes[victim].pid, signal.SIGSTOP)
        stopped = time.monotonic()
        survivors = [rank for rank in range(NUM_RANKS) if rank != victim]
        for survivor in survivors:
            launch.answer(survivor)
        launch.wait_for_end(*survivors)
        seconds = time.monotonic() - stopped
        launch.kill(victim)
        outcomes = launch.values()
    return [outcomes[survivor][0] for survivor in survivors], seconds


def test_a_rank_that_is_stopped_is_named(run, saved, tmp_path):
    victims = (0, 2)
    roots = [shutil.copytree(saved, tmp_path / str(victim)) for victim in victims]
    # At the same time: survivors wait for the timeout.
    with ThreadPoolExecutor(len(victims)) as pool:
        losses = list(pool.map(stop_a_rank, victims, roots))
    for victim, root, (errors, seconds) in zip(victims, roots, losses, strict=True):
        for error in errors:
            assert isinstance(error, RankFailedError)
            assert f"Lost contact with rank {victim} " in str(error), error
            assert list(error.failures) == [victim]
        assert seconds < TIMEOUT * NUM_RANKS + 60
        check_resumed(run, root)


def go_on_without_background(rank, root):
    """A rank whose background hangs does not keep the trainer from its own exchanges."""
    strategy = stopping(StopsWithin if rank == 1 else ShardSave)
    manager = CheckpointManager(root, strategy=strategy, timeout=TIMEOUT)
    handle = manager.save(1, state_of(1, rank, NUM_RANKS))
    sums = [sum_over_ranks(step) for step in range(50)]
    return sums, error_of(handle.result, PATIENCE)


def test_a_background_that_hangs_on_one_rank(tmp_path):
    with launched(go_on_without_background, NUM_RANKS, str(tmp_path)) as launch:
        launch.wait_for_signal(1)
        launch.wait_for_end(0, 2)
        launch.answer(1)
        outcomes = launch.values()
    for rank, (sums, error) in enumerate(outcomes):
        assert sums == [NUM_RANKS * step for step in range(50)]
        assert isinstance(error, RankFailedError)
        assert rank == 1 or list(error.failures) == [1]
    assert os.listdir(tmp_path) == []

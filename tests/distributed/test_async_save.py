"""Asynchronous saves of several ranks: beside the trainer's exchanges, isolated, with errors that
all ranks hear.
"""

from __future__ import annotations

import os
import resource
import signal
import threading

import pytest
import torch
import torch.distributed as dist

import distckpt
from distckpt import CheckpointExistsError, RankFailedError, ShardedTensor
from distckpt.megatron.strategies.async_utils import AsyncCallsQueue
from tests.support.harness import error_of, run, sum_over_ranks
from tests.support.states import state_of

PATIENCE = 60.0
ROWS = 100


def overwrite(state):
    for name in ("rows", "shared"):
        state[name].data.fill_(-1)
    state["rng"].data["value"] = -1


def values_in(rank, num_ranks, path, group=None):
    loaded = distckpt.load(state_of(-2, rank, num_ranks), path, process_group=group)
    return sorted(
        {
            *loaded["rows"].unique().tolist(),
            *loaded["shared"].unique().tolist(),
            loaded["rng"]["value"],
        }
    )


def train_while_saving(rank, num_ranks, folder):
    """Hold the background of rank 0 up; the trainer's collectives go on. Return their results, and
    what is saved.
    """
    may_write = threading.Event()

    def progress(num_bytes, total_bytes):
        assert rank != 0 or may_write.wait(PATIENCE)

    handles, sums = [], []
    for step in range(2):
        state = state_of(step, rank, num_ranks)
        handles.append(distckpt.async_save(state, f"{folder}/{step}", progress=progress))
        overwrite(state)
        sums += [sum_over_ranks(i) for i in range(20)]
    unfinished = [handle.done() for handle in handles] if rank == 0 else [False, False]
    sum_over_ranks(0)
    may_write.set()
    reports = [handle.result(PATIENCE) for handle in handles]
    found = [values_in(rank, num_ranks, f"{folder}/{step}") for step in range(2)]
    return (
        sums,
        unfinished,
        found,
        [(r.num_ranks, r.location, r.plan_reused, r.num_bytes) for r in reports],
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_trainer_goes_on_while_ranks_save(num_ranks, tmp_path):
    for sums, unfinished, found, reports in run(
        train_while_saving, num_ranks, num_ranks, str(tmp_path)
    ):
        assert sums == [num_ranks * i for i in range(20)] * 2
        assert unfinished == [False, False]
        assert found == [[0], [1]]
        (first, second) = reports
        assert first[:3] == (num_ranks, str(tmp_path / "0"), False)
        assert second[:3] == (num_ranks, str(tmp_path / "1"), True)
        assert first[3] > num_ranks * ROWS * 1024
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def save_in_subgroups(rank, folder):
    """Two pairs of ranks save at the same time, and then all four."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, own = pairs[rank // 2], rank % 2
    states = state_of(rank // 2, own, 2), state_of(7, rank, 4)
    handles = [
        distckpt.async_save(states[0], f"{folder}/pair{rank // 2}", process_group=group),
        distckpt.async_save(states[1], f"{folder}/all"),
    ]
    for state in states:
        overwrite(state)
    sums = sum_over_ranks(1, group), sum_over_ranks(1)
    for handle in handles:
        handle.result(PATIENCE)
    return (
        sums,
        values_in(own, 2, f"{folder}/pair{rank // 2}", group),
        values_in(rank, 4, f"{folder}/all"),
    )


def test_subgroups(tmp_path):
    for rank, result in enumerate(run(save_in_subgroups, 4, str(tmp_path))):
        assert result == ((2, 4), [rank // 2], [7])


def fail_in_background(rank, folder, asks):
    """Rank 1 may not write large files for a while. Return what was raised where, and whether the
    group works.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    handle = distckpt.async_save(state_of(1, rank, 2), f"{folder}/lost")
    sums = [sum_over_ranks(1)]
    errors = [error_of(handle.result, PATIENCE)] if asks else []
    distckpt._io.background.wait_for_all()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if not asks:
        # The one that raises it is not lost with it.
        errors.append(error_of(distckpt.async_save, state_of(2, rank, 2), f"{folder}/stored"))
    sums.append(sum_over_ranks(1))
    distckpt.async_save(state_of(3, rank, 2), f"{folder}/next").result(PATIENCE)
    distckpt.save(state_of(4, rank, 2), f"{folder}/last")
    return errors, sums, values_in(rank, 2, f"{folder}/next"), values_in(rank, 2, f"{folder}/last")


@pytest.mark.parametrize("asks", [True, False], ids=["asked", "not asked"])
def test_an_error_of_one_rank_is_raised_on_all_and_training_goes_on(asks, tmp_path):
    for errors, sums, next_values, last_values in run(fail_in_background, 2, str(tmp_path), asks):
        (error,) = errors
        assert isinstance(error, RankFailedError)
        assert list(error.failures) == [1]
        assert "File too large" in str(error)
        assert "tensors/shard-00002-" in str(error)
        assert (sums, next_values, last_values) == ([2, 2], [3], [4])
    assert sorted(os.listdir(tmp_path)) == ["last", "next", *([] if asks else ["stored"])]
    if not asks:
        stored = distckpt.open(tmp_path / "stored").read_tensors()
        assert all(bool((tensor == 2).all()) for tensor in stored.values())


def destroy_the_group(rank, folder, destroyers):
    may_write = threading.Event()
    handle = distckpt.async_save(
        state_of(1, rank, 2), f"{folder}/0", progress=lambda done, total: may_write.wait(PATIENCE)
    )
    if rank in destroyers:
        dist.destroy_process_group()
    may_write.set()
    return handle.exception(PATIENCE)


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch looks up the group of every peer")
@pytest.mark.parametrize("destroyers", [[0], [1], [0, 1]], ids=str)
def test_a_save_completes_when_its_group_is_destroyed_meanwhile(destroyers, tmp_path):
    """It has a group of its own, and names its peers by their ranks there, which torch does not
    look up.
    """
    assert run(destroy_the_group, 2, str(tmp_path), destroyers) == [None, None]
    assert [values_in(rank, 2, tmp_path / "0") for rank in (0, 1)] == [[1], [1]]
    assert os.listdir(tmp_path) == ["0"]


def lose_a_race(rank, folder):
    """Another program commits its checkpoint while ours is being written."""
    may_write = threading.Event()
    handle = distckpt.async_save(
        state_of(1, rank, 2), f"{folder}/c", progress=lambda done, total: may_write.wait(PATIENCE)
    )
    if rank == 0:
        os.makedirs(f"{folder}/c")
        with open(f"{folder}/c/metadata.json", "w") as file:
            file.write("{}")
    sum_over_ranks(0)
    may_write.set()
    errors = [error_of(handle.result, PATIENCE)]
    errors.append(error_of(distckpt.save, state_of(1, rank, 2), f"{folder}/d"))
    return errors


def test_what_rank_0_finds_at_the_end_is_raised_as_what_it_is(tmp_path):
    for first, second in run(lose_a_race, 2, str(tmp_path)):
        assert isinstance(first, CheckpointExistsError)
        assert second is None


def save_through_a_queue(rank, folder):
    queue, seen = AsyncCallsQueue(), []
    for value in range(2):
        state = state_of(value, rank, 2)
        request = distckpt.megatron.save(state, f"{folder}/{value}", async_sharded_save=True)
        request.add_finalize_fn(lambda value=value: seen.append((value, sum_over_ranks(value))))
        queue.schedule_async_request(request)
        overwrite(state)
        sum_over_ranks(1)
    finalized = []
    while queue.get_num_unfinalized_calls():
        finalized += queue.maybe_finalize_async_calls()
    queue.close()
    request = distckpt.megatron.save(state_of(2, rank, 2), f"{folder}/2", async_sharded_save=True)
    request.execute_sync()
    return finalized, seen, [values_in(rank, 2, f"{folder}/{value}") for value in range(3)]


def test_the_queue(tmp_path):
    for result in run(save_through_a_queue, 2, str(tmp_path)):
        assert result == ([0, 1], [(0, 0), (1, 2)], [[0], [1], [2]])


def stage_in_waves(rank, folder):
    may_write = threading.Event()
    state = state_of(5, rank, 2)
    state["large"] = ShardedTensor.from_rank_offsets(
        "large", torch.full((3 << 20,), 5.0), (0, rank, 2)
    )
    handle = distckpt.async_save(
        state,
        f"{folder}/c",
        max_inflight_bytes=16 << 20,
        progress=lambda done, total: may_write.wait(PATIENCE),
    )
    was_staged = handle.staged.is_set()
    sum_over_ranks(0)
    may_write.set()
    assert handle.staged.wait(PATIENCE)
    overwrite(state)
    state["large"].data.zero_()
    handle.result(PATIENCE)
    whole = ShardedTensor.from_rank_offsets("large", torch.zeros(6 << 20), replica_id=rank)
    loaded = distckpt.load({"large": whole}, f"{folder}/c")
    return was_staged, values_in(rank, 2, f"{folder}/c"), loaded["large"].unique().tolist()


def test_waves(tmp_path):
    for result in run(stage_in_waves, 2, str(tmp_path)):
        assert result == (False, [5], [5])


def reserve_before_saving(rank, folder):
    """Return what each rank reserved, whether the save found its plan, and the error of one whose
    replicas differ.
    """
    state = state_of(1, rank, 2)
    reserved = distckpt.reserve_staging_memory({**state, "seen": rank})
    report = distckpt.async_save(state, f"{folder}/c").result(PATIENCE)
    found = values_in(rank, 2, f"{folder}/c")
    state["shared"].data.fill_(rank)
    differing = error_of(distckpt.async_save, state, f"{folder}/d", validate_replicas=True)
    wrong = error_of(distckpt.reserve_staging_memory, state if rank else {"t": object()})
    return (
        reserved.result(PATIENCE),
        report.plan_reused,
        found,
        str(differing),
        type(wrong),
        sum_over_ranks(1),
    )


def test_reserving_memory_plans_the_first_save_and_checks_as_it_does(tmp_path):
    results = run(reserve_before_saving, 2, str(tmp_path))
    for num_bytes, plan_reused, found, differing, wrong, num_ranks in results:
        assert num_bytes >= ROWS * 1024 // 2
        assert plan_reused
        assert found == [1]
        assert "'shared'" in differing
        assert wrong is RankFailedError
        assert num_ranks == 2
    assert os.listdir(tmp_path) == ["c"]

"""Saving and loading with some of the ranks, and with the kinds of process groups that programs
have.
"""

from __future__ import annotations

import inspect
import threading
import weakref

import pytest
import torch
import torch.distributed as dist

import distckpt
from distckpt import CheckpointingException, ShardedObject, ShardedTensor
from tests.support.harness import error_of, run, sum_over_ranks

FULL = torch.arange(24 * 5, dtype=torch.float32).reshape(24, 5)


def rows(index, count, *, blank=False):
    part = FULL.chunk(count)[index].clone()
    return ShardedTensor.from_rank_offsets(
        "rows", torch.zeros_like(part) if blank else part, (0, index, count)
    )


def state(index, count, *, blank=False):
    return {
        "rows": rows(index, count, blank=blank),
        "who": ShardedObject("who", index, (count,), (index,)),
        "step": 3,
    }


def is_loaded(loaded, index, count):
    return torch.equal(loaded["rows"], FULL.chunk(count)[index]) and (
        loaded["who"],
        loaded["step"],
    ) == (index, 3)


def save_with_some_load_with_others(rank, path, savers, loaders):
    """What counts is a rank's position in its group, not its global rank."""
    saving, loading = dist.new_group(savers), dist.new_group(loaders)
    if rank in savers:
        distckpt.save(state(dist.get_rank(saving), len(savers)), path, process_group=saving)
    total = sum_over_ranks(1)
    result = True
    if rank in loaders:
        index = dist.get_rank(loading)
        loaded = distckpt.load(state(index, len(loaders), blank=True), path, process_group=loading)
        result = is_loaded(loaded, index, len(loaders))
    return result, total, sum_over_ranks(rank)


@pytest.mark.parametrize(
    ("savers", "loaders"), [([1, 3], [0, 2]), ([2, 3], [1, 3]), ([3, 1], [2, 0])]
)
def test_a_sub_group_saves_and_another_one_loads(savers, loaders, tmp_path):
    path = str(tmp_path / "checkpoint")
    assert run(save_with_some_load_with_others, 4, path, savers, loaders) == [(True, 4, 6)] * 4


def tensors_of_the_last_collective(rank, path):
    """Save, and tell which tensors of the last collective live on."""
    given = []

    def noting(function):
        def call(*args, **kwargs):
            tensors = [t for part in args for t in (part if isinstance(part, list) else [part])]
            given[:] = [
                weakref.ref(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)
            ]
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("broadcast", "all_reduce", "all_gather"):
            monkeypatch.setattr(dist, name, noting(getattr(dist, name)))
        distckpt.save(state(rank, 2), path)
    return [tensor() is not None for tensor in given]


def test_a_process_may_end_right_after_a_save(tmp_path):
    """gloo's threads may hold a tensor for a moment longer than its collective takes.

    If they held it last, they would need the interpreter's lock to destroy it, and a process whose
    threads need that while it ends is aborted by Python before 3.14.
    """
    for alive in run(tensors_of_the_last_collective, 2, str(tmp_path / "checkpoint")):
        assert alive
        assert all(alive)


def two_groups_at_once(rank, folder):
    """Two halves of the ranks save and load different checkpoints at the same time."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, index, path = halves[rank // 2], rank % 2, f"{folder}/half_{rank // 2}"
    distckpt.save(state(index, 2), path, process_group=mine)
    loaded = distckpt.load(state(index, 2, blank=True), path, process_group=mine)
    return is_loaded(loaded, index, 2), sum_over_ranks(rank)


def test_two_groups_save_at_the_same_time(tmp_path):
    assert run(two_groups_at_once, 4, str(tmp_path)) == [(True, 6)] * 4


def group_of_one(rank, folder):
    alone = [dist.new_group([member]) for member in range(2)][rank]
    path = f"{folder}/rank_{rank}"
    distckpt.save(state(0, 1), path, process_group=alone)
    return is_loaded(
        distckpt.load(state(0, 1, blank=True), path, process_group=alone), 0, 1
    ), sum_over_ranks(rank)


def test_every_rank_saves_alone(tmp_path):
    assert run(group_of_one, 2, str(tmp_path)) == [(True, 1)] * 2


def call_from_outside(rank, path):
    group = dist.new_group([0, 1])
    errors = []
    if rank == 2:
        errors = [
            error_of(distckpt.save, state(0, 1), path, process_group=group),
            error_of(distckpt.load, state(0, 1, blank=True), path, process_group=group),
        ]
    return errors, sum_over_ranks(rank)


def test_a_rank_outside_of_the_group_is_told_so(tmp_path):
    (_, _, (errors, _)) = run(call_from_outside, 3, str(tmp_path / "checkpoint"))
    assert len(errors) == 2
    for error in errors:
        assert isinstance(error, CheckpointingException)
        assert "rank 2 is not a member of the given process_group" in str(error)
    assert list(tmp_path.iterdir()) == []


def save_and_load(rank, path, num_ranks):
    distckpt.save(state(rank, num_ranks), path)
    return is_loaded(
        distckpt.load(state(rank, num_ranks, blank=True), path), rank, num_ranks
    ), sum_over_ranks(rank)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo"])
def test_backend_names(backend, tmp_path):
    assert (
        run(save_and_load, 2, str(tmp_path / "checkpoint"), 2, backend=backend) == [(True, 1)] * 2
    )


def save_and_load_twice(rank, folder):
    """The default group does not move CPU tensors; the gloo group beside it is made once."""
    for name in ("first", "second"):
        distckpt.save(state(rank, 2), f"{folder}/{name}")
    return is_loaded(distckpt.load(state(rank, 2, blank=True), f"{folder}/second"), rank, 2)


def test_a_default_group_that_cannot_move_cpu_tensors(tmp_path):
    assert run(save_and_load_twice, 2, str(tmp_path), backend="cuda:gloo") == [True, True]


def begin_again(rank, folder, backend):
    """A job that is restarted inside its processes gets another default group."""
    results = []
    for attempt in range(2):
        path = f"{folder}/attempt_{attempt}"
        distckpt.save(state(rank, 2), path)
        dist.destroy_process_group()
        dist.init_process_group(
            backend, init_method=f"file://{folder}/store_{attempt}", rank=rank, world_size=2
        )
        results.append(is_loaded(distckpt.load(state(rank, 2, blank=True), path), rank, 2))
    return results


@pytest.mark.parametrize("backend", ["gloo", "cuda:gloo"])
def test_a_process_group_that_was_made_anew(backend, tmp_path):
    assert run(begin_again, 2, str(tmp_path), backend, backend=backend) == [[True, True]] * 2


def without_a_group(rank, path):
    del rank
    return error_of(distckpt.save, state(0, 1), path, process_group=object())


def test_a_group_without_torch_distributed_is_an_error(tmp_path):
    (error,) = run(without_a_group, 1, str(tmp_path / "checkpoint"), backend=None)
    assert isinstance(error, CheckpointingException)
    assert "torch.distributed is not initialized" in str(error)


def save_in_two_threads(rank, size, folder):
    """The second save starts in the middle of the first, on the last rank long before it goes
    on.
    """
    entered, threads = threading.Event(), []

    def start_the_other(common):
        if not threads:
            thread = threading.Thread(
                target=distckpt.megatron.save, args=(state(rank, size), f"{folder}/b"), kwargs=other
            )
            threads.append(thread)
            thread.start()
            entered.wait(0.5 * (rank == size - 1))
        return common

    other = {"preprocess_common_before_consistancy_check": lambda common: entered.set() or common}
    distckpt.megatron.save(
        state(rank, size), f"{folder}/a", preprocess_common_before_consistancy_check=start_the_other
    )
    threads[0].join()
    loaded = [distckpt.load(state(rank, size, blank=True), f"{folder}/{name}") for name in "ab"]
    return all(is_loaded(each, rank, size) for each in loaded)


def test_threads_that_use_one_group_take_turns(tmp_path):
    assert run(save_in_two_threads, 2, 2, str(tmp_path)) == [True, True]


def _group_in_another_order(rank: int, path: str) -> None:
    group = dist.new_group([2, 0, 3], sort_ranks=False)
    if rank == 1:
        return
    position = [2, 0, 3].index(rank)
    assert dist.get_rank(group) == position
    part = torch.full((2, 2), float(position))
    state = {"w": ShardedTensor.from_rank_offsets("w", part, (0, position, 3))}
    distckpt.save(state, f"{path}/saved", process_group=group)
    distckpt.async_save(state, f"{path}/in_background", process_group=group).result()
    expected = torch.arange(3.0).repeat_interleave(2)[:, None].expand(6, 2)
    for name in ("saved", "in_background"):
        assert torch.equal(distckpt.open(f"{path}/{name}").read("w"), expected)


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="torch sorts the ranks of all groups",
)
def test_ranks_may_be_in_any_order_in_a_group(tmp_path):
    run(_group_in_another_order, 4, str(tmp_path))

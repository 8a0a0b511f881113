"""Independent programs use one path: of two savers one wins, and readers see complete
checkpoints.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

import distckpt
from distckpt import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointManager,
    CheckpointNotFoundError,
    LoadMismatchError,
    ShardedObject,
    ShardedTensor,
)
from tests.support.harness import error_of, launched, run, sum_over_ranks
from tests.support.other_program import as_another_program
from tests.support.stopping import StopsAfter, stopping

ROUNDS = pytest.mark.parametrize("rounds", [8, pytest.param(200, marks=pytest.mark.slow)])
NUM_TENSORS = 5


def many_tensors(value):
    return {
        "tensors": [
            ShardedTensor.from_rank_offsets(f"tensor {i}", torch.full((50, 64), float(value)))
            for i in range(NUM_TENSORS)
        ],
        "value": value,
    }


def save_many_times(rank, folder, overwrite, rounds):
    return [
        error_of(
            distckpt.save,
            many_tensors(rank),
            f"{folder}/round_{i}",
            strategy=stopping(StopsAfter),
            overwrite=overwrite,
        )
        for i in range(rounds)
    ]


def let_them_meet(launch, rounds):
    for _ in range(rounds):
        for rank in (0, 1):
            launch.wait_for_signal(rank)
        for rank in (0, 1):
            launch.answer(rank)


def value_in(path):
    """Return the value that all of a checkpoint holds."""
    loaded = distckpt.load(many_tensors(-1), path)
    values = {
        loaded["value"],
        *torch.cat([tensor.flatten() for tensor in loaded["tensors"]]).tolist(),
    }
    assert len(values) == 1, f"{path} is a mixture"
    return loaded["value"]


LEFT = "shard-00009-model-00001-of-00001.safetensors"
"""The name of a file of an earlier save, of more ranks."""


@ROUNDS
@pytest.mark.parametrize("before", ["nothing", "empty directory", "unfinished"])
def test_one_of_two_savers_wins(before, rounds, tmp_path):
    for i in range(rounds):
        if before != "nothing":
            (tmp_path / f"round_{i}").mkdir()
        if before == "unfinished":
            (tmp_path / f"round_{i}" / "tensors").mkdir()
            (tmp_path / f"round_{i}" / "tensors" / LEFT).write_bytes(b"of an earlier save")
    with launched(save_many_times, 2, str(tmp_path), False, rounds, backend=None) as launch:
        let_them_meet(launch, rounds)
        errors = launch.values()
    for i, both in enumerate(zip(*errors, strict=True)):
        (error,) = [error for error in both if error is not None]
        assert isinstance(error, CheckpointExistsError), error
        assert str(tmp_path / f"round_{i}") in str(error)
        assert value_in(str(tmp_path / f"round_{i}")) == both.index(None)
    left = [name for name in os.listdir(tmp_path) if not name.startswith("round_")]
    assert len(left) == (rounds if before == "unfinished" else 0), left
    for name in left:
        assert ".incomplete-" in name
        assert (tmp_path / name / "tensors" / LEFT).read_bytes() == b"of an earlier save"


@ROUNDS
@pytest.mark.parametrize("before", ["nothing", "a checkpoint"])
def test_savers_that_overwrite_both_succeed(before, rounds, tmp_path):
    if before == "a checkpoint":
        for i in range(rounds):
            distckpt.save(many_tensors(7), str(tmp_path / f"round_{i}"))
    with launched(save_many_times, 2, str(tmp_path), True, rounds, backend=None) as launch:
        let_them_meet(launch, rounds)
        assert launch.values() == [[None] * rounds] * 2
    for i in range(rounds):
        assert value_in(str(tmp_path / f"round_{i}")) in (0, 1)
    assert sorted(os.listdir(tmp_path)) == sorted(f"round_{i}" for i in range(rounds))


# --- Readers --------------------------------------------------------------------------------------

NUM_FILES = 24


def scattered(value):
    """Return a state dict whose tensor is stored in many files, so that it is not read at one
    moment.
    """
    columns = [torch.full((8, 3), float(value)) for _ in range(NUM_FILES)]
    shards = [
        ShardedTensor.from_rank_offsets("w", c, (1, i, NUM_FILES)) for i, c in enumerate(columns)
    ]
    return {"columns": shards, "object": ShardedObject("object", value, (1,), (0,)), "value": value}


def read_all(path, **options):
    """Load everything and return all distinct values; checksums are left out, so that they cannot
    tell.
    """
    loaded = distckpt.load(scattered(-1), path, verify=False, **options)
    return {*torch.cat(loaded["columns"]).flatten().tolist(), loaded["object"], loaded["value"]}


def read_tensors(path):
    return set(distckpt.megatron.serialization.load_plain_tensors(path)["w"].flatten().tolist())


def read_common_state(path):
    assert "w" in distckpt.megatron.serialization.load_sharded_metadata(path)
    return {distckpt.megatron.serialization.load_common_state_dict(path)["value"]}


def read_to_verify(path):
    assert distckpt.verify(path).problems == ()
    return {-1}


READERS = [read_all, read_tensors, read_common_state, read_to_verify]


class Once:
    """Does something when it is called for the first time; who calls meanwhile waits."""

    def __init__(self, action):
        self._action, self._lock = action, threading.Lock()

    def __call__(self, *unused):
        with self._lock:
            action, self._action = self._action, lambda: None
            as_another_program(action)


@pytest.mark.parametrize("verify", [True, False])
def test_a_load_that_is_overtaken_by_an_overwriting_save(verify, tmp_path, caplog):
    path = str(tmp_path / "checkpoint")
    distckpt.save(scattered(1), path)
    overwrite = Once(lambda: distckpt.save(scattered(2), path, overwrite=True))
    loaded = distckpt.load(scattered(-1), path, verify=verify, progress=overwrite)
    assert set(torch.cat(loaded["columns"]).flatten().tolist()) == {2}
    assert (loaded["object"], loaded["value"]) == (2, 2)
    assert "was overwritten while it was read" in caplog.text


def test_a_load_that_is_overtaken_by_one_of_another_shape(tmp_path):
    path = str(tmp_path / "checkpoint")
    distckpt.save(scattered(1), path)
    other = {"v": ShardedTensor.from_rank_offsets("v", torch.ones(3))}
    overwrite = Once(lambda: distckpt.save(other, path, overwrite=True))
    with pytest.raises(LoadMismatchError, match="'w'"):
        distckpt.load(scattered(-1), path, progress=overwrite)


def test_a_load_that_is_always_overtaken_gives_up(tmp_path):
    path = str(tmp_path / "checkpoint")
    distckpt.save(scattered(0), path)
    values = itertools.count(1)
    lock = threading.Lock()

    def overwrite(num_bytes, total_bytes):
        del num_bytes, total_bytes
        with lock:
            state = {"w": scattered(next(values))["columns"][:1]}
            as_another_program(
                distckpt.save, state, path, overwrite=True, validate_access_integrity=False
            )

    column = ShardedTensor(
        "w", torch.zeros(8, 3), torch.float32, (8, 3), (8, 3 * NUM_FILES), (0, 0), None
    )
    with pytest.raises(CheckpointingException, match=r"was overwritten .* times"):
        distckpt.load({"w": column}, path, progress=overwrite)


def load_while_overwritten(rank, path):
    """Rank 1 overwrites when it has read something; both must load the new one."""
    overwrite = Once(lambda: distckpt.save(scattered(2), path, overwrite=True, process_group=alone))
    alone = [torch.distributed.new_group([member]) for member in (0, 1)][rank]
    halves = scattered(-1)
    mine = {
        **halves,
        "columns": halves["columns"][rank * NUM_FILES // 2 : (rank + 1) * NUM_FILES // 2],
    }
    mine["object"] = ShardedObject("object", None, (1,), (0,), replica_id=rank)
    loaded = distckpt.load(mine, path, verify=False, progress=overwrite if rank == 1 else None)
    return {*torch.cat(loaded["columns"]).flatten().tolist(), loaded["object"], loaded["value"]}


def test_all_ranks_load_the_same_one(tmp_path):
    path = str(tmp_path / "checkpoint")
    distckpt.save(scattered(1), path)
    assert run(load_while_overwritten, 2, path) == [{2}, {2}]


def test_an_export_that_is_overtaken_is_not_committed(tmp_path):
    path = str(tmp_path / "checkpoint")
    distckpt.save(scattered(1), path)
    overwrite = Once(lambda: distckpt.save(scattered(2), path, overwrite=True))
    with pytest.raises(CheckpointingException, match="was replaced after it was opened"):
        distckpt.consolidate(path, tmp_path / "export", verify=False, progress=overwrite)
    assert os.listdir(tmp_path) == ["checkpoint"]


def overwrite_or_read(rank, path, done, rounds):
    """Rank 0 overwrites again and again; the others read meanwhile, and count what they see."""
    if rank == 0:
        for value in range(1, rounds + 1):
            distckpt.save(scattered(value), path, overwrite=True, durable=False)
        return Path(done).touch()
    read, seen = READERS[rank - 1], Counter()
    is_done = False
    while not is_done:
        is_done = os.path.exists(done)  # once more, since a busy machine may start this rank late
        seen[tuple(read(path))] += 1
    return seen


@pytest.mark.parametrize("rounds", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_readers_while_it_is_overwritten(rounds, tmp_path):
    path = str(tmp_path / "checkpoint")
    distckpt.save(scattered(0), path)
    seen = run(
        overwrite_or_read, 1 + len(READERS), path, str(tmp_path / "done"), rounds, backend=None
    )[1:]
    for read, values in zip(READERS, seen, strict=True):
        assert {len(together) for together in values} == {1}, (read, values)
    assert read_all(path) == {rounds}
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "done"]


def save_or_look(rank, folder, done, rounds):
    """Rank 0 saves to new places; rank 1 reads them as soon as they are there: absent, then
    whole.
    """
    if rank == 0:
        for i in range(rounds):
            distckpt.save(scattered(i), f"{folder}/round_{i}", durable=False)
        return Path(done).touch()
    seen = []
    for i in range(rounds):
        path = f"{folder}/round_{i}"
        while True:
            try:
                seen.append(read_all(path))
                break
            except CheckpointNotFoundError:
                assert not os.path.exists(done) or os.path.exists(path)
    return seen


@pytest.mark.parametrize("rounds", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_a_reader_during_a_first_save(rounds, tmp_path):
    _, seen = run(save_or_look, 2, str(tmp_path), str(tmp_path / "done"), rounds, backend=None)
    assert seen == [{i} for i in range(rounds)]


def save_steps_or_read(rank, root, done, rounds):
    """Rank 0 saves steps of which two are kept; rank 1 loads the newest, which may be removed under
    its hands.
    """
    if rank == 0:
        with CheckpointManager(root, keep_last=2, durable=False) as manager:
            for step in range(1, rounds + 1):
                manager.save(step, scattered(step))
        return Path(done).touch()
    manager, seen = CheckpointManager(root), []
    is_done = False
    while not is_done:
        is_done = os.path.exists(done)  # once more, since a busy machine may start this rank late
        steps = manager.steps()
        try:
            seen += [(step, read_all(manager.location(step))) for step in steps]
        except CheckpointNotFoundError as error:
            seen.append((None, str(error)))
    return seen


@pytest.mark.parametrize("rounds", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_a_reader_while_steps_are_pruned(rounds, tmp_path):
    _, seen = run(
        save_steps_or_read, 2, str(tmp_path / "run"), str(tmp_path / "done"), rounds, backend=None
    )
    whole = [(step, values) for step, values in seen if step is not None]
    assert whole
    assert all(values == {step} for step, values in whole)


def test_a_step_that_is_pruned_while_it_is_read(tmp_path):
    path = tmp_path / "step"
    distckpt.save(scattered(1), path)
    prune = Once(lambda: shutil.rmtree(path, ignore_errors=True))
    with pytest.raises(CheckpointNotFoundError, match="was removed while it was being read"):
        distckpt.load(scattered(-1), path, progress=prune)


def test_a_manager_loads_what_is_newest_when_a_step_is_pruned_while_it_is_read(tmp_path):
    def save(step, **settings):
        with CheckpointManager(tmp_path, async_save=False, **settings) as manager:
            manager.save(step, scattered(step))

    save(1)
    save(2)
    manager = CheckpointManager(tmp_path)
    loaded = manager.load(scattered(-1), progress=Once(lambda: save(3, keep_last=1)))
    assert {
        *torch.cat(loaded["columns"]).flatten().tolist(),
        loaded["object"],
        loaded["value"],
    } == {3}
    assert "it was removed" in manager.skipped[2]


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
    assert distckpt.open(path).common_state == {"who": winner}
    assert set(distckpt.open(path).read_tensors()["w"].flatten().tolist()) == {float(winner)}
    assert os.listdir(tmp_path) == ["checkpoint"]

"""Saves of a job that has loaded a checkpoint: they are those of a job that has not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distckpt
from distckpt import CheckpointManager, PerRank, ShardedObject, ShardedTensor
from tests.support.harness import error_of, launched, run
from tests.support.reference import fsdp2_trains
from tests.support.sampling import one_in


def values_of(key, shape, value):
    """Return the whole tensor that a checkpoint of `value` holds under a key."""
    numbers = np.arange(int(np.prod(shape)), dtype=np.float32) * value + len(key)
    return torch.from_numpy(numbers.reshape(shape))


def state_of(rank, num_ranks, value):
    """Return a state of all kinds of shards; those of one rank differ from those of another."""

    def rows(key, num_rows, columns):
        whole = values_of(key, (num_rows, columns), value)
        part = whole.tensor_split(num_ranks)[rank].clone()
        first = sum(len(each) for each in whole.tensor_split(num_ranks)[:rank])
        return ShardedTensor(
            key, part, part.dtype, tuple(part.shape), tuple(whole.shape), (first, 0), None
        )

    def copied(key, *shape):
        return ShardedTensor.from_rank_offsets(
            key, values_of(key, shape, value).clone(), replica_id=rank
        )

    flat_shape = (5, 7)
    flat = values_of("flat", flat_shape, value).reshape(-1)
    first, last = rank * 35 // num_ranks, (rank + 1) * 35 // num_ranks
    state = {
        # Of 3 rows, some ranks have none.
        "few": rows("few", 3, 4),
        "rows": rows("rows", 17, 8),
        "flat": ShardedTensor(
            "flat",
            flat[first:last].clone(),
            flat.dtype,
            flat_shape,
            flat_shape,
            (0, 0),
            None,
            flattened_range=slice(first, last),
        ),
        "copied": copied("copied", 3000, 3),
        "small": copied("small", 2),
        "scalar": copied("scalar"),
        "empty": copied("empty", 0, 4),
        "objects": ShardedObject("objects", {"value": value}, (num_ranks,), (rank,)),
        "own": PerRank({"seed": 10 * value + rank}),
        "step": value,
    }
    tied = copied("tied", 6, 2)
    state["tied"], state["tie"] = (
        tied,
        ShardedTensor.from_rank_offsets("tie", tied.data, replica_id=rank),
    )
    return state


SHAPES = {
    "few": (3, 4),
    "rows": (17, 8),
    "flat": (5, 7),
    "copied": (3000, 3),
    "small": (2,),
    "scalar": (),
    "empty": (0, 4),
    "tied": (6, 2),
}


def check(path, value):
    """Compare a whole checkpoint, read by one process, with what was to be saved."""
    loaded = distckpt.open(path).read_tensors()
    for key, shape in SHAPES.items():
        expected = values_of(key, shape, value)
        np.testing.assert_array_equal(loaded[key].numpy(), expected.numpy(), key)
    np.testing.assert_array_equal(loaded["tie"].numpy(), loaded["tied"].numpy())
    assert distckpt.open(path).common_state["step"] == value
    assert distckpt.verify(path).is_whole


def files_of(path):
    root = Path(path)
    return {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file()}


def save(rank, num_ranks, value, path, loads=None, **options):
    """Load a checkpoint, and save another one; return whether the plan was reused."""
    state = state_of(rank, num_ranks, value)
    if loads is not None:
        distckpt.load(state_of(rank, num_ranks, 0), loads)
    return distckpt.save(state, path, **options).plan_reused


@pytest.mark.parametrize("num_ranks", one_in(2, [2, 4, 8]))
def test_it_writes_the_bytes_of_a_save_without_a_load(tmp_path, num_ranks):
    first, second, alone = (str(tmp_path / name) for name in ("first", "second", "alone"))
    assert not any(run(save, num_ranks, num_ranks, 1, first))
    assert not any(run(save, num_ranks, num_ranks, 2, second, first))
    assert not any(run(save, num_ranks, num_ranks, 2, alone))
    assert files_of(second) == files_of(alone)
    check(second, 2)


def go_on(rank, num_ranks, root):
    """Go on from the newest step of a manager, whose steps are removed meanwhile."""
    reused = []
    with CheckpointManager(root, keep_last=1) as manager:
        manager.load(state_of(rank, num_ranks, 0))
        for step in (2, 3):
            handle = manager.save(step, state_of(rank, num_ranks, step))
            reused.append(handle.result().plan_reused)
    return reused


def begin(rank, num_ranks, root):
    with CheckpointManager(root) as manager:
        return manager.save(1, state_of(rank, num_ranks, 1)).result().plan_reused


def test_a_manager_goes_on(tmp_path):
    assert run(begin, 3, 3, str(tmp_path)) == [False] * 3
    assert run(go_on, 3, 3, str(tmp_path)) == [[False, True]] * 3
    assert CheckpointManager(tmp_path).steps() == [3]
    check(tmp_path / "step_00000003", 3)


def a_sharded_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 17), nn.BatchNorm1d(17), nn.Linear(17, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "optimizer": optimizer, "rng": distckpt.RngState(), "step": 0}


def train(rank, path, loads=None):
    """Take a step, and save; return a whole weight."""
    state = a_sharded_model()
    if loads is not None:
        distckpt.load(state, loads)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    state["model"](inputs).square().sum().backward()
    state["optimizer"].step()
    distckpt.save(state, path)
    return state["model"][0].weight.full_tensor().detach()


@fsdp2_trains
def test_a_training_job_goes_on(tmp_path):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run(train, 2, first)
    for weight in run(train, 2, second, first):
        assert torch.equal(distckpt.open(second).read_tensors()["0.weight"], weight)


def test_overlapping_shards_are_refused(tmp_path):
    run(save, 3, 3, 1, str(tmp_path / "first"))
    for error in run(overlap, 3, 3, str(tmp_path / "second"), str(tmp_path / "first")):
        assert isinstance(error, distckpt.InvalidShardingError)
        assert "'rows'" in str(error)
    assert not (tmp_path / "second").exists()


def overlap(rank, num_ranks, path, loads):
    distckpt.load(state_of(rank, num_ranks, 0), loads)
    state = state_of(rank, num_ranks, 2)
    if rank == 1:
        state["rows"] = state_of(0, num_ranks, 2)["rows"]
    return error_of(distckpt.save, state, path)


def drift(rank, num_ranks, path, loads, key):
    distckpt.load(state_of(rank, num_ranks, 0), loads)
    state = state_of(rank, num_ranks, 2)
    if rank == num_ranks - 1:
        state[key].data.view(-1)[:1] += 1e-3
    return distckpt.save(state, path).plan_reused


@pytest.mark.parametrize("key", ["copied", "small", "scalar"])
def test_replicas_that_have_drifted_since_are_found(tmp_path, key):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run(save, 3, 3, 1, first)
    with launched(drift, 3, 3, second, first, key) as ranks:
        assert ranks.values() == [False] * 3
        (warning,) = ranks.outcomes()[0].warnings_logged
    assert "replicas differ" in warning
    assert repr(key) in warning
    check(second, 2)

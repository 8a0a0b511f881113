"""The first save of a job that has loaded a checkpoint of the same structure: it uses the plan of
that checkpoint, and falls back to planning wherever that does not fit.
"""

from __future__ import annotations

import re
from collections import Counter
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
from distckpt._format import manifest, manifest_parts
from distckpt._plan import layout
from distckpt._state import validation
from tests.support.collectives import counted_collectives
from tests.support.harness import error_of, launched, run
from tests.support.reference import fsdp2_trains
from tests.support.s3_server import FaultyProxy, reached_at
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
def test_it_writes_the_bytes_of_a_save_that_was_planned(tmp_path, num_ranks):
    first, second, planned = (str(tmp_path / name) for name in ("first", "second", "planned"))
    assert not any(run(save, num_ranks, num_ranks, 1, first))
    assert all(run(save, num_ranks, num_ranks, 2, second, first))
    assert not any(run(save, num_ranks, num_ranks, 2, planned))
    assert files_of(second) == files_of(planned)
    check(second, 2)
    # A job that goes on from there.
    third = str(tmp_path / "third")
    assert all(run(save, num_ranks, num_ranks, 3, third, second))
    check(third, 3)


def count_collectives(rank, num_ranks, folder):
    """Return the collectives of the first save after a load, and of the next one."""
    distckpt.load(state_of(rank, num_ranks, 0), f"{folder}/first")
    counts = []
    with counted_collectives() as calls:
        for value in (2, 3):
            calls.clear()
            distckpt.save(state_of(rank, num_ranks, value), f"{folder}/{value}")
            counts.append(dict(calls))
    return counts


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_it_makes_four_collectives(tmp_path, num_ranks):
    run(save, num_ranks, num_ranks, 1, f"{tmp_path}/first")
    for counts in run(count_collectives, num_ranks, num_ranks, str(tmp_path)):
        assert counts == [{"gather": 2, "broadcast": 2}] * 2
    for value in (2, 3):
        check(f"{tmp_path}/{value}", value)


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
    assert run(go_on, 3, 3, str(tmp_path)) == [[True, True]] * 3
    assert CheckpointManager(tmp_path).steps() == [3]
    check(tmp_path / "step_00000003", 3)


def overwrite_in_the_background(rank, num_ranks, path):
    distckpt.load(state_of(rank, num_ranks, 0), path)
    handle = distckpt.async_save(state_of(rank, num_ranks, 2), path, overwrite=True)
    return handle.result().plan_reused


def test_it_takes_the_place_of_what_was_loaded(tmp_path):
    path = str(tmp_path / "c")
    run(save, 3, 3, 1, path)
    assert all(run(overwrite_in_the_background, 3, 3, path))
    check(path, 2)


def save_large(rank, num_ranks, value, path, loads=None):
    manifest.MAX_BLOCKS, manifest_parts.PART_ROWS = 0, 1
    return save(rank, num_ranks, value, path, loads)


def test_with_checksums_beside_the_shards_and_a_divided_manifest(tmp_path):
    first, second, planned = (str(tmp_path / name) for name in ("first", "second", "planned"))
    run(save_large, 3, 3, 1, first)
    assert all(run(save_large, 3, 3, 2, second, first))
    run(save_large, 3, 3, 2, planned)
    assert files_of(second) == files_of(planned)
    check(second, 2)


def save_on_a_store(rank, num_ranks, url, value, location, loads=None, forgets=False):
    with reached_at(url):
        if loads is not None:
            distckpt.load(state_of(rank, num_ranks, 0), loads)
        if forgets:
            layout.loaded_plans.clear()
        return distckpt.save(state_of(rank, num_ranks, value), location).plan_reused


def test_on_an_object_store_it_makes_the_requests_of_any_save(server, bucket):
    run(save_on_a_store, 2, 2, server, 1, f"{bucket}/first")
    made = []
    for value, forgets in ((2, True), (3, False)):
        proxy = FaultyProxy(server)
        with proxy.running() as url:
            location = f"{bucket}/saved-{value}"
            args = (2, url, value, location, f"{bucket}/first", forgets)
            assert run(save_on_a_store, 2, *args) == [not forgets] * 2
        names = [re.sub(r"[0-9a-f]{16}", "", request) for request in proxy.requests]
        made.append(Counter(name.replace(f"saved-{value}", "saved") for name in names))
        check(location, value)
    assert made[0] == made[1]


def a_sharded_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 17), nn.BatchNorm1d(17), nn.Linear(17, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "optimizer": optimizer, "rng": distckpt.RngState(), "step": 0}


def train(rank, path, loads=None):
    """Take a step, and save; return whether the plan was reused, and a whole weight."""
    state = a_sharded_model()
    if loads is not None:
        distckpt.load(state, loads)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    state["model"](inputs).square().sum().backward()
    state["optimizer"].step()
    reused = distckpt.save(state, path).plan_reused
    return reused, state["model"][0].weight.full_tensor().detach()


@fsdp2_trains
def test_a_training_job_goes_on(tmp_path):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run(train, 2, first)
    for reused, weight in run(train, 2, second, first):
        assert reused
        assert torch.equal(distckpt.open(second).read_tensors()["0.weight"], weight)


# --- What does not fit ----------------------------------------------------------------------------


def change_one_rank(rank, num_ranks, path, loads):
    state = state_of(rank, num_ranks, 2)
    if rank == num_ranks - 1:
        state["extra"] = ShardedTensor.from_rank_offsets("extra", torch.arange(5.0))
    distckpt.load(state_of(rank, num_ranks, 0), loads)
    return distckpt.save(state, path).plan_reused


def move_rows(rank, num_ranks, path, loads):
    """Let ranks hold the rows of each other."""
    distckpt.load(state_of(rank, num_ranks, 0), loads)
    state = state_of(rank, num_ranks, 2)
    state["rows"] = state_of(num_ranks - 1 - rank, num_ranks, 2)["rows"]
    return distckpt.save(state, path).plan_reused


def change_planning(rank, num_ranks, path, loads):
    layout.PLAN_VERSION += 1
    return save(rank, num_ranks, 2, path, loads)


def untie(rank, num_ranks, path, loads):
    distckpt.load(state_of(rank, num_ranks, 0), loads)
    state = state_of(rank, num_ranks, 2)
    state["tie"].data = state["tied"].data.clone()
    return distckpt.save(state, path).plan_reused


@pytest.mark.parametrize("change", [change_one_rank, move_rows, change_planning, untie])
def test_another_structure_is_planned(tmp_path, change):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run(save, 3, 3, 1, first)
    assert run(change, 3, 3, second, first) == [False] * 3
    check(second, 2)


def save_with_fewer_ranks(rank, num_ranks, path, loads):
    state = state_of(rank, num_ranks, 0)
    # Objects of ranks cannot be divided otherwise.
    del state["objects"], state["own"]
    distckpt.load(state, loads)
    return distckpt.save(state, path).plan_reused


def test_another_number_of_ranks_loads_and_plans(tmp_path):
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    run(save, 3, 3, 1, first)
    assert all(run(save, 3, 3, 2, second, first))
    assert run(save_with_fewer_ranks, 2, 2, third, second) == [False] * 2
    check(third, 2)


def test_other_overlapping_shards_are_still_refused(tmp_path):
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


# --- Replicas -------------------------------------------------------------------------------------


def begin_comparing_few(rank, num_ranks, path):
    """Save with a plan of which repeated saves compare only a part of the replicas."""
    validation.MAX_COMPARED = 1
    return save(rank, num_ranks, 1, path)


def drift(rank, num_ranks, path, loads, key, validate_replicas):
    distckpt.load(state_of(rank, num_ranks, 0), loads)
    state = state_of(rank, num_ranks, 2)
    if rank == num_ranks - 1:
        state[key].data.view(-1)[:1] += 1e-3
    try:
        report = distckpt.save(state, path, validate_replicas=validate_replicas)
    except distckpt.InvalidShardingError as error:
        return str(error)
    return report.plan_reused


@pytest.mark.parametrize("key", ["copied", "small", "scalar"])
def test_replicas_that_have_drifted_since_are_found(tmp_path, key):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run(begin_comparing_few, 3, 3, first)
    with launched(drift, 3, 3, second, first, key, None) as ranks:
        assert ranks.values() == [False] * 3
        (warning,) = ranks.outcomes()[0].warnings_logged
    assert "replicas differ" in warning
    assert repr(key) in warning
    check(second, 2)


def test_all_of_replicas_is_compared_on_demand(tmp_path):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run(save, 3, 3, 1, first)
    for text in run(drift, 3, 3, second, first, "small", True):
        assert "'small'" in text
        assert "differs between rank 0 and rank 2" in text


def test_replicas_are_not_compared_if_nobody_wants_it(tmp_path):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run(save, 3, 3, 1, first)
    assert run(drift, 3, 3, second, first, "small", False) == [True] * 3


def save_drifted(rank, num_ranks, path):
    state = state_of(rank, num_ranks, 1)
    if rank == num_ranks - 1:
        state["small"].data[0] += 1e-3
    return distckpt.save(state, path).plan_reused


def test_a_plan_for_replicas_that_differ_is_not_used_again(tmp_path):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run(save_drifted, 3, 3, first)
    assert run(save, 3, 3, 2, second, first) == [False] * 3
    check(second, 2)

"""Saves of so many shards that several ranks plan them; here, of more than a few."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal

import pytest
import torch

import distckpt
from distckpt import ShardedObject, ShardedTensor
from distckpt._io.divided.plan import PartPlanning
from distckpt.cli import main
from tests.support.divided import plan_on_ranks
from tests.support.harness import launched
from tests.support.manifests import set_limits

NUM_KEYS = 12


def value_of(key: int) -> torch.Tensor:
    return torch.arange(64 * 5, dtype=torch.float32).reshape(64, 5) + 1000 * key


def state_of(rank, num_ranks, drift=0.0):
    """Rows of some tensors, others on all ranks or on one, a tied one, and an object."""
    rows = 64 // num_ranks
    state = {}
    for number in range(NUM_KEYS):
        key, whole = f"k{number}", value_of(number)
        if number % 3 == 0:
            own = whole[rank * rows :][:rows].clone()
            state[key] = ShardedTensor.from_rank_offsets(key, own, (0, rank, num_ranks))
        elif number % 3 == 1:
            state[key] = ShardedTensor.from_rank_offsets(key, whole + drift, replica_id=rank)
        elif rank == number:
            state[key] = ShardedTensor.from_rank_offsets(key, whole)
    copy = state["k1"].data
    state["tied"] = ShardedTensor.from_rank_offsets("tied", copy, replica_id=rank)
    state["object"] = ShardedObject("object", {"rank": rank}, (num_ranks,), (rank,))
    return state


def save(rank, num_ranks, path, shards_of_planner, with_parts):
    plan_on_ranks(shards_of_planner)
    # Of more blocks than that, planners make parts of the manifest.
    set_limits(pytest.MonkeyPatch(), 0 if with_parts else 1 << 16, 1 << 20)
    state = state_of(rank, num_ranks)
    reports = [distckpt.save(state, path, overwrite=True, durable=False) for _ in range(2)]
    return [report.plan_reused for report in reports]


def load(rank, num_ranks, path):
    """Load everything on all ranks."""
    stored = [number for number in range(NUM_KEYS) if number % 3 < 2 or number < num_ranks]
    whole = {
        f"k{number}": ShardedTensor.from_rank_offsets(
            f"k{number}", torch.zeros(64, 5), replica_id=rank
        )
        for number in stored
    }
    whole["tied"] = ShardedTensor.from_rank_offsets("tied", torch.zeros(64, 5), replica_id=rank)
    whole["object"] = ShardedObject("object", None, (num_ranks,), (rank,))
    loaded = distckpt.load(whole, path)
    assert loaded["object"] == {"rank": rank}
    assert torch.equal(loaded["tied"], value_of(1))
    return all(torch.equal(loaded[f"k{i}"], value_of(i)) for i in stored)


def shards_at(path):
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob("*.safetensors")
        if "manifest" not in file.name and "chunks" not in file.name
    }


@pytest.mark.parametrize(
    ("num_ranks", "with_parts"),
    [
        (16, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(16, False), (32, True)]),
    ],
)
def test_shards_are_the_same_for_any_number_of_planners(num_ranks, with_parts, run, tmp_path):
    # Each rank has 10 shards, and 4 of them one more.
    num_shards = num_ranks * 10 + 4
    for num_planners in (2, 5):
        path = str(tmp_path / str(num_planners))
        reused = run(save, num_ranks, num_ranks, path, -(-num_shards // num_planners), with_parts)
        assert reused == [[False, True]] * num_ranks
    assert shards_at(tmp_path / "2") == shards_at(tmp_path / "5")
    assert distckpt.verify(tmp_path / "2").is_whole
    parts = sorted(file.name for file in (tmp_path / "5" / "objects").glob("chunks-*"))
    assert parts == [f"chunks-0000{number}.safetensors" for number in range(1, 6 * with_parts)]
    assert all(run(load, num_ranks, num_ranks, str(tmp_path / "5")))


def go_on(rank, num_ranks, path, loads, with_parts):
    """Load a checkpoint as a new job does, and save the same structure twice."""
    plan_on_ranks(10)
    set_limits(pytest.MonkeyPatch(), 0 if with_parts else 1 << 16, 1 << 20)
    distckpt.load(state_of(rank, num_ranks), loads)
    state = state_of(rank, num_ranks)
    reports = [distckpt.save(state, path, overwrite=True, durable=False) for _ in range(2)]
    return [report.plan_reused for report in reports]


def plan_of(path):
    """Return what is known of the chunks of each key, and the parts of the manifest."""
    chunks = []
    for key in [*distckpt.open(path).tensors, *distckpt.open(path).objects]:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            assert main(["inspect", str(path), "--key", key, "--json"]) == 0
        chunks.append(json.loads(shown.getvalue()))
    parts = {file.name: file.read_bytes() for file in (path / "objects").glob("chunks-*")}
    return chunks, parts


@pytest.mark.parametrize("with_parts", [True, False])
def test_the_next_job_makes_the_same_plan(with_parts, run, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(save, 4, 4, str(first), 10, with_parts) == [[False, True]] * 4
    assert run(go_on, 4, 4, str(second), str(first), with_parts) == [[False, True]] * 4
    assert shards_at(second) == shards_at(first)
    assert plan_of(second) == plan_of(first)
    assert distckpt.verify(second).is_whole
    assert all(run(load, 4, 4, str(second)))


def save_what_differs(rank, path):
    """Save replicas that have drifted apart, and look at what is stored."""
    plan_on_ranks(10)
    distckpt.save(state_of(rank, 4), path, durable=False)
    state = state_of(rank, 4, drift=1e-3 * rank)
    distckpt.save(state, path, overwrite=True, durable=False)
    with pytest.raises(distckpt.InvalidShardingError, match="differs between rank 0 and rank"):
        distckpt.save(state, path, overwrite=True, validate_replicas=True)


def test_replicas_that_differ_are_reported_or_refused(tmp_path):
    with launched(save_what_differs, 4, str(tmp_path / "c")) as launch:
        outcomes = launch.outcomes()
    assert [outcome.error for outcome in outcomes] == [None] * 4
    warned = [text for text in outcomes[0].warnings_logged if "replicas differ" in text]
    assert len(warned) == 1
    assert "'k{1,4,7,10}' (4 keys), 'tied' on rank 1, 2, 3" in warned[0]
    assert distckpt.verify(tmp_path / "c").is_whole


def refuse(rank, path):
    plan_on_ranks(10)
    state = state_of(rank, 4)
    if rank == 2:
        del state["k6"]
    with pytest.raises(distckpt.InvalidShardingError) as refused:
        distckpt.save(state, path)
    return str(refused.value)


def test_what_one_planner_refuses_all_ranks_raise(run, tmp_path):
    (text,) = set(run(refuse, 4, str(tmp_path / "c")))
    assert re.search(r"'k6'.*no rank holds element \(32, 0\)", text)
    assert not (tmp_path / "c").exists()


def die_as_planner(rank, path):
    plan_on_ranks(10)
    if rank == 1:
        begin = PartPlanning.begin

        def die(self, bundle):
            begin(self, bundle)
            os.kill(os.getpid(), signal.SIGKILL)

        PartPlanning.begin = die
    with pytest.raises(distckpt.CheckpointingException) as failed:
        distckpt.save(state_of(rank, 4), path)
    return str(failed.value)


def test_a_planner_that_is_killed_is_an_error_on_all_ranks(tmp_path):
    with launched(die_as_planner, 4, str(tmp_path / "c"), group_timeout=5.0) as launch:
        outcomes = launch.outcomes()
    assert outcomes[1] is None
    texts = [outcome.value for rank, outcome in enumerate(outcomes) if rank != 1]
    assert all(text and "rank 1" in text for text in texts), texts
    assert not (tmp_path / "c").exists()

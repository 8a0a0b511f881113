"""State that is not sharded: saved once, from rank 0, with a word about what differs on other ranks."""

from __future__ import annotations

import pytest
import torch

import distckpt
from distckpt import LocalNonpersistentObject, ShardedObject, ShardedTensor
from tests.support.harness import launched, run


def shard(rank, *, blank=False):
    return ShardedTensor.from_rank_offsets("w", torch.full((3,), -1.0 if blank else float(rank)), (0, rank, 4))


def differing_state(rank):
    return {
        "w": shard(rank),
        "step": 100,
        "schedule": {"lr": 1e-3, "seen": 5 if rank != 2 else 6},
        "history": [1, 2, 3, rank],
        "only on rank 3": {"x": 1} if rank == 3 else {},
        "tensor": torch.tensor([1.0, 2.0, float(rank == 1)]),
        "local": LocalNonpersistentObject(rank),
        "rng": ShardedObject("rng", rank, (4,), (rank,)),
    }


def save_differing(rank, path):
    state = differing_state(rank)
    distckpt.save(state, path)
    loaded = distckpt.load({"w": shard(rank, blank=True), "rng": ShardedObject("rng", None, (4,), (rank,))}, path)
    return loaded, state["schedule"]


def test_what_differs_is_named_once_and_rank_0_is_saved(tmp_path):
    with launched(save_differing, 4, str(tmp_path / "checkpoint")) as launch:
        outcomes = launch.outcomes()
    assert [outcome.error for outcome in outcomes] == [None] * 4
    first, *others = [outcome.warnings_logged for outcome in outcomes]
    assert others == [[], [], []], "one rank speaks for all"
    assert len(first) == 3
    for rank, text in enumerate(first, start=1):
        assert f"rank {rank} " in text
        assert "history" in text
        assert ("seen" in text) == (rank == 2)
        assert ("only on rank 3" in text) == (rank == 3)
        assert ("tensor" in text) == (rank == 1)
        for same in ("step", "lr", "local", "rng"):
            assert f"{same}'" not in text
    for rank, outcome in enumerate(outcomes):
        loaded, schedule_before = outcome.value
        assert torch.equal(loaded.pop("w"), torch.full((3,), float(rank)))
        assert torch.equal(loaded.pop("tensor"), torch.tensor([1.0, 2.0, 0.0]))
        assert loaded == {
            "step": 100,
            "schedule": {"lr": 1e-3, "seen": 5},
            "history": [1, 2, 3, 0],
            "only on rank 3": {},
            "rng": rank,
        }
        assert schedule_before["seen"] == (6 if rank == 2 else 5), "the state dict of the caller is as it was"


def save_quietly(rank, path, how):
    state = {"w": shard(rank), "seen": rank, "lr": 1e-3}
    if how == "not validated":
        distckpt.save(state, path, validate_access_integrity=False)
    elif how == "preprocessed":
        distckpt.save(state, path, preprocess_common_before_consistancy_check=without_seen)
    else:
        distckpt.save({**state, "seen": 0, "nan": float("nan"), "set": {"b", "a", str(how)}}, path)


def without_seen(common):
    common.pop("seen")
    return common


@pytest.mark.parametrize("how", ["not validated", "preprocessed", "equal"])
def test_no_warning_where_none_is_wanted(how, tmp_path):
    path = str(tmp_path / "checkpoint")
    with launched(save_quietly, 4, path, how) as launch:
        outcomes = launch.outcomes()
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert [outcome.warnings_logged for outcome in outcomes] == [[], [], [], []]
    common = distckpt.load_common_state_dict(path)
    # The function that prepares the comparison removed it from what is compared, not from what is saved.
    assert (common["seen"], common["lr"]) == (0, 1e-3)


def save_content_metadata(rank, path):
    metadata = {"optimizer": "fully sharded", "dp_cp_group": object()}
    distckpt.save({"w": shard(rank)}, path, content_metadata=metadata)
    return distckpt.load_content_metadata(path), sorted(metadata)


def test_content_metadata(tmp_path):
    results = run(save_content_metadata, 4, str(tmp_path / "checkpoint"))
    assert results == [({"optimizer": "fully sharded"}, ["dp_cp_group", "optimizer"])] * 4

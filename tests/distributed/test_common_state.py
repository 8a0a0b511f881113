"""State that is not sharded: saved once, from rank 0, with a word about what differs on other
ranks.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections import OrderedDict, defaultdict, deque, namedtuple

import pytest
import torch

import distckpt
import distckpt.dcp
from distckpt import LocalNonpersistentObject, ShardedObject, ShardedTensor
from tests.support.cli_command import call
from tests.support.harness import error_of, launched, run


def shard(rank, *, blank=False):
    return ShardedTensor.from_rank_offsets(
        "w", torch.full((3,), -1.0 if blank else float(rank)), (0, rank, 4)
    )


def differing_state(rank):
    return {
        "w": shard(rank),
        "step": 100,
        "schedule": {"lr": 1e-3, "seen": 5 if rank != 2 else 6},
        "history": [1, 2, 3, rank],
        "only on rank 3": {"x": 1} if rank == 3 else {},
        "tensor": torch.tensor([1.0, 2.0, 0.0]),
        "local": LocalNonpersistentObject(rank),
        "rng": ShardedObject("rng", rank, (4,), (rank,)),
    }


def save_differing(rank, path):
    state = differing_state(rank)
    distckpt.save(state, path)
    loaded = distckpt.load(
        {"w": shard(rank, blank=True), "rng": ShardedObject("rng", None, (4,), (rank,))}, path
    )
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
        for same in ("step", "lr", "local", "rng", "tensor"):
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
        assert schedule_before["seen"] == (6 if rank == 2 else 5), (
            "the state dict of the caller is as it was"
        )


def save_differing_tensors(rank, path):
    state = OrderedDict(bias=torch.zeros(2), weight=torch.full((2,), float(rank // 2)), step=rank)
    return error_of(
        distckpt.save, {"w": shard(rank), "model": state, "pair": [1, (torch.zeros(1), 2)]}, path
    )


def test_tensors_that_differ_are_refused_on_all_ranks(tmp_path):
    """One rank's would have been saved: a state dict of a rank's part of a model lost the
    others.
    """
    for error in run(save_differing_tensors, 4, str(tmp_path / "checkpoint")):
        assert isinstance(error, distckpt.InvalidShardingError)
        assert re.match(
            r"The tensors 'model.weight' differ between rank 0 and rank 2, .* Put the model",
            str(error),
        )
    assert not (tmp_path / "checkpoint").exists()


def save_drifting_tensors(rank, path):
    """Save plain tensors that drift from the second step on, and are unrelated in the last."""
    manager, results = distckpt.CheckpointManager(path), []
    for number, change in enumerate([0.0, 1e-6, 5.0]):
        ema = {"a.b": torch.ones(3, dtype=torch.bfloat16), "w": torch.linspace(1, 2, 5000)}
        ema["w"] += (rank == 1) * change
        ema["a.b"] -= (rank == 1) * change
        state = {"w": shard(rank), "ema": [ema], "seen": rank, "a.b": ema["a.b"]}
        results.append(error_of(manager.save, number, state))
    manager.close()
    refused = [str(error_of(distckpt.save, state, f"{path}_{number}")) for number in range(2)]
    return results, refused


def test_tensors_that_drift_are_those_of_rank_0(tmp_path):
    with launched(save_drifting_tensors, 4, str(tmp_path / "saved")) as launch:
        outcomes = launch.outcomes()
    for outcome in outcomes:
        results, refused = outcome.value
        assert results == [None] * 3
        for text in refused:
            assert "'ema[0].w', 'ema[0][\"a.b\"]' differ between rank 0 and rank 1, and are" in text
    assert [line for line in outcomes[1].warnings_logged if "differ between" in line] == []
    about_tensors = [line for line in outcomes[0].warnings_logged if "WARNING: the tensors" in line]
    drift, unrelated = about_tensors
    assert "the tensors 'ema[0].w' differ between rank 0 and rank 1, by up to" in drift
    assert "9.54e-07 (4.7" in drift
    assert """'["a.b"]', 'ema[0].w', 'ema[0]["a.b"]' differ""" in unrelated
    for number in range(3):
        (ema,) = distckpt.open(tmp_path / f"saved/step_0000000{number}").common_state["ema"]
        assert torch.equal(ema["w"], torch.linspace(1, 2, 5000))
        assert torch.equal(ema["a.b"], torch.ones(3, dtype=torch.bfloat16))


Pair = namedtuple("Pair", ["first", "second"])
distckpt.register_object_type(Pair, "tests.Pair")
CONTAINERS = {
    "tuple": lambda tensor: (1, tensor),
    "deque": lambda tensor: deque([1, tensor]),
    "named tuple": lambda tensor: Pair(1, tensor),
    "ordered": lambda tensor: OrderedDict(first=1, second=tensor),
    "defaultdict": lambda tensor: defaultdict(list, {1: tensor}),
    "nested": lambda tensor: deque([(tensor,)]),
}


def save_in_containers(rank, path):
    """Save a tensor in each container: equal, drifted and unrelated; then of another kind."""
    texts = {}
    for name, held in CONTAINERS.items():
        for change in (0.0, 1e-6, -9.0):
            value = held(torch.linspace(1, 2, 9) + rank * change)
            texts[name, change] = str(
                error_of(distckpt.save, {"v": value}, f"{path}_{name}{change}")
            )
    with distckpt.CheckpointManager(path) as manager:
        manager.save(0, {"v": torch.ones(2)})
        manager.save(1, {"v": torch.ones(2) if rank else torch.ones(2, dtype=torch.float64)})
        manager.save(2, {"v": torch.ones(2 + rank)})
    return texts


def test_tensors_in_containers_are_compared(tmp_path):
    with launched(save_in_containers, 2, str(tmp_path / "saved")) as launch:
        outcomes = launch.outcomes()
    for (name, change), text in outcomes[1].value.items():
        if change >= 0:
            assert text == "None", name
        else:
            assert re.match(r"The tensors 'v\S+' differ between rank 0 and rank 1", text), name
    warned = [line for line in outcomes[0].warnings_logged if "WARNING: the tensors" in line]
    drift, other = warned[: len(CONTAINERS)], warned[len(CONTAINERS) :]
    for name, text in zip(CONTAINERS, drift, strict=True):
        assert re.search("the tensors 'v.+' differ between rank 0 and rank 1, by up to", text), name
    for text in other:
        assert "the tensors 'v' differ between rank 0 and rank 1 in shape or dtype" in text
        assert "inf" not in text
    assert len(other) == 2


def save_many_tensors(rank, path, change):
    """Save hundreds of plain tensors, of which each rank but the first has changed its own."""
    ema = {f"{name}{i}": torch.linspace(1, 2, 9) for name in "ab" for i in range(300)}
    for i in range(300 if rank else 0):
        ema[f"{'_ab'[rank]}{i}"] += change
    return error_of(distckpt.save, {"ema": ema}, path)


def test_hundreds_of_tensors_drift_on_each_rank_in_others(tmp_path):
    with launched(save_many_tensors, 3, str(tmp_path / "saved"), 1e-6) as launch:
        outcomes = launch.outcomes()
    assert [outcome.value for outcome in outcomes] == [None] * 3
    drift = [line for line in outcomes[0].warnings_logged if "WARNING: the tensors" in line]
    assert len(drift) == 2
    assert "'ema.b{0..299}' (300 keys) differ between rank 0 and rank 2, by up to" in drift[1]
    assert torch.equal(
        distckpt.open(tmp_path / "saved").common_state["ema"]["b299"], torch.linspace(1, 2, 9)
    )


def test_hundreds_of_tensors_without_anything_in_common(run, tmp_path):
    for error in run(save_many_tensors, 3, str(tmp_path / "saved"), -9.0):
        assert str(error).startswith("The tensors 'ema.a{0..299}' (300 keys) differ between rank 0")


def save_quietly(rank, path, how):
    state = {"w": shard(rank), "seen": rank, "lr": 1e-3}
    if how == "not validated":
        distckpt.save(state, path, validate_access_integrity=False)
    elif how == "preprocessed":
        distckpt.megatron.save(state, path, preprocess_common_before_consistancy_check=without_seen)
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
    common = distckpt.open(path).common_state
    # The function that prepares the comparison removed it from what is compared, not from what is
    # saved.
    assert (common["seen"], common["lr"]) == (0, 1e-3)


def save_content_metadata(rank, path):
    metadata = {"optimizer": "fully sharded", "dp_cp_group": object()}
    distckpt.save({"w": shard(rank)}, path, content_metadata=metadata)
    return distckpt.open(path).metadata, sorted(metadata)


def test_content_metadata(tmp_path):
    results = run(save_content_metadata, 4, str(tmp_path / "checkpoint"))
    assert results == [({"optimizer": "fully sharded"}, ["dp_cp_group", "optimizer"])] * 4


def save_with_classes_of_its_own(rank, path):
    mode = enum.IntEnum("Mode", ["FAST"])
    position = dataclasses.make_dataclass("Position", ["epoch", "seen"])
    for cls in (mode, position):
        distckpt.register_object_type(cls, f"trainer.{cls.__name__}")
    state = {
        "w": ShardedTensor.from_rank_offsets("w", torch.ones(3)),
        "b": ShardedTensor.from_rank_offsets("b", torch.zeros(3)),
        "args": {"mode": mode.FAST, "lr": 0.5},
        "where": [position(3, torch.arange(4))],
        "object": ShardedObject("object", {"at": mode.FAST}, (1,), (0,)),
    }
    distckpt.save(state, path)


def test_classes_that_the_reader_does_not_know_are_in_nobodys_way(tmp_path, capsys):
    path, again = str(tmp_path / "checkpoint"), str(tmp_path / "again")
    run(save_with_classes_of_its_own, 1, path)
    request = {"w": ShardedTensor.from_rank_offsets("w", torch.empty(3))}
    loaded = distckpt.load({**request, "args": {"lr": 0}}, path)
    assert torch.equal(loaded["w"], torch.ones(3))
    assert loaded["args"]["lr"] == 0.5
    assert isinstance(loaded["args"]["mode"], distckpt.UnknownObject)
    (position,) = distckpt.open(path).common_state["where"]
    assert (position.name, position.state.epoch) == ("trainer.Position", 3)
    assert list(distckpt.open(path).read_tensors(["b"])) == ["b"]

    # What is asked for cannot be had, whatever is asked with.
    object_of_it = ShardedObject("object", None, (1,), (0,))
    for asked in ({"args": {"mode": 1}}, {"args": None}, {"where": [0]}, {"object": object_of_it}):
        with pytest.raises(
            distckpt.UnsupportedObjectError, match=r"name='trainer\.(Mode|Position)'"
        ):
            distckpt.load({**request, **asked}, path)
    with pytest.raises(distckpt.UnsupportedObjectError, match=r"name='trainer\.Mode'"):
        distckpt.dcp.load({"args": {"mode": 0}}, checkpoint_id=path)

    # Saved again, it is what it was.
    distckpt.save(distckpt.open(path).common_state, again)
    assert {difference.key for difference in distckpt.diff(path, again).objects} == {"object"}
    assert "registered as 'trainer.Mode'" in call(capsys, "cat", path)
    assert "registered as 'trainer.Mode'" in call(capsys, "cat", path, "object")


class FailingOnRank1:
    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        return {"rank": 0}

    def load_state_dict(self, state):
        if self.rank == 1:
            raise ValueError("not on rank 1")


def load_into_given_dicts(rank, path):
    state = {"object": FailingOnRank1(0), "w": shard(rank), "step": 7, "nested": {"list": [7]}}
    distckpt.save(state, path)
    given = {"w": shard(rank, blank=True), "step": 0, "nested": {"list": []}}
    distckpt.load(given, path)
    failing = {"object": FailingOnRank1(rank), "w": shard(rank), "step": 0, "nested": {"list": []}}
    with pytest.raises(distckpt.CheckpointingException, match="not on rank 1"):
        distckpt.load(failing, path)
    return [(d["step"], d["nested"], isinstance(d["w"], ShardedTensor)) for d in (given, failing)]


def test_given_dicts_get_the_values_on_all_ranks_or_on_none(tmp_path):
    results = run(load_into_given_dicts, 4, str(tmp_path / "checkpoint"))
    assert results == [[(7, {"list": [7]}, True), (0, {"list": []}, True)]] * 4


class Unregistered:
    pass


def save_without_some_values(rank, path):
    value = {"kept": 2, Unregistered(): 1, "sparse": torch.ones(2).to_sparse()}
    distckpt.save({"value": value, "step": 1}, path, unsupported="warn")


def test_what_a_save_leaves_out_is_named_once_by_its_own_fault(tmp_path):
    with launched(save_without_some_values, 2, str(tmp_path / "saved")) as launch:
        outcomes = launch.outcomes()
    assert [outcome.error for outcome in outcomes] == [None] * 2
    (warning,) = [text for outcome in outcomes for text in outcome.warnings_logged]
    assert "stored without 2 of its values" in warning
    assert "its class is not registered" in warning
    assert "layout torch.sparse_coo" in warning
    assert "was left out" not in warning

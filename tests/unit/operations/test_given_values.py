"""The dict that is given to `load`: its values are the stored ones afterwards."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distckpt
from distckpt import (
    InvalidShardingError,
    LoadMismatchError,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    UnsupportedObjectError,
)
from distckpt import megatron as dist_checkpointing
from tests.support.disk import flip
from tests.support.states import whole

Pair = namedtuple("Pair", "first second")


@dataclass
class Holder:
    content: Any


distckpt.register_object_type(Pair, "tests.given_values.Pair")
distckpt.register_object_type(Holder, "tests.given_values.Holder")


def shard(value=0.0):
    return ShardedTensor.from_rank_offsets("w", torch.full((3,), float(value)))


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "step_1")


class Frozen(dict):
    def __setitem__(self, key, value):
        raise TypeError("frozen")


def test_both_dicts_have_the_values_and_the_given_one_loads_again(tmp_path):
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "w": shard(1.0), "step": 100, "progress": {"epoch": 3, "seen": [1, 2]}}
    distckpt.save(state, tmp_path / "a")
    distckpt.save(
        {**state, "w": shard(2.0), "step": 200, "progress": {"epoch": 4, "seen": [1]}, "more": 1},
        tmp_path / "b",
    )
    progress = {"epoch": 0, "seen": []}
    seen = progress["seen"]
    given = {"model": model, "w": shard(), "step": 0, "progress": progress}
    kept = given["w"]
    first = distckpt.load(given, tmp_path / "a")
    assert (given["step"], given["progress"]) == (100, {"epoch": 3, "seen": [1, 2]})
    assert given["progress"] is progress
    assert progress["seen"] is seen
    assert given["w"] is kept
    assert given["model"] is model
    assert first["w"].tolist() == [1.0] * 3
    second = distckpt.load(given, tmp_path / "b")
    assert given.keys() == {"model", "w", "step", "progress"}
    assert (given["step"], progress, seen) == (200, {"epoch": 4, "seen": [1]}, [1])
    assert (first["step"], first["progress"]) == (100, {"epoch": 3, "seen": [1, 2]})
    assert (second["step"], second["more"]) == (200, 1)


def test_what_is_returned_shares_nothing_with_what_was_given(path):
    stored = {"none": {"deep": [[1], torch.zeros(2)]}, "kind": OrderedDict(a=[1])}
    distckpt.save(stored, path)
    given = {"none": None, "kind": ()}
    loaded = distckpt.load(given, path)
    given["none"]["deep"][0].append(2)
    given["none"]["deep"][1].fill_(5)
    given["kind"]["a"].append(2)
    assert loaded["none"]["deep"][0] == [1]
    assert loaded["none"]["deep"][1].tolist() == [0, 0]
    assert loaded["kind"] == OrderedDict(a=[1])


def test_a_plain_state_dict_is_filled(path):
    saved, model = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    distckpt.save({"model": saved.state_dict(), "step": 7}, path)
    state = {"model": model.state_dict(), "step": 0}
    distckpt.load(state, path)
    assert torch.equal(model.weight, saved.weight)
    assert torch.equal(model.bias, saved.bias)
    assert state["step"] == 7


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(2),
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(1).expand(3),
        torch.empty(3, device="meta"),
    ],
    ids=["shape", "dtype", "expanded", "meta"],
)
def test_a_tensor_that_cannot_be_filled_is_replaced_and_named(path, caplog, target):
    distckpt.save({"part": {"t": torch.arange(3.0)}}, path)
    given = {"part": {"t": target}}
    distckpt.load(given, path)
    assert given["part"]["t"].tolist() == [0, 1, 2]
    assert "part.t" in caplog.text
    assert "not filled" in caplog.text
    assert target.is_meta or not target.any()


@pytest.mark.parametrize(
    "held",
    [
        lambda tensor: (tensor,),
        lambda tensor: [(1, [tensor])],
        lambda tensor: Pair(tensor, 3),
        lambda tensor: deque([tensor]),
        lambda tensor: deque([[tensor]], maxlen=2),
        lambda tensor: {"queue": deque([(tensor,)])},
    ],
    ids=["tuple", "tuple in a list", "named tuple", "deque", "list in a deque", "tuple in a deque"],
)
def test_tensors_are_filled_whatever_sequence_holds_them(path, held, caplog):
    distckpt.save({"value": held(torch.arange(3.0))}, path)
    tensor = torch.zeros(3)
    state = {"value": held(tensor)}
    kept = state["value"]
    loaded = distckpt.load(state, path)
    assert tensor.tolist() == [0, 1, 2]
    assert state["value"] is kept
    assert repr(kept) == repr(loaded["value"]) == repr(held(torch.arange(3.0)))
    tensor.fill_(7)
    assert repr(loaded["value"]) == repr(held(torch.arange(3.0)))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("stored", "held"),
    [
        (SimpleNamespace(t=torch.arange(3.0)), lambda tensor: SimpleNamespace(t=tensor)),
        ([torch.arange(3.0)], lambda tensor: [torch.ones(3), tensor]),
        ((torch.arange(3.0),), lambda tensor: (torch.ones(3), tensor)),
        (deque([torch.arange(3.0)], 5), lambda tensor: deque([tensor], 6)),
        (7, lambda tensor: tensor),
    ],
    ids=["namespace", "longer list", "longer tuple", "maxlen", "number"],
)
def test_a_tensor_that_is_not_filled_is_named_whatever_holds_it(path, stored, held, caplog):
    distckpt.save({"value": stored}, path)
    tensor = torch.zeros(3)
    state = {"value": held(tensor)}
    loaded = distckpt.load(state, path)
    assert not tensor.any()
    assert repr(state["value"]) == repr(stored) == repr(loaded["value"])
    (warning,) = caplog.messages
    assert "value" in warning
    assert "not filled" in warning


def test_an_object_of_a_registered_class_is_one_value(path, caplog):
    distckpt.save({"value": Holder(torch.arange(3.0))}, path)
    state = {"value": Holder(torch.zeros(3))}
    loaded = distckpt.load(state, path)
    assert state["value"].content.tolist() == loaded["value"].content.tolist() == [0, 1, 2]
    assert caplog.text == ""


@pytest.mark.parametrize(
    "held",
    [
        lambda value: deque([value, 5]),
        lambda value: [deque([value])],
        lambda value: SimpleNamespace(inner=value),
        lambda value: Holder(value),
        lambda value: Pair(1, {"queue": deque([[value]])}),
    ],
    ids=["deque", "deque in a list", "namespace", "dataclass", "deque in a tuple"],
)
@pytest.mark.parametrize(
    "make",
    [lambda: torch.nn.Linear(2, 2), shard, lambda: torch.optim.SGD([torch.zeros(1)])],
    ids=["module", "shard", "optimizer"],
)
def test_an_object_where_none_is_looked_for_is_refused(tmp_path, path, held, make):
    refused = "in which no objects are looked for.*list, tuple or dict"
    with pytest.raises(UnsupportedObjectError, match=f"'value.*{refused}"):
        distckpt.save({"value": held(make())}, tmp_path / "refused")
    distckpt.save({"value": [5], "step": 3}, path)
    state = {"value": held(make()), "step": 0}
    with pytest.raises(UnsupportedObjectError, match=f"'value.*{refused}"):
        distckpt.load(state, path)
    assert state["step"] == 0


@dataclass
class Replica:
    """Looks like a shard."""

    key: str
    data: Any
    replica_id: int


distckpt.register_object_type(Replica, "tests.given_values.Replica")


@pytest.mark.parametrize("held", [lambda value: value, lambda value: deque([value])])
def test_a_value_that_looks_like_a_shard_is_a_value(path, held):
    distckpt.save({"value": held(Replica("k", 5, 1))}, path)
    state = {"value": held(Replica("", 0, 0))}
    distckpt.load(state, path)
    assert state["value"] == held(Replica("k", 5, 1))


def test_values_whose_types_differ_from_the_stored_ones(path):
    stored = {
        "none": {"a": 1},
        "number": [1, 2],
        "list": 5,
        "tuple": (1, (2, [3])),
        "counter": Counter("aab"),
        "plain": Counter("aab"),
        "default": defaultdict(list, {"x": [1]}),
        "ordered": {"z": 1},
        "longer": [1],
        "tensor": torch.ones(2),
    }
    distckpt.save(stored, path)
    given = {
        "none": None,
        "number": 0,
        "list": [1],
        "tuple": (0, 0),
        "counter": Counter("c"),
        "plain": {"c": 1},
        "default": defaultdict(list, {"y": [2]}),
        "ordered": OrderedDict(y=2, z=3),
        "longer": [7, 8, 9],
        "tensor": 0.0,
    }
    default = given["default"]
    loaded = distckpt.load(given, path)
    given["tensor"], tensor = 0, given["tensor"]
    assert given == {**stored, "tensor": 0}
    assert given == {**loaded, "tensor": 0}
    assert tensor.tolist() == [1, 1]
    assert {key: type(value) for key, value in given.items()} == {
        **{key: type(value) for key, value in loaded.items()},
        "ordered": OrderedDict,
        "tensor": int,
    }
    assert given["default"] is default
    assert default["new"] == []


def test_values_beside_shards_at_any_depth(path):
    def state(value):
        return {
            "outer": {
                "w": shard(value),
                "inner": {"n": value, "o": ShardedObject("o", 1, (1,), (0,))},
            },
            "list": [torch.nn.Identity(), value, [value]],
            "tuple": (LocalNonpersistentObject("mine"), {"n": value}),
        }

    distckpt.save(state(4.0), path)
    given = state(0.0)
    lists = given["list"]
    loaded = distckpt.load(given, path)
    assert given["outer"]["inner"]["n"] == 4.0
    assert isinstance(given["outer"]["w"], ShardedTensor)
    assert isinstance(given["outer"]["inner"]["o"], ShardedObject)
    assert lists[1:] == loaded["list"][-2:] == [4.0, [4.0]]
    assert given["tuple"][1] == {"n": 4.0}
    assert isinstance(given["tuple"][0], LocalNonpersistentObject)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda n: {"pair": (shard(n), n)}, "pair.1"),
        (lambda n: {"pair": Pair(shard(n), n)}, "pair.1"),
        (lambda n: {"deep": Frozen(w=shard(n), n=n)}, "deep.n"),
        (lambda n: Frozen(w=shard(n), n=n), "n"),
    ],
    ids=["tuple", "named tuple", "frozen dict", "frozen at the top"],
)
def test_what_cannot_be_changed_is_named_and_returned(path, caplog, make, name):
    distckpt.save(make(4.0), path)
    given = make(0.0)
    loaded = distckpt.load(given, path)
    found = [leaf for leaf in _leaves(loaded) if not isinstance(leaf, torch.Tensor)]
    assert found == [4.0]
    assert f"for {name!r} is in the dict that load returns" in caplog.text


def _leaves(tree):
    if not isinstance(tree, dict | tuple):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree
    return [leaf for child in children for leaf in _leaves(child)]


def test_a_frozen_dict_that_is_a_value_is_replaced(path, caplog):
    distckpt.save({"settings": {"lr": 2}}, path)
    given = {"settings": Frozen(lr=1)}
    distckpt.load(given, path)
    assert given == {"settings": {"lr": 2}}
    assert not caplog.text


def test_one_list_under_two_names(path):
    shared = [1]
    distckpt.save({"a": shared, "b": shared, "c": [2]}, path)
    one = [0]
    given = {"a": one, "b": one, "c": one}
    distckpt.load(given, path)
    assert given == {"a": [1], "b": [1], "c": [2]}
    assert given["a"] is given["b"]
    assert given["c"] is not given["a"]


def test_one_tensor_under_two_names(path, caplog):
    distckpt.save({"a": torch.ones(2), "b": torch.ones(2), "c": torch.zeros(2)}, path)
    weight = torch.full((2,), 9.0)
    given = {"a": weight, "b": weight.detach(), "c": weight}
    distckpt.load(given, path)
    assert given["a"] is weight
    assert {name: tensor.tolist() for name, tensor in given.items()} == {
        "a": [1, 1],
        "b": [1, 1],
        "c": [0, 0],
    }
    assert "the tensors 'c' of" in caplog.text


def test_what_the_checkpoint_lacks_stays(path):
    distckpt.save({"w": shard(1.0), "step": 3}, path)
    given = {
        "w": shard(),
        "step": 0,
        "epoch": 9,
        "extra": {"o": ShardedObject("o", 0, (1,), (0,)), "n": 9},
        "none": None,
    }
    distckpt.load(given, path, strict="report")
    assert (given["step"], given["epoch"], given["extra"]["n"]) == (3, 9, 9)
    assert given["none"] is None


@pytest.mark.parametrize("strict", ["complete", "raise", "report"])
def test_strict_modes_fill_alike(path, strict):
    distckpt.save({"w": shard(1.0), "step": 3}, path)
    given = {"w": shard(), "step": 0}
    distckpt.load(given, path, strict=strict)
    assert given["step"] == 3


class Refusing:
    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state):
        raise ValueError("not mine")


def test_a_load_that_fails_changes_no_value(path):
    state = {"object": Refusing(), "step": 5, "list": [5], "tensor": torch.ones(2)}
    distckpt.save(state, path)
    given = {"object": Refusing(), "step": 0, "list": [0], "tensor": torch.zeros(2)}
    with pytest.raises(distckpt.LoadMismatchError, match="not mine"):
        distckpt.load(given, path)
    assert (given["step"], given["list"], given["tensor"].tolist()) == (0, [0], [0, 0])


def test_the_manager_fills_values_of_the_step_that_loads(tmp_path):
    with distckpt.CheckpointManager(tmp_path, async_save=False) as manager:
        for step in (1, 2):
            manager.save(step, {"w": shard(step), "step": step, "list": [step]})
        damaged = next(tmp_path.glob("*2/objects/*"))
        flip(damaged, -1)
        given = {"w": shard(), "step": 0, "list": []}
        manager.load(given)
        assert manager.skipped.keys() == {2}
    assert (given["step"], given["list"]) == (1, [1])


def test_megatron_leaves_the_given_dict_alone(path):
    distckpt.save({"w": shard(1.0), "step": 3}, path)
    given = {"w": shard(), "step": 0}
    loaded = dist_checkpointing.load(given, path)
    assert (given["step"], loaded["step"]) == (0, 3)


def test_exports_of_objects_with_state_stay_objects(path):
    def state():
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"model": model, "train": {"optimizer": optimizer, "scheduler": scheduler, "n": 1}}

    distckpt.save(state(), path)
    given = state()
    objects = (given["model"], *given["train"].values())[:3]
    given["train"]["n"] = 0
    distckpt.load(given, path)
    assert all(
        a is b for a, b in zip((given["model"], *given["train"].values()), objects, strict=False)
    )
    assert given["train"]["n"] == 1


@pytest.mark.parametrize("empty", [[], {}, ()], ids=["list", "dict", "tuple"])
@pytest.mark.parametrize("value", [5, [1], {"a": 1}, (1,), OrderedDict(a=1), [], {}, ()], ids=repr)
def test_an_empty_container_gets_what_is_stored(path, empty, value):
    distckpt.save({"value": value}, path)
    given = {"value": type(empty)()}
    loaded = distckpt.load(given, path)
    assert loaded == given == {"value": value}
    assert type(loaded["value"]) is type(value)


# ---- lists that hold objects


def linear(value):
    model = torch.nn.Linear(2, 2)
    for param in model.parameters():
        param.data.fill_(value)
    return model


@pytest.mark.parametrize("make", [linear, lambda value: whole("w", torch.full((2,), value))])
def test_values_beside_an_object_in_a_list(make, tmp_path, caplog):
    distckpt.save({"list": [make(1.0), 5]}, tmp_path / "five")
    distckpt.save({"list": [make(1.0)]}, tmp_path / "none")
    state = {"list": [make(0.0), 7]}
    distckpt.load(state, tmp_path / "five")
    assert state["list"][1] == 5
    for items, name in ([7], "none"), ([7, 9], "five"):
        state = {"list": [make(0.0), *items]}
        with pytest.raises(LoadMismatchError, match=f"holds no value for 'list.{len(items)}'"):
            distckpt.load(state, tmp_path / name)
        assert state["list"][1:] == items
    # A longer list than was given is returned.
    distckpt.save({"list": [make(1.0), 5, 6]}, tmp_path / "more")
    state = {"list": [make(0.0), 7]}
    caplog.clear()
    loaded = distckpt.load(state, tmp_path / "more")
    assert (state["list"][1:], loaded["list"][1:]) == ([7], [5, 6])
    assert "'list'" in caplog.text
    assert "lists of objects that have another length" in caplog.text


@pytest.mark.parametrize("is_in_dict", [False, True])
def test_modules_of_a_list_do_not_share_what_one_was_saved_with(is_in_dict, tmp_path):
    def stage(value):
        return {"model": linear(value), "n": 1} if is_in_dict else linear(value)

    distckpt.save({"stages": [stage(1.0)]}, tmp_path / "one")
    state = {"stages": [stage(8.0), stage(9.0)]}
    with pytest.raises(InvalidShardingError, match="The same key twice: 'stages"):
        distckpt.load(state, tmp_path / "one")


def test_stages_of_a_list_may_have_copies_of_a_tensor(tmp_path):
    def stage(name, value):
        return torch.nn.ModuleDict({"embed": linear(value), name: linear(value)})

    # As pipeline ranks save them: each has one stage, and its copy of the embedding.
    whole_model = torch.nn.ModuleDict({name: linear(3.0) for name in ("embed", "first", "second")})
    distckpt.save({"model": whole_model}, tmp_path / "saved")
    stages = [stage("first", 0.0), stage("second", 0.0)]
    distckpt.load({"model": stages}, tmp_path / "saved")
    params = [param for each in stages for param in each.parameters()]
    assert all(param.unique().tolist() == [3.0] for param in params)

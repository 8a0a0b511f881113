"""What a state dict may look like: containers, plain values beside shards, factories, local
objects.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import distckpt
from distckpt import (
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    UnsupportedObjectError,
)
from distckpt._base.tree import HOLE
from distckpt._state.flatten import compact, put_together, split
from distckpt.mapping import ShardedBase


class Pair(NamedTuple):
    weight: Any
    step: Any


class Settings(dict):
    pass


def tensor(key, value, size=3):
    return ShardedTensor.from_rank_offsets(key, torch.full((size,), float(value)))


def equal(loaded, expected):
    """Compare nested values exactly: types of containers, keys with their types, tensors by
    value.
    """
    if isinstance(expected, torch.Tensor):
        return isinstance(loaded, torch.Tensor) and torch.equal(loaded, expected)
    if isinstance(expected, dict):
        typed = [(type(key), key) for key in expected]
        return (
            isinstance(loaded, dict)
            and sorted(map(str, typed)) == sorted(str((type(key), key)) for key in loaded)
            and all(equal(loaded[key], value) for key, value in expected.items())
        )
    if isinstance(expected, list | tuple):
        same_kind = type(loaded) is type(expected) and len(loaded) == len(expected)
        return same_kind and all(map(equal, loaded, expected))
    return type(loaded) is type(expected) and loaded == expected


def snapshot(node):
    """Note the identity and the content of every container and wrapper of a state dict."""
    if isinstance(node, dict):
        return id(node), type(node), [(key, snapshot(value)) for key, value in node.items()]
    if isinstance(node, list | tuple):
        return id(node), type(node), [snapshot(value) for value in node]
    if isinstance(node, ShardedBase):
        return id(node), {name: id(value) for name, value in vars(node).items()}
    return id(node)


def there_and_back(path, saved, asked=None):
    distckpt.save(saved, path)
    return distckpt.load(saved if asked is None else asked, path)


# ---- containers


def test_shards_and_plain_values_mix_in_every_container(tmp_path):
    def state(value, step):
        return {
            "list": [
                tensor("a", value),
                step,
                tensor("b", value),
                "text",
                [tensor("c", value)],
                {"d": step},
            ],
            "tuple": (tensor("e", value), step, (tensor("f", value),)),
            "nested": {"g": {"h": tensor("h", value), "i": [step, step]}, "j": [[], {}, ()]},
            "scalars": [step, None, 2.5],
        }

    loaded = there_and_back(tmp_path / "c", state(1, 7), state(0, -1))
    one = torch.ones(3)
    assert equal(
        loaded,
        {
            "list": [one, 7, one, "text", [one], {"d": 7}],
            "tuple": (one, 7, (one,)),
            "nested": {"g": {"h": one, "i": [7, 7]}, "j": [[], {}, ()]},
            "scalars": [7, None, 2.5],
        },
    )


def test_plain_values_come_back_although_only_shards_are_asked_for(tmp_path):
    saved = {"model": [tensor("a", 1), 5], "step": 7, "args": {"lr": 0.5}}
    loaded = there_and_back(tmp_path / "c", saved, {"model": [tensor("a", 0)]})
    assert equal(loaded, {"model": [torch.ones(3), 5], "step": 7, "args": {"lr": 0.5}})


def test_shards_may_be_asked_for_in_another_place(tmp_path):
    saved = {"model": {"w": tensor("a", 1)}, "step": 7}
    loaded = there_and_back(tmp_path / "c", saved, {"ema": [tensor("a", 0)], "step": "ignored"})
    assert equal(loaded, {"ema": [torch.ones(3)], "step": 7})


def test_shards_inside_tuples_and_named_tuples_are_seen(tmp_path):
    saved = {"pair": Pair(tensor("a", 1), tensor("b", 2)), "tuple": (tensor("c", 3),)}
    asked = {"pair": Pair(tensor("a", 0), tensor("b", 0)), "tuple": (tensor("c", 0),)}
    loaded = there_and_back(tmp_path / "c", saved, asked)
    assert equal(
        loaded,
        {"pair": Pair(torch.ones(3), torch.full((3,), 2.0)), "tuple": (torch.full((3,), 3.0),)},
    )
    assert distckpt.open(tmp_path / "c").common_state == {}


def test_named_tuples_may_mix_shards_and_plain_values(tmp_path):
    saved = {"pair": Pair(tensor("a", 1), 7)}
    loaded = there_and_back(tmp_path / "c", saved, {"pair": Pair(tensor("a", 0), None)})
    assert equal(loaded, {"pair": Pair(torch.ones(3), 7)})


def test_state_dict_of_a_module_is_an_ordered_dict(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    wrapped = model.state_dict()
    for name, value in wrapped.items():
        wrapped[name] = ShardedTensor.from_rank_offsets(f"model.{name}", value)
    assert isinstance(wrapped, OrderedDict)
    distckpt.save({"model": wrapped}, tmp_path / "c")
    fresh = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    asked = fresh.state_dict()
    for name, value in asked.items():
        asked[name] = ShardedTensor.from_rank_offsets(f"model.{name}", value)
    loaded = distckpt.load({"model": asked}, tmp_path / "c")["model"]
    fresh.load_state_dict(loaded)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True)
    )


def test_plain_state_dict_of_a_module_and_an_optimizer_is_common_state(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    loaded = there_and_back(
        tmp_path / "c", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, {}
    )
    assert list(loaded["model"]) == ["weight", "bias"]
    assert torch.equal(loaded["model"]["weight"], model.weight)
    assert set(loaded["optimizer"]["state"]) == {0, 1}
    torch.optim.Adam(model.parameters()).load_state_dict(loaded["optimizer"])


def test_subclasses_of_dict_and_list_hold_shards(tmp_path):
    saved = {
        "settings": Settings(w=tensor("a", 1), n=3),
        "lazy": defaultdict(list, x=[tensor("b", 2)]),
    }
    asked = {"settings": Settings(w=tensor("a", 0)), "lazy": defaultdict(list, x=[tensor("b", 0)])}
    loaded = there_and_back(tmp_path / "c", saved, asked)
    assert equal(
        loaded, {"settings": {"w": torch.ones(3), "n": 3}, "lazy": {"x": [torch.full((3,), 2.0)]}}
    )


def test_sizes_are_values_and_not_containers(tmp_path):
    shape = torch.Size([2, 3])
    loaded = there_and_back(tmp_path / "c", {"shape": shape, "list": [shape, tensor("a", 1)]})
    assert type(loaded["shape"]) is torch.Size
    assert type(loaded["list"][0]) is torch.Size


@pytest.mark.parametrize("state", [[1], (1,), None, torch.ones(1), 5], ids=repr)
def test_a_state_dict_is_a_dict(tmp_path, state):
    with pytest.raises(CheckpointingException, match="A sharded state dict is a dict"):
        distckpt.save(state, tmp_path / "c")
    distckpt.save({}, tmp_path / "c")
    with pytest.raises(CheckpointingException, match="A sharded state dict is a dict"):
        distckpt.load(state, tmp_path / "c")


def test_other_sharded_values_are_refused(tmp_path):
    class Mine(ShardedBase):
        key, data, replica_id = "mine", None, 0

        def validate_metadata_integrity(self):
            pass

        def without_data(self):
            return self

    with pytest.raises(UnsupportedObjectError, match="'mine' is a Mine"):
        distckpt.save({"a": [Mine()]}, tmp_path / "c")


# ---- names of entries


def test_names_of_entries_may_be_anything(tmp_path):
    def state(value):
        return {
            "common_state": {"mine": 1, "w": tensor("common_state", value)},
            "common": 3,
            "a/b": {"c.d": tensor("a/b.c", value), "e": 4},
            "a": {"b/c.d": 5, "b": {"c.d": 6}},
            1: {"x": tensor("int", value), 2: 7},
            "1": {"x": tensor("text", value), "2": 8},
            None: 9,
            2.5: 10,
            (1, "x"): 11,
            "": tensor("", value),
            "tensors": 12,
        }

    loaded = there_and_back(tmp_path / "c", state(1), state(0))
    one = torch.ones(3)
    assert equal(
        loaded,
        {
            "common_state": {"mine": 1, "w": one},
            "common": 3,
            "a/b": {"c.d": one, "e": 4},
            "a": {"b/c.d": 5, "b": {"c.d": 6}},
            1: {"x": one, 2: 7},
            2.5: 10,
            "1": {"x": one, "2": 8},
            None: 9,
            (1, "x"): 11,
            "": one,
            "tensors": 12,
        },
    )


def test_integers_and_their_texts_are_different_names(tmp_path):
    def state(value):
        return {"state": {1: tensor("one", value), "1": tensor("text", 2 * value), 2: 3, "2": 4}}

    loaded = there_and_back(tmp_path / "c", state(1), state(0))
    assert equal(loaded, {"state": {1: torch.ones(3), "1": torch.full((3,), 2.0), 2: 3, "2": 4}})


def test_objects_have_keys_with_slashes_and_dots(tmp_path):
    state = {
        "a": ShardedObject("x/y.z/shard_0_1", [1], (1,), (0,)),
        "b": ShardedObject("x/y.z", [2], (1,), (0,)),
    }
    distckpt.save(state, tmp_path / "c")
    asked = {name: shard.without_data() for name, shard in state.items()}
    assert distckpt.load(asked, tmp_path / "c", strict="raise") == {"a": [1], "b": [2]}
    assert distckpt.megatron.serialization.load_sharded_metadata(tmp_path / "c").keys() == {
        "x/y.z/shard_0_1",
        "x/y.z/shard_0_1/shard_0_1",
    }


def test_one_reserved_key_is_refused(tmp_path):
    for shard in (
        tensor("distckpt.common_state", 1),
        ShardedObject("distckpt.common_state", 1, (1,), (0,)),
    ):
        with pytest.raises(
            distckpt.InvalidShardingError, match=r"'distckpt\.common_state' is reserved"
        ):
            distckpt.save({"a": shard}, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_an_object_may_be_asked_for_twice(tmp_path):
    distckpt.save({"o": ShardedObject("o", [1], (1,), (0,))}, tmp_path / "c")
    asked = {name: ShardedObject("o", None, (1,), (0,)) for name in "ab"}
    loaded = distckpt.load(asked, tmp_path / "c", validate_access_integrity=False)
    assert loaded == {"a": [1], "b": [1]}


# ---- the caller's dict


def test_the_callers_dict_is_the_same_afterwards(tmp_path):
    inner = tensor("built", 1)

    def state():
        return {
            "model": OrderedDict(w=tensor("w", 1), n=3),
            "list": [tensor("a", 1), 2, LocalNonpersistentObject([3])],
            "pair": Pair(tensor("b", 1), 4),
            "factory": ShardedTensorFactory(
                "built", inner.data, lambda *_: {"x": inner}, lambda built: built["x"]
            ),
            "object": ShardedObject("o", {"a": 1}, (1,), (0,)),
            "step": 5,
        }

    saved = state()
    before = snapshot(saved)
    distckpt.save(saved, tmp_path / "c", content_metadata={"a": 1})
    assert snapshot(saved) == before
    asked = state()
    asked["empty"] = tensor("w", 0).without_data()
    asked["unknown"] = tensor("unknown", 0)
    before = snapshot(asked)
    loaded = distckpt.load(asked, tmp_path / "c", strict="report", validate_access_integrity=False)
    assert snapshot(asked) == before
    assert asked["empty"].data is None
    # Nor are the containers of the result those of the argument.
    assert loaded["list"] is not asked["list"]
    assert loaded["model"] is not asked["model"]


def test_validation_does_not_change_what_is_saved(tmp_path):
    def state():
        return {"w": tensor("w", 1), "common": {"a": [1, {"b": 2}], "t": ({"c": 3},)}}

    def forget(common):
        # Whatever the function does to its argument.
        common["common"]["a"][1].clear()
        common["common"]["t"][0].clear()
        common["common"].pop("a")
        return common

    saved = state()
    distckpt.megatron.save(saved, tmp_path / "c", preprocess_common_before_consistancy_check=forget)
    assert equal(distckpt.load({}, tmp_path / "c"), {"common": state()["common"]})
    assert saved["common"] == state()["common"]


# ---- factories


def swiglu(key, data, size=4):
    """Make a factory as for a fused gate and up projection: each half is a tensor of its own in the
    checkpoint.
    """

    def build(key, data, replica_id, flattened_range):
        halves = data.chunk(2)
        names = ("gate", "up")
        return {
            name: ShardedTensor.from_rank_offsets(f"{key}.{name}", half, replica_id=replica_id)
            for name, half in zip(names, halves, strict=True)
        }

    return ShardedTensorFactory(
        key, data, build, lambda built: torch.cat([built["gate"], built["up"]])
    )


def test_factories_store_what_they_build_and_merge_what_was_loaded(tmp_path):
    fused = torch.arange(8.0).view(4, 2)
    distckpt.save({"mlp": [swiglu("fc1", fused), 3]}, tmp_path / "c")
    stored = distckpt.open(tmp_path / "c").read_tensors()
    assert torch.equal(stored["fc1.gate"], fused[:2])
    assert torch.equal(stored["fc1.up"], fused[2:])
    loaded = distckpt.load({"mlp": [swiglu("fc1", torch.zeros(4, 2))]}, tmp_path / "c")
    assert equal(loaded, {"mlp": [fused, 3]})


def test_factories_of_two_shards_of_one_key_reshard(tmp_path):
    # Megatron's layout of a fused projection: the halves of each rank are parts `rank` and `rank +
    # n` of 2 n.
    whole = torch.arange(32.0).view(16, 2)

    def factory(local, rank, num_ranks):
        def build(key, data, replica_id, flattened_range):
            return [
                ShardedTensor.from_rank_offsets(
                    key, half, (0, part, 2 * num_ranks), replica_id=replica_id
                )
                for half, part in zip(data.chunk(2), (rank, rank + num_ranks), strict=True)
            ]

        return ShardedTensorFactory("fc1", local, build, torch.cat)

    def local_of(rank, num_ranks):
        parts = whole.chunk(2 * num_ranks)
        return torch.cat([parts[rank], parts[rank + num_ranks]])

    distckpt.save({rank: factory(local_of(rank, 4), rank, 4) for rank in range(4)}, tmp_path / "c")
    for num_ranks in (1, 2, 4, 8):
        asked = {
            rank: factory(torch.zeros(16 // num_ranks, 2), rank, num_ranks)
            for rank in range(num_ranks)
        }
        loaded = distckpt.load(asked, tmp_path / "c")
        assert all(
            torch.equal(loaded[rank], local_of(rank, num_ranks)) for rank in range(num_ranks)
        )


def test_factories_may_build_factories_and_plain_values(tmp_path):
    def outer(data):
        def build(key, data, replica_id, flattened_range):
            return {"inner": swiglu(key, data), "scale": 2}

        return ShardedTensorFactory(
            "outer", data, build, lambda built: built["inner"] * built["scale"]
        )

    distckpt.save({"w": outer(torch.ones(4))}, tmp_path / "c")
    assert torch.equal(
        distckpt.load({"w": outer(torch.zeros(4))}, tmp_path / "c")["w"], torch.full((4,), 2.0)
    )
    assert distckpt.open(tmp_path / "c").common_state == {}


def test_errors_of_a_factory_name_it(tmp_path):
    def wrong(*_):
        raise KeyError("gate")

    def build(key, data, replica_id, flattened_range):
        return {"x": ShardedTensor.from_rank_offsets(key, data)}

    def factory(build_fn, merge_fn):
        return {"f": ShardedTensorFactory("mlp.fc1", torch.ones(2), build_fn, merge_fn)}

    with pytest.raises(CheckpointingException, match=r"build_fn.*'mlp.fc1'.*KeyError: 'gate'"):
        distckpt.save(factory(wrong, wrong), tmp_path / "c")
    distckpt.save(factory(build, wrong), tmp_path / "c")
    with pytest.raises(CheckpointingException, match=r"merge_fn.*'mlp.fc1'.*KeyError: 'gate'"):
        distckpt.load(factory(build, wrong), tmp_path / "c")


def test_factories_that_are_not_stored_are_left_out(tmp_path):
    saved = {
        "a": tensor("a", 1),
        "fc1": swiglu("fc1", torch.ones(4)),
        "half of fc3": tensor("fc3.up", 1, 2),
    }
    distckpt.save(saved, tmp_path / "c")
    asked = {
        # The unexpected ones stand before others in a list, and one is half there.
        "list": [
            swiglu("fc2", torch.zeros(4)),
            swiglu("fc3", torch.zeros(4)),
            swiglu("fc1", torch.zeros(4)),
        ],
        "new": swiglu("fc4", torch.zeros(4)),
        "a": tensor("a", 0),
    }
    reports = []
    result = distckpt.load(asked, tmp_path / "c", strict="report", on_report=reports.append)
    assert reports[0].unexpected == {"fc2.gate", "fc2.up", "fc3.gate", "fc4.gate", "fc4.up"}
    assert reports[0].missing == set()
    assert equal(result, {"list": [torch.ones(4)], "a": torch.ones(3)})


@pytest.mark.parametrize("strict", ["complete", "raise"])
def test_factories_that_are_not_stored_are_errors_where_keys_must_be_there(tmp_path, strict):
    distckpt.save({"fc1": swiglu("fc1", torch.ones(4))}, tmp_path / "c")
    asked = {"fc1": swiglu("fc1", torch.zeros(4)), "fc2": swiglu("fc2", torch.zeros(4))}
    with pytest.raises(distckpt.LoadMismatchError) as caught:
        distckpt.load(asked, tmp_path / "c", strict=strict)
    assert caught.value.unexpected == {"fc2.gate", "fc2.up"}


# ---- local objects


def test_local_objects_are_not_saved_and_come_back_as_they_are(tmp_path):
    unsaveable = object()
    saved = {
        "handle": LocalNonpersistentObject(unsaveable),
        "list": [LocalNonpersistentObject(1), 2, tensor("a", 1)],
    }
    distckpt.save(saved, tmp_path / "c")
    assert distckpt.open(tmp_path / "c").common_state == {"list": [2]}
    mine = object()
    asked = {
        "handle": LocalNonpersistentObject(mine),
        "list": [LocalNonpersistentObject(3), 0, tensor("a", 0)],
    }
    loaded = distckpt.load(asked, tmp_path / "c")
    assert loaded["handle"] is mine
    assert equal(loaded["list"], [3, 2, torch.ones(3)])


def test_local_objects_take_the_place_of_saved_values(tmp_path):
    distckpt.save({"groups": {"params": [1, 2], "lr": 0.1, "map": {"a": 1}}}, tmp_path / "c")
    mine = [7]
    asked = {
        "groups": {
            "params": LocalNonpersistentObject(mine),
            "map": LocalNonpersistentObject({"b": [HOLE]}),
        }
    }
    loaded = distckpt.load(asked, tmp_path / "c")
    assert loaded == {"groups": {"params": [7], "lr": 0.1, "map": {"b": [HOLE]}}}
    assert loaded["groups"]["params"] is mine


def test_loaded_objects_take_the_place_of_saved_values(tmp_path):
    distckpt.save(
        {"o": ShardedObject("o", {"a": [1]}, (1,), (0,)), "p": {"a": [2, 3], "b": 4}},
        tmp_path / "c",
    )
    assert distckpt.load({"p": ShardedObject("o", None, (1,), (0,))}, tmp_path / "c") == {
        "p": {"a": [1]}
    }


def test_optimizer_param_groups_keep_their_positions(tmp_path):
    saved = {
        "groups": [
            {"lr": 0.1, "params": LocalNonpersistentObject([0])},
            {"lr": 0.2, "w": tensor("w", 1)},
        ]
    }
    asked = {"groups": [{"params": LocalNonpersistentObject([5])}, {"w": tensor("w", 0)}]}
    loaded = there_and_back(tmp_path / "c", saved, asked)
    assert equal(loaded, {"groups": [{"lr": 0.1, "params": [5]}, {"lr": 0.2, "w": torch.ones(3)}]})


# ---- common state of every kind


def test_common_values_keep_their_types(tmp_path):
    values = {
        "none": None,
        "bool": True,
        "int": 2**70,
        "float": float("inf"),
        "complex": 1 + 2j,
        "bytes": b"\0\xff",
        "text": "ü\0",
        "set": {1, 2},
        "dtype": torch.bfloat16,
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(1.5),
        "tensor": torch.arange(4, dtype=torch.int8),
        "rng": torch.get_rng_state(),
        "ordered": OrderedDict(a=1),
    }
    loaded = there_and_back(tmp_path / "c", values, {})
    assert [type(value) for value in loaded.values()] == [type(value) for value in values.values()]
    assert np.array_equal(loaded.pop("array"), values.pop("array"))
    assert all(torch.equal(loaded.pop(name), values.pop(name)) for name in ("tensor", "rng"))
    assert loaded == values


def test_common_values_of_unknown_types_are_named_with_their_place(tmp_path):
    with pytest.raises(UnsupportedObjectError, match=r"args.*object"):
        distckpt.save({"args": [1, {"x": object()}]}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


# ---- the functions themselves


@st.composite
def trees(draw):
    leaves = st.integers(0, 9) | st.builds(lambda v: LocalNonpersistentObject(v), st.integers(0, 9))
    shards = st.builds(lambda v: ShardedObject(f"k{v}", v, (1,), (0,)), st.integers(0, 9))

    def containers(children):
        return (
            st.lists(children, max_size=3)
            | st.lists(children, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from(["a", "b", 1]), children, max_size=3)
            | st.builds(Pair, children, children)
        )

    return {"root": draw(st.recursive(leaves | shards, containers, max_leaves=12))}


def values_of(node):
    """Replace wrappers by what they hold."""
    if isinstance(node, ShardedObject):
        return node.data
    if isinstance(node, LocalNonpersistentObject):
        return node.unwrap()
    if isinstance(node, dict):
        return {key: values_of(value) for key, value in node.items()}
    if isinstance(node, Pair):
        return Pair(*map(values_of, node))
    return type(node)(map(values_of, node)) if isinstance(node, list | tuple) else node


@settings(max_examples=80)
@given(trees())
def test_what_is_taken_apart_goes_together_again(tree):
    shards, common, skeleton = split(tree)
    assert put_together(skeleton, [shard.data for shard in shards], common) == values_of(tree)


def test_holes_leave_the_places_of_others_alone():
    shard = tensor("w", 1)
    tree = {"a": [shard, 1, {"b": shard}], "c": {"d": shard}, "e": (), "f": [shard]}
    common = split(tree).common
    assert common == {"a": [HOLE, 1, HOLE], "e": ()}
    assert compact(common) == {"a": [1], "e": ()}
    tree = {"a": [HOLE, 1, {"b": HOLE}], "c": {"d": HOLE}, "e": (), "f": [HOLE]}
    assert compact(tree) == {"a": [1], "e": ()}

from __future__ import annotations

import importlib
import logging
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from distckpt import optimizer
from distckpt.core import InvalidShardingError
from distckpt.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory


def split_in_two(key, data, replica_id, flattened_range):
    return [ShardedTensor.from_rank_offsets(key, half, (0, i, 2)) for i, half in enumerate(torch.chunk(data, 2))]


def train(params):
    """Take one Adam step; returns the optimizer."""
    adam = torch.optim.Adam(params, lr=0.1)
    sum(p.sum() for p in params).backward()
    adam.step()
    return adam


def make_model(mapping_module=None):
    """Parameters, and a model state dict in another order: a shard, a factory, and a buffer besides."""
    tensor_cls = mapping_module.ShardedTensor if mapping_module else ShardedTensor
    factory_cls = mapping_module.ShardedTensorFactory if mapping_module else ShardedTensorFactory
    weight, fused = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)), torch.nn.Parameter(torch.arange(4.0))
    state = {
        "buffer": tensor_cls.from_rank_offsets("buffer", torch.zeros(2)),
        "nested": [factory_cls("fused", fused, split_in_two, torch.cat)],
        "weight": tensor_cls.from_rank_offsets("weight", weight, (0, 1, 2), replica_id=3),
    }
    return [weight, fused], state


def test_params_are_numbered_by_first_appearance():
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    assert optimizer.get_optim_param_to_id_map(iter([b, a, b])) == {id(b): 0, id(a): 1}


def test_shards_are_found_by_their_parameter():
    params, state = make_model()
    found = optimizer.get_param_id_to_sharded_param_map(state, iter(params))
    assert {i: s.key for i, s in found.items()} == {0: "weight", 1: "fused"}
    assert found[0] is state["weight"]


def test_views_of_whole_parameters_are_found_but_copies_are_not(caplog):
    params, state = make_model()
    state["weight"].data = params[0].detach()
    found = optimizer.get_param_id_to_sharded_param_map(state, params)
    assert {i: s.key for i, s in found.items()} == {0: "weight", 1: "fused"}
    assert caplog.records == []

    copies = {"w": ShardedTensor.from_rank_offsets("w", params[0].detach().clone())}
    parts = {"w": ShardedTensor.from_rank_offsets("w", params[0].detach()[:1])}
    for unrelated in (copies, parts):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert optimizer.get_param_id_to_sharded_param_map(unrelated, params) == {}
        assert "keep_vars=True" in caplog.text


def test_parameters_without_memory_are_told_apart_by_object():
    params = [torch.nn.Parameter(torch.empty(2, device="meta")) for _ in range(2)]
    params += [torch.nn.Parameter(torch.empty(0)) for _ in range(2)]
    state = {str(i): ShardedTensor.from_rank_offsets(str(i), p) for i, p in reversed(list(enumerate(params)))}
    state["none"] = state["0"].without_data()
    state["unrelated"] = ShardedTensor.from_rank_offsets("unrelated", torch.empty(2, device="meta"))
    found = optimizer.get_param_id_to_sharded_param_map(state, params)
    assert {i: s.key for i, s in found.items()} == {i: str(i) for i in range(4)}


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_dtensor_parameters_stand_for_their_local_part():
    mesh = init_device_mesh("cpu", (1,))
    params = [torch.nn.Parameter(distribute_tensor(torch.full((2,), float(i)), mesh, [Shard(0)])) for i in range(8)]
    with torch.no_grad():
        locals_ = [p.to_local() for p in params]
    state = {str(i): ShardedTensor.from_rank_offsets(str(i), t) for i, t in enumerate(locals_)}
    found = optimizer.get_param_id_to_sharded_param_map(state, params)
    assert {i: s.key for i, s in found.items()} == {i: str(i) for i in range(8)}
    shard = optimizer.make_sharded_optimizer_tensor(found[3], params[3], "m")
    assert type(shard.data) in (torch.Tensor, torch.nn.Parameter)
    assert shard.data.tolist() == [3.0, 3.0]


def test_optimizer_tensor_lies_where_its_parameter_does():
    _, state = make_model()
    moment = torch.ones(2, 3, dtype=torch.float64)
    shard = optimizer.make_sharded_optimizer_tensor(state["weight"], moment, "optimizer.state.m")
    assert shard.data is moment
    expected = replace(state["weight"].without_data(), key="optimizer.state.m.weight", dtype=torch.float64)
    assert shard.without_data() == expected
    assert state["weight"].key == "weight"


def test_optimizer_tensor_of_a_factory_is_a_factory():
    _, state = make_model()
    moment = torch.arange(4.0) * 2
    factory = optimizer.make_sharded_optimizer_tensor(state["nested"][0], moment, "m")
    assert [(s.key, s.data.tolist()) for s in factory.build()] == [("m.fused", [0, 2]), ("m.fused", [4, 6])]


def test_optimizer_tensor_of_a_flat_shard_is_flat():
    flat = ShardedTensor.from_rank_offsets_flat("w", torch.zeros(3), (2, 3), (1, 1, 2), flattened_range=slice(2, 5))
    shard = optimizer.make_sharded_optimizer_tensor(flat, torch.ones(3, dtype=torch.float64), "m")
    assert (shard.key, shard.flattened_range, shard.global_offset) == ("m.w", slice(2, 5), (0, 3))
    for wrong in (torch.ones(4), torch.ones(2, 3), torch.ones(3, 1)):
        with pytest.raises(InvalidShardingError, match=r"'m\.w'"):
            optimizer.make_sharded_optimizer_tensor(flat, wrong, "m")


def test_optimizer_tensor_of_another_shape_is_an_error():
    _, state = make_model()
    with pytest.raises(InvalidShardingError, match=r"'m\.weight'.*\(3, 2\).*\(2, 3\)"):
        optimizer.make_sharded_optimizer_tensor(state["weight"], torch.zeros(3, 2), "m")


def test_adam_state_becomes_shards():
    params, model_state = make_model()
    adam = train(params)
    state = adam.state_dict()
    moments = {i: dict(values) for i, values in state["state"].items()}
    id_map = optimizer.get_param_id_to_sharded_param_map(model_state, params)
    assert optimizer.optim_state_to_sharding_state(state, id_map, exclude_keys=("step",)) is None

    for position, key in ((0, "weight"), (1, "fused")):
        assert set(state["state"][position]) == {"exp_avg", "exp_avg_sq"}
        for name, shard in state["state"][position].items():
            assert shard.key == f"optimizer.state.{name}.{key}"
            assert shard.data is moments[position][name]
    assert isinstance(state["state"][1]["exp_avg"], ShardedTensorFactory)
    assert state["state"][0]["exp_avg"].global_offset == (2, 0)

    [group] = state["param_groups"]
    assert isinstance(group["params"], LocalNonpersistentObject)
    assert group["params"].unwrap() == [0, 1]
    assert group["lr"] == 0.1
    assert adam.state_dict()["param_groups"][0]["params"] == [0, 1]


def test_values_that_cannot_be_divided_stay():
    params, model_state = make_model()
    state = train(params).state_dict()
    state["state"][0] |= {"momentum_buffer": None, "count": 3}
    optimizer.optim_state_to_sharding_state(state, optimizer.get_param_id_to_sharded_param_map(model_state, params))
    assert torch.equal(state["state"][0]["step"], torch.tensor(1.0))
    assert torch.equal(state["state"][1]["step"], torch.tensor(1.0))
    assert (state["state"][0]["momentum_buffer"], state["state"][0]["count"]) == (None, 3)
    assert isinstance(state["state"][0]["exp_avg"], ShardedTensor)


def test_state_of_a_parameter_without_axes_is_wrapped():
    scale = torch.nn.Parameter(torch.tensor(2.0))
    state = train([scale]).state_dict()
    id_map = optimizer.get_param_id_to_sharded_param_map([ShardedTensor.from_rank_offsets("s", scale)], [scale])
    optimizer.optim_state_to_sharding_state(state, id_map)
    assert [v.key for v in state["state"][0].values()] == [
        f"optimizer.state.{name}.s" for name in ("step", "exp_avg", "exp_avg_sq")
    ]


def test_one_name_may_be_excluded_as_a_string():
    state = {"state": {0: {"s": torch.zeros(9), "step": torch.zeros(9)}}, "param_groups": []}
    id_map = {0: ShardedTensor.from_rank_offsets("w", torch.zeros(9))}
    optimizer.optim_state_to_sharding_state(state, id_map, exclude_keys="step")
    assert list(state["state"][0]) == ["s"]


def test_failure_changes_nothing_and_says_what_to_do():
    weight = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))
    values = {"row": torch.zeros(2)}
    state = {"state": {0: values, 1: {}}, "param_groups": [{"params": [0, 1]}]}
    with pytest.raises(InvalidShardingError, match=r"optimizer\.state\.row\.w.*exclude_keys"):
        optimizer.optim_state_to_sharding_state(state, {0: weight})
    with pytest.raises(InvalidShardingError, match=r"parameter 0 .*keep_vars=True"):
        optimizer.optim_state_to_sharding_state(state, {})
    assert state["state"][0] is values
    assert state["param_groups"] == [{"params": [0, 1]}]
    optimizer.optim_state_to_sharding_state(state, {}, exclude_keys=("row",))
    assert state["state"] == {0: {}, 1: {}}


@pytest.fixture(scope="module")
def megatron():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its optional dependencies warn when they are absent
        pytest.importorskip("megatron.core", reason="megatron-core is not installed; only the comparison is skipped")
        package = "megatron.core.dist_checkpointing"
        return importlib.import_module(f"{package}.optimizer"), importlib.import_module(f"{package}.mapping")


def test_optimizer_state_agrees_with_megatron(megatron):
    results = []
    for module, mapping in ((optimizer, None), megatron):
        params, model_state = make_model(mapping)
        state = train(params).state_dict()
        id_map = module.get_param_id_to_sharded_param_map(model_state, params)
        module.optim_state_to_sharding_state(state, id_map, exclude_keys="step")
        results.append(
            {
                (i, name): (v.key, v.replica_id, getattr(v, "global_offset", None), v.data.tolist())
                for i, values in state["state"].items()
                for name, v in values.items()
            }
        )
        results[-1]["params"] = state["param_groups"][0]["params"].unwrap()
    assert results[0] == results[1]
    assert len(results[0]) == 5

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import distckpt
from distckpt import optimizer
from distckpt.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from distckpt.megatron.core import InvalidShardingError
from distckpt.modules import load_sharded_state_dict, sharded_state_dict
from tests.support.reference import megatron_or_skip


def split_in_two(key, data, replica_id, flattened_range):
    return [
        ShardedTensor.from_rank_offsets(key, half, (0, i, 2))
        for i, half in enumerate(torch.chunk(data, 2))
    ]


def train(params):
    """Take one Adam step; returns the optimizer."""
    adam = torch.optim.Adam(params, lr=0.1)
    sum(p.sum() for p in params).backward()
    adam.step()
    return adam


def make_model(mapping_module=None):
    """Parameters, and a model state dict in another order: a shard, a factory, and a buffer
    besides.
    """
    tensor_cls = mapping_module.ShardedTensor if mapping_module else ShardedTensor
    factory_cls = mapping_module.ShardedTensorFactory if mapping_module else ShardedTensorFactory
    weight, fused = (
        torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)),
        torch.nn.Parameter(torch.arange(4.0)),
    )
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
    state = {
        str(i): ShardedTensor.from_rank_offsets(str(i), p)
        for i, p in reversed(list(enumerate(params)))
    }
    state["none"] = state["0"].without_data()
    state["unrelated"] = ShardedTensor.from_rank_offsets("unrelated", torch.empty(2, device="meta"))
    found = optimizer.get_param_id_to_sharded_param_map(state, params)
    assert {i: s.key for i, s in found.items()} == {i: str(i) for i in range(4)}


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")  # of torch 2.6
@pytest.mark.usefixtures("one_rank")
def test_dtensor_parameters_stand_for_their_local_part():
    mesh = init_device_mesh("cpu", (1,))
    params = [
        torch.nn.Parameter(distribute_tensor(torch.full((2,), float(i)), mesh, [Shard(0)]))
        for i in range(8)
    ]
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
    expected = replace(
        state["weight"].without_data(), key="optimizer.state.m.weight", dtype=torch.float64
    )
    assert shard.without_data() == expected
    assert state["weight"].key == "weight"


def test_optimizer_tensor_of_a_factory_is_a_factory():
    _, state = make_model()
    moment = torch.arange(4.0) * 2
    factory = optimizer.make_sharded_optimizer_tensor(state["nested"][0], moment, "m")
    assert [(s.key, s.data.tolist()) for s in factory.build()] == [
        ("m.fused", [0, 2]),
        ("m.fused", [4, 6]),
    ]


def test_optimizer_tensor_of_a_flat_shard_is_flat():
    flat = ShardedTensor.from_rank_offsets_flat(
        "w", torch.zeros(3), (2, 3), (1, 1, 2), flattened_range=slice(2, 5)
    )
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
    optimizer.optim_state_to_sharding_state(
        state, optimizer.get_param_id_to_sharded_param_map(model_state, params)
    )
    assert torch.equal(state["state"][0]["step"], torch.tensor(1.0))
    assert torch.equal(state["state"][1]["step"], torch.tensor(1.0))
    assert (state["state"][0]["momentum_buffer"], state["state"][0]["count"]) == (None, 3)
    assert isinstance(state["state"][0]["exp_avg"], ShardedTensor)


def test_state_of_a_parameter_without_axes_is_wrapped():
    scale = torch.nn.Parameter(torch.tensor(2.0))
    state = train([scale]).state_dict()
    id_map = optimizer.get_param_id_to_sharded_param_map(
        [ShardedTensor.from_rank_offsets("s", scale)], [scale]
    )
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
    return megatron_or_skip("dist_checkpointing.optimizer"), megatron_or_skip(
        "dist_checkpointing.mapping"
    )


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


# Torch optimizers: sharded_optimizer_state_dict and back.


class Net(torch.nn.Module):
    """Two layers that are used, an expert that never is, and a frozen parameter."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.up = torch.nn.Linear(4, 6)
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.expert = torch.nn.Linear(6, 6)
        self.frozen = torch.nn.Parameter(torch.randn(6), requires_grad=False)

    def forward(self, x):
        return (self.up(x) * self.scale * self.frozen).square().mean()


OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "Adam, fused": partial(torch.optim.Adam, lr=0.01, fused=True),
    "Adam with amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True, foreach=False),
    "Adam with a tensor for lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01)),
    "SGD": partial(torch.optim.SGD, lr=0.01),
    "SGD with momentum": partial(
        torch.optim.SGD, lr=0.01, momentum=0.9, dampening=0.5, weight_decay=0.1
    ),
    "NAdam": torch.optim.NAdam,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Adafactor": torch.optim.Adafactor,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
}


def groups_of(net):
    decayed = [net.up.weight, net.expert.weight]
    return [
        {"params": decayed},
        {
            "params": [p for p in net.parameters() if all(p is not d for d in decayed)],
            "weight_decay": 0.0,
        },
    ]


def train_net(net, torch_optimizer, steps):
    losses = []
    for step in steps:
        torch_optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        loss = net(torch.randn(8, 4, generator=generator))
        loss.backward()
        torch_optimizer.step()
        losses.append(loss.item())
    return losses


def training_state(net, torch_optimizer):
    model = sharded_state_dict(net)
    return {
        "model": model,
        "optimizer": optimizer.sharded_optimizer_state_dict(torch_optimizer, model),
    }


def load_net(net, torch_optimizer, path, **options):
    loaded = distckpt.load(training_state(net, torch_optimizer), path, **options)
    load_sharded_state_dict(net, loaded["model"])
    optimizer.load_sharded_optimizer_state_dict(torch_optimizer, loaded["optimizer"])


def assert_equal_states(found, expected):
    """Compare what two optimizers say themselves; numbers are exact."""
    found, expected = found.state_dict(), expected.state_dict()
    assert found["state"].keys() == expected["state"].keys()
    for position, values in expected["state"].items():
        assert found["state"][position].keys() == values.keys()
        for name, value in values.items():
            other = found["state"][position][name]
            assert type(other) is type(value)
            if isinstance(value, torch.Tensor):
                assert (other.dtype, other.device) == (value.dtype, value.device)
                assert torch.equal(other, value), (position, name)
            else:
                assert other == value, (position, name)
    assert found["param_groups"] == expected["param_groups"]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "used"])
def test_a_torch_optimizer_goes_on_as_if_it_had_not_stopped(make, is_new, tmp_path):
    net = Net(seed=1)
    trained = make(groups_of(net))
    train_net(net, trained, range(3))
    distckpt.save(training_state(net, trained), tmp_path / "saved")

    resumed_net = Net(seed=2)
    resumed = make(groups_of(resumed_net))
    if not is_new:
        train_net(resumed_net, resumed, [7])
    load_net(resumed_net, resumed, tmp_path / "saved", strict="raise")
    assert_equal_states(resumed, trained)
    assert train_net(resumed_net, resumed, range(3, 6)) == train_net(net, trained, range(3, 6))
    assert_equal_states(resumed, trained)


def test_describing_changes_nothing():
    net = Net(seed=1)
    adam = torch.optim.Adam(net.parameters(), lr=0.1, eps=0.0, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 1)
    steps = []
    adam.register_step_post_hook(lambda *_: steps.append(1))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    training_state(net, adam)
    assert dict(adam.state) == {}
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    assert steps == []
    assert scheduler.get_last_lr() == [0.1]


def test_groups_go_by_the_names_of_their_parameters(tmp_path):
    net = Net(seed=1)
    saved = torch.optim.AdamW(
        [
            {"params": net.up.parameters(), "lr": 0.1, "betas": (0.5, 0.6)},
            {"params": [net.scale], "lr": 0.2},
        ]
    )
    train_net(net, saved, range(2))
    distckpt.save(training_state(net, saved), tmp_path / "saved")

    other = Net(seed=2)
    # In another order, one group divided, one parameter that was in no group, and other ways to
    # compute.
    groups = [[other.scale], [other.expert.weight], [other.up.bias], [other.up.weight]]
    loaded = torch.optim.AdamW([{"params": group, "lr": 9.0} for group in groups], foreach=True)
    load_net(other, loaded, tmp_path / "saved", strict="report")
    assert [group["lr"] for group in loaded.param_groups] == [0.2, 9.0, 0.1, 0.1]
    assert [group["betas"] for group in loaded.param_groups] == [
        (0.9, 0.999),
        (0.9, 0.999),
        (0.5, 0.6),
        (0.5, 0.6),
    ]
    assert all(group["foreach"] is True for group in loaded.param_groups)
    assert other.expert.weight not in loaded.state
    assert loaded.state[other.up.bias]["step"] == 2
    assert torch.equal(loaded.state[other.scale]["exp_avg"], saved.state[net.scale]["exp_avg"])

    joined = torch.optim.AdamW([*other.up.parameters(), other.scale])
    with pytest.raises(
        distckpt.LoadMismatchError, match=r"'up.weight' and 'scale' .* differ in \['betas', 'lr'\]"
    ):
        load_net(other, joined, tmp_path / "saved")
    assert dict(joined.state) == {}


def without_class(state):
    """Make the description of an optimizer what earlier checkpoints hold."""
    for entry in state["optimizer"]["settings"].data:
        del entry["class"]
    return state


def test_an_optimizer_of_another_kind_is_refused(tmp_path):
    net = Net(seed=1)
    saved = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train_net(net, saved, range(2))
    distckpt.save(training_state(net, saved), tmp_path / "named")
    distckpt.save(without_class(training_state(net, saved)), tmp_path / "saved")
    adam = torch.optim.Adam(net.parameters())
    with pytest.raises(
        distckpt.LoadMismatchError,
        match=r"at 'optimizer' is of class SGD, which keeps no 'exp_avg', .*: Adam cannot go on",
    ):
        load_net(net, adam, tmp_path / "named")
    with pytest.raises(
        distckpt.LoadMismatchError,
        match=r"saved at 'optimizer' has no 'exp_avg', 'exp_avg_sq': Adam cannot go on",
    ):
        load_net(net, adam, tmp_path / "saved")
    untrained = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    distckpt.save(without_class(training_state(net, untrained)), tmp_path / "untrained")
    with pytest.raises(
        distckpt.LoadMismatchError,
        match=r"another kind.* have 'dampening', 'momentum', 'nesterov', ",
    ):
        load_net(net, adam, tmp_path / "untrained")
    assert dict(adam.state) == {}
    loaded = distckpt.load(training_state(net, saved), tmp_path / "saved")["optimizer"]
    with pytest.raises(
        distckpt.LoadMismatchError, match=r"groups of \[1\] parameters, the one .* had \[6\]"
    ):
        optimizer.load_sharded_optimizer_state_dict(torch.optim.SGD([net.scale]), loaded)
    with pytest.raises(distckpt.LoadMismatchError, match="no settings of an optimizer"):
        optimizer.load_sharded_optimizer_state_dict(adam, {"state": {}})


@pytest.mark.parametrize("has_class", [True, False], ids=["named", "of an earlier release"])
def test_adamw_that_goes_on_from_adam_stays_decoupled_as_in_torch(tmp_path, caplog, has_class):
    net, expected_net, new_net = Net(seed=1), Net(seed=2), Net(seed=2)
    saved = torch.optim.Adam(net.parameters(), weight_decay=0.5)
    train_net(net, saved, range(2))
    described = training_state(net, saved)
    distckpt.save(described if has_class else without_class(described), tmp_path / "saved")

    expected_net.load_state_dict(net.state_dict())
    expected, new = (torch.optim.AdamW(m.parameters()) for m in (expected_net, new_net))
    expected.load_state_dict(copy.deepcopy(saved.state_dict()))
    load_net(new_net, new, tmp_path / "saved")
    assert new.param_groups[0].get("decoupled_weight_decay", True) is True
    assert_equal_states(new, expected)
    assert train_net(new_net, new, range(2, 5)) == train_net(expected_net, expected, range(2, 5))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [("class Adam, " in text, "class AdamW, " in text) for text in warnings] == (
        [(True, True)] if has_class else []
    )


class Growing(torch.optim.SGD):
    """Has options that an earlier release of it lacked."""

    def __init__(self, params, scale=None):
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group.update(scale=scale, maximize=True, own=7)

    def __setstate__(self, state):
        super().__setstate__(state)
        self.was_called = True
        for group in self.param_groups:
            group.setdefault("scale", 0.5)


@pytest.mark.parametrize("is_hooked", [False, True])
def test_options_of_newer_releases_get_what_setstate_says(tmp_path, is_hooked):
    net = Net(seed=1)
    saved = Growing(net.parameters())
    for name in ("scale", "maximize", "own"):
        del saved.param_groups[0][name]
    distckpt.save(training_state(net, saved), tmp_path / "saved")
    new = Growing(net.parameters())
    torch.optim.lr_scheduler.StepLR(new, 3)
    if is_hooked:
        new.register_load_state_dict_post_hook(lambda optimizer: None)
    load_net(net, new, tmp_path / "saved")
    [group] = new.param_groups
    assert new.was_called
    # What neither the checkpoint nor the class says stays as it was.
    assert (group["own"], group["initial_lr"]) == (7, 0.1)
    if not is_hooked:
        assert (group["scale"], group["maximize"]) == (0.5, False)


def test_groups_without_parameters_keep_their_options(tmp_path):
    net = Net(seed=1)

    def make_sgd(*rates):
        params = list(net.parameters())
        groups = [{"params": p, "lr": lr} for p, lr in zip(([], params, []), rates, strict=True)]
        return torch.optim.SGD(groups)

    saved, new = make_sgd(0.3, 0.2, 0.1), make_sgd(9, 9, 9)
    distckpt.save(training_state(net, saved), tmp_path / "saved")
    load_net(net, new, tmp_path / "saved")
    assert [group["lr"] for group in new.param_groups] == [0.3, 0.2, 0.1]
    assert [len(group["params"]) for group in new.param_groups] == [0, 6, 0]
    # A group that was not empty when it was saved, and one that is not empty now.
    other = torch.optim.SGD([{"params": list(net.parameters())}, {"params": [], "lr": 7}], lr=8)
    load_net(net, other, tmp_path / "saved")
    assert [group["lr"] for group in other.param_groups] == [0.2, 7]


def test_what_an_optimizer_keeps_follows_the_options_that_are_loaded(tmp_path):
    net = Net(seed=1)
    saved = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train_net(net, saved, range(2))
    distckpt.save(training_state(net, saved), tmp_path / "saved")
    plain = torch.optim.SGD(net.parameters(), lr=0.2)
    load_net(net, plain, tmp_path / "saved")
    assert_equal_states(plain, saved)


def test_a_copy_of_a_description_does_not_load_half_of_a_state(tmp_path):
    net = Net(seed=1)
    saved = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train_net(net, saved, range(2))
    distckpt.save(training_state(net, saved), tmp_path / "saved")
    new = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    copied = dict(training_state(net, new)["optimizer"])
    loaded = distckpt.load({"optimizer": copied}, tmp_path / "saved")
    with pytest.raises(
        distckpt.LoadMismatchError, match=r"\['momentum_buffer'\] .* were saved, loaded were \[\]"
    ):
        optimizer.load_sharded_optimizer_state_dict(new, loaded["optimizer"])
    assert dict(new.state) == {}


def test_numbers_are_stored_once_and_not_as_tensors(tmp_path):
    net = Net(seed=1)
    adam = torch.optim.Adam(net.parameters())
    train_net(net, adam, range(2))
    state = training_state(net, adam)
    distckpt.save(state, tmp_path / "saved")
    stored = distckpt.open(tmp_path / "saved").tensors
    assert [key for key in stored if "step" in key] == []
    # All parameters of a group with the same numbers share one entry.
    settings = [
        (e["params"], e["has_state"], e["values"]) for e in state["optimizer"]["settings"].data
    ]
    assert settings == [
        (["scale", "up.weight", "up.bias"], True, {"step": 2.0}),
        (["frozen"], False, {}),
        (["expert.weight", "expert.bias"], False, {}),
    ]
    # Moments are tensors, even those of a parameter without axes.
    (moment,) = [key for key in stored if "exp_avg." in key and key.endswith("scale")]
    assert stored[moment].shape == ()


def test_two_optimizers_of_one_checkpoint_have_prefixes(tmp_path):
    nets = [Net(seed=1), Net(seed=2)]
    adams = [torch.optim.Adam(net.parameters()) for net in nets]

    def described():
        state = {}
        for number, (net, adam) in enumerate(zip(nets, adams, strict=True)):
            state[f"model{number}"] = sharded_state_dict(net, f"{number}.")
            state[f"adam{number}"] = optimizer.sharded_optimizer_state_dict(
                adam, state[f"model{number}"], prefix=f"adam{number}"
            )
        return state

    for number, (net, adam) in enumerate(zip(nets, adams, strict=True), start=1):
        train_net(net, adam, range(number))
    distckpt.save(described(), tmp_path / "saved")
    expected = [copy.deepcopy(adam) for adam in adams]
    for net, adam in zip(nets, adams, strict=True):
        train_net(net, adam, range(3))
    loaded = distckpt.load(described(), tmp_path / "saved", strict="raise")
    for number, adam in enumerate(adams):
        optimizer.load_sharded_optimizer_state_dict(adam, loaded[f"adam{number}"])
        assert_equal_states(adam, expected[number])


def test_parameters_need_a_shard():
    net = Net(seed=1)
    adam = torch.optim.Adam(net.parameters())
    model = sharded_state_dict(net.up)
    with pytest.raises(InvalidShardingError, match=r"parameter 0 of the optimizer, of shape \(\)"):
        optimizer.sharded_optimizer_state_dict(adam, model)


def test_stacked_layers_that_share_a_key_keep_their_own_numbers(tmp_path):
    layers = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    fused = [torch.nn.Parameter(torch.randn(4)) for _ in range(2)]

    def build(number):
        def build_halves(key, data, replica_id, flattened_range):
            return [
                ShardedTensor.from_rank_offsets(
                    key, half, (0, number, 2), (1, i, 2), prepend_axis_num=1
                )
                for i, half in enumerate(data.chunk(2))
            ]

        return build_halves

    def shards():
        yield from (
            ShardedTensor.from_rank_offsets("w", p, (0, i, 2), prepend_axis_num=1)
            for i, p in enumerate(layers)
        )
        yield from (
            ShardedTensorFactory("fused", p, build(i), torch.cat) for i, p in enumerate(fused)
        )

    adam = torch.optim.Adam([*layers, *fused])
    for used in ([layers[1], fused[0]], [*layers, *fused]):
        adam.zero_grad()
        sum(p.square().sum() for p in used).backward()
        adam.step()
    expected = copy.deepcopy(adam.state_dict())
    model = {str(i): shard for i, shard in enumerate(shards())}
    distckpt.save(
        {"optimizer": optimizer.sharded_optimizer_state_dict(adam, model)}, tmp_path / "saved"
    )
    new = torch.optim.Adam([*layers, *fused])
    loaded = distckpt.load(
        {"optimizer": optimizer.sharded_optimizer_state_dict(new, model)}, tmp_path / "saved"
    )
    optimizer.load_sharded_optimizer_state_dict(new, loaded["optimizer"])
    assert [new.state[p]["step"].item() for p in (*layers, *fused)] == [1, 2, 2, 1]
    for position, values in new.state_dict()["state"].items():
        assert torch.equal(values["exp_avg"], expected["state"][position]["exp_avg"])


@pytest.mark.parametrize("axis", [0, 1])
def test_row_and_column_factors_lie_along_the_axes_of_their_parameter(axis):
    weight = torch.nn.Parameter(torch.randn(4, 6))
    adafactor = torch.optim.Adafactor([weight])
    weight.sum().backward()
    adafactor.step()
    model = {
        "w": ShardedTensor.from_rank_offsets(
            "w", weight, (0, 5, 8), (1 + axis, 2, 3), prepend_axis_num=1
        )
    }
    state = optimizer.sharded_optimizer_state_dict(adafactor, model)["state"][0]
    place = {name: (s.key, s.global_shape, s.global_offset) for name, s in state.items()}
    # Of a factor over the divided axis each rank has a value of its own.
    assert place == {
        "row_var": (
            "optimizer.state.row_var.w",
            ((8, 12, 1), (8, 4, 3))[axis],
            ((5, 8, 0), (5, 0, 2))[axis],
        ),
        "col_var": (
            "optimizer.state.col_var.w",
            ((8, 3, 6), (8, 1, 18))[axis],
            ((5, 2, 0), (5, 0, 12))[axis],
        ),
    }


def test_factors_without_the_axis_are_described_for_whole_parameters_only():
    weight = torch.nn.Parameter(torch.randn(4, 6))
    adam = torch.optim.Adam([weight])
    adam.state[weight] = {
        "exp_avg_sq_row": torch.ones(4),
        "exp_avg_sq_col": torch.ones(6),
        "RMS": 0.5,
        "step": 3,
    }
    whole = optimizer.sharded_optimizer_state_dict(
        adam, {"w": ShardedTensor.from_rank_offsets("w", weight)}
    )
    assert {name: s.global_shape for name, s in whole["state"][0].items()} == {
        "exp_avg_sq_row": (4,),
        "exp_avg_sq_col": (6,),
    }
    assert whole["settings"].data[0]["values"] == {"RMS": 0.5, "step": 3}
    part = {"w": ShardedTensor.from_rank_offsets("w", weight, (0, 1, 2))}
    with pytest.raises(
        InvalidShardingError, match=r"'exp_avg_sq_row' for the parameter 'w' has shape \(4,\)"
    ):
        optimizer.sharded_optimizer_state_dict(adam, part)

"""Optimizers over DTensors: training resumed under another mesh goes on as training in one process
does.

The oracle is that process: a plain module and a plain torch optimizer.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import distckpt
from distckpt import ShardedTensor
from distckpt.modules import load_sharded_state_dict, sharded_state_dict
from distckpt.optimizer import load_sharded_optimizer_state_dict, sharded_optimizer_state_dict
from tests.support.harness import error_of, run
from tests.support.parallel_modules import fsdp, fsdp_over_tp, plain, tp
from tests.support.reference import fsdp2_trains
from tests.support.sampling import one_in


class Factored(torch.optim.Optimizer):
    """Like Adafactor (that of torch takes no DTensors): second moments of rows and of columns, of
    fewer axes.
    """

    def __init__(self, params, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    scale = self._scale(self.state[p], p.grad.square())
                    update = p.grad / (scale.sqrt() + 1e-3)
                    if isinstance(p, DTensor):
                        # Since torch 2.14, operations in place change no placements.
                        update = update.redistribute(placements=p.placements)
                    p.add_(update, alpha=-group["lr"])

    def _scale(self, state: dict, squares: torch.Tensor) -> torch.Tensor:
        state["step"] = state.get("step", 0) + 1
        means = (
            {"row": squares.mean(-1), "column": squares.mean(0)}
            if squares.ndim == 2
            else {"whole": squares}
        )
        for name, mean in means.items():
            if isinstance(mean, DTensor):
                mean = mean.redistribute(
                    placements=[Replicate() if p.is_partial() else p for p in mean.placements]
                )
            state[name] = state[name] * 0.9 + mean if name in state else mean.clone()
        return (
            state["row"].unsqueeze(1) * state["column"].unsqueeze(0)
            if squares.ndim == 2
            else state["whole"]
        )


OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adam_fused": partial(torch.optim.Adam, lr=0.01, fused=True),
    "sgd_momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "factored": Factored,
}


class Net(torch.nn.Module):
    """Some rows that 2 and 4 do not divide, fewer rows than ranks, and a layer that is never
    used.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = torch.nn.Linear(6, 12)
        self.down = torch.nn.Linear(12, 3)
        self.expert = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Cloned, since FSDP2 warns of modules that return views.
        return self.down(torch.tanh(self.up(x))).clone()


def make(layout, optimizer_name: str, seed: int) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(seed)
    layout(net)
    # Two groups, told apart by what a group is for, not by their numbers.
    biases = [p for name, p in net.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in net.named_parameters() if name.endswith("weight")]
    groups = [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0, "lr": 0.02},
    ]
    return net, OPTIMIZERS[optimizer_name](groups if seed == 1 else list(reversed(groups)))


def train(net: Net, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def describe(net: Net, optimizer: torch.optim.Optimizer) -> dict:
    model = sharded_state_dict(net)
    return {"model": model, "optimizer": sharded_optimizer_state_dict(optimizer, model)}


def full_states(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    states = {}
    for name, p in net.named_parameters():
        if p in optimizer.state:
            whole = {
                k: v.full_tensor() if isinstance(v, DTensor) else v
                for k, v in optimizer.state[p].items()
            }
            states[name] = {k: torch.as_tensor(v).clone() for k, v in whole.items()}
    return states


def resume(layout, optimizer_name: str, path: str) -> tuple[dict, list[float]]:
    net, optimizer = make(layout, optimizer_name, seed=2)
    loaded = distckpt.load(describe(net, optimizer), path, strict="raise")
    load_sharded_state_dict(net, loaded["model"])
    load_sharded_optimizer_state_dict(optimizer, loaded["optimizer"])
    return full_states(net, optimizer), train(net, optimizer, range(3, 6))


SAVED = [(fsdp, name) for name in OPTIMIZERS] + [(fsdp_over_tp, "adamw"), (tp, "sgd_momentum")]


def train_and_save(rank: int, folder: str) -> None:
    for layout, name in SAVED:
        net, optimizer = make(layout, name, seed=1)
        train(net, optimizer, range(3))
        states = full_states(net, optimizer)
        distckpt.save(describe(net, optimizer), f"{folder}/{layout.__name__}-{name}")
        if rank == 0:
            torch.save(states, f"{folder}/{layout.__name__}-{name}.states")


def resume_all(rank: int, folder: str) -> list[tuple[dict, list[float]]]:
    layout = [fsdp, tp][dist.get_world_size() % 2]
    return [resume(layout, name, f"{folder}/{source.__name__}-{name}") for source, name in SAVED]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run(train_and_save, 4, str(folder))
    return folder


def check(saved: Path, resumed: list[tuple[dict, list[float]]]) -> None:
    for (source, name), (states, losses) in zip(SAVED, resumed, strict=True):
        expected = torch.load(saved / f"{source.__name__}-{name}.states")
        assert states.keys() == expected.keys()
        assert "expert.weight" not in states
        for parameter, values in expected.items():
            assert states[parameter].keys() == values.keys()
            for key, value in values.items():
                assert torch.equal(states[parameter][key], value), (
                    source.__name__,
                    name,
                    parameter,
                    key,
                )
        net, optimizer = make(plain, name, seed=1)
        assert losses == pytest.approx(train(net, optimizer, range(6))[3:], rel=1e-4), (
            source.__name__,
            name,
        )


@fsdp2_trains
@pytest.mark.parametrize("num_ranks", one_in(2, [2, 3]))
def test_training_goes_on_under_another_mesh(saved, num_ranks):
    for resumed in run(resume_all, num_ranks, str(saved)):
        check(saved, resumed)


@fsdp2_trains
def test_training_goes_on_in_one_process(saved):
    check(
        saved,
        [resume(plain, name, str(saved / f"{source.__name__}-{name}")) for source, name in SAVED],
    )


def step_strided(rank: int, path: str, weight: torch.Tensor, grad: torch.Tensor) -> list[int]:
    """Of this placement a rank has every other piece of rows and columns: several places of the
    tensor.
    """
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)]
    layer = torch.nn.Linear(12, 8, bias=False)
    layer.weight = torch.nn.Parameter(distribute_tensor(weight, mesh, placements))
    layer.weight.grad = distribute_tensor(grad, mesh, placements)
    adam = torch.optim.Adam(layer.parameters(), foreach=False)
    adam.step()
    state = describe(layer, adam)
    distckpt.save(state, path)
    moments = state["optimizer"]["state"][0]["exp_avg"]
    before = moments.data.clone()
    moments.data.zero_()
    loaded = distckpt.load(state, path)
    load_sharded_optimizer_state_dict(adam, loaded["optimizer"])
    assert torch.equal(adam.state[layer.weight]["exp_avg"].to_local(), before)
    return [len(moments.build())]


def test_state_that_lies_in_several_places_follows_its_parameter(tmp_path):
    torch.manual_seed(3)
    weight, grad = torch.randn(8, 12), torch.randn(8, 12)
    assert run(step_strided, 4, str(tmp_path / "saved"), weight, grad) == [[6]] * 4
    layer = torch.nn.Linear(12, 8, bias=False)
    adam = torch.optim.Adam(layer.parameters())
    loaded = distckpt.load(describe(layer, adam), tmp_path / "saved")
    load_sharded_optimizer_state_dict(adam, loaded["optimizer"])
    expected = torch.nn.Parameter(weight.clone())
    expected.grad = grad
    plain_adam = torch.optim.Adam([expected], foreach=False)
    plain_adam.step()
    assert torch.equal(layer.weight, expected)
    for name, value in plain_adam.state[expected].items():
        assert torch.equal(adam.state[layer.weight][name], value), name


def pipeline(rank: int, path: str) -> tuple[int, float]:
    """Two stages that share the key of their layers, each with a parameter of its own besides."""
    layer, own = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.Adam([layer, own], lr=0.1 + rank)
    for _ in range(rank + 1):
        (layer.sum() + own.sum()).backward()
        adam.step()
    names = ["first", "second"]
    model = {
        "layer": ShardedTensor.from_rank_offsets(
            "layers.w", layer, (0, rank, 2), prepend_axis_num=1
        ),
        "own": ShardedTensor.from_rank_offsets(names[rank], own),
    }
    distckpt.save({"optimizer": sharded_optimizer_state_dict(adam, model)}, path)

    # The stages change places.
    new = torch.optim.Adam([layer, own])
    other = 1 - rank
    model["layer"] = ShardedTensor.from_rank_offsets(
        "layers.w", layer, (0, other, 2), prepend_axis_num=1
    )
    model["own"] = ShardedTensor.from_rank_offsets(names[other], own)
    loaded = distckpt.load({"optimizer": sharded_optimizer_state_dict(new, model)}, path)
    load_sharded_optimizer_state_dict(new, loaded["optimizer"])
    assert new.state[own]["step"] == new.state[layer]["step"]
    return int(new.state[layer]["step"]), new.param_groups[0]["lr"]


def test_ranks_with_different_parameters_put_their_numbers_together(tmp_path):
    assert run(pipeline, 2, str(tmp_path / "saved")) == [(2, 1.1), (1, 0.1)]


def one_rank_fails(rank: int) -> BaseException | None:
    net = Net(seed=1)
    adam = torch.optim.Adam(net.parameters())
    return error_of(
        sharded_optimizer_state_dict, adam, sharded_state_dict(net.up if rank == 1 else net)
    )


def test_a_failure_on_one_rank_is_raised_on_all():
    for error in run(one_rank_fails, 2):
        assert isinstance(error, distckpt.RankFailedError)
        assert list(error.failures) == [1]
        assert "has no shard" in str(error)

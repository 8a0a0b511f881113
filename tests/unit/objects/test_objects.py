"""A dict of objects is saved and loaded as it is: `distckpt.save({"model": model, "optimizer": optimizer, ...})`.

The oracle is torch: training that was not interrupted, and its own `state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import copy
import inspect
import random
from functools import partial

import numpy as np
import pytest
import torch

import distckpt
from distckpt.modules import sharded_state_dict
from distckpt.optimizer import sharded_optimizer_state_dict


class Net(torch.nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += len(x)
        return self.down(torch.tanh(self.up(x)))


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))

        def closure(x=x):
            loss = model(x).square().mean()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()


def assert_same(found, expected, place=""):
    """Compare nested state dicts; tensors with their dtypes."""
    assert type(found) is type(expected), place
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), place
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key, value in expected.items():
            assert_same(found[key], value, f"{place}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for i, value in enumerate(expected):
            assert_same(found[i], value, f"{place}.{i}")
    else:
        assert found == expected, place


def make(seed):
    model = Net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def go_on(state, steps):
    for step in steps:
        train(state["model"], state["optimizer"], [step])
        state["scheduler"].step()


def test_a_dict_of_objects_is_saved_and_loaded(tmp_path):
    saved, resumed = make(1), make(2)
    go_on(saved, range(3))
    distckpt.save({**saved, "rng": distckpt.RngState(), "step": 3, "seen": [{"a": 1}, 2]}, tmp_path / "saved")
    numbers = (random.random(), np.random.rand(), torch.rand(2).tolist())

    given = {**resumed, "rng": distckpt.RngState(), "step": 0}
    loaded = distckpt.load(given, tmp_path / "saved", strict="raise_all")
    assert all(loaded[name] is value for name, value in given.items() if name != "step")
    assert (loaded["step"], loaded["seen"], given["step"]) == (3, [{"a": 1}, 2], 0)
    assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == numbers
    for _ in range(2):
        for name in ("model", "optimizer", "scheduler"):
            assert_same(resumed[name].state_dict(), saved[name].state_dict(), name)
        go_on(saved, range(3, 6))
        go_on(resumed, range(3, 6))


def test_checkpoints_of_objects_and_of_descriptions_are_the_same(tmp_path):
    saved = make(1)
    go_on(saved, range(2))
    described = sharded_state_dict(saved["model"])
    distckpt.save({"model": saved["model"], "optimizer": saved["optimizer"]}, tmp_path / "objects")
    distckpt.save(
        {"model": described, "optimizer": sharded_optimizer_state_dict(saved["optimizer"], described)},
        tmp_path / "described",
    )
    assert distckpt.diff(tmp_path / "objects", tmp_path / "described").is_same


def test_background_saves_and_managers_take_objects(tmp_path):
    saved = make(1)
    go_on(saved, range(2))
    distckpt.async_save(saved, tmp_path / "background").result()
    with distckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(2, {**saved, "step": 2})
    for load in (partial(distckpt.load, checkpoint_dir=tmp_path / "background"), manager.load):
        resumed = make(2)
        load(resumed)
        assert_same(resumed["optimizer"].state_dict(), saved["optimizer"].state_dict())
        assert_same(resumed["model"].state_dict(), saved["model"].state_dict())


# What some need besides parameters; Muon takes matrices only.
OPTIONS = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}, "LBFGS": {"max_iter": 3}}
CLASSES = [
    cls
    for cls in vars(torch.optim).values()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
]


def make_with(cls, seed, dtype=torch.float32):
    model = Net(seed).to(dtype)
    if cls is torch.optim.SparseAdam:
        model.up = torch.nn.Embedding(4, 4, sparse=True)
        model.forward = lambda x: model.up(x.argmax(-1)) * 2
    params = [p for p in model.parameters() if cls.__name__ != "Muon" or p.ndim == 2]
    if cls is torch.optim.SparseAdam:
        params = list(model.up.parameters())
    return model, cls(params, lr=0.01, **OPTIONS.get(cls.__name__, {}))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_optimizer_resumes_as_with_its_own_state_dict(cls, tmp_path):
    model, optimizer = make_with(cls, 1)
    train(model, optimizer, range(3))
    whole = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    distckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    assert_same(optimizer.state_dict(), whole[1], "described")

    expected_model, expected = make_with(cls, 3)
    expected_model.load_state_dict(whole[0])
    expected.load_state_dict(whole[1])
    resumed_model, resumed = make_with(cls, 2)
    distckpt.load({"model": resumed_model, "optimizer": resumed}, tmp_path / "saved", strict="raise_all")
    assert_same(resumed.state_dict(), expected.state_dict(), cls.__name__)
    train(expected_model, expected, range(3, 5))
    train(resumed_model, resumed, range(3, 5))
    assert_same(resumed.state_dict(), expected.state_dict(), cls.__name__)
    assert_same(resumed_model.state_dict(), expected_model.state_dict())

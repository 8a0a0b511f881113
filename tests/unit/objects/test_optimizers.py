"""Every optimizer of torch is resumed in a dict of objects as torch's own `load_state_dict` resumes it."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

import distckpt
from tests.unit.objects.test_objects import Net, assert_same, train

# What some need besides parameters; Muon takes matrices only.
OPTIONS = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}, "LBFGS": {"max_iter": 3}}
CLASSES = [
    cls
    for cls in vars(torch.optim).values()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
]


def make(cls, seed, dtype=torch.float32):
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
    model, optimizer = make(cls, 1)
    train(model, optimizer, range(3))
    whole = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    distckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    assert_same(optimizer.state_dict(), whole[1], "described")

    expected_model, expected = make(cls, 3)
    expected_model.load_state_dict(whole[0])
    expected.load_state_dict(whole[1])
    resumed_model, resumed = make(cls, 2)
    distckpt.load({"model": resumed_model, "optimizer": resumed}, tmp_path / "saved", strict="raise_all")
    assert_same(resumed.state_dict(), expected.state_dict(), cls.__name__)
    train(expected_model, expected, range(3, 5))
    train(resumed_model, resumed, range(3, 5))
    assert_same(resumed.state_dict(), expected.state_dict(), cls.__name__)
    assert_same(resumed_model.state_dict(), expected_model.state_dict())

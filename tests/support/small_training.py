"""A small model, its training, and the comparison of state dicts."""

from __future__ import annotations

import torch


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
        assert found.stride() == expected.stride(), place
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

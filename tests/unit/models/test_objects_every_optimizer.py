"""Every optimizer of torch, saved and loaded as an object, goes on as with its own state dict."""

from __future__ import annotations

import copy
import inspect
import math
from functools import partial

import pytest
import torch

import distckpt
from tests.support.small_training import Net, assert_same, train

OPTIONS = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "LBFGS": {"max_iter": 3},
}
CLASSES = [
    cls
    for cls in vars(torch.optim).values()
    if inspect.isclass(cls)
    and issubclass(cls, torch.optim.Optimizer)
    and cls is not torch.optim.Optimizer
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
    distckpt.load(
        {"model": resumed_model, "optimizer": resumed}, tmp_path / "saved", strict="raise"
    )
    assert_same(resumed.state_dict(), expected.state_dict(), cls.__name__)
    train(expected_model, expected, range(3, 5))
    train(resumed_model, resumed, range(3, 5))
    assert_same(resumed.state_dict(), expected.state_dict(), cls.__name__)
    assert_same(resumed_model.state_dict(), expected_model.state_dict())


def make_one(cls):
    """Make an optimizer of a matrix, which has made two steps."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3))
    return weight, cls([weight], **OPTIONS.get(cls.__name__, {}))


def step(weight, optimizer):
    def closure():
        loss = weight.square().sum()
        weight.grad = 2 * weight.detach()
        return loss

    optimizer.step(closure)


def outcome_of(load, weight, optimizer):
    """Tell whether an optimizer goes on after a load, and from where to where."""
    try:
        load()
        step(weight, optimizer)
    except (distckpt.LoadMismatchError, KeyError, TypeError, ValueError, RuntimeError) as error:
        return error
    return weight.detach().clone()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_state_of_another_class_is_refused_where_torch_fails(cls, tmp_path, caplog):
    if cls is torch.optim.SparseAdam:
        pytest.skip("takes no gradients that are dense")
    weight, optimizer = make_one(cls)
    for _ in range(2):
        step(weight, optimizer)
    distckpt.save({"model": holder_of(weight), "optimizer": optimizer}, tmp_path / "saved")
    state, values = copy.deepcopy(optimizer.state_dict()), weight.detach().clone()
    for other in (other for other in CLASSES if other not in (cls, torch.optim.SparseAdam)):
        torch_weight, by_torch = make_one(other)
        torch_weight.data.copy_(values)
        expected = outcome_of(
            partial(by_torch.load_state_dict, copy.deepcopy(state)), torch_weight, by_torch
        )
        caplog.clear()
        weight, new = make_one(other)
        request = {"model": holder_of(weight), "optimizer": new}
        found = outcome_of(partial(distckpt.load, request, tmp_path / "saved"), weight, new)
        if isinstance(expected, torch.Tensor):
            assert torch.equal(found, expected), other
            assert f"class {cls.__name__}, and is loaded into one of class {other.__name__}" in (
                caplog.text
            )
        else:
            assert isinstance(found, distckpt.LoadMismatchError), (other, expected, found)


def holder_of(weight):
    holder = torch.nn.Module()
    holder.weight = weight
    return holder


PARAMETER_DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
]


def params_of(dtype, shapes=((4, 3), (5,), ())):
    """Make parameters of many axes and of none."""
    return torch.nn.ParameterList(
        torch.nn.Parameter(torch.linspace(-1, 1, max(math.prod(shape), 1)).view(shape).to(dtype))
        for shape in shapes
    )


def step_all(params, optimizer, number):
    generator = torch.Generator().manual_seed(number)

    def closure():
        for param in params:
            dtype = torch.complex128 if param.is_complex() else torch.float64
            gradient = torch.randn(param.shape, generator=generator, dtype=dtype).to(param.dtype)
            is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
            param.grad = gradient.to_sparse() if is_sparse else gradient
        return sum(param.detach().abs().double().sum() for param in params)

    optimizer.step(closure)


@pytest.mark.parametrize("dtype", PARAMETER_DTYPES, ids=str)
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_parameters_of_every_dtype_go_on_bit_by_bit(cls, dtype, tmp_path):
    shapes = {"Muon": [(4, 3)], "SparseAdam": [(4, 3), (5,)]}.get(cls.__name__, [(4, 3), (5,), ()])
    options = OPTIONS.get(cls.__name__, {})
    saved, new = params_of(dtype, shapes), params_of(dtype, shapes)
    try:
        optimizer, resumed = (cls(params, **options) for params in (saved, new))
        for number in range(2):
            step_all(saved, optimizer, number)
    except (RuntimeError, ValueError, TypeError) as error:
        pytest.skip(f"torch does not: {error}")
    distckpt.save({"model": saved, "optimizer": optimizer}, tmp_path / "saved")
    distckpt.load({"model": new, "optimizer": resumed}, tmp_path / "saved", strict="raise")
    assert_same(resumed.state_dict(), optimizer.state_dict())
    for params, each in ((saved, optimizer), (new, resumed)):
        step_all(params, each, 2)
    assert_same(dict(new.state_dict()), dict(saved.state_dict()))
    assert_same(resumed.state_dict(), optimizer.state_dict())


def test_complex_optimizers_change_their_precision_with_the_model(tmp_path):
    saved = params_of(torch.complex128)
    optimizer = torch.optim.Adam(saved)
    step_all(saved, optimizer, 0)
    # A state of real numbers with as many axes as the pairs that its parameter is stored as.
    real = optimizer.state[saved[0]]["real"] = torch.ones(4, 3, 2, dtype=torch.float64)
    distckpt.save({"model": saved, "optimizer": optimizer}, tmp_path / "wide")
    narrow = params_of(torch.complex64)
    resumed = torch.optim.Adam(narrow)
    request = {"model": narrow, "optimizer": resumed}
    with pytest.raises(distckpt.LoadMismatchError, match=r"stored .* as torch\.float64"):
        distckpt.load(request, tmp_path / "wide")
    distckpt.load(request, tmp_path / "wide", allow_dtype_cast=True)
    assert_same(resumed.state[narrow[0]].pop("real"), real)
    for param, other in zip(narrow, saved, strict=True):
        assert torch.equal(param, other.detach().to(torch.complex64))
        for name in ("exp_avg", "exp_avg_sq"):
            expected = optimizer.state[other][name]
            assert resumed.state[param][name].dtype == (torch.complex64)
            assert torch.allclose(resumed.state[param][name].to(torch.complex128), expected)
    distckpt.save(request, tmp_path / "narrow")
    wide = params_of(torch.complex128)
    again = torch.optim.Adam(wide)
    distckpt.load({"model": wide, "optimizer": again}, tmp_path / "narrow")
    assert torch.equal(wide[0], narrow[0].detach().to(torch.complex128))
    assert torch.equal(
        again.state[wide[0]]["exp_avg"], resumed.state[narrow[0]]["exp_avg"].to(torch.complex128)
    )

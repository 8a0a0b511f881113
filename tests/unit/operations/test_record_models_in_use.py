"""Recorded loaders of models in use, whose values stay as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import distckpt
from tests.support.engine_loaders import Single

F32 = torch.float32


def _buffered(model, name, tensor):
    buffer = torch.full((6, 4), 7.0)
    buffer[1:3].copy_(tensor[:2])
    buffer[3:5].copy_(tensor[2:])
    model.weight.data.copy_(buffer[1:5])


def _zeroed(model, name, tensor):
    model.weight.data.zero_()
    model.weight.data[1:3].fill_(2)
    model.weight.data.copy_(tensor)


def _initialized(model, name, tensor):
    nn.init.normal_(model.weight)
    torch.zeros(4, 4, out=model.weight.data)
    torch._foreach_add_([model.weight], 1)
    model.weight.data.copy_(tensor)


def _from_a_module(model, name, tensor):
    made = nn.Linear(4, 4, bias=False)
    made.weight.data.copy_(tensor)
    model.weight.data.copy_(made.weight.data)


def _copied_again(model, name, tensor):
    model.weight.data.copy_(tensor)
    model.weight = nn.Parameter(model.weight.data.clone(), requires_grad=False)
    model.turned = model.weight.data.t().contiguous()


IN_USE = [_buffered, _zeroed, _initialized, _from_a_module]


@pytest.mark.parametrize("load", IN_USE)
@pytest.mark.parametrize("is_refused", [False, True])
def test_a_model_in_use_keeps_its_values(load, is_refused, tmp_path):
    def load_or_compute(model, name, tensor):
        load(model, name, tensor)
        if is_refused and recording:
            model.weight.data.mul_(2)

    recording = False
    model = Single(load_or_compute, 4, 4)
    values = {"w": torch.randn(4, 4)}
    model.load_weights(values.items())
    place = model.weight.data_ptr()
    recording = True
    if is_refused:
        with pytest.raises(distckpt.InvalidShardingError, match="'w'"):
            distckpt.record_loader(model.load_weights, {"w": ((4, 4), F32)})
    else:
        target = distckpt.record_loader(model.load_weights, {"w": ((4, 4), F32)})
        save_file(values, tmp_path / "model.safetensors")
        assert distckpt.verify(tmp_path, live=target).is_whole
    assert model.weight.data_ptr() == place
    np.testing.assert_array_equal(model.weight.numpy(), values["w"].numpy())


def test_own_values_beside_stored_ones_are_written_and_others_kept():
    def load(model, name, tensor):
        model.weight.data.zero_()
        model.weight.data[1:3, :2].copy_(tensor)

    model = Single(load, 4, 4)
    before = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    model.weight.copy_(torch.from_numpy(before))
    distckpt.record_loader(model.load_weights, {"w": ((2, 2), F32)})
    expected = np.zeros((4, 4), np.float32)
    expected[1:3, :2] = before[1:3, :2]
    np.testing.assert_array_equal(model.weight.numpy(), expected)


def test_a_loader_may_replace_tensors_by_equal_ones(tmp_path):
    """As engines do that make weights contiguous, or keep turned ones for a kernel."""
    model = Single(_copied_again, 4, 4)
    model.load_weights({"w": torch.randn(4, 4)}.items())
    target = distckpt.record_loader(model.load_weights, {"w": ((4, 4), F32)})
    values = {"w": torch.randn(4, 4)}
    save_file(values, tmp_path / "model.safetensors")
    distckpt.load(target, tmp_path)
    np.testing.assert_array_equal(model.weight.numpy(), values["w"].numpy())
    np.testing.assert_array_equal(model.turned.numpy(), values["w"].numpy().T)


def test_a_single_value_may_be_filled_in(tmp_path):
    """As vLLM's `default_weight_loader` does."""

    def load(model, name, tensor):
        model.weight.data.fill_(tensor.item())

    model = Single(load, 1)
    target = distckpt.record_loader(model.load_weights, {"scale": ((), F32)})
    save_file({"scale": torch.tensor(0.37)}, tmp_path / "model.safetensors")
    distckpt.load(target, tmp_path)
    assert model.weight.item() == np.float32(0.37)

"""`record_loader`: what fills its state dict does what the loader does with whole tensors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import distckpt
from tests.support.engine_loaders import MODELS, EngineModel, stored_values, tensors_of

BF16, F32 = torch.bfloat16, torch.float32


def load_recorded(target, values, folder) -> None:
    folder.mkdir(exist_ok=True)
    save_file(values, folder / "model.safetensors")
    distckpt.load(target, folder, allow_dtype_cast=True)


def assert_same(model: EngineModel, other: EngineModel) -> None:
    for (name, one), (_, two) in zip(tensors_of(model), tensors_of(other), strict=True):
        assert one.dtype == two.dtype
        same = one.contiguous().view(torch.uint8).equal(two.contiguous().view(torch.uint8))
        assert same, name


@pytest.mark.parametrize("layout", [(0, 1), (0, 2), (1, 2)], ids=["tp1", "rank0", "rank1"])
@pytest.mark.parametrize("name", MODELS)
def test_what_fills_the_target_does_what_the_loader_does(name, layout, tmp_path):
    model, expected = MODELS[name](*layout), MODELS[name](*layout)
    target = distckpt.record_loader(model.load_weights, model.specs)
    for seed in range(2):
        values = stored_values(model.specs, seed)
        load_recorded(target, values, tmp_path / str(seed))
        expected.load_weights(iter(values.items()))
        assert_same(model, expected)


class Single(nn.Module):
    """A model of one parameter, whose loader is a function."""

    def __init__(self, load, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape), requires_grad=False)
        self.load = load

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.load(self, name, tensor)


def into_weight(change):
    def load(model, name, tensor):
        model.weight.data.copy_(change(tensor))

    return load


REFUSED = {
    "adds": into_weight(lambda tensor: tensor + 1),
    "exponential": into_weight(lambda tensor: -torch.exp(tensor.float())),
    "item": into_weight(lambda tensor: torch.full((4, 4), tensor[0, 0].item())),
    "numpy": into_weight(lambda tensor: torch.from_numpy(tensor.numpy())),
    "gathers": into_weight(lambda tensor: tensor[torch.tensor([1, 0, 3, 2])]),
    "rounds": into_weight(lambda tensor: tensor.to(BF16).float()),
    "asks": into_weight(lambda tensor: tensor if tensor.any() else tensor.t()),
    "changes the stored": into_weight(lambda tensor: tensor.mul_(2)),
    "fills the stored": into_weight(lambda tensor: tensor.fill_(2)),
}


@pytest.mark.parametrize("load", REFUSED.values(), ids=REFUSED)
def test_a_loader_that_computes_is_refused_by_name(load):
    model = Single(load, 4, 4)
    with pytest.raises(distckpt.InvalidShardingError, match=r"'odd\.weight'"):
        distckpt.record_loader(model.load_weights, {"odd.weight": ((4, 4), F32)})


def compute_afterwards(model, name, tensor):
    model.weight.data.copy_(tensor)
    model.weight.data.add_(1)


def compute_from_the_parameter(model, name, tensor):
    model.weight.data.copy_(tensor)
    model.scaled = model.weight * 2


@pytest.mark.parametrize("load", [compute_afterwards, compute_from_the_parameter])
def test_computing_with_what_was_loaded_is_refused(load):
    with pytest.raises(distckpt.InvalidShardingError, match=r"'odd\.weight'"):
        distckpt.record_loader(Single(load, 4, 4).load_weights, {"odd.weight": ((4, 4), F32)})


def test_a_loader_that_replaces_a_parameter_is_refused():
    def load(model, name, tensor):
        model.weight = nn.Parameter(tensor, requires_grad=False)

    with pytest.raises(distckpt.InvalidShardingError, match=r"parameter 'weight'"):
        distckpt.record_loader(Single(load, 4, 4).load_weights, {"w": ((4, 4), F32)})


def test_a_model_without_memory_is_refused():
    model = Single(into_weight(lambda tensor: tensor), 4, 4).to("meta")
    with pytest.raises(distckpt.InvalidShardingError, match="memory"):
        distckpt.record_loader(model.load_weights, {"w": ((4, 4), F32)})


def test_what_was_not_used_and_not_filled_is_named(caplog):
    def load(model, name, tensor):
        if name == "w":
            model.weight.data[:3].copy_(tensor)

    model = Single(load, 4, 4)
    target = distckpt.record_loader(model.load_weights, {"w": ((3, 4), F32), "x": ((2,), F32)})
    assert target.unused == {"x"}
    assert target.unfilled == {"weight": 4}
    assert "weight" in caplog.text


def test_only_the_last_value_of_an_element_counts(tmp_path):
    def load(model, name, tensor):
        rows = {"a": slice(0, 4), "b": slice(1, 3), "c": slice(2, 3)}[name]
        model.weight.data[rows].copy_(tensor)
        if name == "c":
            model.weight.data[3].zero_()

    specs = {"a": ((4, 4), F32), "b": ((2, 4), F32), "c": ((1, 4), F32)}
    model, expected = Single(load, 4, 4), Single(load, 4, 4)
    target = distckpt.record_loader(model.load_weights, specs)
    values = stored_values(specs)
    expected.load_weights(values.items())
    load_recorded(target, values, tmp_path / "stored")
    assert torch.equal(model.weight, expected.weight)
    assert target.unfilled == {}


def test_a_buffer_of_the_loader_passes_on_what_it_was_given(tmp_path):
    def load(model, name, tensor):
        buffer = torch.ones(4, 6)
        buffer[:, :4].copy_(tensor.t())
        model.weight.data.copy_(buffer.repeat(2, 1))

    def load_repeated(model, name, tensor):
        model.weight.data.copy_(tensor.repeat_interleave(2, dim=0).repeat(1, 2))

    values = {"w": torch.randn(4, 4)}
    for number, (each, shape) in enumerate(((load_repeated, (8, 8)),)):
        model, expected = Single(each, *shape), Single(each, *shape)
        target = distckpt.record_loader(model.load_weights, {"w": ((4, 4), F32)})
        load_recorded(target, values, tmp_path / str(number))
        expected.load_weights(values.items())
        assert torch.equal(model.weight, expected.weight)


@pytest.mark.parametrize("form", ["path", "opened", "objects"])
def test_metadata_in_several_forms(form, tmp_path):
    values = {"w": torch.randn(4, 4)}
    save_file(values, tmp_path / "model.safetensors")
    opened = distckpt.open(tmp_path, as_stored=True)
    metadata = {"path": tmp_path, "opened": opened, "objects": list(opened.tensors.values())}[form]
    model = Single(into_weight(lambda tensor: tensor), 4, 4)
    distckpt.load(distckpt.record_loader(model.load_weights, metadata), tmp_path)
    assert torch.equal(model.weight, values["w"])

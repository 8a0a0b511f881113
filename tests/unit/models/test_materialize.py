"""Memory for modules on the meta device: what no checkpoint holds is computed, or refused."""

from __future__ import annotations

import pytest
import torch

import distckpt
from distckpt import CheckpointingException, InvalidShardingError, LoadMismatchError


class Buffers(torch.nn.Embedding):
    """A layer whose inherited `reset_parameters` does not know its buffers."""

    def __init__(self):
        super().__init__(3, 2)
        for name, value in self.values().items():
            self.register_buffer(name, value, persistent=False)

    @staticmethod
    def values():
        return {
            "scale": torch.tensor(0.0),
            "frequencies": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16),
            "positions": torch.arange(4).expand(2, -1).T,
            "minus": torch.full((2,), -1),
            "mask": torch.ones(2, 2, dtype=torch.bool).tril(),
            "all": torch.ones(2, dtype=torch.bool),
            "empty": torch.ones(0),
        }


class Computing(torch.nn.Module):
    """A model that initializes its layers, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(Buffers()) for _ in range(2)])

    def _init_weights(self, module):
        for name, value in module.values().items():
            module.get_buffer(name).copy_(value)


class Plain(Computing):
    _init_weights = None


class Failing(Computing):
    def _init_weights(self, module):
        raise RuntimeError("of another version")


class Random(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("projection", torch.empty(5), persistent=False)
        self.weight = torch.nn.Parameter(torch.ones(2))

    def reset_parameters(self):
        self.projection.normal_()


def on_meta(kind):
    with torch.device("meta"):
        return kind()


def test_the_nearest_module_around_a_buffer_computes_it(tmp_path):
    saved = Computing()
    distckpt.save({"model": saved}, tmp_path / "saved")
    loaded = on_meta(Computing)
    distckpt.load({"model": loaded}, tmp_path / "saved", materialize="cpu")
    for layer, expected in zip(loaded.layers, saved.layers, strict=True):
        assert torch.equal(layer[0].weight, expected[0].weight)
        for name, value in Buffers.values().items():
            torch.testing.assert_close(
                layer[0].get_buffer(name), value, rtol=0, atol=0, equal_nan=True
            )


def test_buffers_are_computed_where_the_default_device_is_meta(tmp_path):
    saved = Computing()
    distckpt.save({"model": saved}, tmp_path / "saved")
    with torch.device("meta"):
        loaded = Computing()
        distckpt.load({"model": loaded}, tmp_path / "saved", materialize="cpu")
    for layer in loaded.layers:
        assert torch.equal(layer[0].positions, Buffers.values()["positions"])


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_the_meta_device_has_no_memory(device, tmp_path):
    distckpt.save({"model": Computing()}, tmp_path / "saved")
    loaded = on_meta(Computing)
    with pytest.raises(ValueError, match="materialize='meta' gives no memory"):
        distckpt.load({"model": loaded}, tmp_path / "saved", materialize=device)
    assert all(buffer.is_meta for buffer in loaded.buffers())


def test_an_optimizer_that_was_made_before_the_load_is_refused(tmp_path):
    distckpt.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "saved")
    with torch.device("meta"):
        loaded = torch.nn.Linear(2, 2)
    state = {"model": loaded, "optimizer": torch.optim.AdamW(loaded.parameters())}
    with pytest.raises(InvalidShardingError, match=r"before a load with materialize=.*afterwards"):
        distckpt.load(state, tmp_path / "saved", materialize="cpu")
    assert loaded.weight.is_meta


@pytest.mark.parametrize("kind", [Plain, Failing, Buffers])
def test_buffers_that_nothing_computes_are_refused_each_time(kind, tmp_path):
    saved, loaded = kind(), on_meta(kind)
    distckpt.save({"model": saved}, tmp_path / "saved")
    why = "RuntimeError: of another version" if kind is Failing else "_init_weights"
    for _ in range(2):
        with pytest.raises(CheckpointingException, match=rf"'\S*scale'.* on the meta .*{why}"):
            distckpt.load({"model": loaded}, tmp_path / "saved", materialize="cpu")
        assert all(buffer.is_meta for buffer in loaded.buffers())
        assert all(parameter.is_meta for parameter in loaded.parameters())


def test_a_buffer_may_be_random(tmp_path):
    distckpt.save({"model": Random()}, tmp_path / "saved")
    loaded = on_meta(Random)
    torch.manual_seed(5)
    distckpt.load({"model": loaded}, tmp_path / "saved", materialize="cpu")
    torch.manual_seed(5)
    assert torch.equal(loaded.projection, torch.randn(5))


def test_buffers_with_memory_keep_their_values(tmp_path):
    """As in a model that accelerate's `init_empty_weights` has made."""
    saved, loaded = Plain(), Plain()
    distckpt.save({"model": saved}, tmp_path / "saved")
    for layer in loaded.layers:
        layer[0].weight = torch.nn.Parameter(layer[0].weight.to("meta"))
    distckpt.load({"model": loaded}, tmp_path / "saved", materialize="cpu")
    for layer, expected in zip(loaded.layers, saved.layers, strict=True):
        assert torch.equal(layer[0].weight, expected[0].weight)
        assert torch.equal(layer[0].positions, expected[0].positions)


class Headed(torch.nn.Module):
    """A model of which the checkpoint has the body only."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 8)
        self.tied = self.head


def save_body(path):
    net = torch.nn.Linear(8, 8)
    distckpt.save({"model": torch.nn.ModuleDict({"net": net})}, path)
    return net


@pytest.mark.parametrize("strict", ["report", "raise", "complete"])
def test_parameters_that_are_not_stored_are_refused_each_time(strict, tmp_path):
    save_body(tmp_path / "saved")
    loaded = on_meta(Headed)
    for each in (strict, "report"):
        with pytest.raises(LoadMismatchError, match=r"'head\.bias'.*'head\.weight'") as caught:
            distckpt.load({"model": loaded}, tmp_path / "saved", materialize="cpu", strict=each)
        assert all(parameter.is_meta for parameter in loaded.parameters())
        assert loaded.tied.weight is loaded.head.weight
    assert "materialize= has no values" in str(caught.value)
    assert caught.value.unexpected >= {"head.bias", "head.weight"}


def test_parameters_with_memory_that_are_not_stored_keep_their_values(tmp_path):
    net = save_body(tmp_path / "saved")
    loaded = on_meta(Headed)
    loaded.head = loaded.tied = torch.nn.Linear(8, 8)
    expected = loaded.head.weight.clone()
    distckpt.load({"model": loaded}, tmp_path / "saved", materialize="cpu", strict="report")
    assert torch.equal(loaded.net.weight, net.weight)
    assert torch.equal(loaded.head.weight, expected)

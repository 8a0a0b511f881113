"""`record_loader`: what fills its state dict does what the loader does with whole tensors."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import distckpt
from distckpt import InvalidShardingError
from tests.support.engine_loaders import MODELS, EngineModel, Single, stored_values, tensors_of
from tests.support.programs import run_program

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


def catch_and_skip(model, name, tensor):
    try:
        model.weight.data.copy_(tensor + 1)
    except Exception:
        print("skipped", name)


def catch_and_guess(model, name, tensor):
    try:
        model.weight.data.copy_(tensor * tensor.max().item())
    except Exception:
        model.weight.data.fill_(1.0)


def catching(take):
    def load(model, name, tensor):
        try:
            model.weight.data.copy_(torch.tensor(take(tensor)))
        except Exception:
            model.weight.data.fill_(1.0)

    return load


CATCH = {
    "skip": catch_and_skip,
    "guess": catch_and_guess,
    "numpy": catching(lambda tensor: tensor.numpy()),
    "tolist": catching(lambda tensor: tensor.tolist()),
    "asarray": catching(np.asarray),
}


@pytest.mark.parametrize("load", CATCH.values(), ids=CATCH)
def test_a_loader_that_catches_the_refusal_is_refused(load):
    with pytest.raises(distckpt.InvalidShardingError, match=r"'odd\.weight'"):
        distckpt.record_loader(Single(load, 4, 4).load_weights, {"odd.weight": ((4, 4), F32)})


def in_a_thread(function) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_thread_of_the_loader_may_copy_into_the_model():
    def load(model, name, tensor):
        in_a_thread(lambda: model.weight.data[:2].copy_(tensor[2:]))

    model = Single(load, 4, 4)
    target = distckpt.record_loader(model.load_weights, {"w": ((4, 4), F32)})
    (shard,) = target.values()
    assert shard.data.data_ptr() == model.weight.data_ptr()
    assert shard.global_slice() == (slice(2, 4), slice(0, 4))
    assert target.unfilled == {"weight": 8}


@pytest.mark.parametrize("is_made_there", [True, False])
def test_what_a_thread_copies_into_memory_of_its_own_is_refused_by_name(is_made_there):
    """What it copies on from there is not seen."""

    def load(model, name, tensor):
        made = torch.zeros(4, 4)

        def work():
            between = torch.zeros(4, 4) if is_made_there else made
            between.copy_(tensor)
            model.weight.data.copy_(between)

        in_a_thread(work)

    model = Single(load, 4, 4)
    with pytest.raises(distckpt.InvalidShardingError, match=r"stored tensor 'w'.* thread"):
        distckpt.record_loader(model.load_weights, {"w": ((4, 4), F32)})


def test_copies_of_threads_are_refused_where_the_model_is_not_known():
    model = Single(None, 4, 4)

    def load(weights):
        for _, tensor in weights:
            in_a_thread(lambda: model.weight.data.copy_(tensor))  # noqa: B023

    with pytest.raises(distckpt.InvalidShardingError, match=r"stored tensor 'w'.*module="):
        distckpt.record_loader(load, {"w": ((4, 4), F32)})
    assert set(distckpt.record_loader(load, {"w": ((4, 4), F32)}, module=model)) == {"w"}


def test_a_model_without_memory_is_refused():
    model = Single(into_weight(lambda tensor: tensor), 4, 4).to("meta")
    with pytest.raises(distckpt.InvalidShardingError, match="memory"):
        distckpt.record_loader(model.load_weights, {"w": ((4, 4), F32)})


def _converted(model) -> None:
    model.to(BF16)


def _replaced(model) -> None:
    model.weight = nn.Parameter(torch.zeros(4, 2), requires_grad=False)


def _swapped(model) -> None:
    model.weight.data = torch.zeros(4, 2)


def _turned(model) -> None:
    model.weight.data = model.weight.data.view(2, 4).t()


@pytest.mark.parametrize("move", [_converted, _replaced, _swapped, _turned])
@pytest.mark.parametrize("place", ["alone", "below a name"])
def test_memory_that_was_replaced_since_is_named(move, place, tmp_path):
    model = Single(into_weight(lambda tensor: tensor), 4, 2)
    target = distckpt.record_loader(model.load_weights, {"weight": ((4, 2), F32)})
    state = target if place == "alone" else {"engine": target}
    values = {"weight": torch.randn(4, 2)}
    save_file(values, tmp_path / "model.safetensors")
    move(model)
    with pytest.raises(
        InvalidShardingError, match=r"'weight'.*Record it again: with record_loader"
    ):
        distckpt.load(state, tmp_path)
    with pytest.raises(
        InvalidShardingError, match=r"'weight'.*Record it again: with record_loader"
    ):
        distckpt.redistribute(values, state)


def test_memory_that_was_freed_and_made_anew_is_filled(tmp_path):
    """As an engine that sleeps between versions does it."""
    model = Single(into_weight(lambda tensor: tensor), 4, 2)
    target = distckpt.record_loader(model.load_weights, {"weight": ((4, 2), F32)})
    values = {"weight": torch.randn(4, 2)}
    storage = model.weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    other = torch.zeros(size)  # else the same memory may be given out
    storage.resize_(size)
    distckpt.redistribute(values, target)
    assert torch.equal(model.weight, values["weight"])
    del other


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


def through_a_buffer(tensor):
    buffer = torch.ones(4, 6)
    buffer[:, :4].copy_(tensor.t())
    return buffer


def in_buffer(tensor):
    return torch.zeros(4, 4).copy_(tensor)


COPIED = {
    "repeated": (lambda tensor: tensor.repeat(1, 2), (4, 8)),
    "repeated in front": (lambda tensor: tensor.repeat(3, 2, 1), (3, 8, 4)),
    "repeated from a buffer": (lambda tensor: in_buffer(tensor).repeat(2, 1), (8, 4)),
    "repeated by element": (lambda tensor: tensor.repeat_interleave(2, dim=0), (8, 4)),
    "through a buffer": (through_a_buffer, (4, 6)),
    "reshaped": (lambda tensor: tensor.t().reshape(2, 8), (2, 8)),
    "flattened": (lambda tensor: tensor.t().flatten()[3:11].view(4, 2), (4, 2)),
    "windows": (lambda tensor: tensor.unfold(0, 2, 1), (3, 4, 2)),
    "diagonal": (lambda tensor: tensor.diagonal(), (4,)),
    "strided": (lambda tensor: tensor.as_strided((3, 2), (5, 3), 1), (3, 2)),
    "joined": (lambda tensor: torch.cat([tensor[2:], tensor[:2].clone()], 1), (2, 8)),
    "stacked": (lambda tensor: torch.stack(tensor.unbind(1), 1), (4, 4)),
    "same": (lambda tensor: tensor.to("cpu").float().contiguous().detach(), (4, 4)),
    "broadcast": (lambda tensor: tensor[1], (3, 4)),
    "in place": (lambda tensor: torch.clone(tensor)[:, 1:].copy_(tensor[:, :3]), (4, 3)),
    "rearranged": (lambda tensor: tensor.view(2, 2, 4).permute(2, 1, 0).reshape(4, 4), (4, 4)),
}


@pytest.mark.parametrize(("change", "shape"), COPIED.values(), ids=COPIED)
@pytest.mark.parametrize("is_inference", [False, True])
def test_views_and_copies(change, shape, is_inference):
    model, expected = Single(into_weight(change), *shape), Single(into_weight(change), *shape)
    with torch.inference_mode(is_inference):
        target = distckpt.record_loader(model.load_weights, {"w": ((4, 4), F32)})
    values = {"w": torch.randn(4, 4)}
    expected.load_weights(values.items())
    with torch.inference_mode(is_inference):
        for shard in target.values():
            shard.data.copy_(values[shard.key][shard.global_slice()])
    assert torch.equal(model.weight, expected.weight)


def test_a_rank_that_takes_zeros_in_the_place_of_a_stored_tensor():
    """As ranks do on which another one adds a bias."""

    def load(model, name, tensor):
        tensor.zero_()
        model.weight.data[:2].copy_(tensor[1:3].to(F32))

    model = Single(load, 4, 4)
    model.weight.fill_(7)
    target = distckpt.record_loader(model.load_weights, {"bias": ((4, 4), BF16)})
    assert model.weight[:2].eq(0).all()
    assert model.weight[2:].eq(7).all()
    assert target.unused == {"bias"}
    assert target.unfilled == {"weight": 8}


@pytest.mark.parametrize("form", ["path", "opened", "objects"])
def test_metadata_in_several_forms(form, tmp_path):
    values = {"w": torch.randn(4, 4)}
    save_file(values, tmp_path / "model.safetensors")
    opened = distckpt.open(tmp_path, as_stored=True)
    metadata = {"path": tmp_path, "opened": opened, "objects": list(opened.tensors.values())}[form]
    model = Single(into_weight(lambda tensor: tensor), 4, 4)
    distckpt.load(distckpt.record_loader(model.load_weights, metadata), tmp_path)
    assert torch.equal(model.weight, values["w"])


REPLACE = """
import sys, threading
import numpy as np, torch
from torch import nn
import distckpt

model = nn.Linear(4, 2, bias=False)
free = nn.Parameter(torch.ones(2, 4))
weight = model.weight
expected = weight.detach().numpy().copy()

def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()

def replace(tensor):
    make = nn.Parameter
    if how == "parameter": model.weight = make(tensor)
    if how == "copy": setattr(model, "weight", make(tensor.clone()))
    if how == "written memory": model.weight = make(torch.empty_like(tensor).copy_(tensor))
    if how == "data of memory": model.weight.data = torch.empty_like(tensor).copy_(tensor)
    if how == "data": model.weight.data = tensor
    if how == "data of free": free.data = tensor[:]
    if how == "swap": torch.utils.swap_tensors(model.weight, make(tensor))
    if how == "new": model.register_buffer("more", tensor)
    if how == "assign": model.load_state_dict({"weight": tensor}, assign=True)
    if how == "kept": model.listed = [tensor]
    if how == "thread": in_a_thread(lambda: setattr(model, "weight", make(tensor)))
    if how == "pointer": tensor.data_ptr()

def load_weights(weights):
    for _, tensor in weights:
        replace(tensor)

how = sys.argv[1]
for module in (model, None):
    try:
        specs = {"w": ((2, 4), torch.float32)}
        distckpt.record_loader(lambda weights: load_weights(weights), specs, module=module)
    except distckpt.InvalidShardingError as error:
        print(error)
    assert model.weight is weight and type(weight) is nn.Parameter, weight
    assert len(model.state_dict()) == 1
    np.testing.assert_array_equal(model(torch.eye(4)).detach().numpy(), expected.T)
    assert torch.equal(free, torch.ones(2, 4))
"""
REPLACED = {
    "parameter": "replaces 'Linear.weight'",
    "copy": "replaces 'Linear.weight'",
    "written memory": "replaces 'Linear.weight'",
    "data of memory": "replaces 'Linear.weight'",
    "data": "stored tensor 'w'",
    "data of free": "stored tensor 'w'",
    "swap": "stored tensor 'w'",
    "new": "replaces 'Linear.more'",
    "assign": "replaces 'Linear.weight'",
    "kept": "keeps the stored tensor 'w'",
    "thread": "replaces 'Linear.weight'",
    "pointer": "calls data_ptr on the stored tensor 'w'",
}


@pytest.mark.parametrize("how", REPLACED)
def test_a_loader_that_replaces_tensors_is_refused_and_leaves_the_model_as_it_was(how):
    """In a process of its own, which parameters without memory would end."""
    ended = run_program(["-c", REPLACE, how], os.environ)
    assert ended.returncode == 0, ended
    assert ended.stdout.count(REPLACED[how]) == 2

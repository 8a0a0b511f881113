"""Modules under wrappers, and modules that only look like wrappers: torch's own state dict says
what is stored.
"""

from __future__ import annotations

import itertools
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import parametrizations

import distckpt
import distckpt.modules
from distckpt import InvalidShardingError

NAMES = ("_orig_mod", "_original_module", "_checkpoint_wrapped_module", "module")
EXTRAS = ("parameter", "buffer", "scratch", "head", "extra state", "none")


class Layer(torch.nn.Module):
    """A layer whose child is called like that of a wrapper."""

    def __init__(self, inner, name, extra):
        super().__init__()
        self.add_module(name, inner)
        if extra == "parameter":
            self.weight = torch.nn.Parameter(torch.empty(2, 2))
        elif extra == "buffer":
            self.register_buffer("weight", torch.empty(2, 2))
        elif extra == "scratch":
            self.register_buffer("weight", torch.empty(2, 2), persistent=False)
        elif extra == "head":
            self.head = torch.nn.Linear(2, 1)


class Counting(Layer):
    """A layer with extra state."""

    calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class WithHead(torch.nn.parallel.DistributedDataParallel):
    """A data parallel backbone, with a head outside of it."""

    def __init__(self, inner):
        super().__init__(inner)
        self.temperature = torch.nn.Parameter(torch.empty(()))
        self.head = torch.nn.Linear(2, 1)


class DataParallelWithHead(torch.nn.DataParallel):
    """The same for several devices of one process."""

    def __init__(self, inner):
        super().__init__(inner)
        self.register_buffer("scale", torch.empty(3))


def sharded(module):
    # torch takes each of them once only.
    return module if isinstance(module, FSDPModule) else fully_shard(module)


def compiled(module):
    is_compiled = isinstance(module, torch._dynamo.OptimizedModule)
    return module if is_compiled else torch.compile(module, backend="eager")


WRAPPERS = {
    "compile": compiled,
    "checkpoint": checkpoint_wrapper,
    "data parallel": torch.nn.DataParallel,
    "distributed": torch.nn.parallel.DistributedDataParallel,
    "data parallel with head": DataParallelWithHead,
    "distributed with head": WithHead,
    "sharded": sharded,
}
LEAVES = {
    "linear": lambda: torch.nn.Linear(2, 2),
    "norm": lambda: torch.nn.BatchNorm1d(2),
    "parametrized": lambda: parametrizations.weight_norm(torch.nn.Linear(2, 2)),
}


def recipes(wrappers):
    """Recipes of models, of which several equal models can be made."""
    leaves = st.tuples(st.just("leaf"), st.sampled_from(sorted(LEAVES)))
    layer = partial(st.tuples, st.just("layer"), st.sampled_from(NAMES), st.sampled_from(EXTRAS))

    def larger(inner):
        wrapped = st.tuples(st.just("wrapper"), st.sampled_from(wrappers), inner)
        in_order = st.tuples(st.just("sequence"), st.lists(inner, min_size=1, max_size=3))
        return wrapped | in_order | layer(inner)

    return st.recursive(leaves, larger, max_leaves=5)


def made(recipe):
    kind, *rest = recipe
    if kind == "leaf":
        return LEAVES[rest[0]]()
    if kind == "sequence":
        return torch.nn.Sequential(*map(made, rest[0]))
    if kind == "wrapper":
        return WRAPPERS[rest[0]](made(rest[1]))
    name, extra, inner = rest
    return (Counting if extra == "extra state" else Layer)(made(inner), name, extra)


def model_of(recipe, first):
    """Make a model each of whose tensors has a value of its own, from `first` on."""
    model = made(recipe)
    numbers = itertools.count(first)
    with torch.no_grad():
        for tensor in unique(model.state_dict(keep_vars=True).values()):
            tensor.fill_(next(numbers))
    for module in model.modules():
        if isinstance(module, Counting):
            module.calls = next(numbers)
    return model


def unique(values):
    return list({id(value): value for value in values if torch.is_tensor(value)}.values())


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def contents(module):
    return {
        name: whole(value).tolist() if torch.is_tensor(value) else value
        for name, value in module.state_dict().items()
    }


def check_that_all_is_stored_once(recipe, place):
    model, fresh = model_of(recipe, 1), model_of(recipe, 101)
    with tempfile.TemporaryDirectory() as folder:
        try:
            distckpt.save(place(model), f"{folder}/saved")
        except InvalidShardingError as error:
            if "names of wrappers are removed: '" in str(error):
                return
            raise
        shard_files = Path(folder, "saved", "tensors").glob("*.safetensors")
        stored = [tensor for file in shard_files for tensor in load_file(file).values()]
        distckpt.load(place(fresh), f"{folder}/saved")
    expected = [whole(tensor) for tensor in unique(model.state_dict(keep_vars=True).values())]
    assert sorted(map(repr, stored)) == sorted(repr(tensor.detach()) for tensor in expected)
    assert contents(fresh) == contents(model)


PLACES = {
    "alone": lambda model: model,
    "model": lambda model: {"model": model, "step": 1},
    "nested": lambda model: {"nets": {"critic": model}},
}
FILES = partial(
    settings, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


# What is sharded has no copies that DistributedDataParallel could compare.
COPIED = sorted({*WRAPPERS} - {"sharded"})
SHARDED = ["checkpoint", "compile", "sharded"]


@pytest.mark.parametrize("wrappers", [COPIED, SHARDED], ids=["copied", "sharded"])
@FILES(max_examples=25)
@given(data=st.data())
def test_all_state_of_any_nesting_is_stored_once_or_refused(one_rank, wrappers, data):
    recipe = data.draw(recipes(wrappers))
    check_that_all_is_stored_once(recipe, PLACES[data.draw(st.sampled_from(sorted(PLACES)))])


def test_a_layer_inside_a_wrapper_of_the_same_name_is_refused_by_name(tmp_path):
    layer = Layer(torch.nn.Linear(2, 2), "_checkpoint_wrapped_module", "parameter")
    # torch removes the name of the wrapper, and what is left looks like it.
    net = torch.nn.Sequential(checkpoint_wrapper(layer))
    names = "'0.weight'.*'0.weight' and '0._checkpoint_wrapped_module.weight'"
    with pytest.raises(InvalidShardingError, match=names):
        distckpt.save({"model": net}, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_modules_that_describe_themselves_under_one_name_are_refused():
    class Forgetful(torch.nn.Linear):
        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            return {"weight": distckpt.ShardedTensor.from_rank_offsets("weight", self.weight)}

    one = Forgetful(2, 2)
    assert list(distckpt.modules.sharded_state_dict(torch.nn.Sequential(one, one))) == ["weight"]
    two = torch.nn.Sequential(one, Forgetful(2, 2))
    for describe in (
        distckpt.modules.sharded_state_dict,
        distckpt.modules.sharded_state_dict_default,
    ):
        with pytest.raises(InvalidShardingError, match="different tensors under the name 'weight'"):
            describe(two)


def test_a_wrapper_that_has_the_module_twice_is_seen_through():
    class Twice(torch.nn.Module):
        """What Fabric makes: the module, and the same under data parallelism."""

        def __init__(self, module):
            super().__init__()
            self._forward_module = torch.nn.DataParallel(module)
            self._original_module = module

    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    described = distckpt.modules.sharded_state_dict
    assert list(described(Twice(net))) == list(described(net))
    twice = Twice(net)
    twice._forward_module.scale = torch.nn.Parameter(torch.ones(1))
    assert list(described(twice)) == list(twice.state_dict())

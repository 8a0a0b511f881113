"""A dict of objects is saved and loaded as it is: `distckpt.save({"model": model, "optimizer":
optimizer, ...})`.

The oracle is torch: training that was not interrupted, and its own `state_dict` and
`load_state_dict`.
"""

from __future__ import annotations

import collections
import copy
import enum
import json
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint

import distckpt
from distckpt.modules import sharded_state_dict
from distckpt.optimizer import sharded_optimizer_state_dict
from tests.support.small_training import Net, assert_same, train


def make(seed):
    model = Net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
    }


def go_on(state, steps):
    for step in steps:
        train(state["model"], state["optimizer"], [step])
        state["scheduler"].step()


def test_a_dict_of_objects_is_saved_and_loaded(tmp_path):
    saved, resumed = make(1), make(2)
    go_on(saved, range(3))
    distckpt.save(
        {**saved, "rng": distckpt.RngState(), "step": 3, "seen": [{"a": 1}, 2]}, tmp_path / "saved"
    )
    numbers = (random.random(), np.random.rand(), torch.rand(2).tolist())

    given = {**resumed, "rng": distckpt.RngState(), "step": 0}
    loaded = distckpt.load(given, tmp_path / "saved", strict="raise")
    assert all(loaded[name] is value for name, value in given.items() if name != "step")
    assert (loaded["step"], loaded["seen"], given["step"]) == (3, [{"a": 1}, 2], 3)
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
        {
            "model": described,
            "optimizer": sharded_optimizer_state_dict(saved["optimizer"], described),
        },
        tmp_path / "described",
    )
    assert distckpt.diff(tmp_path / "objects", tmp_path / "described").is_same


def test_background_saves_and_managers_take_objects(tmp_path):
    saved = make(1)
    go_on(saved, range(2))
    distckpt.async_save(saved, tmp_path / "background").result()
    with distckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(2, {**saved, "step": 2})
    for load in (partial(distckpt.load, path=tmp_path / "background"), manager.load):
        resumed = make(2)
        load(resumed)
        assert_same(resumed["optimizer"].state_dict(), saved["optimizer"].state_dict())
        assert_same(resumed["model"].state_dict(), saved["model"].state_dict())


# What some need besides parameters; Muon takes matrices only.


class Tied(torch.nn.Module):
    """Like a language model: input and output embedding are one parameter; a buffer that is not
    saved.
    """

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.rope = Rope()


class Rope(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.empty(2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.frequencies.copy_(torch.tensor([1.0, 0.5]))


def test_a_tied_model_loads_from_its_own_export(tmp_path):
    saved, loaded = Tied(1), Tied(2)
    distckpt.save({"model": saved}, tmp_path / "saved")
    distckpt.consolidate(tmp_path / "saved", tmp_path / "exported")
    assert len(distckpt.open(tmp_path / "exported").read_tensors()) == 1
    distckpt.load({"model": loaded}, tmp_path / "exported")
    assert loaded.head.weight is loaded.embed.weight
    assert torch.equal(loaded.embed.weight, saved.embed.weight)
    described = sharded_state_dict(loaded)
    names = distckpt.load(described, tmp_path / "exported").keys()
    assert names == described.keys()


def test_a_model_on_the_meta_device_gets_memory(tmp_path):
    saved = Tied(1)
    distckpt.save({"model": saved}, tmp_path / "saved")
    with torch.device("meta"):
        loaded = Tied()
        untied = torch.nn.Sequential(torch.nn.Linear(4, 4))
        untied.register_buffer("mask", torch.empty(2), persistent=False)
    assert (
        distckpt.load({"model": loaded}, tmp_path / "saved", materialize="cpu")["model"] is loaded
    )
    assert loaded.head.weight is loaded.embed.weight
    assert torch.equal(loaded.embed.weight, saved.embed.weight)
    assert loaded.rope.frequencies.tolist() == [1.0, 0.5]
    with pytest.raises(
        distckpt.CheckpointingException, match=r"The buffers 'mask' .* reset_parameters"
    ):
        distckpt.load({"model": untied}, tmp_path / "saved", materialize="cpu")


def test_a_model_on_the_meta_device_is_refused_without_a_device(tmp_path):
    distckpt.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "saved")
    with pytest.raises(distckpt.CheckpointingException, match="materialize"):
        distckpt.load({"model": torch.nn.Linear(2, 2, device="meta")}, tmp_path / "saved")


class DistributedDataParallel(torch.nn.Module):
    """Wraps as torch's does, which needs a process group."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Wraps as accelerate's does, whose step does nothing until gradients are complete."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)


def test_wrappers_are_seen_through(tmp_path):
    saved = make(1)
    go_on(saved, range(2))
    wrapped = DistributedDataParallel(saved["model"])
    whole = torch.nn.ModuleDict({"net": DistributedDataParallel(saved["model"])})
    distckpt.save(
        {"model": wrapped, "optimizer": AcceleratedOptimizer(saved["optimizer"])},
        tmp_path / "saved",
    )
    distckpt.save({"model": whole}, tmp_path / "below")
    names = set(saved["model"].state_dict())
    assert {key for key in distckpt.open(tmp_path / "saved").tensors if "state" not in key} == names
    assert distckpt.open(tmp_path / "below").tensors.keys() == {f"net.{name}" for name in names}
    resumed = make(2)
    distckpt.load(resumed | {"scheduler": None}, tmp_path / "saved")
    assert_same(resumed["optimizer"].state_dict(), saved["optimizer"].state_dict())
    again = torch.nn.ModuleDict({"net": DistributedDataParallel(Net(3))})
    distckpt.load({"model": again}, tmp_path / "below")
    assert_same(again.state_dict(), whole.state_dict())


class Lookahead:
    """Wraps another optimizer, and keeps slow weights by parameter, and a count, as that of
    pytorch_optimizer does.
    """

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state = {}
        self.zero_grad = optimizer.zero_grad

    def step(self):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                self.state.setdefault(p, {"slow": p.detach().clone()})
        self.optimizer.step()

    def state_dict(self):
        return {"slow": self.state, "base": self.optimizer.state_dict(), "count": self.count}

    def load_state_dict(self, state_dict):
        self.state, self.count = state_dict["slow"], state_dict["count"]
        self.optimizer.load_state_dict(state_dict["base"])


def test_optimizers_with_a_state_dict_of_their_own_resume(tmp_path):
    def make_wrapped(seed, reverse=False):
        model = Net(seed)
        params = list(model.parameters())
        return model, Lookahead(torch.optim.Adam(params[::-1] if reverse else params))

    model, optimizer = make_wrapped(1)
    train(model, optimizer, range(3))
    weights = [p.detach().clone() for p in model.parameters()]
    distckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    assert all(map(torch.equal, weights, model.parameters()))
    assert optimizer.count == 3
    new_model, new = make_wrapped(2, reverse=True)
    distckpt.load({"model": new_model, "optimizer": new}, tmp_path / "saved", strict="raise")
    assert new.count == 3
    # By name: the new optimizer numbers its parameters the other way round.
    for p, other in zip(model.parameters(), new_model.parameters(), strict=True):
        assert_same(new.state[other], optimizer.state[p])
        assert_same(new.optimizer.state[other], optimizer.optimizer.state[p])


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_wrapper_that_was_not_there_is_named(tmp_path, is_wrapped):
    model = Net(1)
    adam = torch.optim.Adam(model.parameters())
    train(model, adam, range(1))
    saved, wanted = (Lookahead(adam), adam) if is_wrapped else (adam, Lookahead(adam))
    if is_wrapped:
        train(model, saved, range(1))
    distckpt.save({"model": model, "optimizer": saved}, tmp_path / "saved")
    text = (
        "of class Lookahead" if is_wrapped else r"The Lookahead at 'optimizer' .*KeyError: 'slow'"
    )
    with pytest.raises(distckpt.LoadMismatchError, match=text):
        distckpt.load({"model": model, "optimizer": wanted}, tmp_path / "saved")


def test_what_belongs_to_no_parameter_is_kept(tmp_path):
    saved, resumed = make(1), make(2)
    go_on(saved, range(2))
    saved["optimizer"].state["k"] = {"a": 1, "b": torch.ones(3)}
    weight = saved["model"].up.weight
    saved["optimizer"].state[weight]["basis"] = torch.arange(12.0).view(3, 4).t()
    saved["optimizer"].state[weight]["list"] = [
        torch.ones(2),
        {"x": torch.zeros(6, 4), "n": 3},
        torch.tensor(2.0),
    ]
    expected = copy.deepcopy(saved["optimizer"].state_dict())
    distckpt.save(saved, tmp_path / "saved")
    distckpt.load(resumed, tmp_path / "saved", strict="raise")
    assert_same(resumed["optimizer"].state_dict(), expected)


def test_optimizers_in_a_list_keep_what_is_their_own_or_are_refused(tmp_path, caplog):
    model = Net(1)
    params = [list(layer.parameters()) for layer in (model.up, model.down)]

    def look(counts, lr):
        found = [Lookahead(torch.optim.SGD(each, lr=lr)) for each in params]
        for optimizer, count in zip(found, counts, strict=True):
            optimizer.count = count
        return found

    with pytest.raises(distckpt.InvalidShardingError, match=r"at 'optimizers' keep values .* dict"):
        distckpt.save({"model": model, "optimizers": look([3, 5], 0.1)}, tmp_path / "saved")
    saved, loaded = look([3, 5], 0.1), look([0, 0], 0.2)
    names = ("first", "second")
    for way, wrap in (("dict", lambda given: dict(zip(names, given, strict=True))), ("list", list)):
        if way == "list":
            saved[0].count = 5
        distckpt.save({"model": model, "optimizers": wrap(saved)}, tmp_path / way)
        distckpt.load({"model": model, "optimizers": wrap(loaded)}, tmp_path / way)
        assert [optimizer.count for optimizer in loaded] == [each.count for each in saved]
        assert all(each.optimizer.param_groups[0]["lr"] == 0.1 for each in loaded)

    def with_empty(rates):
        return [
            torch.optim.SGD([{"params": each, "lr": 1.0}, {"params": [], "lr": lr}])
            for each, lr in zip(params, rates, strict=True)
        ]

    for rates, expected in (([0.3, 0.4], [9, 9]), ([0.3, 0.3], [0.3, 0.3])):
        path, new = tmp_path / str(rates), with_empty([9, 9])
        distckpt.save({"model": model, "optimizers": with_empty(rates)}, path)
        caplog.clear()
        distckpt.load({"model": model, "optimizers": new}, path)
        assert [optimizer.param_groups[1]["lr"] for optimizer in new] == expected
        assert ("group 1 of several optimizers" in caplog.text) == (expected == [9, 9])


def test_the_class_is_that_of_the_optimizer_of_the_same_parameters(tmp_path, caplog):
    model = Net(1)
    first, second = (list(layer.parameters()) for layer in (model.up, model.down))
    saved = [torch.optim.Adam(first), torch.optim.AdamW(second)]
    distckpt.save({"model": model, "optimizers": saved}, tmp_path / "saved")
    request = [torch.optim.AdamW(second), torch.optim.Adam(first)]
    distckpt.load({"model": model, "optimizers": request}, tmp_path / "saved")
    assert caplog.text == ""
    request = [torch.optim.Adam(second), torch.optim.AdamW(first)]
    distckpt.load({"model": model, "optimizers": request}, tmp_path / "saved")
    assert caplog.text.count("is loaded into one of class") == 2


@pytest.mark.parametrize(
    "state",
    [
        {"Q": [torch.ones(2)], "Q.0": torch.zeros(2)},
        {"Q.0": torch.zeros(2), "Q": [torch.ones(2)]},
        {1: torch.ones(2), "1": torch.zeros(2)},
        {"a": {"b.c": torch.ones(2), "b": {"c": torch.zeros(2)}}},
    ],
)
def test_tensors_of_one_name_in_the_state_of_an_optimizer_are_refused(tmp_path, state):
    saved = make(1)
    saved["optimizer"].state[saved["model"].up.weight] = state
    with pytest.raises(distckpt.InvalidShardingError, match="two tensors that would be stored as"):
        distckpt.save(saved, tmp_path / "saved")


def test_states_may_go_by_numbers(tmp_path):
    saved, loaded = make(1), make(2)
    state = {
        0: torch.ones(6, 4),
        1: torch.tensor(2.0),
        2: [torch.ones(2)],
        "step": torch.tensor(3.0),
    }
    saved["optimizer"].state[saved["model"].up.weight] = copy.deepcopy(state)
    distckpt.save(saved, tmp_path / "saved")
    distckpt.load(loaded, tmp_path / "saved", strict="raise")
    assert_same(loaded["optimizer"].state[loaded["model"].up.weight], state)


class Norm(enum.IntEnum):
    FLAT = 1
    SPECTRAL = 2


class Projector:
    """What some optimizers keep for each parameter."""

    def __init__(self, graft):
        self.graft, self.rank = graft, 3


class Graft:
    pass


def test_options_of_an_optimizer_may_be_int_enums(tmp_path):
    saved, resumed = make(1), make(2)
    saved["optimizer"].param_groups[0]["norm"] = Norm.SPECTRAL
    distckpt.save(saved, tmp_path / "saved")
    distckpt.load(resumed, tmp_path / "saved")
    assert resumed["optimizer"].param_groups[0]["norm"] is Norm.SPECTRAL


def test_all_classes_in_the_state_of_an_optimizer_are_named_at_once(tmp_path):
    saved = make(1)
    go_on(saved, range(1))
    weight = saved["model"].up.weight
    saved["optimizer"].state[weight]["projector"] = Projector(Graft())
    with pytest.raises(
        distckpt.UnsupportedObjectError,
        match=r"\(Projector, to_state=..., from_state=...\); .*\(Graft, to_state=",
    ):
        distckpt.save(saved, tmp_path / "saved")


def test_a_parameter_that_is_trained_since_starts_anew_with_a_warning(tmp_path, caplog):
    saved, resumed = make(1), make(2)
    saved["model"].up.weight.requires_grad = False
    go_on(saved, range(2))
    distckpt.save(saved, tmp_path / "saved")
    distckpt.load(resumed, tmp_path / "saved")
    [warning] = [record.getMessage() for record in caplog.records]
    assert "no state of the optimizer for 'up.weight'" in warning
    go_on(resumed, range(2))
    assert resumed["optimizer"].state[resumed["model"].up.weight]["step"] == 2
    assert resumed["optimizer"].state[resumed["model"].up.bias]["step"] == 4


def test_two_models_have_their_paths_as_prefixes(tmp_path):
    saved = {"generator": Net(1), "nested": {"critic": Net(2)}}
    distckpt.save(saved, tmp_path / "saved")
    loaded = {"generator": Net(3), "nested": {"critic": Net(4)}}
    distckpt.load(loaded, tmp_path / "saved", strict="raise")
    assert_same(loaded["generator"].state_dict(), saved["generator"].state_dict())
    assert_same(loaded["nested"]["critic"].state_dict(), saved["nested"]["critic"].state_dict())


def test_the_same_key_twice_is_refused_with_both_places(tmp_path):
    two = {"model": sharded_state_dict(Net(1)), "ema": {"shadow": sharded_state_dict(Net(2))}}
    with pytest.raises(distckpt.InvalidShardingError) as caught:
        distckpt.save(two, tmp_path / "saved")
    text = str(caught.value)
    assert "The same key twice: 'seen'" in text
    assert "'model.seen' and at 'ema.shadow.seen'" in text
    assert "prefix=" in text
    assert "Modules" not in text


def test_the_same_key_twice_beside_modules_names_their_prefixes(tmp_path):
    with pytest.raises(
        distckpt.InvalidShardingError, match=r"at 'models.0' and at 'models.1'.*Modules"
    ):
        distckpt.save({"models": [Net(1), Net(2)]}, tmp_path / "saved")


def test_nothing_is_loaded_without_a_word(tmp_path):
    saved = make(1)
    go_on(saved, range(1))
    distckpt.save(saved, tmp_path / "saved")
    with pytest.raises(
        distckpt.LoadMismatchError, match=r"'model.up.weight'.*Give load the module itself"
    ):
        distckpt.load({"model": Net(2).state_dict()}, tmp_path / "saved")
    with pytest.raises(
        distckpt.LoadMismatchError, match=r"nothing at 'other', where .* has a StepLR"
    ):
        distckpt.load({"other": make(2)["scheduler"]}, tmp_path / "saved")
    with pytest.raises(
        distckpt.LoadMismatchError, match=r"'optim.state.*stored with 'optimizer\.' in place"
    ):
        distckpt.load({"model": saved["model"], "optim": saved["optimizer"]}, tmp_path / "saved")
    distckpt.save({"model": saved["model"]}, tmp_path / "weights")
    for state in (saved, make(2)):
        request = {name: state[name] for name in ("model", "optimizer")}
        with pytest.raises(
            distckpt.LoadMismatchError, match=r"No state of an optimizer is read from there: leave"
        ):
            distckpt.load(request, tmp_path / "weights")
    with pytest.raises(distckpt.InvalidShardingError, match="put the module that has it there"):
        distckpt.save({"optimizer": saved["optimizer"]}, tmp_path / "other")


class Trainer:
    """Has objects in its state."""

    def __init__(self, seed: int, step: int) -> None:
        self.parts, self.step = make(seed), step

    def state_dict(self) -> dict:
        return {**self.parts, "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        assert all(state[name] is part for name, part in self.parts.items())
        self.step = state["step"]


def test_objects_in_the_state_of_an_object_are_loaded(tmp_path):
    saved, new = Trainer(1, 5), Trainer(2, 0)
    go_on(saved.parts, range(2))
    distckpt.save({"trainer": saved}, tmp_path / "saved")
    assert distckpt.load({"trainer": new}, tmp_path / "saved")["trainer"] is new
    assert new.step == 5
    for name in ("model", "optimizer"):
        assert_same(dict(new.parts[name].state_dict()), dict(saved.parts[name].state_dict()))


class Deep(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(layers)])
        self.head = torch.nn.Linear(2, 1)


class Averages:
    """Has sharded tensors in its state, as many as it was made with."""

    def __init__(self, number: int) -> None:
        self.tensors = [torch.full((2,), float(i)) for i in range(number)]

    def state_dict(self) -> dict:
        key = "averages.{}".format
        return {
            i: distckpt.ShardedTensor.from_rank_offsets(key(i), tensor)
            for i, tensor in enumerate(self.tensors)
        }

    def load_state_dict(self, state: dict) -> None:
        self.tensors = [state[i] for i in range(len(state))]


@pytest.mark.parametrize("name", ["model", "ema"])
def test_a_part_of_a_saved_model_is_loaded_on_request_only(name, tmp_path):
    saved, smaller = Deep(3), Deep(2)
    distckpt.save({name: saved, "other": Net(1), "averages": Averages(2)}, tmp_path / "saved")
    with pytest.raises(distckpt.LoadMismatchError, match=r"layers.2.*strict='report'") as caught:
        distckpt.load({name: smaller}, tmp_path / "saved")
    start = "" if name == "model" else "ema."
    assert set(caught.value.missing) == {f"{start}layers.2.weight", f"{start}layers.2.bias"}
    distckpt.load({name: smaller}, tmp_path / "saved", strict="report")
    assert_same(smaller.layers[1].state_dict(), saved.layers[1].state_dict())
    with pytest.raises(distckpt.LoadMismatchError, match=r"averages.1"):
        distckpt.load({"averages": Averages(1)}, tmp_path / "saved")


class Tagger(torch.nn.Module):
    """Has a parameter of its own and, unless it is only a body, a head beside what it shares with
    others.
    """

    def __init__(self, is_whole=True):
        super().__init__()
        self.body = torch.nn.Linear(2, 2)
        if is_whole:
            self.head, self.scale = torch.nn.Linear(2, 1), torch.nn.Parameter(torch.ones(1))


def without_field(path, name):
    """Take a field out of a marker, which earlier releases did not write."""
    marker = json.loads((path / "metadata.json").read_text())
    del marker[name]
    (path / "metadata.json").write_text(json.dumps({**marker, "checksum": None}))


@pytest.mark.parametrize("way", ["as saved", "resharded", "of an earlier release"])
def test_a_child_and_a_parameter_of_the_model_that_are_left_out_are_named(tmp_path, way, caplog):
    path = tmp_path / "saved"
    saved, other = Tagger(), distckpt.ShardedTensor.from_rank_offsets("table.rows", torch.ones(2))
    distckpt.save({"model": saved, "table": other, "ema": Tagger()}, path)
    if way == "resharded":
        distckpt.reshard(path, tmp_path / "other", num_ranks=2)
        path = tmp_path / "other"
    if way == "of an earlier release":
        without_field(path, "module_names")
        distckpt.load({"model": Tagger(False)}, path)
        assert "'head.bias', 'head.weight', 'scale'" in caplog.text
        return
    for request in ({"model": Tagger(False)}, {"model": [Tagger(False)], "ema": Tagger()}):
        with pytest.raises(distckpt.LoadMismatchError, match=r"strict='report'") as caught:
            distckpt.load(request, path)
        assert set(caught.value.missing) == {"head.weight", "head.bias", "scale"}
    body = distckpt.load({"model": Tagger(False)}, path, strict="report")["model"].body
    assert_same(body.state_dict(), saved.body.state_dict())
    distckpt.save({"model": Tagger(False)}, tmp_path / "body")
    with pytest.raises(distckpt.LoadMismatchError) as caught:
        distckpt.load({"model": Tagger()}, tmp_path / "body")
    assert set(caught.value.unexpected) == {"head.weight", "head.bias", "scale"}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("way", ["consolidate", "torch"])
def test_tensors_of_other_formats_that_no_module_takes_are_named(tmp_path, way, caplog):
    model, path = Tagger(), tmp_path / "other"
    optimizer = torch.optim.Adam(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    if way == "torch":
        state = {**model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.distributed.checkpoint.save(state, checkpoint_id=path)
    else:
        distckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "saved")
        distckpt.consolidate(tmp_path / "saved", path)
    distckpt.load({"model": Tagger()}, path)
    distckpt.load({"model": Tagger(False)}, path, strict="report")
    distckpt.load(
        {"encoder": distckpt.ShardedTensor.from_rank_offsets("scale", torch.ones(1))}, path
    )
    assert "no module" not in caplog.text
    distckpt.load({"model": Tagger(False)}, path)
    [warned] = [
        record.getMessage() for record in caplog.records if "no module" in record.getMessage()
    ]
    assert "holds 'head.bias', 'head.weight', 'scale', which" in warned


def test_a_value_that_the_checkpoint_lacks_is_an_error(tmp_path):
    model = torch.nn.Linear(2, 2)
    distckpt.save({"model": model, "step": 7}, tmp_path / "saved")
    distckpt.consolidate(tmp_path / "saved", tmp_path / "other")
    assert distckpt.load({"model": model, "step": 0}, tmp_path / "saved")["step"] == 7
    for name, request in (("saved", {"epoch": 0, "step": 0}), ("other", {"epoch": {"of": 1}})):
        with pytest.raises(distckpt.LoadMismatchError, match="no value for 'epoch'") as caught:
            distckpt.load({"model": model, **request}, tmp_path / name)
        assert caught.value.unexpected == {"epoch"}
        assert "epoch" not in distckpt.megatron.load(
            {"model": model, **request}, tmp_path / name, strict="log_unexpected"
        )
    assert "epoch" not in distckpt.load({"model": model, "epoch": None}, tmp_path / "saved")
    distckpt.save(
        {"trainer": {"model": model, "step": 7, "best": {"loss": 1.0}}}, tmp_path / "below"
    )
    parts = {"model": model, "step": 0, "best": {}, "seed": None}
    assert distckpt.load({"trainer": parts}, tmp_path / "below")["trainer"]["best"] == {"loss": 1.0}
    with pytest.raises(distckpt.LoadMismatchError, match=r"no value for 'trainer\.epoch', which"):
        distckpt.load({"trainer": parts | {"epoch": 0}}, tmp_path / "below")


SCHEDULERS = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "sequence": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)], [5]
    ),
}


@pytest.mark.parametrize("saved", SCHEDULERS)
def test_a_scheduler_takes_no_state_of_another_kind(tmp_path, saved):
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    distckpt.save({"scheduler": SCHEDULERS[saved](optimizer)}, tmp_path / "saved")
    for name, make_scheduler in SCHEDULERS.items():
        new = make_scheduler(optimizer)
        if name == saved:
            distckpt.load({"scheduler": new}, tmp_path / "saved")
            continue
        before = repr(new.state_dict())
        with pytest.raises(
            distckpt.LoadMismatchError, match=f"at 'scheduler'.*in place of {type(new).__name__}"
        ):
            distckpt.load({"scheduler": new}, tmp_path / "saved")
        assert repr(new.state_dict()) == before


def test_what_a_scheduler_may_have_got_in_another_release_is_named(tmp_path, caplog):
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    distckpt.save(
        {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}, tmp_path / "saved"
    )
    without_field(tmp_path / "saved", "scheduler_classes")
    new = SCHEDULERS["step"](optimizer)
    distckpt.load({"scheduler": new}, tmp_path / "saved")
    assert new.gamma == 0.5
    assert "'scheduler' has nothing in place of StepLR's 'step_size'" in caplog.text


PAIRS = {
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5),
    "MultiplicativeLR": lambda optimizer: torch.optim.lr_scheduler.MultiplicativeLR(
        optimizer, lambda step: 0.5
    ),
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
    "MultiStepLR": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [3]),
    "ExponentialLR": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    "SequentialLR[ConstantLR, StepLR]": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer), PAIRS["StepLR"](optimizer)], [5]
    ),
    "SequentialLR[StepLR, StepLR]": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer, [PAIRS["StepLR"](optimizer) for _ in range(2)], [5]
    ),
}


@pytest.mark.parametrize("way", ["as saved", "resharded"])
@pytest.mark.parametrize("saved", PAIRS)
def test_a_scheduler_of_another_class_is_named(tmp_path, saved, way, caplog):
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    path = tmp_path / "saved"
    distckpt.save({"parts": {"scheduler": PAIRS[saved](optimizer)}}, path)
    if way == "resharded":
        distckpt.reshard(path, tmp_path / "other", num_ranks=1)
        path = tmp_path / "other"
    for name, make_scheduler in PAIRS.items():
        caplog.clear()
        new = make_scheduler(optimizer)
        try:
            distckpt.load({"parts": {"scheduler": new}}, path)
            said = [record.getMessage() for record in caplog.records]
        except distckpt.LoadMismatchError as error:
            said = [str(error)]
        assert len(said) == (name != saved)
        assert all("'parts.scheduler'" in text and saved in text for text in said)
        assert all(name in text for text in said)


class Counter:
    """Has a number in its state, which it looks up."""

    def __init__(self, number=0):
        self.number = number

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class Basis:
    """Has tensors in its state that are transposed, as decompositions of matrices return them."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.values = torch.randn(6, 4, generator=generator).t()
        self.nested = {"q": [torch.randn(2, 3, 4, generator=generator).permute(2, 0, 1)]}

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def test_tensors_in_the_state_of_an_object_keep_the_order_of_their_axes(tmp_path):
    saved, loaded = Basis(1), Basis(2)
    for wrap in (lambda basis: basis, distckpt.PerRank):
        path = tmp_path / wrap.__name__
        distckpt.save({"basis": wrap(saved), "plain": saved.values}, path)
        found = distckpt.load({"basis": wrap(loaded)}, path)
        assert_same(loaded.state_dict(), saved.state_dict())
        assert_same(found["plain"], saved.values)


class Collections:
    """Has dicts of other classes in its state, with lists and dicts in them."""

    def __init__(self):
        self.state = {}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_dicts_of_other_classes_keep_their_class(tmp_path):
    saved, loaded = Collections(), Collections()
    saved.state = {
        "lists": collections.defaultdict(list, {"a": [1, (2, [3])]}),
        "counts": {"deep": [collections.defaultdict(int, {"b": 1})]},
        "dicts": collections.defaultdict(dict, {"c": {"d": [torch.ones(2)]}}),
        "ordered": collections.OrderedDict(e=[1], f={"g": collections.deque([2])}),
        "empty": collections.defaultdict(list),
    }
    values = {name: copy.deepcopy(value) for name, value in saved.state.items()}
    distckpt.save({"object": saved, **values}, tmp_path / "saved")
    found = distckpt.load({"object": loaded}, tmp_path / "saved")
    del found["object"]
    for state in (loaded.state, found):
        assert_same(state, values)
        assert state["lists"]["new"] == []
        assert state["counts"]["deep"][0]["new"] == 0
        del state["lists"]["new"], state["counts"]["deep"][0]["new"]


class Loose(Counter):
    """Takes whatever it is given."""

    def load_state_dict(self, state):
        self.number = state


@pytest.mark.parametrize("cls", [Counter, Loose])
@pytest.mark.parametrize("stored", [5, [1], "text", {"other": 3}], ids=str)
def test_a_value_in_the_place_of_an_object_is_named(tmp_path, cls, stored):
    distckpt.save({"parts": {"c": stored}}, tmp_path / "saved")
    if cls is Loose and isinstance(stored, dict):
        return
    obj = cls()
    with pytest.raises(
        distckpt.LoadMismatchError, match=rf"The {cls.__name__} at 'parts\.c' .*/saved' holds there"
    ) as caught:
        distckpt.load({"parts": {"c": obj}}, tmp_path / "saved")
    assert caught.value.unexpected == {"parts.c"}
    assert obj.number == 0


def test_a_state_dict_that_contains_itself_is_refused(tmp_path):
    state: dict = {}
    state["again"] = {"state": state}
    with pytest.raises(distckpt.UnsupportedObjectError, match="contains itself"):
        distckpt.save(state, tmp_path / "saved")
    distckpt.save({"step": 1}, tmp_path / "saved")
    with pytest.raises(distckpt.UnsupportedObjectError, match="contains itself"):
        distckpt.load(state, tmp_path / "saved")


def test_states_of_parameters_that_the_optimizer_does_not_have_get_a_warning(tmp_path, caplog):
    net, new = Deep(2), Deep(2)
    optimizer = torch.optim.Adam(net.parameters())
    sum(p.sum() for p in net.parameters()).backward()
    optimizer.step()
    distckpt.save({"model": net, "optimizer": optimizer}, tmp_path / "saved")
    distckpt.load(
        {"model": new, "optimizer": torch.optim.Adam(new.head.parameters())}, tmp_path / "saved"
    )
    assert "optimizer.state.exp_avg.layers.{0..1}.bias" in caplog.text


class HeadOfItsOwn(Tied):
    def __init__(self, seed=0):
        super().__init__(seed)
        self.head.weight = torch.nn.Parameter(-self.embed.weight.detach())


def test_what_is_left_out_is_in_the_report_and_an_error_with_raise(tmp_path):
    saved = HeadOfItsOwn(1)
    optimizer = torch.optim.Adam(saved.parameters())
    sum(p.sum() for p in saved.parameters()).backward()
    optimizer.step()
    path = tmp_path / "whole"
    distckpt.save({"model": saved, "optimizer": optimizer}, path)
    distckpt.save({"model": saved}, tmp_path / "model")
    tied, reports = Tied(2), []
    part = {"model": HeadOfItsOwn(3)}
    part["optimizer"] = torch.optim.Adam([part["model"].embed.weight])
    both = {"model": tied, "optimizer": torch.optim.Adam(tied.parameters())}
    names = {"optimizer.state.exp_avg.head.weight", "optimizer.state.exp_avg_sq.head.weight"}
    for request, where, left_out in (
        ({"model": tied}, tmp_path / "model", {"embed.weight"}),
        (both, path, {"embed.weight", *names}),
        (part, path, names),
    ):
        distckpt.load(request, where, on_report=reports.append)
        assert reports[-1].missing == left_out
        with pytest.raises(distckpt.LoadMismatchError) as caught:
            distckpt.load(request, where, strict="raise")
        assert caught.value.missing <= left_out
    alone = HeadOfItsOwn(3)
    distckpt.load({"model": alone}, path, on_report=reports.append)
    assert reports[-1].missing == frozenset()


class LoaderWithoutState:
    """Looks like a data loader of accelerate, whose wrapped loader keeps no state."""

    def __iter__(self):
        return iter(())

    def state_dict(self):
        return self.dl_state_dict

    def load_state_dict(self, state):
        raise AssertionError(state)


def test_an_object_whose_state_dict_fails_is_named(tmp_path):
    with pytest.raises(
        distckpt.CheckpointingException, match=r"at 'data.train'.*use_stateful_dataloader=True"
    ):
        distckpt.save({"data": {"train": LoaderWithoutState()}}, tmp_path / "saved")


def test_a_data_loader_without_a_state_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(
        distckpt.UnsupportedObjectError, match=r"'data\.train' is .* StatefulDataLoader"
    ):
        distckpt.save({"data": {"train": torch.utils.data.DataLoader([1])}}, tmp_path / "saved")


def test_a_child_with_another_name_is_told_from_both_sides(tmp_path):
    distckpt.save({"model": torch.nn.ModuleDict({"a": Net(1), "b": Net(1)})}, tmp_path / "saved")
    with pytest.raises(
        distckpt.LoadMismatchError,
        match=r"holds 'b\..*, and does not hold 'c\..*need rules=, or family='auto'",
    ) as caught:
        distckpt.load(
            {"model": torch.nn.ModuleDict({"a": Net(1), "c": Net(1)})}, tmp_path / "saved"
        )
    assert {key[0] for key in caught.value.missing} == {"b"}
    assert {key[0] for key in caught.value.unexpected} == {"c"}


def test_equal_modules_in_a_list_are_refused_with_the_way_out(tmp_path):
    with pytest.raises(
        distckpt.InvalidShardingError, match=r"put several models into a dict, \{'first'"
    ):
        distckpt.save({"models": [Net(1), Net(2)]}, tmp_path / "saved")


@pytest.mark.filterwarnings("ignore:torch.distributed is ")
def test_a_checkpoint_of_plain_names_by_torch(tmp_path):
    saved, loaded = Net(1), Net(2)
    torch.distributed.checkpoint.save(saved.state_dict(), checkpoint_id=tmp_path / "saved")
    distckpt.load({"model": loaded}, tmp_path / "saved")
    assert_same(loaded.state_dict(), saved.state_dict())
    with pytest.raises(distckpt.LoadMismatchError, match=r"stored without 'net\.'"):
        distckpt.load({"net": loaded}, tmp_path / "saved")


def test_plain_tensors_are_named_where_shards_are_requested(tmp_path):
    saved = Net(1)
    distckpt.save({"model": saved.state_dict()}, tmp_path / "saved")
    with pytest.raises(
        distckpt.LoadMismatchError, match=r"common state has .* at 'model'.*common_state"
    ):
        distckpt.load({"model": Net(2)}, tmp_path / "saved")
    loaded = distckpt.load({"model": Net(2).state_dict()}, tmp_path / "saved")
    assert_same(dict(loaded["model"]), dict(saved.state_dict()))


def test_parameters_without_state_leave_nothing_in_common_state(tmp_path):
    """Under ZeroRedundancyOptimizer a rank has no state for the parameters of others."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.bias] = {"momentum_buffer": torch.ones(2)}
    distckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    assert distckpt.open(tmp_path / "saved").common_state == {}
    other = torch.optim.SGD(model.parameters(), lr=0.9, momentum=0.9)
    distckpt.load({"model": model, "optimizer": other}, tmp_path / "saved")
    assert other.param_groups[0]["lr"] == 0.1
    assert torch.equal(other.state[model.bias]["momentum_buffer"], torch.ones(2))
    assert model.weight not in other.state

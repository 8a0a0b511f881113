"""The functions of torch.distributed.checkpoint in one process, without any process group.

The oracle is torch.distributed.checkpoint itself, run on the same values.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import pkgutil
import re
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import distckpt
from distckpt import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointNotFoundError,
    LoadMismatchError,
    dcp,
)
from tests.support.reference import needs_torchs_hugging_face

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is", "ignore:Detected an existing checkpoint"
)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(same(one[k], other[k]) for k in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def filled():
    return {
        "weight": torch.arange(6.0).view(2, 3),
        "scalar": torch.tensor(4, dtype=torch.int16),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "cast": torch.tensor([1.5, 2.5]),
        "list": [torch.ones(2), "text", [torch.full((1,), 5.0), None], {"lr": 0.1}, 7],
        "groups": [{"momentum": torch.full((2,), 6.0), "lr": 0.1}, {"lr": 0.2}],
        "lists": [[torch.full((2,), 7.0)], [3]],
        "values": [1, [2, 3], "four"],
        "tuple": (1, torch.ones(2)),
        "ordered": OrderedDict(a=torch.full((2,), 3.0), b={"c": b"bytes"}),
        "empty": {"dict": {}, "list": [], "tensor": torch.ones(0, 3)},
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def blank():
    return {
        "weight": torch.zeros(2, 3),
        "scalar": torch.tensor(0, dtype=torch.int16),
        "transposed": torch.zeros(2, 3).t(),
        "cast": torch.zeros(2, dtype=torch.bfloat16),
        "list": [torch.zeros(2), "", [torch.zeros(1), 0], {"lr": 0.0}, 0],
        "groups": [{"momentum": torch.zeros(2), "lr": 0.0}, {"lr": 0.0}],
        "lists": [[torch.zeros(2)], []],
        "values": [],
        "tuple": (),
        "ordered": OrderedDict(a=torch.zeros(2), b={"c": b""}),
        "empty": {"dict": {}, "list": [1], "tensor": torch.zeros(0, 3)},
        "parameter": torch.nn.Parameter(torch.zeros(2)),
    }


def tensors_in(node):
    if isinstance(node, torch.Tensor):
        return [node]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    return [tensor for child in children for tensor in tensors_in(child)]


@pytest.mark.parametrize("writer", [torch_dcp, dcp], ids=["torch", "distckpt"])
def test_nested_state_is_loaded_as_torch_loads_it(writer, tmp_path):
    torch_dcp.save(filled(), checkpoint_id=tmp_path / "oracle")
    oracle = blank()
    torch_dcp.load(oracle, checkpoint_id=tmp_path / "oracle")
    assert same(oracle["tuple"], filled()["tuple"])

    state = filled()
    writer.save(state, checkpoint_id=tmp_path / "saved")
    assert same(state, filled()), "the state dict is not changed"
    loaded = blank()
    containers = loaded["list"], loaded["list"][2], loaded["ordered"]["b"]
    tensors = tensors_in(loaded)
    assert dcp.load(loaded, checkpoint_id=tmp_path / "saved") is None
    assert same(loaded, oracle)
    assert all(one is other for one, other in zip(tensors, tensors_in(loaded), strict=True)), (
        "tensors are filled"
    )
    assert containers[0] is loaded["list"]
    assert containers[1] is loaded["list"][2]
    assert containers[2] is loaded["ordered"]["b"]


def test_int_keys_of_dicts_stay_int(tmp_path):
    """torch.distributed.checkpoint puts the loaded value beside the old one, under the text of its
    key.
    """
    state = {"state": {0: {"step": torch.tensor(3.0), "kind": "old"}}}
    for writer in (torch_dcp, dcp):
        writer.save(state, checkpoint_id=tmp_path / writer.__name__)
        loaded = {"state": {0: {"step": torch.tensor(0.0), "kind": "new"}}}
        dcp.load(loaded, checkpoint_id=tmp_path / writer.__name__)
        assert same(loaded, state)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [(torch_dcp, torch_dcp), (torch_dcp, dcp), (dcp, dcp)],
    ids=["the oracle itself", "from torch", "from distckpt"],
)
@pytest.mark.parametrize("is_flat", [True, False], ids=["flat", "nested"])
def test_values_are_found_by_their_dotted_keys(writer, reader, is_flat, tmp_path):
    def state(fill, is_flat):
        weight, step, kind = torch.full((2,), float(fill)), torch.tensor(fill), f"is {fill}"
        if is_flat:
            return {
                "model.w": weight,
                "optim.0.step": step,
                "optim.0.kind": kind,
                "groups.0.lr": fill,
            }
        return {
            "model": {"w": weight},
            "optim": {0: {"step": step, "kind": kind}},
            "groups": [{"lr": fill}],
        }

    writer.save(state(3, is_flat), checkpoint_id=tmp_path / "saved")
    loaded = state(0, not is_flat)
    reader.load(loaded, checkpoint_id=tmp_path / "saved")
    if reader is torch_dcp and is_flat:
        loaded["optim"][0]["kind"] = loaded["optim"].pop("0")[
            "kind"
        ]  # it has put the value beside the old one
    assert same(loaded, state(3, not is_flat))


def test_a_tensor_inside_of_an_object_is_loaded(tmp_path):
    """PyTorch goes on with what the target holds, without a word."""
    planner = torch_dcp.DefaultSavePlanner(flatten_state_dict=False)
    torch_dcp.save({"list": [torch.ones(2), 1]}, checkpoint_id=tmp_path / "saved", planner=planner)
    for state in ({"list": [torch.zeros(2), 0]}, {"list": None}):
        dcp.load(state, checkpoint_id=tmp_path / "saved")
        assert same(state, {"list": [torch.ones(2), 1]})


def test_plain_tensors_that_distckpt_saved_are_loaded(tmp_path):
    """`distckpt.save` stores them beside shards, in common state."""
    stored = {"mean": torch.arange(6.0).view(2, 3), "list": [torch.ones(2), {"a": torch.ones(1)}]}
    distckpt.save({**stored, "step": 4}, tmp_path / "saved")
    mean = torch.zeros(2, 3, dtype=torch.bfloat16)
    state = {"mean": mean, "list": [torch.zeros(2), {"a": torch.zeros(1)}], "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    assert state["mean"] is mean
    assert same(state, {**stored, "mean": stored["mean"].bfloat16(), "step": 4})
    flat = {"list.1.a": torch.zeros(1)}
    dcp.load(flat, checkpoint_id=tmp_path / "saved")
    assert flat["list.1.a"] == 1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"mean": torch.zeros(2)}, r"'mean' has shape \(3,\) in .* but \(2,\) was requested"),
        ({"step": torch.zeros(2)}, r"'step' is of type int in .* but a tensor was requested"),
        ({"mean": torch.zeros(3, device="meta")}, "meta device"),
    ],
)
def test_plain_tensors_that_do_not_fit_change_nothing(target, message, tmp_path):
    distckpt.save({"first": torch.ones(3), "mean": torch.ones(3), "step": 4}, tmp_path / "saved")
    state = {"first": torch.zeros(3), **target}
    with pytest.raises(distckpt.CheckpointingException, match=message):
        dcp.load(state, checkpoint_id=tmp_path / "saved")
    assert same(state["first"], torch.zeros(3))


def test_what_is_saved_is_an_ordinary_checkpoint(tmp_path):
    report = dcp.save(
        {"model": {"w": torch.ones(2, 3)}, "step": 5}, checkpoint_id=str(tmp_path / "saved")
    )
    assert report.location == str(tmp_path / "saved")
    target = {"w": distckpt.ShardedTensor.from_rank_offsets("model.w", torch.zeros(2, 3))}
    loaded = distckpt.load(target, tmp_path / "saved", strict="raise")
    assert loaded["step"] == 5
    assert torch.equal(loaded["w"], torch.ones(2, 3))
    assert distckpt.verify(tmp_path / "saved").is_whole


def test_what_distckpt_saved_is_loaded(tmp_path):
    weight = distckpt.ShardedTensor.from_rank_offsets("model.w", torch.ones(3))
    state = {
        "model": {"w": weight},
        "seed": distckpt.ShardedObject("seed", 11, (1,), (0,)),
        "step": 4,
    }
    distckpt.save(state, tmp_path / "saved")
    loaded = {"model": {"w": torch.zeros(3)}, "seed": 0, "step": 0}
    dcp.load(loaded, checkpoint_id=tmp_path / "saved")
    assert same(loaded, {"model": {"w": torch.ones(3)}, "seed": 11, "step": 4})


@needs_torchs_hugging_face
def test_a_hugging_face_directory_is_loaded(tmp_path):
    save_file({"model.w": torch.arange(4.0)}, tmp_path / "model.safetensors")
    loaded = {"model": {"w": torch.zeros(4)}}
    dcp.load(loaded, storage_reader=torch_dcp.HuggingFaceStorageReader(str(tmp_path)))
    assert torch.equal(loaded["model"]["w"], torch.arange(4.0))


# ---- models, optimizers, Stateful values


def trained(seed, steps=2, **settings):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    for _ in range(steps):
        model(torch.ones(5, 4) + torch.arange(5.0)[:, None]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class AppState:
    """Stateful by what it has, as the protocol of PyTorch asks for."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.num_loads = model, optimizer, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        self.num_loads += 1
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


@pytest.mark.parametrize("writer", [torch_dcp, dcp], ids=["torch", "distckpt"])
def test_stateful_values_are_asked_and_told(writer, tmp_path):
    model, optimizer = trained(seed=1)
    writer.save(
        {"app": AppState(model, optimizer), "plain": model, "sgd": optimizer},
        checkpoint_id=tmp_path / "saved",
    )
    app = AppState(*trained(seed=2, steps=0, lr=0.5, betas=(0.5, 0.6)))
    plain, sgd = trained(seed=3, lr=0.7)
    state = {"app": app, "plain": plain, "sgd": sgd}
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    assert state == {"app": app, "plain": plain, "sgd": sgd}
    assert app.num_loads == 1
    for other in (app.model, plain):
        assert same(dict(other.state_dict()), dict(model.state_dict()))
    for other in (app.optimizer, sgd):
        assert same(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    "options",
    [
        StateDictOptions(),
        StateDictOptions(full_state_dict=True),
        StateDictOptions(flatten_optimizer_state_dict=True),
    ],
    ids=["default", "full", "flattened"],
)
def test_state_dicts_of_torch_go_both_ways(options, tmp_path):
    """Some options turn tuples of settings into lists, whatever saves them: torch's own way is the
    oracle.
    """
    model, optimizer = trained(seed=1)
    ended = []
    for library in (torch_dcp, dcp):
        saved, optim = get_state_dict(model, optimizer, options=options)
        library.save({"model": saved, "optim": optim}, checkpoint_id=tmp_path / library.__name__)
        other, other_optimizer = trained(seed=2, lr=0.5)
        target, optim = get_state_dict(other, other_optimizer, options=options)
        state = {"model": target, "optim": optim}
        library.load(state, checkpoint_id=tmp_path / library.__name__)
        set_state_dict(
            other,
            other_optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=options,
        )
        ended.append((dict(other.state_dict()), other_optimizer.state_dict()))
    assert same(*ended)
    assert same(ended[1][0], dict(model.state_dict()))
    assert same(ended[1][1]["state"], optimizer.state_dict()["state"])


def test_the_model_alone_of_a_larger_checkpoint(tmp_path):
    model, optimizer = trained(seed=1)
    dcp.save({"app": AppState(model, optimizer), "step": 3}, checkpoint_id=tmp_path / "saved")
    other, _ = trained(seed=2)
    state = {"app": {"model": get_model_state_dict(other)}}
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    set_model_state_dict(other, state["app"]["model"])
    assert same(dict(other.state_dict()), dict(model.state_dict()))


# ---- asynchronous saves


def test_async_save_keeps_what_was_there_when_it_was_called(tmp_path):
    state = filled()
    future = dcp.async_save(state, checkpoint_id=tmp_path / "saved")
    for tensor in tensors_in(state):
        tensor.detach().zero_()
    state["values"].clear()
    assert isinstance(future, Future)
    assert future.result(timeout=60).location == str(tmp_path / "saved")
    assert (future.done(), future.exception(), future.cancel()) == (True, None, False)
    loaded, oracle = blank(), blank()
    torch_dcp.save(filled(), checkpoint_id=tmp_path / "oracle")
    torch_dcp.load(oracle, checkpoint_id=tmp_path / "oracle")
    dcp.load(loaded, checkpoint_id=tmp_path / "saved")
    assert same(loaded, oracle)


def test_a_load_waits_for_the_save_that_goes_on(tmp_path):
    dcp.async_save({"w": torch.ones(1 << 18)}, checkpoint_id=tmp_path / "saved")
    state = {"w": torch.zeros(1 << 18)}
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    assert torch.equal(state["w"], torch.ones(1 << 18))


def test_callbacks_of_the_future_hear_how_it_ended(tmp_path):
    heard = []
    dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "saved").add_done_callback(
        heard.append
    )
    (tmp_path / "file").write_text("no directory")
    failing = dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "file" / "saved")
    failing.add_done_callback(heard.append)
    with pytest.raises(NotADirectoryError):
        failing.result(timeout=60)
    assert [future.exception() is None for future in heard] == [True, False]


# ---- arguments


def test_paths_are_taken_from_writers_and_readers(tmp_path):
    dcp.save({"step": 1}, storage_writer=torch_dcp.FileSystemWriter(tmp_path / "saved"))
    dcp.save(
        {"step": 2},
        storage_writer=dcp.FileSystemWriter(tmp_path / "other"),
        planner=dcp.DefaultSavePlanner(),
    )
    dcp.save(
        {"step": 3},
        checkpoint_id=tmp_path / "given",
        storage_writer=dcp.FileSystemWriter(tmp_path / "not"),
    )
    for name, step in (("saved", 1), ("other", 2), ("given", 3)):
        state = {"step": 0}
        dcp.load(
            state,
            storage_reader=dcp.FileSystemReader(tmp_path / name),
            planner=dcp.DefaultLoadPlanner(),
        )
        assert state == {"step": step}
    assert not (tmp_path / "not").exists()


def test_a_url_is_a_place_like_any_other():
    url = "memory://test_dcp/saved"
    dcp.save({"w": torch.ones(3), "step": 1}, storage_writer=FsspecWriter(url))
    state = {"w": torch.zeros(3), "step": 0}
    dcp.load(state, checkpoint_id=url)
    assert same(state, {"w": torch.ones(3), "step": 1})


def test_a_checkpoint_is_replaced_unless_the_writer_says_no(tmp_path):
    for step in (1, 2):
        dcp.save({"step": step}, checkpoint_id=tmp_path / "saved")
    with pytest.raises(CheckpointExistsError):
        dcp.save(
            {"step": 3}, storage_writer=dcp.FileSystemWriter(tmp_path / "saved", overwrite=False)
        )
    state = {"step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    assert state == {"step": 2}


def test_a_checkpoint_of_torch_in_the_way_is_replaced(tmp_path):
    torch_dcp.save({"step": 1}, checkpoint_id=tmp_path / "saved")
    dcp.save({"step": 2}, checkpoint_id=tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"]
    state = {"step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    assert state == {"step": 2}


class OtherPlanner(torch_dcp.DefaultLoadPlanner):
    pass


class OtherWriter(torch_dcp.FileSystemWriter):
    pass


@needs_torchs_hugging_face
def test_hugging_face_files_are_not_written(tmp_path):
    writer = torch_dcp.HuggingFaceStorageWriter(str(tmp_path / "x"))
    for verb in (dcp.save, dcp.async_save):
        with pytest.raises(CheckpointingException, match="consolidate writes Hugging Face"):
            verb({"w": torch.ones(2)}, storage_writer=writer)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "Pass checkpoint_id"),
        ({"checkpoint_id": ""}, "Pass checkpoint_id"),
        ({"planner": OtherPlanner(), "checkpoint_id": "x"}, "planner is a OtherPlanner"),
        ({"storage_writer": OtherWriter("x")}, "storage_writer is a OtherWriter"),
        ({"checkpoint_id": "x", "use_collectives": False}, "no_dist=True"),
        ({"checkpoint_id": "x", "async_stager": object()}, "async_stager"),
    ],
)
def test_what_cannot_be_followed_is_refused(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    verbs = [dcp.async_save] if "async_stager" in arguments else [dcp.save, dcp.async_save]
    for verb in verbs:
        with pytest.raises(CheckpointingException, match=said):
            verb({"step": 1}, **arguments)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", [[1, 2], torch.nn.Linear(2, 2)], ids=["list", "module"])
def test_a_state_dict_that_is_none_is_refused(value, tmp_path):
    dcp.save({"step": 1}, checkpoint_id=tmp_path / "saved")
    for verb in (dcp.save, dcp.async_save, dcp.load):
        with pytest.raises(
            CheckpointingException, match=f'state_dict is a {type(value).__name__} .*"model": model'
        ):
            verb(value, checkpoint_id=tmp_path / "saved")


def test_other_planners_and_readers_are_refused_for_loading(tmp_path):
    dcp.save({"step": 1}, checkpoint_id=tmp_path / "saved")
    for arguments in ({"planner": OtherPlanner()}, {"storage_reader": object()}):
        with pytest.raises(CheckpointingException, match="distckpt does not follow"):
            dcp.load({"step": 0}, checkpoint_id=tmp_path / "saved", **arguments)


# ---- what is not there


def test_absent_keys_are_listed_and_nothing_is_changed(tmp_path):
    dcp.save({"model": {"w": torch.ones(3)}, "step": 1}, checkpoint_id=tmp_path / "saved")
    state = {"model": {"w": torch.zeros(3), "v": torch.zeros(2)}, "step": 0, "lr": 0.5}
    before = copy.deepcopy(state)
    with pytest.raises(
        LoadMismatchError, match=r"'lr', 'model\.v'.*allow_partial_load=True"
    ) as caught:
        dcp.load(state, checkpoint_id=tmp_path / "saved")
    assert caught.value.unexpected == {"lr", "model.v"}
    assert same(state, before)
    dcp.load(
        state,
        checkpoint_id=tmp_path / "saved",
        planner=torch_dcp.DefaultLoadPlanner(allow_partial_load=True),
    )
    assert same(state, {"model": {"w": torch.ones(3), "v": torch.zeros(2)}, "step": 1, "lr": 0.5})


def test_a_tensor_on_the_meta_device_is_refused(tmp_path):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "saved")
    with pytest.raises(CheckpointingException, match="'w' is on the meta device"):
        dcp.load({"w": torch.ones(3, device="meta")}, checkpoint_id=tmp_path / "saved")


def test_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        dcp.load({"step": 0}, checkpoint_id=tmp_path / "nothing")


# ---- imports


PAGE = (Path(__file__).parents[2] / "docs" / "migrating-from-dcp.md").read_text()
ARGUMENTS, NAMES = (
    {
        name: here
        for names, here in re.findall(r"^\| (`[\w`, ]+`) \| (.*) \|$", table, re.M)
        for name in names.strip("`").split("`, `")
    }
    for table in re.findall(r"^\| in DCP \|.*\n\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.M)
)
"""The tables of the page: what stands for each argument and for each name of
torch.distributed.checkpoint.
"""

PUBLIC = sorted(
    name
    for name, value in vars(torch_dcp).items()
    if not name.startswith("_") and getattr(value, "__module__", "").startswith(torch_dcp.__name__)
)
MODULES = sorted(
    module.name
    for module in pkgutil.iter_modules(torch_dcp.__path__)
    if not module.name.startswith("_")
)


def imported(name):
    """Return what `from distckpt.dcp import name` gives, or the error that it ends with."""
    scope = {}
    try:
        exec(f"from distckpt.dcp import {name}", scope)
    except ImportError as error:
        return error
    return scope[name]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_of_torch_is_on_the_page_and_does_what_it_says(name):
    found = imported(name)
    if NAMES[name].startswith("not supported"):
        assert isinstance(found, ImportError)
        assert f"distckpt.dcp has no {name}: " in str(found)
    elif NAMES[name].startswith("PyTorch's own"):
        assert found is getattr(torch_dcp, name)
    elif name == "CheckpointException":
        assert found is CheckpointingException
    else:
        assert NAMES[name].startswith("the same")
        assert found is vars(dcp)[name]


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torch_are_its_own_or_refused(name):
    found, here = imported(name), NAMES.get(name, "")
    if here.startswith("PyTorch's own"):
        assert found is importlib.import_module(f"{torch_dcp.__name__}.{name}")
    else:
        assert isinstance(found, ImportError)
        assert (f"distckpt.dcp has no {name}: " in str(found)) == here.startswith("not supported")


@pytest.mark.parametrize("verb", ["save", "async_save", "load"])
def test_every_argument_of_torch_is_taken_and_on_the_page(verb):
    theirs, ours = (
        inspect.signature(getattr(library, verb)).parameters for library in (torch_dcp, dcp)
    )
    assert [name for name in theirs if name not in ours] == []
    assert [name for name in ours if name not in ARGUMENTS] == []
    # PyTorch's default of this one names a class of its own.
    kinds = {
        name: (one.kind, one.default)
        for name, one in theirs.items()
        if name != "async_checkpointer_type"
    }
    assert {name: (ours[name].kind, ours[name].default) for name in kinds} == kinds


def test_errors_are_caught_under_their_old_name(tmp_path):
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"step": 0}, checkpoint_id=tmp_path / "nothing")


def test_an_unknown_name_of_the_module_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        dcp.no_such_name  # noqa: B018

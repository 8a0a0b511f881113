"""Which tensors an export takes when nothing is said, and what a prefix cuts off."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import distckpt
from distckpt import LoadMismatchError, ShardedObject, ShardedTensor, tasks
from tests.support.states import save_checkpoint


class Transformer(nn.Module):
    """Has the names of a transformers model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 4, bias=False)
        self.lm_head = nn.Linear(4, 8, bias=False)


@pytest.fixture
def trained():
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "names", [("model", "optimizer"), ("net", "opt"), ("net", "training.adam")]
)
def test_the_state_of_an_optimizer_is_left_out(tmp_path, trained, names):
    of_model, of_optimizer = names
    model, optimizer = trained
    state = {of_model: model, **nested(of_optimizer, optimizer), "step": 3}
    distckpt.save(state, tmp_path / "saved")
    path = "" if of_model == "model" else f"{of_model}."

    report = distckpt.consolidate(tmp_path / "saved", tmp_path / "export")

    expected = {f"{path}{key}" for key in model.state_dict()}
    assert load_file(tmp_path / "export/model.safetensors").keys() == expected
    assert report.num_parameters == sum(each.numel() for each in model.parameters())
    state = {f"{of_optimizer}.state.{name}.{key}" for key in expected for name in MOMENTS}
    assert set(report.left_out) == state

    everything = distckpt.consolidate(tmp_path / "saved", tmp_path / "all", keys="*")
    assert load_file(tmp_path / "all/model.safetensors").keys() == expected | state
    assert everything.left_out == ()

    merged = distckpt.merge([tmp_path / "saved"] * 2, tmp_path / "merged")
    assert load_file(tmp_path / "merged/model.safetensors").keys() == expected
    assert merged.left_out == report.left_out


MOMENTS = ("exp_avg", "exp_avg_sq")


def nested(path, value):
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


def test_a_pattern_of_what_is_left_out_does_not_bring_the_optimizer_back(tmp_path, trained):
    model, optimizer = trained
    distckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    distckpt.consolidate(tmp_path / "saved", tmp_path / "export", keys="!lm_head.")
    assert load_file(tmp_path / "export/model.safetensors").keys() == {"model.weight"}


@pytest.mark.parametrize(
    "key", ["optimizer.state.exp_avg.w", "chained_0.optimizer.state.exp_avg.w", "optim.w.exp_avg"]
)
def test_other_programs_optimizers_go_by_their_names(tmp_path, key):
    saved = save_checkpoint(tmp_path / "saved", {"w": torch.ones(2), key: torch.ones(2)})
    assert distckpt.consolidate(saved, tmp_path / "export").left_out == (key,)


def flattened(model, optimizer):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return get_optimizer_state_dict(model, optimizer, options=options)


OPTIMIZER_STATES = {
    "by name": get_optimizer_state_dict,
    "flattened": flattened,
    "by number": lambda model, optimizer: optimizer.state_dict(),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("by name", "optimizer_0"),
        ("by name", "list"),
        ("by name", ""),
        ("flattened", "opt"),
        ("by number", "optim"),
    ],
)
def test_state_dicts_of_pytorch_go_by_their_parameter_groups(
    tmp_path, trained, form, name, is_converted
):
    model, optimizer = trained
    of_optimizer = OPTIMIZER_STATES[form](model, optimizer)
    entry = {name: of_optimizer} if name else of_optimizer
    entry = {"list": [{"first": of_optimizer}, of_optimizer]} if name == "list" else entry
    torch_dcp.save({"net": model.state_dict(), **entry}, checkpoint_id=tmp_path / "dcp")
    saved = tmp_path / "dcp"
    if is_converted:
        saved = tmp_path / "converted"
        distckpt.reshard(tmp_path / "dcp", saved)
    expected = {f"net.{key}" for key in model.state_dict()}
    others = distckpt.open(saved).tensors.keys() - expected
    assert len(others) == (12 if name == "list" else 6)

    report = distckpt.consolidate(saved, tmp_path / "export")
    assert load_file(tmp_path / "export/model.safetensors").keys() == expected
    assert set(report.left_out) == others
    assert distckpt.diff(saved, saved).optimizer_keys == others
    merged = distckpt.merge([saved] * 2, tmp_path / "merged")
    assert load_file(tmp_path / "merged/model.safetensors").keys() == expected
    assert set(merged.left_out) == others


class Learned(nn.Module):
    """Has the names of the state of an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = nn.ModuleDict({"state": nn.Linear(4, 4), "momentum": nn.Linear(4, 4)})
        self.opt = nn.ModuleDict({"state": nn.ModuleDict({"weight": nn.Linear(4, 4)})})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_a_module_with_the_names_of_an_optimizer_is_exported_from_pytorchs_checkpoints(
    tmp_path, has_optimizer
):
    model = Learned()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = model.state_dict()
    if has_optimizer:
        state = {**state, "optimizer": get_optimizer_state_dict(model, optimizer)}
    torch_dcp.save(state, checkpoint_id=tmp_path / "saved")
    report = distckpt.consolidate(tmp_path / "saved", tmp_path / "export")
    assert load_file(tmp_path / "export/model.safetensors").keys() == model.state_dict().keys()
    assert len(report.left_out) == (18 if has_optimizer else 0)

    again = distckpt.consolidate(tmp_path / "export", tmp_path / "again")
    assert (again.num_tensors, again.left_out) == (6, ())


def test_a_module_that_is_called_optimizer_is_exported(tmp_path):
    model = nn.ModuleDict({"optimizer": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    distckpt.save({"model": model}, tmp_path / "saved")
    report = distckpt.consolidate(tmp_path / "saved", tmp_path / "export")
    assert (report.num_tensors, report.left_out) == (4, ())
    averaged = distckpt.merge([tmp_path / "saved"] * 2, tmp_path / "merged")
    assert averaged.num_tensors == 4


def test_a_part_that_is_called_state_in_a_module_called_as_the_optimizer_is_exported(tmp_path):
    model = nn.ModuleDict({"optimizer": nn.ModuleDict({"state": nn.Linear(2, 2)})})
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    distckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    report = distckpt.consolidate(tmp_path / "saved", tmp_path / "export")
    assert load_file(tmp_path / "export/model.safetensors").keys() == model.state_dict().keys()
    assert len(report.left_out) == 4


class Grouped(nn.Module):
    """Has the names of a whole state dict of an optimizer, and extra state beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.state = nn.Linear(4, 4)
        self.param_groups = nn.ModuleDict({"own": nn.Linear(4, 4)})
        self.param_groups.get_extra_state = lambda: {"seen": 3}
        self.param_groups.set_extra_state = lambda state: None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["object", "sharded", "pytorch", "converted"])
@pytest.mark.parametrize("prefix", ["", "part."])
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_a_module_with_state_and_param_groups_is_no_optimizer(
    tmp_path, form, prefix, has_optimizer
):
    model = nn.ModuleDict({"part": Grouped()}) if prefix else Grouped()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = {key: value for key, value in model.state_dict().items() if torch.is_tensor(value)}
    extra = {}
    if form == "object":
        extra = {"optimizer": optimizer} if has_optimizer else {}
        distckpt.save({"model": model, **extra}, tmp_path / "saved")
    elif form == "sharded":
        extra = {"optimizer.state.exp_avg.w": torch.ones(2)} if has_optimizer else {}
        save_checkpoint(tmp_path / "saved", {**tensors, **extra})
    else:
        extra = {"optim": get_optimizer_state_dict(model, optimizer)} if has_optimizer else {}
        torch_dcp.save({**model.state_dict(), **extra}, checkpoint_id=tmp_path / "saved")
    saved = tmp_path / "saved"
    if form == "converted":
        saved = tmp_path / "converted"
        distckpt.reshard(tmp_path / "saved", saved)

    report = distckpt.consolidate(saved, tmp_path / "export")
    assert load_file(tmp_path / "export/model.safetensors").keys() == tensors.keys()
    assert bool(report.left_out) == has_optimizer
    assert distckpt.diff(saved, saved).optimizer_keys == set(report.left_out)
    distckpt.merge([saved] * 2, tmp_path / "merged")
    assert load_file(tmp_path / "merged/model.safetensors").keys() == tensors.keys()
    for task in tasks.consolidate(saved, tmp_path / "parts", num_tasks=2):
        task.run()
    assert distckpt.open(tmp_path / "parts").tensors.keys() == tensors.keys()


@pytest.mark.parametrize("entry", ["optim", "optimizer", "optimizer_net"])
def test_a_module_at_an_entry_that_is_called_as_an_optimizer_is_exported(tmp_path, entry):
    state = {"actor": nn.Linear(2, 2), entry: nn.Linear(2, 3)}
    distckpt.save(state, tmp_path / "saved")
    report = distckpt.consolidate(tmp_path / "saved", tmp_path / "export")
    assert (report.num_tensors, report.left_out) == (4, ())


def test_an_object_called_settings_makes_no_optimizer_of_the_model(tmp_path):
    model = nn.ModuleDict({"env": nn.ModuleDict({"state": nn.Linear(2, 2)})})
    settings = ShardedObject("env.settings", {"seed": 1}, (1,), (0,))
    distckpt.save({"model": model, "env": settings}, tmp_path / "saved")
    report = distckpt.consolidate(tmp_path / "saved", tmp_path / "export")
    assert (report.num_tensors, report.left_out) == (2, ())


def test_a_checkpoint_of_an_optimizer_alone_is_refused(tmp_path):
    saved = save_checkpoint(tmp_path / "saved", {"optimizer.exp_avg.w": torch.ones(2)})
    with pytest.raises(LoadMismatchError, match=r'optimizer\'s, which keys="\*" selects'):
        distckpt.consolidate(saved, tmp_path / "export")


@pytest.mark.parametrize(
    ("keys", "lacks_head"),
    [
        ("model.", True),
        ("model.*", True),
        (["model"], True),
        (["model.", "lm_head."], False),
        (["model.", "!lm_head."], False),
        ("model.weight", False),
        ("*.weight", False),
        ("!optimizer.", False),
        (None, False),
    ],
)
@pytest.mark.parametrize("verb", ["consolidate", "merge"])
def test_a_prefix_that_cuts_through_the_model_is_warned_of(
    tmp_path, trained, caplog, keys, lacks_head, verb
):
    model, optimizer = trained
    distckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    with caplog.at_level(logging.WARNING, "distckpt"):
        if verb == "merge":
            distckpt.merge([tmp_path / "saved"] * 2, tmp_path / "export", keys=keys)
        else:
            distckpt.consolidate(tmp_path / "saved", tmp_path / "export", keys=keys)
    assert ("'lm_head.weight'" in caplog.text) == lacks_head


def test_an_average_that_is_exported_beside_the_model_is_warned_of(tmp_path, trained, caplog):
    model, _ = trained
    average = torch.optim.swa_utils.AveragedModel(model)
    distckpt.save({"model": model, "ema": average}, tmp_path / "saved")
    names = sorted(model.state_dict())
    with caplog.at_level(logging.WARNING, "distckpt"):
        distckpt.consolidate(tmp_path / "saved", tmp_path / "both")
    (warning,) = caplog.messages
    assert "saved beside the model are exported with it: 'ema." in warning
    caplog.clear()
    distckpt.consolidate(tmp_path / "saved", tmp_path / "model", keys="!ema.*")
    distckpt.consolidate(
        tmp_path / "saved", tmp_path / "ema", keys="ema.module.*", rename={"ema.module.": ""}
    )
    assert not caplog.records
    for name in ("model", "ema"):
        assert sorted(distckpt.open(tmp_path / name).tensors) == names


def test_without_a_module_at_model_nothing_is_known_to_be_cut(tmp_path, caplog):
    shard = ShardedTensor.from_rank_offsets
    state = {"a": shard("model.w", torch.ones(2)), "b": shard("other.w", torch.ones(2))}
    distckpt.save(state, tmp_path / "saved")
    distckpt.consolidate(tmp_path / "saved", tmp_path / "export", keys="model.")
    assert not caplog.records


def test_an_export_of_plain_tensors_only_says_where_they_are(tmp_path):
    distckpt.save({"model": nn.Linear(2, 2).state_dict()}, tmp_path / "saved")
    with pytest.raises(LoadMismatchError, match=r"holds no tensors.*common state"):
        distckpt.consolidate(tmp_path / "saved", tmp_path / "export")


@pytest.mark.filterwarnings("ignore")
def test_options_of_numbered_parameters_are_those_of_an_optimizer(tmp_path):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=flat)
    torch.distributed.checkpoint.save(
        {"model": weights, "optim": state}, checkpoint_id=tmp_path / "c"
    )

    distckpt.consolidate(tmp_path / "c", tmp_path / "e")

    assert set(distckpt.open(tmp_path / "e").tensors) == {"model.0.weight", "model.0.bias"}

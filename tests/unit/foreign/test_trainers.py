"""Sharded checkpoints of trainers: those in `tests/data/trainers.zip` were written by the trainers
themselves.
"""

from __future__ import annotations

import logging
import pathlib
import shutil
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import distckpt
from tests.data.make_trainers import Net, make_optimizer
from tests.support.cli_command import call

GOLDEN = pathlib.Path(__file__).parents[2] / "data" / "trainers.zip"
MODELS = {
    "accelerate": "model",
    "fsdp": "model",
    "model_parallel": "state_dict",
    "torchtitan": "model",
}
"""The places of models."""
OPTIMIZERS = {
    "accelerate": "optimizer",
    "fsdp": "optimizer_0",
    "model_parallel": "optimizer_0",
    "torchtitan": "optimizer",
}
WRAPPED = ("fsdp", "model_parallel")
"""The trainers whose modules hold the model at `net`."""

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture
def made(tmp_path):
    with zipfile.ZipFile(GOLDEN) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def request_for(name):
    """A model and an optimizer of other values, at the places where the trainer keeps them."""
    model = Net()
    for param in model.parameters():
        torch.nn.init.zeros_(param)
    optimizer = make_optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 1.0
    module = torch.nn.ModuleDict({"net": model}) if name in WRAPPED else model
    return model, optimizer, {MODELS[name]: module, OPTIMIZERS[name]: optimizer}


def differing(model, optimizer, expected):
    """The keys whose values are not those of the trainer."""
    found = dict(model.state_dict())
    for name, param in model.named_parameters():
        for state in ("exp_avg", "exp_avg_sq"):
            found[f"optimizer.state.{state}.{name}"] = optimizer.state[param][state]
    return [key for key in expected if not torch.equal(found[key], expected[key])]


@pytest.mark.parametrize("name", MODELS)
def test_training_goes_on_with_what_a_trainer_saved(made, name):
    model, optimizer, request = request_for(name)
    loaded = distckpt.load(request, made / name)
    expected = load_file(made / f"{name}.safetensors")
    assert len(expected) == 17
    assert differing(model, optimizer, expected) == []
    assert model.head.weight is model.embed.weight
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(group["lr"] < 1 for group in optimizer.param_groups)
    values = {
        "accelerate": lambda: loaded["scheduler"]["last_epoch"] == 6,
        "torchtitan": lambda: loaded["dataloader"]["dp_rank_1"] == {"position": 3},
    }
    assert values.get(name, lambda: loaded["mine"]["tokens"] == 12)()


class TrainState:
    """As torchtitan's trainer."""

    def state_dict(self):
        return {"step": torch.tensor(0, dtype=torch.int32)}

    def load_state_dict(self, state):
        raise AssertionError(state)


REQUESTS = {"value": {"step": 0}, "tensor": TrainState().state_dict(), "object": TrainState()}


@pytest.mark.parametrize("asked", REQUESTS.values(), ids=REQUESTS)
def test_a_tensor_beside_the_model_is_refused_with_the_call_that_reads_it(made, asked):
    path = made / "torchtitan"
    _, _, request = request_for("torchtitan")
    with pytest.raises(distckpt.LoadMismatchError, match="train_state") as caught:
        distckpt.load({**request, "train_state": asked}, path)
    call = f"distckpt.open({str(path)!r}).read('train_state.step')"
    assert call in str(caught.value)
    assert eval(call) == 3


@pytest.mark.parametrize("name", MODELS)
def test_a_trainers_weights_become_a_hugging_face_directory(made, tmp_path, name):
    distckpt.consolidate(made / name, tmp_path / "export")
    weights = load_file(tmp_path / "export/model.safetensors")
    for key, expected in load_file(made / f"{name}.safetensors").items():
        found = [weights[there] for there in weights if f".{there}".endswith(f".{key}")]
        is_weight = not key.startswith("optimizer.")
        assert [torch.equal(tensor, expected) for tensor in found] == [True] * is_weight


# ---- accelerate's directories of folders


def test_verbs_take_the_directory_around_accelerates_folders(made, tmp_path, capsys):
    call(capsys, "convert", made / "accelerate", tmp_path / "converted")
    call(capsys, "verify", made / "accelerate")
    assert distckpt.diff(made / "accelerate", tmp_path / "converted").is_same
    _, _, request = request_for("accelerate")
    scheduler = torch.optim.lr_scheduler.StepLR(request["optimizer"], 7)
    distckpt.load({**request, "scheduler": scheduler}, made / "accelerate")
    assert (scheduler.step_size, scheduler.last_epoch) == (2, 6)


def test_accelerates_folders_on_an_object_store(made, memory):
    import fsspec

    fsspec.filesystem("memory").put(str(made / "accelerate"), "/bucket/saved", recursive=True)
    model, optimizer, request = request_for("accelerate")
    distckpt.load(request, "memory://bucket/saved")
    assert differing(model, optimizer, load_file(made / "accelerate.safetensors")) == []


def test_further_models_of_accelerate_have_their_number(made):
    """FSDP1 takes several."""
    weight = torch.arange(6.0).view(2, 3)
    second = {"model": {"weight": weight, "names": ["a"]}}
    dcp.save(second, checkpoint_id=made / "accelerate/pytorch_model_fsdp_1")
    module = torch.nn.Linear(3, 2, bias=False)
    _, _, request = request_for("accelerate")
    distckpt.load({**request, "model_1": module}, made / "accelerate")
    assert torch.equal(module.weight, weight)
    assert distckpt.open(made / "accelerate").common_state["model_1"] == {"names": ["a"]}


def test_a_model_of_accelerate_without_an_optimizer(made):
    shutil.rmtree(made / "accelerate/optimizer_0")
    model, _, request = request_for("accelerate")
    distckpt.load({"model": model}, made / "accelerate")
    assert torch.equal(model.scale, torch.tensor([1.5, 2.5]))
    with pytest.raises(distckpt.LoadMismatchError, match="leave the optimizer out"):
        distckpt.load(request, made / "accelerate")


def test_an_unfinished_folder_of_accelerate_is_named(made):
    (made / "accelerate/optimizer_0/.metadata").unlink()
    with pytest.raises(distckpt.CorruptCheckpointError, match=r"optimizer_0/\.metadata' is miss"):
        distckpt.open(made / "accelerate")


def test_a_cut_file_in_a_folder_of_accelerate_is_named(made):
    path = made / "accelerate/optimizer_0/__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-700])
    with pytest.raises(distckpt.CorruptCheckpointError, match=r"optimizer_0/__1_0\.distcp"):
        distckpt.open(made / "accelerate")


def test_files_that_ranks_of_accelerate_save_alone_are_named(tmp_path):
    torch.save({}, tmp_path / "optimizer_0_rank0.bin")
    torch.save({}, tmp_path / "pytorch_model_fsdp_0_rank0.bin")
    with pytest.raises(distckpt.CheckpointingException, match=r"_rank0\.bin'\), .*use_dcp=True"):
        distckpt.open(tmp_path)


class Unknown:
    """A class that no pickle may name."""


def test_values_of_unknown_classes_beside_accelerates_folders_are_left_out(made, caplog):
    torch.save(Unknown(), made / "accelerate/custom_checkpoint_0.pkl")
    torch.save({"seen": 5}, made / "accelerate/custom_checkpoint_1.pkl")
    _, _, request = request_for("accelerate")
    with caplog.at_level(logging.WARNING):
        loaded = distckpt.load(request, made / "accelerate")
    assert loaded["custom_checkpoint_1"] == {"seen": 5}
    assert "custom_checkpoint_0" not in loaded
    assert "custom_checkpoint_0.pkl is not read" in caplog.text


@pytest.mark.slow
def test_what_trainers_write_now(tmp_path):
    for package in ("accelerate", "lightning", "torchtitan"):
        pytest.importorskip(package, reason=f"needs the package {package}")
    from tests.data import make_trainers

    make_trainers.make_all(tmp_path)
    for name in MODELS:
        model, optimizer, request = request_for(name)
        distckpt.load(request, tmp_path / name)
        assert differing(model, optimizer, load_file(tmp_path / f"{name}.safetensors")) == []

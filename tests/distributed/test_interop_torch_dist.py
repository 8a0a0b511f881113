"""Directories that several ranks wrote with torch.distributed.checkpoint, read by other numbers of
ranks.
"""

from __future__ import annotations

import os
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import distckpt
from distckpt import CorruptCheckpointError, RankFailedError, ShardedTensor
from tests.support.harness import error_of, run
from tests.support.reference import fsdp2_trains
from tests.support.states import numbered

WEIGHTS = {
    "rows": (numbered(12, 5), [Shard(0)]),
    "columns": (numbered(6, 24, dtype=torch.bfloat16), [Shard(1)]),
    "uneven": (numbered(7, 3, dtype=torch.float64), [Shard(0)]),
    "fewer.than.ranks": (numbered(1, 4), [Shard(0)]),
    "copied": (numbered(9), [Replicate()]),
    "scalar": (torch.tensor(2.5), [Replicate()]),
}


def save_with_torch(rank, path):
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,))
    model = {
        key: distribute_tensor(tensor, mesh, places) for key, (tensor, places) in WEIGHTS.items()
    }
    dcp.save(
        {"model": model, "optimizer": {"groups": [{"lr": 0.1}]}, "step": 5}, checkpoint_id=path
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("dcp") / "checkpoint")
    run(save_with_torch, 2, path)
    assert {".metadata", "__0_0.distcp", "__1_0.distcp"} == set(os.listdir(path))
    return path


def part_of(key, tensor, rank, num_ranks):
    """Describe the rank's share of the last axis; of tensors that do not divide, a copy of the
    whole.
    """
    axis = tensor.dim() - 1
    if axis < 0 or tensor.shape[axis] % num_ranks:
        return ShardedTensor.from_rank_offsets(
            key, torch.zeros_like(tensor), replica_id=rank
        ), tensor
    part = tensor.chunk(num_ranks, axis)[rank].contiguous()
    return ShardedTensor.from_rank_offsets(
        key, torch.zeros_like(part), (axis, rank, num_ranks)
    ), part


def load_in_another_layout(rank, path, num_ranks):
    parts = {
        key: part_of(f"model.{key}", tensor, rank, num_ranks)
        for key, (tensor, _) in WEIGHTS.items()
    }
    asked = {"model": {key: shard for key, (shard, _) in parts.items()}}
    loaded = distckpt.load(asked, path, strict="raise")
    wrong = [
        key
        for key, (_, expected) in parts.items()
        if not torch.equal(loaded["model"][key], expected)
    ]
    return wrong, loaded["step"], loaded["optimizer"]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_dtensors_load_in_another_layout(saved, num_ranks):
    expected = ([], 5, {"groups": [{"lr": 0.1}]})
    assert run(load_in_another_layout, num_ranks, saved, num_ranks) == [expected] * num_ranks


def test_consolidation_of_what_two_ranks_wrote(saved, tmp_path):
    distckpt.consolidate(saved, str(tmp_path / "hf"), rename={"model.": ""})
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == WEIGHTS.keys()
    assert [
        key for key, (tensor, _) in WEIGHTS.items() if not torch.equal(exported[key], tensor)
    ] == []


def convert(rank, source, target):
    return distckpt.reshard(source, target).location


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_conversion_by_some_ranks(saved, tmp_path, num_ranks):
    target = str(tmp_path / "converted")
    assert run(convert, num_ranks, saved, target) == [target] * num_ranks
    plain = distckpt.open(target).read_tensors()
    assert [
        key
        for key, (tensor, _) in WEIGHTS.items()
        if not torch.equal(plain[f"model.{key}"], tensor)
    ] == []
    assert distckpt.open(target).common_state == distckpt.open(saved).common_state


def errors_of_loading(rank, path):
    error = error_of(distckpt.load, {}, path)
    return isinstance(error, RankFailedError | CorruptCheckpointError), str(error)


def test_all_ranks_hear_of_a_missing_file(saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "copy")
    os.unlink(copy / "__1_0.distcp")
    for is_ours, message in run(errors_of_loading, 2, str(copy)):
        assert is_ours
        assert "__1_0.distcp" in message
        assert "is missing" in message


def trained_by_fsdp(rank, path, size):
    """Train a model that FSDP2 divides, save it with torch, and return what it is whole."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, optimizer = divided_model(size)
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optim": of_optimizer, "step": 3}, checkpoint_id=path)
    return whole(model, optimizer)


def divided_model(size):
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def whole(model, optimizer):
    options = StateDictOptions(full_state_dict=True)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    return dict(of_model), of_optimizer["state"], of_optimizer["param_groups"]


def load_objects(rank, path, size):
    warnings.simplefilter("ignore")
    model, optimizer = divided_model(size)
    optimizer.param_groups[0]["lr"] = 5.0
    state = {"model": model, "optim": optimizer, "step": 0}
    distckpt.load(state, path)
    return state["step"], whole(model, optimizer)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_equal(found[key], value)
        else:
            assert torch.equal(found[key], value)


@fsdp2_trains
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_objects_that_fsdp_divides(tmp_path, num_ranks):
    path = str(tmp_path / "saved")
    model, state, groups = run(trained_by_fsdp, 2, path, 2)[0]
    step, found = run(load_objects, num_ranks, path, num_ranks)[0]
    assert step == 3
    assert_equal(found[0], model)
    assert_equal(found[1], state)
    assert found[2] == groups


def load_by_stages(rank, path):
    """Each rank has one of the layers, and an optimizer of that."""
    model = torch.nn.ModuleDict({str(rank): torch.nn.Linear(*[(5, 7), (7, 3)][rank])})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    distckpt.load({"model": model, "optim": optimizer}, path)
    states = {name: optimizer.state[param] for name, param in model.named_parameters()}
    return dict(model.state_dict()), states


@fsdp2_trains
def test_objects_on_the_ranks_of_a_pipeline(tmp_path):
    path = str(tmp_path / "saved")
    expected = run(trained_by_fsdp, 2, path, 2)[0][:2]
    for rank, found in enumerate(run(load_by_stages, 2, path)):
        for own, of_all in zip(found, expected, strict=True):
            names = [name for name in of_all if name.startswith(str(rank))]
            assert_equal(own, {name: of_all[name] for name in names})

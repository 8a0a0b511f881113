"""A format that a program brings itself, read by several ranks."""

from __future__ import annotations

import json
import os
import pathlib
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import distckpt
from distckpt.hf import consolidate_safetensors_files_on_every_rank
from distckpt.readers import register_reader
from tests.data import make_deepspeed, make_trainers
from tests.data.make_orbax import trees
from tests.support.harness import run
from tests.support.toy_format import SAMPLER, WEIGHT, ToyReader, sampler_shard, write_toy


@pytest.fixture
def toy(tmp_path):
    return write_toy(tmp_path / "toy")


def load_columns(rank, path):
    register_reader(ToyReader())
    shard = distckpt.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 4), (1, rank, 2))
    state = distckpt.load({"w": shard, "sampler": sampler_shard(rank)}, path)
    return torch.equal(state["w"], WEIGHT.chunk(2, 1)[rank]), state["sampler"], state["step"]


def test_load_on_two_ranks(toy):
    assert run(load_columns, 2, str(toy)) == [(True, SAMPLER, 7)] * 2


def load_with_a_reader_on_rank_0(rank, path):
    if rank == 0:
        register_reader(ToyReader())
    with pytest.raises(
        distckpt.RankFailedError, match="'toy', for which no reader is registered here"
    ):
        distckpt.load({"sampler": sampler_shard(rank)}, path)


def test_a_reader_that_another_rank_lacks_is_named(toy):
    run(load_with_a_reader_on_rank_0, 2, str(toy))


def train_on(rank, path, expected, make):
    """Load into a model and an optimizer of FSDP2; return the keys whose parts are others."""
    model, make_optimizer = make()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = make_optimizer(model)
    distckpt.load({"model": model, "optimizer": optimizer}, path)
    differing = []
    for key, whole in load_file(expected).items():
        state, _, name = key.removeprefix("optimizer.state.").partition(".")
        found = dict(model.state_dict()).get(key)
        if found is None:
            found = optimizer.state[model.get_parameter(name)][state]
        own = found
        if isinstance(found, DTensor):
            own = found.to_local()
            first = compute_local_shape_and_global_offset(
                found.shape, found.device_mesh, found.placements
            )[1][0]
            whole = whole[first : first + len(own)]
        if not torch.equal(own, whole):
            differing.append(key)
    return differing


def model_of_trainers():
    return make_trainers.Net(), make_trainers.make_optimizer


def model_of_deepspeed():
    model, _ = make_deepspeed.make_model()
    return model, make_deepspeed.make_optimizer


@pytest.mark.parametrize(
    ("archive", "name", "make"),
    [
        ("trainers", "accelerate", model_of_trainers),
        ("trainers", "torchtitan", model_of_trainers),
        ("deepspeed_0_19_more", "plain", model_of_deepspeed),
    ],
)
def test_training_goes_on_with_fsdp2(tmp_path, archive, name, make):
    with zipfile.ZipFile(pathlib.Path(__file__).parents[1] / f"data/{archive}.zip") as files:
        files.extractall(tmp_path)
    path = str(tmp_path / name)
    assert run(train_on, 2, path, f"{path}.safetensors", make) == [[], []]


def load_rows_of_deepspeed(rank, path):
    shard = distckpt.ShardedTensor.from_rank_offsets("up.weight", torch.zeros(3, 5), (0, rank, 3))
    moment = distckpt.ShardedTensor.from_rank_offsets(
        "optimizer.state.exp_avg.up.weight", torch.zeros(3, 5), (0, rank, 3)
    )
    state = distckpt.load({"w": shard, "m": moment}, path)
    return state["w"].tolist(), state["m"].tolist(), state["iteration"]


def test_deepspeed_on_another_number_of_ranks(tmp_path):
    with zipfile.ZipFile(
        pathlib.Path(__file__).parents[1] / "data" / "deepspeed_0_19.zip"
    ) as archive:
        archive.extractall(tmp_path)
    expected = load_file(tmp_path / "zero3.safetensors")
    of_ranks = run(load_rows_of_deepspeed, 3, str(tmp_path / "zero3"))
    weights, moments, steps = map(list, zip(*of_ranks, strict=True))
    assert torch.equal(torch.tensor(weights).flatten(0, 1), expected["up.weight"])
    assert torch.equal(
        torch.tensor(moments).flatten(0, 1), expected["optimizer.state.exp_avg.up.weight"]
    )
    assert steps == [3, 3, 3]


def load_parts_of_orbax(rank, path, share_reads):
    shard = distckpt.ShardedTensor.from_rank_offsets
    state = {
        "columns": shard("both", torch.zeros(16, 10), (1, rank, 2)),
        "same": shard("replica", torch.zeros(300), replica_id=rank),
    }
    options = distckpt.LoadOptions(share_reads=share_reads)
    state = distckpt.load(state, path, options=options)
    distckpt.consolidate(
        path, f"{path}_exported_{share_reads}", process_group=torch.distributed.group.WORLD
    )
    return state["columns"].tolist(), state["same"].tolist()


@pytest.mark.parametrize("share_reads", ["off", "on"])
def test_orbax_on_two_ranks(tmp_path, share_reads):
    with tarfile.open(pathlib.Path(__file__).parents[1] / "data" / "orbax_0_12.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    expected = trees()["hosts/0"]
    columns, replicas = zip(
        *run(load_parts_of_orbax, 2, str(tmp_path / "hosts/0"), share_reads), strict=True
    )
    assert np.array_equal(np.concatenate(np.array(columns, np.float32), 1), expected["both"])
    assert np.array_equal(np.array(replicas, np.float32), [expected["replica"]] * 2)
    exported = load_file(tmp_path / f"hosts/0_exported_{share_reads}/model.safetensors")
    assert all(np.array_equal(exported[key].numpy(), expected[key]) for key in expected)


def load_a_copy(rank, copies):
    os.chdir(copies[rank])
    shard = distckpt.ShardedTensor.from_rank_offsets("a", torch.zeros(2, 4), (0, rank, 2))
    with pytest.raises(distckpt.RankFailedError, match=r"rank 1: .*has another header"):
        distckpt.load({"a": shard}, "model.safetensors")


@pytest.fixture
def copies(tmp_path):
    """Copies of the same tensors, in files of the same size, in another order: what two nodes have
    on their own disks.
    """
    copies = []
    info = json.dumps({key: {"saved_offsets": [0, 0]} for key in "ab"})
    for order in ("ab", "ba"):
        places = {key: [64 * place, 64 * place + 64] for place, key in enumerate(order)}
        entries = {
            key: {"dtype": "F32", "shape": [4, 4], "data_offsets": places[key]} for key in "ab"
        }
        header = json.dumps({"__metadata__": {"DCP_SHARDING_INFO": info}, **entries}).encode()
        data = b"".join(bytes([ord(key)]) * 64 for key in order)
        copies.append(tmp_path / order)
        copies[-1].mkdir()
        content = len(header).to_bytes(8, "little") + header + data
        (copies[-1] / "model.safetensors").write_bytes(content)
    return list(map(str, copies))


def test_copies_that_hold_tensors_in_another_order_are_not_loaded(copies):
    run(load_a_copy, 2, copies)


def merge_a_copy(rank, copies, output):
    os.chdir(copies[rank])
    with pytest.raises(distckpt.RankFailedError, match=r"rank 1: .*has another header"):
        consolidate_safetensors_files_on_every_rank(".", output, {"a": 1, "b": 2})


def test_copies_that_hold_tensors_in_another_order_are_not_merged(copies, tmp_path):
    run(merge_a_copy, 2, copies, str(tmp_path / "merged"))
    assert not (tmp_path / "merged").exists()

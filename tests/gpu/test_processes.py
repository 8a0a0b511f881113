"""A GPU in processes of their own: DTensors and FSDP2 on a mesh of one, a group that only NCCL
serves, allocators.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import distckpt
from distckpt import ShardedTensor
from tests.gpu.conftest import DEVICES
from tests.support.harness import ROOT, run
from tests.support.reference import fsdp2_trains

ROWS = torch.arange(1.0, 601.0).view(20, 30)


def save_and_load_dtensors(rank, device, folder):
    warnings.simplefilter("ignore")  # NCCL's about the device, which it guesses
    mesh = init_device_mesh(device, (1,))

    def state(whole):
        rows, replica = (
            distribute_tensor(whole.to(device), mesh, [how]) for how in (Shard(0), Replicate())
        )
        return {
            "rows": rows,
            "replica": replica,
            "plain": ShardedTensor.from_rank_offsets("plain", whole.to(device)),
        }

    distckpt.save(state(ROWS), f"{folder}/tensors")
    loaded = distckpt.load(state(torch.zeros_like(ROWS)), f"{folder}/tensors", share_reads="on")
    tensors = [loaded["rows"].full_tensor(), loaded["replica"].full_tensor(), loaded["plain"]]
    return dist.get_backend(), [(tensor.device.type, tensor.cpu().numpy()) for tensor in tensors]


@pytest.mark.parametrize("device", DEVICES)
def test_dtensors_on_a_mesh_of_one(device, tmp_path):
    backend = "nccl" if device == "cuda" else "gloo"
    ((found, tensors),) = run(save_and_load_dtensors, 1, device, str(tmp_path), backend=backend)
    assert found == backend
    for kind, array in tensors:
        assert kind == device
        np.testing.assert_array_equal(array, ROWS.numpy())


def resume_fsdp(rank, device, folder):
    """Train, save in the background while training goes on, and resume in another model: the same
    losses follow.
    """
    warnings.simplefilter("ignore")
    mesh = init_device_mesh(device, (1,))

    def made(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(30, 16), torch.nn.Linear(16, 4)).to(device)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    def losses(model, optimizer, num_steps):
        found = []
        for _ in range(num_steps):
            loss = model(ROWS.to(device) / 600).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    trained, other = made(1), made(2)
    losses(*trained, 3)
    losses(*other, 1)
    handle = distckpt.async_save(
        dict(zip(("model", "optimizer"), trained, strict=True)), f"{folder}/model"
    )
    expected = losses(*trained, 2)
    handle.result(120)
    distckpt.load(dict(zip(("model", "optimizer"), other, strict=True)), f"{folder}/model")
    return expected, losses(*other, 2)


@fsdp2_trains
@pytest.mark.parametrize("device", DEVICES)
def test_fsdp_on_a_mesh_of_one_resumes(device, tmp_path):
    ((expected, found),) = run(
        resume_fsdp, 1, device, str(tmp_path), backend="nccl" if device == "cuda" else "gloo"
    )
    assert found == expected


def round_trip(device, folder):
    """Save and load tensors, some of which are larger than the segments that the allocator begins
    with.
    """
    sizes = (100, 3_000_000, 40_000_000)
    tensors = {str(size): torch.arange(size, device=device, dtype=torch.int32) for size in sizes}
    targets = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    if device == "cuda":
        assert all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    for number in range(2):
        state = {
            key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()
        }
        handle = distckpt.async_save(state, f"{folder}/{number}")
        for tensor in tensors.values():
            tensor += 1
        handle.result(120)
        for target in targets.values():
            target.zero_()
        state = {
            key: ShardedTensor.from_rank_offsets(key, target) for key, target in targets.items()
        }
        distckpt.load(state, f"{folder}/{number}")
        for size in sizes:
            np.testing.assert_array_equal(
                targets[str(size)].cpu().numpy(), np.arange(number, size + number)
            )


@pytest.mark.parametrize("device", DEVICES)
def test_memory_of_expandable_segments(device, tmp_path):
    program = (
        "from tests.gpu.test_processes import round_trip; "
        f"round_trip({device!r}, {str(tmp_path)!r})"
    )
    environment = {
        **os.environ,
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)

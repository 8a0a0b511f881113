"""The command line on object stores: a real S3 server, and fsspec's memory."""

from __future__ import annotations

import os
import time

import fsspec
import numpy as np
import pytest
import torch

import distckpt
from distckpt import CheckpointManager, ShardedObject, ShardedTensor, list_checkpoints
from tests.support.cli_command import call, call_json
from tests.support.s3_server import client

GRID = np.arange(60, dtype=np.float32).reshape(6, 10)


@pytest.fixture
def checkpoint(tmp_path):
    halves = torch.from_numpy(GRID.copy()).chunk(2, 1)
    state = {
        str(i): ShardedTensor.from_rank_offsets("grid", half, (1, i, 2))
        for i, half in enumerate(halves)
    }
    state["layer"] = ShardedTensor.from_rank_offsets(
        "layer", torch.ones(4, 6, dtype=torch.bfloat16)
    )
    state["rng"] = ShardedObject("rng", {"seed": 3}, (1,), (0,))
    distckpt.save({**state, "step": 7}, tmp_path / "c")
    return tmp_path / "c"


@pytest.fixture(params=["memory", "s3"])
def store(request):
    return "memory://test_cli" if request.param == "memory" else request.getfixturevalue("bucket")


def write_empty(url):
    if url.startswith("memory:"):
        fsspec.filesystem("memory").pipe_file(url, b"")
    else:
        bucket, _, key = url.removeprefix("s3://").partition("/")
        client(os.environ["AWS_ENDPOINT_URL"]).put_object(Bucket=bucket, Key=key, Body=b"")


def test_urls_are_taken_everywhere(checkpoint, store, capsys):
    root = f"{store}/run"
    call_json(capsys, "reshard", checkpoint, f"{root}/c", "--ranks", 2)
    local, remote = (call_json(capsys, "inspect", place) for place in (checkpoint, f"{root}/c"))
    assert (remote["num_tensors"], remote["tensor_bytes"]) == (
        local["num_tensors"],
        local["tensor_bytes"],
    )
    assert call_json(capsys, "inspect", f"{root}/c", "--key", "grid")["shape"] == list(GRID.shape)
    assert call_json(capsys, "verify", f"{root}/c")["is_whole"]
    call_json(capsys, "export", f"{root}/c", f"{root}/hf")
    call_json(capsys, "import", f"{root}/hf", f"{root}/imported")
    call_json(capsys, "convert", f"{root}/hf", f"{root}/converted")
    for name in ("imported", "converted"):
        assert call_json(capsys, "diff", checkpoint, f"{root}/{name}", "--keys", "*")["is_same"]
    assert call_json(capsys, "cat", f"{root}/c", "grid[0, 0]")["values"] == GRID[0, 0].item()


def test_files_that_are_no_part_of_a_checkpoint_are_shown(checkpoint, store, capsys):
    url = f"{store}/strays"
    distckpt.reshard(checkpoint, url)
    assert call_json(capsys, "inspect", url)["strays"] == []
    assert "note:" not in call(capsys, "inspect", url) + call(capsys, "verify", url)
    strays = [
        f"tensors-0123456789abcdef/shard-0000{i}-model-00001-of-00001.safetensors"
        for i in range(1, 6)
    ]
    for name in strays:
        write_empty(f"{url}/{name}")
    listed = ", ".join(strays[:3])
    for verb in ("inspect", "verify"):
        assert call_json(capsys, verb, url)["strays"] == strays
        (line,) = (
            line for line in call(capsys, verb, url).splitlines() if line.startswith("note:")
        )
        causes = "left by interrupted saves or being written by a save in progress"
        assert line == f"note: 5 more files, {causes}: {listed}, ..."


def test_steps_are_listed(store):
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}
    with CheckpointManager(f"{store}/steps", async_save=False) as manager:
        for step in (100, 200, 300, 400):
            manager.save(step, state)
    found = list_checkpoints(f"{store}/steps")
    assert [info.step for info in found] == [100, 200, 300, 400]
    assert all(info.num_bytes > 4000 and abs(info.saved_at - time.time()) < 600 for info in found)

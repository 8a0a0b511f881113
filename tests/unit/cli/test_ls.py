"""`distckpt ls` and `list_checkpoints`: what is in the directory of a run."""

from __future__ import annotations

import os
import time

import torch

import distckpt
from distckpt import CheckpointManager, ShardedTensor, list_checkpoints
from tests.support.cli_command import call, call_error, call_json


def save_steps(root):
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}
    with CheckpointManager(root, async_save=False) as manager:
        for step in (100, 200, 300, 400):
            manager.save(step, state, metrics={"loss": 2 / step}, pinned=step == 100)


def test_steps_are_listed_with_what_is_known_of_them(tmp_path, capsys):
    before = time.time()
    save_steps(tmp_path)
    (tmp_path / "step_00000300/metadata.json").unlink()
    (tmp_path / "step_00000400/manifest.safetensors").unlink()
    distckpt.save(
        {"w": ShardedTensor.from_rank_offsets("w", torch.ones(8)), "step": 9}, tmp_path / "best"
    )
    (tmp_path / "logs").mkdir()
    found = {info.name: info for info in list_checkpoints(tmp_path)}
    assert list(found) == [
        "best",
        "step_00000100",
        "step_00000200",
        "step_00000300",
        "step_00000400",
    ]
    first = found["step_00000100"]
    assert (first.step, first.metrics, first.pinned, first.problem) == (
        100,
        {"loss": 0.02},
        True,
        None,
    )
    files = [
        file
        for folder in ("tensors", "objects")
        for file in (tmp_path / first.name / folder).iterdir()
    ]
    assert first.num_bytes == sum(file.stat().st_size for file in files)
    assert before - 2 < first.saved_at < time.time() + 2
    assert [info.name for info in found.values() if info.is_newest] == ["step_00000200"]
    assert "did not finish" in found["step_00000300"].problem
    assert "manifest.safetensors' is missing" in found["step_00000400"].problem
    assert (found["best"].step, found["best"].problem, found["best"].metrics) == (None, None, {})
    listed = call_json(capsys, "ls", tmp_path)
    assert [item["is_newest"] for item in listed] == [False, False, True, False, False]
    assert listed == [vars(info) for info in found.values()]
    text = call(capsys, "ls", tmp_path)
    assert "pinned" in text
    assert "step_00000400: CorruptCheckpointError: " in text


def test_of_checkpoints_without_steps_the_newest_was_saved_last(tmp_path):
    for name, seconds in (("zulu", 1000), ("alpha", 3000), ("mike", 2000)):
        distckpt.save({"step": 1}, tmp_path / name)
        os.utime(tmp_path / name / "metadata.json", (seconds, seconds))
    found = [(info.name, info.saved_at, info.is_newest) for info in list_checkpoints(tmp_path)]
    assert found == [("zulu", 1000, False), ("mike", 2000, False), ("alpha", 3000, True)]


def test_the_newest_is_the_one_that_a_manager_loads(tmp_path):
    for name in ("step_00000007", "step_9", "final-12"):
        distckpt.save({"name": name}, tmp_path / name)
    manager = CheckpointManager(tmp_path)
    assert (
        [info.step for info in list_checkpoints(tmp_path) if info.is_newest]
        == [7]
        == [manager.latest()]
    )
    assert manager.load({})["name"] == "step_00000007"


def test_other_directories(tmp_path, capsys):
    assert call(capsys, "ls", tmp_path) == f"there are no checkpoints in {tmp_path}\n"
    assert "does not exist" in call_error(capsys, "ls", tmp_path / "nothing")
    distckpt.save({"step": 1}, tmp_path / "c")
    assert "is a checkpoint, not a directory of checkpoints" in call_error(
        capsys, "ls", tmp_path / "c"
    )
    (tmp_path / "c/metadata.json").unlink()
    assert "so a save did not finish here" in call_error(capsys, "ls", tmp_path / "c")
    distckpt.save({"step": 1}, tmp_path / "of the user/step_1")
    (tmp_path / "of the user/tensors").mkdir()
    assert [info.name for info in list_checkpoints(tmp_path / "of the user")] == ["step_1"]
    for name in (
        "hf/model.safetensors.index.json",
        "torch/.metadata",
        "run/checkpoint-5/model.safetensors",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"damaged")
    for name in ("hf", "torch"):
        assert "is a checkpoint, not a directory of checkpoints" in call_error(
            capsys, "ls", tmp_path / name
        )
    (tmp_path / "run/logs").mkdir()
    [damaged] = list_checkpoints(tmp_path / "run")
    assert (damaged.name, damaged.step, damaged.is_newest) == ("checkpoint-5", 5, False)
    assert "is not a complete safetensors file" in damaged.problem

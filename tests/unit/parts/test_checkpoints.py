"""Checkpoints that are rewritten in parts."""

from __future__ import annotations

import pytest
import torch

import distckpt
from distckpt import CheckpointingException, tasks
from tests.support.parts import contents_of
from tests.support.states import numbered, save_checkpoint


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint whose file has several pieces, with values that overflow everywhere."""
    values = torch.arange(6000 * 1101) % 3001 * 0.37
    values[::1007] = 1e6
    matrix = values.view(6000, 1101)
    tensors = {f"layers.{i}.weight": matrix + i for i in range(6)}
    return save_checkpoint(tmp_path_factory.mktemp("large") / "a", tensors, args={"lr": 1})


def test_a_large_file_is_divided(large, tmp_path):
    options = {"dtype": {"layers.3.weight": torch.float16}, "num_ranks": 1}
    expected = distckpt.reshard(large, tmp_path / "one", **options)
    work = tasks.reshard(large, tmp_path / "out", num_tasks=2, **options)
    reports = [task.run() for task in work]
    assert reports[-1].num_total == 4
    assert reports[-1].report.overflows == expected.overflows
    assert expected.overflows
    assert contents_of(tmp_path / "out") == contents_of(tmp_path / "one")
    assert distckpt.verify(tmp_path / "out").is_whole


def test_its_own_place_is_refused(tmp_path):
    save_checkpoint(tmp_path / "a", {"w": numbered(4, 4)})
    (task,) = tasks.reshard(tmp_path / "a", tmp_path / "a", num_tasks=1, overwrite=True)
    with pytest.raises(CheckpointingException, match="in its own place in parts"):
        task.run()


def test_another_common_state(tmp_path):
    save_checkpoint(tmp_path / "a", {"w": numbered(4, 4)}, args={"lr": 1})
    given = {"num_tasks": 1, "common_state": {"args": {"lr": 2}}}
    (task,) = tasks.reshard(tmp_path / "a", tmp_path / "b", **given)
    assert task.run().report.num_tensors == 1
    assert distckpt.load({}, tmp_path / "b")["args"] == {"lr": 2}


def test_other_objects_are_another_source(tmp_path):
    save_checkpoint(tmp_path / "a", {f"w{i}": numbered(4, 4) for i in range(2)}, args={"lr": 1})
    options = {"num_ranks": 2, "grids": {"*": (2, 1)}}
    tasks.reshard(tmp_path / "a", tmp_path / "b", num_tasks=3, **options)[0].run()
    others = {"common_state": {"args": {"lr": 2}}, **options}
    with pytest.raises(CheckpointingException, match=r"objects and common state was .* and is"):
        tasks.reshard(tmp_path / "a", tmp_path / "b", num_tasks=3, **others)[1].run()


def test_a_model_that_comes_between_parts_is_not_hidden(tmp_path):
    save_checkpoint(tmp_path / "a", {f"w{i}": numbered(4, 4) for i in range(2)})
    first, second = tasks.reshard(tmp_path / "a", tmp_path / "b", num_tasks=2, num_ranks=2)
    first.run()
    distckpt.consolidate(tmp_path / "a", tmp_path / "b")
    with pytest.raises(distckpt.CheckpointExistsError, match="holds a Hugging Face model"):
        second.run()
    assert list(distckpt.open(tmp_path / "b").tensors) == ["w0", "w1"]

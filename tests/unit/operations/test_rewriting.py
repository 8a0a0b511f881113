"""`reshard` in the place of its source, and with other common state."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import fsspec
import pytest
import torch

import distckpt
from distckpt import CheckpointExistsError, CheckpointingException, ShardedObject, ShardedTensor
from tests.support.calls import watched
from tests.support.hf_folders import same_bytes
from tests.support.states import numbered, save_checkpoint

TENSORS = {"model.w": numbered(40, 6), "optimizer.state.w": numbered(40, 6) / 8}


@pytest.fixture(params=["path", "url"])
def place(request, tmp_path):
    return str(tmp_path) if request.param == "path" else request.getfixturevalue("memory")


def save(location, factor=1, **options):
    state = {
        key: ShardedTensor.from_rank_offsets(key, factor * tensor)
        for key, tensor in TENSORS.items()
    }
    state["rng"] = ShardedObject("rng", {"seed": 1}, (1,), (0,))
    distckpt.save({**state, "step": factor}, location, **options)


def test_tensors_are_removed_in_place(place):
    save(f"{place}/c")
    report = distckpt.reshard(f"{place}/c", f"{place}/c", keys="!optimizer.", overwrite=True)
    assert (report.num_tensors, report.num_objects) == (1, 1)
    checkpoint = distckpt.open(f"{place}/c")
    assert same_bytes(checkpoint.read_tensors(), {"model.w": TENSORS["model.w"]})
    assert (checkpoint.common_state, checkpoint.objects) == ({"step": 1}, {"rng": (1,)})
    verified = distckpt.verify(f"{place}/c")
    assert (verified.problems, verified.strays) == ((), ())
    files, _, root = fsspec.get_fs_token_paths(place)
    assert [Path(name).name for name in files.ls(root[0], detail=False)] == ["c"]


def test_no_file_of_the_old_checkpoint_is_open_when_it_is_removed(tmp_path):
    """On NFS its directory would stay."""
    save(tmp_path / "c")
    at_renames = []

    def note_open_files(call, moment):
        if moment == "before" and call.name in ("rename", "renameat2"):
            at_renames.append(open_files_below(tmp_path))

    with watched(tmp_path, note_open_files):
        distckpt.reshard(tmp_path / "c", tmp_path / "c", keys="!optimizer.", overwrite=True)
    assert at_renames
    assert [name for names in at_renames for name in names] == []


def open_files_below(folder):
    """Return the regular files that this process has open."""
    paths = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [path for path in paths if path.is_relative_to(folder) and path.is_file()]


def test_a_checkpoint_is_rewritten_in_place_when_that_is_said(place):
    save(f"{place}/c")
    with pytest.raises(CheckpointExistsError, match="pass overwrite=True"):
        distckpt.reshard(f"{place}/c", f"{place}/c")
    assert same_bytes(distckpt.open(f"{place}/c").read_tensors(), TENSORS)


def test_a_checkpoint_that_came_meanwhile_stays(tmp_path):
    save(tmp_path / "c")
    save(tmp_path / "next", factor=2)

    def come(done, total):
        if (tmp_path / "next").exists():
            (tmp_path / "c").rename(tmp_path / "earlier")
            (tmp_path / "next").rename(tmp_path / "c")

    options = {"keys": "model.", "overwrite": True, "progress": come}
    with pytest.raises(CheckpointingException, match="was replaced after it was opened"):
        distckpt.reshard(tmp_path / "c", tmp_path / "c", **options)
    assert distckpt.open(tmp_path / "c").common_state == {"step": 2}
    assert distckpt.verify(tmp_path / "c").is_whole
    assert sorted(os.listdir(tmp_path)) == ["c", "earlier"]


def test_other_common_state(tmp_path):
    save(tmp_path / "c")
    distckpt.reshard(tmp_path / "c", tmp_path / "d", common_state={"step": 7, "new": [1]})
    checkpoint = distckpt.open(tmp_path / "d")
    assert checkpoint.common_state == {"step": 7, "new": [1]}
    assert checkpoint.objects == {"rng": (1,)}
    assert same_bytes(checkpoint.read_tensors(), TENSORS)


def test_common_state_that_cannot_be_saved(tmp_path):
    save(tmp_path / "c")
    with pytest.raises(distckpt.UnsupportedObjectError, match="Common state cannot be saved"):
        distckpt.reshard(tmp_path / "c", tmp_path / "d", common_state={"step": object()})
    assert os.listdir(tmp_path) == ["c"]


def test_progress_ends_with_everything(tmp_path):
    save(tmp_path / "c")
    seen = []
    report = distckpt.reshard(
        tmp_path / "c", tmp_path / "d", progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (report.num_bytes, report.num_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert torch.equal(distckpt.open(tmp_path / "d").read("model.w"), TENSORS["model.w"])


def test_memory_of_a_plan_for_many_ranks(tmp_path):
    tensors = {f"layer.{i}": torch.full((64, 8), float(i)) for i in range(100)}
    save_checkpoint(tmp_path / "a", tensors)
    distckpt.reshard(tmp_path / "a", tmp_path / "warm", num_ranks=4096)
    tracemalloc.start()
    distckpt.reshard(tmp_path / "a", tmp_path / "b", num_ranks=4096)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A row for each rank that could write a tensor would take 60 MB.
    assert peak < 10e6
    read = distckpt.open(tmp_path / "b").read_tensors()
    assert all(torch.equal(read[key], tensor) for key, tensor in tensors.items())

"""Seals of formats whose tensors are decoded when they are read: all files are sealed whole."""

from __future__ import annotations

import pathlib
import shutil
import tarfile

import pytest
import torch

import distckpt
from distckpt import CorruptCheckpointError
from tests.support.disk import flip

GOLDEN = pathlib.Path(__file__).parents[2] / "data" / "orbax_0_12.tar.xz"

pytest.importorskip("tensorstore")
pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason="no checkpoint of Orbax is here")


@pytest.mark.parametrize("name", ["standard", "plain", "plain_zarr3"])
def test_all_files_of_orbax_are_compared(tmp_path, name):
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / name
    expected = distckpt.open(folder).read_tensors()
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    assert distckpt.seal(folder).num_files == len(paths)
    assert not distckpt.seal(folder).is_new
    assert distckpt.verify(folder).is_whole
    found = distckpt.open(folder).read_tensors()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    for path in paths:
        if not path.stat().st_size:
            continue
        flip(path, path.stat().st_size // 2)
        problems = distckpt.verify(folder).problems
        assert any(str(path) == problem.file for problem in problems), (path, problems)
        flip(path, path.stat().st_size // 2)
    copied = shutil.copytree(folder, tmp_path / "copied")
    largest = copied / max(paths, key=lambda path: path.stat().st_size).relative_to(folder)
    largest.write_bytes(largest.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match="sealed"):
        distckpt.open(copied)

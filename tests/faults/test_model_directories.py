"""Model directories of other programs that are bad, or become so while several ranks read them: the
same error on all ranks, or values of one version, and a process group that still works.
"""

from __future__ import annotations

import os
import shutil
from unittest import mock

import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from tests.support.harness import error_of, sum_over_ranks
from tests.support.hf_folders import write_indexed

KEYS = [f"layers.{number}.weight" for number in range(4)]
SIZE = 256


def write(folder, value):
    """Write a version: all have equal names and headers."""
    tensors = {key: torch.full((SIZE, SIZE), float(value)) for key in KEYS}
    return write_indexed(folder, {f"model-{key}.safetensors": {key: tensors[key]} for key in KEYS})


def replaced(folder):
    """Put another version in the place of each file, one after the other."""
    other = write(folder.with_name("other"), 2)
    for path in other.iterdir():
        os.replace(path, folder / path.name)


def rewritten(folder):
    """Write another version into the last file that is read."""
    content = write(folder.with_name("other"), 2) / f"model-{KEYS[-1]}.safetensors"
    with (folder / content.name).open("r+b") as file:
        file.write(content.read_bytes())


def swapped(folder):
    other = write(folder.with_name("other"), 2)
    folder.rename(folder.with_name("away"))
    other.rename(folder)


def removed(folder):
    (folder / f"model-{KEYS[-1]}.safetensors").unlink()


def cut(folder):
    os.truncate(folder / f"model-{KEYS[-1]}.safetensors", SIZE * SIZE)


def load_own(rank, folder, change, share_reads):
    """Load a node's copy of a directory; that of rank 1 changes when a part of it was read."""
    folder = folder / f"node{rank}" / "model"
    changes = [change] if rank == 1 else []

    def progress(done, total):
        if 0 < done < total and changes:
            changes.pop()(folder)

    rows = SIZE // 2
    state = {
        key: ShardedTensor.from_rank_offsets(key, torch.zeros(rows, SIZE), (0, rank, 2))
        for key in KEYS
    }
    # One thread reads, so that a part is read after the change.
    with mock.patch("distckpt._checkpoint.shards.num_threads_within", lambda *_: 1):
        error = error_of(distckpt.load, state, folder, progress=progress, share_reads=share_reads)
    assert sum_over_ranks(1) == 2
    assert not changes
    return error, {key: shard.data.unique().tolist() for key, shard in state.items()}


def copies(tmp_path):
    write(tmp_path / "node0" / "model", 1)
    shutil.copytree(tmp_path / "node0", tmp_path / "node1")
    return tmp_path


@pytest.mark.parametrize("share_reads", ["on", "off"])
@pytest.mark.parametrize("change", [replaced, rewritten, swapped])
def test_a_change_that_rank_0_does_not_see(run, change, share_reads, tmp_path):
    """No rank has values of two versions of a file, or of one that was replaced."""
    results = run(load_own, 2, copies(tmp_path), change, share_reads)
    assert [error for error, _ in results] == [None, None]
    assert set(sum(results[0][1].values(), [])) == {1.0}
    expected = {key: [2.0] for key in KEYS}
    if change is rewritten:
        expected |= {key: [1.0] for key in KEYS[:-1]}
    assert results[1][1] == expected


@pytest.mark.parametrize("share_reads", ["on", "off"])
@pytest.mark.parametrize(
    ("change", "text"), [(removed, "is missing"), (cut, "the file was cut off")]
)
def test_a_file_that_one_node_loses(run, change, text, share_reads, tmp_path):
    for error, _ in run(load_own, 2, copies(tmp_path), change, share_reads):
        assert f"node1/model/model-{KEYS[-1]}.safetensors" in str(error)
        assert text in str(error)

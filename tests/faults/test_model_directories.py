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
from tests.support.hf_folders import INDEX, write_indexed, write_plain

KEYS = [f"layers.{number}.weight" for number in range(4)]
NAMES = [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
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
    """Write another version into the file that was read first."""
    content = write(folder.with_name("other"), 2) / f"model-{KEYS[0]}.safetensors"
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
    with mock.patch("distckpt._checkpoint.shards.num_threads_within", return_value=1):
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
    assert results[0][1] == {key: [1.0] for key in KEYS}
    expected = {key: [2.0] for key in KEYS}
    if change is rewritten:
        expected |= {key: [1.0] for key in KEYS[1:]}
    if change is rewritten and share_reads == "on":
        # Rank 0 reads that file for both.
        expected = results[0][1]
    assert results[1][1] == expected


@pytest.mark.parametrize("share_reads", ["on", "off"])
@pytest.mark.parametrize(
    ("change", "text"), [(removed, "is missing"), (cut, "the file was cut off")]
)
def test_a_file_that_one_node_loses(run, change, text, share_reads, tmp_path):
    for error, _ in run(load_own, 2, copies(tmp_path), change, share_reads):
        assert f"node1/model/model-{KEYS[-1]}.safetensors" in str(error)
        assert text in str(error)


def missing(folder):
    (folder / NAMES[1]).unlink()


def cut_off(folder):
    os.truncate(folder / NAMES[1], 1000)


def pointer(folder):
    (folder / NAMES[1]).write_text("version https://git-lfs.github.com/spec/v1\n")


def unindexed(folder):
    """Let no index tell that a file is missing."""
    missing(folder)
    (folder / INDEX).unlink()


def twice(folder):
    """Save a file a second time, as a browser does."""
    (folder / INDEX).unlink()
    shutil.copy(folder / NAMES[1], folder / NAMES[1].replace(".safe", " (1).safe"))


def other_values(folder):
    tensors = {key: torch.full((SIZE, SIZE), 3.0) for key in KEYS[:2]}
    write_plain(folder / NAMES[0], tensors)


FAULTS = {
    missing: f"{NAMES[1]}' is missing",
    cut_off: f"{NAMES[1]}' is not a complete safetensors file",
    pointer: f"{NAMES[1]}' is a pointer of Git LFS",
    unindexed: "holds 3 of the 4 files",
    twice: "is stored several times",
    other_values: f"'{KEYS[1]}'",
}
"""Faults, and the text that all ranks raise."""


def load_each(rank, folder):
    """Load a directory of each fault; return the errors, and the values that were touched."""
    results = []
    for fault in FAULTS:
        for share_reads in ("on", "off"):
            target = torch.zeros(SIZE // 2, SIZE)
            state = {"w": ShardedTensor.from_rank_offsets(KEYS[0], target, (0, rank, 2))}
            location = folder / fault.__name__
            error = error_of(distckpt.load, state, location, share_reads=share_reads)
            results.append((str(error), bool(target.any())))
            assert sum_over_ranks(1) == 2
        error = error_of(distckpt.consolidate, location, folder / "export")
        results.append((str(error), (folder / "export").exists()))
        assert sum_over_ranks(1) == 2
    return results


def test_all_ranks_refuse_a_bad_directory_before_anything_is_read(run, tmp_path):
    for fault in FAULTS:
        tensors = {
            name: {key: torch.ones(SIZE, SIZE)} for name, key in zip(NAMES, KEYS, strict=True)
        }
        fault(write_indexed(tmp_path / fault.__name__, tensors))
    results, others = run(load_each, 2, tmp_path)
    assert results == others
    expected = [text for text in FAULTS.values() for _ in range(3)]
    for (error, is_touched), text in zip(results, expected, strict=True):
        assert text in error
        assert not is_touched


def load_what_does_not_fit(rank, folder):
    """Load into padding on rank 0, and into another dtype on rank 1."""
    target = torch.ones(SIZE, SIZE, dtype=[torch.float32, torch.float16][rank])
    key = KEYS[rank]
    if rank == 0:
        target = torch.ones(SIZE + 8, SIZE)
    state = {"w": ShardedTensor.from_rank_offsets(key, target, allow_shape_mismatch=rank == 0)}
    error = error_of(distckpt.load, state, folder)
    return str(error), bool((target == 1).all())


def test_padding_is_left_alone_when_another_rank_refuses(run, tmp_path):
    for error, is_untouched in run(load_what_does_not_fit, 2, write(tmp_path / "folder", 2)):
        assert KEYS[1] in error
        assert "partly filled" not in error
        assert is_untouched

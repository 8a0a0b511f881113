"""Checkpoints of other programs that are written anew while they are read: nothing in the files
tells, and no result has values of both.
"""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

import distckpt
from distckpt import CheckpointingException, ShardedTensor
from distckpt._foreign import hugging_face
from distckpt.torch_dist import export as export_to_torch
from tests.support.hf_folders import INDEX, write_indexed, write_plain

KEYS = [f"layers.{number}.weight" for number in range(6)]


def version(number):
    """Return the tensors of one version; all versions have the same headers."""
    return {key: torch.full((64, 32), float(number)) for key in KEYS}


def write(folder, number):
    """Write a version under the names of the one before, as `save_pretrained` does."""
    files = {f"model-{key}.safetensors": {key: value} for key, value in version(number).items()}
    return write_indexed(folder, files)


def rewritten(folder):
    write(folder, 2)


def replaced_with_equal_times(folder):
    for name, value in version(2).items():
        path = folder / f"model-{name}.safetensors"
        before = path.stat()
        save_file({name: value}, folder / "new")
        os.utime(folder / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
        os.replace(folder / "new", path)


def swapped(folder):
    """Let another directory take the place of the one that was opened."""
    write(folder.with_name("other"), 2)
    folder.rename(folder.with_name("away"))
    folder.with_name("other").rename(folder)


CHANGES = [rewritten, replaced_with_equal_times, swapped]


def once_in_between(change, folder):
    """Return a `progress` that changes a folder when a part of it was read."""
    changes = [change]

    def progress(done, total):
        if 0 < done < total and changes:
            changes.pop()(folder)

    return progress


@pytest.fixture(autouse=True)
def one_after_the_other(monkeypatch):
    """Let one thread read, so that a part is read after the change."""
    monkeypatch.setattr("distckpt._io.load_shards.num_threads_within", lambda *_: 1)


@pytest.mark.parametrize("change", CHANGES)
def test_a_load_begins_again(tmp_path, change, caplog):
    folder = write(tmp_path / "in", 1)
    state = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(64, 32)) for key in KEYS}
    loaded = distckpt.load(state, folder, progress=once_in_between(change, folder))
    assert {float(value) for tensor in loaded.values() for value in tensor.unique()} == {2.0}
    assert "was overwritten while it was read" in caplog.text


def reshard(folder, out, progress):
    distckpt.reshard(folder, out, progress=progress)


def consolidate(folder, out, progress):
    distckpt.consolidate(folder, out, progress=progress, max_file_bytes=20_000)


def merge(folder, out, progress):
    other = write(out.with_name("second"), 1)
    distckpt.merge([folder, other], out, progress=progress, max_file_bytes=20_000)


def convert_to_torch(folder, out, progress):
    export_to_torch(folder, out, progress=progress)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("verb", [consolidate, reshard, merge, convert_to_torch])
def test_what_is_written_is_given_up(tmp_path, verb, change):
    folder = write(tmp_path / "in", 1)
    with pytest.raises(CheckpointingException, match="was replaced"):
        verb(folder, tmp_path / "out", once_in_between(change, folder))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", CHANGES)
def test_an_open_checkpoint_refuses_to_read_on(tmp_path, change):
    folder = write(tmp_path / "in", 1)
    checkpoint = distckpt.open(folder)
    assert torch.equal(checkpoint.read(KEYS[0]), version(1)[KEYS[0]])
    change(folder)
    with pytest.raises(CheckpointingException, match="was replaced after it was opened"):
        checkpoint.read(KEYS[1])
    assert torch.equal(distckpt.open(folder).read(KEYS[1]), version(2)[KEYS[1]])


def file_with(keys):
    """Return a file in which tensors lie in this order; for all orders, it has as many bytes."""
    places = {key: [32 * place, 32 * place + 32] for place, key in enumerate(keys)}
    entries = {
        key: {"dtype": "F32", "shape": [8], "data_offsets": places[key]} for key in sorted(keys)
    }
    header = json.dumps(entries).encode()
    values = [torch.full((8,), float(ord(key))).numpy().tobytes() for key in keys]
    return len(header).to_bytes(8, "little") + header + b"".join(values)


def test_a_file_that_is_replaced_when_its_header_was_read(tmp_path, monkeypatch):
    path = tmp_path / "1.safetensors"
    path.write_bytes(file_with("ab"))
    write_plain(tmp_path / "2.safetensors", {"c": torch.zeros(8)})
    read_header = hugging_face.read_header

    def read_and_replace(name):
        header = read_header(name)
        path.write_bytes(file_with("ba"))
        return header

    monkeypatch.setattr(hugging_face, "read_header", read_and_replace)
    with pytest.raises(CheckpointingException, match="was overwritten 20 times"):
        distckpt.open(tmp_path)
    monkeypatch.undo()
    found = distckpt.open(tmp_path).read_tensors()
    assert [float(found[key][0]) for key in "ab"] == [ord("a"), ord("b")]


def test_other_files_may_come_and_go(tmp_path):
    folder = write(tmp_path / "in", 1)
    checkpoint = distckpt.open(folder)
    (folder / "README.md").write_text("Hello")
    shutil.copy(folder / INDEX, folder / "copy.json")
    assert torch.equal(checkpoint.read(KEYS[1]), version(1)[KEYS[1]])

"""Where an export is written: over another one, into other folders, and under URLs."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from pathlib import Path

import fsspec
import pytest
import torch

import distckpt
from distckpt import CheckpointExistsError, CorruptCheckpointError
from distckpt.megatron.core import CheckpointingException
from tests.support.disk import flip, header_of, tree_of
from tests.support.exports import SOURCES, model, save_folder
from tests.support.hf_folders import (
    INDEX,
    read_export,
    same_bytes,
    write_folder,
    write_indexed,
    write_shard,
)
from tests.support.hooked_store import hooked_reads
from tests.support.states import save_checkpoint

# ---- an export that is there already


@pytest.fixture
def exported(tmp_path):
    """An export in three files, beside other things; returns its directory and a source of other
    values.
    """
    distckpt.consolidate(
        save_folder(tmp_path / "old", model(2)), tmp_path / "out", max_file_bytes=400
    )
    (tmp_path / "out" / "config.json").write_text("{}")
    (tmp_path / "out" / "README.md").write_text("about")
    (tmp_path / "out" / "runs" / "deep").mkdir(parents=True)
    (tmp_path / "out" / "runs" / "deep" / "log").write_text("log")
    (tmp_path / "out" / "link").symlink_to("runs")
    source = save_checkpoint(
        tmp_path / "new", {key: tensor + 1 for key, tensor in model(1).items()}
    )
    return tmp_path / "out", source


OTHERS = ["README.md", "config.json", "link", "runs", "runs/deep", "runs/deep/log"]


def test_it_is_not_replaced_unasked(exported):
    out, source = exported
    before = tree_of(out)
    with pytest.raises(
        CheckpointExistsError, match=r"model-00001-of-0000\d\.safetensors.*overwrite=True"
    ):
        distckpt.consolidate(source, out)
    assert tree_of(out) == before


def test_it_is_replaced_as_a_whole_and_other_files_stay(exported, tmp_path):
    out, source = exported
    before = tree_of(out)
    reference = tmp_path / "ref"
    reference.mkdir()
    (reference / "config.json").write_text('{"new": 1}')
    distckpt.consolidate(source, out, overwrite=True, extra_files_from=reference)
    assert sorted(tree_of(out)) == sorted([*OTHERS, "model.safetensors"])
    assert same_bytes(read_export(out), {key: tensor + 1 for key, tensor in model(1).items()})
    assert (out / "config.json").read_text() == '{"new": 1}'
    assert {name: tree_of(out)[name] for name in OTHERS if name != "config.json"} == {
        name: before[name] for name in OTHERS if name != "config.json"
    }
    assert os.readlink(out / "link") == "runs"
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_other_files_do_not_stand_in_the_way(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    distckpt.consolidate(save_folder(tmp_path / "in", model(1)), tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]


def test_a_failure_leaves_it_untouched(exported, tmp_path):
    out, source = exported
    before = tree_of(out)
    (shard_file,) = (source / "tensors").iterdir()
    flip(shard_file, -5, 4)
    key = max(
        entries := header_of(shard_file)[1], key=lambda k: entries[k].get("data_offsets", [0])[0]
    )
    with pytest.raises(CorruptCheckpointError, match=f"Checksum.*{shard_file.name}.*'{key}'"):
        distckpt.consolidate(source, out, overwrite=True)
    assert tree_of(out) == before
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_a_flipped_bit_in_any_block_is_found_before_anything_is_committed(tmp_path):
    source = save_checkpoint(tmp_path / "in", {"w": torch.zeros(3000, 1000)}, axis=1)
    (*_, path) = sorted((source / "tensors").iterdir())
    content = bytearray(path.read_bytes())
    start = header_of(path)[0]
    for position in (start, start + (len(content) - start) // 2, len(content) - 1):
        content[position] ^= 1
        path.write_bytes(content)
        with pytest.raises(CorruptCheckpointError, match=f"{path.name}.*'w'"):
            distckpt.consolidate(source, tmp_path / "out")
        assert os.listdir(tmp_path) == ["in"]
        content[position] ^= 1
    path.write_bytes(content)
    distckpt.consolidate(source, tmp_path / "out")


def test_a_shard_that_vanishes_or_is_cut_off_is_named(tmp_path):
    source = save_checkpoint(tmp_path / "in", model())
    (path,) = (source / "tensors").iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:-4])
    with pytest.raises(CorruptCheckpointError, match=f"{path.name}.*bytes"):
        distckpt.consolidate(source, tmp_path / "out")
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{path.name}.*missing"):
        distckpt.consolidate(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


# ---- places


def renamed(folder):
    (path,) = folder.glob("shard-00002*")
    path.write_bytes(path.read_bytes().replace(b'"b"', b'"c"'))


def longer(folder):
    tensors = {"a": torch.ones(8, 4), "b": torch.ones(9, 4)}
    write_folder(folder, tensors, 0, 2)


def one_more(folder):
    write_shard(folder, 3, {"c": ((0,), torch.ones(2))})


def one_less(folder):
    next(folder.glob("shard-00002*")).unlink()


@pytest.mark.parametrize("change", [renamed, longer, one_more, one_less])
def test_an_export_of_shards_that_changed_meanwhile_is_given_up(tmp_path, change):
    tensors = {"a": torch.zeros(8, 4), "b": torch.zeros(8, 4)}
    write_folder(tmp_path / "in", tensors, 0, 2)
    changes = [change]

    def progress(done, total):
        if done == total and changes:
            changes.pop()(tmp_path / "in")

    with pytest.raises(CheckpointingException):
        distckpt.consolidate(tmp_path / "in", tmp_path / "out", progress=progress)
    assert not (tmp_path / "out").exists()


def without_a_key(index):
    fields = json.loads(index.read_bytes())
    del fields["weight_map"]["b"]
    index.write_text(json.dumps(fields))


@pytest.mark.parametrize("change", [without_a_key, Path.unlink])
def test_an_export_is_given_up_when_the_index_changed_meanwhile(tmp_path, change):
    folder, tensors = tmp_path / "in", {key: torch.zeros(4) for key in "abc"}
    last = {"2.safetensors": {"c": tensors.pop("c")}}
    write_indexed(folder, {"1.safetensors": tensors} | last)
    index = folder / INDEX

    def progress(done, total):
        if done == total:
            change(index)

    with pytest.raises(CheckpointingException, match="was replaced"):
        distckpt.consolidate(folder, tmp_path / "out", progress=progress)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["with [brackets] and *", "with  spaces", "ünïcödé-模型", "a%20b#c?d"]
)
def test_unusual_paths(tmp_path, name):
    source = save_folder(tmp_path / name / "in", model(1))
    for out in (tmp_path / name / "out", tmp_path / "plain"):
        distckpt.consolidate(source, out)
        assert same_bytes(read_export(out), model(1))


def test_the_folder_of_shards_may_lie_in_the_output_directory(tmp_path):
    """As torch's writer arranges them when it consolidates by itself."""
    source = save_folder(tmp_path / "out" / "sharded", model(1))
    shards = tree_of(source)
    for options in ({}, {"overwrite": True}):
        distckpt.consolidate(source, tmp_path / "out", **options)
        assert same_bytes(read_export(tmp_path / "out"), model(1))
        assert tree_of(source) == shards


def test_the_output_may_lie_in_the_checkpoint(tmp_path):
    source = save_checkpoint(tmp_path / "in", model(1))
    distckpt.consolidate(source, source / "hf")
    assert same_bytes(read_export(source / "hf"), model(1))
    assert same_bytes(distckpt.open(source).read_tensors(), model(1))


@pytest.mark.parametrize("place", [".", "tensors"])
def test_the_checkpoint_cannot_be_replaced_by_its_own_export(tmp_path, place):
    source = save_checkpoint(tmp_path / "in", model(1))
    before = tree_of(source)
    with pytest.raises(CheckpointingException, match="own source"):
        distckpt.consolidate(source, source / place, overwrite=True)
    folder = save_folder(tmp_path / "folder", model(1))
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(CheckpointingException, match="own source"):
        distckpt.consolidate(folder, tmp_path / "link", overwrite=True)
    assert tree_of(source) == before


def test_a_checkpoint_stays_whole_when_something_is_exported_into_its_directory(tmp_path):
    source, other = (
        save_checkpoint(tmp_path / name, model(number)) for number, name in enumerate("ab", 1)
    )
    before = tree_of(other)
    with pytest.raises(CheckpointExistsError, match=r"is a checkpoint, which distckpt\.load would"):
        distckpt.consolidate(source, other)
    assert tree_of(other) == before
    for _ in range(2):
        distckpt.consolidate(source, other, overwrite=True)
    assert {
        name: content for name, content in tree_of(other).items() if name != "model.safetensors"
    } == before
    assert same_bytes(distckpt.open(other).read_tensors(), model(2))


def test_a_file_is_in_the_place_of_the_output_directory(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(CheckpointExistsError, match="is a file"):
        distckpt.consolidate(
            save_folder(tmp_path / "in", model(1)), tmp_path / "out", overwrite=True
        )
    assert (tmp_path / "out").read_text() == "mine"


def test_a_link_as_output_directory_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    distckpt.consolidate(save_folder(tmp_path / "in", model(1)), tmp_path / "link" / "new")
    distckpt.consolidate(tmp_path / "in", tmp_path / "link")
    assert os.readlink(tmp_path / "link") == "real"
    assert same_bytes(read_export(tmp_path / "real"), model(1))


@pytest.fixture
def memory_url(tmp_path):
    """A place in fsspec's memory file system, named by a path with characters that patterns are
    made of.
    """
    url = f"memory://{tmp_path.name} [a]/x"
    yield url
    store = fsspec.filesystem("memory").store
    for path in [path for path in store if path.startswith(f"/{tmp_path.name} ")]:
        del store[path]


def download(url, folder):
    folder.mkdir()
    fs = fsspec.filesystem("memory")
    for path in fs.ls(url.removeprefix("memory:/"), detail=False):
        (folder / path.rpartition("/")[2]).write_bytes(fs.cat_file(path))
    return folder


@SOURCES
def test_urls(tmp_path, memory_url, save):
    source = tmp_path / "in"
    save(source, model(2))
    for name in source.rglob("*"):
        if name.is_file():
            fsspec.filesystem("memory").pipe_file(
                f"{memory_url}/in/{name.relative_to(source)}".removeprefix("memory:/"),
                name.read_bytes(),
            )
    for number, (origin, target) in enumerate(
        [
            (source, f"{memory_url}/out"),
            (f"{memory_url}/in", f"{memory_url}/out2"),
            (f"{memory_url}/in", tmp_path / "o"),
        ]
    ):
        distckpt.consolidate(origin, target, max_file_bytes=400)
        folder = target if isinstance(target, Path) else download(target, tmp_path / str(number))
        assert len(list(folder.iterdir())) > 2
        assert same_bytes(read_export(folder), model(2))
        assert same_bytes(distckpt.open(target).read_tensors(), model(2))
    with pytest.raises(CheckpointExistsError, match="already holds an export"):
        distckpt.consolidate(source, f"{memory_url}/out", overwrite=True)
    assert not Path("memory:").exists()


def test_a_failure_leaves_nothing_under_a_url(tmp_path, memory_url):
    source = save_checkpoint(tmp_path / "in", model(3), axis=0)
    (path,) = (source / "tensors").iterdir()
    flip(path, -5, 4)
    with pytest.raises(CorruptCheckpointError, match="Checksum"):
        distckpt.consolidate(source, f"{memory_url}/failed", max_file_bytes=100)
    assert not fsspec.filesystem("memory").exists(f"{memory_url}/failed".removeprefix("memory:/"))


def test_an_error_of_reading_names_the_shard_file_and_one_of_writing_the_output(tmp_path):
    (path,) = write_folder(tmp_path / "in", model(), 0, 1)
    start = header_of(path)[0]

    def fail(name, first, stop):
        if first is not None and first >= start:
            raise OSError(errno.EIO, "Input/output error", name)

    with hooked_reads(fail), pytest.raises(OSError, match=f"Input/output error.*{path.name}"):
        distckpt.consolidate(f"hooked://{tmp_path}/in", tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large.*model\.safetensors"):
            distckpt.consolidate(tmp_path / "in", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == ["in"]

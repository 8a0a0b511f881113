"""A save is atomic, whatever was at its place and whatever goes wrong."""

from __future__ import annotations

import json
import logging
import os
import resource
import threading
from pathlib import Path

import fsspec
import pytest
import torch

import distckpt
from distckpt import CheckpointExistsError, CheckpointNotFoundError, ShardedTensor
from distckpt.strategies.base import SaveShardedStrategy
from distckpt.strategies.safetensors import SafetensorsSaveStrategy


def state(value=1.0, size=4):
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((size,), float(value))),
        "step": value,
    }


def loaded_value(path, size=4):
    loaded = distckpt.load(state(0.0, size), path)
    assert bool((loaded["w"] == loaded["step"]).all())
    return loaded["step"]


def names(path):
    return sorted(os.listdir(path))


class FailsAfterWriting(SaveShardedStrategy):
    """Writes everything that there is to write, and then fails."""

    def __init__(self, strategy=None):
        self.strategy = strategy or SafetensorsSaveStrategy()
        self.backend, self.version = self.strategy.backend, self.strategy.version

    def configure(self, options, process_group):
        return FailsAfterWriting(self.strategy.configure(options, process_group))

    def save(self, sharded_state_dict, checkpoint_dir):
        self.strategy.save(sharded_state_dict, checkpoint_dir)
        raise OSError(28, "No space left on device", "somewhere")


# ---- what is there already


def test_a_save_leaves_the_checkpoint_and_nothing_else(tmp_path):
    distckpt.save(state(), tmp_path / "c")
    assert names(tmp_path) == ["c"]
    assert names(tmp_path / "c") == ["manifest.safetensors", "metadata.json", "objects", "tensors"]
    assert loaded_value(tmp_path / "c") == 1.0


def test_missing_parents_are_made(tmp_path):
    distckpt.save(state(), tmp_path / "a" / "b" / "c")
    assert names(tmp_path / "a" / "b") == ["c"]
    assert loaded_value(tmp_path / "a" / "b" / "c") == 1.0


def test_an_existing_checkpoint_is_refused_and_stays(tmp_path):
    distckpt.save(state(1.0), tmp_path / "c")
    before = {path: path.stat().st_mtime_ns for path in Path(tmp_path, "c").rglob("*")}
    with pytest.raises(
        CheckpointExistsError, match=r"'.*/c' already holds a complete checkpoint.*overwrite=True"
    ):
        distckpt.save(state(2.0), tmp_path / "c")
    assert {path: path.stat().st_mtime_ns for path in Path(tmp_path, "c").rglob("*")} == before
    assert names(tmp_path) == ["c"]
    assert loaded_value(tmp_path / "c") == 1.0


def test_an_overwritten_checkpoint_is_gone_entirely(tmp_path):
    columns = {
        str(i): ShardedTensor.from_rank_offsets("w", torch.zeros(4, 1), (1, i, 3)) for i in range(3)
    }
    distckpt.save({**columns, "old": 1}, tmp_path / "c")
    assert len(names(tmp_path / "c" / "tensors")) == 3
    distckpt.save(state(2.0), tmp_path / "c", overwrite=True)
    assert len(names(tmp_path / "c" / "tensors")) == 1
    assert names(tmp_path) == ["c"]
    assert loaded_value(tmp_path / "c") == 2.0
    assert "old" not in distckpt.open(tmp_path / "c").common_state


def test_overwriting_nothing_is_a_save(tmp_path):
    distckpt.save(state(3.0), tmp_path / "c", overwrite=True)
    assert loaded_value(tmp_path / "c") == 3.0


def test_an_overwritten_checkpoint_is_never_absent(tmp_path):
    distckpt.save(state(0.0), tmp_path / "c")
    marker = tmp_path / "c" / "metadata.json"
    done, absent, seen = threading.Event(), [], set()

    def watch():
        while not done.is_set():
            try:
                fields = json.loads(marker.read_text())
                seen.add(fields["manifest"]["checksum"])
            except FileNotFoundError as error:
                absent.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for value in range(1, 40):
            distckpt.save(state(float(value)), tmp_path / "c", overwrite=True)
    finally:
        done.set()
        watcher.join()
    assert absent == []
    # The watcher did look while checkpoints were exchanged.
    assert len(seen) > 3
    assert loaded_value(tmp_path / "c") == 39.0


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_unfinished_save_is_moved_aside_and_never_mixed_in(tmp_path, overwrite, caplog):
    columns = {
        str(i): ShardedTensor.from_rank_offsets("w", torch.zeros(4, 1), (1, i, 3)) for i in range(3)
    }
    distckpt.save(columns, tmp_path / "c")
    (tmp_path / "c" / "metadata.json").unlink()
    left = sorted(str(path.relative_to(tmp_path / "c")) for path in Path(tmp_path, "c").rglob("*"))
    with caplog.at_level(logging.WARNING, logger="distckpt"):
        distckpt.save(state(2.0), tmp_path / "c", overwrite=overwrite)
    (aside,) = [name for name in names(tmp_path) if name != "c"]
    assert aside.startswith(".c.incomplete-")
    assert str(tmp_path / aside) in caplog.text
    assert (
        sorted(str(path.relative_to(tmp_path / aside)) for path in Path(tmp_path, aside).rglob("*"))
        == left
    )
    assert loaded_value(tmp_path / "c") == 2.0
    assert len(names(tmp_path / "c" / "tensors")) == 1
    with pytest.raises(CheckpointNotFoundError):
        distckpt.load({}, tmp_path / aside)


def test_an_empty_directory_is_no_obstacle(tmp_path, caplog):
    (tmp_path / "c").mkdir()
    distckpt.save(state(), tmp_path / "c")
    assert (names(tmp_path), caplog.text) == (["c"], "")
    assert loaded_value(tmp_path / "c") == 1.0


def test_a_file_is_an_obstacle(tmp_path):
    (tmp_path / "c").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(CheckpointExistsError, match=r"'.*/c' is a file"):
            distckpt.save(state(), tmp_path / "c", overwrite=overwrite)
        with pytest.raises(OSError, match="c"):
            distckpt.save(state(), tmp_path / "c" / "d", overwrite=overwrite)
    assert (tmp_path / "c").read_text() == "mine"
    assert names(tmp_path) == ["c"]


# ---- locations


@pytest.mark.parametrize(
    "name",
    [
        "step [x]",
        "*?",
        "ü-🤗",
        "a b",
        "-c",
        ".hidden",
        "100%20",
        "~",
        "a::b",
        "a:b",
        "metadata.json",
        "x" * 200,
        "a\nb",
    ],
    ids=ascii,
)
def test_directories_have_any_names(tmp_path, name):
    distckpt.save(state(1.0), tmp_path / name)
    distckpt.save(state(2.0), f"{tmp_path}/{name}/", overwrite=True)
    assert names(tmp_path) == [name]
    assert loaded_value(tmp_path / name) == 2.0
    assert distckpt.open(str(tmp_path / name)).read_tensors()["w"].tolist() == [2.0] * 4


def test_relative_paths_and_path_objects(tmp_path, monkeypatch):
    class Location(os.PathLike):
        def __fspath__(self):
            return "./run/../c/"

    monkeypatch.chdir(tmp_path)
    distckpt.save(state(1.0), Location())
    assert names(tmp_path) == ["c"]
    assert (
        loaded_value("c")
        == loaded_value(Path("c"))
        == loaded_value("../" + tmp_path.name + "/c")
        == 1.0
    )
    (tmp_path / "below" / "this").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "below" / "this")
    distckpt.save(state(2.0), "../here/.")
    assert loaded_value(tmp_path / "below" / "here") == 2.0


def test_file_urls(tmp_path):
    distckpt.save(state(), f"file://{tmp_path}/c")
    assert loaded_value(tmp_path / "c") == loaded_value(f"file://{tmp_path}/c") == 1.0


def test_links_to_directories_stay_links(tmp_path):
    (tmp_path / "big disk").mkdir()
    (tmp_path / "big disk" / "c").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "big disk" / "c")
    (tmp_path / "new").symlink_to(tmp_path / "big disk" / "new")
    for value in (1.0, 2.0):
        for link in ("link", "new"):
            distckpt.save(state(value), tmp_path / link, overwrite=True)
            assert (tmp_path / link).is_symlink()
            assert loaded_value(tmp_path / link) == value
    assert names(tmp_path / "big disk") == ["c", "new"]
    assert names(tmp_path) == ["big disk", "link", "new"]
    with pytest.raises(CheckpointExistsError):
        distckpt.save(state(), tmp_path / "link")


# ---- what goes wrong


def test_a_failed_save_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="No space left on device: 'somewhere'"):
        distckpt.save(state(), tmp_path / "c", strategy=FailsAfterWriting())
    assert names(tmp_path) == []
    distckpt.save(state(), tmp_path / "c")
    assert loaded_value(tmp_path / "c") == 1.0


def test_a_failed_save_leaves_the_earlier_checkpoint(tmp_path):
    distckpt.save(state(1.0), tmp_path / "c")
    with pytest.raises(OSError, match="No space left on device"):
        distckpt.save(state(2.0), tmp_path / "c", strategy=FailsAfterWriting(), overwrite=True)
    assert names(tmp_path) == ["c"]
    assert loaded_value(tmp_path / "c") == 1.0


@pytest.mark.parametrize("columns", [False, True], ids=["one file", "many files"])
@pytest.mark.parametrize("size", [1_000_000, 30_000_000])
def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path, size, columns):
    # Nothing of an error may be lost in the threads that write.
    tensors = torch.ones(size // 4).view(-1, 5)
    parts = enumerate(tensors.chunk(5, 1)) if columns else [(0, tensors)]
    shards = {
        i: ShardedTensor.from_rank_offsets("w", part, (1, i, 5 if columns else 1))
        for i, part in parts
    }
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(
            OSError, match=r"File too large: '.*tensors/shard-00001-model-.*\.safetensors'"
        ):
            distckpt.save(shards, tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


def test_no_file_stays_open(tmp_path):
    def num_open():
        return len(os.listdir("/proc/self/fd"))

    distckpt.save(state(), tmp_path / "first")
    before = num_open()
    for value in range(5):
        distckpt.save(state(float(value)), tmp_path / "c", overwrite=True)
        loaded_value(tmp_path / "c")
        with pytest.raises(OSError, match="No space"):
            distckpt.save(state(), tmp_path / "d", strategy=FailsAfterWriting())
    (file,) = Path(tmp_path, "c", "tensors").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(distckpt.CorruptCheckpointError):
        loaded_value(tmp_path / "c")
    assert num_open() == before


def test_many_files_need_few_descriptors(tmp_path):
    columns = {
        str(i): ShardedTensor.from_rank_offsets("w", torch.full((2, 1), float(i)), (1, i, 200))
        for i in range(200)
    }
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        distckpt.save(columns, tmp_path / "c")
        loaded = distckpt.open(tmp_path / "c").read_tensors()["w"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(names(tmp_path / "c" / "tensors")) == 200
    assert torch.equal(loaded, torch.arange(200.0).expand(2, 200))


# ---- object stores


def test_a_save_to_an_object_store_and_back(memory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wide = torch.randn(40, 50_000)
    shards = {
        i: ShardedTensor.from_rank_offsets("wide", part, (1, i, 2))
        for i, part in enumerate(wide.chunk(2, 1))
    }
    distckpt.save({**shards, **state(2.0)}, f"{memory}/run/c/")
    assert loaded_value(f"{memory}/run/c") == 2.0
    rows = ShardedTensor.from_rank_offsets("wide", torch.zeros(10, 50_000), (0, 2, 4))
    assert torch.equal(distckpt.load({"w": rows}, f"{memory}/run/c")["w"], wide[20:30])
    assert distckpt.megatron.check_is_distributed_checkpoint(f"{memory}/run/c")
    # The URL did not become a directory.
    assert names(tmp_path) == []


def test_a_checkpoint_keeps_its_meaning_when_copied_to_a_disk(memory, tmp_path):
    distckpt.save(state(2.0), f"{memory}/c")
    fsspec.filesystem("memory").get("/bucket/c", str(tmp_path / "c"), recursive=True)
    assert loaded_value(tmp_path / "c") == 2.0


def test_a_checkpoint_on_an_object_store_is_refused_and_stays(memory):
    distckpt.save(state(1.0), f"{memory}/c")
    with pytest.raises(
        CheckpointExistsError, match=r"already holds a complete checkpoint.*overwrite=True"
    ):
        distckpt.save(state(2.0), f"{memory}/c")
    assert loaded_value(f"{memory}/c") == 1.0


def test_files_of_an_unfinished_save_on_an_object_store_are_in_nobodys_way(memory, caplog):
    files = fsspec.filesystem("memory")
    files.pipe({"/bucket/c/tensors/x": b"1", "/bucket/c/notes.txt": b"2"})
    distckpt.save(state(), f"{memory}/c")
    assert "holds files but no metadata.json (an unfinished save?)" in caplog.text
    assert loaded_value(f"{memory}/c") == 1.0
    assert not files.exists("/bucket/c/tensors/x")
    assert files.cat_file("/bucket/c/notes.txt") == b"2"


def test_a_failed_save_leaves_nothing_on_an_object_store(memory):
    with pytest.raises(OSError, match="No space left on device"):
        distckpt.save(state(), f"{memory}/c", strategy=FailsAfterWriting())
    assert fsspec.filesystem("memory").find("/bucket") == []
    distckpt.save(state(3.0), f"{memory}/c")
    assert loaded_value(f"{memory}/c") == 3.0


def test_nothing_is_there_on_an_object_store(memory):
    with pytest.raises(
        CheckpointNotFoundError, match="directory memory://bucket/none does not exist"
    ):
        distckpt.load({}, f"{memory}/none")

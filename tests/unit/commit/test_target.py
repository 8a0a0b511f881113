"""Files of others at the place of a save: they stay there, or the save refuses before it writes."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
from pathlib import Path

import fsspec
import pytest

import distckpt
from distckpt import CheckpointExistsError, CheckpointManager, CheckpointNotFoundError
from distckpt._commit import hidden_directories
from distckpt.strategies.safetensors import ShardSave
from distckpt.streaming import save_safetensors_streaming_sharded
from tests.support.disk import tree_of
from tests.support.disks import overlay, small_disk
from tests.support.states import state_of, value_in, value_of
from tests.support.stopping import stopping

OURS = {"manifest.safetensors", "metadata.json", "objects", "tensors"}


def put_files_of_others(path):
    """What programs put beside a checkpoint: files, folders, links, hidden ones."""
    (path / "data_loader" / "rank_0").mkdir(parents=True)
    (path / "data_loader" / "rank_0" / "state.pt").write_bytes(b"mine")
    (path / "config.yaml").write_text("mine")
    (path / "config.yaml").chmod(0o600)
    (path / ".hidden").write_text("mine")
    (path / "latest").symlink_to("nowhere")
    return others_at(path)


def others_at(path):
    """Return what is at a path and not of a save: contents, links, and the identity of files."""
    found = {}
    for root, folders, files in os.walk(path):
        for name in [*folders, *files]:
            full = os.path.join(root, name)
            inner = os.path.relpath(full, path)
            if inner.split("/")[0] in OURS:
                continue
            status = os.lstat(full)
            is_file = not os.path.islink(full) and not os.path.isdir(full)
            content = Path(full).read_bytes() if is_file else None
            found[inner] = (status.st_mode, status.st_ino if is_file else None, content)
    return found


@pytest.mark.parametrize("verb", ["save", "async_save", "reshard"])
def test_files_of_others_stay(verb, tmp_path, caplog):
    path = tmp_path / "iter_0000010"
    others = put_files_of_others(path)
    with caplog.at_level(logging.WARNING, logger="distckpt"):
        if verb == "save":
            distckpt.save(state_of(1), path)
        elif verb == "async_save":
            distckpt.async_save(state_of(1), path).result(60)
        else:
            distckpt.save(state_of(1), tmp_path / "source")
            distckpt.reshard(tmp_path / "source", path)
    assert caplog.text == ""
    assert value_in(path) == 1
    assert others_at(path) == others
    assert set(os.listdir(tmp_path)) <= {"iter_0000010", "source"}
    (path / "later").write_text("mine")
    distckpt.save(state_of(2), path, overwrite=True)
    assert value_in(path) == 2
    assert others_at(path) == {**others, "later": others_at(path)["later"]}
    assert set(os.listdir(tmp_path)) <= {"iter_0000010", "source"}


class WritesAmongOthers(ShardSave):
    """Another program puts files where the checkpoint is going to be, while it is written."""

    def write(self, checkpoint_dir, ranks):
        fields = super().write(checkpoint_dir, ranks)
        WritesAmongOthers.others = put_files_of_others(WritesAmongOthers.path)
        return fields


@pytest.mark.parametrize("is_there", [False, True])
def test_files_that_others_write_during_a_save_stay(is_there, tmp_path):
    path = WritesAmongOthers.path = tmp_path / "iter_0000010"
    if is_there:
        distckpt.save(state_of(1), path)
    distckpt.save(state_of(2), path, strategy=stopping(WritesAmongOthers), overwrite=True)
    assert value_in(path) == 2
    assert others_at(path) == WritesAmongOthers.others
    assert os.listdir(tmp_path) == ["iter_0000010"]


def test_only_what_a_save_has_left_is_moved_aside(tmp_path, caplog):
    path = tmp_path / "c"
    distckpt.save(state_of(1), path)
    (path / "metadata.json").unlink()
    left = {name: content for name, content in tree_of(path).items() if name.split("/")[0] in OURS}
    others = put_files_of_others(path)
    with caplog.at_level(logging.WARNING, logger="distckpt"):
        distckpt.save(state_of(2), path)
    assert value_in(path) == 2
    assert others_at(path) == others
    (aside,) = [name for name in os.listdir(tmp_path) if name != "c"]
    assert aside.startswith(".c.incomplete-")
    assert str(tmp_path / aside) in caplog.text
    assert tree_of(tmp_path / aside) == left


def test_a_checkpoint_of_another_format_is_replaced_entirely(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "__0_0.distcp").write_bytes(b"theirs")
    (tmp_path / "c" / "tensors").mkdir()
    (tmp_path / "c" / "tensors" / "0.bin").write_bytes(b"theirs")
    (tmp_path / "c" / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    distckpt.save(state_of(1), tmp_path / "c", overwrite=True)
    assert set(os.listdir(tmp_path / "c")) == OURS


@pytest.mark.parametrize("others", [[], ["notes.txt"]])
def test_a_checkpoint_of_torch_is_replaced_when_asked(tmp_path, caplog, others):
    (tmp_path / "c").mkdir()
    for name in [".metadata", "__0_0.distcp", *others]:
        (tmp_path / "c" / name).write_bytes(b"theirs")
    check_refused(tmp_path / "c", "it holds a checkpoint of torch")
    distckpt.save(state_of(1), tmp_path / "c", overwrite=True)
    assert set(os.listdir(tmp_path / "c")) == OURS
    left = list(tmp_path.glob(".c.*"))
    if not others:
        assert left == []
        return
    # Files that are not of it are not removed.
    (aside,) = left
    assert str(aside) in caplog.text
    assert sorted(os.listdir(aside)) == [".metadata", "__0_0.distcp", *others]


def test_a_checkpoint_of_torch_in_a_store_is_not_hidden(request):
    files = fsspec.filesystem("memory")
    request.addfinalizer(lambda: files.rm("/target", recursive=True))
    for name in [".metadata", "__0_0.distcp"]:
        files.pipe(f"/target/{name}", b"theirs")
    with pytest.raises(distckpt.CheckpointExistsError, match="holds a checkpoint of torch"):
        distckpt.save(state_of(1), "memory://target")
    assert sorted(files.find("/target")) == ["/target/.metadata", "/target/__0_0.distcp"]
    distckpt.save(state_of(1), "memory://target", overwrite=True)
    assert files.cat("/target/.metadata") == files.cat("/target/__0_0.distcp") == b"theirs"
    assert distckpt.verify("memory://target").problems == ()


# --- What is refused ------------------------------------------------------------------------------


@pytest.fixture
def hugging_face(tmp_path):
    """A model that `load` reads, and its value."""
    path = tmp_path / "model"
    distckpt.save(state_of(7), tmp_path / "source")
    distckpt.consolidate(tmp_path / "source", path)
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize("verb", ["save", "async_save", "reshard"])
def test_a_model_of_hugging_face_is_not_hidden(verb, tmp_path, hugging_face):
    """`load` would read the checkpoint from then on."""
    before = tree_of(tmp_path)
    first = tmp_path / "source" if verb == "reshard" else state_of(1)
    save = functools.partial(getattr(distckpt, verb), first, hugging_face)
    with pytest.raises(CheckpointExistsError, match=r"holds a Hugging Face model \('model\.safe"):
        save()
    assert tree_of(tmp_path) == before
    outcome = save(overwrite=True)
    if verb == "async_save":
        outcome.result()
    assert set(os.listdir(hugging_face)) == {*OURS, "model.safetensors", "config.json"}


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "model.safetensors.index.json"])
def test_adapters_and_indexes_are_models_too(tmp_path, name):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / name).write_text("mine")
    with pytest.raises(CheckpointExistsError, match=re.escape(name)):
        distckpt.save(state_of(1), tmp_path / "c")
    assert os.listdir(tmp_path / "c") == [name]


def test_steps_of_a_manager_may_hold_exports(tmp_path, hugging_face):
    """In its root, and where a program has put one before the step was saved."""
    with CheckpointManager(hugging_face, async_save=False) as manager:
        (hugging_face / "step_00000002").mkdir()
        (hugging_face / "step_00000002/model.safetensors").write_bytes(b"mine")
        for step in (1, 2):
            manager.save(step, state_of(step))
        assert value_of(manager.load(state_of(-1))) == 2
    assert (hugging_face / "step_00000002/model.safetensors").read_bytes() == b"mine"


def check_refused(path, reason, **options):
    before = tree_of(path)
    with pytest.raises(CheckpointExistsError, match=reason):
        distckpt.save(state_of(9), path, **options)
    assert tree_of(path) == before
    assert [name for name in os.listdir(path.parent) if name.startswith(".")] == []


def make_root(path):
    with CheckpointManager(path, async_save=False) as manager:
        manager.save(1, state_of(1))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_of_checkpoints_is_none(overwrite, tmp_path):
    """As when `run` is given for `run/step_3`."""
    make_root(tmp_path / "run")
    check_refused(
        tmp_path / "run",
        "holds other checkpoints .'step_00000001'.*run/step_1'",
        overwrite=overwrite,
    )
    (tmp_path / "busy" / ".step_2.tmp-0123456789abcdef").mkdir(parents=True)
    check_refused(tmp_path / "busy", "holds other checkpoints", overwrite=overwrite)


def test_the_current_directory_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "here" / "below").mkdir(parents=True)
    (tmp_path / "here" / "train.py").write_text("mine")
    for current in ("here", "here/below"):
        monkeypatch.chdir(tmp_path / current)
        check_refused(tmp_path / "here", "it is the current directory")
    with pytest.raises(CheckpointExistsError, match="it is the current directory"):
        distckpt.save(state_of(1), "..")


def test_the_current_directory_stays_the_same_one(tmp_path, monkeypatch):
    """A process whose directory was replaced finds no relative path any more."""
    distckpt.save(state_of(1), tmp_path / "source")
    (tmp_path / "empty").mkdir()
    for current, verb in [
        ("empty", overwrite),
        ("empty", export),
        ("empty", stream),
        ("source", overwrite),
    ]:
        monkeypatch.chdir(tmp_path / current)
        with pytest.raises(CheckpointExistsError, match="it is the current directory"):
            verb(tmp_path, Path("."))
        assert os.path.samefile(".", tmp_path / current)
    assert os.listdir(tmp_path / "empty") == []


def test_files_of_others_in_our_folders_are_not_overwritten(tmp_path):
    distckpt.save(state_of(1), tmp_path / "c")
    (tmp_path / "c" / "tensors" / "model.safetensors.index.json").write_text("mine")
    check_refused(tmp_path / "c", "'tensors' in it holds what no save has written", overwrite=True)
    distckpt.save(state_of(2), tmp_path / "d")
    distckpt.save(state_of(3), tmp_path / "d" / "objects" / "nested")
    check_refused(
        tmp_path / "d", "'objects' in it holds what no save has written .'nested'", overwrite=True
    )


@pytest.mark.parametrize("verb", ["export", "stream"])
def test_no_export_takes_the_place_of_a_directory_of_checkpoints(verb, tmp_path):
    """A job may be writing its next step there."""
    distckpt.save(state_of(1), tmp_path / "source")
    make_root(tmp_path / "run")
    before = tree_of(tmp_path / "run")
    with pytest.raises(CheckpointExistsError, match="holds other checkpoints"):
        {"export": export, "stream": stream}[verb](tmp_path, tmp_path / "run")
    assert tree_of(tmp_path / "run") == before


@pytest.mark.parametrize("name", ["objects", "tensors"])
def test_folders_of_others_with_our_names(name, tmp_path):
    (tmp_path / "c" / name).mkdir(parents=True)
    (tmp_path / "c" / name / "pack").write_bytes(b"mine")
    check_refused(tmp_path / "c", f"'{name}' in it holds what no save has written .'pack'")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / name).write_text("a file")
    check_refused(tmp_path / "d", f"'{name}' in it")


def test_a_link_to_a_directory_of_others(tmp_path):
    """Its content is not touched unasked; with overwrite it stays, beside the checkpoint."""
    others = put_files_of_others(tmp_path / "elsewhere" / "data")
    (tmp_path / "ck").symlink_to(tmp_path / "elsewhere" / "data")
    with pytest.raises(CheckpointExistsError, match="is a link to it"):
        distckpt.save(state_of(1), tmp_path / "ck")
    assert others_at(tmp_path / "elsewhere" / "data") == others
    distckpt.save(state_of(1), tmp_path / "ck", overwrite=True)
    assert (tmp_path / "ck").is_symlink()
    assert others_at(tmp_path / "ck") == others
    assert value_in(tmp_path / "ck") == 1
    assert os.listdir(tmp_path / "elsewhere") == ["data"]


def export(folder, path):
    distckpt.consolidate(folder / "source", path, overwrite=True)


def stream(folder, path):
    save_safetensors_streaming_sharded([], path, [], max_file_bytes=100)


def overwrite(folder, path):
    distckpt.save(state_of(2), path, overwrite=True)


@pytest.mark.parametrize("verb", [overwrite, export, stream])
@pytest.mark.parametrize("mount", ["target", "inside"])
def test_mounts_are_found_before_anything_is_written(verb, mount, tmp_path):
    distckpt.save(state_of(1), tmp_path / "source")
    path = tmp_path / "a target"
    disk = path if mount == "target" else path / "data \\ more" / "disk"
    disk.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    with small_disk(disk, 1 << 16):
        (disk / "file").write_bytes(b"mine")
        what = "it" if mount == "target" else f"{os.path.relpath(disk, path)!r} in it"
        with pytest.raises(CheckpointExistsError, match=re.escape(f": {what} is a mount point")):
            verb(tmp_path, path)
        assert (disk / "file").read_bytes() == b"mine"
        assert sorted(os.listdir(tmp_path)) == ["a target", "source"]


def remove_tensors(folder, path):
    distckpt.megatron.remove_sharded_tensors(path, "rows")


@pytest.mark.parametrize("verb", [overwrite, export, stream, remove_tensors])
def test_a_directory_of_a_lower_layer_is_refused_before_data_is_written(verb, tmp_path):
    for name in ("source", "checkpoint"):
        distckpt.save(state_of(1), tmp_path / "lower" / name)
    with overlay(tmp_path) as merged:
        before = tree_of(merged)
        with pytest.raises(
            CheckpointExistsError, match="it comes from a lower layer of an overlay file system"
        ):
            verb(merged, merged / "checkpoint")
        assert tree_of(merged) == before
        shutil.copytree(merged / "checkpoint", merged / "copy")
        verb(merged, merged / "copy")
        assert sorted(os.listdir(merged)) == ["checkpoint", "copy", "source"]
    assert tree_of(tmp_path / "lower") == before


# --- Access ---------------------------------------------------------------------------------------


class LooksAtAccess(ShardSave):
    """Notes who may access the directory that is written into."""

    def write(self, checkpoint_dir, ranks):
        LooksAtAccess.found = access_of(checkpoint_dir)
        return super().write(checkpoint_dir, ranks)


def access_of(path):
    status = os.stat(path)
    return oct(status.st_mode), status.st_uid, status.st_gid


def save_and_look(folder, path):
    distckpt.save(state_of(2), path, strategy=stopping(LooksAtAccess), overwrite=True)
    assert LooksAtAccess.found == access_of(path)


@pytest.mark.parametrize("verb", [save_and_look, export, stream])
@pytest.mark.parametrize("mode", [0o700, 0o2770])
def test_nobody_may_read_more_than_before(mode, verb, tmp_path):
    distckpt.save(state_of(1), tmp_path / "source")
    path = tmp_path / "c"
    (path / "private").mkdir(parents=True)
    (path / "private" / "key").write_text("mine")
    if os.geteuid() == 0:
        os.chown(path, 12345, 12346)
    for directory in (path, path / "private"):
        directory.chmod(mode)
    before = access_of(path), access_of(path / "private")
    for _ in range(2):
        verb(tmp_path, path)
        assert (access_of(path), access_of(path / "private")) == before
        assert (path / "private" / "key").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_directory_of_another_user_is_not_taken_for_an_earlier_checkpoint(tmp_path):
    distckpt.save(state_of(6), tmp_path / "theirs")
    planted = tmp_path / ".ck.old-0123456789abcdef"
    (tmp_path / "theirs").rename(planted)
    os.chown(planted, 12345, 12345)
    with pytest.raises(CheckpointNotFoundError) as caught:
        distckpt.load(state_of(-1), tmp_path / "ck")
    assert str(planted) not in str(caught.value)
    distckpt.save(state_of(1), tmp_path / "ck")
    assert value_in(tmp_path / "ck") == 1
    assert planted.exists()


def test_empty_directories_of_earlier_saves_are_removed(tmp_path):
    """As network file systems leave them when a reader had a file open."""
    path = tmp_path / "c"
    empty, full, running_now = (
        tmp_path / f".c.tmp-{hidden_directories.new_nonce(str(path))}" for _ in range(3)
    )
    for directory in (empty, full, running_now):
        (directory / "tensors").mkdir(parents=True)
    (full / "tensors" / "x").write_bytes(b"mine")
    with hidden_directories.locked_directory(str(running_now), durable=False):
        distckpt.save(state_of(1), path)
        assert sorted(tmp_path.iterdir()) == sorted([full, running_now, path])
    distckpt.save(state_of(1), path, overwrite=True)
    assert sorted(tmp_path.iterdir()) == sorted([full, path])

"""What an export says is there must be there after a power failure: everything is flushed before it gets its name."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

import distckpt
from distckpt import ShardedTensor, _storage
from tests.hf_folders import INDEX, read_export, write_folder, write_plain

FILES = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]


def state_of(path):
    """Return what would be lost of a file or directory if it changed after it was flushed."""
    stat = os.stat(path)
    return sorted(os.listdir(path)) if os.path.isdir(path) else (stat.st_size, stat.st_mtime_ns)


def identity_of(path):
    stat = os.stat(path)
    return stat.st_dev, stat.st_ino


class Recorder:
    """Records the state in which each file and directory was flushed last.

    Where a directory gets its final name, it and all that is in it must be in the state in which it was flushed; what
    is not is noted in `faults`, by name. `unnamed` are directories in which a name changed since they were flushed.
    """

    def __init__(self, parent, ignored):
        self.flushed, self.faults, self.unnamed, self.num_commits = {}, set(), set(), 0
        self._parent, self._ignored = parent, ignored
        self._fsync, self._rename, self._exchange = os.fsync, os.rename, _storage.exchange

    def fsync(self, fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not self._ignores(path):
            self.flushed[identity_of(path)] = state_of(path)
            self.unnamed.discard(path)
        self._fsync(fd)

    def rename(self, source, target):
        self._check(source)
        self._rename(source, target)
        self.unnamed.add(os.path.dirname(target))

    def exchange(self, first, second, *options):
        self._check(first)
        self.unnamed.add(os.path.dirname(second))
        return self._exchange(first, second, *options)

    def _ignores(self, path):
        # Directory and small files have names of their own before they are complete, such as `.out.tmp-1234`.
        name = "." if path == str(self._parent) else os.path.basename(path)
        return self._ignored is not None and (name == self._ignored or name.startswith(f".{self._ignored}."))

    def _check(self, directory):
        self.num_commits += 1
        for path in [directory, *(os.path.join(top, n) for top, ds, fs in os.walk(directory) for n in ds + fs)]:
            # Files with two names are other programs': they were there before.
            is_ours = os.path.isdir(path) or os.stat(path).st_nlink == 1
            if is_ours and self.flushed.get(identity_of(path)) != state_of(path):
                self.faults.add("out" if path == directory else os.path.relpath(path, directory))


@contextlib.contextmanager
def recorded(monkeypatch, parent, ignored=None):
    recorder = Recorder(parent, ignored)
    with monkeypatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, recorder.fsync)
        patch.setattr(os, "rename", recorder.rename)
        patch.setattr(_storage, "exchange", recorder.exchange)
        yield recorder
    assert recorder.num_commits == 1


@pytest.fixture
def export(tmp_path):
    """Return what exports three files, their index and an extra file to `out`."""
    tensors = {f"layers.{i}.w": torch.full((100, 30), float(i)) for i in range(3)}
    write_folder(tmp_path / "in", tensors, 0, 2)
    write_plain(tmp_path / "reference" / "model.safetensors", {"w": torch.ones(1)})
    (tmp_path / "reference" / "config.json").write_text("{}")

    def run(**options):
        extra = {"extra_files_from": tmp_path / "reference", "max_file_bytes": 12_000}
        distckpt.consolidate(tmp_path / "in", tmp_path / "out", **extra, **options)
        assert set(FILES) | {INDEX, "config.json"} <= set(os.listdir(tmp_path / "out"))
        assert len(read_export(tmp_path / "out")) == 3

    return run


@pytest.mark.parametrize("has_earlier", [False, True], ids=["new", "over an earlier one"])
def test_everything_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch, export, has_earlier):
    if has_earlier:
        export()
        (tmp_path / "out" / "notes" / "deep").mkdir(parents=True)
        (tmp_path / "out" / "notes" / "deep" / "readme.txt").write_text("mine")
    with recorded(monkeypatch, tmp_path) as recorder:
        export(overwrite=has_earlier)
    assert recorder.faults == set()
    assert recorder.unnamed == set(), "the new name itself is on disk"


def test_large_files_are_flushed_whole(tmp_path, monkeypatch):
    """Several threads write windows of one file."""
    write_folder(tmp_path / "in", {"w": torch.ones(6 << 20)}, 0, 2)
    with recorded(monkeypatch, tmp_path) as recorder:
        distckpt.consolidate(tmp_path / "in", tmp_path / "out")
    assert recorder.faults == set()


def test_a_saved_checkpoint_is_consolidated_durably(tmp_path, monkeypatch):
    distckpt.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(50, 2))}, tmp_path / "in")
    with recorded(monkeypatch, tmp_path) as recorder:
        distckpt.consolidate(tmp_path / "in", tmp_path / "out")
    assert recorder.faults == recorder.unnamed == set()


@pytest.mark.parametrize("forgotten", [*FILES, INDEX, "config.json", "out"])
def test_a_flush_that_were_left_out_would_be_noticed(tmp_path, monkeypatch, export, forgotten):
    with recorded(monkeypatch, tmp_path, ignored=forgotten) as recorder:
        export()
    assert forgotten in recorder.faults


def test_a_flush_of_the_parent_that_were_left_out_would_be_noticed(tmp_path, monkeypatch, export):
    with recorded(monkeypatch, tmp_path, ignored=".") as recorder:
        export()
    assert recorder.unnamed == {str(tmp_path)}

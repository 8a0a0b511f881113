from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

from distckpt import _storage


@pytest.fixture
def memory():
    """The prefix of an empty in-memory object store."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield "memory://bucket"
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.fixture(params=["local", "memory"])
def base(request, tmp_path):
    return str(tmp_path) if request.param == "local" else request.getfixturevalue("memory")


# ---- locations


@pytest.mark.parametrize(
    ("given", "normalized"),
    [
        ("/a/b/", "/a/b"),
        ("/a/./b/../c", "/a/c"),
        (Path("/a/b"), "/a/b"),
        ("file:///a/b", "/a/b"),
        ("s3://bucket/run/", "s3://bucket/run"),
        ("memory://a", "memory://a"),
        ("/a/[x]", "/a/[x]"),
    ],
    ids=str,
)
def test_locations_are_normalized(given, normalized):
    assert _storage.normalize(given) == normalized


def test_relative_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _storage.normalize("run/../ckpt") == str(tmp_path / "ckpt")


def test_only_what_has_a_scheme_is_remote():
    assert _storage.is_local("/a/b")
    assert _storage.is_local("/runs/12::30/[a]*?")
    assert not _storage.is_local("s3://a/b")
    assert not _storage.is_local("simplecache::s3://a/b")


def test_locations_are_joined_and_split():
    assert _storage.join("/a", "b", "c") == "/a/b/c"
    assert _storage.join("s3://a/", "b", "c") == "s3://a/b/c"
    assert _storage.split("/a/b") == ("/a", "b")
    assert _storage.split("s3://a/b") == ("s3://a", "b")


# ---- the same on disks and object stores


def test_small_files_are_written_and_read(base):
    _storage.make_directories(_storage.join(base, "a", "b"))
    file = _storage.join(base, "a", "b", "file")
    assert not _storage.exists(file)
    _storage.write_bytes(file, b"0123456789")
    assert _storage.exists(file)
    assert not _storage.isdir(file)
    assert _storage.read_bytes(file) == b"0123456789"
    assert _storage.file_size(file) == 10
    assert _storage.read_range(file, 2, 5) == b"234"
    assert _storage.read_range(file, 8, 50) == b"89"
    _storage.write_bytes(file, b"new")
    assert _storage.read_bytes(file) == b"new"
    assert _storage.list_names(_storage.join(base, "a")) == ["b"]
    assert _storage.list_names(_storage.join(base, "a", "b")) == ["file"]
    assert _storage.isdir(_storage.join(base, "a"))


def test_what_is_not_there(base):
    file = _storage.join(base, "none")
    for function in (_storage.read_bytes, _storage.file_size):
        with pytest.raises(FileNotFoundError):
            function(file)
    assert not _storage.exists(file)
    assert not _storage.isdir(file)
    _storage.remove_file(file)
    _storage.remove_tree(file)


def test_files_and_trees_are_removed(base):
    _storage.make_directories(_storage.join(base, "a", "b"))
    for name in ("x", "y"):
        _storage.write_bytes(_storage.join(base, "a", "b", name), b"1")
    _storage.remove_file(_storage.join(base, "a", "b", "x"))
    assert _storage.list_names(_storage.join(base, "a", "b")) == ["y"]
    _storage.remove_tree(_storage.join(base, "a"))
    assert not _storage.exists(_storage.join(base, "a"))


def test_listings_are_never_stale(memory):
    # Written by another object, as another machine would.
    fsspec.filesystem("memory").pipe_file("/bucket/a/x", b"1")
    assert _storage.list_names("memory://bucket/a") == ["x"]
    fsspec.filesystem("memory", skip_instance_cache=True).pipe_file("/bucket/a/y", b"1")
    assert _storage.list_names("memory://bucket/a") == ["x", "y"]
    assert _storage.exists("memory://bucket/a/y")


def test_streams_appear_when_they_are_closed(memory):
    with _storage.open_remote_for_writing("memory://bucket/file") as file:
        file.write(b"first ")
        file.write(memoryview(b"second"))
    assert _storage.read_bytes("memory://bucket/file") == b"first second"


# ---- local files only


def test_a_file_is_replaced_in_one_step_or_stays(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    inode = (tmp_path / "file").stat().st_ino
    _storage.write_bytes(str(tmp_path / "file"), b"new")
    assert (tmp_path / "file").stat().st_ino != inode
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError, match="directory"):
        _storage.write_bytes(str(tmp_path / "directory"), b"new")
    assert sorted(os.listdir(tmp_path)) == ["directory", "file"]


def test_dangling_links_are_there(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "none")
    assert _storage.exists(str(tmp_path / "link"))
    assert not _storage.isdir(str(tmp_path / "link"))


def test_directories_change_places(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert _storage.exchange(str(tmp_path / "a"), str(tmp_path / "b"))
    assert os.listdir(tmp_path / "a") == ["b"]
    assert os.listdir(tmp_path / "b") == ["a"]
    with pytest.raises(FileNotFoundError) as caught:
        _storage.exchange(str(tmp_path / "a"), str(tmp_path / "none"))
    assert (caught.value.filename, caught.value.filename2) == (str(tmp_path / "a"), str(tmp_path / "none"))


def test_rename_replaces_only_an_empty_directory(tmp_path):
    for name in ("new", "empty", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(OSError, match="not empty"):
        _storage.rename(str(tmp_path / "new"), str(tmp_path / "full"))
    _storage.rename(str(tmp_path / "new"), str(tmp_path / "empty"))
    assert sorted(os.listdir(tmp_path)) == ["empty", "full"]


def test_linked_trees_share_their_files(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"1")
    (tmp_path / "a" / "link").symlink_to("b")
    _storage.link_tree(str(tmp_path / "a"), str(tmp_path / "c"))
    assert (tmp_path / "c" / "b" / "file").samefile(tmp_path / "a" / "b" / "file")
    assert os.readlink(tmp_path / "c" / "link") == "b"


def test_directories_are_made_with_their_parents_and_may_be_there(tmp_path):
    for _ in range(2):
        _storage.make_directories(str(tmp_path / "a" / "b" / "c"))
    assert (tmp_path / "a" / "b" / "c").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        _storage.make_directories(str(tmp_path / "file" / "a"))

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

from distckpt._storage import locations, object_store


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
        ("local:///a/b", "/a/b"),
        ("FILE:///a/b", "/a/b"),
        ("S3://Bucket/Run", "s3://Bucket/Run"),
        ("/a/~", "/a/~"),
        ("s3://bucket/run/", "s3://bucket/run"),
        ("memory://a", "memory://a"),
        ("/a/[x]", "/a/[x]"),
    ],
    ids=str,
)
def test_locations_are_normalized(given, normalized):
    assert locations.normalize(given) == normalized


@pytest.mark.parametrize(
    "given", [Path("s3://bucket/run"), "s3:/bucket/run", "file:/tmp/x", "s3://", "gs:///"], ids=str
)
def test_broken_urls_are_no_local_directories(given):
    with pytest.raises(ValueError, match="is no complete URL"):
        locations.normalize(given)


@pytest.mark.parametrize("given", ["", b"run", "a\0b"], ids=repr)
def test_what_is_no_location(given):
    """As from an environment variable that is not set."""
    with pytest.raises(ValueError, match="A location is a path or a URL"):
        locations.normalize(given)


@pytest.mark.parametrize("given", ["~", "~/run", Path("~/run")], ids=repr)
def test_a_tilde_is_for_shells(given):
    with pytest.raises(ValueError, match=r"only a shell replaces: pass os\.path\.expanduser"):
        locations.normalize(given)


def test_relative_paths_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert locations.normalize("run/../ckpt") == str(tmp_path / "here" / "ckpt")
    (tmp_path / "here").rmdir()
    with pytest.raises(FileNotFoundError, match="current directory, which was removed: 'ckpt'"):
        locations.normalize("ckpt")


def test_only_what_has_a_scheme_is_remote():
    assert locations.is_local("/a/b")
    assert locations.is_local("/runs/12::30/[a]*?")
    assert not locations.is_local("s3://a/b")
    assert not locations.is_local("simplecache::s3://a/b")


def test_locations_are_joined_and_split():
    assert locations.join("/a", "b", "c") == "/a/b/c"
    assert locations.join("s3://a/", "b", "c") == "s3://a/b/c"
    assert locations.join("/a", "/b", "//c") == "/a/b/c"
    assert locations.split("/a/b") == ("/a", "b")
    assert locations.split("s3://a/b") == ("s3://a", "b")


# ---- the same on disks and object stores


def test_small_files_are_written_and_read(base):
    locations.make_directories(locations.join(base, "a", "b"))
    file = locations.join(base, "a", "b", "file")
    assert not locations.exists(file)
    locations.write_bytes(file, b"0123456789")
    assert locations.exists(file)
    assert not locations.isdir(file)
    assert locations.read_bytes(file) == b"0123456789"
    assert locations.file_size(file) == 10
    assert locations.read_range(file, 2, 5) == b"234"
    assert locations.read_range(file, 8, 50) == b"89"
    locations.write_bytes(file, b"new")
    assert locations.read_bytes(file) == b"new"
    assert locations.list_names(locations.join(base, "a")) == ["b"]
    assert locations.list_names(locations.join(base, "a", "b")) == ["file"]
    assert locations.isdir(locations.join(base, "a"))


def test_what_is_not_there(base):
    file = locations.join(base, "none")
    for function in (locations.read_bytes, locations.file_size):
        with pytest.raises(FileNotFoundError):
            function(file)
    assert not locations.exists(file)
    assert not locations.isdir(file)
    locations.remove_file(file)
    locations.remove_tree(file)


def test_files_and_trees_are_removed(base):
    locations.make_directories(locations.join(base, "a", "b"))
    for name in ("x", "y"):
        locations.write_bytes(locations.join(base, "a", "b", name), b"1")
    locations.remove_file(locations.join(base, "a", "b", "x"))
    assert locations.list_names(locations.join(base, "a", "b")) == ["y"]
    locations.remove_tree(locations.join(base, "a"))
    assert not locations.exists(locations.join(base, "a"))


def test_listings_are_never_stale(memory):
    # Written by another object, as another machine would.
    fsspec.filesystem("memory").pipe_file("/bucket/a/x", b"1")
    assert locations.list_names("memory://bucket/a") == ["x"]
    fsspec.filesystem("memory", skip_instance_cache=True).pipe_file("/bucket/a/y", b"1")
    assert locations.list_names("memory://bucket/a") == ["x", "y"]
    assert locations.exists("memory://bucket/a/y")


def test_streams_appear_when_they_are_closed(memory):
    with object_store.at("memory://bucket/file").open_for_writing() as file:
        file.write(b"first ")
        file.write(memoryview(b"second"))
    assert locations.read_bytes("memory://bucket/file") == b"first second"


# ---- local files only


def test_a_file_is_replaced_in_one_step_or_stays(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    inode = (tmp_path / "file").stat().st_ino
    locations.write_bytes(str(tmp_path / "file"), b"new")
    assert (tmp_path / "file").stat().st_ino != inode
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError, match="directory"):
        locations.write_bytes(str(tmp_path / "directory"), b"new")
    assert sorted(os.listdir(tmp_path)) == ["directory", "file"]


def test_dangling_links_are_there(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "none")
    assert locations.exists(str(tmp_path / "link"))
    assert not locations.isdir(str(tmp_path / "link"))


def test_directories_change_places(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert locations.exchange(str(tmp_path / "a"), str(tmp_path / "b"))
    assert os.listdir(tmp_path / "a") == ["b"]
    assert os.listdir(tmp_path / "b") == ["a"]
    with pytest.raises(FileNotFoundError) as caught:
        locations.exchange(str(tmp_path / "a"), str(tmp_path / "none"))
    assert (caught.value.filename, caught.value.filename2) == (
        str(tmp_path / "a"),
        str(tmp_path / "none"),
    )


def test_rename_replaces_only_an_empty_directory(tmp_path):
    for name in ("new", "empty", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(OSError, match="not empty"):
        locations.rename(str(tmp_path / "new"), str(tmp_path / "full"))
    locations.rename(str(tmp_path / "new"), str(tmp_path / "empty"))
    assert sorted(os.listdir(tmp_path)) == ["empty", "full"]


def test_linked_trees_share_their_files(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"1")
    (tmp_path / "a" / "link").symlink_to("b")
    locations.link_tree(str(tmp_path / "a"), str(tmp_path / "c"))
    assert (tmp_path / "c" / "b" / "file").samefile(tmp_path / "a" / "b" / "file")
    assert os.readlink(tmp_path / "c" / "link") == "b"


def test_directories_are_made_with_their_parents_and_may_be_there(tmp_path):
    for _ in range(2):
        locations.make_directories(str(tmp_path / "a" / "b" / "c"))
    assert (tmp_path / "a" / "b" / "c").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        locations.make_directories(str(tmp_path / "file" / "a"))

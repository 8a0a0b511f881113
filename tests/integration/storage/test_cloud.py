"""S3, Azure and Google Cloud Storage: conditional writes, and where their configuration comes
from.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from distckpt._storage import object_store
from distckpt.megatron.core import CheckpointExistsError
from tests.support.large_states import holds, large_request, large_state, numbers
from tests.support.other_program import as_another_program
from tests.support.s3_server import client, keys_in, new_bucket, reached_at


@pytest.fixture
def place(cloud):
    return f"{cloud.url}/run"


def test_an_object_is_created_once_and_replaced_in_its_known_version(place):
    file = object_store.at(f"{place}/a b/marker")
    assert (file.kind(), file.version()) == (None, None)
    assert file.create(b"one")
    assert file.create(b"one"), "an answer that was lost looks like this"
    assert not file.create(b"two")
    first = file.version()
    assert file.replace(b"two", first)
    assert not file.replace(b"three", first)
    assert file.read() == b"two"
    assert (file.kind(), object_store.at(f"{place}/a b").kind()) == ("file", "directory")
    file.remove()
    file.remove()
    assert not file.replace(b"three", first)
    assert file.kind() is None


def test_of_many_that_create_or_replace_at_once_one_wins(place):
    file = object_store.at(f"{place}/marker")
    start = threading.Barrier(8)

    def put(number: int, known: object) -> bool:
        start.wait()
        return file.replace(str(number).encode(), known)

    for known in (None, "its version"):
        version = known and file.version()
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda number, version=version: put(number, version), range(8)))
        assert won.count(True) == 1
        assert file.read() == str(won.index(True)).encode()
        file.write(b"another")


def test_save_overwrite_load_consolidate_and_remove(place):
    location = f"{place}/c"
    distckpt.save(large_state(1), location)
    distckpt.save(large_state(2), location, overwrite=True)
    with pytest.raises(CheckpointExistsError, match="already holds"):
        distckpt.save(large_state(3), location)
    assert holds(location, 2)
    assert len(object_store.at(location).list_files()) == 4
    distckpt.consolidate(location, f"{place}/hf")
    target = large_request()
    assert torch.equal(distckpt.load(target, f"{place}/hf")["w"], numbers(2))
    assert object_store.at(place).list_names() == ["c", "hf"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_savers_at_once_one_wins(place, overwrite):
    location, others = f"{place}/c", iter([1])
    if overwrite:
        distckpt.save({"step": 1}, location)

    def progress(num_bytes, total_bytes):
        if next(others, None):
            as_another_program(distckpt.save, {"step": 3}, location, overwrite=overwrite)

    small = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(10)), "step": 2}
    with pytest.raises(CheckpointExistsError, match="Another program"):
        distckpt.save(small, location, overwrite=overwrite, progress=progress)
    assert distckpt.load({}, location) == {"step": 3}
    assert distckpt.verify(location).strays == ()


def test_ranges_end_where_the_object_does(place):
    file = object_store.at(f"{place}/x")
    file.write(bytes(range(10)))
    assert file.read_range(2, 3).tolist() == [2, 3, 4]
    assert file.read_range(6, 8).tolist() == [6, 7, 8, 9]
    assert file.read_range(10, 8).tolist() == file.read_range(3, 0).tolist() == []
    with pytest.raises(FileNotFoundError) as caught:
        object_store.at(f"{place}/none").size()
    assert caught.value.filename == f"{place}/none"


# --- Configuration --------------------------------------------------------------------------------


def test_a_profile_gives_credentials_endpoint_and_region(server, tmp_path, monkeypatch):
    bucket = new_bucket(server)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(
        f"[profile lab]\nregion = eu-west-1\nendpoint_url = {server}\n"
    )
    (tmp_path / ".aws" / "credentials").write_text(
        "[lab]\naws_access_key_id = a\naws_secret_access_key = b\n"
    )
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ENDPOINT_URL",
        "AWS_DEFAULT_REGION",
    ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    distckpt.save({"step": 1}, f"{bucket}/c")
    assert distckpt.load({}, f"{bucket}/c") == {"step": 1}


def test_public_data_needs_no_credentials(server, tmp_path):
    bucket = new_bucket(server)
    distckpt.save({"step": 1}, f"{bucket}/c")
    for name in keys_in(server, bucket):
        client(server).put_object_acl(
            Bucket=bucket.removeprefix("s3://"), Key=name, ACL="public-read"
        )
    nothing = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": str(tmp_path)}
    with reached_at(server, **nothing, AWS_SKIP_SIGNATURE="true"):
        assert distckpt.load({}, f"{bucket}/c") == {"step": 1}


def test_settings_of_fsspec_that_are_not_read_are_warned_about(server, monkeypatch, caplog):
    monkeypatch.setitem(fsspec.config.conf, "s3", {"anon": True})
    distckpt.save({"step": 1}, f"{new_bucket(server)}/c")
    assert "fsspec's settings of s3:// are not read: use the environment" in caplog.text


@pytest.mark.parametrize(
    ("url", "protocol", "settings", "variable"),
    [
        ("s3://b/c", "s3", {"endpoint_url": "http://127.0.0.1:9"}, "AWS_ENDPOINT_URL"),
        (
            "s3://b/c",
            "s3a",
            {"client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}},
            "AWS_ENDPOINT_URL",
        ),
        ("s3://b/c", "s3", {"profile": "lab"}, "AWS_PROFILE"),
        ("gs://b/c", "gcs", {"endpoint_url": "http://127.0.0.1:9"}, "STORAGE_EMULATOR_HOST"),
        ("az://b/c", "abfs", {"account_name": "ours"}, "AZURE_STORAGE_CONNECTION_STRING"),
    ],
)
def test_settings_of_fsspec_that_say_where_data_is_are_refused(
    url, protocol, settings, variable, monkeypatch
):
    monkeypatch.setitem(fsspec.config.conf, protocol, settings)
    monkeypatch.delenv(variable, raising=False)
    (name,) = settings.get("client_kwargs", settings)
    with pytest.raises(OSError, match=f"fsspec's setting '{name}' is not read .*: set {variable}"):
        distckpt.save({"step": 1}, url)


def test_settings_of_fsspec_that_the_environment_replaces_do_not_matter(server, monkeypatch):
    monkeypatch.setitem(
        fsspec.config.conf, "s3", {"endpoint_url": server, "key": "testing", "secret": "testing"}
    )
    location = f"{new_bucket(server)}/c"
    distckpt.save({"step": 1}, location)
    assert distckpt.load({}, location) == {"step": 1}


@pytest.mark.parametrize(
    ("url", "library", "extra"),
    [
        ("s3://b/c", "boto3", "s3"),
        ("gs://b/c", "obstore", "gcs"),
        ("abfs://b@a.dfs.core.windows.net/c", "obstore", "azure"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_extra(url, library, extra, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "7")  # A connection of its own.
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ImportError, match=rf"{url}: .*{library}.* pip install 'distckpt\[{extra}\]'"
    ):
        distckpt.save({"step": 1}, url)

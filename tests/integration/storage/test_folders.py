"""File systems of fsspec whose folders are real: they are made, and do not stay when they are
empty.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import subprocess
import time

import fsspec
import pytest
import torch

import distckpt
from distckpt import CheckpointManager, ShardedTensor, streaming
from tests.support.hooked_store import HookedFileSystem, hooked_reads
from tests.support.large_states import holds, large_state
from tests.support.states import state_of_step, step_in


@pytest.fixture(params=["local", "sftp"])
def place(request, tmp_path):
    """A URL, and the directory of this machine that it stands for."""
    if request.param == "local":
        yield f"{HookedFileSystem.protocol}://{tmp_path}", tmp_path
        return
    pytest.importorskip("paramiko")
    if shutil.which("rclone") is None:
        pytest.skip("rclone is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    secret = secrets.token_hex(8)
    address = f"127.0.0.1:{port}"
    options = ["--addr", address, "--user", "user", "--pass", secret, "--dir-cache-time", "0"]
    process = subprocess.Popen(["rclone", "serve", "sftp", tmp_path, *options])
    settings = {"host": "127.0.0.1", "port": port, "username": "user", "password": secret}
    try:
        wait_for(port)
        fsspec.config.conf["sftp"] = settings
        yield "sftp://", tmp_path
    finally:
        fsspec.config.conf.pop("sftp", None)
        process.terminate()
        process.wait()


def wait_for(port):
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)


def folders_in(directory):
    return [path for path in directory.rglob("*") if path.is_dir()]


def test_saves_make_their_folders_and_leave_no_empty_ones(place):
    url, directory = place
    location = f"{url}/a/b/c"
    for step in (1, 2):
        distckpt.save(state_of_step(step), location, overwrite=step == 2)
        assert step_in(location) == step
    assert distckpt.verify(location).is_whole
    assert len(folders_in(directory)) == 5
    # A copy on the disk, without fsspec.
    assert step_in(directory / "a" / "b" / "c") == 2


def test_large_files_are_written_in_a_stream(place):
    url, _ = place
    distckpt.async_save(large_state(1), f"{url}/run/c").result()
    assert holds(f"{url}/run/c", 1)


def test_a_manager_keeps_and_removes(place):
    url, directory = place
    with CheckpointManager(f"{url}/runs/1", keep_last=1, async_save=False) as manager:
        for step in (1, 2):
            manager.save(step, state_of_step(step))
        assert manager.load(state_of_step(0))["step"] == 2
    assert manager.not_removed == {}
    names = [path.name for path in (directory / "runs" / "1").iterdir() if path.is_dir()]
    assert names == ["step_00000002"]


def test_exports(place, tmp_path_factory):
    url, directory = place
    source = tmp_path_factory.mktemp("source") / "c"
    distckpt.save(state_of_step(3), source)
    (directory / "empty").mkdir()
    for name in ("empty", "new/exports"):
        distckpt.consolidate(source, f"{url}/{name}")
        target = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(8))}
        assert distckpt.load(target, directory / name)["w"].tolist() == [3.0] * 8
    distckpt.reshard(source, f"{url}/resharded/c")
    assert step_in(directory / "resharded" / "c") == 3
    streaming.save_safetensors_streaming(
        iter([("w", torch.ones(8))]), f"{url}/streams/w.safetensors", [("w", torch.float32, (8,))]
    )
    assert (directory / "streams" / "w.safetensors").exists()


def test_a_save_that_fails_leaves_nothing(place):
    url, directory = place

    def fail(num_bytes, total_bytes):
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        distckpt.save(state_of_step(1), f"{url}/run/c", progress=fail)
    assert [path for path in directory.rglob("*") if path.is_file()] == []
    assert folders_in(directory) in ([], [directory / "run"])
    distckpt.save(state_of_step(2), f"{url}/run/c")
    assert step_in(f"{url}/run/c") == 2


def test_a_folder_that_may_not_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file") as caught:
        distckpt.consolidate(saved(tmp_path), f"hooked://{tmp_path}/file/hf")
    assert "by another program" not in str(caught.value)


def test_an_export_to_a_place_that_cannot_be_there_is_not_called_removed(tmp_path):
    """The first folder of a URL may be a bucket: it is not made."""
    missing = f"hooked:///missing-{secrets.token_hex(8)}"
    with pytest.raises(FileNotFoundError) as caught:
        distckpt.consolidate(saved(tmp_path), f"{missing}/hf")
    assert caught.value.errno == errno.ENOENT
    assert not os.path.exists(missing.removeprefix("hooked://"))


def saved(tmp_path):
    distckpt.save(state_of_step(1), tmp_path / "c")
    return tmp_path / "c"


def test_folders_of_others_stay(tmp_path):
    """Another program puts a file into a folder of this save."""

    def put(path, start, stop):
        (tmp_path / "c" / "tensors-of-others").mkdir(exist_ok=True)
        (tmp_path / "c" / "tensors-of-others" / "file").write_text("mine")

    distckpt.save(state_of_step(1), f"hooked://{tmp_path}/c")
    with hooked_reads(put):
        distckpt.save(state_of_step(2), f"hooked://{tmp_path}/c", overwrite=True)
    assert step_in(tmp_path / "c") == 2
    assert (tmp_path / "c" / "tensors-of-others" / "file").read_text() == "mine"

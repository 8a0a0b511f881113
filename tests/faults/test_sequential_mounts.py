"""Mounts that take only sequential writes: the error names the cause and the way out."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import time

import pytest
import torch

import distckpt
from distckpt import ShardedTensor, streaming, tasks
from tests.support.calls import WRITES, watched

TEXT = "only sequential writes .*save to the URL of the store, such as s3:// or sftp://"


def state(value=1.0):
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((64, 64), value)), "step": 1}


def stream(source, target):
    pieces = [("w", torch.ones(64, 64))]
    streaming.save_safetensors_streaming(iter(pieces), target, [("w", torch.float32, (64, 64))])


def reshard_in_parts(source, target):
    for task in tasks.reshard(source, target, num_tasks=1):
        task.run()


VERBS = {
    "save": lambda source, target: distckpt.save(state(), target),
    "async_save": lambda source, target: distckpt.async_save(state(), target).result(),
    "consolidate": distckpt.consolidate,
    "reshard": distckpt.reshard,
    "reshard_in_parts": reshard_in_parts,
    "stream": stream,
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_each_verb_names_the_way_out(verb, tmp_path):
    distckpt.save(state(), tmp_path / "source")
    (tmp_path / "mount").mkdir()

    def on_call(call, moment):
        if call.name in WRITES and call.offset > 0 and moment == "before":
            raise OSError(errno.ESPIPE, os.strerror(errno.ESPIPE))

    with (
        watched(tmp_path / "mount", on_call),
        pytest.raises(OSError, match=TEXT) as caught,
    ):
        verb(tmp_path / "source", tmp_path / "mount" / "target")
    assert caught.value.errno == errno.ESPIPE
    assert caught.value.filename.startswith(str(tmp_path / "mount"))
    assert not (tmp_path / "mount" / "target").exists()


@contextlib.contextmanager
def mounted(directory, *options):
    """Mount a directory with rclone; skipped where there is no rclone, or no FUSE."""
    if shutil.which("rclone") is None or not os.path.exists("/dev/fuse"):
        pytest.skip("rclone or FUSE is not there")
    (directory / "files").mkdir()
    (directory / "mount").mkdir()
    command = ["rclone", "mount", directory / "files", directory / "mount", *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while not os.path.ismount(directory / "mount"):
            if process.poll() is not None:
                pytest.skip("rclone cannot mount here")
            time.sleep(0.05)
        yield directory / "mount"
    finally:
        process.terminate()
        process.wait()
        subprocess.run(["umount", "-l", directory / "mount"], check=False, capture_output=True)


@pytest.mark.slow
def test_rclone_without_a_cache(tmp_path):
    with mounted(tmp_path, "--vfs-cache-mode", "off") as mount:
        with pytest.raises(OSError, match=TEXT):
            distckpt.save(state(), mount / "c")
        assert not (mount / "c").exists()

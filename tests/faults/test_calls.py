"""The recorder of file-system calls: nothing escapes it, and what it injects arrives."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import distckpt
from distckpt import CheckpointManager, ShardedTensor, streaming
from tests.support.calls import READS, WRITES, recorded, watched

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="descriptors are looked up in /proc"
)

HARMLESS = {
    "access", "close", "faccessat", "faccessat2", "fadvise64", "fcntl", "flock", "fstat",
    "fstatfs", "getdents64", "ioctl", "lseek", "lstat", "mmap", "newfstatat", "readlink",
    "stat", "statfs", "statx",
}  # fmt: skip
"""System calls that neither change files nor read their contents."""
ONE_NAME = {
    "linkat": "link",
    "mkdirat": "mkdir",
    "openat": "open",
    "pread64": "pread",
    "preadv2": "preadv",
    "pwrite64": "pwrite",
    "pwritev2": "pwritev",
    "remove": "unlink",
    "renameat": "rename",
    "replace": "rename",
    "symlinkat": "symlink",
    "unlinkat": "unlink",
}
"""Calls by another name that do the same."""


LARGE = (5000, 1024)


def weight_state(value, shape=(100, 8)):
    weight = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + value
    return {"w": ShardedTensor.from_rank_offsets("w", weight), "step": value}


def use_everything(root):
    """Do all that reads and writes files, below `root`."""
    path = f"{root}/a/checkpoint"
    distckpt.save(weight_state(1), path)
    distckpt.save(weight_state(2), path, overwrite=True)
    distckpt.async_save(weight_state(3), path, overwrite=True).result()
    assert distckpt.load(weight_state(0), path)["step"] == 3
    assert distckpt.verify(path).is_whole
    # Large enough to go around the page cache, and to be read with many requests at a time.
    distckpt.save(weight_state(1, (300, 16_000)), f"{root}/large")
    part = ShardedTensor.from_rank_offsets("w", torch.zeros(300, 1000), (1, 1, 16))
    assert distckpt.load({"w": part}, f"{root}/large", verify=False)["w"][0, 0] == 1001
    with CheckpointManager(
        f"{root}/manager", keep_last=1, async_save=False, durable=False
    ) as manager:
        for step in range(3):
            manager.save(step, weight_state(step))
        assert manager.latest() == 2
    for overwrite in (False, True):
        distckpt.consolidate(
            path, f"{root}/export", overwrite=overwrite, extra_files_from=f"{root}/given"
        )
    distckpt.reshard(f"{root}/dcp", f"{root}/converted")
    tensors = {"a": torch.ones(3), "b": torch.ones(4)}
    meta = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    streaming.save_safetensors_streaming(tensors.items(), f"{root}/one.safetensors", meta)
    streaming.save_safetensors_streaming_sharded(
        tensors.items(), f"{root}/many", meta, max_file_bytes=12
    )
    distckpt.megatron.remove_sharded_tensors(path, "w")


def use_everything_recorded(root, report):
    """Do so, and leave behind what the recorder has seen."""
    with recorded(root) as calls:
        use_everything(root)
    Path(report).write_text(
        json.dumps([(c.name, c.paths[:1]) for c in calls if c.changes_something or c.length])
    )


def traced(log, root):
    """List the system calls that a log of strace shows below a folder: name and relative path."""
    for line in log.read_text(errors="replace").splitlines():
        found = re.match(r"\d+ +(\w+)\((.*?)(?: = | <unfinished|$)", line)
        if found is None or root not in found[2]:
            continue
        name, rest = found.groups()
        name = "rmdir" if "AT_REMOVEDIR" in rest else ONE_NAME.get(name, name)
        if name in HARMLESS or (name == "open" and "O_CREAT" not in rest):
            continue
        # Such as `3</folder>, "name"`, a name relative to a descriptor. The first one is what the
        # call is about.
        folder, path = re.search(
            r'(?:(?:\d|AT_FDCWD)<(.*?)>(?:, )?)?(?:"(.*?)"|(?<=>)|$)', rest
        ).groups()
        path = "" if name in READS + WRITES else path
        yield name, os.path.relpath(os.path.join(folder or "", path or ""), root)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.filterwarnings("ignore:torch.distributed is ")
def test_no_call_escapes(tmp_path):
    root, report, log = tmp_path / "root", tmp_path / "calls.json", tmp_path / "strace.log"
    dcp.save({"w": torch.ones(5)}, checkpoint_id=str(root / "dcp"))
    (root / "given").mkdir()
    (root / "given" / "config.json").write_text("{}")
    code = (
        "import sys; from tests.faults.test_calls import *; use_everything_recorded(*sys.argv[1:])"
    )
    strace = [
        "strace",
        "-f",
        "-y",
        "--seccomp-bpf",
        "-s",
        "1",
        "-e",
        "trace=file,desc",
        "-o",
        str(log),
    ]
    command = [*strace, sys.executable, "-c", code, str(root), str(report)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200
    )
    if "ptrace" in done.stderr and not report.exists():
        pytest.skip("this machine does not let strace trace")
    assert done.returncode == 0, done.stderr
    seen = Counter(
        (ONE_NAME.get(name, name), path) for name, (path,) in json.loads(report.read_text())
    )
    real = Counter(traced(log, str(root)))
    assert seen == real
    kinds = {name for name, _ in seen}
    assert kinds >= {
        "open", "write", "pwrite", "pwritev", "fallocate", "fsync", "read", "readv", "preadv",
        "mkdir", "rename", "renameat2", "unlink", "rmdir",
    }  # fmt: skip


# --- Injection ------------------------------------------------------------------------------------


def calls_of_a_save(folder):
    with recorded(folder) as calls:
        distckpt.save(weight_state(1), folder / "checkpoint")
    return calls


def test_numbers_follow_each_other_and_descriptions_repeat(tmp_path):
    first, second = (calls_of_a_save(tmp_path / name) for name in ("a", "b"))
    assert [call.number for call in first] == list(range(1, len(first) + 1))
    assert [str(call) for call in first] == [str(call) for call in second]
    assert len({str(call) for call in first if call.changes_something}) > 20


def test_what_was_written_can_be_read_from_the_recording(tmp_path):
    calls = calls_of_a_save(tmp_path)
    (name,) = {
        call.paths[0] for call in calls if call.name in WRITES and "/tensors/" in call.paths[0]
    }
    content = bytearray()
    for call in calls:
        if call.name in WRITES and call.paths[0] == name:
            content[call.offset : call.offset + call.length] = call.data
    (file,) = (tmp_path / "checkpoint" / "tensors").iterdir()
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    "name", ["mkdir", "fallocate", "pwritev", "fsync", "write", "replace", "rename", "close"]
)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_injected_error_reaches_the_caller(tmp_path, name, moment):
    seen = []

    def fail_first(call, at):
        if call.name == name and at == moment and not seen:
            seen.append(call)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"), watched(tmp_path, fail_first):
        distckpt.save(weight_state(1), tmp_path / "checkpoint")
    assert len(seen) == 1


def test_an_exchange_that_is_not_there_is_one_that_the_system_lacks(tmp_path):
    def refuse(call, moment):
        if call.name == "renameat2":
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    distckpt.save(weight_state(1), tmp_path / "checkpoint")
    with watched(tmp_path, refuse):
        distckpt.save(weight_state(2), tmp_path / "checkpoint", overwrite=True)
    assert distckpt.load({}, tmp_path / "checkpoint") == {"step": 2}


def test_short_reads_and_writes(tmp_path):
    limited = Counter()

    def shorten(call, moment):
        if call.name not in READS + WRITES or moment == "after":
            return None
        limited[call.name] += 1
        return max(1, call.length * 2 // 3)

    with watched(tmp_path, shorten):
        # Large enough to go past the page cache.
        distckpt.save(weight_state(1, LARGE), tmp_path / "checkpoint")
        loaded = distckpt.load(weight_state(0, LARGE), tmp_path / "checkpoint")
    assert torch.equal(loaded["w"], weight_state(1, LARGE)["w"].data)
    names = ("pwritev", "pwrite", "write", "read", "preadv")
    assert min(limited[name] for name in names) > 1, limited


def test_reads_of_runs_fail_and_are_short(tmp_path):
    distckpt.save(weight_state(1, (300, 32_000)), tmp_path / "large")
    limit = 100

    def interfere(call, moment):
        if call.name == "preadv" and call.length == 8000 and moment == "before":
            if limit is None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return limit
        return None

    def load():
        part = ShardedTensor.from_rank_offsets("w", torch.zeros(300, 2000), (1, 1, 16))
        return distckpt.load({"w": part}, tmp_path / "large", verify=False)["w"]

    with watched(tmp_path, interfere):
        assert torch.equal(load(), weight_state(1, (300, 32_000))["w"].data[:, 2000:4000])
        limit = None
        with pytest.raises(OSError, match=r"Input/output error.*safetensors"):
            load()

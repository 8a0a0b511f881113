"""Reads in batches where the system does not offer them, and in a forked process."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from distckpt._io import aio
from tests.support.harness import run
from tests.support.hf_folders import write_plain


@pytest.fixture(autouse=True)
def batches_are_offered():
    # Not at the top of the module: ranks import it, and remember the answer.
    if not aio.is_available():
        pytest.skip("the system offers no reads in batches")


def matrix():
    return torch.arange(96 * 4096, dtype=torch.int32).view(96, 4096)


def loads_half(folder):
    """Load every second half of the rows and tell whether it is right."""
    target = torch.zeros(96, 2048, dtype=torch.int32)
    distckpt.load({"w": ShardedTensor.from_rank_offsets("w", target, (1, 1, 2))}, folder)
    return torch.equal(target, matrix()[:, 2048:])


def forbid(number, error):
    """Let a system call fail in this process from now on, with a seccomp filter, as containers do."""
    libc = ctypes.CDLL(None, use_errno=True)
    statements = struct.pack(
        "HBBI" * 4,
        *(0x20, 0, 0, 0),  # load the number of the call
        *(0x15, 0, 1, number),  # is it this one?
        *(0x06, 0, 0, 0x00050000 | error),  # then fail
        *(0x06, 0, 0, 0x7FFF0000),  # else go on
    )
    memory = ctypes.create_string_buffer(statements)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(memory)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()


def load_where_a_call_fails(rank, folder, name, error):
    if name:
        forbid(aio._CALLS[name], error)
    return aio.is_available(), loads_half(folder)


@pytest.mark.skipif(platform.system() != "Linux", reason="seccomp is of Linux")
@pytest.mark.parametrize(
    ("name", "error", "is_available"),
    [
        pytest.param("", 0, True, id="offered"),
        pytest.param("setup", errno.ENOSYS, False, id="no system calls"),
        pytest.param("setup", errno.EPERM, False, id="forbidden"),
        pytest.param("setup", errno.EAGAIN, False, id="used up by other processes"),
        pytest.param("submit", errno.EPERM, True, id="forbidden later"),
        pytest.param("submit", errno.EINVAL, True, id="not for this file system"),
        pytest.param("submit", errno.EAGAIN, True, id="no room for requests"),
    ],
)
def test_a_system_that_does_not_offer_reads_in_batches(tmp_path, name, error, is_available):
    write_plain(tmp_path / "model.safetensors", {"w": matrix()})
    assert run(load_where_a_call_fails, 1, str(tmp_path), name, error, backend=None) == [(is_available, True)]


def load_in_a_child(rank, folder):
    before = loads_half(folder)
    child = os.fork()
    if child == 0:
        os._exit(0 if loads_half(folder) and aio.is_available() else 3)
    return before, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), loads_half(folder)


def test_a_forked_process_reads_for_itself(tmp_path):
    write_plain(tmp_path / "model.safetensors", {"w": matrix()})
    assert run(load_in_a_child, 1, str(tmp_path), backend=None) == [(True, 0, True)]

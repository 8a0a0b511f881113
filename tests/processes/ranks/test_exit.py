"""Processes that end right after their last exchange with other ranks, or in the middle of one."""

from __future__ import annotations

import contextlib
import os

import pytest

from tests.support.programs import Program

MEET = """
import os, sys, threading, torch, distckpt, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group(
    "gloo", init_method="file://" + os.environ["MEETING"], rank=rank, world_size=2
)
state = {"w": distckpt.ShardedTensor.from_rank_offsets("w", torch.ones(10), (0, rank, 2))}
"""
LOAD_AND_END = """
distckpt.save(state, "checkpoint")
# No other thread gets the interpreter's lock from this one, which it needs to let go of a tensor.
sys.setswitchinterval(1000)
distckpt.load(state, "checkpoint")
"""
END_ALONE = """
has_written, never = threading.Event(), threading.Event()
progress = (lambda *_: has_written.set()) if rank == 0 else (lambda *_: never.wait())
distckpt.async_save(state, "checkpoint", progress=progress, exit_timeout=0)
(has_written if rank == 0 else never).wait()
"""


@contextlib.contextmanager
def two_ranks(script, folder):
    """Two running ranks, which do not outlive the block."""
    environment = {**os.environ, "MEETING": str(folder / "meeting"), "GLOO_SOCKET_IFNAME": "lo"}
    words = ["-c", MEET + script]
    with (
        Program(words, {**environment, "RANK": "0"}, folder) as first,
        Program(words, {**environment, "RANK": "1"}, folder) as second,
    ):
        yield first, second


@pytest.mark.parametrize("rounds", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_a_process_may_end_right_after_a_load(rounds, tmp_path):
    """A thread of gloo that waits for the interpreter's lock while the process ends would abort
    it.
    """
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        with two_ranks(LOAD_AND_END, folder) as ranks:
            errors = [rank.communicate()[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], errors


def test_a_process_may_end_while_it_waits_in_the_background(tmp_path):
    """A thread that wakes up in torch's code while the process ends would abort it."""
    with two_ranks(END_ALONE, tmp_path) as (ending, waiting):
        _, errors = ending.communicate()
        assert waiting.returncode is None
    assert ending.returncode == 0, errors
    assert "is abandoned, nothing of it is committed" in errors

"""Fresh processes that form a process group."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import distckpt
from distckpt.cli._processes import run_ranks
from distckpt.megatron.core import CheckpointingException
from tests.support.harness import sum_over_ranks
from tests.support.programs import fork_spawned


@pytest.fixture(autouse=True)
def fork(monkeypatch):
    """Fork the processes; those of test_bench.py are started anew."""
    fork_spawned(monkeypatch)


def sum_of_ranks(rank: int, start: int) -> int:
    return start + sum_over_ranks(rank) + torch.get_num_threads()


def fail_in_rank_1(rank: int, how: str, path: str) -> None:
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        raise OSError("no space left")
    distckpt.save({"step": 1}, path)


def test_the_result_of_rank_0_is_returned():
    assert run_ranks(sum_of_ranks, 3, 10) == 10 + (0 + 1 + 2) + 1


@pytest.mark.parametrize(("how", "cause"), [("raises", "no space left"), ("killed", "SIGKILL")])
def test_a_rank_that_fails_ends_all(how, cause, tmp_path):
    with pytest.raises(CheckpointingException, match=r"^rank \d failed: ") as caught:
        run_ranks(fail_in_rank_1, 2, how, str(tmp_path / "c"))
    # The other rank may be the first to say that it lost its connection.
    assert cause in str(caught.value) or "Lost contact" in str(caught.value)

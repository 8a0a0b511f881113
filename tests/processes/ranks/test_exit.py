"""Processes that end right after their last exchange with other ranks."""

from __future__ import annotations

import os

import pytest

from tests.support.programs import Program

SAVE_AND_END = """
import os, sys, torch, distckpt, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["MEETING"], rank=rank, world_size=2)
state = {"w": distckpt.ShardedTensor.from_rank_offsets("w", torch.ones(10), (0, rank, 2))}
distckpt.save(state, "checkpoint")
# No other thread gets the interpreter's lock from this one, which it needs to let go of a tensor.
sys.setswitchinterval(1000)
distckpt.load(state, "checkpoint")
"""


@pytest.mark.parametrize("rounds", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_a_process_may_end_right_after_a_load(rounds, tmp_path):
    """A thread of gloo that waits for the interpreter's lock while the process ends would abort it."""
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        environment = {**os.environ, "MEETING": str(folder / "meeting"), "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [Program(["-c", SAVE_AND_END], {**environment, "RANK": str(rank)}, folder) for rank in range(2)]
        errors = [rank.communicate()[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], errors

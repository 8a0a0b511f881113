"""What ranks know of each other's calls."""

from __future__ import annotations

import torch.distributed as dist

from distckpt._ranks.attendance import AttendanceLog


def test_ranks_in_different_calls_are_named_and_late_ones_are_not():
    store = dist.HashStore()
    logs = [AttendanceLog(store, rank, 4) for rank in range(4)]
    for log in logs:
        log.record("load")
    assert logs[0].different_calls() == ""
    for log in logs[:3]:
        log.record("save")
    assert (logs[0].late_ranks(), logs[0].different_calls()) == ([3], "")
    logs[3].record("the background save to /a b")
    expected = (
        "; all ranks must make the same calls, but rank 0 calls save, "
        "rank 3 calls the background save to /a b"
    )
    assert (logs[0].late_ranks(), logs[0].different_calls()) == ([], expected)

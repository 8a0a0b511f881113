"""The harness of these tests: processes that are used again fail as clearly as new ones, and none
is left.
"""

from __future__ import annotations

import logging
import os
import warnings

import psutil
import pytest

from tests.support.harness import kept_ranks, sum_over_ranks


def pid_and_sum(rank):
    return os.getpid(), sum_over_ranks(rank)


def print_and_die(rank):
    if rank == 1:
        print("last words", flush=True)
        os._exit(3)


def warn(rank):
    print("before the warning", flush=True)
    warnings.warn("a warning", stacklevel=1)


def log_a_warning(rank):
    logging.getLogger("distckpt").warning("logged")
    return len(logging.getLogger("distckpt").handlers)


@pytest.mark.parametrize(
    ("function", "words"), [(print_and_die, "last words"), (warn, "before the warning")]
)
def test_processes_are_used_again_until_one_fails(function, words):
    with kept_ranks() as run:
        first, second = run(pid_and_sum, 3), run(pid_and_sum, 2)
        assert [total for _, total in first] == [3] * 3
        assert [total for _, total in second] == [1] * 2
        assert {pid for pid, _ in second} < {pid for pid, _ in first}
        assert run(log_a_warning, 2) == run(log_a_warning, 2) == [1, 1]
        with pytest.raises(AssertionError, match=words):
            run(function, 3)
        third = run(pid_and_sum, 3)
        assert {pid for pid, _ in first}.isdisjoint(pid for pid, _ in third)
    assert not [pid for pid, _ in first + third if psutil.pid_exists(pid)]

"""Ranks that are killed at any moment of a move: the others raise, and atomic targets have all of
their old values or all of the new ones.

    python -m tests.faults.test_killed_moves 150

kills so many ranks of each kind, at random moments.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from tests.support.addresses import reserved_address
from tests.support.harness import error_of, launched
from tests.support.machines import on_machine
from tests.support.reference import has_routes

NUM_RANKS, VICTIM, NUM_TENSORS = 4, 3, 6
SHAPE = (24, 64)


def values(number: int, version: int) -> torch.Tensor:
    return torch.arange(24.0 * 64).view(SHAPE) + 10_000 * number + version


def state_of(rank: int, size: int, axis: int, version: int | None) -> dict[str, ShardedTensor]:
    state = {}
    for number in range(NUM_TENSORS):
        data = torch.full(SHAPE, -1.0) if version is None else values(number, version)
        part = data.chunk(size, axis)[rank].clone()
        state[f"{number}"] = ShardedTensor.from_rank_offsets(f"{number}", part, (axis, rank, size))
    return state


def version_of(state: dict[str, ShardedTensor]) -> int | str | None:
    """Return the one version that tensors have all their values of; None for none at all."""
    if all((shard.data == -1).all() for shard in state.values()):
        return None
    found = {
        float(value)
        for shard in state.values()
        for value in (shard.data - values(int(shard.key), 0)[shard.global_slice()]).unique()
    }
    return int(found.pop()) if len(found) == 1 else f"mixed: {found}"


def num_calls(function: Callable[[], object], fatal: int = -1) -> int:
    """Call a function, counting the calls of Python functions; die at the one with a number."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        if event == "call":
            count += 1
            if count == fatal:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def _redistribute(rank: int, moment: float, is_spread: bool) -> tuple[str, Any]:
    old, new = state_of(rank, NUM_RANKS, 0, 7), state_of(rank, NUM_RANKS, 1, None)
    if is_spread:
        # Each machine wants all that rank 0 has.
        old, new = state_of(0, 1, 0, 7) if rank == 0 else {}, state_of(0, 1, 0, None)

    def move() -> None:
        with on_machine(rank if is_spread else 0):
            distckpt.redistribute(old, new, atomic=True, max_inflight_bytes=4 * 4096)

    move()
    # With the plan of the first one.
    count = num_calls(move)
    assert version_of(new) == 7
    for shard in new.values():
        shard.data.fill_(-1)
    if rank == VICTIM:
        num_calls(move, fatal=max(1, int(moment * count)))
        return "", None
    return str(error_of(move)), version_of(new)


def check_redistribute(moment: float, is_spread: bool = False) -> None:
    with launched(_redistribute, NUM_RANKS, moment, is_spread, group_timeout=5.0) as launch:
        outcomes = launch.outcomes()
    for rank, outcome in enumerate(outcomes):
        if rank != VICTIM:
            assert outcome is not None
            assert outcome.error is None, (moment, outcome.error)
            error, version = outcome.value
            if error == "None":
                # This rank had all that it needed to know of the one that died.
                assert version == 7, moment
                continue
            # On a busy machine others may be named beside it, as late.
            assert re.search(r"Lost contact with .*rank 3\b", error), (moment, error)
            assert version in (None, 7), (moment, version)


def _route(rank: int, address: str, moment: float, is_spread: bool) -> list[Any]:
    old, new = state_of(0, 1, 0, 0), state_of(max(rank - 1, 0), 3, 0, None)
    if is_spread:
        new = state_of(0, 1, 0, None)
    with on_machine(rank if is_spread else 0):
        return _moved(rank, address, moment, old, new)


def _moved(
    rank: int,
    address: str,
    moment: float,
    old: dict[str, ShardedTensor],
    new: dict[str, ShardedTensor],
) -> list[Any]:
    sides = {"source": old, "num_targets": 3} if rank == 0 else {"target": new}
    route = distckpt.Route(address, **sides, atomic=True, timeout=20.0)
    seen: list[Any] = []
    count = 0
    for version in range(1, 6):
        for number, shard in enumerate(old.values()):
            shard.data.copy_(values(number, version))
        if rank == VICTIM and version == 4:
            num_calls(lambda: route.run(), fatal=max(1, int(moment * count)))
            break

        def move(version: int = version) -> None:
            nonlocal count
            count = num_calls(lambda: route.run(version=version))

        error = error_of(move)
        if error is not None:
            # The source had finished the version before this target noticed who died.
            assert version == 4, error
            assert "Version 4 is over" in str(error), error
        seen.append(version if rank == 0 or error is not None else version_of(new))
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    return seen


def check_route(moment: float, is_spread: bool = False) -> None:
    with (
        reserved_address() as address,
        launched(_route, NUM_RANKS, address, moment, is_spread, backend=None) as launch,
    ):
        outcomes = launch.outcomes()
    for rank, outcome in enumerate(outcomes):
        if rank != VICTIM:
            assert outcome is not None
            assert outcome.error is None, (moment, outcome.error)
            assert outcome.value == [1, 2, 3, 4, 5], moment
    assert outcomes[0] is not None
    assert "target" in " ".join(outcomes[0].warnings_logged)


MOMENTS = np.random.default_rng(0).random(20).tolist()


def cases(moment: float) -> pytest.MarkDecorator:
    """One moment for every run, many for a slow one; with several machines, and without."""
    found = [(moment, False), (moment, True)]
    slow = [(each, number % 2 == 0) for number, each in enumerate(MOMENTS)]
    marked = [pytest.param(*case, marks=pytest.mark.slow) for case in slow]
    return pytest.mark.parametrize(("moment", "is_spread"), [*found, *marked])


@cases(0.6)
def test_redistribute(moment, is_spread):
    check_redistribute(moment, is_spread)


@has_routes
@cases(0.7)
def test_route(moment, is_spread):
    check_route(moment, is_spread)


if __name__ == "__main__":
    for number, moment in enumerate(np.random.default_rng(1).random(int(sys.argv[1])).tolist()):
        for is_spread in (False, True):
            check_redistribute(moment, is_spread)
            check_route(moment, is_spread)
        print(number, moment, flush=True)

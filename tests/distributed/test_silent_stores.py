"""The process that hosts a store is stopped, or cut off: nothing ends its connections, and others
must not wait for its answers for ever.
"""

from __future__ import annotations

import os
import signal
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import distckpt
from distckpt import CheckpointingException, RankFailedError
from tests.support.addresses import reserved_address
from tests.support.harness import ask_parent, error_of, launched, signal_parent
from tests.support.reference import has_routes

TIMEOUT = 4.0


@pytest.fixture
def address():
    with reserved_address() as reserved:
        yield reserved


def errors_of_others(launch, num_ranks):
    """Stop rank 0, let the others go on, and return how they end."""
    for rank in range(num_ranks):
        launch.wait_for_signal(rank)
    others = range(1, num_ranks)
    os.kill(launch.processes[0].pid, signal.SIGSTOP)
    for rank in others:
        launch.answer(rank)
    launch.wait_for_end(*others)
    launch.kill(0)
    return launch.values()[1:]


def _redistribute(rank: int, address: str) -> str:
    # Rank 0 hosts the store, as without `torchrun`.
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}",
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=TIMEOUT),
    )
    weight, other = torch.ones(4), torch.zeros(4)
    distckpt.redistribute({"weight": weight}, {"weight": other})
    ask_parent()
    error = error_of(distckpt.redistribute, {"weight": weight}, {"weight": other})
    assert isinstance(error, RankFailedError)
    return str(error)


def test_ranks_raise_when_the_host_of_their_store_is_stopped(address):
    with launched(_redistribute, 3, address, backend=None) as launch:
        for text in errors_of_others(launch, 3):
            assert "Lost contact with the host of the process group's store, usually rank 0" in text


def _take(rank: int, address: str) -> str:
    if rank == 0:
        route = distckpt.Route(address, source={"weight": torch.ones(4)}, timeout=TIMEOUT)
        route.run(0)
        ask_parent()
    route = distckpt.Route(address, target={"weight": torch.zeros(4)}, timeout=TIMEOUT)
    route.run()
    ask_parent()
    error = error_of(route.run)
    assert isinstance(error, RankFailedError)
    # Nobody is told, and nobody waits.
    route.close()
    return str(error)


@has_routes
def test_a_target_raises_when_the_trainer_is_stopped(address):
    with launched(_take, 2, address, backend=None) as launch:
        (text,) = errors_of_others(launch, 2)
    assert "source rank 0, which hosts the address" in text
    assert "has not answered" in text


def _reach(rank: int, address: str) -> str:
    error = error_of(distckpt.Route, address, target={"weight": torch.zeros(4)}, timeout=TIMEOUT)
    assert isinstance(error, CheckpointingException)
    signal_parent()
    return str(error)


@has_routes
def test_a_server_that_says_nothing_is_not_waited_for():
    """Another program has the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with launched(_reach, 1, address, backend=None) as launch:
            assert "did not answer within 4 s" in launch.values()[0]

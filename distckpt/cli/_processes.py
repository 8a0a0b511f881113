"""Runs of a function in fresh processes that form a process group.

The processes are of this machine.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import ProcessException, start_processes

from distckpt._base.errors import CheckpointingException
from distckpt._ranks.groups import gloo_group


def run_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any) -> Any:
    """Call `function(rank, *arguments)` in processes that form a gloo group.

    Return its result of rank 0. If one of them fails, or this call is interrupted, all are ended.
    Function and arguments are pickled.
    """
    results = get_context("spawn").SimpleQueue()
    result = None
    with tempfile.TemporaryDirectory() as folder:
        work = (num_ranks, f"{folder}/rendezvous", results, function, arguments)
        ranks = start_processes(  # type: ignore[no-untyped-call]
            _run_rank, work, num_ranks, join=False
        )
        try:
            is_done = False
            while not is_done:
                is_done = ranks.join(timeout=0.2)
                while not results.empty():
                    result = results.get()
        except ProcessException as error:
            cause = str(error).strip().splitlines()[-1]
            raise CheckpointingException(f"rank {error.error_index} failed: {cause}") from error
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
            results.close()
    return result


def _run_rank(
    rank: int,
    num_ranks: int,
    rendezvous: str,
    results: Any,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    os.setsid()  # Ctrl-C reaches only the parent, which ends the ranks
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel sends it when the parent is gone
    torch.set_num_threads(1)
    with gloo_group(rank, num_ranks, rendezvous):
        result = function(rank, *arguments)
    if rank == 0:
        results.put(result)

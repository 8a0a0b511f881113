"""Ranks for a benchmark: fresh processes that form a gloo process group, and that are gone afterwards in any case."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, cast

import torch
import torch.distributed as dist

_PR_SET_PDEATHSIG = 1
# How long a killed rank may take to be gone after others lost their connection to it.
_FAILURE_SECONDS = 3.0
_to_parent: list[Connection] = []


class RankError(Exception):
    """Report that a rank failed; its traceback is in the notes.

    Attributes:
        rank: which.
        cause: the type and text of its exception, or how it ended.
        last: what it had sent last.
    """

    def __init__(self, rank: int, cause: str, last: Any) -> None:
        super().__init__(f"rank {rank}: {cause}")
        self.rank = rank
        self.cause = cause
        self.last = last


def send(message: Any) -> None:
    """Hand something that can be pickled to `receive` of the process that started the ranks."""
    _to_parent[0].send(("message", message))


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    receive: Callable[[int, Any], object] = lambda rank, message: None,
) -> None:
    """Call `function(rank, *arguments)` in `num_ranks` fresh processes that form a gloo process group.

    When one fails, or this call is interrupted, all are ended, with the processes that they have started.

    Args:
        function: to be found by its name in its module.
        num_ranks: how many processes.
        arguments: that can be pickled.
        receive: called with the rank and what it `send`s.

    Raises:
        RankError: a rank failed.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    connections: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(num_ranks):
                reader, writer = context.Pipe(duplex=False)
                connections.append(reader)
                work = (rank, num_ranks, f"{folder}/rendezvous", writer, os.getpid(), function, arguments)
                process = context.Process(target=_run_rank, args=work)
                process.start()
                processes.append(process)
                writer.close()
            _listen(processes, connections, receive)
        finally:
            _end(processes)
            for connection in connections:
                connection.close()


def _listen(
    processes: Sequence[SpawnProcess], connections: Sequence[Connection], receive: Callable[[int, Any], object]
) -> None:
    """Take messages until all ranks are done."""
    running: dict[Any, int] = {connection: rank for rank, connection in enumerate(connections)}
    last: dict[int, Any] = {}
    while running:
        # Now and then see whether a rank died: what it started may hold its end of the pipe open.
        ready = wait(list(running), timeout=0.5)
        dead = [c for c, rank in running.items() if processes[rank].exitcode is not None and not c.poll()]
        for connection in [*ready, *dead]:
            rank = running.get(connection)
            if rank is None:
                continue
            kind, message = _receive(connection, processes[rank])
            if kind == "message":
                last[rank] = message
                receive(rank, message)
            elif kind == "failed":
                # When a rank is killed, others may report their lost connections first.
                killed = _killed(processes)
                if killed is not None:
                    rank, message = killed, (_end_of(processes[killed]), "")
                cause, trace = message
                error = RankError(rank, cause, last.get(rank))
                error.__notes__ = [trace]
                raise error
            else:
                del running[connection]


def _receive(connection: Any, process: SpawnProcess) -> tuple[str, Any]:
    try:
        if process.exitcode is None or connection.poll():
            kind, message = connection.recv()
            return kind, message
    except EOFError:
        pass
    process.join()
    return "failed", (_end_of(process), "")


def _killed(processes: Sequence[SpawnProcess]) -> int | None:
    """Return the first rank that a signal ended, within the time that a failure needs to reach all ranks."""
    deadline = time.monotonic() + _FAILURE_SECONDS
    running = {process.sentinel: process for process in processes}
    # A connection is lost before the process that held it can be waited for, and the rank that tells may end first.
    while running and (ended := wait(list(running), timeout=max(0.0, deadline - time.monotonic()))):
        for sentinel in ended:
            running.pop(cast(int, sentinel)).join()
        if any((process.exitcode or 0) < 0 for process in processes):
            break
    return next((rank for rank, process in enumerate(processes) if (process.exitcode or 0) < 0), None)


def _end_of(process: SpawnProcess) -> str:
    return f"ended with exit code {process.exitcode}"


def _end(processes: Sequence[SpawnProcess]) -> None:
    """End what is left of the ranks and of the processes they have started."""
    for process in processes:
        # Each rank leads a process group, unless it has had no time for that yet.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
    for process in processes:
        process.join()
        process.close()


def _run_rank(
    rank: int,
    num_ranks: int,
    rendezvous: str,
    writer: Connection,
    parent: int,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    os.setsid()  # Ctrl-C reaches the parent only, which ends the ranks
    _end_with(parent)
    _to_parent[:] = [writer]
    torch.set_num_threads(1)
    # All ranks are on this machine, whatever its name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
        function(rank, *arguments)
        dist.destroy_process_group()
    except BaseException as error:
        writer.send(("failed", (f"{type(error).__name__}: {error}", traceback.format_exc())))
        writer.close()
        raise SystemExit(1) from None
    writer.send(("done", None))


def _end_with(parent: int) -> None:
    """Have the kernel end this process when its parent is gone."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            raise SystemExit(1)

"""Runs a function on several real processes that form a gloo process group, and brings back what
each made of it.

Ranks are forked from one clean process per test session that has imported torch already, so that a
rank starts in milliseconds. The store through which ranks find each other lives in the test
process, as torchrun's lives in its
agent: it survives the death of any rank.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

os.environ.setdefault("OMP_NUM_THREADS", "1")

GROUP_TIMEOUT = 60.0
"""Seconds after which a rank that waits for another one gives up; a hang shows as an error
instead.
"""
OVERALL_TIMEOUT = 240.0
"""Seconds after which what is left of a launch is killed."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.preloaded"])
ROOT = Path(__file__).parents[2]

_starting = threading.Lock()
_to_parent: Any = None


class Outcome(NamedTuple):
    """What came of one rank: the value its function returned, or the text of the error it ended
    with.
    """

    value: Any
    error: str | None
    warnings_logged: list[str]


class Setting(NamedTuple):
    """How the ranks of a launch find each other; without a backend they are independent
    processes.
    """

    num_ranks: int
    port: int
    backend: str | None
    group_timeout: float


class Job(NamedTuple):
    """What one rank of a launch does; what it prints goes to `log`."""

    log: str
    rank: int
    setting: Setting
    function: Callable[..., Any]
    args: Sequence[Any]


class RankProcess(NamedTuple):
    """A process that runs jobs, one after another."""

    process: Any
    connection: Any


class Launch:
    """Running ranks, from the point of view of the test.

    Args:
        jobs: one for each rank.
        idle: processes to use before others are started, and to which those that are done are
            added; None starts a process for every rank and ends it.
    """

    def __init__(self, jobs: Sequence[Job], idle: list[RankProcess] | None) -> None:
        self._logs = [Path(job.log) for job in jobs]
        self._outcomes: dict[int, Outcome] = {}
        self._signals: list[list[Any]] = [[] for _ in jobs]
        self._running = set(range(len(jobs)))
        self._killed: set[int] = set()
        self._deadline = time.monotonic() + OVERALL_TIMEOUT
        self._idle = idle
        self.processes: list[Any] = []
        self._connections: list[Any] = []
        for job in jobs:
            process, connection = _begin(job, idle)
            self.processes.append(process)
            self._connections.append(connection)

    def wait_for_signal(self, rank: int) -> Any:
        """Return what the rank passes to `signal_parent`; an AssertionError when it ends without
        doing so.
        """
        while not self._signals[rank]:
            assert rank in self._running, (
                f"rank {rank} ended: {self._outcomes.get(rank)}\n{self._log(rank)}"
            )
            self._pump(f"waiting for a signal of rank {rank}")
        return self._signals[rank].pop(0)

    def answer(self, rank: int, value: Any = None) -> None:
        """Let a rank go on that waits for the answer to its signal."""
        self._connections[rank].send(value)

    def kill(self, *ranks: int) -> None:
        """End ranks with SIGKILL, and return when they are gone."""
        self._killed.update(ranks)
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGKILL)
        for rank in ranks:
            self.processes[rank].join()

    def lose(self, *victims: int) -> list[Any]:
        """Kill ranks when all have given a signal, answer the others, and return `values()`."""
        ranks = range(len(self.processes))
        for rank in ranks:
            self.wait_for_signal(rank)
        self.kill(*victims)
        for rank in set(ranks) - set(victims):
            self.answer(rank)
        return self.values()

    def wait_for_end(self, *ranks: int) -> None:
        """Wait until the functions of these ranks have returned, or the ranks have died."""
        while self._running.intersection(ranks):
            self._pump(f"waiting for ranks {ranks} to end")

    def wait_for_any_end(self, *ranks: int) -> None:
        """Wait until one of these ranks has ended; an AssertionError when it died."""
        while self._running.issuperset(ranks):
            self._pump(f"waiting for one of ranks {ranks} to end")
        for rank in set(ranks) - self._running:
            assert rank in self._outcomes, f"rank {rank} died\n{self._log(rank)}"

    def outcomes(self) -> list[Outcome | None]:
        """Wait for all ranks; None stands for one that was killed."""
        self.wait_for_end(*range(len(self.processes)))
        return [self._outcomes.get(rank) for rank in range(len(self.processes))]

    def values(self) -> list[Any]:
        """Wait for all ranks and return what their functions returned; None for a rank that was
        killed.

        The first rank that ends with an error ends the wait, since the others may hang for want of
        it.
        """
        while self._running:
            self._pump("waiting for the ranks to end")
            for rank, outcome in self._outcomes.items():
                assert outcome.error is None, f"rank {rank}: {outcome.error}\n{self._log(rank)}"
        for rank in set(range(len(self.processes))) - set(self._outcomes) - self._killed:
            raise AssertionError(f"rank {rank} died\n{self._log(rank)}")
        outcomes = [self._outcomes.get(rank) for rank in range(len(self.processes))]
        return [None if outcome is None else outcome.value for outcome in outcomes]

    def close(self) -> None:
        """Let the ranks that are done go, or keep them idle if all have succeeded; kill all
        others.
        """
        ended = [rank for rank in self._outcomes if self.processes[rank].is_alive()]
        is_kept = self._idle is not None and len(ended) == len(self.processes)
        is_kept = is_kept and not any(outcome.error for outcome in self._outcomes.values())
        for rank in ended:
            self._connections[rank].send("rest" if is_kept else "end")
        processes = [
            RankProcess(*pair) for pair in zip(self.processes, self._connections, strict=True)
        ]
        if is_kept:
            self._idle += processes
            return
        for rank, process in enumerate(processes):
            _end(process, 10 if rank in self._outcomes else 0)

    def _pump(self, doing: str) -> None:
        """Take in what running ranks have sent, after waiting for at least one of them to say
        something or to end.
        """
        sources = {self._connections[rank]: rank for rank in self._running}
        remaining = max(0.0, self._deadline - time.monotonic())
        ready = multiprocessing.connection.wait(list(sources), remaining) if remaining else []
        logs = (
            ""
            if ready
            else "".join(f"\n--- rank {rank}\n{self._log(rank)}" for rank in self._running)
        )
        assert ready, f"timed out {doing}; ranks {sorted(self._running)} were still running{logs}"
        for connection in ready:
            rank = sources[connection]
            try:
                kind, content = connection.recv()
            except (EOFError, ConnectionResetError):
                self._running.discard(rank)
                continue
            if kind == "signal":
                self._signals[rank].append(content)
            else:
                self._outcomes[rank] = pickle.loads(content)
                self._running.discard(rank)

    def _log(self, rank: int) -> str:
        return (
            self._logs[rank].read_text(errors="replace")[-6000:]
            if self._logs[rank].exists()
            else ""
        )


@contextmanager
def launched(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    backend: str | None = "gloo",
    group_timeout: float = GROUP_TIMEOUT,
    idle: list[RankProcess] | None = None,
) -> Iterator[Launch]:
    """Start `function(rank, *args)` on ranks 0, 1, ... and hand out the running launch; none
    outlives the block.

    Args:
        function: at the top level of a module.
        num_ranks: how many processes.
        args: further arguments.
        backend: of the default process group; None starts processes that have none.
        group_timeout: of the process group, in seconds.
        idle: see `Launch`.
    """
    fork_context()
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as log_dir:
        setting = Setting(num_ranks, store.port, backend, group_timeout)
        jobs = [
            Job(f"{log_dir}/rank{rank}.log", rank, setting, function, args)
            for rank in range(num_ranks)
        ]
        launch = Launch(jobs, idle)
        try:
            yield launch
        finally:
            launch.close()
    del store


def run(function: Callable[..., Any], num_ranks: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Run `function(rank, *args)` on all ranks and return what it returned, by rank; see
    `launched`.
    """
    with launched(function, num_ranks, *args, **kwargs) as launch:
        return launch.values()


@contextmanager
def kept_ranks() -> Iterator[Callable[..., list[Any]]]:
    """Hand out a `run` whose processes are used again, for functions that leave nothing behind on a
    rank.

    Every run has another process group. After an error new processes are started; at the end of the
    block all end.
    """
    idle: list[RankProcess] = []
    try:
        yield functools.partial(run, idle=idle)
    finally:
        for rank in idle:
            rank.connection.send(None)
        for rank in idle:
            _end(rank, 10)


def signal_parent(value: Any = None) -> None:
    """On a rank: tell the test that this point was reached."""
    _to_parent.send(("signal", value))


def ask_parent(value: Any = None) -> Any:
    """On a rank: tell the test that this point was reached, and wait for its answer (for ever, if
    it kills us).
    """
    signal_parent(value)
    return _to_parent.recv()


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> BaseException | None:
    """On a rank: call a function and return the error it raises, None when it does not."""
    try:
        function(*args, **kwargs)
    except BaseException as error:
        return error
    return None


def sum_over_ranks(value: int, group: Any = None) -> int:
    """On a rank: all_reduce a number, which shows that the process group works and the ranks are in
    step.
    """
    total = torch.tensor([value])
    dist.all_reduce(total, group=group)
    return int(total)


def fork_context() -> Any:
    """Return what starts processes by forking one that has imported torch."""
    with _starting:
        _start_server()
    return _context


@functools.cache
def _start_server() -> None:
    """Start the process that others are forked from where it finds what it preloads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        forkserver.ensure_running()


def _begin(job: Job, idle: list[RankProcess] | None) -> RankProcess:
    """Run a job in an idle process, or in a new one."""
    if idle:
        rank = idle.pop(0)
        rank.connection.send(job)
        return rank
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_run_jobs, args=(theirs, job))
    process.daemon = True
    process.start()
    theirs.close()
    return RankProcess(process, ours)


def _end(rank: RankProcess, seconds: float) -> None:
    """Wait for a process to end, and kill it after some seconds."""
    if seconds:
        rank.process.join(seconds)
    rank.process.kill()
    rank.process.join()
    rank.process.close()
    rank.connection.close()


def _run_jobs(connection: Any, job: Job | None) -> None:
    global _to_parent
    _to_parent = connection
    torch.set_num_threads(1)
    while job is not None:
        connection.send(("outcome", _run_job(job)))
        # No rank closes its connections while another one may still need it.
        is_last = connection.recv() == "end"
        if dist.is_initialized():
            dist.destroy_process_group()
        job = None if is_last else connection.recv()


def _run_job(job: Job) -> bytes:
    descriptor = os.open(job.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    warnings.resetwarnings()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)  # of torch 2.6
    logged: list[str] = []
    watch = _Watch(logged)
    logging.getLogger("distckpt").handlers[:] = [watch]
    value, error = None, None
    setting = job.setting
    try:
        if setting.backend is not None:
            store = dist.TCPStore("127.0.0.1", setting.port, None, False, wait_for_workers=False)
            # A busy machine may start a process later than a test's group waits for it.
            store.set(f"started/{job.rank}", "")
            store.wait([f"started/{rank}" for rank in range(setting.num_ranks)])
            dist.init_process_group(
                setting.backend,
                store=store,
                rank=job.rank,
                world_size=setting.num_ranks,
                timeout=timedelta(seconds=setting.group_timeout),
            )
        value = job.function(job.rank, *job.args)
    except BaseException:
        error = traceback.format_exc()
    try:
        content = pickle.dumps(Outcome(value, error, logged))
        pickle.loads(content)
    except Exception:
        content = pickle.dumps(
            Outcome(None, f"{error or ''}\ncannot be sent: {traceback.format_exc()}", logged)
        )
    return content


class _Watch(logging.Handler):
    """Keeps the text of warnings and errors that distckpt logs."""

    def __init__(self, logged: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._logged = logged

    def emit(self, record: logging.LogRecord) -> None:
        self._logged.append(f"{record.levelname}: {record.getMessage()}")

"""Sizes of reads and writes, their threads, and their progress."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeAlias, TypeVar

from distckpt._base.interrupts import run_handlers, run_operation, running_operation

PART_BYTES = 16 << 20
"""Minimum size of a part: larger objects are put into stores in parts."""
UNIT_BYTES = 8 << 20
"""Bytes that one thread moves at a time; bounce buffers have this size."""
NUM_THREADS = max(2, min(4, os.cpu_count() or 1))
"""Threads that keep a disk busy while bytes are hashed. More threads than cores would only take
turns.
"""
DEFAULT_INFLIGHT_BYTES = 256 << 20
"""Default memory for data that is being moved."""
NUM_REQUESTS = 10
"""Requests to an object store at the same time: they wait for the network, not for a processor."""
SIGNAL_SECONDS = 0.2
"""Longest delay of a signal's handler while threads work."""

_Item = TypeVar("_Item")


class Pool(ThreadPoolExecutor):
    """A pool whose calling thread works if no thread can start.

    No thread starts beyond the limits on processes and memory, nor, in some versions of Python,
    while the interpreter shuts down, when background saves still go on.
    """

    def submit(
        self, function: Callable[..., Any], /, *arguments: Any, **options: Any
    ) -> Future[Any]:
        """Call a function in a thread of the pool, or here."""
        future: Future[Any] = Future()
        # A pool that could not start a thread has queued the call for its other threads
        # nevertheless.
        tickets = [None]
        operation = running_operation() or "work in another thread"

        def call() -> None:
            try:
                tickets.pop()
            except IndexError:
                return
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(
                    run_operation(operation, partial(function, *arguments, **options))
                )
            except BaseException as error:
                # Without the frame of this function, which refers to the future.
                future.set_exception(
                    error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
                )

        try:
            super().submit(call)
        except (RuntimeError, MemoryError):
            call()
        return future


def run_threads(
    function: Callable[[_Item], Any],
    items: Iterable[_Item],
    num_threads: int = NUM_THREADS,
    *,
    in_stretches: bool = False,
) -> None:
    """Call `function` on every item in a few threads.

    The first error stops the rest and is raised. Threads take one item after the other, or,
    `in_stretches`, many that follow one another.
    """
    work = list(items)
    if len(work) <= 1 or num_threads == 1:
        for item in work:
            run_handlers()
            function(item)
        return
    num_threads = min(num_threads, len(work))
    # next() on this is one step for the interpreter, so threads need no lock; a future for each
    # item would cost more.
    batches: Sequence[Sequence[_Item]] = list(zip(work))
    if in_stretches:
        batches = _stretches(work, num_threads)
    upcoming = iter(batches)
    errors: list[BaseException] = []

    def take_items() -> None:
        for item in itertools.chain.from_iterable(upcoming):
            if errors:
                return
            try:
                function(item)
            except BaseException as error:
                errors.append(error)

    with Pool(num_threads, thread_name_prefix="distckpt-io") as pool:
        running = [pool.submit(take_items) for _ in range(num_threads)]
        try:
            wait_for_all(running)
        except BaseException as error:
            # Such as Ctrl-C, which reaches the waiting thread only.
            errors.append(error)
            raise
    if errors:
        raise errors[0]


def _stretches(items: Sequence[_Item], num_threads: int) -> list[Sequence[_Item]]:
    """Divide items into shorter and shorter stretches.

    Threads then end at the same time. A stretch takes items from both of its halves by turns: a
    disk reads ahead in one while a thread reads the other.
    """
    stretches: list[Sequence[_Item]] = []
    first = 0
    while first < len(items):
        end = first + max(1, (len(items) - first) // (2 * num_threads))
        stretch = list(items[first:end])
        half = (len(stretch) + 1) // 2
        stretch[::2] = items[first : first + half]
        stretch[1::2] = items[first + half : end]
        stretches.append(stretch)
        first = end
    return stretches


def wait_for_all(futures: Sequence[Future[Any]]) -> None:
    """Wait until all have ended or one has failed.

    Handlers of signals run meanwhile, see `interrupts`.
    """
    while True:
        done, unfinished = wait(futures, SIGNAL_SECONDS, FIRST_EXCEPTION)
        run_handlers()
        if not unfinished or any(future.exception() for future in done):
            return


def num_threads_within(max_inflight_bytes: int) -> int:
    """Return the number of threads within a limit, at least one."""
    return max(1, min(NUM_THREADS, max_inflight_bytes // UNIT_BYTES))


def num_requests_within(max_inflight_bytes: int) -> int:
    """Return the number of simultaneous requests to an object store.

    Each has the memory of three units.
    """
    return max(1, min(NUM_REQUESTS, max_inflight_bytes // (3 * UNIT_BYTES)))


Progress: TypeAlias = Callable[[int], None]
"""Function that several threads call with numbers of bytes moved."""


class ProgressCounter:
    """The sum of the bytes that threads have moved, with its report.

    The sum never exceeds the total: reads may cover a little more than was requested.
    """

    def __init__(self, report: Callable[[int, int], object] | None, total_bytes: int) -> None:
        self._report = report
        self._total = total_bytes
        self._done = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count bytes that have been moved."""
        if self._report is None:
            return
        with self._lock:
            self._done = min(self._done + num_bytes, self._total)
            self._report(self._done, self._total)

    def finish(self) -> None:
        """Report the total, unless it has been reported."""
        if self._done < self._total:
            self.add(self._total - self._done)

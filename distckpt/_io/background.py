"""Tasks that run one after the other in a background thread.

All saves share one thread. Tasks that are unfinished when the process ends are waited for.

A thread rather than a process: it shares memory, leaves nothing in /dev/shm, and hardly ever holds
the interpreter's lock while it moves bytes.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import logging
import os
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from distckpt._base.errors import CheckpointingException
from distckpt._commit import posix

logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""Seconds that the end of the process waits for abandoned tasks."""

_Result = TypeVar("_Result")


class Task(concurrent.futures.Future[_Result]):
    """A task of the background thread: a future that cannot be cancelled.

    Attributes:
        name: its name in messages.
        location: location of the checkpoint that it writes, if any.
        exit_timeout: seconds that the end of the process waits for it; with 0 it is abandoned then.
        is_abandoned: set when it should stop as soon as it can.
    """

    def __init__(
        self,
        function: Callable[[], _Result],
        name: str,
        location: str | None,
        exit_timeout: float,
        is_abandoned: threading.Event | None = None,
    ) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # it cannot be cancelled
        self._function: Callable[[], _Result] | None = function
        self.name = name
        self.location = location
        self.exit_timeout = exit_timeout
        self.is_abandoned = is_abandoned or threading.Event()

    def disown(self) -> None:
        """In a forked process, forget the parent's task and its locks."""
        super().__init__()
        self.set_running_or_notify_cancel()
        self.set_exception(
            CheckpointingException(f"{self.name} goes on in the process that forked this one.")
        )

    def result(self, timeout: float | None = None) -> _Result:
        """Wait until the task has ended; return its result or raise its error."""
        try:
            return super().result(timeout)
        except concurrent.futures.TimeoutError:
            # The task itself may have raised one.
            if self.done():
                raise
        raise TimeoutError(
            f"{self.name} is not done after {timeout} s and goes on in the background"
        )

    def run(self) -> None:
        """Run the task, in the background thread."""
        # The function's references are of no use afterwards, and may be large.
        function = self._function
        self._function = None
        try:
            if self.is_abandoned.is_set():
                raise CheckpointingException(f"{self.name} was abandoned before it began.")
            assert function is not None
            result = function()
        except BaseException as error:
            del function
            _clear_frames(error)
            self.set_exception(error)
        else:
            del function
            self.set_result(result)


def _clear_frames(error: BaseException | None) -> None:
    """Clear the frames of tracebacks, which would keep the task's data alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Worker:
    """A background thread, which starts with its first task."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.lock = threading.Lock()
        self.pending: list[Task[Any]] = []
        self._queue: queue.SimpleQueue[Task[Any] | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.is_closed = False
        _workers.add(self)

    def submit(self, task: Task[Any]) -> None:
        """Run a task after all earlier tasks."""
        with self.lock:
            earlier = list(self.pending)
            self.pending.append(task)
            has_thread = not self.is_closed and (self.thread is not None or self._start_thread())
            if has_thread:
                self._queue.put(task)
        if not has_thread:
            concurrent.futures.wait(earlier, task.exit_timeout)
            self._run(task)
            if self.is_closed and task.exit_timeout > 0 and task.exception():
                _exit_code.is_failure = True

    def close(self) -> None:
        """Run later tasks in the threads that submit them.

        The background thread is not waited for any more.
        """
        with self.lock:
            self.is_closed = True

    def _start_thread(self) -> bool:
        # As a daemon it does not keep the process from ending.
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            logger.warning("no thread can be started (%s): saved before this returns", error)
            return False
        self.thread = thread
        return True

    def end(self) -> None:
        """End the thread after all earlier tasks."""
        self.close()
        self._queue.put(None)

    def _work(self) -> None:
        while True:
            task = self._queue.get()
            if task is None:
                return
            self._run(task)

    def _run(self, task: Task[Any]) -> None:
        task.run()
        with self.lock:
            self.pending.remove(task)

    def unfinished(self) -> list[Task[Any]]:
        """Return the unfinished tasks in order.

        The list is empty in the thread itself, which cannot wait for itself.
        """
        if threading.current_thread() is self.thread:
            return []
        with self.lock:
            return [task for task in self.pending if not task.done()]


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
"""All workers: the end of the process waits for their tasks."""
_worker = Worker("distckpt-background")


def submit(task: Task[Any]) -> None:
    """Run a task after all earlier tasks."""
    _worker.submit(task)


def run_in_order(
    function: Callable[[], _Result],
    name: str,
    location: str | None,
) -> _Result:
    """Run a function after all earlier tasks, and return its result."""
    if threading.current_thread() is _worker.thread:
        return function()
    task = Task(function, name, location, exit_timeout=0.0)
    submit(task)
    return task.result()


def pending_tasks() -> list[Task[Any]]:
    """Return the unfinished saves in order, none in their own thread."""
    return _worker.unfinished()


def wait_for_location(location: str) -> None:
    """Wait until no task writes to a location; errors are not raised here."""
    resolved = posix.resolve(location)
    concurrent.futures.wait([task for task in pending_tasks() if task.location == resolved])


def wait_for_all() -> None:
    """Wait until all tasks have ended; errors are not raised here."""
    concurrent.futures.wait(pending_tasks())


class _ExitCode:
    """Sets the process's exit code to 1 if a save was lost.

    It does so when it is destroyed: Python clears its modules after all exit functions, so the exit
    functions of other libraries have run.
    """

    is_failure = False

    def __del__(self, end_process: Callable[[int], object] = os._exit) -> None:
        if self.is_failure:
            end_process(1)


_exit_code = _ExitCode()


def _abandon(tasks: list[Task[Any]]) -> None:
    for task in tasks:
        # Other tasks are not saves: nothing is lost with them.
        if task.exit_timeout > 0 or task.location is not None:
            logger.warning(
                "the process ends: %s is abandoned, nothing of it is committed", task.name
            )
        task.is_abandoned.set()
    concurrent.futures.wait(tasks, STOP_SECONDS)


def _at_exit() -> None:
    """Wait for unfinished tasks, each up to its `exit_timeout`; abandon the rest."""
    started = time.monotonic()
    for worker in _workers:
        worker.close()
    tasks = _all_unfinished()
    try:
        for task in tasks:
            if task.exit_timeout > 0:
                logger.info(
                    "the process ends while %s goes on: waiting up to %.0f s",
                    task.name,
                    task.exit_timeout,
                )
            concurrent.futures.wait(
                [task], max(0.0, started + task.exit_timeout - time.monotonic())
            )
    finally:
        _abandon(_all_unfinished())
        # An exit_timeout of 0 asks for the save to be abandoned.
        for task in tasks:
            if task.exit_timeout > 0 and (not task.done() or task.exception()):
                _exit_code.is_failure = True


def _all_unfinished() -> list[Task[Any]]:
    tasks: list[Task[Any]] = []
    for worker in _workers:
        tasks += worker.unfinished()
    return tasks


def _forget_after_fork() -> None:
    # A forked process does not have its parent's threads, and does not do their work.
    global _worker
    for worker in list(_workers):
        for task in worker.pending:
            task.disown()
        # Its lock may be taken for ever.
        worker.is_closed = True
        worker.pending.clear()
    _worker = Worker("distckpt-background")
    _exit_code.is_failure = False


# Thread pools refuse work by the time that ordinary exit functions run, so this one must run before
# pools are closed. Functions registered later run earlier, and importing concurrent.futures.thread
# has registered the closing.
try:
    getattr(threading, "_register_atexit", atexit.register)(_at_exit)
except RuntimeError:
    # The main thread has ended before this package was imported.
    _worker.close()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)

"""Threads with process groups of their own, for copies and uploads."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from distckpt._base.errors import CheckpointingException
from distckpt._base.interrupts import run_operation
from distckpt._io.background import Task, Worker
from distckpt._ranks.collectives import Ranks

logger = logging.getLogger(__name__)


class PassedOverError(CheckpointingException):
    """A task that all ranks give up alike; they stay in step."""


class Lane:
    """A thread whose tasks all ranks run together, one after the other.

    A failed task is logged and noted; the next one runs all the same, unless a rank was lost.

    Attributes:
        is_broken: whether a rank was lost, so that no task runs any more.
        running: the step that a task works on; -1 without one.
        waiting: the step whose turn comes last; -1 without one.
    """

    def __init__(self, name: str, ranks: Ranks, exit_timeout: float) -> None:
        self._name = name
        self._ranks = ranks
        self._exit_timeout = exit_timeout
        self._worker = Worker(f"distckpt-{name}")
        self.is_broken = False
        self.running = -1
        self.waiting = -1

    def submit(
        self, step: int, work: Callable[[Ranks], None], note_problem: Callable[[str], None]
    ) -> None:
        """Run a collective task about a step after all earlier ones.

        It is passed over if there is a later one by the time of its turn.
        """
        if self._worker.is_closed:
            # Other ranks may not have reached their end yet, and would run it in another thread.
            note_problem(f"no {self._name}: the process ended without close() of the manager")
            return
        self.waiting = step
        run = partial(self._run, step, work, note_problem)
        self._worker.submit(Task(run, f"the {self._name} of step {step}", None, self._exit_timeout))

    def _run(
        self, step: int, work: Callable[[Ranks], None], note_problem: Callable[[str], None]
    ) -> None:
        title = f"the {self._name} of step {step}"
        _give_way()
        try:
            if self.is_broken:
                raise CheckpointingException("not started after a rank was lost: restart the job")
            run_operation(title, partial(self._run_in_turn, step, work))
        except PassedOverError as error:
            if self._ranks.is_coordinator:
                logger.warning("%s: %s", title, error)
            note_problem(str(error))
        except Exception as error:
            self.is_broken |= not self._ranks.are_in_step_after(error)
            if self._ranks.is_coordinator or self.is_broken:
                logger.error("%s failed: %s: %s", title, type(error).__name__, error)
            note_problem(f"{type(error).__name__}: {error}")
        finally:
            self.running = -1
            if self.waiting == step:
                self.waiting = -1

    def _run_in_turn(self, step: int, work: Callable[[Ranks], None]) -> None:
        newest = self._ranks.decide_json("choose the next step", lambda: self.waiting)
        if newest != step:
            text = f"given up, since step {newest} waits: they take longer than a save"
            raise PassedOverError(text)
        self.running = step
        work(self._ranks)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for all tasks, None without a limit; return False if some are not done in time."""
        return not concurrent.futures.wait(self._worker.unfinished(), seconds).not_done

    def abandon(self) -> None:
        """Stop the running task as soon as possible; start no other."""
        self.is_broken = True
        self._ranks.stop.set()
        for task in self._worker.unfinished():
            task.is_abandoned.set()
        self._worker.end()


def _give_way() -> None:
    """Let training go first where it wants the same processors; threads begun here, too."""
    # Linux has priorities of threads, and anyone may lower them. Without a thread of its own, this
    # would be training.
    if sys.platform == "linux" and threading.current_thread() is not threading.main_thread():
        # Containers may forbid it.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class Pace:
    """A limit of bytes per second."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Wait until so many bytes may be moved."""
        if self._rate is None:
            return
        with self._lock:
            start = max(self._free_at, time.monotonic())
            self._free_at = start + num_bytes / self._rate
        time.sleep(max(0.0, start - time.monotonic()))

"""Megatron's interface to background saves: requests, and a queue that programs poll.

`distckpt.async_save` is simpler to use. These classes are for programs that were written for
Megatron Core; requests run in distckpt's background thread, not in processes of their own.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from distckpt._base.errors import CheckpointingException
from distckpt._base.interrupts import paused_garbage_collection
from distckpt._io import background
from distckpt._ranks.collectives import Ranks

__all__ = [
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncRequest",
    "PersistentAsyncCaller",
    "TemporalAsyncCaller",
]

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT = 600.0
"""Seconds that the exiting process waits for a request."""


class AsyncRequest(NamedTuple):
    """A call of `async_fn`, if any, to be made in the background.

    Attributes:
        finalize_fns: called one after the other when `async_fn` has returned on all ranks.
        preload_fn: called first, before the request is scheduled; its result replaces the second
            argument.
        is_frozen: True when no finalization functions can be added any more.
        call_idx: number of the request in its queue.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - as in Megatron; nothing changes it
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Add a function to call when all ranks are done.

        It comes after those that are there.

        Raises:
            RuntimeError: the request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError(
                "A frozen AsyncRequest takes no more finalization functions: add them before "
                "scheduling."
            )
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Do everything now.

        Collective operation: all ranks of the default process group must call it.
        """
        with Ranks().phase("execute a request"):
            self._with_preloaded()._call()
        for finalize in self.finalize_fns:
            finalize()

    def freeze(self) -> AsyncRequest:
        """Return the same request, to which no finalization functions can be added."""
        return self._replace(is_frozen=True)

    def _with_preloaded(self) -> AsyncRequest:
        if self.preload_fn is None:
            return self
        args = list(self.async_fn_args)
        if len(args) < 2:
            raise CheckpointingException(
                "What preload_fn returns becomes the second argument of async_fn: give it two "
                "arguments at least."
            )
        args[1] = self.preload_fn()
        return self._replace(async_fn_args=tuple(args), preload_fn=None)

    def _call(self) -> None:
        if self.async_fn is not None:
            self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)


class AsyncCallsQueue:
    """Scheduled requests, finalized in their order.

    Args:
        persistent: accepted for compatibility, as is `cpu_shm_mode`: one thread does all requests.
    """

    def __init__(self, persistent: bool = False, cpu_shm_mode: bool = False) -> None:
        del cpu_shm_mode
        self.async_calls: deque[tuple[background.Task[None], AsyncRequest]] = deque()
        self.call_idx = -1
        self.persistent = persistent

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start a request, and return its number in this queue, from 0.

        Collective operation: all ranks must call it. `preload_fn` runs before this returns,
        everything else later.
        """
        preloaded = async_request.freeze()._with_preloaded()
        self.call_idx += 1
        request = preloaded._replace(call_idx=self.call_idx)
        task = background.Task(request._call, f"request {self.call_idx}", None, _EXIT_TIMEOUT)
        # Only the task refers to the arguments, so they go when it is done.
        self.async_calls.append((task, request._replace(async_fn_args=(), async_fn=None)))
        background.submit(task)
        return self.call_idx

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Call the finalization functions of requests that are done on all ranks.

        Collective operation, unless `no_dist`: all ranks of the default process group must call it.

        Args:
            blocking: wait for all requests.
            no_dist: look at this rank only.

        Returns:
            Numbers of the requests that were finalized.

        Raises:
            RankFailedError: on all ranks, when a request failed on any. It leaves the queue without
                being finalized.
        """
        finalized: list[int] = []
        ranks = Ranks.alone() if no_dist else Ranks()
        while self.async_calls:
            task, request = self.async_calls[0]
            is_done = int(blocking or task.done())
            if not (ranks.all_equal(is_done) and is_done):
                break
            self.async_calls.popleft()
            with ranks.phase(f"finish request {request.call_idx}"):
                task.result()
            for finalize in request.finalize_fns:
                finalize()
            if not ranks.all_equal(request.call_idx):
                raise CheckpointingException(
                    f"Ranks finalize different requests (number {request.call_idx} here): all must "
                    "schedule the same."
                )
            finalized.append(request.call_idx)
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Return how many requests have not been finalized."""
        return len(self.async_calls)

    def close(self, abort: bool = False) -> None:
        """Finalize all requests; or with `abort` forget them and cancel those that have not begun.

        Collective operation, unless `abort`: all ranks must call it.
        """
        if not abort:
            self.maybe_finalize_async_calls(blocking=True)
        for task, _ in self.async_calls:
            task.is_abandoned.set()
        self.async_calls.clear()

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int,
        mp_mode: str = "spawn",
        cpu_priority: int = 10,
        io_priority: int | None = None,
        cpu_shm_mode: bool = False,
        **kwargs: Any,
    ) -> None:
        """Do nothing: no process is started that would need time."""
        del cls, rank, mp_mode, cpu_priority, io_priority, cpu_shm_mode, kwargs


class AsyncCaller:
    """Runs requests one by one in the background thread.

    No finalization functions are called.
    """

    def __init__(self) -> None:
        self._queue = AsyncCallsQueue()

    def __del__(self) -> None:
        """Do nothing: scheduled requests go on in the background thread."""

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Start a request. Collective operation, see `AsyncCallsQueue.schedule_async_request`."""
        self._queue.schedule_async_request(async_req._replace(finalize_fns=[]))

    def is_current_async_call_done(
        self,
        blocking: bool = False,
        no_dist: bool = False,
    ) -> bool:
        """Whether all requests are done, see `AsyncCallsQueue.maybe_finalize_async_calls`."""
        self._queue.maybe_finalize_async_calls(blocking, no_dist)
        return self._queue.get_num_unfinalized_calls() == 0

    def close(self, abort: bool = False) -> None:
        """Wait for the requests, or forget them with `abort`."""
        self._queue.close(abort)


TemporalAsyncCaller = PersistentAsyncCaller = AsyncCaller
"""Megatron's callers that start processes."""

_disable_gc = paused_garbage_collection


def _set_process_qos(cpu_priority: int | None, io_priority: int | None) -> None:
    """Lower the priority of this process for processor and storage.

    The processor's is a nice value, the storage's a class of `ionice`.
    """
    try:
        if cpu_priority is not None:
            os.nice(max(0, cpu_priority - os.nice(0)))
        if io_priority is not None:
            subprocess.run(
                ["ionice", "-c", str(io_priority), "-p", str(os.getpid())],
                check=True,
                capture_output=True,
            )
    except (OSError, subprocess.CalledProcessError) as error:
        logger.warning("the priority of process %d stays: %s", os.getpid(), error)

"""Saves in the background.

plan     in the caller's thread: assign every byte to a rank (`save.plan_save`)
  |
stage    copy the tensors that this rank writes (`_io.host_copies`); training can continue
  |
queue    one background thread in each process takes the saves in order (`_io.background`)
  |
write    shard files and manifest, then commit, with a process group for this thread alone
  |      (`planned_save.write_and_commit`)
  |
report   from `SaveHandle.result`; an error that no caller has seen is raised by the next save, at
         its end
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from distckpt._base.errors import CheckpointingException, RankFailedError
from distckpt._base.interrupts import paused_garbage_collection, run_operation
from distckpt._base.options import SaveOptions, SaveReport, with_changes
from distckpt._base.public import SaysOtherNames
from distckpt._io import background
from distckpt._io.host_copies import HostCopies, shared_memory, threads_to_copy_with
from distckpt._operations.planned_save import (
    FAILED,
    OUT_OF_STEP,
    PlannedSave,
    SaveRequest,
    raising_pending_errors,
    saves_of,
    write_and_commit,
)
from distckpt._operations.save import plan_save
from distckpt._ranks.attendance import ABANDONED
from distckpt._ranks.collectives import Ranks, collective
from distckpt.mapping._wrappers import ShardedStateDict

logger = logging.getLogger(__name__)

Write: TypeAlias = Callable[[Ranks, PlannedSave], SaveReport]


@collective()
@paused_garbage_collection()
def async_save(
    state_dict: ShardedStateDict,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    process_group: Any = None,
    content_metadata: dict[str, Any] | None = None,
    options: SaveOptions | None = None,
    **changes: Any,
) -> SaveHandle:
    """Save a state dict in the background, while training continues.

    The tensors of this rank are copied before the call returns (into memory that the next save of
    the same structure reuses); a thread with its own process group writes and commits. Saves of one
    process follow each other. Two may be in progress; a third one waits for the first before it
    copies.

        handle = distckpt.async_save(state, "checkpoints/step_100")
        ...                      # train on
        report = handle.result()  # raises the error of any rank

    Collective operation: all ranks must call it. The first call also makes the process group of the
    background.

    Args:
        state_dict: as in `save`.
        path: a path or fsspec URL, as in `save`.
        overwrite: replace an existing complete checkpoint.
        process_group: the ranks that save together.
        content_metadata: describes the content.
        options: further options. With `max_inflight_bytes`, tensors that do not fit into it are
            copied while files are being written: wait for `staged` of the handle before changing
            any tensor. A save that a `strategy` cannot stage (`PreparedSave.stage`) is finished
            before this returns. With an `exit_timeout` of 0 the save is abandoned when the process
            ends.
        changes: options by keyword; see `SaveOptions` for all of them.

    Returns:
        A handle to wait for the save and to get its report. If the save fails, the error is logged.
        Unless the handle has reported it, the next save of these ranks raises it, after that save
        has been committed, or started in the background.

    Raises:
        CheckpointingException: as in `save`, for errors before anything is written.
    """
    ranks = Ranks(process_group)
    request = SaveRequest(
        path=path,
        process_group=process_group,
        overwrite=overwrite,
        content_metadata=content_metadata,
        options=with_changes(async_save, SaveOptions, options, changes),
        verb="async_save",
    )
    with raising_pending_errors(ranks, request):
        planned = plan_save(ranks, state_dict, in_background(request))
        return start(ranks, BackgroundSave(ranks, planned))


@collective()
@paused_garbage_collection()
def reserve_staging_memory(
    state_dict: ShardedStateDict,
    *,
    process_group: Any = None,
    options: SaveOptions | None = None,
    **changes: Any,
) -> Future[int]:
    """Prepare the first `async_save` of a state dict.

    That save then blocks training no longer than later ones. This call plans the save, makes the
    process group of the background, and returns; a thread then allocates the memory for the copies,
    which takes several times as long as copying. Call it when the state dict has all its tensors:
    after `load`, or after the first step of a new optimizer.

    Collective operation: all ranks must call it. A save that starts before the memory is complete
    uses the memory allocated so far, but waits for page-locked memory, which an accelerator copies
    to. A state dict whose structure has changed is saved as if no memory was reserved. The memory
    stays reserved until a save of another structure, or `release_staging_memory`.

    Args:
        state_dict: the state dict to save; it is neither copied nor kept.
        process_group: the ranks that will save together.
        options: the options of the later `async_save`.
        changes: options by keyword.

    Returns:
        A future whose result is the size of this rank's copies in bytes, once the memory is there.
        An error, such as too little memory, is logged, and raised by `result`; the save then
        allocates its memory itself.

    Raises:
        CheckpointingException: as in `async_save`, for a state dict that cannot be saved.
    """
    return reserve_for(
        state_dict,
        SaveRequest(
            path="",
            process_group=process_group,
            options=with_changes(reserve_staging_memory, SaveOptions, options, changes),
        ),
    )


def reserve_for(state_dict: ShardedStateDict, request: SaveRequest) -> Future[int]:
    """Reserve the memory for the copies of a save, see `reserve_staging_memory`."""
    ranks = Ranks(request.process_group)
    without_target = replace(request, has_target=False, verb="reserve_staging_memory")
    planned = plan_save(ranks, state_dict, in_background(without_target))
    save = BackgroundSave(ranks, planned, only_measures=True)
    with ranks.phase("measure what is to be staged"):
        planned.prepared.stage(save.copies)
    sizes, device = save.copies.needed

    def allocate() -> int:
        try:
            shared_memory.reserve(sizes, device, save.is_abandoned)
        except Exception as error:
            logger.warning(
                "memory for background saves cannot be reserved: %s: %s",
                type(error).__name__,
                error,
            )
            raise
        return sum(sizes)

    task = background.Task(
        allocate, "reserving memory for background saves", None, 0.0, save.is_abandoned
    )
    background.submit(task)
    return task


# --- One save -------------------------------------------------------------------------------------


class SaveHandle(SaysOtherNames, background.Task[SaveReport]):
    """A save in the background: a `concurrent.futures.Future` of its `SaveReport`.

    It cannot be cancelled.

    Not a collective operation: each rank may wait alone, and all get the same outcome.

    Attributes:
        location: the location of the checkpoint.
        staged: a `threading.Event`, set once the saved tensors may change. Without
            `max_inflight_bytes` it is set from the beginning.
        was_asked: whether the caller has seen the outcome; until then the next save raises its
            error.
    """

    location: str

    def __init__(
        self,
        write: Callable[[], SaveReport],
        location: str,
        staged: threading.Event,
        exit_timeout: float = 0.0,
        is_abandoned: threading.Event | None = None,
    ) -> None:
        super().__init__(write, f"the save to {location}", location, exit_timeout, is_abandoned)
        self.staged = staged
        self.was_asked = False

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for the end of the save; return its report.

        Args:
            timeout: seconds to wait, None without a limit.

        Raises:
            TimeoutError: the save has not ended yet, and goes on.
            RankFailedError: the save failed on a rank, or a rank died or did not come in time;
                nothing is committed.
            CheckpointExistsError: another program has saved to this location meanwhile.
        """
        try:
            return super().result(timeout)
        finally:
            self.was_asked |= self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the save and return its error; None if it succeeded."""
        try:
            return super().exception(timeout)
        finally:
            self.was_asked |= self.done()

    def error(self) -> BaseException | None:
        """Return the result of `exception` without marking it as seen."""
        return super().exception()

    def disown(self) -> None:
        """Forget the save in a forked process: it belongs to the parent."""
        super().disown()
        self.was_asked = True


def finished_handle(location: str, end: Callable[[], SaveReport]) -> SaveHandle:
    """Return the handle of a finished save.

    `end` returns its report or raises its error.
    """
    staged = threading.Event()
    staged.set()
    handle = SaveHandle(end, location, staged)
    handle.run()
    return handle


def in_background(request: SaveRequest) -> SaveRequest:
    """Return the request for a save in the background.

    Half of its memory is for copies, the other half for data that is being written. An abandoned
    save stops at its next report of progress.
    """
    options = request.options
    is_abandoned = threading.Event()

    def check_progress(done: int, total: int) -> None:
        if is_abandoned.is_set():
            raise CheckpointingException(ABANDONED)
        if options.progress is not None:
            options.progress(done, total)

    limit = options.max_inflight_bytes
    # All ranks refuse a limit of a wrong type later, with the other arguments.
    if isinstance(limit, int):
        limit = limit // 2
    options_of_write = replace(options, progress=check_progress, max_inflight_bytes=limit)
    return replace(request, options=options_of_write, is_abandoned=is_abandoned)


class BackgroundSave:
    """A planned save that is first staged, then written in the background.

    Collective operation: all ranks must make it. The first one makes the process group for the
    background.

    Attributes:
        location: the location of the checkpoint.
        exit_timeout: see `SaveOptions`.
        is_abandoned: set once the end of the process no longer waits for it.
        saves: the background saves of the same process group.
        ranks: the ranks that write together, in the background.
        planned: the plan; None once it is being written.
        copies: the copies of tensors.
    """

    def __init__(
        self,
        ranks: Ranks,
        planned: PlannedSave,
        write: Write = write_and_commit,
        only_measures: bool = False,
    ) -> None:
        """Take the plan of a request of `in_background`.

        `ranks` are those of the caller's group; `write` writes and commits. With `only_measures`,
        the memory for copies is measured, and nothing is copied.
        """
        request = planned.request
        # Ranks have compared these options when they planned the save.
        options = request.options
        self.location = planned.location
        self.exit_timeout = options.exit_timeout
        self.is_abandoned = request.is_abandoned or threading.Event()
        self.saves = saves_of(request.process_group)
        if options.timeout not in self.saves.ranks:
            own_ranks = Ranks.in_background(request.process_group, options.timeout)
            self.saves.ranks[options.timeout] = own_ranks
        self.ranks = self.saves.ranks[options.timeout]
        self.planned: PlannedSave | None = planned
        num_threads = threads_to_copy_with(ranks.size)
        self.copies = HostCopies(
            options.max_inflight_bytes, options.timeout, num_threads, only_measures
        )
        self._write = write
        self._is_staged = False

    def stage(self, ranks: Ranks) -> bool:
        """Copy this rank's tensors; return False if the strategy cannot.

        Collective operation: all ranks of the caller's group must call it.
        """
        if self.planned is None or self._is_staged:
            # Refused without an exchange: the other ranks may not make this mistake.
            raise CheckpointingException(
                f"The request of the save to {self.location!r} was scheduled before: each request "
                "is scheduled once. To save again, call save again, and schedule its request."
            )
        self._is_staged = True
        prepared = self.planned.prepared
        try:
            with self.planned.timer.phase("stage") as details, ranks.phase("stage tensors"):
                details["bytes"] = prepared.num_bytes
                staged = prepared.stage(self.copies)
        except BaseException:
            self.copies.release()
            raise
        if staged is not None:
            self.planned = replace(self.planned, prepared=staged)
        return staged is not None

    def write(self) -> SaveReport:
        """Write and commit, in the background thread."""
        self.ranks.stop = self.is_abandoned
        try:
            if self.saves.state == OUT_OF_STEP:
                raise RankFailedError(
                    {}, message="Not started: an earlier background save lost contact with a rank."
                )
            verb = f"the background save to {self.location}"
            return run_operation(verb, partial(self.write_now, self.ranks))
        except BaseException as error:
            is_in_step = self.ranks.are_in_step_after(error)
            self.saves.state = max(self.saves.state, FAILED if is_in_step else OUT_OF_STEP)
            logger.error(
                "rank %d: the background save to %s failed: %s: %s",
                self.ranks.rank,
                self.location,
                type(error).__name__,
                error,
            )
            raise
        finally:
            self.planned = None
            self.copies.release()

    def write_now(self, ranks: Ranks) -> SaveReport:
        """Write and commit in this thread.

        Collective operation: all of `ranks` must call it.
        """
        planned = self.planned
        self.planned = None
        assert planned is not None
        try:
            return self._write(ranks, planned)
        finally:
            # No reference to the copies may be left when their memory is released.
            del planned
            self.copies.release()


def start(ranks: Ranks, save: BackgroundSave) -> SaveHandle:
    """Stage a save and put it into the queue.

    Collective operation: all ranks must call it.
    """
    if not save.stage(ranks):
        logger.warning(
            "the strategy of the save to %s cannot stage data: saved before training goes on",
            save.location,
        )
        report = save.write_now(ranks)
        return finished_handle(save.location, lambda: report)
    handle = SaveHandle(
        save.write, save.location, save.copies.staged, save.exit_timeout, save.is_abandoned
    )
    save.saves.unreported = [*filter(_may_be_reported, save.saves.unreported), handle]
    background.submit(handle)
    return handle


def _may_be_reported(handle: SaveHandle) -> bool:
    if handle.was_asked:
        return False
    return not handle.done() or handle.error() is not None


def release_staging_memory() -> None:
    """Free the memory that background saves reuse.

    Not a collective operation.
    """
    shared_memory.free()

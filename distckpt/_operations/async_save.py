"""Saves that go on in the background: training may change its tensors as soon as they are staged."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from distckpt._base.errors import CheckpointingException, RankFailedError
from distckpt._base.memory import paused_garbage_collection
from distckpt._base.threads import DEFAULT_INFLIGHT_BYTES
from distckpt._io import background
from distckpt._io.staging import Staging, shared_memory, threads_to_copy_with
from distckpt._operations.saving import SaveRequest, Target, begin_save, finish_save
from distckpt._ranks import collectives
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.report import PhaseTimer, SaveReport
from distckpt.mapping import CommonStateDict, ShardedStateDict, StateDict
from distckpt.strategies.async_utils import AsyncRequest
from distckpt.strategies.base import Options, PreparedSave, SaveShardedStrategy

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 1800.0
DEFAULT_EXIT_TIMEOUT = 600.0

Finish: TypeAlias = Callable[[Ranks, PhaseTimer, Target, PreparedSave], SaveReport]
Begin: TypeAlias = Callable[[PhaseTimer, Options], tuple[Target, PreparedSave]]


class SaveHandle:
    """A save that goes on in the background.

    Attributes:
        location: of the checkpoint.
        staged: a `threading.Event`, set when the tensors that are being saved may change. Without
            `max_inflight_bytes` it is set from the beginning.
        was_asked: whether somebody has heard how the save ended; if not, the next save raises what went wrong.
    """

    def __init__(self, location: str, staged: threading.Event, task: background.Task[SaveReport]) -> None:
        self.location = location
        self.staged = staged
        self.was_asked = False
        self._task = task

    def done(self) -> bool:
        """Tell whether the save has ended, well or not. Returns at once."""
        return self._task.done()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for the end of the save.

        Each rank calls, alone: what comes out is the same on all.

        Args:
            timeout: seconds to wait, None without a limit.

        Returns:
            What was saved and how long it took.

        Raises:
            TimeoutError: the save has not ended yet, and goes on.
            RankFailedError: the save failed on a rank, or a rank died or did not come in time; nothing is committed.
            CheckpointExistsError: another program has saved to this place meanwhile.
        """
        try:
            return self._task.result(timeout)
        finally:
            # Whoever asks has heard of what went wrong.
            self.was_asked = self.was_asked or self._task.done()

    def when_done(self, function: Callable[[], None]) -> None:
        """Have a function called when the save has ended: in the background thread, or at once if it has."""
        self._task.when_done(function)

    def error(self) -> BaseException | None:
        """Wait for the end of the save and return what went wrong, None when nothing did. Does not count as asking."""
        return self._task.error()


@dataclass
class _Line:
    """What the background saves of one group of ranks share; they follow each other.

    Attributes:
        ranks: by timeout, each with a process group of its own, that only the background thread uses.
        unreported: saves that failed, or may fail, and of which nobody has asked yet.
        state: `_FINE`, `_FAILED` or `_LOST`: what has happened since the ranks last compared.
    """

    ranks: dict[float, Ranks] = field(default_factory=dict)
    unreported: list[SaveHandle] = field(default_factory=list)
    state: int = 0

    def watch(self, handle: SaveHandle) -> None:
        """Remember a save until somebody knows how it went; forget those that went well."""
        self.unreported = [h for h in self.unreported if not h.was_asked and not (h.done() and h.error() is None)]
        self.unreported.append(handle)

    def take_error(self) -> BaseException | None:
        """Return the first error that nobody has asked for, of saves that are done; forget them."""
        unasked, self.unreported = [h for h in self.unreported if not h.was_asked], []
        errors = [h.error() for h in unasked]
        for handle in unasked:
            handle.was_asked = True
        return next((error for error in errors if error is not None), None)


_FINE, _FAILED, _LOST = range(3)

_lines: dict[Any, _Line] = {}
"""By process group of the caller."""


class BackgroundSave:
    """A save whose decisions are made: `stage` copies the data, then `write` may run in the background."""

    def __init__(
        self,
        line: _Line,
        ranks: Ranks,
        timer: PhaseTimer,
        target: Target,
        prepared: PreparedSave,
        staging: Staging,
        finish: Finish,
    ) -> None:
        self.target = target
        self.staging = staging
        self.line = line
        self._ranks = ranks
        self._timer = timer
        self._prepared: PreparedSave | None = prepared
        self._finish = finish

    def stage(self, ranks: Ranks) -> bool:
        """Copy what this rank writes.

        Collective: every rank of the caller's group calls.

        Returns:
            False when the strategy cannot do this.
        """
        assert self._prepared is not None
        try:
            with self._timer.phase("stage"), ranks.phase("copy what they save"):
                staged = self._prepared.stage(self.staging)
        except BaseException:
            self.staging.release()
            raise
        self._prepared = staged or self._prepared
        return staged is not None

    def write(self) -> SaveReport:
        """Write and commit. Runs in the background."""
        prepared, self._prepared = self._prepared, None
        assert prepared is not None
        try:
            if self.line.state == _LOST:
                raise RankFailedError({}, message="An earlier background save lost contact with a rank: not begun.")
            return self._finish(self._ranks, self._timer, self.target, prepared)
        except BaseException as error:
            # Only after an error that they have exchanged are the ranks still in step.
            in_step = self._ranks.size == 1 or self._ranks.is_known_to_all(error)
            lost = not in_step or (isinstance(error, RankFailedError) and error.is_lost_contact)
            self.line.state = max(self.line.state, _LOST if lost else _FAILED)
            logger.error(
                "rank %d: the background save to %s failed: %s: %s",
                self._ranks.rank, self.target.location, type(error).__name__, error,
            )  # fmt: skip
            raise
        finally:
            del prepared
            self.staging.release()

    def write_now(self, ranks: Ranks) -> SaveReport:
        """Write and commit before anything else happens."""
        prepared, self._prepared = self._prepared, None
        assert prepared is not None
        try:
            return self._finish(ranks, self._timer, self.target, prepared)
        finally:
            self.staging.release()


def raise_pending_errors(ranks: Ranks, process_group: Any) -> None:
    """Raise what went wrong in earlier background saves of these ranks, unless it was asked for.

    Collective: every rank calls. Costs one exchange of a number; nothing where there were no background saves. When a
    save has failed on any rank, all wait for those that are still unfinished.

    Raises:
        CheckpointingException: on every rank.
    """
    line = _lines.get(collectives.group_of(process_group))
    if line is None:
        return
    state = line.state
    if ranks.all_equal(state) and state == _FINE:
        return
    background.wait_for_all()
    if _LOST in (int(text) for text in ranks.all_gather(str(line.state).encode())):
        # Out of step in their groups, which are left as they are: a group made in the place of a destroyed one would
        # get its name, and meet its traces in the store.
        line.ranks.clear()
    line.state = _FINE
    with ranks.phase("save in the background"):
        error = line.take_error()
        if error is not None:
            raise error


def prepare_background_save(
    ranks: Ranks,
    options: Options,
    begin: Begin,
    *,
    timeout: float,
    is_abandoned: threading.Event,
    max_inflight_bytes: int | None = None,
    finish: Finish = finish_save,
) -> BackgroundSave:
    """Decide everything about a save that is to be written in the background.

    Collective: every rank calls.

    Args:
        ranks: of the caller's group.
        options: of the call.
        begin: given a timer and options, makes the decisions.
        timeout: seconds that ranks wait for each other in the background.
        is_abandoned: set when the save is to stop.
        max_inflight_bytes: of `async_save`.
        finish: writes and commits.
    """
    timer = PhaseTimer()
    raise_pending_errors(ranks, options.process_group)
    line = _lines.setdefault(collectives.group_of(options.process_group), _Line())
    if timeout not in line.ranks:
        line.ranks[timeout] = Ranks.in_background(options.process_group, timeout)

    def watch(num_bytes: int) -> None:
        if is_abandoned.is_set():
            raise CheckpointingException("This save was abandoned: the process ends, or a rank is lost.")
        if options.progress is not None:
            options.progress(num_bytes)

    # Half of the memory is for staged data, half for data that is being written.
    half = None if max_inflight_bytes is None else max_inflight_bytes // 2
    inflight_bytes = DEFAULT_INFLIGHT_BYTES if half is None else half
    target, prepared = begin(timer, replace(options, progress=watch, max_inflight_bytes=inflight_bytes))
    staging = Staging(shared_memory, half, timeout, threads_to_copy_with(ranks.size))
    return BackgroundSave(line, line.ranks[timeout], timer, target, prepared, staging, finish)


def start(save: BackgroundSave, ranks: Ranks, exit_timeout: float, is_abandoned: threading.Event) -> SaveHandle:
    """Stage a save and let the background go on with it.

    Collective: every rank calls.
    """
    location = save.target.location
    name = f"the save to {location}"
    if not save.stage(ranks):
        logger.warning("the strategy of %s cannot stage data: it is saved before training goes on", name)
        return finished(save.write_now(ranks))
    task = background.Task(save.write, name, location, exit_timeout, is_abandoned)
    handle = SaveHandle(location, save.staging.staged, task)
    save.line.watch(handle)
    background.submit(task)
    return handle


def finished(report: SaveReport) -> SaveHandle:
    """Return a handle of a save that is done."""
    task = background.Task(lambda: report, f"the save to {report.location}", report.location, 0.0)
    task.run()
    staged = threading.Event()
    staged.set()
    return SaveHandle(report.location, staged, task)


@paused_garbage_collection()
def async_save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict] | None = None,
    content_metadata: dict[str, Any] | None = None,
    *,
    overwrite: bool = False,
    process_group: Any = None,
    validate_replicas: bool = False,
    durable: bool = True,
    max_inflight_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    exit_timeout: float = DEFAULT_EXIT_TIMEOUT,
) -> SaveHandle:
    """Save like `save`, in the background: returns as soon as training may change its tensors.

    Everything that this rank writes is copied before the call returns (into memory that is used again by the next save
    of the same structure); writing and committing go on in a thread, with a process group of its own. Saves of one
    process follow each other. Two may be on their way; a third one waits for the first before it copies.

        handle = distckpt.async_save(state, "checkpoints/step_100")
        ...                      # train on
        report = handle.result()  # raises what went wrong on any rank

    Collective: every rank of the process group calls. The first call also makes the process group of the background.

    Args:
        sharded_state_dict: see `save`.
        checkpoint_dir: see `save`.
        sharded_strategy: see `save`. Strategies whose saves cannot be staged (`PreparedSave.stage`) are finished
            before this returns.
        validate_access_integrity: see `save`.
        preprocess_common_before_consistancy_check: see `save`.
        content_metadata: see `save`.
        overwrite: see `save`.
        process_group: see `save`.
        validate_replicas: see `save`.
        durable: see `save`.
        max_inflight_bytes: how much memory copies and data on its way to storage may take on each rank, at least two
            windows of 8 MiB; None for as much as this rank writes. With a limit, what does not fit is copied while
            files are being written: wait for `staged` of the handle before changing any tensor.
        progress: see `save`; called in the background.
        timeout: seconds that ranks wait for each other in the background, and for memory that earlier saves use.
        exit_timeout: seconds that the end of the process waits for the save; then, or at once with 0, it is
            abandoned, and nothing of it is committed.

    Returns:
        What tells how the save goes. When nobody asks and the save fails, the error is logged, and the next save of
        these ranks raises it.

    Raises:
        InvalidShardingError: as `save` does.
        CheckpointExistsError: as `save` does.
        RankFailedError: raised on all ranks when any rank failed; also when an earlier background save did and nobody
            has asked for its result.
    """
    ranks, is_abandoned = Ranks(process_group), threading.Event()
    request = SaveRequest(
        sharded_state_dict,
        os.fspath(checkpoint_dir),
        sharded_strategy,
        overwrite,
        content_metadata,
        preprocess_common_before_consistancy_check,
    )
    options = Options(
        process_group=process_group,
        validate_access_integrity=validate_access_integrity,
        validate_replicas=validate_replicas,
        durable=durable,
        progress=progress,
    )
    # 1. Take the state dict apart; decide who writes what.
    save = prepare_background_save(
        ranks,
        options,
        partial(begin_save, ranks, request),
        timeout=timeout,
        is_abandoned=is_abandoned,
        max_inflight_bytes=max_inflight_bytes,
    )
    # 2. Copy what this rank writes. 3. In the background: write everything beside the target, and commit.
    return start(save, ranks, exit_timeout, is_abandoned)


def request_save(ranks: Ranks, options: Options, request: SaveRequest) -> AsyncRequest:
    """Decide everything about a save, and return what Megatron's queue of asynchronous calls takes.

    Collective: every rank calls.
    """
    begin = partial(begin_save, ranks, request)
    save = prepare_background_save(ranks, options, begin, timeout=DEFAULT_TIMEOUT, is_abandoned=threading.Event())
    return AsyncRequest(_write_request, (save, None, None), [], {}, partial(_stage_request, save, ranks))


def _stage_request(save: BackgroundSave, ranks: Ranks) -> bool:
    if save.stage(ranks):
        return True
    save.write_now(ranks)
    return False


def _write_request(save: BackgroundSave, is_staged: bool | None, unused: None = None) -> None:
    del unused
    if is_staged is not False:
        background.run_in_order(save.write, f"the save to {save.target.location}", save.target.location)


def release_staging_memory() -> None:
    """Free the memory that background saves keep for the next one. Any rank may call, alone."""
    shared_memory.free()

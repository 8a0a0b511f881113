"""Manage the checkpoints of a training run in one directory."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from distckpt._base.errors import CheckpointingException
from distckpt._base.interrupts import paused_garbage_collection, run_operation
from distckpt._base.messages import check_choice
from distckpt._base.options import LoadOptions, SaveOptions, SaveReport, with_changes
from distckpt._base.public import SaysOtherNames
from distckpt._commit import posix
from distckpt._io import background
from distckpt._operations import background_save
from distckpt._operations.background_save import SaveHandle, release_staging_memory, reserve_for
from distckpt._operations.load import Strict, load
from distckpt._operations.planned_save import (
    SaveRequest,
    raise_unseen_error,
    raising_pending_errors,
)
from distckpt._operations.save import plan_save
from distckpt._ranks.collectives import Ranks, collective
from distckpt.manager import _steps as steps
from distckpt.manager._removal import Retention
from distckpt.manager._root_steps import RootSteps
from distckpt.manager._steps import encode_note
from distckpt.mapping._wrappers import ShardedStateDict, StateDict
from distckpt.rules._rule import Rule

if TYPE_CHECKING:
    from distckpt.manager._tiers._run_files import StepState
    from distckpt.manager._tiers._tiers import Tiers

logger = logging.getLogger(__name__)


def _group_of(manager: CheckpointManager, *args: Any, **kwargs: Any) -> Any:
    return manager._request.process_group


class CheckpointManager(SaysOtherNames):
    """Save, find and remove the checkpoints of a run.

    They are subdirectories of one directory, such as `step_00000100`.

        with distckpt.CheckpointManager("checkpoints", keep_last=3) as manager:
            if manager.steps():
                manager.load(state)
            for step in ...:
                train(step)
                if step % 100 == 0:
                    manager.save(step, state)

    `save` and `load` are collective operations: all ranks must make the same calls in the same
    order. Rank 0 decides for all, so all load the same step. The other methods need no other rank.

    A step is kept if it is one of the newest, a multiple of `keep_every`, pinned, one of the best,
    or chosen by `keep`. All other steps are removed in the background once the next save has been
    committed, but only if a manager has saved them and no other program has meanwhile. Everything
    else in the directory is left alone.

    Args:
        root: a path or fsspec URL; it need not exist yet.
        keep_last: number of newest complete checkpoints to keep; None keeps everything.
        keep_every: keep steps that are multiples of this.
        keep: keep steps for which this returns True. Called on rank 0, in the background.
        best_metric: keep the checkpoints with the best values of this metric, see `save`. As long
            as steps have other metrics only, nothing is removed.
        best_mode: "min" if small values are good, "max" if large ones are.
        keep_best: number of best checkpoints to keep.
        keep_optimizer: number of newest complete checkpoints in the root with optimizer state. It
            is removed from older ones, except for pinned ones. Without it, all have theirs.
        on_failure: "log" lets the job go on if a step cannot be saved, because of a full disk, say.
            The error is logged, is in `failures`, and only the handle of that save raises it.
            Invalid arguments and shards, and a lost rank, are always raised.
        async_save: save in the background; with False a save is complete when `save` returns.
        local: a directory of each host, on its own disk or in its memory (`/dev/shm/run`). A step
            is committed when every rank's bytes are there, and uploaded to the root afterwards,
            see `docs/tiers.md`. All calls of `steps` and `latest` are collective operations
            then.
        peers: with 1, another host keeps a copy of each file, so that the newest step survives the
            loss of any one host.
        keep_local: number of newest steps in the local directories; steps that wait for their
            upload stay, too.
        upload_every: upload every n-th step; the first and the last one of a job are uploaded, too.
        hosts: failure domains of hosts by host name; copies go to another domain. By default each
            host is one of its own.
        peer_bandwidth: bytes per second that each rank sends to other hosts at most.
        upload_bandwidth: bytes per second that each rank uploads at most.
        stall_timeout: seconds without progress after which a warning names an upload.
        process_group: the ranks that save and load together; None for the default group, or for
            this process alone when torch.distributed is not initialized.
        options: options of all saves.
        changes: options by keyword, such as `durable=False`; see `SaveOptions` for all of them.

    Attributes:
        skipped: the problem of each step that the last `latest` or `load` passed over, by step.
        failures: the error of each step that could not be saved, by step.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep: Callable[[int], bool] | None = None,
        best_metric: str | None = None,
        best_mode: Literal["min", "max"] = "min",
        keep_best: int = 1,
        keep_optimizer: int | None = None,
        on_failure: Literal["raise", "log"] = "raise",
        async_save: bool = True,
        local: str | os.PathLike[str] | None = None,
        peers: int = 0,
        keep_local: int = 2,
        upload_every: int = 1,
        hosts: Mapping[str, str] | None = None,
        peer_bandwidth: float | None = None,
        upload_bandwidth: float | None = None,
        stall_timeout: float = 120.0,
        process_group: Any = None,
        options: SaveOptions | None = None,
        **changes: Any,
    ) -> None:
        self.root = posix.resolve(root)
        self.skipped: dict[int, str] = {}
        self.failures: dict[int, str] = {}
        check_choice("on_failure", on_failure, ("raise", "log"))
        self._logs_failures = on_failure == "log"
        self._is_async = async_save
        policy = Retention(
            keep_last, keep_every, keep, best_metric, best_mode, keep_best, keep_optimizer
        )
        options = with_changes(CheckpointManager, SaveOptions, options, changes)
        if keep_optimizer is not None:
            options = replace(options, separate_optimizer=True)
        self._request = SaveRequest(
            path=self.root,
            process_group=process_group,
            options=options,
            is_step=True,
            verb="async_save" if async_save else "save",
        )
        self._request.check()
        self._of_all_ranks = {**vars(policy), "on_failure": on_failure, "async_save": async_save}
        self._root_steps = RootSteps(root, self._request, policy)
        self._place: RootSteps | Tiers = self._root_steps
        tier_settings: dict[str, Any] = {
            "peers": peers,
            "keep_local": keep_local,
            "upload_every": upload_every,
            "hosts": hosts or {},
            "peer_bandwidth": peer_bandwidth,
            "upload_bandwidth": upload_bandwidth,
            "stall_timeout": stall_timeout,
        }
        if local is not None:
            # Imported when it is needed: most programs save to one place.
            from distckpt.manager._tiers._meeting import TierSettings
            from distckpt.manager._tiers._tiers import Tiers

            self._of_all_ranks |= tier_settings
            settings = TierSettings(local=os.fspath(local), **tier_settings)
            self._place = Tiers(settings, self._request, self._root_steps)
        elif peers or hosts or upload_every != 1:
            raise ValueError("peers, hosts and upload_every need the directory of each host: local")
        self._handles: list[SaveHandle] = []
        self._has_planned = False
        self._is_closed = False

    @property
    def not_removed(self) -> Mapping[int, str]:
        """Reasons why steps could not be removed, by step, on rank 0."""
        return self._root_steps.not_removed

    @property
    def states(self) -> Mapping[int, StepState]:
        """The tiers that steps of this job have reached; empty without `local`."""
        # A copy: threads of copies and uploads go on.
        return {} if isinstance(self._place, RootSteps) else dict(self._place.states)

    def location(self, step: int) -> str:
        """Return the location of a step in the root, existing or not."""
        return self._root_steps.step(step)

    # --- Save

    @collective(_group_of)
    @paused_garbage_collection()
    def save(
        self,
        step: int,
        state_dict: ShardedStateDict,
        *,
        metrics: Mapping[str, float] | None = None,
        pinned: bool = False,
        overwrite: bool = False,
        content_metadata: dict[str, Any] | None = None,
    ) -> SaveHandle:
        """Save a step, in the background unless `async_save=False`.

        An incomplete checkpoint of this step is moved aside, or replaced on an object store, and a
        rejected one is replaced, with a warning.

        Args:
            step: number of the step, 0 or more.
            state_dict: see `distckpt.save`.
            metrics: numbers that belong to the step, such as the loss, kept with the checkpoint.
                One rank that has them is enough; if several do, the value of the lowest rank
                counts. A value that is NaN or infinite does not count. If a `best_metric` is not
                measured at every step, give NaN for it or no metrics at all: a dict without it is
                an error unless an earlier step has it.
            pinned: never remove this checkpoint, if any rank says so.
            overwrite: replace a complete checkpoint of this step; the earlier one stays until the
                new one is complete.
            content_metadata: see `distckpt.save`.

        Returns:
            A handle to wait for the save and to get its report, see `distckpt.async_save`.

        Raises:
            CheckpointExistsError: a complete checkpoint of this step is there and `overwrite` is
                False.
            RankFailedError: raised on all ranks when any rank failed. The error of an earlier save
                that has failed unnoticed is raised once this one is committed, or started in the
                background.
        """
        if self._is_closed:
            raise CheckpointingException(f"The manager of {self.root!r} is closed: make a new one.")
        ranks = self._ranks()
        with raising_pending_errors(ranks, self._request):
            self._handles = [handle for handle in self._handles if not handle.done()]
            same = {"step": step, "overwrite": overwrite, **self._of_all_ranks}
            self._place.meet(ranks)
            with ranks.phase("check the step", same=same):
                note = encode_note(metrics or {}, pinned)
                request = replace(
                    self._request, overwrite=overwrite, content_metadata=content_metadata
                )
                request = self._place.aimed(request, step)
            try:
                handle = self._start(ranks, state_dict, step, note, request)
            except BaseException as error:
                is_logged = self._logs_failures
                if not (is_logged and steps.all_find(ranks, error, steps.is_of_the_storage)):
                    raise
                text = "step %d is not saved to %s: %s: %s"
                logger.error(text, step, self.root, type(error).__name__, error)
                location = os.fspath(request.path)
                handle = background_save.finished_handle(location, partial(_raise, error))
            handle.was_asked = handle.was_asked or self._logs_failures
            handle.add_done_callback(partial(self._note_failure, step))
            self._handles.append(handle)
            return handle

    @collective(_group_of)
    @paused_garbage_collection()
    def reserve_staging_memory(self, state_dict: ShardedStateDict) -> Future[int]:
        """Prepare the first `save` with this manager's options.

        See `distckpt.reserve_staging_memory`.

        Collective operation: all ranks must call it. Pointless with `async_save=False`.
        """
        request = self._request
        return reserve_for(state_dict, _with_warnings(request) if self._has_planned else request)

    def _start(
        self,
        ranks: Ranks,
        state_dict: ShardedStateDict,
        step: int,
        note: bytes,
        request: SaveRequest,
    ) -> SaveHandle:
        with ranks.telling("describe the step") as messages:
            messages.payload = note
        with ranks.answering(messages, "check the target step"):
            if ranks.is_coordinator:
                # Its findings count for all ranks.
                request = self._place.begin(step, messages.payloads, request)
            messages.answer = bytes([self._has_planned, bool(request.overwrite)])
        has_planned, overwrite = messages.answer
        request = replace(request, overwrite=bool(overwrite))
        if has_planned:
            request = _with_warnings(request)
        if self._is_async:
            request = background_save.in_background(request)
        planned = plan_save(ranks, state_dict, request)
        self._place.check_planned(planned)
        self._has_planned = True
        write = partial(self._place.write, step)
        if self._is_async:
            save = background_save.BackgroundSave(ranks, planned, write)
            return background_save.start(ranks, save)
        report = write(ranks, planned)
        return background_save.finished_handle(report.location, lambda: report)

    def _note_failure(self, step: int, handle: Future[SaveReport]) -> None:
        # `exception` of the handle itself would count as asking.
        error = Future.exception(handle)
        if error is not None:
            self.failures[step] = f"{type(error).__name__}: {error}"

    # --- Load

    @collective(_group_of)
    def load(
        self,
        state_dict: ShardedStateDict,
        step: int | None = None,
        *,
        strict: Strict = "complete",
        rules: Sequence[Rule] = (),
        family: str | os.PathLike[str] | None = None,
        options: LoadOptions | None = None,
        **changes: Any,
    ) -> StateDict:
        """Load a step, or the newest one that loads. Waits first for the saves in progress.

        Without `step`, one that turns out to be damaged or is removed while it is read is passed
        over on all ranks, as `latest` passes over steps that were rejected or whose damage shows
        from outside. The log and `skipped` have the reasons. All other errors are raised: a step
        that does not match the request is not passed over. A rejected step that is named is loaded,
        with a warning.

        Args:
            state_dict: see `distckpt.load`. A step that is passed over may have been read partly;
                the one that is loaded overwrites all that it holds.
            step: None for the newest one that loads.
            strict: as in `distckpt.load`, like all further arguments.
            rules: the way to make requested tensors from stored ones.
            family: afterwards, the rules of the model's family.
            options: further options.
            changes: options by keyword; see `LoadOptions` for all of them.

        Returns:
            The result of `distckpt.load`.

        Raises:
            CheckpointNotFoundError: the step is not there, or no step can be loaded, with the
                problem of each.
            CheckpointingException: as `distckpt.load` does.
        """
        options = with_changes(CheckpointManager.load, LoadOptions, options, changes)
        background.wait_for_all()
        ranks = self._ranks()
        with ranks.phase("check the step", same={"step": step}):
            if step is not None:
                steps.step_name(step)

        def read(location: str) -> StateDict:
            if ranks.is_coordinator:
                steps.warn_of_removed_optimizer(self.root, location)
            return load(
                state_dict,
                location,
                strict=strict,
                rules=rules,
                family=family,
                process_group=self._request.process_group,
                options=options,
            )

        self.skipped = {}
        return self._place.load(ranks, read, step, self.skipped)

    def latest(self) -> int | None:
        """Return the newest complete step, or None if there is none.

        Rejected steps do not count. `skipped` gets the problems of newer ones.

        Checks the marker, the manifest, and the sizes and headers of all files. Saves in progress
        do not count. Each rank looks for itself: in a job, let one rank call this, or just call
        `load`, which decides for all ranks. With `local`, this is a collective operation: all
        ranks must call it.
        """
        newest, self.skipped = run_operation(
            "look for steps", lambda: self._place.find(self._ranks())
        )
        return newest

    def steps(self) -> list[int]:
        """Return the committed steps in ascending order, rejected ones too, without checks.

        With `local`, this is a collective operation, and whole steps on hosts count.
        """
        return run_operation("list the steps", lambda: self._place.list(self._ranks()))

    def reject(self, step: int, reason: str | None) -> None:
        """Pass over a step that a later check found bad.

        `load` loads it only if it is named, a save of the step replaces it, and retention does not
        count it. With None as reason, the step counts again. One rank calls this; it needs no
        other. With `local`, call it on all ranks, so that each host knows; a step that is not
        uploaded yet stays on the hosts.

        Raises:
            CheckpointNotFoundError: no such step is committed.
        """
        self._place.reject(step, reason)

    # --- End

    def wait(self, uploaded: bool = False) -> None:
        """Wait until all saves have ended and old checkpoints are removed.

        Args:
            uploaded: with `local`, wait for copies and uploads, too; `states` has their outcome.

        Raises:
            CheckpointingException: a save failed, and its result has not been asked for yet; not
                with `on_failure="log"`.
        """
        for handle in self._handles:
            handle.error()
        raise_unseen_error(self._handles)
        if uploaded:
            self._place.wait()

    def close(self) -> None:
        """Wait as `wait` does, and free the memory that saves used. Further calls do nothing.

        With `local`, the newest step is uploaded, for at most `exit_timeout` seconds.
        """
        self._close(has_failed=False)

    def _close(self, has_failed: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.wait()
        finally:
            release_staging_memory()
            self._place.close(has_failed)

    def __enter__(self) -> CheckpointManager:
        """Return the manager."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the manager. An error of a save does not replace one of the block."""
        if error is None:
            self.close()
            return
        with contextlib.suppress(Exception):  # it was logged when it happened
            self._close(has_failed=True)

    def _ranks(self) -> Ranks:
        return Ranks(self._request.process_group)


def _with_warnings(request: SaveRequest) -> SaveRequest:
    """Return a request that warns of values that cannot be stored.

    An error would cost its job a checkpoint.
    """
    if request.options.unsupported is not None:
        return request
    return replace(request, options=replace(request.options, unsupported="warn"))


def _raise(error: BaseException) -> NoReturn:
    raise error

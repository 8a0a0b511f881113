"""Manage the checkpoints of a training run in one directory."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn, cast

from distckpt._base.errors import CheckpointingException, CheckpointNotFoundError
from distckpt._base.interrupts import operation
from distckpt._base.memory import paused_garbage_collection
from distckpt._base.messages import check_choice
from distckpt._base.reports import SaveReport
from distckpt._commit import posix
from distckpt._commit.presence import absence
from distckpt._io import background
from distckpt._manager import failures, retention, steps
from distckpt._manager.listing import CheckpointInfo, list_checkpoints
from distckpt._manager.preemption import PreemptionGuard
from distckpt._mapping.wrappers import ShardedStateDict, StateDict
from distckpt._operations import background_save
from distckpt._operations.background_save import SaveHandle, release_staging_memory
from distckpt._operations.load import load
from distckpt._operations.planned_save import (
    DEFAULT_EXIT_TIMEOUT,
    DEFAULT_TIMEOUT,
    PlannedSave,
    SaveSettings,
    write_and_commit,
)
from distckpt._operations.save import plan_save
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.strategies.base import SaveShardedStrategy

__all__ = ["CheckpointInfo", "CheckpointManager", "PreemptionGuard", "list_checkpoints"]

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Save, find and remove the checkpoints of a run: subdirectories of one directory, such as
    `step_00000100`.

        with distckpt.CheckpointManager("checkpoints", keep_last=3) as manager:
            if manager.steps():
                state = manager.load(state)
            for step in ...:
                train(step)
                if step % 100 == 0:
                    manager.save(step, state)

    `save` and `load` are collective operations: all ranks must make the same calls in the same
    order. Rank 0 decides for all, so all load the same step. The other methods need no other rank.

    A step is kept when it is one of the newest, a multiple of `keep_every`, pinned, one of the
    best, or chosen by `keep`. Others are removed in the background after the next save has been
    committed, but only if a manager has
    saved them, and no other program meanwhile: everything else in the directory is left alone.

    Args:
        root: a path or fsspec URL; it need not exist yet.
        keep_last: number of newest complete checkpoints to keep; None keeps everything.
        keep_every: keep steps that are multiples of this.
        keep: keep steps for which this returns True. Called on rank 0, in the background.
        best_metric: keep the checkpoints with the best values of this metric, see `save`. As long
            as steps have other metrics only, none is removed.
        best_mode: "min" when small values are good, "max" when large ones are.
        keep_best: number of best checkpoints to keep.
        on_failure: "log" lets the job go on when a step cannot be saved, because of a full disk,
            say: the error is logged, is in `failures`, and only the handle of that save raises it.
            Invalid arguments and shards, and a lost rank, are raised always.
        async_save: save in the background; False saves before `save` returns. All further arguments
            are those of `distckpt.async_save`.

    Attributes:
        skipped: the problem of each step that the last `latest` or `load` passed over, by step.
        failures: the error of each step that could not be saved, by step.
        not_removed: the reason why a step could not be removed, by step, on rank 0.
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
        on_failure: Literal["raise", "log"] = "raise",
        async_save: bool = True,
        process_group: Any = None,
        sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
        validate_replicas: bool | None = None,
        max_inflight_bytes: int | None = None,
        durable: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
        exit_timeout: float = DEFAULT_EXIT_TIMEOUT,
    ) -> None:
        self.root = posix.resolve(root)
        self.skipped: dict[int, str] = {}
        self.failures: dict[int, str] = {}
        self.not_removed: dict[int, str] = {}
        check_choice("on_failure", on_failure, ("raise", "log"))
        self._logs_failures = on_failure == "log"
        self._policy = retention.Retention(
            keep_last, keep_every, keep, best_metric, best_mode, keep_best
        )
        self._is_async = async_save
        self._settings = SaveSettings(
            process_group=process_group,
            sharded_strategy=sharded_strategy,
            validate_replicas=validate_replicas,
            durable=durable,
            background_bytes=max_inflight_bytes,
            timeout=timeout,
            exit_timeout=exit_timeout,
        )
        self._settings.check()
        self._of_all_ranks = {
            **vars(self._policy),
            "on_failure": on_failure,
            "async_save": async_save,
        }
        # A save in which nothing happens for longer has lost a rank, and fails.
        self._looks = retention.Looks(2 * timeout, removes_steps=keep_last is not None)
        self._handles: list[SaveHandle] = []
        self._named_newer: set[int] = set()
        self._is_closed = False

    def location(self, step: int) -> str:
        """Return where a step is saved, whether it is there or not."""
        return locations.join(self.root, steps.step_name(step))

    @operation
    @paused_garbage_collection()
    def save(
        self,
        step: int,
        sharded_state_dict: ShardedStateDict,
        metrics: Mapping[str, float] | None = None,
        pinned: bool = False,
        *,
        overwrite: bool = False,
        content_metadata: dict[str, Any] | None = None,
    ) -> SaveHandle:
        """Save a step, in the background unless the manager was made with `async_save=False`.

        An incomplete checkpoint of this step is moved aside, or replaced on an object store, with a
        warning.

        Args:
            step: number of the step, 0 or more.
            sharded_state_dict: see `distckpt.save`.
            metrics: numbers that belong to the step, such as the loss, kept with the checkpoint.
                One rank that has them is enough; of several values, that of the lowest rank counts.
                One that is NaN or infinite does not count. Where a `best_metric` is not measured at
                every step, give NaN for it or no metrics at all: a dict without it is an error
                unless an earlier step has it.
            pinned: never remove this checkpoint, if any rank says so.
            overwrite: replace a complete checkpoint of this step; the earlier one stays until the
                new one is complete.
            content_metadata: see `distckpt.save`.

        Returns:
            A handle to wait for the save and to get its report, see `distckpt.async_save`.

        Raises:
            CheckpointExistsError: a complete checkpoint of this step is there and `overwrite` is
                False.
            RankFailedError: raised on all ranks when any rank failed, or an earlier save has failed
                unnoticed.
        """
        if self._is_closed:
            raise CheckpointingException(f"The manager of {self.root!r} is closed: make a new one.")
        ranks = self._ranks()
        background_save.raise_pending_errors(ranks, self._settings.process_group)
        self._handles = [handle for handle in self._handles if not handle.done()]
        settings = replace(self._settings, overwrite=overwrite, content_metadata=content_metadata)
        with ranks.phase(
            "check the step", same={"step": step, "overwrite": overwrite, **self._of_all_ranks}
        ):
            metrics = metrics or {}
            own = json.dumps(
                [steps.finite_numbers(metrics), list(map(str, metrics)), bool(pinned)]
            ).encode()
            location = self.location(step)
        try:
            handle = self._start(ranks, step, sharded_state_dict, own, settings)
        except BaseException as error:
            if not (
                self._logs_failures and failures.all_find(ranks, error, failures.is_of_the_storage)
            ):
                raise
            logger.error(
                "step %d is not saved to %s: %s: %s", step, self.root, type(error).__name__, error
            )
            handle = background_save.finished_handle(location, partial(_raise, error))
        handle.was_asked = handle.was_asked or self._logs_failures
        handle.add_done_callback(partial(self._note_failure, step))
        self._handles.append(handle)
        return handle

    @operation
    @paused_garbage_collection()
    def reserve_staging_memory(self, sharded_state_dict: ShardedStateDict) -> Future[int]:
        """Prepare the first `save`, see `distckpt.reserve_staging_memory`, with the settings of
        this manager.

        Collective operation: all ranks must call it. Pointless with `async_save=False`.
        """
        ranks = self._ranks()
        return background_save.reserve(
            ranks,
            self._settings,
            partial(plan_save, ranks, sharded_state_dict, "", has_target=False),
        )

    def _start(
        self,
        ranks: Ranks,
        step: int,
        sharded_state_dict: ShardedStateDict,
        own: bytes,
        settings: SaveSettings,
    ) -> SaveHandle:
        note: dict[str, Any] = {}
        location = self.location(step)
        given = [json.loads(text) for text in ranks.gather(own)]
        with ranks.phase("check the target step", decision=True):
            if ranks.is_coordinator:
                # What the coordinator finds counts.
                self._warn_about_newer(step)
                finite: dict[str, float] = {}
                names: set[str] = set()
                for numbers, of_rank, _ in reversed(given):
                    finite |= numbers
                    names.update(of_rank)
                name = self._looks.begin_save(self.root, step, names, self._policy.best_metric)
                note = {
                    "step": step,
                    "save": name,
                    "metrics": finite,
                    "pinned": any(pin for *_, pin in given),
                }
                settings = replace(
                    settings, overwrite=settings.overwrite or steps.must_replace(self.root, step)
                )
        settings = replace(settings, notes={steps.NOTE: note})
        plan = partial(plan_save, ranks, sharded_state_dict, location)
        write = partial(self._write, step)
        if self._is_async:
            return background_save.start(
                ranks, background_save.prepare(ranks, settings, plan, write)
            )
        report = write(ranks, plan(settings))
        return background_save.finished_handle(location, lambda: report)

    def _warn_about_newer(self, step: int) -> None:
        """Name, once, the steps that a restart would prefer to one that is going to be saved."""
        there = map(steps.parse_step, steps.list_root(self.root))
        newer = {other for other in there if other is not None and other > step}
        if newer - self._named_newer:
            self._named_newer |= newer
            logger.warning(
                "step %d is saved to %s beside newer steps %s, of which a restart loads the "
                "newest: to go on from step %d for good, remove those (%s, ...)",
                step, self.root, sorted(newer), step, self.location(min(newer)),
            )  # fmt: skip

    def _note_failure(self, step: int, handle: Future[SaveReport]) -> None:
        error = Future.exception(handle)  # that of handles counts as asking
        if error is not None:
            self.failures[step] = f"{type(error).__name__}: {error}"

    def _write(self, step: int, ranks: Ranks, save: PlannedSave) -> SaveReport:
        if ranks.is_coordinator:
            with _only_logging(f"clear up in {self.root}"):
                retention.clear_leftovers(self.root, self._looks)
        report = write_and_commit(ranks, save)
        if ranks.is_coordinator:
            self._after_commit(step)
        return report

    @operation
    def load(
        self, sharded_state_dict: ShardedStateDict, step: int | None = None, **options: Any
    ) -> StateDict:
        """Load a step, the newest one that loads when none is given. Waits first for the saves in
        progress.

        Without `step`, one that turns out to be damaged or is removed while it is read is passed
        over on all ranks, as `latest` passes over those whose damage shows from outside; `skipped`
        and the log have the reasons. All other
        errors are raised: a step that does not match the request is not passed over.

        Args:
            sharded_state_dict: see `distckpt.load`. A step that is passed over may have been read
                partly; the one that is loaded overwrites all that it holds.
            step: None for the newest one that loads.
            options: further arguments of `distckpt.load`, whose result is returned.

        Raises:
            CheckpointNotFoundError: the step is not there, or no step can be loaded, with the
                problem of each.
            CheckpointingException: as `distckpt.load` does.
        """
        background.wait_for_all()
        ranks, group = self._ranks(), self._settings.process_group
        if ranks.is_coordinator:
            with _only_logging(f"look into {self.root}"):
                self._looks.look(self.root)

        def read(step: int) -> StateDict:
            # A tuple in some modes of `strict`, as `options` say.
            return cast(
                StateDict,
                load(sharded_state_dict, self.location(step), process_group=group, **options),
            )

        with ranks.phase("check the step", same={"step": step}):
            if step is not None:
                steps.step_name(step)
        if step is not None:
            return read(step)
        self.skipped, advice = {}, ""
        while True:
            newest, skipped = ranks.decide_json("find the latest checkpoint", self._find_newest)
            self.skipped |= dict(skipped)
            if newest is None:
                reasons = "".join(f"\n  {name}: {reason}" for name, reason in self.skipped.items())
                if not locations.exists(self.root):
                    advice = f" {absence(self.root)}"
                raise CheckpointNotFoundError(
                    f"No step in {self.root!r} can be loaded.{advice}{reasons}"
                )
            try:
                return read(newest)
            except BaseException as error:
                if not failures.all_find(
                    ranks, error, partial(failures.is_damage_of, self.location(newest))
                ):
                    raise
                self.skipped[newest] = f"{type(error).__name__}: {error}"
            advice = " What the given tensors hold now is undefined: some were filled before the damage was found."
            if ranks.is_coordinator:
                logger.warning(
                    "step %d in %s is passed over: %s", newest, self.root, self.skipped[newest]
                )

    def latest(self) -> int | None:
        """Return the newest complete step, None when there is none; `skipped` gets the problems of
        newer ones.

        Marker, manifest, and the sizes and headers of all files are checked. Saves in progress do
        not count. Each rank
        looks for itself: in a job, let one rank call this, or just call `load`, which all ranks
            decide together.
        """
        self.skipped = {}
        newest, skipped = self._find_newest()
        self.skipped = dict(skipped)
        return newest

    def _find_newest(self) -> tuple[int | None, list[tuple[int, str]]]:
        """Return the newest complete step that is not in `skipped`, and the problems of it and of
        newer ones.
        """
        newest, problems = steps.newest_complete_step(self.root, self.skipped)
        for step, problem in problems.items():
            if step not in self.skipped:
                logger.warning("step %d in %s is passed over: %s", step, self.root, problem)
        return newest, list(problems.items())

    def steps(self) -> list[int]:
        """Return the steps that were committed and are still there, in ascending order, without
        checking them.
        """
        return steps.committed_steps(self.root)

    def wait(self) -> None:
        """Wait until all saves have ended and old checkpoints are removed.

        Raises:
            CheckpointingException: a save failed, and nobody has asked for its result yet; not with
                `on_failure="log"`.
        """
        for handle in self._handles:
            handle.error()
        background_save.raise_unseen_error(self._handles)

    def close(self) -> None:
        """Wait as `wait` does, and free the memory that saves used. Calling it again does
        nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.wait()
        finally:
            release_staging_memory()

    def __enter__(self) -> CheckpointManager:
        """Return the manager."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the manager. An error of the block is not replaced by one of a save."""
        if error is None:
            self.close()
            return
        with contextlib.suppress(Exception):  # it was logged when it happened
            self.close()

    def _ranks(self) -> Ranks:
        return Ranks(self._settings.process_group)

    def _after_commit(self, step: int) -> None:
        """Update the tracker file and remove what is not kept. An error here does not fail the
        save.
        """
        with _only_logging(f"write {steps.TRACKER}"):
            steps.write_tracker(self.root, step, self._settings.durable)
        with _only_logging(f"remove old checkpoints from {self.root}"):
            saved = steps.own_steps(self.root) if self._policy.keep_last is not None else []
            surplus = [
                old
                for old in retention.surplus(self.root, self._policy, saved, step)
                if self._looks.knows(old)
            ]
            self.not_removed = retention.remove_steps(self.root, surplus)


@contextlib.contextmanager
def _only_logging(doing: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.warning("could not %s: %s: %s", doing, type(error).__name__, error)


def _raise(error: BaseException) -> NoReturn:
    raise error

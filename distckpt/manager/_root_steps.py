"""Steps of a manager in one directory, its root."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from distckpt._base.errors import CheckpointNotFoundError
from distckpt._base.options import SaveReport
from distckpt._commit import posix
from distckpt._operations.planned_save import PlannedSave, SaveRequest, write_and_commit
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.manager import _rejections as rejections
from distckpt.manager import _removal as removal
from distckpt.manager import _steps as steps
from distckpt.manager._removal import Retention, metric_names, surplus, unknown_metric
from distckpt.manager._steps import Saved, united_note

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class RootSteps:
    """The steps in the root: where a manager saves, loads and removes them.

    Attributes:
        location: of the root.
        not_removed: the reason why a step could not be removed, by step, on rank 0.
        seen: the steps that it may remove.
    """

    def __init__(
        self, given: str | os.PathLike[str], request: SaveRequest, policy: Retention
    ) -> None:
        """Start without a look at the root.

        Args:
            given: the root as the program names it, where a restart looks.
            request: the request of all saves; its path is the root.
            policy: the conditions for keeping a step.
        """
        self.location = os.fspath(request.path)
        self.not_removed: dict[int, str] = {}
        self._tried: set[str] = set()
        self._request = request
        self._policy = policy
        # A save in which nothing happens for longer has lost a rank, and fails.
        patience = 2 * request.options.timeout
        self.seen = SeenSteps(given, self.location, patience, not policy.keeps_all)

    def step(self, step: int) -> str:
        """Return the location of a step, whether it exists or not."""
        return steps.step_location(self.location, step)

    # --- Save

    def meet(self, ranks: Ranks) -> None:
        """Do nothing: the root is the same one for all ranks."""

    def aimed(self, request: SaveRequest, step: int) -> SaveRequest:
        """Return a request for a step."""
        return replace(request, path=self.step(step))

    def begin(self, step: int, notes: Sequence[bytes], request: SaveRequest) -> SaveRequest:
        """Return the request with all ranks' notes, after checking for the step."""
        self.seen.warn_about_restart(step)
        overwrite = (
            request.overwrite
            or rejections.warn_of(self.location, step, "replaced when the new one is complete")
            or steps.must_replace(self.location, step)
        )
        return replace(self.noted(step, notes, request), overwrite=overwrite)

    def noted(self, step: int, notes: Sequence[bytes], request: SaveRequest) -> SaveRequest:
        """Return the request with all ranks' notes."""
        metrics, names, pinned = united_note(notes)
        name = self.seen.begin_save(step, names, self._policy.best_metric)
        fields = {"step": step, "save": name, "metrics": metrics, "pinned": pinned}
        return replace(request, notes={steps.NOTE: fields})

    def check_planned(self, save: PlannedSave) -> None:
        """Do nothing: all formats can be stored."""

    def write(self, step: int, ranks: Ranks, save: PlannedSave) -> SaveReport:
        """Write and commit a planned save.

        Collective operation: all ranks must call it.
        """
        if ranks.is_coordinator:
            self.clear_leftovers()
        report = write_and_commit(ranks, save)
        if ranks.is_coordinator:
            self.after_commit(step)
        return report

    def clear_leftovers(self) -> None:
        """Remove leftovers of interrupted saves."""
        with locations.only_logging(f"clear up in {self.location}"):
            removal.clear_leftovers(self.location, self.seen.is_abandoned)

    def after_commit(self, step: int) -> None:
        """Update the tracker file and remove surplus steps.

        An error here does not fail the save.
        """
        root = self.location
        self.seen.note_saved(step)
        with locations.only_logging(f"write {steps.TRACKER}"):
            path = locations.join(root, steps.TRACKER)
            steps.write_file(path, str(step).encode(), self._request.options.durable)
        with locations.only_logging(f"remove old checkpoints from {root}"):
            if self._policy.keeps_all:
                return
            saved = steps.own_steps(root)
            surplus_steps = surplus(root, self._policy, saved, step)
            known = [old for old in surplus_steps if self.seen.knows(old)]
            self.not_removed = removal.remove_steps(root, known)
            self._remove_optimizers([old for old in saved if old not in known], step)

    def _remove_optimizers(self, saved: Sequence[Saved], last: int) -> None:
        known = []
        for old in removal.with_surplus_optimizer(self.location, self._policy, saved, last):
            # Each is tried once: a reason in its keys or files does not go away.
            if self.seen.knows(old) and old.save not in self._tried:
                known.append(old)
                self._tried.add(old.save)
        self.not_removed |= removal.remove_optimizers(self.location, known)

    # --- Load

    def load(
        self,
        ranks: Ranks,
        read: Callable[[str], _Result],
        step: int | None,
        skipped: dict[int, str],
    ) -> _Result:
        """Load a step, or the newest one that loads.

        Collective operation: all ranks must call it. `read` loads a step at a location; `skipped`
        gets the problems of newer ones.
        """
        if ranks.is_coordinator:
            # Retention may remove the steps that are there.
            with locations.only_logging(f"look into {self.location}"):
                self.seen.look()
            if step is not None:
                with locations.only_logging(f"look for a rejection of step {step}"):
                    rejections.warn_of(self.location, step, "loaded because it was named")
        if step is not None:
            return read(self.step(step))
        return load_newest(ranks, self.location, skipped, read)

    def find(self, ranks: Ranks) -> tuple[int | None, dict[int, str]]:
        """Return the newest step that may load, and newer ones' problems."""
        del ranks
        return find_newest(self.location, {})

    def list(self, ranks: Ranks) -> list[int]:
        """Return the committed steps, ascending."""
        del ranks
        return steps.committed_steps(self.location)

    def reject(self, step: int, reason: str | None) -> None:
        """Reject a step, or take that back with None."""
        rejections.reject(self.location, step, reason)

    # --- End

    def wait(self) -> None:
        """Do nothing: a save ends when the root has it."""

    def close(self, has_failed: bool) -> None:
        """Do nothing: there is no other work than saves."""


def load_newest(
    ranks: Ranks, root: str, skipped: dict[int, str], read: Callable[[str], _Result]
) -> _Result:
    """Load the newest step that loads; `skipped` gets the problems of newer ones.

    Collective operation: all ranks must call it. `read` loads a step at a location.

    Raises:
        CheckpointNotFoundError: no step can be loaded, with the problem of each.
    """
    is_partly_filled = False

    def find() -> list[object]:
        newest, problems = find_newest(root, skipped)
        return [newest, list(problems.items())]

    while True:
        newest, problems = ranks.decide_json("find the latest checkpoint", find)
        skipped.update(problems)
        if newest is None:
            raise steps.nothing_to_load(root, skipped, is_partly_filled)
        location = steps.step_location(root, newest)
        try:
            return read(location)
        except BaseException as error:
            if not steps.all_find(ranks, error, partial(steps.is_damage_of, location)):
                raise
            # It was complete when it was found.
            reason = steps.REMOVED
            if not isinstance(error, CheckpointNotFoundError):
                reason = f"{type(error).__name__}: {error}"
            skipped[newest] = reason
        is_partly_filled = True
        if ranks.is_coordinator:
            _log_skipped(root, newest, skipped[newest])


def find_newest(root: str, skipped: Mapping[int, str]) -> tuple[int | None, dict[int, str]]:
    """Return the newest complete step outside `skipped`, and newer ones' problems."""
    newest, problems = rejections.newest_good_step(root, skipped)
    for step, problem in problems.items():
        if step not in skipped:
            _log_skipped(root, step, problem)
    return newest, problems


def _log_skipped(root: str, step: int, reason: str) -> None:
    logger.warning("step %d in %s is passed over: %s", step, root, reason)


# --- The steps that a manager has seen ------------------------------------------------------------


class SeenSteps:
    """The steps that a manager has seen in its directory.

    It removes nothing else, since other programs may save there, too. It warns where a restart
    would go on from another step, or in another directory.
    """

    def __init__(
        self,
        given: str | os.PathLike[str],
        root: str,
        patience: float,
        removes_steps: bool,
    ) -> None:
        """Start without a look at the directory.

        Args:
            given: the directory as the program names it, where a restart looks.
            root: the directory where this manager goes on.
            patience: seconds without a change after which an unfinished save counts as abandoned.
            removes_steps: whether the manager needs to know the steps that are there.
        """
        self._given = locations.normalize(given)
        self._root = root
        self._saves: set[tuple[int, str]] | None = None if removes_steps else set()
        self._metrics: set[str] = set()
        self._patience = patience
        self._unfinished: dict[str, tuple[object, float]] = {}
        self._last_saved: tuple[int, object] | None = None
        self._named_newer: set[int] = set()
        self._named_elsewhere = ""

    def look(self) -> set[tuple[int, str]]:
        """Return the known saves. The first look remembers those that are there."""
        if self._saves is None:
            saved = _saved_in(self._root)
            self._saves = {(item.step, item.save) for item in saved}
            self._metrics.update(metric_names(saved))
        return self._saves

    def look_if_it_answers(self) -> None:
        """Look at the directory; if it does not answer, nothing there is known."""
        try:
            self.look()
        except OSError as error:
            logger.warning(
                "%s cannot be listed, and no step there is removed: %s", self._root, error
            )
            self._saves = set()

    def begin_save(self, step: int, metrics: Collection[str], best_metric: str | None) -> str:
        """Return a name for a save of this manager.

        Raises:
            ValueError: neither this step nor an earlier one has the metric.
        """
        saves = self.look()
        self._metrics.update(metrics)
        if metrics and (problem := unknown_metric(best_metric, self._metrics)):
            raise ValueError(
                f"{problem}. Where it is not measured at every step, give NaN for it, or no "
                "metrics at all."
            )
        name = secrets.token_hex(8)
        saves.add((step, name))
        return name

    def knows(self, saved: Saved) -> bool:
        """Whether a step was there at the first look, or saved here.

        All other steps may be in use.
        """
        return (saved.step, saved.save) in (self._saves or ())

    def warn_about_restart(self, step: int) -> None:
        """Name, once, the reasons why a restart would not find this run.

        These are steps that it would prefer, another place of the same path, or a replaced
        directory.
        """
        leads_to = posix.resolve(self._given)
        if leads_to not in (posix.resolve(self._root), self._named_elsewhere):
            self._named_elsewhere = leads_to
            logger.warning(
                "%s leads to %s now, where a restart looks for steps: this manager goes on in %s. "
                "Make a new manager to save there.",
                self._given,
                leads_to,
                self._root,
            )
        last, directory = self._last_saved or (None, None)
        # Other jobs and people remove steps, too, and stores do not say which directory it is.
        is_same = last is None or _identity_of(self._root) == directory
        if last is None or is_same or locations.exists(steps.step_location(self._root, last)):
            self._warn_about_newer(step)
            return
        self._last_saved = None
        logger.warning(
            "step %d is no longer in %s, where it was saved: it, or the directory, was renamed, "
            "replaced or removed. Step %d is saved to the directory that has this name now.",
            last,
            self._root,
            step,
        )

    def _warn_about_newer(self, step: int) -> None:
        """Name, once, the steps that a restart would prefer to this one."""
        existing = map(steps.parse_step, steps.list_root(self._root))
        newer = {other for other in existing if other is not None and other > step}
        if newer - self._named_newer:
            newer = newer.difference(rejections.rejections(self._root))
        if newer - self._named_newer:
            self._named_newer |= newer
            logger.warning(
                "step %d is saved to %s beside newer steps %s, of which a restart loads the "
                "newest: to go on from step %d for good, remove those (%s, ...)",
                step,
                self._root,
                sorted(newer),
                step,
                steps.step_location(self._root, min(newer)),
            )

    def note_saved(self, step: int) -> None:
        """Note the last committed step, and which directory it is in."""
        self._last_saved = step, _identity_of(self._root)

    def is_abandoned(self, location: str) -> bool:
        """Whether an unfinished save has not changed for long.

        Time counts from an earlier look, by the clock of this process.
        """
        changes = removal.changes_in(location)
        now = time.monotonic()
        before, since = self._unfinished.get(location, (None, now))
        if before != changes:
            self._unfinished[location] = changes, now
            return False
        return now - since >= self._patience


def _identity_of(directory: str) -> object:
    """Return a value that identifies a local directory, whatever its name."""
    with contextlib.suppress(OSError):
        status = os.stat(directory)
        return status.st_dev, status.st_ino
    return None


def _saved_in(root: str) -> list[Saved]:
    """Return the saves in a directory, also ones being overwritten or removed."""
    saves = []
    for name in steps.list_root(root):
        step = steps.step_in(name)
        if step is not None:
            saves.append(steps.saved_at(locations.join(root, name), step))
    return [saved for saved in saves if saved is not None]

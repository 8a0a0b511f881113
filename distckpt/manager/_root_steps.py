"""Steps of a manager in one directory, its root."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from distckpt._base.errors import CheckpointNotFoundError
from distckpt._base.options import SaveReport
from distckpt._operations.planned_save import PlannedSave, SaveRequest, write_and_commit
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.manager import _rejections as rejections
from distckpt.manager import _removal as removal
from distckpt.manager import _steps as steps
from distckpt.manager._removal import Retention, surplus
from distckpt.manager._seen_steps import SeenSteps
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
        note = united_note(notes)
        name = self.seen.begin_save(step, note.names, self._policy.best_metric)
        fields = {"step": step, "save": name, "metrics": note.metrics, "pinned": note.pinned}
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
            self.look()
            if step is not None:
                with locations.only_logging(f"look for a rejection of step {step}"):
                    rejections.warn_of(self.location, step, "loaded because it was named")
        if step is not None:
            return read(self.step(step))
        return load_newest(ranks, self.location, skipped, read)

    def look(self) -> None:
        """Note the steps that are there, which retention may remove later."""
        with locations.only_logging(f"look into {self.location}"):
            self.seen.look()

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

"""The steps that a manager has seen in its directory."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Collection

from distckpt._commit import conditional_put, posix
from distckpt._storage import locations
from distckpt.manager import _steps as steps
from distckpt.manager._rejections import rejections
from distckpt.manager._removal import metric_names, unknown_metric
from distckpt.manager._steps import Saved

logger = logging.getLogger(__name__)


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
            newer = newer.difference(rejections(self._root))
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
        changes = changes_in(location)
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


def changes_in(location: str) -> dict[str, tuple[int, float]]:
    """Return size and last change of a save's files, by path.

    Directories are among them.
    """
    if not locations.is_local(location):
        return dict.fromkeys(conditional_put.unfinished_files(location), (0, 0.0))
    changes = {}
    for directory, _, names in os.walk(location):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(path)
                changes[path] = status.st_size, status.st_mtime
    return changes

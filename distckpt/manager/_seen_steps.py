"""The steps that a manager has seen in its directory."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Collection

from distckpt._commit import conditional_put
from distckpt._storage import locations
from distckpt.manager import _steps as steps
from distckpt.manager._retention import metric_names, unknown_metric
from distckpt.manager._steps import Saved


class SeenSteps:
    """The steps that a manager has seen in its directory.

    It removes nothing else, since other programs may save there, too.
    """

    def __init__(self, root: str, patience: float, removes_steps: bool) -> None:
        """Start without a look at the directory.

        Args:
            root: the directory.
            patience: seconds without a change after which an unfinished save counts as abandoned.
            removes_steps: whether the manager needs to know the steps that are there.
        """
        self._root = root
        self._saves: set[tuple[int, str]] | None = None if removes_steps else set()
        self._metrics: set[str] = set()
        self._patience = patience
        self._unfinished: dict[str, tuple[object, float]] = {}

    def look(self) -> set[tuple[int, str]]:
        """Return the known saves. The first look remembers those that are there."""
        if self._saves is None:
            saved = _saved_in(self._root)
            self._saves = {(item.step, item.save) for item in saved}
            self._metrics.update(metric_names(saved))
        return self._saves

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

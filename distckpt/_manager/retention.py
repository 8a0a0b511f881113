"""Choose the checkpoints to keep, and remove the others."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from distckpt._base.messages import check_choice
from distckpt._commit import conditional_put, posix, running
from distckpt._manager import steps
from distckpt._manager.steps import Saved, step_name
from distckpt._storage import locations

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """The conditions of which a step must meet one to be kept, see `CheckpointManager`; without `keep_last` all are."""

    keep_last: int | None = None
    keep_every: int | None = None
    keep: Callable[[int], bool] | None = None
    best_metric: str | None = None
    best_mode: Literal["min", "max"] = "min"
    keep_best: int = 1

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        check_choice("best_mode", self.best_mode, ("min", "max"))
        others = (self.keep_every, self.keep, self.best_metric)
        if self.keep_last is None and any(other is not None for other in others):
            raise ValueError("Without keep_last every checkpoint is kept: give keep_last as well, at least 1.")


def surplus(root: str, policy: Retention, saved: Sequence[Saved], newest: int) -> list[Saved]:
    """Return the steps that are not to be kept, oldest first.

    `saved` are in ascending order; `newest` is kept and counts as complete. As few others as possible are checked.
    """
    if policy.keep_last is None:
        return []
    kept = {newest, *_best(policy, saved)}
    num_complete = 1
    for item in reversed(saved):
        step = item.step
        if num_complete < policy.keep_last and step != newest:
            # Also one that is incomplete, or cannot be read today: only what is older than enough complete ones goes.
            kept.add(step)
            num_complete += steps.problem_with(root, step) is None
        is_round = policy.keep_every is not None and step % policy.keep_every == 0
        if item.pinned or is_round or (policy.keep is not None and policy.keep(step)):
            kept.add(step)
    return [item for item in saved if item.step not in kept]


def _best(policy: Retention, saved: Sequence[Saved]) -> list[int]:
    metric = policy.best_metric
    if metric is None:
        return []
    sign = 1 if policy.best_mode == "min" else -1
    # Of equal values the newer step is the better one.
    ranked = sorted((sign * item.metrics[metric], -item.step) for item in saved if metric in item.metrics)
    return [-step for _, step in ranked[: policy.keep_best]]


def remove_step(root: str, step: int, save: str) -> bool:
    """Remove a step, so that it is never half deleted under its name; False when it is not what `save` saved."""
    location = locations.join(root, step_name(step))

    def is_that_save(place: str) -> bool:
        found = steps.saved_at(place, step)
        return found is not None and found.save == save

    if not locations.is_local(root):
        return conditional_put.remove_checkpoint(location, is_that_save)
    # Under this name it is put back when we are interrupted, and others do not remove it.
    aside = locations.join(root, f".{step_name(step)}.old-{secrets.token_hex(8)}")
    try:
        locations.rename(location, aside, durable=False)
    except FileNotFoundError:
        return False
    try:
        if not is_that_save(aside):
            return False
        discard(aside)
    finally:
        posix.put_back(location)
    return True


def discard(directory: str) -> None:
    """Remove a local directory beside the steps, in one step for those that look at its name."""
    parent, name = locations.split(directory)
    trash = locations.join(parent, f"{name.rpartition('.')[0]}.trash-{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):  # another program was faster
        locations.rename(directory, trash)
        locations.remove_tree(trash)


Changes = dict[str, tuple[int, float]]
"""Size and time of the last change of each file and directory, by path."""


def changes_in(location: str) -> Changes:
    """Return what shows that something is being written in a directory: changes that one look after another finds."""
    if not locations.is_local(location):
        return dict.fromkeys(conditional_put.unfinished_files(location), (0, 0.0))
    found = {}
    for directory, _, names in os.walk(location):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(path)
                found[path] = status.st_size, status.st_mtime
    return found


class Looks:
    """What a manager has seen in its directory; it removes nothing else, since other programs may save there too."""

    def __init__(self, patience: float, removes_steps: bool) -> None:
        self._saves: set[tuple[int, str]] | None = None if removes_steps else set()
        self._patience = patience
        self._unfinished: dict[str, tuple[Changes, float]] = {}

    def look(self, root: str) -> set[tuple[int, str]]:
        """Remember the steps that are there, when this is the first look."""
        if self._saves is None:
            places = [(name, step) for name in steps.list_root(root) if (step := steps.step_in(name)) is not None]
            found = [steps.saved_at(locations.join(root, name), step) for name, step in places]
            self._saves = {(saved.step, saved.save) for saved in found if saved is not None}
        return self._saves

    def begin_save(self, root: str, step: int) -> str:
        """Return a name for a save of this manager."""
        name = secrets.token_hex(8)
        self.look(root).add((step, name))
        return name

    def knows(self, saved: Saved) -> bool:
        """Tell whether a step was there at the first look, or saved by this manager: all others may be in use."""
        return (saved.step, saved.save) in (self._saves or ())

    def is_abandoned(self, location: str) -> bool:
        """Return True when nothing has changed in an unfinished save since a look long ago, on this process's clock."""
        found, now = changes_in(location), time.monotonic()
        before, since = self._unfinished.get(location, (None, now))
        if before != found:
            self._unfinished[location] = found, now
            return False
        return now - since >= self._patience


def clear_leftovers(root: str, looks: Looks) -> None:
    """Remove what interrupted saves and removals of earlier runs have left, and give a lost step its name back."""
    for name in steps.list_root(root):
        location = locations.join(root, name)
        replaced = steps.replaced_step(name)
        if replaced is not None:
            posix.put_back(locations.join(root, step_name(replaced)))
            discard(location)
        elif steps.is_free_to_remove(name):
            locations.remove_tree(location)
        elif steps.is_leftover(name):
            with running.claimed(location) as has_ended:
                if looks.is_abandoned(location) if has_ended is None else has_ended:
                    logger.info("removing %s, which an interrupted save has left in %s", name, root)
                    discard(location)
    if not locations.is_local(root):
        for step in set(steps.all_steps(root)).difference(steps.committed_steps(root)):
            location = locations.join(root, step_name(step))
            if looks.is_abandoned(location):
                logger.info("removing what an interrupted save of step %d has left in %s", step, root)
                conditional_put.remove_unfinished(location)

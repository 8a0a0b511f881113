"""Choose the checkpoints to keep, and remove the others."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from distckpt._base.messages import check_choice, did_you_mean
from distckpt._commit import conditional_put, posix, running
from distckpt._manager import steps
from distckpt._manager.steps import Saved, step_name
from distckpt._storage import locations

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """The conditions of which a step must meet one to be kept, see `CheckpointManager`; without
    `keep_last` all are.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep: Callable[[int], bool] | None = None
    best_metric: str | None = None
    best_mode: Literal["min", "max"] = "min"
    keep_best: int = 1

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        check_choice("best_mode", self.best_mode, ("min", "max"))
        if self.keep_best != 1 and self.best_metric is None:
            raise ValueError(
                f"keep_best={self.keep_best} must be of some metric: give best_metric as well."
            )
        others = (self.keep_every, self.keep, self.best_metric)
        if self.keep_last is None and any(other is not None for other in others):
            raise ValueError(
                "Without keep_last every checkpoint is kept: give keep_last as well, at least 1."
            )


def surplus(root: str, policy: Retention, saved: Sequence[Saved], newest: int) -> list[Saved]:
    """Return the steps that are not to be kept, oldest first.

    `saved` are in ascending order; `newest` is kept and counts as complete. As few others as
    possible are checked.
    """
    if policy.keep_last is None:
        return []
    # Without any metrics there is no best step yet.
    if any(item.metrics for item in saved) and (
        problem := unknown_metric(policy.best_metric, metric_names(saved))
    ):
        logger.warning("nothing is removed from %s: %s", root, problem)
        return []
    kept = {newest, *_best(policy, saved)}
    num_complete = 1
    for item in reversed(saved):
        step = item.step
        if num_complete < policy.keep_last and step != newest:
            # Also one that is incomplete, or cannot be read today: only what is older than enough
            # complete ones goes.
            kept.add(step)
            num_complete += steps.problem_with(root, step) is None
        is_round = policy.keep_every is not None and step % policy.keep_every == 0
        if item.pinned or is_round or (policy.keep is not None and policy.keep(step)):
            kept.add(step)
    return [item for item in saved if item.step not in kept]


def metric_names(saved: Iterable[Saved]) -> set[str]:
    """Return the names of all metrics of steps."""
    return {name for item in saved for name in item.metrics}


def unknown_metric(metric: str | None, names: Collection[str]) -> str | None:
    """Return a message about a metric that is not among those that are there, None when it is."""
    if metric is None or metric in names:
        return None
    return (
        f"no step has the best_metric {metric!r}, only {sorted(names)}{did_you_mean(metric, names)}"
    )


def _best(policy: Retention, saved: Sequence[Saved]) -> list[int]:
    metric = policy.best_metric
    if metric is None:
        return []
    sign = 1 if policy.best_mode == "min" else -1
    # Of equal values the newer step is the better one.
    ranked = sorted(
        (sign * item.metrics[metric], -item.step) for item in saved if metric in item.metrics
    )
    return [-step for _, step in ranked[: policy.keep_best]]


def remove_steps(root: str, surplus: Sequence[Saved]) -> dict[int, str]:
    """Remove steps; return why some are still there, by step."""
    problems = {}
    for step, save, *_ in surplus:
        try:
            if remove_step(root, step, save):
                logger.info("removed step %d from %s", step, root)
            else:
                problems[step] = "another program has replaced it"
        except OSError as error:
            problems[step] = f"{type(error).__name__}: {error}"
            logger.warning("step %d cannot be removed from %s: %s", step, root, error)
    return problems


def remove_step(root: str, step: int, save: str) -> bool:
    """Remove a step, so that it is never half deleted under its name; False when another save is
    there.
    """
    location = locations.join(root, step_name(step))

    def is_that_save(place: str) -> bool:
        found = steps.saved_at(place, step)
        return found is not None and found.save == save

    if not locations.is_local(root):
        return conditional_put.remove_checkpoint(location, is_that_save)
    _check_removable(location)
    # Under this name it is put back when we are interrupted, and others do not remove it.
    aside = locations.join(root, f".{step_name(step)}.old-{secrets.token_hex(8)}")
    try:
        locations.rename(location, aside, durable=False)
    except FileNotFoundError:
        return True
    try:
        if not is_that_save(aside):
            return False
        _discard(aside)
    finally:
        posix.put_back(location)
    return True


def _check_removable(directory: str) -> None:
    """Raise PermissionError when this user may not remove all files in a directory, before any is
    removed.
    """
    for inner, _, _ in os.walk(directory):
        if not os.access(inner, os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, "its files cannot be removed by this user", inner)


def _discard(directory: str) -> None:
    """Remove a local directory beside the steps, in one step for those that look at its name."""
    parent, name = locations.split(directory)
    trash = locations.join(parent, f"{name.rpartition('.')[0]}.trash-{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):  # another program was faster
        locations.rename(directory, trash)
        locations.remove_tree(trash)
    if locations.exists(trash):
        raise OSError(errno.ENOTEMPTY, "not all of it can be removed", trash)


def changes_in(location: str) -> dict[str, tuple[int, float]]:
    """Return the size and the time of the last change of each file and directory of a save, by
    path.
    """
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
    """What a manager has seen in its directory; it removes nothing else, since other programs may
    save there too.
    """

    def __init__(self, patience: float, removes_steps: bool) -> None:
        self._saves: set[tuple[int, str]] | None = None if removes_steps else set()
        self._metrics: set[str] = set()
        self._patience = patience
        self._unfinished: dict[str, tuple[object, float]] = {}

    def look(self, root: str) -> set[tuple[int, str]]:
        """Remember the steps that are there, when this is the first look."""
        if self._saves is None:
            places = [
                (name, step)
                for name in steps.list_root(root)
                if (step := steps.step_in(name)) is not None
            ]
            found = [steps.saved_at(locations.join(root, name), step) for name, step in places]
            saved = [item for item in found if item is not None]
            self._saves = {(item.step, item.save) for item in saved}
            self._metrics.update(metric_names(saved))
        return self._saves

    def begin_save(
        self, root: str, step: int, metrics: Collection[str], best_metric: str | None
    ) -> str:
        """Return a name for a save of this manager; ValueError when neither it nor an earlier one
        has the metric.
        """
        saves = self.look(root)
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
        """Tell whether a step was there at the first look, or saved by this manager: all others may
        be in use.
        """
        return (saved.step, saved.save) in (self._saves or ())

    def is_abandoned(self, location: str) -> bool:
        """Return True when nothing has changed in an unfinished save since a look long ago, on this
        process's clock.
        """
        found, now = changes_in(location), time.monotonic()
        before, since = self._unfinished.get(location, (None, now))
        if before != found:
            self._unfinished[location] = found, now
            return False
        return now - since >= self._patience


def clear_leftover(root: str, name: str, is_abandoned: Callable[[str], bool]) -> bool:
    """Remove what an interrupted save or removal has left in a directory; False when it is still
    there.

    `is_abandoned` is asked about saves that may be running on other machines.
    """
    location = locations.join(root, name)
    try:
        if steps.is_free_to_remove(name):
            locations.remove_tree(location)
            return not locations.exists(location)
        with running.claimed(location) as has_ended:
            is_dead = is_abandoned(location) if has_ended is None else has_ended
            if is_dead:
                logger.info("removing %s, which an interrupted save has left in %s", name, root)
                _discard(location)
        return is_dead
    except OSError as error:
        logger.warning("a leftover of an interrupted save cannot be removed: %s", error)
        return False


def clear_leftovers(root: str, looks: Looks) -> None:
    """Remove what interrupted saves and removals of earlier runs have left, and give a lost step
    its name back.
    """
    for name in steps.list_root(root):
        replaced = steps.replaced_step(name)
        if replaced is not None:
            posix.put_back(locations.join(root, step_name(replaced)))
        if replaced is not None or steps.is_leftover(name):
            clear_leftover(root, name, looks.is_abandoned if replaced is None else locations.exists)
    if not locations.is_local(root):
        for step in set(steps.all_steps(root)).difference(steps.committed_steps(root)):
            location = locations.join(root, step_name(step))
            if looks.is_abandoned(location):
                logger.info(
                    "removing what an interrupted save of step %d has left in %s", step, root
                )
                conditional_put.remove_unfinished(location)

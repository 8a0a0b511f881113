"""Choose the steps to keep, and remove others and leftovers."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from distckpt._base.errors import CheckpointingException
from distckpt._base.messages import check_choice, did_you_mean
from distckpt._checkpoint.opening import open_checkpoint
from distckpt._commit import conditional_put, hidden_directories, posix
from distckpt._format.manifest import OBJECT
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.manager import _steps as steps
from distckpt.manager._rejections import clear_stale, rejections
from distckpt.manager._steps import Saved, step_location

logger = logging.getLogger(__name__)

# --- Retention ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Retention:
    """The conditions of `CheckpointManager`.

    A step that meets one of them is kept; without `keep_last` all steps are.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep: Callable[[int], bool] | None = None
    best_metric: str | None = None
    best_mode: Literal["min", "max"] = "min"
    keep_best: int = 1
    keep_optimizer: int | None = None

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever removed."""
        return self.keep_last is None and self.keep_optimizer is None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best", "keep_optimizer"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
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

    def keeps_always(self, saved: Saved) -> bool:
        """Whether a step is kept whatever newer and better ones there are."""
        if saved.pinned:
            return True
        if self.keep_every is not None and saved.step % self.keep_every == 0:
            return True
        return self.keep is not None and self.keep(saved.step)


def surplus(root: str, policy: Retention, saved: Sequence[Saved], last: int) -> list[Saved]:
    """Return the steps that are not kept, oldest first.

    Checks as few steps as possible.

    Args:
        root: their directory.
        policy: the conditions for keeping a step.
        saved: all steps, in ascending order.
        last: the step that was saved last: it is complete, and kept, even if there are newer ones.
    """
    if policy.keep_last is None:
        return []
    # Without any metrics there is no best step yet.
    has_metrics = any(item.metrics for item in saved)
    if has_metrics and (problem := unknown_metric(policy.best_metric, metric_names(saved))):
        logger.warning("nothing is removed from %s: %s", root, problem)
        return []
    rejected = rejections(root)
    good = [item for item in saved if item.step not in rejected]
    newest = _newest(root, policy.keep_last, saved, last, rejected)
    steps_to_keep = newest | _best(policy, good)
    surplus_steps = []
    for item in saved:
        if item.step not in steps_to_keep and not policy.keeps_always(item):
            surplus_steps.append(item)
    return surplus_steps


def metric_names(saved: Iterable[Saved]) -> set[str]:
    """Return the names of all metrics of some steps."""
    names: set[str] = set()
    for item in saved:
        names.update(item.metrics)
    return names


def unknown_metric(metric: str | None, names: Collection[str]) -> str | None:
    """Return a message if a metric is unknown, or else None."""
    if metric is None or metric in names:
        return None
    return (
        f"no step has the best_metric {metric!r}, only {sorted(names)}{did_you_mean(metric, names)}"
    )


def _newest(
    root: str, keep_last: int, saved: Sequence[Saved], last: int, rejected: Container[int]
) -> set[int]:
    """Return the newest steps until `keep_last` are good, and the last save."""
    newest = {last}
    num_good = 0
    for item in reversed(saved):
        if num_good >= keep_last:
            break
        # One that is rejected or incomplete, or cannot be read today, stays as well.
        newest.add(item.step)
        if item.step not in rejected:
            num_good += item.step == last or steps.problem_with(root, item.step) is None
    return newest


def _best(policy: Retention, saved: Sequence[Saved]) -> set[int]:
    metric = policy.best_metric
    if metric is None:
        return set()
    sign = 1 if policy.best_mode == "min" else -1
    # Of equal values the newer step is the better one.
    ranked = sorted(
        (sign * item.metrics[metric], -item.step) for item in saved if metric in item.metrics
    )
    return {-step for _, step in ranked[: policy.keep_best]}


# --- Optimizer state ------------------------------------------------------------------------------


def with_surplus_optimizer(
    root: str, policy: Retention, saved: Sequence[Saved], last: int
) -> list[Saved]:
    """Return the steps that are to lose their optimizer state, oldest first.

    See `surplus` for the arguments.
    """
    if policy.keep_optimizer is None:
        return []
    candidates = [item for item in saved if item.has_optimizer]
    if len(candidates) <= policy.keep_optimizer:
        return []
    newest = _newest(root, policy.keep_optimizer, candidates, last, rejections(root))
    return [item for item in candidates if item.step not in newest and not item.pinned]


def remove_optimizer(root: str, step: int, save: str) -> bool:
    """Remove the optimizer state of a step; return False if it is not that save.

    Raises:
        CheckpointingException: it cannot be told, or not be removed there.
    """
    # Imported when it is needed: most managers keep it.
    from distckpt._checkpoint.model_keys import optimizer_keys
    from distckpt._tools.remove_tensors import remove_tensors

    stored = open_checkpoint(Ranks.alone(), step_location(root, step))
    note = steps.note_in(stored.marker)
    if note.get("save") != save:
        return False
    manifest = stored.manifest
    keys = optimizer_keys(stored)
    tensors = [key for key in keys if manifest.dtypes[manifest.key_index[key]] != OBJECT]
    if not keys:
        raise CheckpointingException(
            "no tensor has the key of an optimizer: save the optimizer itself, or a sharded state "
            "dict whose keys begin with optimizer.state"
        )
    if tensors:  # an optimizer without states has settings only
        remove_tensors(stored, tensors, {steps.NOTE: {**note, steps.OPTIMIZER_REMOVED: True}})
    return True


# --- Removal --------------------------------------------------------------------------------------


def remove_steps(root: str, surplus: Sequence[Saved]) -> dict[int, str]:
    """Remove steps; return the reason for each that is still there."""
    problems = _removing(root, surplus, remove_step, "step %d")
    if len(problems) < len(surplus):
        clear_stale(root, steps.list_root(root))
    return problems


def remove_optimizers(root: str, surplus: Sequence[Saved]) -> dict[int, str]:
    """Remove optimizer states of steps; return the reason for each that is still there."""
    return _removing(root, surplus, remove_optimizer, "the optimizer state of step %d")


def _removing(
    root: str, surplus: Sequence[Saved], remove: Callable[[str, int, str], bool], title: str
) -> dict[int, str]:
    """Remove something of each step; return the reason for each that is still there."""
    problems = {}
    for saved in surplus:
        target = title % saved.step
        try:
            if remove(root, saved.step, saved.save):
                logger.info("removed %s from %s", target, root)
            else:
                problems[saved.step] = "another program has replaced it"
        except (CheckpointingException, OSError) as error:
            problems[saved.step] = f"{type(error).__name__}: {error}"
            logger.warning("%s cannot be removed from %s: %s", target, root, error)
    return problems


def remove_step(root: str, step: int, save: str) -> bool:
    """Remove a step, unless it is from another save; return False then.

    It is never half deleted under its name.
    """
    location = step_location(root, step)

    def is_that_save(place: str) -> bool:
        saved = steps.saved_at(place, step)
        return saved is not None and saved.save == save

    if not locations.is_local(root):
        return conditional_put.remove_checkpoint(location, is_that_save)
    _check_removable(location)
    while not _take_away(location, is_that_save):
        # Another manager may have put it back meanwhile.
        if not is_that_save(location):
            return not locations.exists(location)
    return True


def _take_away(location: str, is_meant: Callable[[str], bool]) -> bool:
    """Remove a local step.

    Return False if it is not the right one, or another manager was faster.
    """
    # If this is interrupted, the next manager puts a directory of this name back; other programs do
    # not remove it.
    aside = hidden_directories.beside(location, "old")
    try:
        locations.rename(location, aside, durable=False)
    except FileNotFoundError:
        return True
    try:
        return is_meant(aside) and _discard(aside)
    finally:
        posix.put_back(location)


def _check_removable(directory: str) -> None:
    """Raise an error if a directory has files this user cannot remove.

    None is removed before this check.
    """
    for inner, _, _ in os.walk(directory):
        if not os.access(inner, os.W_OK | os.X_OK, effective_ids=True):
            if os.statvfs(inner).f_flag & os.ST_RDONLY:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), inner)
            raise PermissionError(errno.EACCES, "its files cannot be removed by this user", inner)


def _discard(directory: str) -> bool:
    """Remove a local directory next to the steps.

    Under its name it disappears in one step. Return False if another program was faster.
    """
    trash = hidden_directories.beside(hidden_directories.target_of(directory), "trash")
    try:
        locations.rename(directory, trash)
    except FileNotFoundError:
        return False
    with contextlib.suppress(FileNotFoundError):
        locations.remove_tree(trash)
    if locations.exists(trash):
        raise OSError(errno.ENOTEMPTY, "not all of it can be removed", trash)
    return True


# --- Leftovers ------------------------------------------------------------------------------------


def clear_leftovers(root: str, is_abandoned: Callable[[str], bool]) -> None:
    """Remove the remains of earlier runs' interrupted saves and removals.

    A lost step gets its name back.
    """
    names = steps.list_root(root)
    for name in names:
        replaced = steps.replaced_step(name)
        if replaced is not None:
            posix.put_back(step_location(root, replaced))
            clear_leftover(root, name, locations.exists)
        elif steps.is_leftover(name):
            clear_leftover(root, name, is_abandoned)
    clear_stale(root, names)
    if not locations.is_local(root):
        _clear_unfinished_objects(root, is_abandoned)


def clear_leftover(root: str, name: str, is_abandoned: Callable[[str], bool]) -> bool:
    """Remove a leftover of an interrupted save or removal.

    Return False if it is still there.

    `is_abandoned` is asked about saves that may be running on other machines.
    """
    location = locations.join(root, name)
    try:
        if steps.is_free_to_remove(name):
            locations.remove_tree(location)
            return not locations.exists(location)
        with hidden_directories.claimed(location) as has_ended:
            is_dead = is_abandoned(location) if has_ended is None else has_ended
            if is_dead:
                logger.info("removing %s, which an interrupted save has left in %s", name, root)
                _discard(location)
        return is_dead
    except OSError as error:
        logger.warning("a leftover of an interrupted save cannot be removed: %s", error)
        return False


def _clear_unfinished_objects(root: str, is_abandoned: Callable[[str], bool]) -> None:
    for step in set(steps.all_steps(root)).difference(steps.committed_steps(root)):
        location = step_location(root, step)
        if is_abandoned(location):
            logger.info("removing what an interrupted save of step %d has left in %s", step, root)
            conditional_put.remove_unfinished(location)


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

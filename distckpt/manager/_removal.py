"""Remove steps, and the remains of interrupted saves and removals."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Sequence

from distckpt._commit import conditional_put, hidden_directories, posix
from distckpt._storage import locations
from distckpt.manager import _steps as steps
from distckpt.manager._seen_steps import SeenSteps
from distckpt.manager._steps import Saved, step_name

logger = logging.getLogger(__name__)

# --- Steps ----------------------------------------------------------------------------------------


def remove_steps(root: str, surplus: Sequence[Saved]) -> dict[int, str]:
    """Remove steps; return the reason for each that is still there."""
    problems = {}
    for saved in surplus:
        step = saved.step
        try:
            if remove_step(root, step, saved.save):
                logger.info("removed step %d from %s", step, root)
            else:
                problems[step] = "another program has replaced it"
        except OSError as error:
            problems[step] = f"{type(error).__name__}: {error}"
            logger.warning("step %d cannot be removed from %s: %s", step, root, error)
    return problems


def remove_step(root: str, step: int, save: str) -> bool:
    """Remove a step, unless it is from another save; return False then.

    It is never half deleted under its name.
    """
    location = locations.join(root, step_name(step))

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


def clear_leftovers(root: str, seen: SeenSteps) -> None:
    """Remove the remains of earlier runs' interrupted saves and removals.

    A lost step gets its name back.
    """
    for name in steps.list_root(root):
        replaced = steps.replaced_step(name)
        if replaced is not None:
            posix.put_back(locations.join(root, step_name(replaced)))
            clear_leftover(root, name, locations.exists)
        elif steps.is_leftover(name):
            clear_leftover(root, name, seen.is_abandoned)
    if not locations.is_local(root):
        _clear_unfinished_objects(root, seen)


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


def _clear_unfinished_objects(root: str, seen: SeenSteps) -> None:
    for step in set(steps.all_steps(root)).difference(steps.committed_steps(root)):
        location = locations.join(root, step_name(step))
        if seen.is_abandoned(location):
            logger.info("removing what an interrupted save of step %d has left in %s", step, root)
            conditional_put.remove_unfinished(location)

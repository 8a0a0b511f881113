"""Commit of a save to a POSIX file system: written aside, then renamed.

It is made durable before the rename. A reader sees a complete checkpoint or none. Object stores,
which rename nothing: see `conditional_put`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable
from typing import Literal

from distckpt._base.errors import CheckpointExistsError
from distckpt._commit import hidden_directories, target
from distckpt._format.foreign_formats import SEAL_NAME
from distckpt._format.marker import CONFIG_FNAME
from distckpt._storage import locations

logger = logging.getLogger(__name__)

SUBDIRECTORIES = ("tensors", "objects")

_State = Literal["absent", "empty", "incomplete", "complete"]


def resolve(location: str | os.PathLike[str]) -> str:
    """Return the absolute location of a checkpoint, behind symbolic links."""
    normalized = locations.normalize(location)
    if not locations.is_local(normalized):
        return normalized
    return os.path.realpath(normalized)


def check_target(
    location: str, overwrite: bool, given: str | None = None, *, is_step: bool = False
) -> None:
    """Refuse a target that must not be written to.

    It is for the coordinator, before anything is written. `given` is the caller's form of the
    location, which may be a link. The step of a manager may lie next to a model of Hugging Face,
    since nothing else than steps is read there.
    """
    put_back(location)
    state = _state_of(location)
    if state == "complete" and not overwrite:
        raise already_complete(location, "pass overwrite=True")
    if state == "incomplete" and not (overwrite or is_step):
        target.check_no_model(location)
    if locations.is_local(location):
        if state != "absent":
            _check_what_is_there(location, overwrite)
        if state == "incomplete":
            _check_is_no_link(location, overwrite, given)
    elif state == "incomplete":
        logger.warning(
            "%s holds files but no %s (an unfinished save?): those of a save are removed when this "
            "one is complete",
            location, CONFIG_FNAME,
        )  # fmt: skip


def _check_is_no_link(location: str, overwrite: bool, given: str | None) -> None:
    if not overwrite and given and os.path.islink(locations.normalize(given)):
        raise target.refused(
            location, f"{given!r} is a link to it, and it holds files; overwrite=True keeps those"
        )


def _check_what_is_there(location: str, overwrite: bool) -> None:
    target.check_replaceable(location)
    target.check_content(location, overwrite)


def already_complete(location: str, advice: str) -> CheckpointExistsError:
    """Return the error about a complete checkpoint that must not be replaced."""
    return CheckpointExistsError(
        f"{location!r} already holds a complete checkpoint. Choose another location, delete it, or "
        f"{advice}."
    )


def commit(directory: str, location: str, overwrite: bool, durable: bool = True) -> None:
    """Make a complete save visible under its name.

    It is for the coordinator, as the last step. Other programs' files in its place stay there.
    Leftovers of an unfinished save are moved aside.
    """
    while True:
        state = _state_of(location)
        if state == "complete" and not overwrite:
            raise already_complete(location, "pass overwrite=True")
        if state != "absent":
            _check_what_is_there(location, overwrite)
        try:
            _put_in_place(directory, location, state, overwrite, durable)
            return
        except OSError as error:
            if not _was_interfered_with(error, directory):
                raise


def _put_in_place(
    directory: str, location: str, state: _State, overwrite: bool, durable: bool
) -> None:
    """Give a directory the name of the location.

    Nothing may have changed there since the state was determined.
    """
    if state in ("absent", "empty"):
        locations.rename(directory, location, durable)
        return
    if target.is_all_foreign(location):
        state = "complete"
    aside = hidden_directories.beside(
        location, "incomplete", hidden_directories.nonce_of(directory)
    )
    if state == "incomplete" and not target.others_in(location):
        _move_aside(location, aside)
        locations.rename(directory, location, durable)
        return
    stays = _swap_beside_others(directory, location, target.replaced_names(location), durable)
    was_complete = os.path.lexists(locations.join(directory, CONFIG_FNAME))
    if was_complete and not overwrite:
        # Another program has finished its save since we looked: back with it.
        _swap(directory, location, durable)
        raise already_complete(location, "pass overwrite=True")
    if state != "incomplete":
        _clear_up(directory, location, stays)
    else:
        _clear_up(directory, location, stays, aside)


def _was_interfered_with(error: OSError, directory: str) -> bool:
    """Return whether another program has changed the target meanwhile: look again.

    It has put a file there, or taken it away.
    """
    if error.errno == errno.ENOENT:
        return locations.exists(directory)
    return error.errno in (errno.ENOTEMPTY, errno.EEXIST)


def _move_aside(location: str, aside: str) -> None:
    try:
        locations.rename(location, aside)
    except FileNotFoundError:
        # Another program has moved it.
        return
    if _state_of(aside) == "complete":
        # Another program has finished its save since we looked, and we have moved that: back with
        # it.
        locations.rename(aside, location)
        return
    _warn_about(location, aside)


def _warn_about(location: str, aside: str) -> None:
    logger.warning(
        "%s held files of a save but no %s (an unfinished one?): moved to %s; delete it when "
        "nothing there is needed",
        location, CONFIG_FNAME, aside,
    )  # fmt: skip


def _swap(directory: str, location: str, durable: bool = True) -> None:
    """Swap a completely written directory with another one."""
    if locations.exchange(directory, location, durable):
        return
    aside = hidden_directories.beside(location, "old", hidden_directories.nonce_of(directory))
    logger.warning(
        "this file system cannot swap directories: %s is absent for a moment, its earlier "
        "content is in %s meanwhile",
        location, aside,
    )  # fmt: skip
    # Left by an earlier attempt that another program overtook: the location holds that program's
    # checkpoint now.
    locations.remove_tree(aside)
    locations.rename(location, aside, durable)
    with locations.undone_by(lambda: locations.rename(aside, location, durable)):
        locations.rename(directory, location, durable)
    with contextlib.suppress(OSError):
        locations.rename(aside, directory, durable=False)


def left_aside(location: str) -> str | None:
    """Return the directory that holds a location's content, if any.

    An overwrite that was interrupted between two renames leaves it there.
    """
    if not locations.is_local(location) or locations.exists(location):
        return None
    return next(filter(_is_trusted, hidden_directories.left_beside(location, "old")), None)


def _is_trusted(directory: str) -> bool:
    """Return whether a directory is ours, or its parent's owner's.

    Other users may put one with any name there.
    """
    try:
        status = os.lstat(directory)
        above = os.stat(os.path.dirname(directory))
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid in (os.geteuid(), above.st_uid)


def put_back(location: str) -> None:
    """Restore the content that an interrupted overwrite has left aside.

    Only writers call this.
    """
    aside = left_aside(location)
    if aside is None:
        return
    try:
        locations.rename(aside, location)
    except OSError as error:
        # The overwrite was not interrupted: another program is about it, and has finished it
        # meanwhile.
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise
        return
    logger.warning(
        "an overwrite or a removal of %s was interrupted, or another job is removing it: its "
        "earlier content is back, from %s",
        location, aside,
    )  # fmt: skip


def commit_beside_others(directory: str, location: str, is_replaced: Callable[[str], bool]) -> None:
    """Make a directory visible, together with the files already in its place.

    Those stay, unless `directory` has one of the same name, or the name is one that the new content
    replaces. So is a seal, since it holds for the replaced files.
    """
    while True:
        try:
            if _state_of(location) in ("absent", "empty"):
                locations.rename(directory, location)
                return
            target.check_replaceable(location)
            stays = _swap_beside_others(
                directory, location, lambda name: name == SEAL_NAME or is_replaced(name)
            )
            break
        except OSError as error:
            if not _was_interfered_with(error, directory):
                raise
    _clear_up(directory, location, stays)


def _swap_beside_others(
    directory: str, location: str, is_replaced: Callable[[str], bool], durable: bool = True
) -> Callable[[str], bool]:
    """Swap two directories, and link the remaining files into the new one.

    The files are linked before. Return a function that tells the names that stay.
    """
    own = set(locations.list_names(directory))

    def stays(name: str) -> bool:
        return not is_replaced(name) and name not in own

    others = list(filter(stays, locations.list_names(location)))
    try:
        for name in others:
            locations.link_tree(locations.join(location, name), locations.join(directory, name))
        if others:
            locations.sync_directory(directory)
        _swap(directory, location, durable)
    except OSError:
        # The caller may look again, and link the files that are there then.
        for name in others:
            locations.remove_tree(locations.join(directory, name))
        raise
    return stays


def _clear_up(
    replaced: str, location: str, stays: Callable[[str], bool], aside: str | None = None
) -> None:
    """Remove the replaced directory, or move an unfinished save `aside`."""
    try:
        # Files that other programs have changed or added there since the links were made.
        for name in filter(stays, locations.list_names(replaced)):
            locations.move_tree(locations.join(replaced, name), locations.join(location, name))
            locations.remove_tree(locations.join(replaced, name))
        if aside is not None and locations.list_names(replaced):
            locations.rename(replaced, aside, durable=False)
            _warn_about(location, aside)
            return
    except OSError as error:
        logger.warning(
            "files of other programs may be left in %s, which was %s: %s", replaced, location, error
        )
        return
    locations.remove_tree(replaced)


def _state_of(location: str) -> _State:
    if locations.is_local(location) and locations.isfile(location):
        raise CheckpointExistsError(
            f"{location!r} is a file: a checkpoint is a directory. Choose another path."
        )
    if not locations.isdir(location):
        return "absent"
    if locations.exists(locations.join(location, CONFIG_FNAME)):
        return "complete"
    try:
        return "incomplete" if locations.list_names(location) else "empty"
    except FileNotFoundError:
        return "absent"

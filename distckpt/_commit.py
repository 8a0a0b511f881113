"""The transaction of a save: written beside the target, visible by one rename, absent or whole at every moment.

Local and other POSIX file systems: everything is written into `.<name>.tmp-<nonce>` beside the target, made durable
and renamed. Object stores: everything is written under the final prefix, the marker last.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from typing import Literal

from distckpt import _storage, core

logger = logging.getLogger(__name__)

SUBDIRECTORIES = ("tensors", "objects")

_State = Literal["free", "incomplete", "complete"]


def resolve(location: str) -> str:
    """Return the location of the checkpoint itself: absolute, with symbolic links followed."""
    normalized = _storage.normalize(location)
    return os.path.realpath(normalized) if _storage.is_local(normalized) else normalized


def staging_location(location: str, nonce: str) -> str:
    """Return where a save to `location` is written before it is committed."""
    if not _storage.is_local(location):
        return location
    parent, name = _storage.split(location)
    return _storage.join(parent, f".{name}.tmp-{nonce}")


def check_target(location: str, overwrite: bool) -> None:
    """Refuse a target that must not be written to. Called by the coordinator before anything is written.

    Raises:
        CheckpointExistsError: a whole checkpoint is there and `overwrite` is False, or other files are in the way.
    """
    state = _state_of(location)
    if state == "complete" and not (overwrite and _storage.is_local(location)):
        advice = "Choose another location, delete it"
        advice += ", or pass overwrite=True." if _storage.is_local(location) else " (object stores have no overwrite)."
        raise core.CheckpointExistsError(f"{location!r} already holds a whole checkpoint. {advice}")
    if state == "incomplete" and not _storage.is_local(location):
        raise core.CheckpointExistsError(
            f"{location!r} holds files but no {core.CONFIG_FNAME}: an unfinished save, or something else. "
            "Delete them or choose another location."
        )


def prepare(staging: str, durable: bool = True) -> None:
    """Create the directories of a save; every rank calls this, since not all may see each other's at once."""
    for name in SUBDIRECTORIES:
        _storage.make_directories(_storage.join(staging, name), durable)


def sync(staging: str) -> None:
    """Make the names of this rank's files durable."""
    for name in SUBDIRECTORIES:
        _storage.sync_directory(_storage.join(staging, name))
    _storage.sync_directory(staging)


def commit(staging: str, location: str, overwrite: bool, durable: bool = True) -> None:
    """Make a completely written save visible under its name. Called by the coordinator, last.

    Raises:
        CheckpointExistsError: a whole checkpoint appeared there in the meantime and `overwrite` is False.
    """
    if not _storage.is_local(location):
        return
    state = _state_of(location)
    if state == "complete":
        check_target(location, overwrite)
        _replace(staging, location, durable)
        return
    if state == "incomplete":
        _move_aside(location, _beside(staging, location, "incomplete"))
    try:
        _storage.rename(staging, location, durable)
    except OSError as error:
        # Another program has put something there since we looked: look again.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        commit(staging, location, overwrite, durable)


def _move_aside(location: str, aside: str) -> None:
    try:
        _storage.rename(location, aside)
    except FileNotFoundError:
        # Another program has moved it.
        return
    if _state_of(aside) == "complete":
        # Another program has finished its save since we looked, and we have moved that: back with it.
        _storage.rename(aside, location)
        return
    logger.warning(
        "%s held files but no %s (an unfinished save?): moved to %s; delete it when nothing there is needed",
        location, core.CONFIG_FNAME, aside,
    )  # fmt: skip


def _replace(staging: str, location: str, durable: bool = True) -> None:
    if _storage.exchange(staging, location, durable):
        _storage.remove_tree(staging)
        return
    aside = _beside(staging, location, "old")
    logger.warning(
        "this file system cannot swap directories: %s is absent for a moment, its earlier content is in %s meanwhile",
        location, aside,
    )  # fmt: skip
    _storage.rename(location, aside, durable)
    _storage.rename(staging, location, durable)
    _storage.remove_tree(aside)


def commit_beside_others(staging: str, location: str, replaced: Callable[[str], bool]) -> None:
    """Make a completely written directory visible, together with files that are in its place already.

    Args:
        staging: written beside `location`.
        location: may hold other files; they stay, unless `staging` has one of the same name.
        replaced: tells of a name at the top level whether it belongs to what the new content replaces.
    """
    if not _storage.is_local(location):
        return
    if _state_of(location) == "free":
        _storage.rename(staging, location)
        return
    for name in _storage.list_names(location):
        if not replaced(name) and not _storage.exists(_storage.join(staging, name)):
            _storage.link_tree(_storage.join(location, name), _storage.join(staging, name))
    _storage.sync_directory(staging)
    _replace(staging, location)


def abandon(staging: str) -> None:
    """Remove what an unsuccessful save has written; `check_target` made sure that there was nothing else."""
    _storage.remove_tree(staging)


def _beside(staging: str, location: str, what: str) -> str:
    parent, name = _storage.split(location)
    return _storage.join(parent, f".{name}.{what}-{staging.rpartition('-')[2]}")


def _state_of(location: str) -> _State:
    if _storage.is_local(location):
        if not _storage.exists(location):
            return "free"
        if not _storage.isdir(location):
            raise core.CheckpointExistsError(f"{location!r} is a file, a checkpoint is a directory.")
    elif not _storage.isdir(location):
        return "free"
    if _storage.exists(_storage.join(location, core.CONFIG_FNAME)):
        return "complete"
    try:
        return "incomplete" if _storage.list_names(location) else "free"
    except FileNotFoundError:
        return "free"

"""Telling files apart that have one name, one after the other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

from distckpt._base.errors import CheckpointingException

_LOOK_AGAIN_SECONDS = 0.001


class FileState(NamedTuple):
    """What tells a file from one that has taken its place, without reading it.

    Attributes:
        num_bytes: its size.
        modified: when it was written, in seconds since 1970; None if that is unknown.
        etag: of an object.
        inode: of a local file.
        changed: when the content, name or attributes of a local file last changed, in nanoseconds.
        attributes: its links, mode and owners.
    """

    num_bytes: int
    modified: float | None
    etag: str | None = None
    inode: int | None = None
    changed: int | None = None
    attributes: tuple[int, ...] = ()

    @classmethod
    def of_local(cls, status: os.stat_result) -> FileState:
        """Return the state of a local file."""
        return cls(
            status.st_size,
            status.st_mtime,
            inode=status.st_ino,
            changed=status.st_ctime_ns,
            attributes=(status.st_nlink, status.st_mode, status.st_uid, status.st_gid),
        )

    def is_same(self, other: FileState) -> bool:
        """Tell whether nothing shows that this is another content than an earlier one."""
        if self.num_bytes != other.num_bytes:
            return False
        if self.etag is not None and other.etag is not None:
            return self.etag == other.etag
        if self.modified != other.modified:
            return False
        if self.changed == other.changed:
            # Some network file systems number files anew.
            return True
        # What was moved to this place with its old time has another inode. What was written in
        # place, and given its old time again, shows only in `changed`; so do links and modes.
        return self.inode == other.inode and self.attributes != other.attributes


def has_changed(
    before: FileState, now: FileState | None, look: Callable[[], FileState | None]
) -> bool:
    """Tell whether a file shows another content `now` than `before`; None if it is missing. `look`
    returns its state once more.

    Linux sets the time of a change before the links or the mode that change: who looks in between
    sees what a write would show.
    """
    if now is None or now.is_same(before):
        return now is None
    if now._replace(changed=before.changed) != before:
        return True
    time.sleep(_LOOK_AGAIN_SECONDS)
    again = look()
    return again is None or not again.is_same(before)


def written_to(location: str) -> CheckpointingException:
    """Return the error that a file has changed while a checkpoint was read."""
    return CheckpointingException(
        f"{location!r} was replaced or written to after it was opened (sizes or times of files "
        "have changed): what was read is given up. Try again when nothing writes there."
    )

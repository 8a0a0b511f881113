"""States of files, to notice that another file has taken a name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

from distckpt._base.errors import CheckpointingException

_LOOK_AGAIN_SECONDS = 0.001


class FileState(NamedTuple):
    """The properties that tell a file from its replacement without reading.

    Attributes:
        num_bytes: size of the file.
        modified: time of the last write, in seconds since 1970; None if that is unknown.
        etag: tag of an object.
        inode: inode of a local file.
        changed: time of the last change to the content, name or attributes of a local file, in
            nanoseconds.
        attributes: number of links, mode and owners.
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
        """Return whether nothing shows another content than before."""
        if self.num_bytes != other.num_bytes:
            return False
        if self.etag is not None and other.etag is not None:
            return self.etag == other.etag
        if self.modified != other.modified:
            return False
        if self.changed == other.changed:
            # Some network file systems number files anew.
            return True
        # A file that was moved to this place with its old time has another inode. One that was
        # written in place, and given its old time again, shows only in `changed`; so do links and
        # modes.
        return self.inode == other.inode and self.attributes != other.attributes


def has_changed(
    before: FileState, now: FileState | None, look: Callable[[], FileState | None]
) -> bool:
    """Return whether a file shows another content `now` than `before`.

    None stands for a missing file. `look` returns the file's state once more. Linux sets the time
    of a change before the links or the mode that change: a look in between finds the same as after
    a write.
    """
    if now is None or now.is_same(before):
        return now is None
    if now._replace(changed=before.changed) != before:
        return True
    time.sleep(_LOOK_AGAIN_SECONDS)
    again = look()
    return again is None or not again.is_same(before)


def written_to(location: str) -> CheckpointingException:
    """Return the error that a file has changed during a read."""
    return CheckpointingException(
        f"{location!r} was replaced or written to after it was opened (sizes or times of files "
        "have changed): what was read is given up. Try again when nothing writes there."
    )

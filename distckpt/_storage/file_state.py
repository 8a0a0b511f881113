"""Telling files apart that have one name, one after the other."""

from __future__ import annotations

from typing import NamedTuple


class FileState(NamedTuple):
    """What tells a file from one that has taken its place, without reading it.

    Attributes:
        num_bytes: its size.
        modified: when it was written, in seconds since 1970; None if that is unknown.
        etag: of an object.
        inode: of a local file.
        changed: when the content, name or mode of a local file last changed, in nanoseconds.
    """

    num_bytes: int
    modified: float | None
    etag: str | None = None
    inode: int | None = None
    changed: int | None = None

    def is_same(self, other: FileState) -> bool:
        """Tell whether nothing shows that this is another content than an earlier one."""
        if self.num_bytes != other.num_bytes:
            return False
        if self.etag is not None and other.etag is not None:
            return self.etag == other.etag
        if self.modified != other.modified:
            return False
        # What was moved to this place with its old time differs in both. One of them alone shows
        # nothing: links and modes change the second, and some network file systems the first.
        return self.inode == other.inode or self.changed == other.changed

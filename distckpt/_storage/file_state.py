"""Telling files apart that have one name, one after the other."""

from __future__ import annotations

from typing import NamedTuple


class FileState(NamedTuple):
    """What tells a file from one that has taken its place, without reading it.

    Attributes:
        num_bytes: its size.
        modified: when it was written, in seconds since 1970; None if that is unknown.
        tag: the ETag of an object; of a local file, when its content, owner or mode last changed.
            None if there is no such thing.
    """

    num_bytes: int
    modified: float | None
    tag: str | int | None = None

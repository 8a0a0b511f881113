"""Whether a complete checkpoint of a readable version is at a location."""

from __future__ import annotations

from typing import Any

from distckpt._base.errors import CheckpointNotFoundError, CorruptCheckpointError
from distckpt._commit import posix
from distckpt._format.marker import CONFIG_FNAME, parse_config
from distckpt._storage import locations

READER_VERSION = 2
"""The newest format version this package reads."""


def check_marker(marker: dict[str, Any] | None, location: str) -> dict[str, Any]:
    """Check that a marker that was read, None when there is none, is of a readable format; as `verify_checkpoint`."""
    if marker is None:
        if not locations.exists(location):
            aside = posix.left_aside(location)
            hint = "" if aside is None else f" Its overwriting was interrupted: rename {aside!r}, which is its content."
            raise CheckpointNotFoundError(f"Checkpoint directory {location!r} does not exist.{hint}")
        raise CheckpointNotFoundError(
            f"{location!r} is not a distributed checkpoint: it has no {CONFIG_FNAME}. Either nothing was saved "
            "here, or a save did not finish; load another step."
        )
    parse_config(marker, location)
    oldest_reader = marker.get("min_reader_version", 1)
    if type(oldest_reader) is not int or not 1 <= oldest_reader < 2**31:
        raise CorruptCheckpointError(
            f"{location!r} needs a reader of format version {oldest_reader!r:.50}, which is no version: its "
            f"{CONFIG_FNAME} was damaged. Restore it from a copy, or load another checkpoint."
        )
    if oldest_reader > READER_VERSION:
        raise CorruptCheckpointError(
            f"{location!r} needs a reader of format version {oldest_reader}; this release of distckpt reads up to "
            f"{READER_VERSION}. Install a newer release: pip install --upgrade distckpt"
        )
    return marker

"""List the checkpoints in a directory, with what their markers say and whether they are whole."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from distckpt._base.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from distckpt._checkpoint.opening import open_checkpoint
from distckpt._commit import posix
from distckpt._commit.presence import absence
from distckpt._format.marker import CONFIG_FNAME, read_marker
from distckpt._manager import steps
from distckpt._storage import locations


class CheckpointInfo(NamedTuple):
    """A checkpoint in a directory of checkpoints.

    Attributes:
        name: name of its directory.
        location: its path or URL.
        step: the step that a manager saved, or the number at the end of the name, if any.
        num_bytes: the size of its files; 0 where that cannot be read.
        saved_at: when it was committed, in seconds since 1970, by the clock of the storage; None
            where that is unknown.
        metrics: the metrics that were given to `CheckpointManager.save`.
        pinned: whether managers never remove it.
        problem: why it cannot be loaded; None when marker, manifest, and the sizes and headers of
            all files are right.
        is_newest: whether it has the highest step of those without a problem, the one that
            `CheckpointManager.latest` returns; or, where no manager saves, the highest number, or
            where none has a number, whether it was saved last.
    """

    name: str
    location: str
    step: int | None
    num_bytes: int
    saved_at: float | None
    metrics: Mapping[str, float]
    pinned: bool
    problem: str | None
    is_newest: bool


def list_checkpoints(root: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """List the checkpoints in a directory, those of a `CheckpointManager` or others, by step; those
    without one first.

        newest = next(info for info in distckpt.list_checkpoints("checkpoints") if info.is_newest)
        distckpt.load(state, newest.location)

    Markers, manifests, and the sizes and headers of files are read, as
    `distckpt.verify(mode="fast")` does. Any rank may call, alone; nothing is changed.

    Raises:
        CheckpointNotFoundError: there is no such directory, or an unfinished checkpoint.
        CheckpointingException: it is a checkpoint itself.
    """
    root = posix.resolve(root)
    names = [name for name in steps.list_root(root) if not name.startswith(".")]
    found = [info for name in names if (info := _describe(root, name)) is not None]
    are_parts = all(info.name in posix.SUBDIRECTORIES and info.saved_at is None for info in found)
    if (not names and not locations.isdir(root)) or ("tensors" in names and are_parts):
        raise CheckpointNotFoundError(absence(root))
    found.sort(key=lambda info: (info.step is not None, info.step or 0, _time(info), info.name))
    whole = [info for info in found if info.problem is None]
    # Others are no steps for a manager, whatever their number.
    whole = [info for info in whole if steps.parse_step(info.name) is not None] or whole
    return [info._replace(is_newest=bool(whole) and info is whole[-1]) for info in found]


def _time(info: CheckpointInfo) -> float:
    return info.saved_at or 0.0 if info.step is None else 0.0


def _describe(root: str, name: str) -> CheckpointInfo | None:
    location, step = locations.join(root, name), steps.parse_step(name)
    marker: dict[str, Any] | None = None
    try:
        marker = read_marker(location)
        stored = open_checkpoint(location)
        num_bytes, problem = sum(file.num_bytes for file in stored.manifest.files), None
        is_foreign = stored.manifest.origin is not None and marker is None
    except (CheckpointingException, OSError) as error:
        if marker is None and step is None and not isinstance(error, CorruptCheckpointError):
            return None
        num_bytes, problem, is_foreign = 0, f"{type(error).__name__}: {error}", False
    note = (marker or {}).get(steps.NOTE)
    noted = note.get("step") if isinstance(note, dict) else None
    if not is_foreign:
        problem = problem or steps.problem_at(location, noted if step is None else step)
    saved = steps.saved_at(location, noted) if isinstance(noted, int) else None
    digits = re.search(r"\d{1,18}$", name)
    return CheckpointInfo(
        name,
        location,
        noted if saved else int(digits[0]) if digits else None,
        num_bytes,
        locations.modified_time(locations.join(location, CONFIG_FNAME)) if marker else None,
        saved.metrics if saved else {},
        saved.pinned if saved else False,
        problem,
        False,
    )

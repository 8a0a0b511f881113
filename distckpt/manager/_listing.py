"""List the checkpoints in a directory, with their facts and problems."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from distckpt._base.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from distckpt._checkpoint.consistent_read import MAX_READS
from distckpt._checkpoint.opening import open_checkpoint
from distckpt._commit import posix
from distckpt._commit.presence import absence
from distckpt._format.chunk_table import Files
from distckpt._format.marker import CONFIG_FNAME, read_marker
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.manager import _steps as steps
from distckpt.manager._rejections import is_rejection, rejections
from distckpt.manager._tiers._run_files import StepState, is_of_host, read_states


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint in a directory of checkpoints.

    Attributes:
        name: name of its directory.
        location: its path or URL.
        step: the step that a manager saved, or the number at the end of the name, if any.
        num_bytes: the size of its files; 0 if that cannot be read.
        saved_at: when it was committed, in seconds since 1970, by the clock of the storage; None
            if that is unknown.
        seconds: how long the save of a step took, from the call until it was committed; None if
            that is unknown.
        metrics: the metrics that were given to `CheckpointManager.save`.
        pinned: whether managers never remove it.
        problem: why it cannot be loaded; None if the marker, the manifest, and the sizes and
            headers of all files are right.
        rejected: the reason why `CheckpointManager.reject` rejected it; None for all others.
        is_newest: whether it is the one that `CheckpointManager.latest` returns, which has the
            highest step of those without a problem that are not rejected. If no manager saves
            there, the one with the highest number, or if none has a number, the one that was saved
            last.
        tier: "local only", "replicated" or "uploaded" in the local directory of a host, see
            `docs/tiers.md`; None elsewhere.
        tier_problem: the reason why a copy or an upload failed, or stands still.
        has_optimizer: False if its optimizer state was removed, see `keep_optimizer`.
    """

    name: str
    location: str
    step: int | None
    num_bytes: int
    saved_at: float | None
    seconds: float | None
    metrics: Mapping[str, float]
    pinned: bool
    problem: str | None
    rejected: str | None
    is_newest: bool
    tier: str | None = None
    tier_problem: str | None = None
    has_optimizer: bool = True


def list_checkpoints(root: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """List the checkpoints in a directory, whatever program saved them.

    They come in order of their steps, after the ones without a step.

        newest = next(info for info in distckpt.list_checkpoints("checkpoints") if info.is_newest)
        distckpt.load(state, newest.location)

    Markers, manifests, and the sizes and headers of files are read, as
    `distckpt.verify(mode="fast")` does. Any rank may call, alone; nothing is changed.

    In the directory of a run on a host (`LOCAL/run-ID`), steps are the parts that the host has:
    `num_bytes` is the size of its files, and files of other hosts are not missed.

    Raises:
        CheckpointNotFoundError: there is no such directory, or an unfinished checkpoint.
        CheckpointingException: it is a checkpoint itself.
    """
    root = posix.resolve(root)
    names, infos = _describe_all(root)
    if _is_unfinished(names, infos) or not (names or locations.isdir(root)):
        raise CheckpointNotFoundError(absence(root))
    reasons = {steps.step_name(step): reason for step, reason in rejections(root).items()}
    infos = [replace(info, rejected=reasons.get(info.name)) for info in infos]
    return _naming_newest(sorted(infos, key=_order))


def _describe_all(root: str) -> tuple[list[str], list[CheckpointInfo]]:
    """Return the names in a directory, and the checkpoints among them.

    Begins again when some were removed meanwhile, perhaps for newer ones that are not listed.
    """
    names = _visible_names(root)
    states = read_states(root) if is_of_host(root) else None
    for _ in range(MAX_READS):
        infos = [_describe(root, name, states) for name in names]
        now = _visible_names(root)
        if set(names) <= set(now):
            break
        names = now
    return names, [info for info in infos if info is not None]


def _visible_names(root: str) -> list[str]:
    names = []
    for name in steps.list_root(root):
        if not name.startswith(".") and not is_rejection(name):
            names.append(name)
    return names


def _is_unfinished(names: Sequence[str], infos: Sequence[CheckpointInfo]) -> bool:
    """Whether a directory holds the parts of a checkpoint without a marker."""
    if "tensors" not in names:
        return False
    return all(info.name in posix.SUBDIRECTORIES and info.saved_at is None for info in infos)


def _order(info: CheckpointInfo) -> tuple[bool, int, float, str]:
    if info.step is None:
        return False, 0, info.saved_at or 0.0, info.name
    return True, info.step, 0.0, info.name


def _naming_newest(ordered: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    good = [info for info in ordered if info.problem is None and info.rejected is None]
    # To a manager other names are not steps, whatever their number.
    managed = [info for info in good if steps.parse_step(info.name) is not None]
    newest = (managed or good)[-1:]
    return [replace(info, is_newest=info in newest) for info in ordered]


class _Files(NamedTuple):
    """The facts in the files of a checkpoint: its marker, their size, a problem."""

    marker: Mapping[str, Any] | None
    num_bytes: int
    problem: str | None


def _describe(
    root: str, name: str, states: Mapping[int, StepState] | None
) -> CheckpointInfo | None:
    """Describe a directory; return None if it is not a checkpoint.

    `states` has the tiers of steps if the root is the directory of a host.
    """
    location = locations.join(root, name)
    files = _look(location, steps.parse_step(name), states is not None)
    if files is None or (files.problem is not None and not locations.exists(location)):
        # No checkpoint, or another program has removed it meanwhile.
        return None
    step: Any = steps.note_in(files.marker).get("step")
    saved_at = None
    seconds = None
    if files.marker is not None:
        saved_at = locations.modified_time(locations.join(location, CONFIG_FNAME))
        with contextlib.suppress(TypeError, ValueError):
            seconds = float(files.marker.get("seconds"))  # type: ignore[arg-type]
    info = CheckpointInfo(
        name=name,
        location=location,
        step=_number_in(name),
        num_bytes=files.num_bytes,
        saved_at=saved_at,
        seconds=seconds,
        metrics={},
        pinned=False,
        problem=files.problem,
        rejected=None,
        is_newest=False,
    )
    saved = steps.saved_at(location, step) if isinstance(step, int) else None
    if saved is not None:
        noted = {name: value for name, value in vars(saved).items() if name != "save"}
        info = replace(info, **noted)
    if states is None:
        return info
    state = states.get(step, StepState())
    return replace(info, tier=state.tier, tier_problem=state.problem)


def _look(location: str, step: int | None, is_of_host: bool) -> _Files | None:
    """Return the facts of a checkpoint's files, or None without a checkpoint.

    Its name may be a step's. A host has some of the files.
    """
    marker: dict[str, Any] | None = None
    try:
        marker = read_marker(location)
        manifest = open_checkpoint(Ranks.alone(), location).manifest
    except (CheckpointingException, OSError) as error:
        is_ours = marker is not None or (step is not None and not steps.is_file(location))
        if not is_ours and not isinstance(error, CorruptCheckpointError):
            return None
        return _Files(marker, 0, f"{type(error).__name__}: {error}")
    num_bytes = _bytes_at(location, manifest.files, is_of_host)
    if manifest.origin is not None and marker is None:
        return _Files(marker, num_bytes, None)
    expected = step
    if step is None:
        expected = steps.note_in(marker).get("step")
    return _Files(marker, num_bytes, steps.problem_at(location, expected, is_of_host))


def _bytes_at(location: str, files: Files, is_of_host: bool) -> int:
    """Return the size of the files of a checkpoint; a host has some of them."""
    num_bytes = 0
    for file in files:
        if not is_of_host or locations.exists(locations.join(location, file.name)):
            num_bytes += file.num_bytes
    return num_bytes


def _number_in(name: str) -> int | None:
    digits = re.search(r"\d{1,18}$", name)
    if digits is None:
        return None
    return int(digits[0])

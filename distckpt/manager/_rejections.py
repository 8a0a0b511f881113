"""Rejections of steps, and the newest good step.

A rejection is a small file beside the steps. Its name has the step and the save, so that it does
not count for a later save of the step, and so that a listing of the root tells which steps may be
rejected.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence

from distckpt._base.errors import CheckpointingException, CheckpointNotFoundError
from distckpt._format.checksum import checksum
from distckpt._format.marker import read_marker
from distckpt._storage import locations
from distckpt.manager import _steps as steps

logger = logging.getLogger(__name__)

_FILE = re.compile(steps.REJECTION, re.ASCII)
_SAVE = re.compile(r"[0-9a-f]{16}")
_MAX_BYTES = 1 << 20


def reject(root: str, step: int, reason: str | None) -> None:
    """Reject a committed step, or take its rejection back with None.

    Raises:
        CheckpointNotFoundError: the step is not there.
        ValueError: the reason is no text, or an empty one.
    """
    if reason is not None and not (isinstance(reason, str) and reason.strip()):
        raise ValueError(f"A rejection needs a reason, a text, got {reason!r:.100}.")
    save = _save_at(root, step)
    if save is None:
        raise CheckpointNotFoundError(
            f"There is no complete step {step} in {root!r}, so it cannot be rejected: see the "
            "steps there, and wait for a save that is in progress."
        )
    path = _path(root, step, save)
    if reason is None:
        locations.remove_file(path)
        locations.sync_directory(root)
        return
    fields = {"step": step, "save": save, "reason": reason, "time": time.time()}
    steps.write_file(path, json.dumps(fields).encode(), durable=True)


def rejections(root: str) -> dict[int, str]:
    """Return the reason of each rejected step in a directory."""
    names = steps.list_root(root)
    reasons = {}
    for step in sorted({step for step, _ in _files_in(names)}):
        reason = rejection_of(root, step, names)
        if reason is not None:
            reasons[step] = reason
    return reasons


def rejection_of(root: str, step: int, names: Sequence[str] | None = None) -> str | None:
    """Return the reason why a step was rejected, if it was.

    Nothing is read unless the names in the root, listed if they are not given, show one.
    """
    if names is None:
        names = steps.list_root(root)
    saves = [save for other, save in _files_in(names) if other == step]
    if not saves:
        return None
    try:
        save = _save_at(root, step)
    except (CheckpointingException, OSError):
        save = saves[0]  # it cannot be ruled out
    if save not in saves:
        return None
    return _read(_path(root, step, save))


def warn_of(root: str, step: int, outcome: str) -> bool:
    """Log the rejection of a step, if any, and its outcome.

    Return whether there is one.
    """
    reason = rejection_of(root, step)
    if reason is not None:
        logger.warning("step %d in %s was rejected: %s: it is %s", step, root, reason, outcome)
    return reason is not None


def clear_stale(root: str, names: Sequence[str]) -> None:
    """Remove the rejections of steps that were removed or saved again."""
    for step, save in _files_in(names):
        # It does no harm where it cannot be removed.
        with contextlib.suppress(CheckpointingException, OSError):
            found = _save_at(root, step)
            # An overwrite moves a local step aside for a moment.
            if found != save and (found or step not in steps.all_steps(root)):
                locations.remove_file(_path(root, step, save))


def is_rejection(name: str) -> bool:
    """Whether a file of this name is a rejection."""
    return _FILE.fullmatch(name) is not None


def _files_in(names: Sequence[str]) -> list[tuple[int, str]]:
    """Return step and save of each rejection in a listing."""
    files = []
    for name in names:
        match = _FILE.fullmatch(name)
        step = None if match is None else steps.parse_step(match[1])
        if match is not None and step is not None:
            files.append((step, match[2]))
    return files


def _path(root: str, step: int, save: str) -> str:
    return locations.join(root, f"rejected_{steps.step_name(step)}_{save}.json")


def _save_at(root: str, step: int) -> str | None:
    """Return the name of a step's save, or None without one.

    It has 16 digits. Where no manager gave one, it is computed.
    """
    marker = read_marker(steps.step_location(root, step))
    if marker is None:
        return None
    name = steps.note_in(marker).get("save")
    if isinstance(name, str) and _SAVE.fullmatch(name):
        return name
    return f"{checksum(json.dumps(marker, sort_keys=True).encode()):016x}"


def _read(path: str) -> str | None:
    """Read the reason of a rejection; None if it was taken back meanwhile."""
    try:
        fields = json.loads(locations.read_bytes(path, _MAX_BYTES))
        float(fields["time"])  # for other programs that read the file
        return " ".join(str(fields["reason"]).split()) or "without a reason"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        problem = f"{path} is damaged ({type(error).__name__}: {error})"
        logger.warning("%s: the step counts as rejected; reject it again, or undo that", problem)
        return problem


# --- The newest step ------------------------------------------------------------------------------


def newest_good_step(
    root: str, known_problems: Mapping[int, str]
) -> tuple[int | None, dict[int, str]]:
    """Return the newest good step, if any, and newer ones' problems.

    A good one is complete and not rejected. If newer steps were committed meanwhile, for which the
    passed ones may have been removed, it looks again.
    """
    problems = dict(known_problems)
    names = steps.list_root(root)
    while True:
        listed = steps.steps_in(names)
        newest = _first_without_problem(root, names, problems)
        skipped = [step for step in listed if newest is None or step > newest]
        now = listed
        if skipped:
            names = steps.list_root(root)
            now = steps.steps_in(names)
        gone = set(skipped).difference(now, known_problems)
        problems.update(dict.fromkeys(gone, steps.REMOVED))
        if now[-1:] <= listed[-1:]:
            return newest, {step: problems[step] for step in reversed(skipped)}


def _first_without_problem(root: str, names: Sequence[str], problems: dict[int, str]) -> int | None:
    """Return the newest good step; `problems` gets newer ones'."""
    for step in reversed(steps.steps_in(names)):
        problem = problems.get(step)
        if problem is None and (reason := rejection_of(root, step, names)):
            problem = f"rejected: {reason}"
        problem = problem or steps.problem_with(root, step)
        if problem is None:
            return step
        problems[step] = problem
    return None

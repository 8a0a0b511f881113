"""List and check the step directories of a checkpoint manager."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distckpt._base.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    RankFailedError,
)
from distckpt._checkpoint.consistent_read import MAX_READS
from distckpt._checkpoint.opening import BACKEND
from distckpt._commit import hidden_directories, posix
from distckpt._commit.presence import absence
from distckpt._format.foreign_formats import MARKED
from distckpt._format.marker import CONFIG_FNAME, parse_config, read_marker
from distckpt._operations.file_checks import Problem
from distckpt._operations.verify import verify
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations

NOTE = "manager"
"""Field of the marker with step, metrics and whether it is pinned.

Only the saves of managers have it.
"""
TRACKER = "latest_checkpointed_iteration.txt"
OPTIMIZER_REMOVED = "optimizer_removed"
"""Field of the note: the optimizer state was removed later."""

REJECTION = r"rejected_(step_\d{8,})_([0-9a-f]{16})\.json"
"""Pattern of the file that rejects a save of a step."""

REMOVED = "it was removed, by whatever limits how many checkpoints are kept, perhaps"
"""The problem of a step that no longer exists."""

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step_(\d{8,})", re.ASCII)
_FILE_LEFTOVER = re.compile(rf"\.(?:{re.escape(TRACKER)}|{REJECTION})\.[0-9a-f]{{16}}", re.ASCII)


@dataclass(frozen=True)
class Saved:
    """A step that a manager has saved.

    Attributes:
        step: its number.
        save: names the save.
        metrics: finite numbers.
        pinned: whether it is never removed.
        has_optimizer: False if its optimizer state was removed.
    """

    step: int
    save: str
    metrics: Mapping[str, float]
    pinned: bool
    has_optimizer: bool = True


def step_name(step: int) -> str:
    """Return the name of the directory of a step."""
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        got = (
            "a dict: it is save(step, state) and load(state, step)"
            if isinstance(step, Mapping)
            else f"{step!r:.100}"
        )
        raise ValueError(f"A step is an integer from 0, got {got}.")
    return f"step_{step:08d}"


def step_location(root: str, step: int) -> str:
    """Return the location of a step, whether it exists or not."""
    return locations.join(root, step_name(step))


def parse_step(name: str) -> int | None:
    """Return the step of a directory, or None for other names."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    # Other programs may write more zeros.
    if step_name(step) == name:
        return step
    return None


def is_leftover(name: str) -> bool:
    """Whether a name belongs to the leftover of a save or removal."""
    is_of_file = _FILE_LEFTOVER.fullmatch(name) is not None
    return is_of_file or _hidden_step(name, "tmp", "trash") is not None


def is_journal_of_parts(name: str) -> bool:
    """Whether a directory of this name belongs to work in parts.

    It holds a journal and the files of the work.
    """
    hidden = hidden_directories.parse(name)
    return hidden is not None and hidden.kind == "parts"


def replaced_step(name: str) -> int | None:
    """Return the step whose checkpoint is being overwritten there, or None."""
    return _hidden_step(name, "old")


def _hidden_step(name: str, *kinds: str) -> int | None:
    """Return the step of a hidden directory of these kinds, or None."""
    hidden = hidden_directories.parse(name)
    match = None if hidden is None else _STEP.fullmatch(hidden.name)
    if match and hidden and hidden.kind in kinds:
        return int(match[1])
    return None


def step_in(name: str) -> int | None:
    """Return the step of a directory, also one being overwritten or removed."""
    step = parse_step(name)
    if step is None:
        return replaced_step(name)
    return step


def is_free_to_remove(name: str) -> bool:
    """Whether a leftover of this name can be removed.

    It cannot if it is the directory of a save, which may be running.
    """
    return is_leftover(name) and ".tmp-" not in name


def write_file(path: str, content: bytes, durable: bool) -> None:
    """Write a small file beside the steps."""
    try:
        locations.write_bytes(path, content, durable)
    except FileNotFoundError:
        # Another manager took the new file for one that an interrupted save has left.
        locations.write_bytes(path, content, durable)


def read_tracker(root: str) -> int | None:
    """Return the step in the tracker file, or None if unreadable."""
    try:
        return int(locations.read_bytes(locations.join(root, TRACKER), max_bytes=64))
    except (OSError, ValueError):
        return None


def list_root(root: str) -> list[str]:
    """Return the sorted names in the root, which need not exist.

    Raises:
        CheckpointingException: the root is a checkpoint itself.
    """
    try:
        names = locations.list_names(root)
    except FileNotFoundError:
        return []
    if not {CONFIG_FNAME, *(known.marker for known in MARKED)}.isdisjoint(names):
        raise CheckpointingException(
            f"{root!r} is a checkpoint, not a directory of checkpoints: give the directory above."
        )
    return names


def all_steps(root: str) -> list[int]:
    """Return all steps that have a directory or file, in ascending order."""
    return steps_in(list_root(root))


def steps_in(names: Sequence[str]) -> list[int]:
    """Return the steps among the names in a root, in ascending order."""
    return sorted({step for step in map(step_in, names) if step is not None})


def committed_steps(root: str) -> list[int]:
    """Return the steps with a marker or an unreadable directory, ascending."""
    committed = []
    for step in all_steps(root):
        location = step_location(root, step)
        try:
            is_committed = locations.exists(locations.join(location, CONFIG_FNAME))
        except PermissionError as error:
            logger.warning("%s cannot be read, and counts as a checkpoint: %s", location, error)
            is_committed = True
        if is_committed:
            committed.append(step)
    return committed


def problem_with(root: str, step: int) -> str | None:
    """Check the marker, the manifest and the files of a step.

    Of files, sizes and headers are checked. Return the problem, if any.

    A problem counts when it is found again: storage may fail for a moment, and if another program
    replaces the step meanwhile, parts of two checkpoints are checked.
    """
    location = step_location(root, step)
    problem = problem_at(location, step)
    for _ in range(MAX_READS):
        last = problem
        problem = problem and problem_at(location, step)
        if problem == last:
            break
    return problem


def problem_at(location: str, step: int | None, is_of_host: bool = False) -> str | None:
    """Check the checkpoint of a step at any location; a host has some of the files."""
    try:
        marker = read_marker(location)
        if marker is None:
            return _why_unfinished(location)
        backend = parse_config(marker, location).sharded_backend
        note = marker.get(NOTE)
        if isinstance(note, dict) and note.get("step") != step:
            return f"the marker says that this is step {note.get('step')!r}"
        found: Sequence[Problem] = ()
        if backend == BACKEND:
            found = verify(location, "fast").problems
    except (CheckpointingException, OSError) as error:
        return f"{type(error).__name__}: {error}"
    if is_of_host:
        found = [problem for problem in found if locations.exists(problem.file)]
    return _summary(found)


def _summary(problems: Sequence[Problem]) -> str | None:
    if not problems:
        return None
    more = ""
    if len(problems) > 1:
        more = f" (and {len(problems) - 1} more problems)"
    return f"{problems[0].file}: {problems[0].message}{more}"


def is_file(location: str) -> bool:
    """Whether a plain file on disk has a step's name."""
    return locations.is_local(location) and os.path.isfile(location)


def _why_unfinished(location: str) -> str:
    aside = posix.left_aside(location)
    if aside is not None:
        return (
            "its overwriting was interrupted, or another program is replacing or removing it: the "
            f"next save renames {aside!r}, which is its content"
        )
    if not locations.exists(location):
        return REMOVED
    if locations.is_local(location) and not os.path.exists(location):
        return "it is a link that leads nowhere"
    if is_file(location):
        return "it is a file, and a checkpoint is a directory"
    if locations.is_local(location):
        return f"there is no {CONFIG_FNAME}: the save was not finished"
    return f"there is no {CONFIG_FNAME}: the save was not finished, or another program removes it"


def must_replace(root: str, step: int) -> bool:
    """Move a damaged checkpoint of a step aside.

    Return True if it can only be replaced, on an object store.
    """
    location = step_location(root, step)
    if not locations.exists(locations.join(location, CONFIG_FNAME)):
        return False
    problem = problem_with(root, step)
    if problem is None:
        return False
    if not locations.is_local(location):
        logger.warning(
            "%s is incomplete (%s): it is replaced when the new one is complete", location, problem
        )
        return True
    aside = hidden_directories.beside(location, "damaged")
    with contextlib.suppress(FileNotFoundError):  # another program has removed it
        locations.rename(location, aside)
        if problem_at(aside, step) is None:
            # Another program has saved the step since we looked: put it back.
            locations.rename(aside, location)
        else:
            logger.warning("%s is incomplete (%s): moved to %s", location, problem, aside)
    return False


def nothing_to_load(
    root: str, skipped: Mapping[int, str], is_partly_filled: bool
) -> CheckpointNotFoundError:
    """Return the error of a load that finds no good step."""
    advice = ""
    if not skipped:
        advice = " A run that begins has none: call load() only if manager.steps() has any."
    if not locations.exists(root):
        advice += f" {absence(root)}"
    elif is_partly_filled:
        advice = (
            " What the given tensors hold now is undefined: some were filled before the damage "
            "was found."
        )
    reasons = "".join(f"\n  {step}: {reason}" for step, reason in skipped.items())
    return CheckpointNotFoundError(f"No step in {root!r} can be loaded.{advice}{reasons}")


def own_steps(root: str) -> list[Saved]:
    """Return the steps that a manager has saved, in ascending order.

    A step counts only if its marker says so, so links and the files of other programs do not.
    """
    saves = (saved_at(step_location(root, step), step) for step in all_steps(root))
    return [saved for saved in saves if saved is not None]


# --- The note in the marker -----------------------------------------------------------------------


def finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that JSON has numbers for.

    A step without them is never the best one.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"Metrics are a dict of numbers, got {metrics!r:.100}")
    numbers = {str(name): _number(name, value) for name, value in metrics.items()}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def _number(name: object, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError) as error:
        raise TypeError(f"The metric {name!r} is no number: {value!r:.100}") from error


def saved_at(location: str, step: int) -> Saved | None:
    """Return the step noted in the marker at a location, or None.

    None means that no manager has saved it.
    """
    note = _note_at(location)
    if note.get("step") != step:
        return None
    metrics = note.get("metrics", {})
    numbers: dict[str, float] = {}
    with contextlib.suppress(TypeError):
        numbers = finite_numbers(metrics)
    is_odd = not isinstance(metrics, dict) or len(numbers) < len(metrics)
    if is_odd:
        logger.warning(
            "step %d in %s is not removed: its metrics are no numbers (%.200r)",
            step,
            location,
            metrics,
        )
    pinned = is_odd or note.get("pinned", False) is not False
    # Earlier versions gave saves no names.
    return Saved(step, str(note.get("save")), numbers, pinned, OPTIMIZER_REMOVED not in note)


def warn_of_removed_optimizer(root: str, location: str) -> None:
    """Log that a step in the root has lost its optimizer state."""
    if location.startswith(root) and OPTIMIZER_REMOVED in _note_at(location):
        logger.warning(
            "%s holds weights only: the optimizer state was removed there, as keep_optimizer says",
            location,
        )


def _note_at(location: str) -> dict[str, Any]:
    if locations.is_local(location) and os.path.islink(location):
        return {}
    try:
        return note_in(read_marker(location))
    except (CheckpointingException, OSError):
        return {}


def note_in(marker: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the note of a manager in a marker, empty without one."""
    note = (marker or {}).get(NOTE)
    if isinstance(note, dict):
        return note
    return {}


# --- Failures -------------------------------------------------------------------------------------


def all_find(ranks: Ranks, error: BaseException, judge: Callable[[BaseException], bool]) -> bool:
    """Whether all ranks have raised an error together and judge it alike.

    Collective operation if they have raised it together.
    """
    # A rank that was interrupted has an error of its own, and comes here as well.
    is_judged = isinstance(error, Exception) and judge(error)
    return ranks.are_in_step_after(error) and bool(ranks.all_gather_numbers([is_judged]).all())


def is_of_the_storage(error: BaseException) -> bool:
    """Whether a later save may succeed: the storage failed.

    None can after invalid arguments or shards, or a lost rank.
    """
    if isinstance(error, RankFailedError):
        return not error.is_lost_contact and _is_each(error, is_of_the_storage)
    return isinstance(error, CheckpointingException | OSError | MemoryError) and not isinstance(
        error, ValueError | TypeError
    )


def is_damage_of(location: str, error: BaseException) -> bool:
    """Whether a checkpoint is damaged or gone, so that another may load.

    Other errors of the disk may be temporary, callbacks of users fail for reasons of their own, and
    a request that does not fit this checkpoint does not fit another one, either.
    """
    if isinstance(error, RankFailedError):
        return bool(error.failures) and _is_each(
            error, lambda failure: is_damage_of(location, failure)
        )
    if isinstance(error, CorruptCheckpointError | CheckpointNotFoundError):
        return True
    return isinstance(error, FileNotFoundError) and str(error.filename).startswith(location)


def _is_each(error: RankFailedError, judge: Callable[[BaseException], bool]) -> bool:
    return all(judge(failure) for failure in error.failures.values())


# --- Step notes -----------------------------------------------------------------------------------


def encode_note(metrics: Mapping[str, Any], pinned: bool) -> bytes:
    """Encode the facts of this rank about a step.

    Raises:
        TypeError: a metric is not a number.
    """
    names = list(map(str, metrics))
    return json.dumps([finite_numbers(metrics), names, bool(pinned)]).encode()


def united_note(encoded: Sequence[bytes]) -> tuple[dict[str, float], set[str], bool]:
    """Unite the facts of all ranks; the lowest rank with a metric counts.

    Return the metrics that are finite numbers, the names of all metrics, and whether the step is
    never removed.
    """
    metrics: dict[str, float] = {}
    names: set[str] = set()
    is_pinned = False
    for text in reversed(encoded):
        numbers, names_of_rank, pinned = json.loads(text)
        metrics |= numbers
        names.update(names_of_rank)
        is_pinned = is_pinned or pinned
    return metrics, names, is_pinned

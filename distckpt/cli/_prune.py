"""`distckpt prune`: remove the checkpoints that a manager does not retain, and leftovers."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

from distckpt._base.errors import CheckpointNotFoundError
from distckpt._commit import hidden_directories, posix
from distckpt._storage import locations
from distckpt.cli._output import Output
from distckpt.cli._selection import given
from distckpt.manager import _removal as removal
from distckpt.manager import _steps as steps
from distckpt.manager._rejections import newest_good_step
from distckpt.manager._removal import Retention, metric_names, surplus, unknown_metric
from distckpt.manager._steps import Saved, step_name
from distckpt.tasks._journal import Journal

_MINUTES = 60
"""Minutes without a write before leftovers are removed."""
_MINUTES_OF_PARTS = 7 * 24 * 60
"""The same for work in parts, which may queue for days."""


@dataclass
class _Pruning:
    """The checkpoints and leftovers of a directory, to remove or to keep.

    Attributes:
        root: the directory.
        saved: all steps that a manager has saved.
        surplus: the steps to remove.
        with_optimizer: the steps to keep without their optimizer state.
        leftovers: names of the remains of interrupted saves and removals.
        live: names that a save may still be writing.
        problems: for each name that could not be removed, the reason.
    """

    root: str
    saved: list[Saved]
    surplus: list[Saved]
    with_optimizer: list[Saved]
    leftovers: list[str]
    live: list[str]
    problems: dict[str, str] = field(default_factory=dict)


def run(arguments: Namespace, output: Output) -> int:
    """Remove checkpoints and leftovers, and list them."""
    pruning = _plan(arguments)
    doing = "would remove"
    if not arguments.dry_run:
        _remove(pruning)
        doing = "removed"
    targets = {}
    for item in pruning.surplus:
        targets[step_name(item.step)] = step_name(item.step)
    for item in pruning.with_optimizer:
        targets[step_name(item.step)] = f"the optimizer state of {step_name(item.step)}"
    for name in pruning.leftovers:
        targets[name] = f"{name}{_origin_of(name)}"
    for name, target in targets.items():
        problem = pruning.problems.get(name)
        if problem is None:
            output.line(f"{doing} {target}")
        else:
            output.line(f"cannot remove {target}: {problem}")
    for name in pruning.live:
        output.line(f"kept {name}: {_why_kept(name)}")
    outcome = _outcome(pruning)
    output.json({"root": pruning.root, "dry_run": arguments.dry_run, **outcome})
    num_kept = len(outcome["kept"])
    num_saved = len(pruning.saved)
    all_are_kept = ""
    if not arguments.keep_last:
        all_are_kept = ": without --keep-last all are"
    output.line(f"{num_kept} of {num_saved} checkpoints kept in {pruning.root}{all_are_kept}")
    return int(bool(pruning.problems))


def _origin_of(name: str) -> str:
    if steps.is_journal_of_parts(name):
        return ", of work in parts that is complete or abandoned"
    return ", left by an interrupted save or removal"


def _why_kept(name: str) -> str:
    if steps.is_journal_of_parts(name):
        return "work in parts may go on with it"
    return "a save may still be writing it"


def _plan(arguments: Namespace) -> _Pruning:
    conditions = (
        "keep_last",
        "keep_every",
        "best_metric",
        "best_mode",
        "keep_best",
        "keep_optimizer",
    )
    policy = Retention(**given(arguments, *conditions))
    root = posix.resolve(arguments.root)
    if not locations.isdir(root):
        raise CheckpointNotFoundError(f"{root!r} is not a directory")
    saved = steps.own_steps(root)
    if problem := unknown_metric(policy.best_metric, metric_names(saved)):
        raise ValueError(f"{root}: {problem}")
    leftovers, live = _leftovers(root, arguments.abandoned_after)
    removable, with_optimizer = _removable(root, saved, policy)
    return _Pruning(root, saved, removable, with_optimizer, leftovers, live)


def _remove(pruning: _Pruning) -> None:
    """Remove steps and leftovers; note the reason for each that remained."""
    root = pruning.root
    problems = removal.remove_steps(root, pruning.surplus)
    problems |= removal.remove_optimizers(root, pruning.with_optimizer)
    for step, problem in problems.items():
        pruning.problems[step_name(step)] = problem
    for name in list(pruning.leftovers):
        if removal.clear_leftover(root, name, locations.exists):
            continue
        # A save had made its directory, and had not locked it yet, when leftovers were looked for.
        if _is_in_use(root, name):
            pruning.leftovers.remove(name)
            pruning.live.append(name)
        else:
            pruning.problems[name] = "it is still there"


def _is_in_use(root: str, name: str) -> bool:
    """Whether an apparent leftover belongs to a save: locked, or since removed."""
    location = locations.join(root, name)
    with hidden_directories.claimed(location) as has_ended:
        return has_ended is False or not locations.exists(location)


def _outcome(pruning: _Pruning) -> dict[str, Any]:
    problems = pruning.problems
    removed = _without_problems(pruning.surplus, problems)
    return {
        "kept": [item.step for item in pruning.saved if item.step not in removed],
        "removed": removed,
        "optimizer_removed": _without_problems(pruning.with_optimizer, problems),
        "not_removed": problems,
        "leftovers_removed": [name for name in pruning.leftovers if name not in problems],
        "leftovers_kept": pruning.live,
    }


def _without_problems(items: list[Saved], problems: dict[str, str]) -> list[int]:
    return [item.step for item in items if step_name(item.step) not in problems]


def _removable(root: str, saved: list[Saved], policy: Retention) -> tuple[list[Saved], list[Saved]]:
    """Return the steps to remove, and those to keep without optimizer state.

    There are none unless some step is complete.
    """
    if policy.keeps_all:
        return [], []
    newest, _ = newest_good_step(root, {})
    if newest is None:
        return [], []
    # Steps newer than the newest good one are damaged or rejected. It is up to the user to repair
    # them.
    old = [item for item in saved if item.step <= newest]
    removable = _except_last(root, surplus(root, policy, old, newest))
    kept = [item for item in old if item not in removable]
    surplus_state = removal.with_surplus_optimizer(root, policy, kept, newest)
    return removable, _except_last(root, surplus_state)


def _except_last(root: str, items: list[Saved]) -> list[Saved]:
    """Return all but the step that was saved last.

    After going back, the job goes on from it.
    """
    last = steps.read_tracker(root)
    return [item for item in items if item.step != last]


def _leftovers(root: str, abandoned_after: int | None) -> tuple[list[str], list[str]]:
    """Return leftovers, and names that a save may still be writing."""
    is_local = locations.is_local(root)
    now = _clock_of(root)
    dead = []
    live = []
    for name in steps.list_root(root):
        if not steps.is_leftover(name) and not (is_local and steps.is_journal_of_parts(name)):
            continue
        latest = now - 60 * (abandoned_after or _minutes_for(root, name))
        if steps.is_free_to_remove(name) or _is_dead(root, name, latest):
            dead.append(name)
        else:
            live.append(name)
    return dead, live


def _minutes_for(root: str, name: str) -> int:
    if not steps.is_journal_of_parts(name):
        return _MINUTES
    is_complete = Journal(locations.join(root, name)).has_appeared()
    if is_complete:
        return _MINUTES
    return _MINUTES_OF_PARTS


def _is_dead(root: str, name: str, latest: float) -> bool:
    """Whether a save has ended: on this machine, or without a write since a time."""
    location = locations.join(root, name)
    with hidden_directories.claimed(location) as has_ended:
        if has_ended is not None:
            return has_ended
        times = [time for _, time in removal.changes_in(location).values()]
        return max(times, default=0.0) < latest


def _clock_of(root: str) -> float:
    """Return the current time by the clock of a directory's file times.

    It may be a server's clock.
    """
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=root) as probe:
        return os.fstat(probe.fileno()).st_mtime
    return time.time()

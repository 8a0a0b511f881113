"""`distckpt prune`: remove the checkpoints of a manager that its retention does not keep, and
leftovers.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from argparse import Namespace

from distckpt._base.errors import CheckpointNotFoundError
from distckpt._cli.output import Output
from distckpt._commit import posix, running
from distckpt._manager.retention import (
    Retention,
    changes_in,
    clear_leftover,
    metric_names,
    remove_steps,
    surplus,
    unknown_metric,
)
from distckpt._manager.steps import (
    Saved,
    is_free_to_remove,
    is_leftover,
    list_root,
    own_steps,
    problem_with,
    step_name,
)
from distckpt._storage import locations


def run(arguments: Namespace, output: Output) -> int:
    """Remove checkpoints and leftovers, and print what was removed."""
    conditions = ("keep_last", "keep_every", "best_metric", "best_mode", "keep_best")
    policy = Retention(**{name: getattr(arguments, name) for name in conditions})
    root = posix.resolve(arguments.root)
    if not locations.isdir(root):
        raise CheckpointNotFoundError(f"{root!r} is not a directory")
    saved = own_steps(root)
    if problem := unknown_metric(policy.best_metric, metric_names(saved)):
        raise ValueError(f"{root}: {problem}")
    surplus_steps = _removable(root, saved, policy)
    leftovers, live = _leftovers(root, arguments.abandoned_after)
    names = [*(step_name(item.step) for item in surplus_steps), *leftovers]
    problems = {} if arguments.dry_run else _remove(root, surplus_steps, leftovers)
    doing = "would remove" if arguments.dry_run else "removed"
    for name in names:
        what = f"{name}, left by an interrupted save or removal" if name in leftovers else name
        output.line(
            f"cannot remove {what}: {problems[name]}" if name in problems else f"{doing} {what}"
        )
    for name in live:
        output.line(f"kept {name}: a save may still be writing it")
    removed = [item.step for item in surplus_steps if step_name(item.step) not in problems]
    kept = [item.step for item in saved if item.step not in removed]
    output.json(
        {
            "root": root,
            "dry_run": arguments.dry_run,
            "kept": kept,
            "removed": removed,
            "not_removed": problems,
            "leftovers_removed": [name for name in leftovers if name not in problems],
            "leftovers_kept": live,
        }
    )
    output.line(f"{len(kept)} of {len(saved)} checkpoints kept in {root}")
    return 1 if problems else 0


def _remove(root: str, surplus_steps: list[Saved], leftovers: list[str]) -> dict[str, str]:
    """Remove steps and leftovers; return why some could not be removed, by name."""
    problems = {step_name(step): why for step, why in remove_steps(root, surplus_steps).items()}
    still_there = [name for name in leftovers if not clear_leftover(root, name, locations.exists)]
    return problems | dict.fromkeys(still_there, "it is still there")


def _removable(root: str, saved: list[Saved], policy: Retention) -> list[Saved]:
    """Return the steps to remove; none as long as no step is complete."""
    if policy.keep_last is None:
        return []

    newest = next(
        (item.step for item in reversed(saved) if problem_with(root, item.step) is None), None
    )
    if newest is None:
        return []
    # Steps newer than the newest complete one are damaged; whether to repair them is for the user
    # to decide.
    return surplus(root, policy, [item for item in saved if item.step <= newest], newest)


def _leftovers(root: str, abandoned_after: int) -> tuple[list[str], list[str]]:
    """Return the leftovers of interrupted saves and removals, and those that a save may still be
    writing.
    """
    names = [name for name in list_root(root) if is_leftover(name)]
    latest = _clock_of(root) - 60 * abandoned_after

    def is_dead(name: str) -> bool:
        location = locations.join(root, name)
        with running.claimed(location) as has_ended:
            if has_ended is None:
                return (
                    max((time for _, time in changes_in(location).values()), default=0.0) < latest
                )
            return has_ended

    dead = [name for name in names if is_free_to_remove(name) or is_dead(name)]
    return dead, [name for name in names if name not in dead]


def _clock_of(root: str) -> float:
    """Return the time by the clock that file times in a directory come from, which may be a
    server's.
    """
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=root) as probe:
        return os.fstat(probe.fileno()).st_mtime
    return time.time()

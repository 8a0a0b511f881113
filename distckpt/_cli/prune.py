"""`distckpt prune`: remove the checkpoints of a manager that its retention does not keep, and leftovers."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace

from distckpt._base.errors import CheckpointNotFoundError
from distckpt._cli.output import Output
from distckpt._cli.verb import Verb, positive
from distckpt._commit import posix
from distckpt._manager.retention import Retention, last_change, remove_step, surplus
from distckpt._manager.steps import Saved, is_leftover, is_trash, list_root, own_steps, problem_with, step_name
from distckpt._storage import locations


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments: the retention arguments of `distckpt.CheckpointManager`."""
    parser.add_argument("root", help="the directory of a CheckpointManager: a path or URL")
    parser.add_argument(
        "--keep-last", type=positive, metavar="N", help="keep the newest N complete checkpoints (default: all)"
    )
    parser.add_argument("--keep-every", type=positive, metavar="N", help="keep steps that are multiples of N")
    parser.add_argument("--best-metric", metavar="NAME", help="keep the checkpoints with the best values of it")
    parser.add_argument(
        "--best-mode",
        choices=("min", "max"),
        default="min",
        help="which values are best (default: %(default)s)",
    )
    parser.add_argument(
        "--keep-best",
        type=positive,
        default=1,
        metavar="N",
        help="number of best ones to keep (default: %(default)s)",
    )
    parser.add_argument(
        "--abandoned-after",
        type=positive,
        default=60,
        metavar="MINUTES",
        help="remove leftovers of saves that wrote nothing for this long (default: %(default)s)",
    )
    parser.add_argument("--dry-run", action="store_true", help="list what would be removed, without removing anything")


def run(arguments: Namespace, output: Output) -> int:
    """Remove checkpoints and leftovers, and print what was removed."""
    policy = Retention(
        arguments.keep_last,
        arguments.keep_every,
        best_metric=arguments.best_metric,
        best_mode=arguments.best_mode,
        keep_best=arguments.keep_best,
    )
    root = posix.resolve(arguments.root)
    if not locations.isdir(root):
        raise CheckpointNotFoundError(f"{root!r} is not a directory")
    saved = own_steps(root)
    removed = _removable(root, saved, policy)
    leftovers, live = _leftovers(root, arguments.abandoned_after)
    doing = "would remove" if arguments.dry_run else "removed"
    for step in removed:
        if not arguments.dry_run:
            remove_step(root, step)
        output.line(f"{doing} {step_name(step)}")
    for name in leftovers:
        if not arguments.dry_run:
            locations.remove_tree(locations.join(root, name))
        output.line(f"{doing} {name}, left by an interrupted save or removal")
    for name in live:
        output.line(f"kept {name}: a save may still be writing it")
    kept = [item.step for item in saved if item.step not in removed]
    output.json(
        {
            "root": root,
            "dry_run": arguments.dry_run,
            "kept": kept,
            "removed": removed,
            "leftovers_removed": leftovers,
            "leftovers_kept": live,
        }
    )
    output.line(f"{len(kept)} of {len(saved)} checkpoints kept in {root}")
    return 0


def _removable(root: str, saved: list[Saved], policy: Retention) -> list[int]:
    """Return the steps to remove; none as long as no step is complete."""
    if policy.keep_last is None:
        return []

    newest = next((item.step for item in reversed(saved) if problem_with(root, item.step) is None), None)
    if newest is None:
        return []
    # Steps newer than the newest complete one are damaged; whether to repair them is for the user to decide.
    return surplus(root, policy, [item for item in saved if item.step <= newest], newest)


def _leftovers(root: str, abandoned_after: int) -> tuple[list[str], list[str]]:
    """Return the leftovers of interrupted saves and removals, and those that a save may still be writing."""
    names = [name for name in list_root(root) if is_leftover(name)]
    latest = time.time() - 60 * abandoned_after
    dead = [name for name in names if is_trash(name) or last_change(locations.join(root, name)) < latest]
    return dead, [name for name in names if name not in dead]


VERB = Verb(
    "prune",
    "Remove old checkpoints, and leftovers of interrupted saves.",
    add_arguments,
    run,
)

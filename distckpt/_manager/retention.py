"""Choose the checkpoints to keep, and remove the others."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from distckpt._base.messages import check_choice
from distckpt._commit import conditional_put, posix
from distckpt._format.marker import CONFIG_FNAME
from distckpt._manager import steps
from distckpt._manager.steps import Saved, step_name
from distckpt._storage import locations

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """The conditions of which a step must meet one to be kept, see `CheckpointManager`; without `keep_last` all are."""

    keep_last: int | None = None
    keep_every: int | None = None
    keep: Callable[[int], bool] | None = None
    best_metric: str | None = None
    best_mode: Literal["min", "max"] = "min"
    keep_best: int = 1

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        check_choice("best_mode", self.best_mode, ("min", "max"))
        others = (self.keep_every, self.keep, self.best_metric)
        if self.keep_last is None and any(other is not None for other in others):
            raise ValueError("Without keep_last every checkpoint is kept: give keep_last as well, at least 1.")


def surplus(root: str, policy: Retention, saved: Sequence[Saved], newest: int) -> list[int]:
    """Return the steps that are not to be kept, oldest first.

    `saved` are in ascending order; `newest` is kept and counts as complete. As few others as possible are checked.
    """
    if policy.keep_last is None:
        return []
    kept = {newest, *_best(policy, saved)}
    num_complete = 1
    for item in reversed(saved):
        step = item.step
        if num_complete < policy.keep_last and step != newest:
            # Also one that is incomplete, or cannot be read today: only what is older than enough complete ones goes.
            kept.add(step)
            num_complete += steps.problem_with(root, step) is None
        is_round = policy.keep_every is not None and step % policy.keep_every == 0
        if item.pinned or is_round or (policy.keep is not None and policy.keep(step)):
            kept.add(step)
    return [item.step for item in saved if item.step not in kept]


def _best(policy: Retention, saved: Sequence[Saved]) -> list[int]:
    metric = policy.best_metric
    if metric is None:
        return []
    sign = 1 if policy.best_mode == "min" else -1
    # Of equal values the newer step is the better one.
    ranked = sorted((sign * item.metrics[metric], -item.step) for item in saved if metric in item.metrics)
    return [-step for _, step in ranked[: policy.keep_best]]


def remove_step(root: str, step: int) -> None:
    """Remove a step, if it is there, so that it is never half deleted under its name."""
    location = locations.join(root, step_name(step))
    if not locations.is_local(root):
        # Object stores do not rename; without the marker it is no checkpoint.
        locations.remove_file(locations.join(location, CONFIG_FNAME))
        locations.remove_tree(location)
        return
    trash = locations.join(root, f".{step_name(step)}.trash-{secrets.token_hex(8)}")
    try:
        locations.rename(location, trash)
    except FileNotFoundError:
        return
    locations.remove_tree(trash)


def last_change(location: str) -> float:
    """Return when something was last written in a local directory, in seconds since the epoch."""
    times = [0.0]
    for directory, _, names in os.walk(location):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            with contextlib.suppress(FileNotFoundError):
                times.append(os.lstat(path).st_mtime)
    return max(times)


def clear_leftovers(root: str) -> None:
    """Remove what interrupted saves and removals of earlier runs have left, and give a lost step its name back."""
    for name in steps.list_root(root):
        replaced = steps.replaced_step(name)
        if replaced is not None:
            posix.put_back(locations.join(root, step_name(replaced)))
        location = locations.join(root, name)
        if steps.is_leftover(name) or (replaced is not None and locations.exists(location)):
            logger.info("removing %s, which an interrupted save or removal has left in %s", name, root)
            locations.remove_tree(location)
    if not locations.is_local(root):
        for step in set(steps.all_steps(root)).difference(steps.committed_steps(root)):
            logger.info("removing what an interrupted save of step %d has left in %s", step, root)
            conditional_put.remove_unfinished(locations.join(root, step_name(step)))

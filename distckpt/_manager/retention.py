"""Which checkpoints are kept, and how the others are removed."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from distckpt._commit import conditional_put, posix
from distckpt._format.marker import CONFIG_FNAME
from distckpt._manager.steps import Saved, all_steps, committed_steps, is_leftover, list_root, replaced_step, step_name
from distckpt._storage import locations

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """What is kept: a step that any of these names. Without `keep_last` everything is.

    Attributes:
        keep_last: the newest so many whole steps.
        keep_every: steps that are multiples of this.
        keep: steps for which this returns True.
        best_metric: name of a metric that was given to `save`.
        best_mode: whether small or large values of it are good.
        keep_best: so many steps with the best values.
    """

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
        if self.best_mode not in ("min", "max"):
            raise ValueError(f"best_mode must be 'min' or 'max', got {self.best_mode!r}")
        others = (self.keep_every, self.keep, self.best_metric)
        if self.keep_last is None and any(other is not None for other in others):
            raise ValueError("Without keep_last every checkpoint is kept: give keep_last as well, at least 1.")


def surplus(policy: Retention, saved: Sequence[Saved], newest: int, is_whole: Callable[[int], bool]) -> list[int]:
    """Return the steps that are not to be kept, oldest first.

    Args:
        policy: says what is kept.
        saved: the steps there are, in ascending order.
        newest: the step that was saved just now; it is kept and counts as whole.
        is_whole: tells whether the checkpoint of a step is whole; asked about as few as possible.
    """
    if policy.keep_last is None:
        return []
    kept = {newest, *_best(policy, saved)}
    num_whole = 1
    for item in reversed(saved):
        step = item.step
        if num_whole < policy.keep_last and step != newest:
            # Also one that is not whole, or cannot be read today: only what is older than enough whole ones goes.
            kept.add(step)
            num_whole += is_whole(step)
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
    """Remove a step: no moment in which it stands half deleted under its name. One that is gone already is fine."""
    location = locations.join(root, step_name(step))
    if not locations.is_local(root):
        # There is no renaming; without the marker it is no checkpoint.
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
    for name in list_root(root):
        replaced = replaced_step(name)
        if replaced is not None:
            posix.put_back(locations.join(root, step_name(replaced)))
        location = locations.join(root, name)
        if is_leftover(name) or (replaced is not None and locations.exists(location)):
            logger.info("removing %s, which an interrupted save or removal has left in %s", name, root)
            locations.remove_tree(location)
    if not locations.is_local(root):
        for step in set(all_steps(root)).difference(committed_steps(root)):
            logger.info("removing what an interrupted save of step %d has left in %s", step, root)
            conditional_put.remove_unfinished(locations.join(root, step_name(step)))

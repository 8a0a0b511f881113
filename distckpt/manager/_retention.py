"""Choose the steps to keep."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from distckpt._base.messages import check_choice, did_you_mean
from distckpt.manager import _steps as steps
from distckpt.manager._steps import Saved

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """The conditions of `CheckpointManager`.

    A step that meets one of them is kept; without `keep_last` all steps are.
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
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        check_choice("best_mode", self.best_mode, ("min", "max"))
        if self.keep_best != 1 and self.best_metric is None:
            raise ValueError(
                f"keep_best={self.keep_best} must be of some metric: give best_metric as well."
            )
        others = (self.keep_every, self.keep, self.best_metric)
        if self.keep_last is None and any(other is not None for other in others):
            raise ValueError(
                "Without keep_last every checkpoint is kept: give keep_last as well, at least 1."
            )

    def keeps_always(self, saved: Saved) -> bool:
        """Whether a step is kept whatever newer and better ones there are."""
        if saved.pinned:
            return True
        if self.keep_every is not None and saved.step % self.keep_every == 0:
            return True
        return self.keep is not None and self.keep(saved.step)


def surplus(root: str, policy: Retention, saved: Sequence[Saved], last: int) -> list[Saved]:
    """Return the steps that are not kept, oldest first.

    Checks as few steps as possible.

    Args:
        root: their directory.
        policy: the conditions for keeping a step.
        saved: all steps, in ascending order.
        last: the step that was saved last: it is complete, and kept, even if there are newer ones.
    """
    if policy.keep_last is None:
        return []
    # Without any metrics there is no best step yet.
    has_metrics = any(item.metrics for item in saved)
    if has_metrics and (problem := unknown_metric(policy.best_metric, metric_names(saved))):
        logger.warning("nothing is removed from %s: %s", root, problem)
        return []
    steps_to_keep = _newest(root, policy.keep_last, saved, last) | _best(policy, saved)
    surplus_steps = []
    for item in saved:
        if item.step not in steps_to_keep and not policy.keeps_always(item):
            surplus_steps.append(item)
    return surplus_steps


def metric_names(saved: Iterable[Saved]) -> set[str]:
    """Return the names of all metrics of some steps."""
    names: set[str] = set()
    for item in saved:
        names.update(item.metrics)
    return names


def unknown_metric(metric: str | None, names: Collection[str]) -> str | None:
    """Return a message if a metric is unknown, or else None."""
    if metric is None or metric in names:
        return None
    return (
        f"no step has the best_metric {metric!r}, only {sorted(names)}{did_you_mean(metric, names)}"
    )


def _newest(root: str, keep_last: int, saved: Sequence[Saved], last: int) -> set[int]:
    """Return the newest steps until `keep_last` are complete, and the last save."""
    newest = {last}
    num_complete = 0
    for item in reversed(saved):
        if num_complete >= keep_last:
            break
        # One that is incomplete, or cannot be read today, stays as well.
        newest.add(item.step)
        num_complete += item.step == last or steps.problem_with(root, item.step) is None
    return newest


def _best(policy: Retention, saved: Sequence[Saved]) -> set[int]:
    metric = policy.best_metric
    if metric is None:
        return set()
    sign = 1 if policy.best_mode == "min" else -1
    # Of equal values the newer step is the better one.
    ranked = sorted(
        (sign * item.metrics[metric], -item.step) for item in saved if metric in item.metrics
    )
    return {-step for _, step in ranked[: policy.keep_best]}

"""Search for the newest step that loads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from distckpt._base.errors import CheckpointNotFoundError
from distckpt._ranks.collectives import Ranks
from distckpt.manager import _rejections as rejections
from distckpt.manager import _steps as steps

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def load_newest(
    ranks: Ranks, root: str, skipped: dict[int, str], read: Callable[[str], _Result]
) -> _Result:
    """Load the newest step that loads; `skipped` gets the problems of newer ones.

    Collective operation: all ranks must call it. `read` loads a step at a location.

    Raises:
        CheckpointNotFoundError: no step can be loaded, with the problem of each.
    """
    is_partly_filled = False

    def find() -> list[object]:
        newest, problems = find_newest(root, skipped)
        return [newest, list(problems.items())]

    while True:
        newest, problems = ranks.decide_json("find the latest checkpoint", find)
        skipped.update(problems)
        if newest is None:
            raise steps.nothing_to_load(root, skipped, is_partly_filled)
        location = steps.step_location(root, newest)
        try:
            return read(location)
        except BaseException as error:
            if not steps.all_find(ranks, error, partial(steps.is_damage_of, location)):
                raise
            # It was complete when it was found.
            reason = steps.REMOVED
            if not isinstance(error, CheckpointNotFoundError):
                reason = f"{type(error).__name__}: {error}"
            skipped[newest] = reason
        is_partly_filled = True
        if ranks.is_coordinator:
            _log_skipped(root, newest, skipped[newest])


def find_newest(root: str, skipped: Mapping[int, str]) -> tuple[int | None, dict[int, str]]:
    """Return the newest complete step outside `skipped`, and newer ones' problems."""
    newest, problems = rejections.newest_good_step(root, skipped)
    for step, problem in problems.items():
        if step not in skipped:
            _log_skipped(root, step, problem)
    return newest, problems


def _log_skipped(root: str, step: int, reason: str) -> None:
    logger.warning("step %d in %s is passed over: %s", step, root, reason)

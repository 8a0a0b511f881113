"""The errors that a manager continues after, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable

from distckpt._base.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    RankFailedError,
)
from distckpt._ranks.collectives import Ranks


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

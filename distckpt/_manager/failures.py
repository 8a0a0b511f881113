"""Which errors a manager goes on after, on all ranks alike."""

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
    """Tell whether all ranks have raised an error together and judge it alike. Collective operation
    if they have.
    """
    # One that was interrupted has an error of its own, and comes too.
    is_judged = isinstance(error, Exception) and judge(error)
    return ranks.are_in_step_after(error) and bool(ranks.all_gather_numbers([is_judged]).all())


def is_of_the_storage(error: BaseException) -> bool:
    """Tell whether a later save may succeed: not after invalid arguments or shards, nor after a
    lost rank.
    """
    if isinstance(error, RankFailedError):
        return not error.is_lost_contact and _is_each(error, is_of_the_storage)
    return isinstance(error, CheckpointingException | OSError | MemoryError) and not isinstance(
        error, ValueError | TypeError
    )


def is_damage_of(location: str, error: BaseException) -> bool:
    """Tell whether a checkpoint is damaged or gone: another one may load, where a request that does
    not fit would not.

    Errors of the disk that say no such thing may be temporary, and callbacks of users fail for
    reasons of their own.
    """
    if isinstance(error, RankFailedError):
        return bool(error.failures) and _is_each(error, lambda each: is_damage_of(location, each))
    if isinstance(error, CorruptCheckpointError | CheckpointNotFoundError):
        return True
    return isinstance(error, FileNotFoundError) and str(error.filename).startswith(location)


def _is_each(error: RankFailedError, judge: Callable[[BaseException], bool]) -> bool:
    return all(judge(failure) for failure in error.failures.values())

"""Exceptions on their way to other ranks, as values: what another rank sent is never unpickled."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

from distckpt._base import errors
from distckpt._base.errors import CheckpointingException, LoadMismatchError, RankFailedError


def error_to_raise(
    error: BaseException | None, rank: int, outcomes: Sequence[dict[str, Any] | None], phase: str, decision: bool
) -> BaseException:
    """Return what this rank raises after a phase in which it or others failed, see `Ranks.phase`.

    `error` is its own, `outcomes` are the descriptions of all.
    """
    if error is not None and not isinstance(error, Exception):
        # KeyboardInterrupt and its like keep their meaning for this process; for the others this rank has failed.
        return error
    failures = {number: _rebuild_error(outcome) for number, outcome in enumerate(outcomes) if outcome is not None}
    if error is not None:
        failures[rank] = error
    is_same_everywhere = None not in outcomes and all(outcome == outcomes[0] for outcome in outcomes)
    if is_same_everywhere or (decision and list(failures) == [0]):
        first = min(failures)
        if (outcomes[first] or {})["is_ours"]:
            return failures.get(rank, failures[first])
    return RankFailedError(failures, phase=phase)


def describe_error(error: BaseException | None) -> dict[str, Any] | None:
    """Describe an exception in what JSON can hold; None for None."""
    if error is None:
        return None
    described: dict[str, Any] = {
        "type": type(error).__name__,
        "message": str(error),
        "is_ours": isinstance(error, CheckpointingException),
    }
    if isinstance(error, LoadMismatchError):
        described.update(missing=sorted(error.missing), unexpected=sorted(error.unexpected))
    elif isinstance(error, OSError) and error.errno is not None and not isinstance(error, CheckpointingException):
        described.update(errno=error.errno, strerror=error.strerror, filename=str(error.filename or ""))
    return described


def _rebuild_error(described: dict[str, Any]) -> BaseException:
    """Make an exception of the same kind as another rank has described."""
    name, message = described["type"], described["message"]
    ours = getattr(errors, name, None)
    if ours is LoadMismatchError:
        return LoadMismatchError(message, described.get("missing", ()), described.get("unexpected", ()))
    if ours is RankFailedError:
        return RankFailedError({}, message=message)
    if isinstance(ours, type) and issubclass(ours, CheckpointingException):
        return ours(message)
    if "errno" in described:
        return OSError(described["errno"], described["strerror"], described["filename"] or None)
    known = getattr(builtins, name, None)
    if known in (ValueError, TypeError, KeyError, RuntimeError, MemoryError, NotImplementedError, AssertionError):
        return known(message)  # type: ignore[no-any-return]
    return CheckpointingException(f"{name}: {message}" if message else name)

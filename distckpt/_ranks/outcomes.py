"""Outcomes of a phase, exchanged as plain values: call and exception.

Nothing that another rank sends is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from distckpt._base import errors
from distckpt._base.errors import CheckpointingException, LoadMismatchError, RankFailedError

Call: TypeAlias = dict[str, str]
"""The "call" and "phase" of a rank, and its settings by name."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLAIN_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        ValueError,
        TypeError,
        KeyError,
        RuntimeError,
        MemoryError,
        NotImplementedError,
        AssertionError,
    )
}
"""Built-in errors that are rebuilt from their message."""


def describe_call(
    operation: str | None,
    phase: str,
    settings: Mapping[str, object],
) -> Call:
    """Describe a rank's call in words that equal calls share."""
    # The location of a background save is left out: nodes may mount one file system in different
    # places.
    call = (operation or "").partition(" to ")[0]
    texts = {name: _ADDRESS.sub("", repr(value)) for name, value in settings.items()}
    return {"call": call, "phase": phase, **texts}


def digest_of(call: Call) -> bytes:
    """Return 8 bytes that stand for a call."""
    return hashlib.blake2b(json.dumps(call).encode(), digest_size=8).digest()


def describe_difference(calls: Sequence[Call]) -> str:
    """Return the message about calls, by rank, that differ."""
    name = _first_difference(calls)
    if name == "call":
        made = _by_rank(f"calls {call[name] or None}" for call in calls)
        return f"All ranks must make the same calls, but {made}."
    where = ""
    if calls[0]["call"]:
        where = f" in {calls[0]['call']!r}"
    if name == "phase":
        reached = _by_rank(f"is at {call[name]!r}" for call in calls)
        return f"The ranks are out of step{where}: {reached}."
    given = _by_rank(f"gives {call.get(name):.100}" for call in calls)
    return f"All ranks must give the same {name}{where}, but {given}."


def _first_difference(calls: Sequence[Call]) -> str:
    """Return the name of the first difference between calls.

    The call itself comes before anything else.
    """
    for name in ("call", *calls[0]):
        if len({call.get(name) for call in calls}) > 1:
            return name
    return "phase"


def _by_rank(texts: Iterable[str]) -> str:
    """List the different texts, each with its first rank."""
    first_ranks: dict[str, int] = {}
    for rank, text in enumerate(texts):
        first_ranks.setdefault(text, rank)
    return ", ".join(f"rank {rank} {text}" for text, rank in first_ranks.items())


def error_to_raise(
    error: BaseException | None,
    rank: int,
    outcomes: Sequence[dict[str, Any] | None],
    phase: str,
    decision: bool,
) -> BaseException:
    """Return this rank's error after a phase in which ranks failed.

    See `Ranks.phase`. `error` is its own; `outcomes` describes the error of each rank, None for
    success.
    """
    if error is not None and not isinstance(error, Exception):
        # KeyboardInterrupt and its like keep their meaning for this process; for the other ranks,
        # this rank has failed.
        return error
    failures = _failures_by_rank(error, rank, outcomes)
    first = min(failures)
    # The coordinator's own error, which decides, has no outcome after a decision.
    outcome = outcomes[first] or {}
    name, is_decision = outcome.get("part") or (phase, decision)
    is_decided = is_decision and list(failures) == [0]
    if outcome.get("is_ours") and (is_decided or _are_equal(outcomes)):
        return failures.get(rank, failures[first])
    return RankFailedError(failures, phase=name)


def _failures_by_rank(
    error: BaseException | None, rank: int, outcomes: Sequence[dict[str, Any] | None]
) -> dict[int, BaseException]:
    """Return the errors of all ranks that failed.

    They are this rank's own, and copies of the other ranks' errors.
    """
    failures: dict[int, BaseException] = {}
    for number, outcome in enumerate(outcomes):
        if outcome is not None:
            failures[number] = _rebuild_error(outcome)
    if error is not None:
        failures[rank] = error
    return failures


def note_part(error: BaseException, name: str, decision: bool) -> None:
    """Note the phase's part in which an error was raised.

    Note also whether that was a decision.
    """
    if not hasattr(error, "part_of_phase"):
        error.part_of_phase = name, decision  # type: ignore[attr-defined]


def _are_equal(outcomes: Sequence[dict[str, Any] | None]) -> bool:
    return all(outcome == outcomes[0] for outcome in outcomes)


def describe_error(error: BaseException | None) -> dict[str, Any] | None:
    """Describe an exception in values of JSON; None for None."""
    if error is None:
        return None
    description: dict[str, Any] = {
        "type": type(error).__name__,
        "message": str(error),
        "is_ours": isinstance(error, CheckpointingException),
        "part": getattr(error, "part_of_phase", None),
    }
    if isinstance(error, LoadMismatchError):
        description.update(missing=sorted(error.missing), unexpected=sorted(error.unexpected))
    elif not description["is_ours"] and isinstance(error, OSError) and error.errno is not None:
        description.update(
            errno=error.errno, strerror=error.strerror, filename=str(error.filename or "")
        )
    return description


def _rebuild_error(description: dict[str, Any]) -> BaseException:
    """Make an exception like the one that another rank has described."""
    name = description["type"]
    message = description["message"]
    ours = getattr(errors, name, None)
    if ours is LoadMismatchError:
        return LoadMismatchError(
            message, description.get("missing", ()), description.get("unexpected", ())
        )
    if ours is RankFailedError:
        return RankFailedError({}, message=message)
    if isinstance(ours, type) and issubclass(ours, CheckpointingException):
        return ours(message)
    if "errno" in description:
        return OSError(
            description["errno"], description["strerror"], description["filename"] or None
        )
    if name in _PLAIN_ERRORS:
        return _PLAIN_ERRORS[name](message)
    if not message:
        return CheckpointingException(name)
    return CheckpointingException(f"{name}: {message}")

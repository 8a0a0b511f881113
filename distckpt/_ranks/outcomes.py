"""What ranks tell each other at the end of a phase, as values: the call that each is in, and its
exception.

What another rank sent is never unpickled.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from distckpt._base import errors
from distckpt._base.errors import CheckpointingException, LoadMismatchError, RankFailedError

Call: TypeAlias = dict[str, str]
"""The "call" and "phase" that a rank is in, and its settings by name."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def describe_call(operation: str | None, phase: str, settings: Mapping[str, object]) -> Call:
    """Describe what a rank does in words that are the same on all ranks that do the same."""
    # The location of a background save is left out: nodes may mount one file system in different
    # places.
    call = (operation or "").partition(" to ")[0]
    texts = {name: _ADDRESS.sub("", repr(value)) for name, value in settings.items()}
    return {"call": call, "phase": phase, **texts}


def number_of(call: Call) -> int:
    """Return a number of 56 bits that stands for a call."""
    return int.from_bytes(hashlib.blake2b(json.dumps(call).encode(), digest_size=7).digest(), "big")


def describe_difference(calls: Sequence[Call]) -> str:
    """Return the message about calls, by rank, that are not the same."""
    name = next(
        (name for name in ("call", *calls[0]) if len({call.get(name) for call in calls}) > 1),
        "phase",
    )
    if name == "call":
        return f"All ranks must make the same calls, but {_by_rank(calls, lambda call: f'calls {call[name] or None}')}."
    where = f" in {calls[0]['call']!r}" if calls[0]["call"] else ""
    if name == "phase":
        return f"The ranks are out of step{where}: {_by_rank(calls, lambda call: f'is at {call[name]!r}')}."
    given = _by_rank(calls, lambda call: f"gives {call.get(name):.100}")
    return f"All ranks must give the same {name}{where}, but {given}."


def _by_rank(calls: Sequence[Call], describe: Callable[[Call], str]) -> str:
    first_ranks: dict[str, int] = {}
    for rank, call in enumerate(calls):
        first_ranks.setdefault(describe(call), rank)
    return ", ".join(f"rank {rank} {text}" for text, rank in first_ranks.items())


def error_to_raise(
    error: BaseException | None,
    rank: int,
    outcomes: Sequence[dict[str, Any] | None],
    phase: str,
    decision: bool,
) -> BaseException:
    """Return what this rank raises after a phase in which it or others failed, see `Ranks.phase`.

    `error` is its own, `outcomes` are the descriptions of all.
    """
    if error is not None and not isinstance(error, Exception):
        # KeyboardInterrupt and its like keep their meaning for this process; for the others this
        # rank has failed.
        return error
    failures = {
        number: _rebuild_error(outcome)
        for number, outcome in enumerate(outcomes)
        if outcome is not None
    }
    if error is not None:
        failures[rank] = error
    is_same_everywhere = None not in outcomes and all(
        outcome == outcomes[0] for outcome in outcomes
    )
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
    elif (
        isinstance(error, OSError)
        and error.errno is not None
        and not isinstance(error, CheckpointingException)
    ):
        described.update(
            errno=error.errno, strerror=error.strerror, filename=str(error.filename or "")
        )
    return described


def _rebuild_error(described: dict[str, Any]) -> BaseException:
    """Make an exception of the same kind as another rank has described."""
    name, message = described["type"], described["message"]
    ours = getattr(errors, name, None)
    if ours is LoadMismatchError:
        return LoadMismatchError(
            message, described.get("missing", ()), described.get("unexpected", ())
        )
    if ours is RankFailedError:
        return RankFailedError({}, message=message)
    if isinstance(ours, type) and issubclass(ours, CheckpointingException):
        return ours(message)
    if "errno" in described:
        return OSError(described["errno"], described["strerror"], described["filename"] or None)
    known = getattr(builtins, name, None)
    if known in (
        ValueError,
        TypeError,
        KeyError,
        RuntimeError,
        MemoryError,
        NotImplementedError,
        AssertionError,
    ):
        return known(message)  # type: ignore[no-any-return]
    return CheckpointingException(f"{name}: {message}" if message else name)

"""Phases of several ranks: no phase ends before every rank knows the outcome of all others."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar

import numpy as np

from distckpt._base import interrupts
from distckpt._base.errors import CheckpointingException, RankFailedError
from distckpt._ranks.exchanges import Exchanges, mark_known, num_exchanges
from distckpt._ranks.outcomes import (
    describe_call,
    describe_difference,
    describe_error,
    error_to_raise,
    number_of,
)

logger = logging.getLogger(__name__)

events = logging.getLogger("distckpt.events")
"""The journal: one line of JSON for each phase on each rank. Only handlers that are added to this
logger receive it.
"""
events.propagate = False

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Settings: TypeAlias = Mapping[str, object] | None


@dataclass
class Vote:
    """What a rank says at the end of a phase, a number between -2**62 and 2**62; afterwards, what
    all ranks have said.
    """

    number: int = 0
    largest: int = 0
    are_equal: bool = True


class Ranks(Exchanges):
    """The processes that save or load together, and raise the same errors."""

    @classmethod
    def alone(cls) -> Ranks:
        """Return this process as the only rank, whatever process groups there are."""
        return cls.__new__(cls)

    @classmethod
    def in_background(cls, process_group: Any, timeout: float) -> Ranks:
        """Return the same ranks with a gloo group of their own, for use in another thread.

        Collective operation: all ranks must call it. In the new group they wait up to `timeout`
        seconds for each other.
        """
        ranks = cls(process_group)
        if ranks.size > 1:
            # Making a group waits for all ranks, and does not notice that one of them is dead.
            with ranks.phase("meet to save in the background"):
                pass
            ranks.use_new_group(timeout)
        return ranks

    @contextlib.contextmanager
    def phase(
        self,
        name: str,
        *,
        decision: bool = False,
        same: _Settings = None,
    ) -> Iterator[Vote]:
        """Run the body, then exchange its outcome and vote; no rank leaves before all have reached
        the end.

        The body must not contain an exchange that a failing rank could miss. `name` says in
        messages what the ranks are doing; a `decision` is a body that works on the coordinator on
        behalf of all. A CheckpointingException is raised as it is on every rank if it was the
        coordinator's decision or all ranks failed with the same one; any other failure is a
        RankFailedError on every rank, if there are several. Ranks that are in different calls or
        phases, or have different values for settings that must be the `same`, all raise the same
        CheckpointingException.
        """
        vote = Vote()
        if self.size == 1:
            yield vote
            vote.largest = vote.number
            return
        error: BaseException | None = None
        try:
            yield vote
            if not decision:
                # After a decision, what was done for all (perhaps a commit) must not be reported as
                # a failure.
                interrupts.run_handlers()
        except BaseException as caught:
            error = caught
            self._log(error, name)
        vote.are_equal, vote.largest = self._agree(error, name, decision, same, vote.number)

    def _log(self, error: BaseException, name: str) -> None:
        if not self.is_known_to_all(error):
            logger.error(
                "rank %d failed during %r: %s: %s", self.rank, name, type(error).__name__, error
            )

    def _agree(
        self,
        error: BaseException | None,
        name: str,
        decision: bool = False,
        same: _Settings = None,
        number: int = 0,
    ) -> tuple[bool, int]:
        """Raise on all ranks if one has failed, or they are not doing the same.

        Return whether their numbers are equal, and the largest one.
        """
        if error is not None and (self.is_known_to_all(error) or interrupts.is_forced()):
            # All ranks have raised it together already, in a phase inside this one; or this rank
            # leaves the others.
            raise error
        call = describe_call(interrupts.running_operation(), name, same or {})
        code = number_of(call)
        # Always of the same size, so that ranks in different calls understand each other.
        figures = [error is not None, number, -number, code, -code]
        has_failed, largest, negated_smallest, last, negated_first = self.all_reduce_max(
            figures, name
        )
        if not has_failed and last == -negated_first:
            return largest == -negated_smallest, largest
        told = self.all_gather(json.dumps([call, describe_error(error)]).encode())
        calls, outcomes = zip(*map(json.loads, told), strict=True)
        agreed: BaseException
        if has_failed and len({each["call"] for each in calls}) == 1:
            # A rank that has failed before the first phase does not know its name.
            agreed = error_to_raise(error, self.rank, outcomes, calls[0]["phase"], decision)
        else:
            agreed = CheckpointingException(describe_difference(calls))
        self.raise_together(agreed, error)

    def decide(self, name: str, function: Callable[[], bytes]) -> bytes:
        """Call a function on the coordinator, as a decision (see `phase`); return its result on
        every rank.

        The ranks must be in the same call already: what is exchanged differs from other phases.
        """
        if self.size == 1:
            return function()
        (sent, *_), error = self._attempt(name, lambda: [function()])
        return self._result(self.broadcast(sent, name), name, error)

    def decide_each(self, name: str, function: Callable[[], Sequence[bytes]]) -> bytes:
        """Like `decide`, with a result for each rank."""
        if self.size == 1:
            return function()[0]
        sent, error = self._attempt(name, function)
        return self._result(self.scatter(sent, name), name, error)

    def decide_json(self, name: str, function: Callable[[], Any]) -> Any:
        """Like `decide`, for values that JSON can hold."""
        return json.loads(self.decide(name, lambda: json.dumps(function()).encode()))

    def _attempt(
        self, name: str, function: Callable[[], Sequence[bytes]]
    ) -> tuple[list[bytes], BaseException | None]:
        """Return a message for each rank, with the coordinator's result or error; and the error."""
        if not self.is_coordinator:
            return [b""] * self.size, None
        try:
            return [b"+" + payload for payload in function()], None
        except BaseException as error:
            self._log(error, name)
            if interrupts.is_forced():
                raise
            return [json.dumps(describe_error(error)).encode()] * self.size, error

    def _result(self, message: bytes, name: str, error: BaseException | None) -> bytes:
        """Return the result in a message of `_attempt`, or raise its error."""
        if message[:1] == b"+":
            return message[1:]
        outcomes = [json.loads(message), *[None] * (self.size - 1)]
        self.raise_together(error_to_raise(error, self.rank, outcomes, name, True), error)

    def all_equal(self, number: int) -> bool:
        """Tell whether every rank gave the same number, between -2**62 and 2**62."""
        return self.size == 1 or self._agree(None, "compare a number", number=number)[0]

    def raise_together(self, agreed: BaseException, error: BaseException | None) -> NoReturn:
        """Raise an error that all ranks raise, instead of one that they have raised together.

        Collective operation: all ranks must call it.
        """
        if self.size == 1:
            raise agreed from error
        if mark_known(agreed, self._group) is error:
            raise agreed
        raise agreed from error


def _given_group(*args: Any, process_group: Any = None, **kwargs: Any) -> Any:
    return process_group


def collective(
    group_of: Callable[..., Any] = _given_group,
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Make a function an operation that all ranks call, see `interrupts.operation`.

    The first exchange of each must be the end of a phase. If a rank fails before it, because of a
    misspelled argument or a signal, the others are told there instead of waiting for it.

    Args:
        group_of: called with the arguments; returns the caller's process group.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @functools.wraps(function)
        def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            process_group = group_of(*args, **kwargs)
            num_before = num_exchanges(process_group)
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                if num_exchanges(process_group) == num_before:
                    _tell_others(process_group, error)
                raise

        return interrupts.operation(call)

    return decorate


def _tell_others(process_group: Any, error: BaseException) -> None:
    """Raise an error on all ranks, which come to their first exchange; return if it can be raised
    as it is.
    """
    try:
        ranks = Ranks(process_group)
    except CheckpointingException:
        # It is about the group itself.
        return
    if ranks.size == 1:
        return
    try:
        with ranks.phase("check the arguments"):
            raise error
    except RankFailedError as agreed:
        told = {(type(failure), str(failure)) for failure in agreed.failures.values()}
        if len(agreed.failures) < ranks.size or len(told) > 1:
            raise
    mark_known(error, ranks._group)


class PhaseTimer:
    """Measures the phases of one call on this rank, and logs each to `events`."""

    def __init__(self, verb: str, rank: int, location: str) -> None:
        self._started = time.perf_counter()
        self._verb, self._rank, self.location = verb, rank, location
        self.phases: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        """Add the time that the body takes to a phase; yield further fields of its event, which the
        body may add to.
        """
        start, started = time.time(), time.perf_counter()
        details: dict[str, Any] = {}
        try:
            yield details
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - started
        except BaseException as error:
            details["error"] = type(error).__name__
            raise
        finally:
            if events.handlers and events.isEnabledFor(logging.INFO):
                event = {
                    "verb": self._verb,
                    "phase": name,
                    "rank": self._rank,
                    "checkpoint": self.location,
                    "start": start,
                    "seconds": time.perf_counter() - started,
                    "thread": threading.current_thread().name,
                    **details,
                }
                events.info("%s", json.dumps(event))

    @property
    def seconds(self) -> float:
        """Return how long the call has taken so far."""
        return time.perf_counter() - self._started

    def summarize(
        self, ranks: Ranks, num_bytes: int, moving: str
    ) -> tuple[int, float, dict[str, float], int, int]:
        """Return the fields of a report that follow the location, from the figures of all ranks.

        Collective operation: all ranks must call it. The slowest rank is the one that took longest
        in the phase `moving`.
        """
        seconds = self.seconds
        if ranks.size == 1:
            return num_bytes, seconds, self.phases, 0, 1
        own = np.array([num_bytes, seconds, *self.phases.values()])
        figures = np.stack([np.frombuffer(data) for data in ranks.all_gather(own.tobytes())])
        longest = dict(zip(self.phases, figures[:, 2:].max(axis=0).tolist(), strict=True))
        slowest = int(figures[:, 2 + list(self.phases).index(moving)].argmax())
        return int(figures[:, 0].sum()), float(figures[:, 1].max()), longest, slowest, ranks.size

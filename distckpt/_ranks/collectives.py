"""Phases of several ranks, which end with all outcomes known to all."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar

import numpy as np

from distckpt._base import interrupts
from distckpt._base.errors import CheckpointingException, RankFailedError
from distckpt._base.options import sealed
from distckpt._ranks.exchanges import Exchanges
from distckpt._ranks.groups import mark_known, num_exchanges
from distckpt._ranks.outcomes import (
    Call,
    describe_call,
    describe_difference,
    describe_error,
    digest_of,
    error_to_raise,
    note_part,
)

logger = logging.getLogger(__name__)

events = logging.getLogger("distckpt.events")
"""Journal with one line of JSON for each phase on each rank. Only handlers added to this logger
receive it.
"""
events.propagate = False

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Settings: TypeAlias = Mapping[str, object] | None

Figures: TypeAlias = tuple[int, float, dict[str, float], int, int]
"""Figures of a report. They are bytes and seconds, seconds by phase, the slowest rank and the
number of ranks.
"""


_TWO_NUMBERS = struct.Struct("<qq")


@dataclass
class Vote:
    """A rank's number at a phase's end, then the result of all.

    The number lies between -2**62 and 2**62.
    """

    number: int = 0
    largest: int = 0
    are_equal: bool = True


@dataclass
class Told:
    """A phase's messages to the coordinator, and its answer.

    See `Ranks.telling`.

    Attributes:
        call: call and phase of this rank.
        payload: payload of this rank.
        payloads: payloads of all ranks, on the coordinator.
        answer: answer of the coordinator, on every rank.
        is_decision: whether the body works on the coordinator on behalf of all.
        has_answer_each: whether ranks get different answers.
    """

    call: Call
    payload: bytes = b""
    payloads: Sequence[bytes] = ()
    answer: bytes = b""
    is_decision: bool = False
    has_answer_each: bool = False


_FINE = b"+"
"""First byte of a message with a result."""
_FAILED = b"-"
"""First byte of a message with an error."""
_EXPLAIN = b"?"
"""Message of the coordinator alone: every rank describes its call and the failure of it."""


class Ranks(Exchanges):
    """The processes that save or load together, and raise the same errors."""

    @classmethod
    def alone(cls) -> Ranks:
        """Return this process as the only rank, whatever process groups there are."""
        return cls.__new__(cls)

    @classmethod
    def in_background(cls, process_group: Any, timeout: float) -> Ranks:
        """Return the same ranks with a gloo group of their own.

        It is for use in another thread.

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
        """Run the body, then exchange its outcome and vote.

        No rank leaves before all have reached the end. The body must not contain an exchange that a
        failing rank could miss. `name` names the phase in messages; a `decision` is a body that
        works on the coordinator on behalf of all. A CheckpointingException is raised as it is on
        every rank if it was the coordinator's decision or all ranks failed with the same one; any
        other failure is a RankFailedError on every rank, if there are several. Ranks that are in
        different calls or phases, or have different values for settings that must be the `same`,
        all raise the same CheckpointingException.
        """
        vote = Vote()
        if self.size == 1:
            yield vote
            vote.largest = vote.number
            return
        with self.telling(name, decision=decision, same=same) as told:
            yield vote
            told.payload = vote.number.to_bytes(8, "little", signed=True)
        with self.answering(told, name):
            numbers = np.frombuffer(b"".join(told.payloads), np.int64)
            if len(numbers):
                told.answer = _TWO_NUMBERS.pack(numbers.min(), numbers.max())
        smallest, vote.largest = _TWO_NUMBERS.unpack(told.answer)
        vote.are_equal = smallest == vote.largest

    @contextlib.contextmanager
    def telling(
        self,
        name: str,
        *,
        decision: bool = False,
        same: _Settings = None,
        answer_each: bool = False,
    ) -> Iterator[Told]:
        """Run the body, then send the coordinator its outcome and a payload.

        This is the first half of a phase, see there. The second half, `answering`, must follow at
        once, or `decide_each` if `answer_each` is given. Where this rank or, on the coordinator,
        another one has failed, all raise it here or there.
        """
        if self.size == 1:
            told = Told({})
            yield told
            told.payloads = [told.payload]
            return
        call = describe_call(interrupts.running_operation(), name, same or {})
        told = Told(call, is_decision=decision, has_answer_each=answer_each)
        error: BaseException | None = None
        try:
            yield told
            if not decision:
                # After a decision, its effect for all (perhaps a commit) must not be reported as a
                # failure.
                interrupts.run_handlers()
        except BaseException as caught:
            error = caught
            self._log(error, name)
            if self.is_known_to_all(error) or interrupts.is_forced():
                # All ranks have raised it together already, in a phase inside this one; or this
                # rank leaves the other ranks.
                raise
        self._tell(told, error, name)

    def _tell(self, told: Told, error: BaseException | None, name: str) -> None:
        """Send the coordinator a body's outcome and payload; raise known errors."""
        code = digest_of(told.call)
        start = (_FAILED if error else _FINE) + code
        messages = self.gather(start + told.payload, name)
        told.payloads = [message[len(start) :] for message in messages]
        is_fine = error is None and all(message.startswith(_FINE + code) for message in messages)
        if not is_fine:
            if told.has_answer_each:
                self.scatter([_EXPLAIN] * self.size, name)
            else:
                self.broadcast(_EXPLAIN, name)
            self._raise_together_what_failed(told, error)

    @contextlib.contextmanager
    def answering(self, told: Told, name: str) -> Iterator[None]:
        """Run the body on the coordinator, which sets the answer for all.

        This is the second half of a phase. Its errors are raised as in a `decision`;
        elsewhere it must do nothing.
        """
        error: BaseException | None = None
        if self.size == 1:
            yield
            return
        try:
            yield
        except BaseException as caught:
            error = caught
            message = self._message_of(error, name)
        else:
            message = _FINE + told.answer
        told.answer = self._result(self.broadcast(message, name), name, error, told)

    @staticmethod
    @contextlib.contextmanager
    def part(name: str, *, decision: bool = False) -> Iterator[None]:
        """Run a part of a phase's body, which names it in errors.

        They are raised as if the part was a phase.
        """
        try:
            yield
        except BaseException as error:
            note_part(error, name, decision)
            raise

    def _raise_together_what_failed(self, told: Told, error: BaseException | None) -> NoReturn:
        """Raise one rank's failure on all ranks, or their difference.

        They may be in different calls.
        """
        sent = self.all_gather(json.dumps([told.call, describe_error(error)]).encode())
        calls, outcomes = zip(*map(json.loads, sent), strict=True)
        agreed: BaseException
        if any(outcomes) and len({call["call"] for call in calls}) == 1:
            # A rank that has failed before the first phase does not know its name.
            agreed = error_to_raise(error, self.rank, outcomes, calls[0]["phase"], told.is_decision)
        else:
            agreed = CheckpointingException(describe_difference(calls))
        self.raise_together(agreed, error)

    def _log(self, error: BaseException, name: str) -> None:
        if not self.is_known_to_all(error):
            logger.error(
                "rank %d failed during %r: %s: %s", self.rank, name, type(error).__name__, error
            )

    def decide(self, name: str, function: Callable[[], bytes]) -> bytes:
        """Return the result of a function on the coordinator to every rank.

        It is a decision, see `phase`. The ranks must be in the same call already: the messages
        differ from other phases.
        """
        told = Told({})
        with self.answering(told, name):
            if self.is_coordinator:
                told.answer = function()
        return told.answer

    def decide_each(
        self, name: str, function: Callable[[], Sequence[bytes]], told: Told | None = None
    ) -> bytes:
        """Like `decide`, with a result for each rank.

        With `told`, this is the second half of a phase whose ranks get different answers.
        """
        if self.size == 1:
            return function()[0]
        sent = [b""] * self.size
        error: BaseException | None = None
        if self.is_coordinator:
            try:
                sent = [_FINE + payload for payload in function()]
            except BaseException as caught:
                error = caught
                sent = [self._message_of(error, name)] * self.size
        return self._result(self.scatter(sent, name), name, error, told)

    def decide_json(self, name: str, function: Callable[[], Any]) -> Any:
        """Like `decide`, for values that JSON can hold."""
        return json.loads(self.decide(name, lambda: json.dumps(function()).encode()))

    def _message_of(self, error: BaseException, name: str) -> bytes:
        """Return the coordinator's message about its error.

        Raise the error if it leaves the other ranks.
        """
        self._log(error, name)
        if interrupts.is_forced():
            raise error
        return json.dumps(describe_error(error)).encode()

    def _result(
        self, message: bytes, name: str, error: BaseException | None, told: Told | None = None
    ) -> bytes:
        """Return the result in a coordinator's message, or raise its error.

        In the second half of a phase, a failure of its first half comes in its place.
        """
        if message[:1] == _FINE:
            return message[1:]
        if told is not None and message == _EXPLAIN:
            self._raise_together_what_failed(told, None)
        outcomes = [json.loads(message), *[None] * (self.size - 1)]
        self.raise_together(error_to_raise(error, self.rank, outcomes, name, True), error)

    def all_equal(self, number: int) -> bool:
        """Return whether every rank has the same number.

        Numbers lie between -2**62 and 2**62.
        """
        with self.phase("compare a number") as vote:
            vote.number = number
        return vote.are_equal

    def raise_together(self, agreed: BaseException, error: BaseException | None) -> NoReturn:
        """Raise an agreed error on all ranks instead of an earlier one.

        They have raised the earlier one together. Collective operation: all ranks must call it.
        """
        if self.size == 1:
            raise agreed from error
        if mark_known(agreed, self.group) is error:
            raise agreed
        raise agreed from error


def _given_group(*args: Any, process_group: Any = None, **kwargs: Any) -> Any:
    return process_group


def collective(
    group_of: Callable[..., Any] = _given_group,
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Make a function an operation that all ranks call.

    See `interrupts.operation`. The first exchange of each must be the end of a phase. If a rank
    fails before it, because of a misspelled argument or a signal, the other ranks hear of it there
    instead of waiting.

    Args:
        group_of: called with the arguments; returns the caller's process group.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @functools.wraps(function)
        def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            process_group = group_of(*args, **kwargs)
            num_before = None
            try:
                num_before = num_exchanges(process_group)
                return function(*args, **kwargs)
            except BaseException as error:
                # None: a signal came before there was a number.
                if num_before in (None, num_exchanges(process_group)):
                    _tell_others(process_group, error)
                raise

        return interrupts.operation(call)

    return decorate


def _tell_others(process_group: Any, error: BaseException) -> None:
    """Raise an error on all ranks, at their first exchange.

    Return if it can be raised as it is.
    """
    try:
        ranks = Ranks(process_group)
    except CheckpointingException:
        # The error is about the group itself.
        return
    if ranks.size == 1:
        return
    try:
        with ranks.phase("check the arguments"):
            raise error
    except RankFailedError as agreed:
        texts = {(type(failure), str(failure)) for failure in agreed.failures.values()}
        if len(agreed.failures) < ranks.size or len(texts) > 1:
            raise
    mark_known(error, ranks.group)


class PhaseTimer:
    """Timer of the phases of one call on this rank.

    It logs each phase to `events`.
    """

    def __init__(self, verb: str, rank: int, location: str) -> None:
        self._started = time.perf_counter()
        self._verb = verb
        self._rank = rank
        self.location = location
        self.phases: dict[str, float] = {}
        self._running: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        """Add the body's duration to a phase.

        Yield further fields of its event, which the body may add to.
        """
        start = time.time()
        started = time.perf_counter()
        details: dict[str, Any] = {}
        self._running[name] = started
        try:
            yield details
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - started
        except BaseException as error:
            details["error"] = type(error).__name__
            raise
        finally:
            del self._running[name]
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
                events.info("%s", sealed(event))

    @property
    def seconds(self) -> float:
        """Return the duration of the call so far."""
        return time.perf_counter() - self._started

    def figures(self, num_bytes: int) -> bytes:
        """Return this rank's figures for a report.

        The phase that is running counts.
        """
        phases = {**self.phases, **self._seconds_of_running()}
        return np.array([num_bytes, self.seconds, *phases.values()]).tobytes()

    def united(self, figures: Sequence[bytes], moving: str) -> Figures:
        """Return the fields of a report from the `figures` of all ranks.

        They follow the location. The slowest rank is the one that took longest in the phase
        `moving`. Running phases are taken from this rank.
        """
        table = np.stack([np.frombuffer(row) for row in figures])
        longest = dict(zip(self.phases, table[:, 2:].max(axis=0).tolist(), strict=True))
        slowest = int(table[:, 2 + list(self.phases).index(moving)].argmax())
        running = self._seconds_of_running()
        seconds = max(float(table[:, 1].max()) + sum(running.values()), self.seconds)
        return int(table[:, 0].sum()), seconds, {**longest, **running}, slowest, len(table)

    def _seconds_of_running(self) -> dict[str, float]:
        now = time.perf_counter()
        return {name: now - started for name, started in self._running.items()}

"""Phases of several ranks: no phase ends before every rank has the outcome of every other one."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from distckpt._base import interrupts
from distckpt._base.errors import CheckpointingException
from distckpt._ranks.exchanges import Exchanges, mark_known
from distckpt._ranks.outcomes import (
    describe_call,
    describe_difference,
    describe_error,
    error_to_raise,
    number_of,
)

logger = logging.getLogger(__name__)

_Settings: TypeAlias = Mapping[str, object] | None


@dataclass
class Vote:
    """What each rank says at the end of a phase: a number below 2**62 in size. Then: what all ranks
    have said.
    """

    number: int = 0
    largest: int = 0
    are_equal: bool = True


class Ranks(Exchanges):
    """The processes that save or load together, and raise the same errors."""

    @classmethod
    def alone(cls) -> Ranks:
        """Return this process as one rank of one, whatever process groups there are."""
        ranks = cls.__new__(cls)
        ranks._group, ranks.rank, ranks.size = None, 0, 1
        return ranks

    @classmethod
    def in_background(cls, process_group: Any, timeout: float) -> Ranks:
        """Return the same ranks with a gloo group of their own, for use in another thread.

        Collective operation: all ranks must call it. In the new group they wait `timeout` seconds
        for each other.
        """
        ranks = cls(process_group)
        if ranks.size > 1:
            # Making a group waits for all, and does not notice that one of them is dead.
            with ranks.phase("meet to save in the background"):
                pass
            ranks.use_new_group(timeout)
        return ranks

    @contextlib.contextmanager
    def phase(self, name: str, *, decision: bool = False, same: _Settings = None) -> Iterator[Vote]:
        """Run the body, then exchange its outcome and vote; no rank leaves before all have reached
        the end.

        The body holds no exchange that a failing rank could miss. `name` says in messages what the
        ranks are doing; a `decision` is a body that works on the coordinator on behalf of all. A
        CheckpointingException is raised as it is on every rank when it was the coordinator's
        decision or all ranks failed with the same; any other failure is a RankFailedError on every
        rank, when there are several. Ranks that are in different calls or phases, or have different
        values for settings that must be the `same`, all raise the same CheckpointingException.
        """
        error: BaseException | None = None
        vote = Vote()
        try:
            yield vote
            if not decision:
                # What was done for all, a commit perhaps, must not be reported as a failure.
                interrupts.run_handlers()
        except BaseException as caught:
            error = caught
            self._log(error, name)
        vote.are_equal, vote.largest = self._agree(error, name, decision, same, vote.number)

    def _log(self, error: BaseException, name: str) -> None:
        if self.size > 1 and not self.is_known_to_all(error):
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
        """Raise on all ranks when one has failed, or they do not do the same.

        Return whether their numbers are equal, and the largest one.

        What is exchanged always has the same size, so that ranks in different calls understand each
        other.
        """
        # An error that all ranks have raised together already, in a phase inside this one, is not
        # exchanged again.
        if self.size == 1 or (
            error is not None and (self.is_known_to_all(error) or interrupts.is_forced())
        ):
            if error is not None:
                raise error
            return True, number
        call = describe_call(interrupts.running_operation(), name, same or {})
        code = number_of(call)
        figures = [error is not None, number, -number, code, -code]
        has_failed, largest, negated_smallest, last, negated_first = self.all_reduce_max(
            figures, name
        )
        if not has_failed and last == -negated_first:
            return largest == -negated_smallest, largest
        told = self.all_gather(json.dumps([call, describe_error(error)]).encode())
        calls, outcomes = zip(*map(json.loads, told), strict=True)
        agreed: BaseException = CheckpointingException(describe_difference(calls))
        if has_failed and len({each["call"] for each in calls}) == 1:
            agreed = error_to_raise(error, self.rank, outcomes, name, decision)
        self._raise_together(agreed, error)

    def decide(self, name: str, function: Callable[[], bytes]) -> bytes:
        """Call a function on the coordinator, as a decision (see `phase`); return its result on
        every rank.

        The ranks must be in the same call already: what is exchanged differs from other phases.
        """
        return self._decide(name, lambda: [function()], lambda sent: self.broadcast(sent[0], name))

    def decide_each(self, name: str, function: Callable[[], Sequence[bytes]]) -> bytes:
        """Do as `decide` does, with a result for each rank."""
        return self._decide(name, function, lambda sent: self.scatter(sent, name))

    def _decide(
        self,
        name: str,
        function: Callable[[], Sequence[bytes]],
        send: Callable[[Sequence[bytes]], bytes],
    ) -> bytes:
        error: BaseException | None = None
        sent = [b""] * self.size
        if self.is_coordinator:
            try:
                sent = [b"+" + payload for payload in function()]
            except BaseException as caught:
                error = caught
                self._log(error, name)
                if self.size == 1 or interrupts.is_forced():
                    raise
                sent = [json.dumps(describe_error(error)).encode()] * self.size
        received = send(sent)
        if received[:1] == b"+":
            return received[1:]
        outcomes = [json.loads(received), *[None] * (self.size - 1)]
        self._raise_together(error_to_raise(error, self.rank, outcomes, name, True), error)

    def decide_json(self, name: str, function: Callable[[], Any]) -> Any:
        """Do as `decide` does, for what JSON can hold."""
        return json.loads(self.decide(name, lambda: json.dumps(function()).encode()))

    def all_equal(self, number: int) -> bool:
        """Return True when every rank gave the same number, which must be below 2**62 in size."""
        return self._agree(None, "compare a number", number=number)[0]

    def _raise_together(self, agreed: BaseException, error: BaseException | None) -> NoReturn:
        if mark_known(agreed, self._group) is error:
            raise agreed
        raise agreed from error

"""Counting the exchanges that each rank of a process group has reached, so that errors can name a
lost rank.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from typing import Any, TypeVar

from distckpt._base.errors import RankFailedError

LATE_SECONDS = 2.0
"""How late a rank may reach an exchange that another one has found broken without being called
absent.
"""

STORE_SECONDS = 5.0
"""How long a store may take to answer: its host may be stopped, or cut off."""

ABANDONED = "This save was abandoned: the process ends, or a rank is lost."


_Answer = TypeVar("_Answer")


class NoAnswerError(RuntimeError):
    """A store does not answer; further requests would wait for the answer to this one."""


def answer_of(request: Callable[[], _Answer], seconds: float) -> _Answer:
    """Return what a store answers to a request.

    torch waits without end for a store whose host is stopped or cut off, so another thread does it.

    Raises:
        NoAnswerError: it does not answer within some seconds.
        RuntimeError: it has lost its host.
    """
    answer: Future[_Answer] = Future()

    def ask() -> None:
        try:
            answer.set_result(request())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="distckpt-store", daemon=True).start()
    try:
        return answer.result(seconds)
    except NotDone:
        raise NoAnswerError(f"the store has not answered within {seconds:g} s") from None


def lost_contact(failures: Mapping[int, BaseException], message: str) -> RankFailedError:
    """Return an error after which the ranks are out of step."""
    lost = RankFailedError(failures, message)
    lost.is_lost_contact = True
    return lost


class AttendanceLog:
    """The number of exchanges that each rank has reached, kept in the store through which the ranks
    found each other.

    A count is sent without waiting for an answer, which takes some microseconds. A store that is
    gone, perhaps because the process that held it is dead, raises no error: then absent ranks are
    unknown, as they are without a store.

    Attributes:
        num_exchanges: that this rank has reached.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._names = [str(other) for other in range(size)]
        self.num_exchanges = 0
        self._call = ""
        self._is_silent = False

    def record(self, call: str | None = None) -> None:
        """Record that this rank has reached the next exchange, in a call; all ranks reach them in
        the same order.
        """
        self.num_exchanges += 1
        self._call = call or self._call
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(str(self._rank), f"{self.num_exchanges} {self._call}")

    def absent_ranks(self) -> list[int]:
        """Return the ranks that have reached fewer exchanges than others, after one has just failed
        here.

        A broken connection shows at once, so ranks that are only late get some time.
        """
        # A rank that finds the exchange broken leaves it, and counts once more. So ranks that died
        # during it are behind.
        self.record()
        deadline = time.monotonic() + LATE_SECONDS
        while True:
            counts = self._counts()
            fewest = min(counts, default=0)
            absent = [
                rank for rank, count in enumerate(counts) if count == fewest < self.num_exchanges
            ]
            if not absent or time.monotonic() > deadline:
                return absent
            time.sleep(0.02)

    def lost_contact(self, name: str, error: RuntimeError) -> RankFailedError:
        """Return the error for an exchange that has just failed here; it names the ranks that did
        not reach it.
        """
        absent = self.absent_ranks()
        who = ", ".join(f"rank {rank}" for rank in absent) or "another rank"
        if self._is_silent:
            who = "the host of the process group's store, usually rank 0,"
        return lost_contact(
            {rank: TimeoutError("did not respond, or died") for rank in absent},
            f"Lost contact with {who} during {name!r}: it died or did not respond within the "
            "process group's timeout. Look for the first error in the other ranks' "
            f"logs{self.different_calls()}; all ranks must make each call, not rank 0 alone. "
            f"({error})",
        )

    def wait_for_all(self) -> None:
        """Wait until all ranks have reached their first exchange, with the timeout of the store."""
        if self._store is not None:
            self._store.wait(self._names)

    def late_ranks(self) -> list[int]:
        """Return the ranks that have reached fewer exchanges than this one."""
        return [rank for rank, count in enumerate(self._counts()) if count < self.num_exchanges]

    def describe_wait(self, name: str) -> str:
        """Return in words which ranks this one waits for in an exchange."""
        late = ", ".join(map(str, self.late_ranks()))
        who = f"rank{'s' if ',' in late else ''} {late}" if late else "others"
        return f"still waiting for {who} in {name!r}{self.different_calls()}"

    def different_calls(self) -> str:
        """Return in words that the ranks which have come this far are in different calls; empty if
        they are not.
        """
        first_ranks: dict[str, int] = {}
        for rank, (count, call) in enumerate(self._records()):
            if count >= self.num_exchanges:
                first_ranks.setdefault(call, rank)
        calls = ", ".join(f"rank {rank} calls {call}" for call, rank in first_ranks.items())
        return f"; all ranks must make the same calls, but {calls}" if len(first_ranks) > 1 else ""

    def _counts(self) -> list[int]:
        return [count for count, _ in self._records()]

    def _records(self) -> list[tuple[int, str]]:
        store = self._store
        # A store that does not answer, or holds other values, leaves all ranks unknown.
        with contextlib.suppress(RuntimeError, ValueError):
            if store is not None:
                values = self._asked(lambda: _values(store, self._names))
                texts = [value.decode() for value in values]
                return [(int(text.split(" ")[0]), text.partition(" ")[2]) for text in texts]
        return []

    def _asked(self, request: Callable[[], _Answer]) -> _Answer:
        try:
            return answer_of(request, STORE_SECONDS)
        except NoAnswerError:
            self._store, self._is_silent = None, True
            raise


def _values(store: Any, names: Sequence[str]) -> list[bytes]:
    """Return what a store has under names, of ranks that may not have come yet.

    It would wait for those, so they are looked for first, half by half: two requests if all are
    there.
    """
    if store.check(names):
        return list(store.multi_get(names))
    if len(names) == 1:
        return [b"0 "]
    middle = len(names) // 2
    return _values(store, names[:middle]) + _values(store, names[middle:])

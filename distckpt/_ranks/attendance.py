"""Counts of the exchanges that ranks have reached, to name lost ranks."""

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
"""Seconds by which a rank may be late at a broken exchange. After that it is called absent."""

STORE_SECONDS = 5.0
"""Seconds a store may take to answer: its host may be stopped, or cut off."""

ABANDONED = "This save was abandoned: the process ends, or a rank is lost."


_Answer = TypeVar("_Answer")


class NoAnswerError(RuntimeError):
    """A store that does not answer.

    Further requests would wait for the answer to this one.
    """


def answer_of(request: Callable[[], _Answer], seconds: float) -> _Answer:
    """Return the answer of a store to a request.

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
    """The number of exchanges that each rank has reached.

    It is kept in the store through which the ranks met.

    A count is sent without waiting for an answer, which takes some microseconds. A store that is
    lost, perhaps because its process is dead, raises no error: then absent ranks are unknown, as
    they are without a store.

    Attributes:
        num_exchanges: number of exchanges that this rank has reached.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._names = [str(other) for other in range(size)]
        self.num_exchanges = 0
        self._call = ""
        self._is_silent = False

    def record(self, call: str | None = None) -> None:
        """Record that this rank has reached the next exchange, in a call.

        All ranks reach them in the same order.
        """
        self.num_exchanges += 1
        self._call = call or self._call
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(str(self._rank), f"{self.num_exchanges} {self._call}")

    def absent_ranks(self) -> list[int]:
        """Return the ranks that have reached fewer exchanges than other ranks.

        It is called after an exchange has failed here. A broken connection shows at once, so ranks
        that are only late get some time.
        """
        # A rank that finds the exchange broken leaves it, and counts once more. So ranks that died
        # during it are behind.
        self.record()
        deadline = time.monotonic() + LATE_SECONDS
        while True:
            counts = self._counts()
            fewest = min(counts, default=0)
            absent: list[int] = []
            if fewest < self.num_exchanges:
                absent = [rank for rank, count in enumerate(counts) if count == fewest]
            if not absent or time.monotonic() > deadline:
                return absent
            time.sleep(0.02)

    def lost_contact(self, name: str, error: RuntimeError) -> RankFailedError:
        """Return the error for an exchange that has just failed here.

        It names the ranks that did not reach it.
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
        """Wait until all ranks have reached their first exchange.

        The store has a timeout.
        """
        if self._store is not None:
            self._store.wait(self._names)

    def late_ranks(self) -> list[int]:
        """Return the ranks that have reached fewer exchanges than this one."""
        return [rank for rank, count in enumerate(self._counts()) if count < self.num_exchanges]

    def describe_wait(self, name: str) -> str:
        """Describe the ranks that this one waits for in an exchange."""
        late = ", ".join(map(str, self.late_ranks()))
        who = "others"
        if late:
            who = f"rank{'s' if ',' in late else ''} {late}"
        return f"still waiting for {who} in {name!r}{self.different_calls()}"

    def different_calls(self) -> str:
        """Describe the different calls of the ranks that came this far.

        The text is empty if the calls are the same.
        """
        first_ranks: dict[str, int] = {}
        for rank, (count, call) in enumerate(self._records()):
            if count >= self.num_exchanges:
                first_ranks.setdefault(call, rank)
        if len(first_ranks) < 2:
            return ""
        calls = ", ".join(f"rank {rank} calls {call}" for call, rank in first_ranks.items())
        return f"; all ranks must make the same calls, but {calls}"

    def _counts(self) -> list[int]:
        return [count for count, _ in self._records()]

    def _records(self) -> list[tuple[int, str]]:
        store = self._store
        # A store that does not answer, or holds other values, leaves all ranks unknown.
        with contextlib.suppress(RuntimeError, ValueError):
            if store is not None:
                values = self._asked(lambda: _values(store, self._names))
                records = []
                for value in values:
                    count, _, call = value.decode().partition(" ")
                    records.append((int(count), call))
                return records
        return []

    def _asked(self, request: Callable[[], _Answer]) -> _Answer:
        try:
            return answer_of(request, STORE_SECONDS)
        except NoAnswerError:
            self._store = None
            self._is_silent = True
            raise


def _values(store: Any, names: Sequence[str]) -> list[bytes]:
    """Return a store's values under names of ranks.

    The ranks may not have come yet. The store would wait for them, so they are looked for first,
    half by half: two requests if all are there.
    """
    if store.check(names):
        return list(store.multi_get(names))
    if len(names) == 1:
        return [b"0 "]
    middle = len(names) // 2
    return _values(store, names[:middle]) + _values(store, names[middle:])

"""Who takes part in each version that moves between jobs which know only an address.

The leader, rank 0 of the job that gives, hosts a store. All others ask there to take part. For each
version the leader calls those that have asked, and lets those begin that answer: who asked and died
since then is found here, and not in the middle of the move.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import logging
import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from distckpt._base.errors import CheckpointingException
from distckpt._base.messages import first_line
from distckpt._ranks.attendance import answer_of, lost_contact

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""How long a member that waits for its call may take to answer it, and one with which contact was
lost to come back.
"""
_POLL_SECONDS = 0.005
_MAX_POLL_SECONDS = 0.04
_SOURCE, _TARGET = "source rank", "target"


_HOST = "distckpt"
"""Key of the number and the release of a leader."""


def name_host(store: Any) -> int:
    """Say in a store that a leader hosts it, and return a number for it."""
    number = secrets.randbits(61)
    store.set(_HOST, json.dumps([number, _release()]))
    return number


def check_host(store: Any, address: str, timeout: float) -> int:
    """Return the number of the leader that hosts a store.

    Raises:
        CheckpointingException: none does, or it is of another release, which may plan otherwise.
        RankFailedError: it is gone.
    """
    try:
        with _reaching_leader(AbsentKeyError):
            found = answer_of(lambda: _found(store, _HOST, timeout), timeout + ANSWER_SECONDS)
    except AbsentKeyError as error:
        raise CheckpointingException(
            f"What answers at {address} is not the trainer of a Route ({first_line(error)}): give "
            "the Route a port that no other program uses, such as torchrun."
        ) from error
    number, release = json.loads(found)
    if release != _release():
        raise CheckpointingException(
            f"The trainer at {address} has distckpt {release}, and this process {_release()}: "
            "install the same release on both sides."
        )
    return int(number)


class AbsentKeyError(RuntimeError):
    """A store has not got a key in time."""


def _release() -> str:
    release: str = importlib.import_module("distckpt").__version__
    return release


def _found(store: Any, key: str, seconds: float) -> bytes:
    """Wait for a key."""
    deadline, step = time.monotonic() + seconds, _POLL_SECONDS
    # Not by `wait` of the store: torch prints a warning whenever that ends without the key.
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise AbsentKeyError(f"no {key!r} within {seconds:g} s")
        time.sleep(step)
        step = min(2 * step, _MAX_POLL_SECONDS)
    value: bytes = store.get(key)
    return value


class Start(NamedTuple):
    """The members of a move, by rank: those that give come first, the leader before all.

    `number` tells groups of members apart; a group stays as long as its members do.
    """

    number: int
    names: list[str]
    version: int


class Member:
    """One that asks to take part: a target, or a rank that gives other than the leader."""

    def __init__(self, store: Any, kind: str, number: int, timeout: float) -> None:
        # The leader may come late, and wait for others then.
        self._store, self._timeout = store, timeout
        self._limit = 2 * (timeout + ANSWER_SECONDS)
        self.name = f"{kind} {number}"
        self._num_asked = 0

    @classmethod
    def target(cls, store: Any, timeout: float) -> Member:
        """Join as the next target."""
        with _reaching_leader():
            number = answer_of(lambda: store.add("targets", 1), timeout)
        return cls(store, _TARGET, number, timeout)

    def leave(self) -> None:
        """Say that this member takes part no more, so that nobody waits for it."""
        with contextlib.suppress(RuntimeError):
            answer_of(lambda: self._store.set(f"left {self.name}", ""), ANSWER_SECONDS)

    @classmethod
    def source(cls, store: Any, rank: int, timeout: float) -> Member:
        """Join as a rank of the job that gives."""
        return cls(store, _SOURCE, rank, timeout)

    def wait_for_start(self, version: int | None) -> Start:
        """Ask to take part in a version, None for whichever is next, and wait for its start.

        Raises:
            CheckpointingException: the leader moves another version.
            RankFailedError: the leader does not call within the timeout, or is gone.
        """
        while True:
            self._num_asked += 1
            asked = f"{self.name} {self._num_asked}"
            with _reaching_leader():
                self._tell(f"ask {asked}", json.dumps(version))
                called = json.loads(self._wait(f"call {asked}"))
                if "refused" in called:
                    raise CheckpointingException(called["refused"])
                self._tell(f"here {called['round']} {self.name}", "")
                start = Start(*json.loads(self._wait(f"start {called['round']}")))
            if self.name in start.names:
                return start

    def _tell(self, key: str, value: str) -> None:
        answer_of(lambda: self._store.set(key, value), self._timeout)

    def _wait(self, key: str) -> bytes:
        limit = self._limit
        return answer_of(lambda: _found(self._store, key, limit), limit + ANSWER_SECONDS)


@contextlib.contextmanager
def _reaching_leader(*passed: type[RuntimeError]) -> Iterator[None]:
    """Turn the errors of a store, other than those that are `passed`, into one about the leader."""
    try:
        yield
    except passed:
        raise
    except RuntimeError as error:
        raise lost_contact(
            {0: TimeoutError("did not respond, or died")},
            f"Lost contact with {_SOURCE} 0, which hosts the address: it ended or died, or has "
            "moved no version within the timeout. Make a new Route to take versions of one that "
            f"starts again there. ({first_line(error)})",
        ) from error


class Leader:
    """Calls the members of each version together."""

    def __init__(self, store: Any, num_sources: int, num_targets: int, timeout: float) -> None:
        self._store, self._timeout = store, timeout
        self._sources = [f"{_SOURCE} {rank}" for rank in range(num_sources)]
        self._num_targets = num_targets
        self._num_heard: dict[str, int] = {}
        self._expected: set[str] = set()
        self._doubtful: set[str] = set()
        self._ahead: set[str] = set()
        self._num_rounds = 0
        self._start = Start(0, [], 0)

    def start(self, version: int) -> Start:
        """Call all that ask for a version, and let them begin.

        Raises:
            RankFailedError: a rank that gives does not come, or no target does.
        """
        names = self._call(version)
        while len(names) == len(self._sources) and not self._ahead:
            # All who take died after they had asked. The others ask again.
            self._store.set(f"start {self._num_rounds}", json.dumps(Start(0, [], version)))
            names = self._call(version)
        self._expected = {name for name in names if name not in self._sources}
        number = self._start.number
        if names != self._start.names:
            number = self._num_rounds
        self._start = Start(number, names, version)
        self._store.set(f"start {self._num_rounds}", json.dumps(self._start))
        return self._start

    def _call(self, version: int) -> list[str]:
        """Call all that ask for a version; return who is there, by rank."""
        asking = self._wait_for_all(version)
        self._num_rounds += 1
        for name in asking:
            self._answer(name, {"round": self._num_rounds})
        names = [self._sources[0], *self._answering(asking)]
        self._refuse_absence([name for name in self._sources if name not in names], version)
        return names

    def note_lost(self, ranks: Iterable[int]) -> None:
        """Note that contact was lost with members of the last start, or that they were slow: those
        that take are waited for shortly, and left out of what is moved again if they do not come.
        """
        lost = [self._start.names[rank] for rank in ranks]
        self._doubtful = self._expected.intersection(lost)
        # Its group does not work any more.
        self._start = self._start._replace(names=[])
        logger.warning(
            "lost contact with %s in version %d, which is moved again",
            ", ".join(lost) or "a member",
            self._start.version,
        )

    def _refuse_absence(self, names: list[str], version: int) -> None:
        if names:
            raise lost_contact(
                {self._sources.index(name): TimeoutError("did not come") for name in names},
                f"{', '.join(names)} did not come to version {version}: it died, or does not call "
                "route.run. Look for the first error in its log.",
            )

    def _wait_for_all(self, version: int) -> list[str]:
        """Return who asks for a version: all that are expected, unless the time is over."""
        begin, is_over = time.monotonic(), False
        # Where contact was lost, others may notice only after the timeout.
        patience = self._timeout + ANSWER_SECONDS
        fewest = self._fewest_targets
        self._expected = set(itertools.filterfalse(self._has_left, self._expected))
        seconds = dict.fromkeys((*self._sources[1:], *self._expected), patience)
        seconds.update(dict.fromkeys(self._doubtful, min(ANSWER_SECONDS, self._timeout)))
        while not is_over:
            time.sleep(_POLL_SECONDS)
            waited = time.monotonic() - begin
            asking = self._asking(version)
            there = self._ahead.union(asking)
            absent = [name for name in seconds if name not in there and not self._has_left(name)]
            num_targets = len(there.difference(self._sources))
            has_enough = num_targets >= fewest or waited > patience
            is_over = has_enough and all(seconds[name] < waited for name in absent)
        self._leave_out(absent, num_targets, version)
        return asking

    def _has_left(self, name: str) -> bool:
        return bool(self._store.check([f"left {name}"]))

    @property
    def _fewest_targets(self) -> int:
        """The first version needs all targets, later ones any."""
        return 1 if self._num_rounds else self._num_targets

    def _leave_out(self, absent: list[str], num_targets: int, version: int) -> None:
        """Go on without those that are absent; refuse to where the others cannot."""
        self._refuse_absence([name for name in absent if name in self._sources], version)
        self._doubtful = set()
        fewest = self._fewest_targets
        text = f"{', '.join(sorted(absent))} did not come to version {version}"
        if num_targets < fewest:
            first = text if absent else f"More targets are needed for version {version}"
            raise lost_contact({}, f"{first}: {num_targets} are there, of {fewest}.")
        if absent:
            logger.warning("%s: left out until it does", text)

    def _asking(self, version: int) -> list[str]:
        """Return who has asked for a version; refuse others.

        If contact was lost at the end of a version, which is moved again, some have all of it:
        these are ahead, and wait for the next one.
        """
        is_again = self._is_again(version)
        self._ahead = set()
        num_targets = self._store.add("targets", 0)
        targets = [f"{_TARGET} {number}" for number in range(1, num_targets + 1)]
        asking = []
        for name in (*self._sources[1:], *targets):
            asked = f"ask {name} {self._num_heard.get(name, 0) + 1}"
            if not self._store.check([asked]):
                continue
            wanted = json.loads(self._store.get(asked))
            if wanted in (None, version):
                asking.append(name)
                continue
            if is_again and wanted > version:
                self._ahead.add(name)
                continue
            self._answer(name, {"refused": self._refusal(name, wanted, version)})
        return asking

    def _is_again(self, version: int) -> bool:
        """Tell whether a version was begun before, and contact was lost in it."""
        has_begun = self._start.number > 0
        return has_begun and not self._start.names and version == self._start.version

    def _refusal(self, name: str, wanted: int, version: int) -> str:
        text = (
            f"{name} asks for version {wanted}, and version {version} is moved: pass the same to "
            "route.run on both sides, or None to take what comes."
        )
        if wanted != self._start.version or not self._start.number:
            return text
        return (
            f"{text} Version {wanted} is over: if {name} lost contact at its end, with a member "
            "that died, it may have a part of it only, and needs the next version."
        )

    def _answer(self, name: str, answer: dict[str, Any]) -> None:
        number = self._num_heard.get(name, 0) + 1
        self._num_heard[name] = number
        self._store.set(f"call {name} {number}", json.dumps(answer))

    def _answering(self, names: list[str]) -> list[str]:
        """Return who answers the call."""
        deadline = time.monotonic() + min(ANSWER_SECONDS, self._timeout)
        absent = names
        while absent and time.monotonic() < deadline:
            keys = {name: f"here {self._num_rounds} {name}" for name in absent}
            absent = [name for name, key in keys.items() if not self._store.check([key])]
            time.sleep(_POLL_SECONDS if absent else 0)
        if absent:
            logger.warning("%s asked to take part and is gone: left out", ", ".join(absent))
        # Nobody waits for them, unless they ask again.
        self._expected.difference_update(absent)
        return [name for name in names if name not in absent]

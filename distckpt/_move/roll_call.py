"""The members of each version moved between jobs, called by a leader.

The jobs know nothing but an address. The leader, rank 0 of the job that gives, hosts a store there.
All other members append messages to one entry of it, the inbox, and each waits for an answer under
a key of its own. For each version the leader calls the members that have asked, and starts those
that come: a member that has died since it asked is noticed here, and not in the middle of the move.

The store does not grow with versions. The leader empties the inbox, and deletes an answer when the
next message of its member shows that it was read, or when its member cannot be waiting for it any
more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Iterable
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._base.messages import first_line
from distckpt._move.inbox import (
    ANSWER_SECONDS,
    INBOX,
    POLL_SECONDS,
    SOURCE,
    Message,
    Start,
    key_of_answer,
    message_of,
    reaching_leader,
    values_of,
    wait_for_key,
)
from distckpt._ranks.attendance import answer_of, lost_contact
from distckpt._ranks.groups import forget_group

logger = logging.getLogger(__name__)

MAX_TARGETS = 4096
"""Most targets that may ask for a version."""
_TARGET = "target"
_TARGET_NAME = re.compile(rf"{_TARGET} -?\d{{1,19}}")
_ASK = "ask"
_HERE = "here"
_LEFT = "left"
_AGAIN = Start(0, [], 0)
"""A start without members, after which all ask again."""


class Member:
    """A member that asks to take part: a target, or a giver other than the leader."""

    def __init__(self, store: Any, kind: str, number: int, timeout: float) -> None:
        # The leader may come late, and wait for other members then.
        self._store = store
        self._timeout = timeout
        self._limit = 2 * (timeout + ANSWER_SECONDS)
        self.name = f"{kind} {number}"
        self._num_sent = 0

    @classmethod
    def target(cls, store: Any, timeout: float) -> Member:
        """Join as the next target."""
        with reaching_leader():
            number = answer_of(lambda: store.add("targets", 1), timeout)
        return cls(store, _TARGET, number, timeout)

    def leave(self) -> None:
        """Sign off, so that no member waits for this one."""
        with contextlib.suppress(RuntimeError):
            self._send(_LEFT, None, ANSWER_SECONDS)

    def wait_for_start(self, version: int | None) -> Start:
        """Ask to take part in a version, and wait for its start.

        None takes the next version, whichever it is.

        Raises:
            CheckpointingException: the leader moves another version, or has too many targets.
            RankFailedError: the leader does not call within the timeout, or is gone.
        """
        while True:
            with reaching_leader():
                number, refusal = self._answer([int, str], _ASK, version)
                if refusal:
                    raise CheckpointingException(refusal)
                group, names, version_moved = self._answer([int, str, int], _HERE, number)
            start = Start(group, names.split("\n"), version_moved)
            if self.name in start.names:
                return start

    def _answer(self, types: list[type], kind: str, value: int | None) -> list[Any]:
        """Send a message, and wait for the answer."""
        self._send(kind, value, self._timeout)
        key = key_of_answer(self.name, self._num_sent)
        limit = self._limit
        answer = answer_of(lambda: wait_for_key(self._store, key, limit), limit + ANSWER_SECONDS)
        return values_of(answer, types, key)

    def _send(self, kind: str, value: int | None, seconds: float) -> None:
        self._num_sent += 1
        line = json.dumps(Message(self.name, self._num_sent, kind, value)) + "\n"
        answer_of(lambda: self._store.append(INBOX, line), seconds)


class Leader:
    """Calls the members of each version together."""

    def __init__(self, store: Any, num_sources: int, num_targets: int, timeout: float) -> None:
        self._store = store
        self._timeout = timeout
        self._sources = [f"{SOURCE} {rank}" for rank in range(num_sources)]
        self._num_targets = num_targets
        self._asks: dict[str, Message] = {}
        self._called: dict[str, Message | None] = {}
        # The key of each member's last answer, and the end of its time in the store.
        self._answers: dict[str, tuple[str, float]] = {}
        self._expected: set[str] = set()
        self._doubtful: set[str] = set()
        self._ahead: set[str] = set()
        self._num_read = self._num_rounds = 0
        self._start = self._last_start = _AGAIN
        # Whether contact with a member of the last start was lost.
        self._is_lost = False

    def start(self, version: int) -> Start:
        """Call all members that ask for a version, and let them begin.

        Raises:
            RankFailedError: a rank that gives does not come, or no target does.
            CheckpointingException: the store does not work any more.
        """
        # Where contact was lost, some members may notice only after the timeout.
        deadline = time.monotonic() + self._timeout + ANSWER_SECONDS
        try:
            self._forget_unread()
            return self._started(version, deadline)
        except RuntimeError as error:
            raise CheckpointingException(
                "The store that this process hosts for a Route does not work any more, perhaps "
                "because another program wrote to it: make the Route again, on all sides. "
                f"({first_line(error)})"
            ) from error

    def _started(self, version: int, deadline: float) -> Start:
        names = self._call(version, deadline)
        while len(names) == len(self._sources) and not self._ahead:
            # All targets died after they had asked. The other members ask again.
            self._let_begin(_AGAIN)
            if time.monotonic() > deadline:
                text = f"No target that asked for version {version} came when it was called."
                raise lost_contact({}, text)
            names = self._call(version, deadline)
        self._expected = {name for name in names if name not in self._sources}
        number = self._start.number
        if self._is_lost or names != self._start.names:
            number = self._num_rounds
            # The group before the last: members may still examine the last one.
            forget_group(self._store, self._last_start.number, len(self._last_start.names))
            self._last_start = self._start
        self._start = Start(number, names, version)
        self._is_lost = False
        self._let_begin(self._start)
        return self._start

    def _call(self, version: int, deadline: float) -> list[str]:
        """Call all members that ask for a version; return the ones present, by rank."""
        asking = self._wait_for_all(version, deadline)
        self._num_rounds += 1
        self._called = dict.fromkeys(asking)
        for name in asking:
            self._answer(self._asks.pop(name), self._num_rounds, "")
        self._wait_for_called()
        names = [self._sources[0], *(name for name in asking if self._called.get(name))]
        absent = [name for name in self._sources if name not in names]
        if absent:
            self._let_begin(_AGAIN)
        self._refuse_absence(absent, version)
        return names

    def _let_begin(self, start: Start) -> None:
        """Answer all members that came when they were called."""
        for message in filter(None, self._called.values()):
            self._answer(message, start.number, "\n".join(start.names), start.version)
        self._called = {}

    def note_lost(self, ranks: Iterable[int]) -> None:
        """Note that contact with members of the last start was lost. Slow members count as lost.

        The leader waits only shortly for those among them that take, and leaves them out of the
        repeated move if they do not come.
        """
        lost = [self._start.names[rank] for rank in ranks]
        self._doubtful = self._expected.intersection(lost)
        # Its group does not work any more.
        self._is_lost = True
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

    def _wait_for_all(self, version: int, deadline: float) -> list[str]:
        """Return the members that ask for a version.

        These are all expected ones, unless the time is over.
        """
        now = time.monotonic()
        soon = min(now + min(ANSWER_SECONDS, self._timeout), deadline)
        is_over = False
        while not is_over:
            time.sleep(POLL_SECONDS)
            self._read_inbox()
            now = time.monotonic()
            asking = self._asking(version)
            present = self._ahead.union(asking)
            absent = self._expected.union(self._sources[1:]).difference(present)
            num_targets = len(present.difference(self._sources))
            has_enough = num_targets >= self._fewest_targets or now > deadline
            limit = deadline
            if absent <= self._doubtful:
                limit = soon
            is_over = has_enough and (not absent or now > limit)
        self._leave_out(sorted(absent, key=_order), num_targets, version)
        return asking

    @property
    def _fewest_targets(self) -> int:
        """The first version needs all targets, later ones any."""
        if self._num_rounds:
            return 1
        return self._num_targets

    def _leave_out(self, absent: list[str], num_targets: int, version: int) -> None:
        """Go on without absent members; refuse where the rest cannot."""
        self._refuse_absence([name for name in absent if name in self._sources], version)
        self._doubtful = set()
        fewest = self._fewest_targets
        text = f"{', '.join(absent)} did not come to version {version}"
        if num_targets < fewest:
            first = text
            if not absent:
                first = f"More targets are needed for version {version}"
            raise lost_contact({}, f"{first}: {num_targets} are there, of {fewest}.")
        if absent:
            logger.warning("%s: left out until it does", text)

    def _asking(self, version: int) -> list[str]:
        """Return the members that have asked for a version, by rank; refuse other requests.

        If contact was lost at the end of a version, which is moved again, some members have all of
        it: these are ahead, and wait for the next one.
        """
        is_again = self._is_lost and version == self._start.version
        self._ahead = set()
        asking = []
        for name, ask in list(self._asks.items()):
            requested = version if ask.value is None else ask.value
            if requested == version:
                asking.append(name)
            elif is_again and requested > version:
                self._ahead.add(name)
            else:
                self._answer(self._asks.pop(name), 0, self._refusal(name, requested, version))
        return sorted(asking, key=_order)

    def _refusal(self, name: str, requested: int, version: int) -> str:
        text = (
            f"{name} asks for version {requested}, and version {version} is moved: pass the same "
            "to route.run on both sides, or None to take what comes."
        )
        if requested != self._start.version or not self._start.number:
            return text
        return (
            f"{text} Version {requested} is over: if {name} lost contact at its end, with a member "
            "that died, it may have a part of it only, and needs the next version."
        )

    def _wait_for_called(self) -> None:
        """Wait until all called members have come. Members that are alive come at once."""
        deadline = time.monotonic() + min(ANSWER_SECONDS, self._timeout)
        while None in self._called.values() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._read_inbox()
        absent = [name for name, message in self._called.items() if message is None]
        if absent:
            logger.warning("%s asked to take part and is gone: left out", ", ".join(absent))
        # No member waits for them, unless they ask again.
        self._expected.difference_update(absent)

    def _read_inbox(self) -> None:
        """Act on all messages that have come."""
        text = self._store.get(INBOX)
        lines = text[self._num_read :].splitlines()
        others = []
        self._num_read = len(text)
        # The inbox is emptied unless something was appended meanwhile.
        if text and not self._store.compare_set(INBOX, text, ""):
            self._num_read = 0
        for line in lines:
            message = message_of(line)
            if message is not None and self._knows(message):
                self._take(message)
            else:
                others.append(line)
        if others:
            logger.warning(
                "%d messages to this Route are of another form, such as %.60r: another program "
                "reaches its port",
                len(others),
                others[0],
            )

    def _knows(self, message: Message) -> bool:
        is_member = _TARGET_NAME.fullmatch(message.name) or message.name in self._sources[1:]
        return bool(is_member) and message.kind in (_ASK, _HERE, _LEFT)

    def _take(self, message: Message) -> None:
        name = message.name
        # It has read the earlier answer.
        self._forget(name)
        if message.kind == _LEFT:
            self._asks.pop(name, None)
            self._called.pop(name, None)
            self._expected.discard(name)
        elif message.kind == _HERE:
            self._take_presence(message)
        elif name in self._asks or len(self._asks) < MAX_TARGETS + len(self._sources):
            self._asks[name] = message
        else:
            text = f"More than {MAX_TARGETS} targets ask for a version: {name} is left out."
            self._answer(message, 0, text)

    def _take_presence(self, message: Message) -> None:
        is_called = message.name in self._called
        if is_called and message.value == self._num_rounds:
            self._called[message.name] = message
        else:
            # It was left out of its round.
            self._answer(message, 0, "", 0)

    def _answer(self, message: Message, *values: Any) -> None:
        key = key_of_answer(message.name, message.number)
        # A member waits no longer, if it has the same timeout.
        deadline = time.monotonic() + 2 * (self._timeout + ANSWER_SECONDS)
        self._answers[message.name] = (key, deadline)
        self._store.set(key, json.dumps(values))

    def _forget(self, name: str) -> None:
        if name in self._answers:
            key, _ = self._answers.pop(name)
            self._store.delete_key(key)

    def _forget_unread(self) -> None:
        """Forget the answers to members that do not read them any more."""
        now = time.monotonic()
        for name, (_, deadline) in list(self._answers.items()):
            if deadline < now:
                self._forget(name)


def _order(name: str) -> tuple[str, int]:
    """Sort names by kind and number."""
    kind, number = name.rsplit(" ", 1)
    return kind, int(number)

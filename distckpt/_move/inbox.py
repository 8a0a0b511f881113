"""The store of a roll call: its leader's inbox, and answers."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from types import NoneType
from typing import Any, NamedTuple

from distckpt._base.errors import CheckpointingException
from distckpt._base.messages import first_line
from distckpt._base.version import __version__
from distckpt._ranks.attendance import answer_of, lost_contact

ANSWER_SECONDS = 5.0
"""Seconds for a called member's answer, or a lost member's return."""
POLL_SECONDS = 0.005
_MAX_POLL_SECONDS = 0.04
SOURCE = "source rank"
_HOST = "distckpt"
"""Key of the number and the release of a leader."""
INBOX = "inbox"
"""Key of the messages to the leader, a line each."""


def name_host(store: Any) -> int:
    """Announce the leader of a store, and return a number for it."""
    number = secrets.randbits(61)
    store.set(INBOX, "")
    store.set(_HOST, json.dumps([number, __version__]))
    return number


def check_host(store: Any, address: str, timeout: float) -> int:
    """Return the number of the leader that hosts a store.

    Raises:
        CheckpointingException: none does, or it is of another release, which may plan otherwise.
        RankFailedError: it is gone.
    """
    try:
        with reaching_leader(AbsentKeyError):
            text = answer_of(lambda: wait_for_key(store, _HOST, timeout), timeout + ANSWER_SECONDS)
        number, release = values_of(text, [int, str], _HOST)
    except (AbsentKeyError, _OtherFormError) as error:
        raise CheckpointingException(
            f"What answers at {address} is not the trainer of a Route ({first_line(error)}): give "
            "the Route a port that no other program uses, such as torchrun."
        ) from error
    if release != __version__:
        raise CheckpointingException(
            f"The trainer at {address} has distckpt {release}, and this process {__version__}: "
            "install the same release on both sides."
        )
    return int(number)


class AbsentKeyError(RuntimeError):
    """A store did not get a key in time."""


class _OtherFormError(CheckpointingException):
    """A store holds a value that does not come from a Route."""


def values_of(text: bytes, types: list[type], key: str) -> list[Any]:
    """Return the values of these types in a JSON list."""
    with contextlib.suppress(ValueError, RecursionError):
        values = json.loads(text)
        if isinstance(values, list) and list(map(type, values)) == types:
            return values
    raise _OtherFormError(
        f"The store of this Route holds {text[:60]!r} under {key!r}, which no Route writes there: "
        "give it a port that no other program uses."
    )


def wait_for_key(store: Any, key: str, seconds: float) -> bytes:
    """Wait for a key."""
    deadline = time.monotonic() + seconds
    step = POLL_SECONDS
    # Not by `wait` of the store: torch prints a warning whenever that ends without the key.
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise AbsentKeyError(f"no {key!r} within {seconds:g} s")
        time.sleep(step)
        step = min(2 * step, _MAX_POLL_SECONDS)
    value: bytes = store.get(key)
    return value


class Start(NamedTuple):
    """The members of a move, by rank: the leader, other givers, then targets.

    `number` tells groups of members apart; a group stays as long as its members do.
    """

    number: int
    names: list[str]
    version: int


class Message(NamedTuple):
    """A message in the inbox.

    It is one line.

    Attributes:
        name: of the member that sends it.
        number: counts the messages of a member.
        kind: "ask", "here" or "left".
        value: the version that is asked for, None for any; or the round that the member comes to.
    """

    name: str
    number: int
    kind: str
    value: int | None


def message_of(line: bytes) -> Message | None:
    """Return the message of a line, or None for other forms."""
    for type_of_value in (int, NoneType):
        with contextlib.suppress(_OtherFormError):
            return Message(*values_of(line, [str, int, str, type_of_value], INBOX))
    return None


def key_of_answer(name: str, number: int) -> str:
    """Return the key of the answer to a message of a member."""
    return f"answer {number} to {name}"


@contextlib.contextmanager
def reaching_leader(*passed: type[RuntimeError]) -> Iterator[None]:
    """Turn errors of a store into one about the leader, unless `passed`."""
    try:
        yield
    except passed:
        raise
    except RuntimeError as error:
        raise lost_contact(
            {0: TimeoutError("did not respond, or died")},
            f"Lost contact with {SOURCE} 0, which hosts the address: it ended or died, or has "
            "moved no version within the timeout. Make a new Route to take versions of one that "
            f"starts again there. ({first_line(error)})",
        ) from error

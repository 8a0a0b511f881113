"""Agreements between ranks, cached so that equal descriptions are sent only once."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from distckpt._ranks.collectives import Ranks

_MAX_LATEST = 16


class Agreement(NamedTuple):
    """A decision of the coordinator for this rank.

    Attributes:
        number: the same on all ranks, and different for each agreement.
        result: for this rank.
        descriptions: on the coordinator, the descriptions from all ranks.
    """

    number: int
    result: bytes
    descriptions: list[bytes]


Agreements: TypeAlias = dict[bytes, Agreement]
"""The latest agreements of one rank, by the hash of its description."""


def reach(
    latest: Agreements,
    ranks: Ranks,
    name: str,
    description: bytes,
    decide: Callable[[Sequence[bytes]], Sequence[bytes]],
) -> Agreement:
    """Let the coordinator decide from all descriptions, unless it already has.

    Collective operation: all ranks must call it. When nothing has changed on any of them, one
    number is exchanged. `decide` returns a result for each rank.
    """
    settings = f"{name} {ranks.rank} {ranks.size} ".encode()
    key = hashlib.blake2b(settings + description, digest_size=16).digest()
    known = latest.pop(key, None)
    is_kept = ranks.all_equal(-1 - ranks.rank if known is None else known.number)
    if known is None or not is_kept:
        (descriptions,) = ranks.gather_once([description])

        def with_number() -> list[bytes]:
            number = secrets.randbits(61).to_bytes(8, "big")
            return [number + result for result in decide(descriptions)]

        sent = ranks.decide_each(name, with_number)
        known = Agreement(int.from_bytes(sent[:8], "big"), sent[8:], descriptions)
    latest[key] = known
    while len(latest) > _MAX_LATEST:
        del latest[next(iter(latest))]
    return known

"""Whether ranks make the same call with the same settings; as values, which they exchange."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

Call: TypeAlias = dict[str, str]
"""The "call" and "phase" that a rank is in, and its settings by name."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def describe_call(operation: str | None, phase: str, settings: Mapping[str, object]) -> Call:
    """Describe what a rank does in words that are the same on all ranks that do the same."""
    # The location of a background save is left out: nodes may mount one file system in different places.
    call = (operation or "").partition(" to ")[0]
    texts = {name: _ADDRESS.sub("", repr(value)) for name, value in settings.items()}
    return {"call": call, "phase": phase, **texts}


def number_of(call: Call) -> int:
    """Return a number of 56 bits that stands for a call."""
    return int.from_bytes(hashlib.blake2b(json.dumps(call).encode(), digest_size=7).digest(), "big")


def describe_difference(calls: Sequence[Call]) -> str:
    """Return the message about calls, by rank, that are not the same."""
    name = next((name for name in ("call", *calls[0]) if len({call.get(name) for call in calls}) > 1), "phase")
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

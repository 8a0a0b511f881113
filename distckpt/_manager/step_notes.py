"""What ranks say about a step when they save it, and what its marker then notes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distckpt._manager.steps import finite_numbers


@dataclass(frozen=True)
class StepNote:
    """What a rank, or all ranks together, say about a step.

    Attributes:
        metrics: those that are finite numbers.
        names: names of all metrics.
        pinned: whether the step is never removed.
    """

    metrics: Mapping[str, float]
    names: frozenset[str]
    pinned: bool


def encode_note(metrics: Mapping[str, Any], pinned: bool) -> bytes:
    """Encode what this rank says about a step.

    Raises:
        TypeError: a metric is not a number.
    """
    names = [str(name) for name in metrics]
    return json.dumps([finite_numbers(metrics), names, bool(pinned)]).encode()


def united_note(encoded: Sequence[bytes]) -> StepNote:
    """Unite what all ranks say, in the order of their ranks: the lowest rank with a metric decides
    about its value.
    """
    metrics: dict[str, float] = {}
    names: set[str] = set()
    is_pinned = False
    for text in reversed(encoded):
        numbers, names_of_rank, pinned = json.loads(text)
        metrics |= numbers
        names.update(names_of_rank)
        is_pinned = is_pinned or pinned
    return StepNote(metrics, frozenset(names), is_pinned)

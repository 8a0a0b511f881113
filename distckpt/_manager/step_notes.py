"""The facts of ranks about a step, and the marker's note."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distckpt._manager.steps import finite_numbers


@dataclass(frozen=True)
class StepNote:
    """The facts of a rank, or of all ranks, about a step.

    Attributes:
        metrics: the metrics that are finite numbers.
        names: names of all metrics.
        pinned: whether the step is never removed.
    """

    metrics: Mapping[str, float]
    names: frozenset[str]
    pinned: bool


def encode_note(metrics: Mapping[str, Any], pinned: bool) -> bytes:
    """Encode the facts of this rank about a step.

    Raises:
        TypeError: a metric is not a number.
    """
    names = list(map(str, metrics))
    return json.dumps([finite_numbers(metrics), names, bool(pinned)]).encode()


def united_note(encoded: Sequence[bytes]) -> StepNote:
    """Unite the facts of all ranks; the lowest rank with a metric counts."""
    metrics: dict[str, float] = {}
    names: set[str] = set()
    is_pinned = False
    for text in reversed(encoded):
        numbers, names_of_rank, pinned = json.loads(text)
        metrics |= numbers
        names.update(names_of_rank)
        is_pinned = is_pinned or pinned
    return StepNote(metrics, frozenset(names), is_pinned)

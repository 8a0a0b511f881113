"""The values that ranks give, united in one dict."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from distckpt._base.messages import summarize_keys
from distckpt._base.tree import HOLE
from distckpt._format import codec

logger = logging.getLogger(__name__)


def united_values(values_by_rank: Mapping[int, Any]) -> Any:
    """Unite nested dicts of values; the first rank that gives a value counts."""
    united: Any = {}
    for values in values_by_rank.values():
        united = _united(united, values)
    return united


def _united(first: Any, other: Any) -> Any:
    if first is HOLE:
        return other
    if not (isinstance(first, dict) and isinstance(other, dict)):
        return first
    united = copy.copy(first)
    for key, value in other.items():
        united[key] = _united(united[key], value) if key in united else value
    return united


def warn_of_differences(values_by_rank: Mapping[int, Any]) -> None:
    """Warn of values that differ between ranks."""
    first_values: dict[str, tuple[int, str]] = {}
    differing: dict[tuple[int, int], list[str]] = {}
    for rank, values in values_by_rank.items():
        for path, (digest, value) in codec.leaves(values).items():
            if value is HOLE:
                continue
            first, digest_of_first = first_values.setdefault(path, (rank, digest))
            if digest != digest_of_first:
                differing.setdefault((first, rank), []).append(path)
    for (first, rank), paths in differing.items():
        logger.warning(
            "ranks %d and %d give different values for %s: all ranks get that of rank %d. Were "
            "they at the same step?",
            first,
            rank,
            summarize_keys(paths),
            first,
        )
